"""Warm test sandboxes: a program waits in each to run the tests of a file; sandboxes are reused between episodes.

Owns the idle sandboxes, and how a file and its cases become results. Making a sandbox and starting an interpreter cost
ten times as much as the tests, so both are kept: between two runs the program is frozen and holds no core. It runs
trusted code only; of untrusted code it checks whether it compiles, which executes nothing. A sandbox in which untrusted
code ran is not kept: the caller marks it, and it is closed. Never judges a result. Promises that a reused sandbox has
executed no untrusted code.

    async with keep_warm(client) as sandboxes:               # around all episodes
        sandbox = await sandboxes.acquire(key, make, python, trajectory)
        result = await sandbox.run(file, cases, ...)
        await sandboxes.release(sandbox)                     # kept, or closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from tangram.cancellation import run_to_completion
from tangram.client.client import Client
from tangram.client.result import Result
from tangram.client.sandbox import Sandbox, Session
from tangram.core.action import Status

log = logging.getLogger("tangram")

IDLE_MAX = 64
"""Maximum idle sandboxes: episodes end in groups, so there may be many idle ones."""
IDLE_S_MAX = 15.0
"""Idle time after which a sandbox is closed, because its memory is reserved and others may wait for it. Longer than a
training step, during which a rollout may pause."""

RUN_MARKER = "tests"
"""Prefix of the arguments in a command, by which the program finds them."""
COMPILES_MARKER = "compiles"
RUNNER_PROGRAM = f"""\
import os
def play(source, cases, part, width):
    space, results = {{"__name__": "solution"}}, []
    exec(source, space)
    for number in range(part, len(cases), width):
        name, a, b = cases[number]
        try:
            results.append(b"%d %d\\n" % (number, space[name](int(a), int(b))))
        except Exception:
            pass
    os.write(1, b"".join(results))
def run(width, known, file, path, cases):
    with open(path, "wb") as solution:
        solution.write(file)
    try:
        with open(path, "rb") as solution:
            source = compile(solution.read(), path, "exec")
    except Exception:
        return
    if not known:
        os.write(1, b"{COMPILES_MARKER}\\n")
        return
    children = []
    for part in range(1, width):
        child = os.fork()
        if child == 0:
            try:
                play(source, cases, part, width)
            finally:
                os._exit(0)
        children.append(child)
    play(source, cases, 0, width)
    for child in children:
        os.waitpid(child, 0)
received = b""
while data := os.read(8, 65536):
    received += data
    while b"\\0" in received:
        command, _, received = received.partition(b"\\0")
        width, known, *words = command[command.rindex(b"{RUN_MARKER}:") + {len(RUN_MARKER) + 1}:].decode().split(":")
        file, path, cases = (bytes.fromhex(word) for word in words)
        run(int(width), known == "known", file, path.decode(), [case.split() for case in cases.decode().splitlines()])
        os.write(9, b"0\\n")
