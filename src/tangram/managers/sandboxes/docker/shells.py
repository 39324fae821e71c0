"""Shells: programs that the engine runs in containers, and the commands that run in them.

Owns the streams and the end of every such program. Has no notion of grants. Promises that the end of a command is known
as soon as its last output is read, and that the end of a shell is always reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tangram.errors import ManagerError
from tangram.managers.sandboxes.docker.engine import DockerEngine, ExecStreams
from tangram.managers.sandboxes.docker.output_framing import FrameParser
from tangram.processes.capture import Capture
from tangram.processes.streams import STDERR, STDOUT, GuardedOutput, Output

POLL_S, POLL_S_MAX = 0.002, 0.1
"""Pause between two requests whether a program has ended whose streams have: at first, and at most."""
OUTPUT_GRACE_S = 0.5
"""Time limit for the rest of the output of a program after the engine has reported its end. The engine itself waits
until all is read, or for two seconds if background processes hold the streams."""
EXIT_WAIT_S = 0.05
"""Time limit for the end of a shell after its command. If background processes hold its streams, its end is not
visible."""


class CommandRun:
    """One command, from its begin to its end, and its output."""

    def __init__(self, token: str, captures: tuple[Capture, Capture], output: Output | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._output = GuardedOutput(output)
        self._parsers = {STDOUT: FrameParser(token), STDERR: FrameParser(token)}
        self._captures = {STDOUT: captures[0], STDERR: captures[1]}
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        """The exit code of the command, when all of its output has been read."""

    def feed(self, stream: int, data: bytes) -> None:
        parser = self._parsers.get(stream)
        if parser is None:
            return
        self._forward_output(stream, parser.feed(data))
        if parser.started and not self.started.done():
            self.started.set_result(None)
        out, err = self._parsers[STDOUT], self._parsers[STDERR]
        if out.exit_code is not None and err.exit_code is not None and not self.ended.done():
            self.ended.set_result(out.exit_code)

    def close(self) -> None:
        """The stream has ended: bytes held back were not a mark."""
        for stream, parser in self._parsers.items():
            self._forward_output(stream, parser.flush())

    @property
    def shell_ended(self) -> bool:
        return self._parsers[STDOUT].shell_ended

    @property
    def reported_usage(self) -> tuple[float, int]:
        """Usage as seen from inside: CPU seconds of the container meanwhile, and its memory peak so far."""
        out = self._parsers[STDOUT]
        return (out.cpu_us / 1e6, out.peak_bytes) if out.exit_code is not None else (0.0, 0)

    @property
    def preamble(self) -> str:
        """The output before its begin mark: the reason why it could not begin."""
        return b" ".join(parser.preamble for parser in self._parsers.values()).decode(errors="replace").strip(" \r\n\0")

    def _forward_output(self, stream: int, data: bytes) -> None:
        if data:
            self._captures[stream].feed(data)
            self._output(stream, data)


class Shell:
    """A program that runs commands and marks their output. One command at a time."""

    def __init__(
        self, engine: DockerEngine, exec_id: str, streams: ExecStreams, on_close: Callable[[str], None]
    ) -> None:
        self.exec_id = exec_id
        self.run: CommandRun | None = None
        self.exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """The exit code of the program; None if unknown."""
        self._engine = engine
        self._streams = streams
        self._on_close = on_close
        self._write_task: asyncio.Task[None] | None = None
        self._exit_timer: asyncio.TimerHandle | None = None
        self._read_task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        await self._streams.read(self._on_output)
        self._set_exited(await self._exit_code())

    def _on_output(self, stream: int, data: bytes) -> None:
        if self.run is not None:
            self.run.feed(stream, data)

    async def _exit_code(self) -> int | None:
        pause_s = POLL_S
        while True:
            try:
                description = await self._engine.request_json(
                    "GET", f"/exec/{self.exec_id}/json", purpose="describe a program"
                )
            except ManagerError:
                return None  # it ended with its container, or with the engine
            if not description["Running"] and description["ExitCode"] is not None:
                return int(description["ExitCode"])
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

    def _set_exited(self, code: int | None) -> None:
        if not self.exited.done():
            if self.run is not None:
                self.run.close()
            self.exited.set_result(code)

    def on_exec_die(self, code: int) -> None:
        """Called when the engine reports the end of the program. Its output is read first, unless background processes
        hold the streams."""
        if self._exit_timer is None and not self.exited.done():
            self._exit_timer = asyncio.get_running_loop().call_later(OUTPUT_GRACE_S, self._set_exited, code)

    def write(self, content: bytes, *, then_close: bool = False) -> None:
        """Does not block while the program does not read."""
        assert self._write_task is None or self._write_task.done()
        self._write_task = asyncio.create_task(self._write(content, then_close))

    async def _write(self, content: bytes, then_close: bool) -> None:
        await self._streams.write(content)
        if then_close:
            self._streams.close_input()

    async def wait_exit(self) -> None:
        """Blocks until it has ended, but only shortly."""
        await asyncio.wait([self.exited], timeout=EXIT_WAIT_S)

    async def close(self) -> None:
        self._on_close(self.exec_id)
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        tasks = [task for task in (self._read_task, self._write_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._streams.close()
        self._set_exited(None)


class DockerSession:
    """A shell that is kept between commands."""

    def __init__(self, token: str) -> None:
        self.token = token
        """The token of the shell itself; its commands have their own."""
        self.shell: Shell | None = None
        """None while it is being started."""
        self.width = 0
        """The width that its environment variables state."""
        self.busy = False
