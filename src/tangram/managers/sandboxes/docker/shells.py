"""Shells: programs that the engine runs in containers, and the commands that run in them.

Owns the streams of every such program and the knowledge of its end. Knows nothing of grants. Promises that the end of a
command is known as soon as its last output is read, and that the end of its shell is known whatever becomes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tangram.errors import ManagerError
from tangram.managers.sandboxes.docker.engine import Engine, Streams
from tangram.managers.sandboxes.docker.output_framing import Marked
from tangram.processes.capture import Capture
from tangram.processes.streams import STDERR, STDOUT, Output

POLL_S, POLL_S_MAX = 0.002, 0.1
"""Between two questions whether a program has ended whose streams have: at first, and after some time."""
LATE_S = 0.5
"""For the rest of the output of a program whose end the engine has told. It waits itself until all has been read, or
for two seconds if something else holds the streams."""
LINGER_S = 0.05
"""For a shell to end that has told the end of its command. If something else holds its streams, that is not seen."""


class Run:
    """One command, from its begin to its end, and what it writes."""

    def __init__(self, token: str, capture_bytes_max: int, output: Output | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._output = output
        self._marked = {STDOUT: Marked(token), STDERR: Marked(token)}
        self.captures = {STDOUT: Capture(capture_bytes_max), STDERR: Capture(capture_bytes_max)}
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        """Its exit code, when all of its output has been read."""

    def feed(self, stream: int, data: bytes) -> None:
        marked = self._marked.get(stream)
        if marked is None:
            return
        self._hand_on(stream, marked.feed(data))
        if marked.begun and not self.begun.done():
            self.begun.set_result(None)
        out, err = self._marked[STDOUT], self._marked[STDERR]
        if out.exit_code is not None and err.exit_code is not None and not self.ended.done():
            self.ended.set_result(out.exit_code)

    def close(self) -> None:
        """Nothing more comes: what was held back was no mark."""
        for stream, marked in self._marked.items():
            self._hand_on(stream, marked.rest())

    @property
    def shell_ended(self) -> bool:
        """With its end."""
        return self._marked[STDOUT].shell_ended

    @property
    def used(self) -> tuple[float, int]:
        """As seen from inside: CPU seconds of the container meanwhile, and its peak of memory so far."""
        out = self._marked[STDOUT]
        return (out.cpu_us / 1e6, out.peak_bytes) if out.exit_code is not None else (0.0, 0)

    @property
    def stray(self) -> str:
        """What came before its begin: why it could not begin."""
        return b" ".join(marked.stray for marked in self._marked.values()).decode(errors="replace").strip(" \r\n\0")

    def _hand_on(self, stream: int, data: bytes) -> None:
        """A listener that fails is told no more: the program and its result have nothing to do with that."""
        if not data:
            return
        self.captures[stream].feed(data)
        if self._output is None:
            return
        try:
            self._output(stream, data)
        except Exception as error:
            self._output = None
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the output callback of an action failed", "exception": error}
            )


class Shell:
    """A program that runs commands and marks their output. One command at a time."""

    def __init__(self, engine: Engine, exec_id: str, streams: Streams, on_close: Callable[[str], None]) -> None:
        self.exec_id = exec_id
        self.run: Run | None = None
        self.gone: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """Its exit code; None if nobody knows."""
        self._engine = engine
        self._streams = streams
        self._on_close = on_close
        self._writing: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        await self._streams.read(self._tell)
        self._go(await self._exit_code())

    def _tell(self, stream: int, data: bytes) -> None:
        if self.run is not None:
            self.run.feed(stream, data)

    async def _exit_code(self) -> int | None:
        pause_s = POLL_S
        while True:
            try:
                found = await self._engine.json("GET", f"/exec/{self.exec_id}/json", what="say how a program ended")
            except ManagerError:
                return None  # it went with its container, or with the engine
            if not found["Running"] and found["ExitCode"] is not None:
                return int(found["ExitCode"])
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

    def _go(self, code: int | None) -> None:
        if not self.gone.done():
            if self.run is not None:
                self.run.close()
            self.gone.set_result(code)

    def on_engine_says_ended(self, code: int) -> None:
        """Its output is read first, unless something else holds the streams."""
        if self._late is None and not self.gone.done():
            self._late = asyncio.get_running_loop().call_later(LATE_S, self._go, code)

    def write(self, content: bytes, *, then_close: bool = False) -> None:
        """Without waiting: the program reads when it likes."""
        assert self._writing is None or self._writing.done()
        self._writing = asyncio.create_task(self._write(content, then_close))

    async def _write(self, content: bytes, then_close: bool) -> None:
        await self._streams.write(content)
        if then_close:
            self._streams.close_input()

    async def linger(self) -> None:
        """Until it has ended, if that is soon."""
        await asyncio.wait([self.gone], timeout=LINGER_S)

    async def close(self) -> None:
        """Let go of it, ended or not."""
        self._on_close(self.exec_id)
        if self._late is not None:
            self._late.cancel()
        tasks = [task for task in (self._reading, self._writing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._streams.close()
        self._go(None)


class Session:
    """A shell that is held between commands."""

    def __init__(self, token: str) -> None:
        self.token = token
        """Of the shell itself; its commands have their own."""
        self.shell: Shell | None = None
        """None: it is about to be started."""
        self.width = 0
        """Of which its variables speak."""
        self.busy = False