os._exit(0)
"""
"""Replaces the shell of a session. Writes each file, and the number and the result of each case; for untrusted code
only whether it compiles."""


class WarmSandbox:
    """A sandbox with the waiting program, while one episode uses it."""

    def __init__(self, key: Hashable, sandbox: Sandbox, python: str) -> None:
        self.key = key
        """Sandboxes of equal keys are interchangeable."""
        self.sandbox = sandbox
        self.is_clean = True
        """No untrusted code ran in it."""
        self.idle_since = 0.0
        self._python = python
        self._session: Session | None = None
        self._supports_runner = True
        self._broken = False
        """A run was cut off, or the program ended."""

    @property
    def is_reusable(self) -> bool:
        return self.is_clean and not self._broken

    async def run(
        self, path: str, file: str, cases: Iterable[str], *, key: str, cpus: tuple[float, float] | None,
        timeout_s: float, priority: int, capture: int, trusted: bool,
    ) -> Result | None:  # fmt: skip
        """Runs one action in a clean sandbox: writes the file to the path and runs the cases. Untrusted code is only
        compiled; if that succeeds, its cases remain unknown. Returns None if the program cannot do it here, or returns
        nothing."""
        assert self.is_clean, "untrusted code ran in it"
        if not self._supports_runner or self._broken:
            return None
        self._broken = True  # until the program has completed the run
        if self._session is None:
            self._session = self.sandbox.session()
            self._supports_runner = await self._session.become((self._python, "-I", "-S", "-c", RUNNER_PROGRAM))
            if not self._supports_runner:
                self._broken = False
                return None
        words = (file, path, "".join(f"{case}\n" for case in cases))
        width, trust = "{cpus}" if cpus else "1", "known" if trusted else "unknown"
        command = ":".join((RUN_MARKER, width, trust, *(word.encode().hex() for word in words)))
        result = await self._session.exec(
            command, cpus=cpus, key=key, timeout_s=timeout_s, priority=priority, capture=capture
        )
        self._broken = not result.ok or result.session_ended
        # A program that ended says nothing about the file: it ran out of memory, or cannot run here.
        ended = self._broken and result.status in (Status.SUCCEEDED, Status.TIMED_OUT)
        says_nothing = ended or (not trusted and COMPILES_MARKER.encode() in result.executed.stdout)
        return None if says_nothing else result


class WarmSandboxes:
    """The warm sandboxes of one client. None is kept outside `keep_warm`."""

    def __init__(self) -> None:
        self._idle: list[WarmSandbox] = []
        """Longest idle first."""
        self._users = 0
        self._sweeping: asyncio.Task[None] | None = None

    async def acquire(self, key: Hashable, make: Callable[[], Sandbox], python: str, trajectory: str) -> WarmSandbox:
        """Returns an idle sandbox, or a new one."""
        for number in range(len(self._idle) - 1, -1, -1):
            if self._idle[number].key == key:
                sandbox = self._idle.pop(number)
                sandbox.sandbox.trajectory = trajectory
                return sandbox
        box = make()
        await box.__aenter__()  # closes it if that fails
        return WarmSandbox(key, box, python)

    async def release(self, sandbox: WarmSandbox) -> None:
        if sandbox.is_reusable and self._users and len(self._idle) < IDLE_MAX:
            sandbox.idle_since = asyncio.get_running_loop().time()
            self._idle.append(sandbox)
        else:
            await sandbox.sandbox.close()

    async def enter(self) -> None:
        self._users += 1
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="close idle test sandboxes")

    async def leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        assert self._sweeping is not None
        sweeping, self._sweeping = self._sweeping, None
        sweeping.cancel()
        await asyncio.wait({sweeping})
        await self._close(self._idle)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(IDLE_S_MAX / 2)
            before = loop.time() - IDLE_S_MAX
            await run_to_completion(self._close([sandbox for sandbox in self._idle if sandbox.idle_since < before]))

    async def _close(self, sandboxes: list[WarmSandbox]) -> None:
        closed = list(sandboxes)
        self._idle = [sandbox for sandbox in self._idle if sandbox not in closed]
        for error in await asyncio.gather(*(sandbox.sandbox.close() for sandbox in closed), return_exceptions=True):
            if error is not None:
                log.warning("a sandbox of codefix could not be closed: %s", error)


_warm_sandboxes_by_client: WeakKeyDictionary[Client, WarmSandboxes] = WeakKeyDictionary()


def warm_sandboxes_of(client: Client) -> WarmSandboxes:
    return _warm_sandboxes_by_client.setdefault(client, WarmSandboxes())


@asynccontextmanager
async def keep_warm(client: Client) -> AsyncIterator[WarmSandboxes]:
    """Wraps all episodes: released sandboxes are kept for the next. Closes all when the last user leaves."""
    sandboxes = warm_sandboxes_of(client)
    await sandboxes.enter()
    try:
        yield sandboxes
    finally:
        await run_to_completion(sandboxes.leave())
