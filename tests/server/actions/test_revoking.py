"""Revoked runs: nothing of theirs is left for the next run of the name, under any failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.server.http_caller import ADMIN_TOKEN, make_run, open_caller, tenants, token_file
from tests.server.shared import config_of, keeping, note_box, note_exec, serving

from tangram.core.action import Action, Outcome, Status
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.base import Lease
from tangram.managers.fake import FakeManager
from tangram.managers.work import Close, Work
from tangram.processes.streams import Output
from tangram.runtime.orchestrator import SettledAction
from tangram.runtime.wire import Caps
from tangram.server.http.auth import RunRecord
from tangram.server.journal.adapter import encode
from tangram.server.journal.journal import Journal


def test_a_run_of_which_something_cannot_be_ended_keeps_its_name_and_can_be_revoked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = True
    start = FakeManager.start

    async def sticking(
        self: FakeManager, action: Action, grant: Grant, work: Work, output: Output | None = None
    ) -> Lease:
        if isinstance(work, Close) and action.sandbox.endswith("stuck") and stuck:
            raise ManagerError("its directory is not empty")
        return await start(self, action, grant, work, output)

    monkeypatch.setattr(FakeManager, "start", sticking)

    async def main() -> None:
        nonlocal stuck
        async with tenants(tmp_path) as (_, admin, a, b):
            for name in ("stuck", "another"):
                await a.open(name)
            await b.open()
            await a.run("secret", "echo hidden", sandbox="another")
            await a.submit("c", {"type": "Commit", "image": "mine"}, sandbox="another")
            failed = await admin.request("DELETE", f"/v1/runs/{a.name}")
            assert failed.code == "manager_failed" and "stuck: its directory is not empty" in failed.error["message"]
            assert "not ended sandbox alphaville/stuck: its directory is not empty" in caplog.text
            left = (await admin.request("GET", "/v1/sandboxes")).json["sandboxes"]
            assert sorted(box["name"] for box in left) == ["alphaville/stuck", "bogota/box"]
            runs = (await admin.request("GET", "/v1/runs")).json["runs"]
            assert {run["name"]: run.get("ending", False) for run in runs} == {a.name: True, b.name: False}
            assert (await a.request("GET", "/v1/about")).code == "unauthorized"
            assert (await admin.request("POST", f"/v1/runs/{a.name}", {})).error["limit"] == "run_ending"
            assert (await admin.request("DELETE", f"/v1/runs/{a.name}")).code == "manager_failed"
            stuck = False
            assert (await admin.request("DELETE", f"/v1/runs/{a.name}")).status == 204
            other = await make_run(admin, a.name)
            assert (await other.request("GET", "/v1/sandboxes")).json == {"sandboxes": []}
            assert (await other.request("GET", "/v1/actions/secret", wait_s=0)).code == "not_found"
            assert (await other.request("DELETE", "/v1/images/mine")).code == "not_found"
            assert len((await b.request("GET", "/v1/sandboxes")).json["sandboxes"]) == 1

    asyncio.run(main())


def test_an_interrupted_revocation_is_completed_before_the_service_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal as a kill in the middle of it leaves one, and a manager that has kept the sandboxes."""
    closed = keeping(monkeypatch, "code/box", "math/box")

    async def main() -> None:
        record = msgspec.msgpack.encode(RunRecord(weight=1.0, caps=Caps(), made_at=0.0))
        async with Journal(config_of(tmp_path).service.journal) as journal:
            await journal.record_run_ending("code", record)
            for name in ("code/box", "math/box"):
                await note_box(journal, name)
            await note_exec(journal, "code/done", sandbox="box")
            await note_exec(journal, "code/queued", sandbox="box")
            await note_exec(journal, "code/running", sandbox="box", started=True, idempotent=True)
            outcome = Outcome(action="code/done", status=Status.SUCCEEDED)
            await journal.record_settled("code/done", encode(SettledAction(outcome=outcome)))
        async with (
            serving(tmp_path, admin_token_file=str(token_file(tmp_path))) as up,
            open_caller(up.address, ADMIN_TOKEN) as admin,
        ):
            assert closed == ["code/box"]
            assert up.recovery_report.queued == up.recovery_report.rerun == 0
            code = await make_run(admin, "code")
            assert (await code.request("GET", "/v1/sandboxes")).json == {"sandboxes": []}
            for id in ("done", "queued", "running"):
                assert (await code.request("GET", f"/v1/actions/{id}", wait_s=0)).code == "not_found"
            boxes = (await admin.request("GET", "/v1/sandboxes")).json["sandboxes"]
            assert [box["name"] for box in boxes] == ["math/box"]

    asyncio.run(main())
