"""Our own engine, in a process of its own, seen from the process that uses it.

Owns the child, its socket and what is known of its end. Promises that whoever awaits `generate` hears of the end of his
request exactly once: what was written, a refusal, or EngineDied with all that the child had told until then. A child
that says nothing for `hang_s` while it has work counts as dead and is killed. Nothing of it is left after `close`, nor
after a start that failed; after a death, `start` begins anew.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from typing import Any

import msgspec

from tangram.core.demand import CORE
from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.managers.capture import Capture
from tangram.managers.process_tree import SIGNAL_EXIT_BASE, Child
from tangram.managers.streams import Stream
from tangram.managers.width import told
from tangram.managers.work import STDERR
from tangram.rl.engines import messages
from tangram.rl.engines.base import EngineDied, EngineStatistics, Generation, Request, Weights
from tangram.rl.engines.messages import (
    Abort,
    Acknowledged,
    Add,
    AnyAnswer,
    AnyCommand,
    Beat,
    Close,
    Done,
    FrameTooLong,
    Hello,
    NotReady,
    Ready,
    Refused,
    Resume,
    StepRecord,
    Suspend,
    Update,
    Updated,
    UpdateFailed,
    Written,
    framed,
)
from tangram.rl.settings import EngineSettings

PROGRAM = "tangram.rl.nn.engine_child"
DTYPES = ("float32", "float64")
START_S_MAX = 300.0
"""To be ready: PyTorch is imported and weights are read, from a cold disk perhaps."""
CLOSE_S_MAX = 2.0
"""To end by itself when it was asked to. It looks after every step."""
UPDATE_HANGS = 10
"""Reading weights is one long step: so many times longer than others it may say nothing."""
BEAT_S_MAX = 0.25
"""Between two words of a child that works; less if `hang_s` is small."""
BEATS_PER_HANG = 5
LAST_WORDS_BYTES_MAX = 8192
"""Kept of what the child writes: a reason is at its end."""
LAST_WORDS_SHOWN = 800


class _Asked:
    """A request in the child."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answered: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.written: list[Written] = []

    def so_far(self, engine: str) -> Generation | None:
        if not self.written:
            return None
        kept = [each.kept for each in self.written]
        return Generation(
            tokens=tuple(token for each in self.written for token in each.tokens),
            logprobs=tuple(logprob for each in self.written for logprob in each.logprobs),
            versions=tuple(version for each in self.written for version in each.versions),
            kept=tuple(ids for each in kept for ids in each or ()) if None not in kept else None,
            finish="length",
            engine=engine,
        )


class ProcessEngine:
    """One engine; see Engine. It belongs to the event loop in which it was started."""

    trains = True

    def __init__(
        self,
        settings: EngineSettings,
        number: int = 0,
        *,
        dtype: str = "float32",
        hang_s: float = 30.0,
        record_steps: bool = False,
    ) -> None:
        if settings.kind != "process":
            raise InvalidConfig("kind", settings.kind, "process: others are not ours to start")
        if dtype not in DTYPES:
            raise InvalidConfig("dtype", dtype, " or ".join(DTYPES))
        self.name = settings.name if settings.count == 1 else f"{settings.name}-{number}"
        self.hardware = settings.hardware
        self.steps: list[StepRecord] = []
        """With `record_steps`: all of them, by the clock of the child."""
        self._settings, self._dtype, self._hang_s, self._record_steps = settings, dtype, hang_s, record_steps
        self._child: _Child | None = None

    @property
    def pid(self) -> int:
        """Of the child that runs."""
        assert self._child is not None, f"{self.name} does not run"
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def start(self, weights: Weights) -> None:
        if self.alive:
            raise ManagerError(f"engine {self.name} runs already", retry=False)
        if self._child is not None:
            await self._child.end("")
        child = self._child = _Child(self.name, self._hang_s, self.steps)
        hello = Hello(
            name=self.name,
            settings=self._settings,
            dtype=self._dtype,
            weights=weights,
            beat_s=min(BEAT_S_MAX, self._hang_s / BEATS_PER_HANG),
            record_steps=self._record_steps,
        )
        await child.start(hello)

    async def generate(self, request: Request) -> Generation:
        return await self._running().generate(request)

    async def suspend(self) -> None:
        await self._running().suspend()

    async def update(self, weights: Weights) -> None:
        await self._running().update(weights)

    async def resume(self) -> None:
        await self._running().resume()

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close()

    def statistics(self) -> EngineStatistics:
        return self._child.statistics() if self._child is not None else EngineStatistics(name=self.name)

    def _running(self) -> _Child:
        if self._child is None:
            raise EngineDied(self.name, "it was not started", None)
        return self._child


