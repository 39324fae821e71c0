"""Children that are forked by a process which has imported what they need."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.rl.processes import DEADLINE_S, gone, leaving_nothing, until

from tangram.processes.fork_server import ForkedChild, ForkServer
from tangram.processes.process_tree import SpawnedChild, WatchedProcess

PROGRAM = "tests.processes.fork_server_children"
THREADS = "tests.processes.fork_server_threads"


class Child:
    """A child, and the line on which it gets its commands."""

    def __init__(self) -> None:
        self.line, self.its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.settimeout(DEADLINE_S)
        self.number = self.its.fileno()
        self.out, self.writer = os.pipe()
        self.process: WatchedProcess | None = None

    async def start(self, fork_server: ForkServer, program: str = PROGRAM, **env: str) -> WatchedProcess:
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            self.process = await fork_server.spawn(
                program, [self.its.fileno()], name="a child", env={"PATH": os.environ["PATH"]} | env,
                streams=(null, self.writer, self.writer),
            )  # fmt: skip
        finally:
            os.close(null)
            os.close(self.writer)
            self.its.close()
        return self.process

    def request(self, word: str) -> dict[str, Any]:
        self.line.send(word.encode())
        return json.loads(self.line.recv(1 << 20))

    def output(self) -> str:
        """To its end."""
        with os.fdopen(self.out) as file:
            self.out = -1
            return file.read()

    async def ended(self) -> int | None:
        assert self.process is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.process.exited
        return (await self.process.collect_exit())[0]

    def close(self) -> None:
        self.line.close()
        if self.out >= 0:
            os.close(self.out)


def shown(pid: int) -> str:
    """As `top` shows it. Nothing: there is no such process."""
    path = Path(f"/proc/{pid}/comm")
    return path.read_text() if path.exists() else ""


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def play(
    test: Callable[[ForkServer, Callable[[], Child]], Awaitable[None]], *programs: str, supervise: bool = False
) -> None:
    """Nothing is left behind. The test is given a fork_server, and what makes children-to-be."""
    fork_server, made = ForkServer(*(programs or (PROGRAM,)), supervise=supervise), list[Child]()

    def new_child() -> Child:
        made.append(Child())
        return made[-1]

    async def close() -> None:
        await fork_server.aclose()
        for each in made:
            each.close()

    leaving_nothing(lambda: test(fork_server, new_child), close)


def test_children_share_imported_modules_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path / "mine")
        first, second = new_child(), new_child()
        born = [await first.start(fork_server, MINE="1"), await second.start(fork_server, MINE="2")]
        assert all(isinstance(each, ForkedChild) for each in born)
        one, two = first.request("who"), second.request("who")
        assert one["by"] == two["by"] == fork_server.pid == one["parent"]
        assert [one["pid"], two["pid"]] == [each.pid for each in born] == [one["session"], two["session"]]
        assert (one["env"].pop("MINE"), two["env"].pop("MINE")) == ("1", "2")
        assert one["env"] == two["env"] == {"PATH": os.environ["PATH"]}
        assert one["cwd"] == str(tmp_path) and one["path"][0] == str(tmp_path / "mine")
        kept = {"0", "1", "2", str(first.number)}
        assert kept < set(one["fds"]) and len(one["fds"]) == len(kept) + 1, "and the folder that is listed"
        assert shown(born[0].pid) == "a child\n"
        first.request("speak")
        for each in (first, second):
            each.line.close()
            assert await each.ended() == 0
        assert sorted(first.output().split("\n")) == ["", "on stderr", "on stdout"] and second.output() == ""

    play(test)


@pytest.mark.parametrize(("word", "code"), [("exit", 7), ("exit like killed", 137), ("raise", 1), ("die", 137)])
def test_the_exit_status_and_the_output_of_a_child_are_returned(word: str, code: int) -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        child = new_child()
        process = await child.start(fork_server)
        assert not process.has_ended
        child.line.send(word.encode())
        async with asyncio.timeout(DEADLINE_S):
            await process.exited
        assert process.has_ended
        process.signal(signal.SIGKILL)  # which does no harm
        assert shown(process.pid), "its number is its own until it is reaped"
        assert (await process.collect_exit())[0] == code and not shown(process.pid)
        assert process.exit_signal == (signal.SIGKILL if word == "die" else 0)
        assert ("it went wrong" in child.output()) == (word == "raise")

    play(test)


def test_children_die_with_the_fork_server_and_the_next_one_starts() -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        before = new_child()
        await before.start(fork_server)
        os.kill(fork_server.pid, signal.SIGKILL)
        assert await before.ended() is None, "its exit status is unknown"
        await until(lambda: gone(fork_server.pid))
        meanwhile, after = new_child(), new_child()
        assert await meanwhile.start(fork_server)
        assert isinstance(await after.start(fork_server), ForkedChild)
        assert after.request("who")["by"] == fork_server.pid
        meanwhile.line.close()
        assert await meanwhile.ended() == 0
        await fork_server.aclose()
        assert await after.ended() is None

    play(test)


def test_a_server_is_reaped_even_if_closing_it_is_cancelled() -> None:
    async def test(fork_server: ForkServer, _: Callable[[], Child]) -> None:
        fork_server.start_importing()
        pid = fork_server.pid
        closing = asyncio.create_task(fork_server.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        del closing
        gc.collect()  # warns of a process that nothing will reap
        await until(lambda: not Path(f"/proc/{pid}").exists())

    play(test)


def test_a_child_without_a_waiter_is_ended() -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        fork_server.start_importing()
        os.kill(fork_server.pid, signal.SIGSTOP)
        child = new_child()
        asking = asyncio.create_task(child.start(fork_server))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        os.kill(fork_server.pid, signal.SIGCONT)
        assert child.line.recv(1) == b"", "its end of the line is closed"
        next_one = new_child()
        assert isinstance(await next_one.start(fork_server), ForkedChild)
        await until(lambda: len(children_of(fork_server.pid)) == 1)
        next_one.line.close()
        assert await next_one.ended() == 0

    play(test)


@pytest.mark.parametrize("end", ["child", "server"])
def test_what_a_supervised_child_leaves_running_ends_with_it_and_with_the_server(end: str) -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        child, other = new_child(), new_child()
        await child.start(fork_server)
        await other.start(fork_server)
        daemon: Any = child.request("leave a daemon")
        assert not gone(daemon)
        if end == "server":
            await fork_server.aclose()
            assert gone(daemon) and [await child.ended(), await other.ended()] == [None, None]
            return
        child.line.send(b"exit")
        assert await child.ended() == 7 and gone(daemon)
        assert other.request("who")["by"] == fork_server.pid, "other children are left alone"
        other.line.close()
        await other.ended()

    play(test, supervise=True)


@pytest.mark.parametrize("program", [THREADS, "tests.managers.there_is_none"])
def test_where_forking_is_impossible_children_are_spawned(program: str) -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        for _ in range(2):
            child = new_child()
            assert isinstance(await child.start(fork_server, THREADS), SpawnedChild)
            who = child.request("who")
            assert who["by"] == who["pid"] and who["parent"] == os.getpid()
            child.line.close()
            assert await child.ended() == 0
        assert fork_server.pid == 0, "it is of no use"

    play(test, program)


def test_a_request_that_exceeds_a_packet_is_spawned_without_forking() -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        child = new_child()
        long = {f"LONG{number}": "x" * 100_000 for number in range(4)}
        assert isinstance(await child.start(fork_server, THREADS, **long), SpawnedChild)
        child.line.close()
        assert await child.ended() == 0
        # Above the send buffer of a socket (208 KiB by default), below the limit of a packet.
        long = {f"LONG{number}": "x" * 58_000 for number in range(4)}
        next_one = new_child()
        await next_one.start(fork_server, **long)
        forked = new_child()
        assert isinstance(await forked.start(fork_server), ForkedChild), (
            "only the request that is too long is not forked"
        )
        for each in (next_one, forked):
            each.line.close()
            assert await each.ended() == 0

    play(test)


def test_requests_that_do_not_fit_into_the_socket_at_once_are_all_forked() -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        fork_server.start_importing()
        os.kill(fork_server.pid, signal.SIGSTOP)
        children = [new_child() for _ in range(8)]
        asking = [asyncio.create_task(child.start(fork_server, LONG="x" * 60_000)) for child in children]
        await asyncio.sleep(0.05)
        os.kill(fork_server.pid, signal.SIGCONT)
        assert all(isinstance(child, ForkedChild) for child in await asyncio.gather(*asking))
        for each in children:
            each.line.close()
            assert await each.ended() == 0

    play(test)


def test_the_event_loop_runs_on_while_a_server_is_closed_or_reports_an_exit_code() -> None:
    async def test(fork_server: ForkServer, new_child: Callable[[], Child]) -> None:
        child, other = new_child(), new_child()
        process = await child.start(fork_server)
        await other.start(fork_server)
        child.line.send(b"exit")
        async with asyncio.timeout(DEADLINE_S):
            await process.exited
        os.kill(fork_server.pid, signal.SIGSTOP)
        exit_code = asyncio.create_task(process.collect_exit())
        await asyncio.sleep(0.05)
        assert not exit_code.done(), "the server is stopped"
        os.kill(fork_server.pid, signal.SIGCONT)
        assert (await exit_code)[0] == 7
        os.kill(fork_server.pid, signal.SIGSTOP)
        pid = fork_server.pid
        closing = asyncio.create_task(fork_server.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done() and fork_server.pid == 0
        os.kill(pid, signal.SIGCONT)
        await closing
        assert gone(pid) and await other.ended() is None

    play(test, supervise=True)


OWNER = """
import asyncio, os, sys
from tests.processes.test_fork_server import *
async def main():
    fork_server, child = ForkServer(PROGRAM, supervise=True), Child()
    await child.start(fork_server)
    print(fork_server.pid, child.request("who")["pid"], child.request("leave a daemon"), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_all_of_it_dies_with_its_owner() -> None:
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=root, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 3
    asyncio.run(until(lambda: all(gone(pid) for pid in pids)))
