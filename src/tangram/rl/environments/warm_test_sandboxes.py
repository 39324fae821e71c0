"""Benches: sandboxes in which a program stands ready to run the tests of a file, handed on from episode to episode.

Owns the sandboxes that nobody uses, and the way from a file and its cases to results. To make a sandbox and to start an
interpreter costs ten times what the tests cost, so both are kept: between two runs the program stands still and holds
no core. It runs code that somebody has read, and of any other it finds out whether it compiles at all, which runs
nothing. Where code has run that nobody has read, nothing is kept: the caller says so, and the bench goes. Never judges
a result. Promises that a bench which is handed on has run nothing that nobody has read.

    async with kept(client) as benches:               # around all episodes
        bench = await benches.take(key, sandbox, trajectory)
        result = await bench.run(file, cases, ...)
        await benches.give_back(bench)                # kept, or closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from tangram.client.client import Client
from tangram.client.result import Result
from tangram.client.sandbox import Sandbox, Session
from tangram.core.action import Status
from tangram.runtime.orchestrator import undisturbed

log = logging.getLogger("tangram")

IDLE_MAX = 64
"""Benches that are kept for the next: episodes end in groups, so that many may be free at once."""
IDLE_S_MAX = 15.0
"""Then it goes: its memory is reserved, and somebody else may wait for it. Longer than a step of training, during which
a rollout may stand still."""

RUN = "tests"
"""Before the arguments of a command, which the program finds by it."""
COMPILES = "compiles"
HELD = f"""\
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
        os.write(1, b"{COMPILES}\\n")
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
heard = b""
while data := os.read(8, 65536):
    heard += data
    while b"\\0" in heard:
        command, _, heard = heard.partition(b"\\0")
        width, known, *words = command[command.rindex(b"{RUN}:") + {len(RUN) + 1}:].decode().split(":")
        file, path, cases = (bytes.fromhex(word) for word in words)
        run(int(width), known == "known", file, path.decode(), [case.split() for case in cases.decode().splitlines()])
        os.write(9, b"0\\n")
os._exit(0)
"""
"""Takes the place of a held shell. Writes each file that it is given, and the number and the result of each case; of
one that is not known only whether it compiles."""


class Bench:
    """A sandbox with the program in it, while one episode has it."""

    def __init__(self, key: Hashable, box: Sandbox, python: str) -> None:
        self.key = key
        """Those of the same key can be handed on to each other."""
        self.box = box
        self.clean = True
        """Nothing ran in it that nobody has read."""
        self.idle_since = 0.0
        self._python = python
        self._session: Session | None = None
        self._can_hold = True
        self._broken = False
        """A run was cut short, or the program ended."""

    @property
    def as_new(self) -> bool:
        return self.clean and not self._broken

    async def run(
        self, path: str, file: str, cases: Iterable[str], *, key: str, cpus: tuple[float, float] | None,
        timeout_s: float, priority: int, capture: int, known: bool,
    ) -> Result | None:  # fmt: skip
        """One action on a bench that is clean: the file is written to the path, and the cases are run on it. One that
        nobody has read, so not `known`, is only compiled, and if that succeeds nothing is known of its cases. None: the
        program cannot do it here, or does not say."""
        assert self.clean, "its program is not to be trusted any more"
        if not self._can_hold or self._broken:
            return None
        self._broken = True  # until it is known that it goes on
        if self._session is None:
            self._session = self.box.session()
            self._can_hold = await self._session.become((self._python, "-I", "-S", "-c", HELD))
            if not self._can_hold:
                self._broken = False
                return None
        words = (file, path, "".join(f"{case}\n" for case in cases))
        width, said = "{cpus}" if cpus else "1", "known" if known else "unknown"
        command = ":".join((RUN, width, said, *(word.encode().hex() for word in words)))
        result = await self._session.exec(
            command, cpus=cpus, key=key, timeout_s=timeout_s, priority=priority, capture=capture
        )
        self._broken = not result.ok or result.session_ended
        # A program that ended says nothing about the file: it was killed for want of memory, or cannot be run here.
        ended = self._broken and result.status in (Status.SUCCEEDED, Status.TIMED_OUT)
        says_nothing = ended or (not known and COMPILES.encode() in result.executed.stdout)
        return None if says_nothing else result


class Benches:
    """Those of one client. Without `kept` around it, none is kept."""

    def __init__(self) -> None:
        self._idle: list[Bench] = []
        """The longest idle first."""
        self._users = 0
        self._sweeping: asyncio.Task[None] | None = None

    async def take(self, key: Hashable, make: Callable[[], Sandbox], python: str, trajectory: str) -> Bench:
        """One that is idle, or a new one."""
        for number in range(len(self._idle) - 1, -1, -1):
            if self._idle[number].key == key:
                bench = self._idle.pop(number)
                bench.box.trajectory = trajectory
                return bench
        box = make()
        await box.__aenter__()  # which closes it, if that fails
        return Bench(key, box, python)

    async def give_back(self, bench: Bench) -> None:
        if bench.as_new and self._users and len(self._idle) < IDLE_MAX:
            bench.idle_since = asyncio.get_running_loop().time()
            self._idle.append(bench)
        else:
            await bench.box.close()

    async def enter(self) -> None:
        self._users += 1
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="benches")

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
            await undisturbed(self._close([bench for bench in self._idle if bench.idle_since < before]))

    async def _close(self, benches: list[Bench]) -> None:
        gone = list(benches)
        self._idle = [bench for bench in self._idle if bench not in gone]
        for error in await asyncio.gather(*(bench.box.close() for bench in gone), return_exceptions=True):
            if error is not None:
                log.warning("a sandbox of codefix could not be closed: %s", error)


_benches_by_client: WeakKeyDictionary[Client, Benches] = WeakKeyDictionary()


def benches_of(client: Client) -> Benches:
    return _benches_by_client.setdefault(client, Benches())


@asynccontextmanager
async def kept(client: Client) -> AsyncIterator[Benches]:
    """Around all episodes: what one gives back is kept for the next. All are closed when the last one leaves."""
    benches = benches_of(client)
    await benches.enter()
    try:
        yield benches
    finally:
        await undisturbed(benches.leave())
