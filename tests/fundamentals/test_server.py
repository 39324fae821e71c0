"""The shared service in eight short steps. Read from top to bottom; `test_core.py` comes before.

`tangram serve` offers the pools of a machine over HTTP, so that several training runs share them. Each run has a token
and sees only what it owns. The service writes a journal, so accepted actions survive a crash. The service of this file
is a real process; the SDK and the command line use it as they would from another machine.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.conftest import why_not
from tests.server.process import Process
from typer.testing import CliRunner

import tangram
from tangram.cli import app
from tangram.errors import AdmissionRefused, InvalidAction, ManagerError

ADMIN_TOKEN = "an-admin-token-that-only-these-tests-use"
DEADLINE_S = 120.0
"""Time limit of a test, so that a hang fails."""


class Service(Process):
    """`tangram serve` on a free port, with an admin token: without one, every process of the machine is admin."""

    def __init__(self, folder: Path, backend: str) -> None:
        folder.mkdir(mode=0o700)
        (folder / "admin-token").write_text(ADMIN_TOKEN)
        (folder / "admin-token").chmod(0o600)
        super().__init__(folder, backend=backend, service='admin_token_file = "admin-token"', node="cores = 2")
        self.backend = backend

    def tangram(self, *words: str, token: str = ADMIN_TOKEN) -> str:
        """Runs one command of the command line and returns its output."""
        result = CliRunner().invoke(app, [*words, "--url", self.url, "--token", token], catch_exceptions=False)
        if result.exit_code:
            raise RuntimeError(result.stderr)
        return result.stdout

    def status(self, token: str = ADMIN_TOKEN) -> Any:
        return json.loads(self.tangram("status", "--json", token=token))

    def make_run(self, name: str, *options: str) -> str:
        return self.tangram("token", "create", name, *options).strip()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests; each test creates its own runs. Without root, sandboxes are plain processes."""
    reason = why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    with Service(tmp_path_factory.mktemp("server") / "service", "process" if reason else "sandbox") as service:
        yield service


def require_adoption(service: Service) -> None:
    if service.backend == "process":
        pytest.skip(f"plain processes end with the service, real sandboxes outlive it: {why_not()}")


def test_1_a_run_is_a_tenant_with_a_token(service: Service) -> None:
    """The admin creates a run, and its token is printed once. The token of a request determines its run; an unknown
    token is refused."""
    token = service.make_run("alice", "--weight", "2")  # twice the share of a run of weight 1
    assert "alice" in [run["name"] for run in json.loads(service.tangram("token", "list", "--json"))]
    with tangram.connect_sync(service.url, token=token):
        pass
    with pytest.raises(ManagerError, match="token"), tangram.connect_sync(service.url, token=token[:-1]):
        pass


def test_2_a_sandbox_of_the_service_works_like_a_local_one(service: Service) -> None:
    """Only the address and the token differ from an orchestrator inside the process. A failed command is a result with
    an exit code, not an exception."""
    token = service.make_run("bob")
    with tangram.connect_sync(service.url, token=token) as client, client.sandbox(memory="64MiB") as box:
        box.write("answer.py", "print(6 * 7)")
        assert box.exec("python3 answer.py").check().stdout == "42\n"
        result = box.exec("exit 3")
        assert (result.status, result.exit_code) == (tangram.Status.SUCCEEDED, 3)


def test_3_status_shows_that_an_idle_sandbox_holds_memory_and_no_core(service: Service) -> None:
    """Memory is reserved for the life of a sandbox, cores only while an action runs. `tangram status` and the dashboard
    show the same view."""
    token = service.make_run("carol")
    with tangram.connect_sync(service.url, token=token) as client, client.sandbox(memory="64MiB") as box:
        box.exec("true")
        view = service.status(token)
        held = {pool["kind"]: pool["held"] for pool in view["pools"]}
        assert held == {"cpu": 0, "memory": 64}
        [sandbox] = view["sandboxes"]
        assert (sandbox["run"], sandbox["memory_mib"], sandbox["active"]) == ("carol", 64, 0)
        assert sandbox["actions"] == 2  # opening a sandbox is an action too
    assert service.status(token)["sandboxes"] == []


