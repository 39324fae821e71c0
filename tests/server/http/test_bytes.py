"""Bytes: how much of the memory and the disk of a service one run can take, and that it says when that is all."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.http_caller import (
    ADMIN_TOKEN,
    Caller,
    Line,
    line,
    local_service,
    make_run,
    open_caller,
    tenants,
    until,
)
from tests.server.shared import serving

from tangram.config import RunLimits
from tangram.server.components import STREAM_BYTES_MAX
from tangram.server.http import bodies, middleware
from tangram.server.journal.journal import RECORD_BYTES_MAX
from tangram.server.journal.store import JournalStore

MIB = 1 << 20
LARGE = 16 * MIB
"""More than sockets buffer of an unread response."""


def fed(size: int) -> dict[str, Any]:
    """A program with so much input."""
    return {"type": "Exec", "command": "true", "stdin": base64.b64encode(b"x" * size).decode()}


def wordy(size: int) -> dict[str, Any]:
    """A program with so much output."""
    return {"type": "Exec", "command": f"head -c {size} /dev/zero", "capture_bytes_max": size}


ALL = {"demand": {"pools": {"cpu": {"min": 1000, "max": 1000}}}}
"""Of a machine with one core."""


# ---- what waits -------------------------------------------------------------------------------------------------


def test_waiting_actions_are_limited_in_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        limits = RunLimits(waiting_bytes_max=MIB)
        async with tenants(tmp_path, limits=limits, cores=1) as (_, _, a, b):
            await a.open()
            await b.open()
            assert (await a.run("first", "sleep 1000", wait_s=0, **ALL)).status == 202
            for id in ("one", "two"):
                assert (await a.submit(id, fed(400_000), 0, sandbox="box", **ALL)).status == 202
            refused = await a.submit("three", fed(400_000), 0, sandbox="box", **ALL)
            assert (refused.status, refused.code, refused.error["limit"]) == (429, "refused", "waiting_bytes_max")
            assert (await a.submit("two", fed(400_000), 0, sandbox="box", **ALL)).status == 202, "it was taken in"
            assert (await b.submit("three", fed(400_000), 0, sandbox="box", **ALL)).status == 202
            await a.request("POST", "/v1/actions/one/cancel")
            await a.until("one", "settled")
            assert (await a.submit("three", fed(400_000), 0, sandbox="box", **ALL)).status == 202

    asyncio.run(main())


# ---- results ----------------------------------------------------------------------------------------------------


def test_unacknowledged_results_are_limited_in_bytes(tmp_path: Path) -> None:
    limits = RunLimits(results_bytes_max=MIB)

    async def fill(a: Caller) -> None:
        await a.open()
        command = "head -c 600000 /dev/zero"
        gate = "until [ -e go ]; do sleep 0.01; done"
        assert (await a.run("late", f"{gate}; {command}", wait_s=0)).status == 202
        for id in ("one", "two"):
            settled = (await a.run(id, command)).json["settled"]
            assert settled["outcome"]["status"] == "succeeded"
        refused = await a.run("three", command)
        assert (refused.status, refused.code, refused.error["limit"]) == (429, "refused", "results_bytes_max")
        again = await a.run("two", command)
        assert len(base64.b64decode(again.json["settled"]["executed"]["stdout"])) == 600_000
        await a.request("PUT", "/v1/sandboxes/box/files", body=b"", path="go")
        lost = (await a.request("GET", "/v1/actions/late", wait_s=30)).json["settled"]
        assert lost["outcome"]["status"] == "lost" and "results_bytes_max" in lost["outcome"]["reason"]
        assert "executed" not in lost

    async def main() -> None:
        async with tenants(tmp_path, backend="process", limits=limits) as (_, _, a, b):
            await fill(a)
            await b.open()
            assert (await b.run("one", "true")).status == 200
        token = {"admin_token_file": str(tmp_path / "token")}
        async with (
            serving(tmp_path, backend="process", limits=limits, **token) as up,
            open_caller(up.address, ADMIN_TOKEN) as admin,
        ):
            a = Caller(admin.session, up.address, a.token, a.name)
            work = {"type": "Open", "spec": {}}
            refused = await a.submit("o", work, sandbox="other")
            assert refused.error["limit"] == "results_bytes_max", "what was left before counts as well"
            assert (await a.request("POST", "/v1/acknowledge", {"actions": ["one", "one", "late"]})).status == 204
            assert (await a.submit("o", work, sandbox="other")).status == 200
            assert (await a.request("GET", "/v1/actions/two", wait_s=0)).json["state"] == "settled"

    asyncio.run(main())


# ---- large answers and bodies -----------------------------------------------------------------------------------


async def unread(raw: Line, caller: Caller, path: str) -> None:
    """A response in transit, of which only the beginning is read."""
    head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {caller.token}\r\n\r\n"
    await raw.send(head.encode())
    assert (await raw.reader.readuntil(b"\r\n")).split()[1] == b"200"
    raw.stop_reading()


@pytest.mark.parametrize(
    "path", ["/v1/actions/wordy", "/v1/sandboxes/box/files?path=large", "/v1/sandboxes/box/tree?path=large"]
)
def test_large_answers_that_a_run_does_not_read_hold_up_its_own_large_ones_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(bodies, "LARGE_RESPONSES_PER_TENANT_MAX", 2)

    async def main() -> None:
        async with tenants(tmp_path, backend="process") as (up, _, a, b):
            for caller in (a, b):
                await caller.open()
                await caller.submit("wordy", wordy(LARGE), sandbox="box")
                await caller.request("PUT", "/v1/sandboxes/box/files", body=b"\0" * LARGE, path="large")
            async with line(up.address) as one:
                async with line(up.address) as other:
                    for raw in (one, other):
                        await unread(raw, a, path)
                    third = asyncio.create_task(a.request("GET", path))
                    assert len((await b.request("GET", path)).content) > LARGE - 1
                    assert (await a.run("small", "echo small")).status == 200
                    assert not third.done(), "it is answered although two are under way"
                answer = await third
            assert answer.status == 200 and len(answer.content) == int(answer.headers["content-length"])
            assert len(answer.content) > LARGE - 1

    asyncio.run(main())


def test_a_large_result_is_the_same_on_every_route(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, backend="process") as (_, _, a, _):
            await a.open()
            work = {"type": "Exec", "command": "head -c 300000 /dev/zero; echo end"}
            first = await a.submit("x", work, sandbox="box")
            again = await a.submit("x", work, sandbox="box")
            looked = await a.request("GET", "/v1/actions/x")
            assert first.status == again.status == looked.status == 200
            assert first.json == again.json == looked.json
            out = base64.b64decode(first.json["settled"]["executed"]["stdout"])
            assert out == b"\0" * 300_000 + b"end\n" and first.headers["content-type"] == "application/json"

    asyncio.run(main())


def test_large_bodies_that_a_run_sends_slowly_hold_up_its_own_large_ones_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODIES_PER_TENANT_MAX", 2)
    begun: list[int] = []
    pieces = bodies.body_chunks

    def counting(request: Any, *args: Any) -> AsyncIterator[bytes]:
        begun.append(int(request.headers.get("content-length", "0")))
        return pieces(request, *args)

    monkeypatch.setattr(bodies, "body_chunks", counting)

    async def main() -> None:
        async with tenants(tmp_path) as (up, _, a, b), contextlib.AsyncExitStack() as stack:
            await a.open()
            await b.open()
            begun.clear()
            for _ in range(4):
                raw = await stack.enter_async_context(line(up.address))
                head = f"POST /v1/actions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {a.token}\r\n"
                await raw.send(f"{head}content-length: {MIB}\r\n\r\n{{".encode())
            await until(lambda: begun == [MIB, MIB])
            assert (await a.run("small", "echo small")).status == 200
            assert (await b.submit("large", fed(MIB), sandbox="box")).status == 200
            assert begun.count(MIB) == 2, "a third one of a is read although two are under way"

    asyncio.run(main())


# ---- what is deleted --------------------------------------------------------------------------------------------


def test_a_run_is_revoked_while_the_file_of_the_journal_is_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JournalStore, "vacuum", lambda self: True)  # a file that never ends

    async def main() -> None:
        async with tenants(tmp_path, backend="process") as (up, admin, a, _):
            await a.open()
            await a.submit("wordy", wordy(MIB), sandbox="box")
            compacting = asyncio.create_task(up.action_service.journal.compact())
            assert (await admin.request("DELETE", f"/v1/runs/{a.name}")).status == 204
            assert not compacting.done()
            again = await make_run(admin, a.name)
            assert (await again.request("GET", "/v1/actions/wordy", wait_s=0)).code == "not_found"
            assert up.action_service.journal.unfetched_bytes[a.name] == 0
            compacting.cancel()

    asyncio.run(main())


def test_a_result_that_the_journal_cannot_store_is_lost_at_no_cost_to_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("journal", "adapter"):
        monkeypatch.setattr(f"tangram.server.journal.{module}.RECORD_BYTES_MAX", 20_000)

    async def main() -> None:
        async with local_service(tmp_path) as caller:
            await caller.open()
            work = {"type": "Exec", "command": "cat; cat >&2", "stdin": base64.b64encode(b"x" * 15_000).decode()}
            outcome = (await caller.submit("large", work, sandbox="box")).json["settled"]["outcome"]
            assert outcome["status"] == "lost" and "a journal record has at most 20000" in outcome["reason"]
            assert (await caller.run("small", "echo fine")).json["settled"]["outcome"]["status"] == "succeeded"

    asyncio.run(main())


def test_the_kept_output_of_a_program_fits_into_the_journal_under_any_config(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path, limits=RunLimits(body_bytes_max=1 << 30)) as caller:
            await caller.open()
            work = {"type": "Exec", "command": "true", "capture_bytes_max": RECORD_BYTES_MAX // 2}
            assert (await caller.submit("too-much", work, sandbox="box")).error["limit"] == "capture_bytes_max"
            most = work | {"capture_bytes_max": STREAM_BYTES_MAX}
            assert (await caller.submit("most", most, sandbox="box")).json["state"] == "settled"

    asyncio.run(main())


# ---- the disk of temporary files --------------------------------------------------------------------------------


@pytest.fixture
def small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go, on a disk that is soon full."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    folder = tmp_path / "tmp"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(bodies, "SPOOL_BYTES", 1000)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_temporary_disk_is_reported_and_not_a_bug(
    tmp_path: Path, small_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"x" * 300_000  # large enough to be answered through a file

    async def main() -> None:
        async with local_service(tmp_path) as caller:
            await caller.open()
            work = {"type": "Exec", "command": "cat > large", "stdin": base64.b64encode(content).decode()}
            await caller.submit("make", work, sandbox="box")
            requests = (
                caller.request("PUT", "/v1/sandboxes/box/files", body=content, path="x"),
                caller.request("PUT", "/v1/sandboxes/box/tree", body=content, path="x"),
                caller.request("POST", "/v1/images", body=content),
                caller.request("GET", "/v1/sandboxes/box/files", path="large"),
                caller.request("GET", "/v1/sandboxes/box/tree", path="large"),
                caller.run("tell", "cat large"),
            )
            for failed in [await ask for ask in requests]:
                assert (failed.status, failed.code, failed.error["retry"]) == (502, "manager_failed", True), failed
                assert "TMPDIR" in failed.error["message"] and str(small_folder) not in failed.error["message"]
            assert len([each for each in caplog.records if "cannot write temporary files" in each.message]) == len(
                requests
            )
            small = await caller.request("PUT", "/v1/sandboxes/box/files", body=b"small", path="x")
            assert small.status == 204

    asyncio.run(main())
