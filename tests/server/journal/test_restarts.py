"""A service that is killed, stopped and started again: nothing is lost, and nothing runs twice unasked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.chaos.conftest import mounts_below, processes_of, until, until_runs, visible_pids
from tests.client.conftest import why_not
from tests.owner_cgroups import owner_names
from tests.server.process import Process
from tests.server.shared import wire_of

from tangram.client.client import Client, connect
from tangram.client.remote_connection import RemoteConnection
from tangram.core.action import Status
from tangram.errors import ManagerError, SessionEnded
from tangram.processes.streams import SESSION_SHELL_SCRIPT
from tangram.sim.trace_summary import summarize

DEADLINE_S = 120.0
STOPPING = "stopping signal=SIGTERM"
"""The log message of a service that is asked to stop."""


@pytest.fixture
def kept(tmp_path: Path) -> Process:
    """A service whose sandboxes are real, and outlive it."""
    reason = why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return Process(tmp_path / "service", backend="sandbox", node="cores = 2")


def play(process: Process, test: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), connect(process.url) as client:
            await test(client)

    with process:
        asyncio.run(main())
    assert "Traceback" not in process.log, process.log
    owners = process.folder / "state" / "owners"
    assert not owners.exists() or list(owners.iterdir()) == [], "sandboxes were closed, and something is left"


async def restarted(process: Process, *, kill: bool = True) -> None:
    await asyncio.to_thread(process.kill if kill else process.stop)
    await asyncio.to_thread(process.start)


async def until_running(path: str, box: object) -> None:
    """A command that says so by making a file."""
    while True:
        try:
            await box.read(path)  # type: ignore[attr-defined]
            return
        except Exception:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_a_sandbox_is_there_after_a_restart_with_its_files_and_what_ran_in_it(kept: Process, kill: bool) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            await box.write("file", "kept")
            beat = "(while :; do date +%s%N > beat; sleep 0.01; done) > /dev/null 2>&1 &"
            await box.exec(f"{beat} until [ -s beat ]; do sleep 0.01; done")
            image = await box.commit("made")
            await restarted(kept, kill=kill)
            beats = "cp beat before; for n in $(seq 600); do cmp -s before beat || exit 0; sleep 0.05; done; exit 1"
            assert (await box.exec(beats)).ok, "what ran in the background does not run any more"
            assert await box.read_text("file") == "kept"
            async with t.sandbox(image=image, memory="128MiB") as other:
                assert (await other.exec("cat file")).stdout == "kept"

    play(kept, test)
    assert "adopted" in kept.log


def test_what_ran_is_lost_and_what_may_run_again_does_and_what_waited_comes_in_its_order(kept: Process) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="256MiB") as box:
            once = asyncio.create_task(box.exec("echo once >> log; touch a; sleep 60; echo end >> log", cpus=1))
            again = asyncio.create_task(
                box.exec("echo again >> log; touch b; test -e go || sleep 60", cpus=1, idempotent=True)
            )
            await until_running("a", box)
            await until_running("b", box)
            waiting = [asyncio.create_task(box.exec(f"echo {n} >> order", cpus=2)) for n in range(5)]
            await until_waiting(t, 5)
            await box.write("go", "")
            await restarted(kept)
            lost = await once
            assert lost.status is Status.LOST and "restarted while it ran" in lost.reason
            assert (await again).ok
            assert all(result.ok for result in await asyncio.gather(*waiting))
            assert sorted((await box.read_text("log")).split()) == ["again", "again", "once"]
            assert sorted((await box.read_text("order")).split()) == list("01234")

    play(kept, test)


def test_actions_lost_by_a_restart_appear_wherever_ends_do_and_are_counted_once(tmp_path: Path) -> None:
    process = Process(tmp_path / "service", backend="process", node="cores = 1")

    async def test(t: Client) -> None:
        wire = wire_of(t)
        async with t.sandbox(memory="64MiB") as box:
            running = asyncio.create_task(box.exec("touch a; sleep 60", cpus=1))
            await until_running("a", box)
            waiting = asyncio.create_task(box.exec("true", cpus=1))
            await until_waiting(t, 1)
            await restarted(process)
            reasons = {(await running).reason, (await waiting).reason}
            assert len(reasons) == 2
            view = msgspec.json.decode(await wire.call("GET", "/v1/view"))
            assert view["runs"][0]["settled"] == {"lost": 2} and view["runs"][0]["act"]["count"] == 0
            rows = msgspec.json.decode(await wire.call("GET", "/v1/timeline"))["rows"]
            assert [row[5] for row in rows] == ["lost", "lost"]
            story = msgspec.json.decode(await wire.call("GET", f"/v1/actions/{rows[0][1]}/story"))
            assert story["status"] == "lost" and story["explanation"] == "the service was restarted while it ran"
            assert story["lines"][-1]["text"] == "lost: the service was restarted while it ran"
            metrics = (await wire.call("GET", "/metrics")).decode()
            assert 'tangram_actions_total{run="default",status="lost"} 2' in metrics
            await asyncio.to_thread(process.stop)
            summary = summarize(process.folder / "events.jsonl")
            assert [run.statuses for run in summary.runs] == [{"lost": 2}] and summary.unsettled == 0
            await asyncio.to_thread(process.start)
            assert 'status="lost"' not in (await wire.call("GET", "/metrics")).decode(), "it was counted before"

    play(process, test)


async def until_waiting(t: Client, count: int) -> None:
    """Whether the queue has the given number of actions."""
    wire = wire_of(t)
    while msgspec.json.decode(await wire.call("GET", "/v1/view"))["waiting_total"] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_an_unfetched_result_survives_a_kill(tmp_path: Path) -> None:
    process = Process(tmp_path / "service", backend="process")

    async def test(t: Client) -> None:
        wire = wire_of(t)
        async with t.sandbox(memory="64MiB") as box:
            body = {"id": "mine", "sandbox": box.name, "work": {"type": "Exec", "command": "echo $$; date +%s%N"}}
            first = await wire.call("POST", "/v1/actions", body, wait_s=30.0)
            assert b"succeeded" in first
            await restarted(process)
            assert await wire.call("GET", "/v1/actions/mine", wait_s=0.0) == first
            assert await wire.call("POST", "/v1/actions", body, wait_s=0.0) == first, "it ran again"

    play(process, test)


def test_actions_in_a_sandbox_that_did_not_survive_are_lost_with_the_reason(tmp_path: Path) -> None:
    process = Process(tmp_path / "service", backend="process")

    async def test(t: Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("true")).ok
            await restarted(process)
            result = await box.exec("true")
            assert result.status is Status.LOST and "is gone" in result.reason
            with pytest.raises(ManagerError, match="is gone"):
                await box.read("x")

    play(process, test)
    assert "sandbox lost" in process.log


def test_a_stop_lets_what_runs_end_and_a_second_one_does_not_wait(kept: Process) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            short = asyncio.create_task(box.exec("touch a; sleep 1; echo whole", cpus=1))
            await until_running("a", box)
            await restarted(kept, kill=False)
            assert (await short).stdout == "whole\n"
            long = asyncio.create_task(box.exec("touch b; sleep 60", cpus=1))
            await until_running("b", box)
            before = kept.log.count(STOPPING)
            os.kill(kept.pid, 15)
            while kept.log.count(STOPPING) == before:  # noqa: ASYNC110 - two signals at once would count as one
                await asyncio.sleep(0.01)
            await restarted(kept, kill=False)
            assert (await long).status is Status.LOST

    play(kept, test)


def test_a_service_that_is_killed_while_it_drains_loses_nothing(kept: Process) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            running = asyncio.create_task(box.exec("touch a; sleep 60", cpus=2))
            await until_running("a", box)
            waiting = asyncio.create_task(box.exec("echo waited", cpus=2))
            await until_waiting(t, 1)
            os.kill(kept.pid, 15)
            while STOPPING not in kept.log:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await restarted(kept)
            assert (await running).status is Status.LOST
            assert (await waiting).stdout == "waited\n"

    play(kept, test)


def test_a_session_that_ended_with_the_service_reports_it_beside_running_programs_of_its_sandbox(kept: Process) -> None:
    """Its shell is awake while another action runs, and ends by itself when the service does: here it is seen to end
    before the service."""

    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box, box.session() as session:
            await session.exec("export X=42; cd /tmp")
            running = asyncio.create_task(box.exec("touch a; sleep 60", cpus=1))
            await until_running("a", box)
            os.kill(kept.pid, signal.SIGSTOP)
            (shell,) = visible_pids(SESSION_SHELL_SCRIPT, kept.folder / "state")
            os.kill(shell, signal.SIGKILL)
            await until(lambda: not os.path.exists(f"/proc/{shell}"), "its spawner has noticed its end")
            await restarted(kept)
            assert (await running).status is Status.LOST
            result = await session.exec("echo X=$X; pwd")
            assert (result.session_ended, result.stdout) == (True, "")
            with pytest.raises(SessionEnded):
                await session.exec("true")

    play(kept, test)


def test_a_service_that_closes_sandboxes_takes_over_what_was_kept_and_its_stop_leaves_nothing(kept: Process) -> None:
    """Stop it for good, as an administrator would."""
    state = kept.folder / "state"

    async def test(t: Client) -> None:
        box = await t.sandbox(memory="128MiB").__aenter__()
        await box.write("file", "kept")
        await box.exec(f"(sleep 9301 > /dev/null 2>&1 &); {until_runs('9301')}")
        (owner,) = [path.name for path in (state / "owners").iterdir()]
        kept.configure(service='sandboxes_on_stop = "close"')
        await restarted(kept, kill=False)
        assert await box.read_text("file") == "kept", "it was not taken over"
        assert owner in owner_names() and visible_pids("9301", state)
        await asyncio.to_thread(kept.stop)
        assert list((state / "owners").iterdir()) == [] and owner not in owner_names()
        assert processes_of(state, set()) == {} and not visible_pids("9301", state) and mounts_below(state) == []
        await asyncio.to_thread(kept.start)
        assert (await box.exec("true")).status is Status.LOST

    play(kept, test)
    assert "1 sandbox adopted" in kept.log and "did not survive the end" in kept.log


def test_two_services_on_one_journal_are_one_too_many(tmp_path: Path) -> None:
    process = Process(tmp_path / "service", backend="fake")
    with process:
        second = Process(tmp_path / "service", backend="fake")
        with pytest.raises(AssertionError, match=f"belongs to process {process.pid}"):
            second.start()
        assert second.ended() == 2


# ---- the journal, seen from outside -------------------------------------------------------------------------------


async def noted(wire: RemoteConnection, count: int, text: str) -> list[str]:
    """Ids of settled actions with unfetched results."""
    ids = [f"a{n}" for n in range(count)]
    for id in ids:
        body = {"id": id, "sandbox": "box", "work": {"type": "Exec", "command": f"echo {text}"}}
        await wire.call("POST", "/v1/actions", body, wait_s=30.0)
    return ids


@asynccontextmanager
async def open_wire(url: str, reconnect_s: float = 60.0) -> AsyncIterator[RemoteConnection]:
    wire = RemoteConnection(url, "", "", reconnect_s)
    await wire.open()
    try:
        yield wire
    finally:
        await wire.close()


OPEN = {"id": "open", "sandbox": "box", "work": {"type": "Open", "spec": {}}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_stops_the_service_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    process = Process(small_disk, backend="fake")
    process.start()

    async def fill() -> list[str]:
        acknowledged = []
        async with open_wire(process.url, reconnect_s=0.0) as wire:
            await wire.call("POST", "/v1/actions", OPEN, wait_s=30.0)
            for n in range(10_000):
                body = {"id": f"a{n}", "sandbox": "box", "work": {"type": "Exec", "command": f"echo {'x' * 50_000}"}}
                try:
                    reply = await wire.call("POST", "/v1/actions", body, wait_s=30.0)
                except ManagerError:
                    return acknowledged
                assert b"succeeded" in reply
                acknowledged.append(f"a{n}")
        raise AssertionError("the disk was never full")

    acknowledged = asyncio.run(fill())
    assert process.ended() == 1, "2 says that no start can help"
    assert "cannot be used" in process.log and acknowledged
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)

    async def look() -> None:
        async with open_wire(process.url) as wire:
            for id in acknowledged:
                assert b"succeeded" in await wire.call("GET", f"/v1/actions/{id}", wait_s=0.0)

    with process:
        asyncio.run(look())


def test_a_truncated_log_is_reported_and_earlier_commits_are_kept(tmp_path: Path) -> None:
    process = Process(tmp_path / "service", backend="fake")

    async def fill() -> list[str]:
        async with open_wire(process.url) as wire:
            await wire.call("POST", "/v1/actions", OPEN, wait_s=30.0)
            return await noted(wire, 20, "kept")

    process.start()
    ids = asyncio.run(fill())
    process.kill()
    wal = process.folder / "journal.db-wal"
    os.truncate(wal, wal.stat().st_size - 100)

    async def look() -> None:
        async with open_wire(process.url) as wire:
            for id in ids[:-1]:
                assert b"succeeded" in await wire.call("GET", f"/v1/actions/{id}", wait_s=0.0)

    with process:
        asyncio.run(look())
    assert "log" in process.log.split("recovered=")[2].splitlines()[0], process.log


def test_a_database_that_is_damaged_is_a_clear_stop(tmp_path: Path) -> None:
    process = Process(tmp_path / "service", backend="fake")
    process.start()
    process.stop()
    path = process.folder / "journal.db"
    content = bytearray(path.read_bytes())
    content[100:4000] = os.urandom(3900)
    path.write_bytes(content)
    with pytest.raises(AssertionError, match="is damaged"):
        process.start()
    assert process.ended() == 2
    assert path.read_bytes() == content, "something was changed"


def test_a_journal_that_other_users_could_write_is_refused(tmp_path: Path) -> None:
    process = Process(tmp_path / "service", backend="fake")
    process.folder.chmod(0o777)
    with pytest.raises(AssertionError, match="journal"):
        process.start()
    assert process.ended() == 2


def test_the_service_manager_is_notified_when_it_serves_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        notifications.bind(str(tmp_path / "notify"))
        notifications.settimeout(60.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with Process(tmp_path / "service", backend="fake"):
            assert notifications.recv(100) == b"READY=1"
        assert notifications.recv(100) == b"STOPPING=1"