class _Child(asyncio.Protocol):
    """One life of an engine."""

    def __init__(self, name: str, hang_s: float, steps: list[StepRecord]) -> None:
        self.name = name
        self._hang_s, self._steps = hang_s, steps
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._frames = messages.answers()
        self._asked_by_id: dict[str, _Asked] = {}
        """By the id that the request has in the child."""
        self._acknowledged_by_ask: dict[int, asyncio.Future[AnyAnswer]] = {}
        self._updating = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._disconnected: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._process: Child | None = None
        self._stream: Stream | None = None
        self._said = Capture(LAST_WORDS_BYTES_MAX)
        self._watch: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._suspended = False
        self._statistics = EngineStatistics(name=name)
        self._statistics_s = 0.0
        self._why = ""
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._ending is None

    # ---- start ----

    async def start(self, hello: Hello) -> None:
        """Raises ManagerError, and has left nothing."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._spawn(theirs.fileno(), hello.settings.threads)
            await self._loop.create_connection(lambda: self, sock=ours)
            self._send(hello)
            async with asyncio.timeout(START_S_MAX):
                await asyncio.shield(self._ready)
        except BaseException as error:
            if self._transport is None:
                ours.close()
                self._settle(self._disconnected)
            await self.end("it did not get ready")
            if isinstance(error, TimeoutError):
                error = ManagerError(f"it was not ready after {START_S_MAX:.0f} s")
            if isinstance(error, ManagerError | OSError):
                retry = error.retry if isinstance(error, ManagerError) else True
                reason = f"engine {self.name} cannot be started: {error}{self._last_words()}"
                raise ManagerError(reason, retry=retry) from error
            raise
        self._heard_s = self._loop.time()
        self._look()

    def _spawn(self, fd: int, threads: int) -> None:
        stream = self._stream = Stream(STDERR)
        stream.begin(self._said, None)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        try:
            self._process = Child(
                [sys.executable, "-P", "-m", PROGRAM, str(fd), str(os.getpid())],
                env=dict(os.environ) | told(threads * CORE, {}) | {"PYTHONPATH": path},
                cwd=os.getcwd(),
                streams=(null, stream.writer, stream.writer),
                keep=(fd,),
            )
        finally:
            os.close(null)
            stream.close_writer()
        self._process.exited.add_done_callback(self._on_exit)

    # ---- requests ----

    async def generate(self, request: Request) -> Generation:
        self._require_ready()
        asked = _Asked(request)
        id = f"{request.id}#{next(self._numbers)}"
        try:
            self._send(Add(request=msgspec.structs.replace(request, id=id)))
        except FrameTooLong as error:
            raise InvalidAction("tokens", f"{len(request.tokens)} tokens", str(error)) from error
        self._asked_by_id[id] = asked
        try:
            return await asked.answered
        except asyncio.CancelledError:
            self._send(Abort(id=id))
            raise
        finally:
            del self._asked_by_id[id]

    async def suspend(self) -> None:
        self._require_ready()
        ask = next(self._numbers)
        self._suspended = True
        await self._ask(ask, Suspend(ask=ask))

    async def resume(self) -> None:
        self._require_ready()
        ask = next(self._numbers)
        self._heard_s = self._loop.time()
        self._suspended = False
        await self._ask(ask, Resume(ask=ask))

    async def update(self, weights: Weights) -> None:
        ask = next(self._numbers)
        self._updating += 1
        try:
            answer = await self._ask(ask, Update(ask=ask, weights=weights))
        finally:
            self._updating -= 1
        if isinstance(answer, UpdateFailed):
            raise ManagerError(f"engine {self.name} keeps its weights: version {weights.version}: {answer.reason}")

    async def _ask(self, ask: int, command: AnyCommand) -> AnyAnswer:
        self._require_ready()
        answered = self._acknowledged_by_ask[ask] = self._loop.create_future()
        try:
            self._send(command)
            return await answered
        finally:
            del self._acknowledged_by_ask[ask]

    def _require_ready(self) -> None:
        if not self.alive:
            raise EngineDied(self.name, self._why or "it does not run", None)
        if not self._ready.done():
            raise EngineDied(self.name, "it is being started", None)

    def _send(self, command: AnyCommand) -> None:
        frame = framed(command)
        if not self.alive:
            return  # whoever asked is told of the end
        assert self._transport is not None
        if not self._has_work:
            self._heard_s = self._loop.time()  # silence counts from when there was something to say
        self._transport.write(frame)

    # ---- answers ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, content: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            for answer in self._frames.feed(content):
                self._take(answer)
        except (FrameTooLong, msgspec.DecodeError) as error:
            self._begin_end(f"it said what is no message: {error}")

    def _take(self, answer: AnyAnswer) -> None:
        match answer:
            case Done(id=id, generation=generation):
                asked = self._asked_by_id.get(id)
                if asked is not None and not asked.answered.done():
                    asked.answered.set_result(generation)
            case Written(id=id):
                asked = self._asked_by_id.get(id)
                if asked is not None:
                    asked.written.append(answer)
            case Refused(id=id):
                asked = self._asked_by_id.get(id)
                if asked is not None and not asked.answered.done():
                    asked.answered.set_exception(InvalidAction(answer.field, answer.value, answer.expected))
            case Acknowledged(ask=ask) | Updated(ask=ask) | UpdateFailed(ask=ask):
                waits = self._acknowledged_by_ask.get(ask)
                if waits is not None and not waits.done():
                    waits.set_result(answer)
            case Beat(statistics=statistics, steps=steps):
                self._statistics, self._statistics_s = statistics, self._loop.time()
                self._steps += steps
            case Ready():
                self._settle(self._ready)
            case NotReady(reason=reason):
                if not self._ready.done():
                    self._ready.set_exception(ManagerError(reason, retry=False))
                    self._ready.exception()  # perhaps nobody waits for it any more

    # ---- silence ----

    @property
    def _has_work(self) -> bool:
        return bool(self._acknowledged_by_ask) or (bool(self._asked_by_id) and not self._suspended)

    def _look(self) -> None:
        """Every now and then: does it still say something?"""
        limit_s = self._hang_s * (UPDATE_HANGS if self._updating else 1)
        silent_s = self._loop.time() - self._heard_s
        if self._has_work and silent_s > limit_s:
            self._begin_end(f"it said nothing for {silent_s:.1f} s while it had work")
        elif self._ending is None:
            self._watch = self._loop.call_later(self._hang_s / BEATS_PER_HANG, self._look)

    # ---- end ----

    def connection_lost(self, error: Exception | None) -> None:
        """It closed its end, which it does only by ending."""
        self._settle(self._disconnected)
        self._begin_end("")

    def _on_exit(self, exited: asyncio.Future[None]) -> None:
        self._begin_end("")

    async def close(self) -> None:
        if self.alive:
            self._why = "it was closed"
            self._send(Close())
            assert self._process is not None
            await asyncio.wait({self._process.exited}, timeout=CLOSE_S_MAX)
        await self.end("it was closed")

    async def end(self, why: str) -> None:
        """Returns when nothing is left, whoever began it and whoever does not wait for it any more."""
        self._begin_end(why)
        assert self._ending is not None
        await asyncio.shield(self._ending)

    def _begin_end(self, why: str) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(why or self._why))

    async def _end(self, why: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None:
            if not why:  # it ends by itself, and its exit code says how
                await asyncio.wait({self._process.exited}, timeout=CLOSE_S_MAX)
            if not self._process.exited.done():
                self._process.signal(signal.SIGKILL)
            await asyncio.wait({self._process.exited})
            # All that it had said has been read when the end of the stream is.
            await asyncio.wait({self._disconnected}, timeout=CLOSE_S_MAX)
            code, _ = self._process.reap()
            why = why or f"it ended with {_in_words(code)}"
        if self._stream is not None:
            self._stream.end()
            self._stream.close()
        if self._transport is not None:
            self._transport.abort()
        await asyncio.sleep(0)  # the transport closes its socket in the next turn of the loop
        self._why = f"{why}{self._last_words()}"
        if not self._ready.done():
            self._ready.set_exception(ManagerError(why))
            self._ready.exception()
        for waits in self._acknowledged_by_ask.values():
            if not waits.done():
                waits.set_exception(EngineDied(self.name, self._why, None))
        for asked in self._asked_by_id.values():
            if not asked.answered.done():
                asked.answered.set_exception(EngineDied(self.name, self._why, asked.so_far(self.name)))

    def _settle(self, future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_result(None)

    def _last_words(self) -> str:
        said = self._said.text().strip()
        return f"; it said last: …{said[-LAST_WORDS_SHOWN:]}" if said else ""

    # ---- what is known of it ----

    def statistics(self) -> EngineStatistics:
        """What the child said last, and how many requests are in it as seen from here."""
        known, asked = self._statistics, len(self._asked_by_id)
        active = min(known.active, asked)
        idle_s = known.idle_s
        if self.alive and not known.active and not known.waiting and not asked and not self._suspended:
            idle_s += self._loop.time() - self._statistics_s
        return msgspec.structs.replace(known, active=active, waiting=asked - active, idle_s=idle_s)


def _in_words(code: int | None) -> str:
    if code is None:
        return "an unknown code"
    return f"signal {code - SIGNAL_EXIT_BASE}" if code > SIGNAL_EXIT_BASE else f"code {code}"