def test_4_the_story_of_an_action_has_every_decision_about_it(service: Service) -> None:
    """A story covers an action from submission to its end, with its grants and times. Read it first when an action was
    slow."""
    token = service.make_run("dave")
    with tangram.connect_sync(service.url, token=token) as client, client.sandbox(memory="64MiB") as box:
        result = box.exec("true", cpus=1)
    story = json.loads(service.tangram("story", result.action, "--json", token=token))
    assert (story["run"], story["status"]) == ("dave", "succeeded")
    assert [line["text"].split()[0].strip(";") for line in story["lines"]] == [
        "submitted", "granted", "started", "succeeded",
    ]  # fmt: skip
    assert result.timing.act_s >= result.timing.execution_s > 0.0


def test_5_a_run_learns_nothing_about_another_run(service: Service) -> None:
    """Names of other runs do not exist for a token: the response is the same for an action of another run and for one
    that never existed. Only the units that others hold are visible, because they explain waiting."""
    erin, frank = service.make_run("erin"), service.make_run("frank")
    with tangram.connect_sync(service.url, token=erin) as client, client.sandbox(memory="64MiB") as box:
        action = box.exec("true").action
        for name in (action, f"erin/{action}", "never-was"):
            with pytest.raises(RuntimeError, match="there is no action"):
                service.tangram("story", name, token=frank)
        view = service.status(frank)
        assert view["sandboxes"] == [] and "erin" not in json.dumps(view)
        assert max(pool["held"] for pool in view["pools"] if pool["kind"] == "memory") == 64
    with tangram.connect_sync(service.url, token=frank) as client, pytest.raises(InvalidAction, match="frank"):
        client.sandbox(run="erin").__enter__()


def test_6_a_request_above_a_limit_is_refused_at_once_with_its_name(service: Service) -> None:
    """Every run has caps on sandboxes, actions and requests. A request above one is refused with the name of the limit
    instead of waiting for a release that may never come."""
    token = service.make_run("grace", "--sandboxes", "1")
    with tangram.connect_sync(service.url, token=token) as client, client.sandbox(memory="64MiB"):
        with pytest.raises(AdmissionRefused) as refused:
            client.sandbox(memory="64MiB").__enter__()
        assert "sandboxes" in refused.value.limit


def test_7_a_restarted_service_adopts_its_sandboxes(service: Service) -> None:
    """Sandboxes are processes outside the service. After `kill -9` the next service reads the journal and adopts them
    with their files; the client reconnects automatically."""
    require_adoption(service)
    token = service.make_run("heidi")
    with tangram.connect_sync(service.url, token=token) as client, client.sandbox(memory="64MiB") as box:
        box.write("notes", "kept")
        service.kill()
        service.start()
        assert box.read_text("notes") == "kept"
        view = service.status(token)
        assert len(view["sandboxes"]) == 1 and "1 sandbox" in view["service"]["recovered"]


def test_8_an_action_that_was_interrupted_is_lost_unless_it_may_run_twice(service: Service) -> None:
    """After a crash it is unknown how much of a running command was executed. It ends as LOST, a failure of the
    infrastructure and never a reward of 0; an action declared idempotent runs again."""
    require_adoption(service)

    async def main() -> tuple[tangram.Result, tangram.Result]:
        began = {"once": asyncio.Event(), "twice": asyncio.Event()}
        async with (
            asyncio.timeout(DEADLINE_S),
            tangram.connect(service.url, token=token) as client,
            client.sandbox(memory="64MiB") as box,
        ):

            async def run(name: str) -> tangram.Result:
                command = f"test -e {name} && exit 0; touch {name}; echo began; sleep 600"
                return await box.exec(
                    command, cpus=0.5, idempotent=name == "twice", on_output=lambda stream, text: began[name].set()
                )

            running = asyncio.gather(run("once"), run("twice"))
            await asyncio.gather(began["once"].wait(), began["twice"].wait())
            await asyncio.to_thread(service.kill)
            await asyncio.to_thread(service.start)
            return await running

    token = service.make_run("ivan")
    once, twice = asyncio.run(main())
    assert (once.status, once.exit_code) == (tangram.Status.LOST, None)
    assert (twice.status, twice.exit_code) == (tangram.Status.SUCCEEDED, 0)
