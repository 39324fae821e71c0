"""Programs in containers: started through the engine, and asked small questions.

Owns which shells there are, so that the engine's word of their end finds them. Never pauses or resizes a container:
whoever starts a program in it sees to it that it runs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from tangram.errors import ManagerError
from tangram.managers.sandboxes.docker.container import CONFLICT, LAG_PAUSE_S, LAG_S, NOT_FOUND, Container
from tangram.managers.sandboxes.docker.engine import Engine, EngineRefused, Json, to_its_end
from tangram.managers.sandboxes.docker.output_framing import TOKEN, run_words
from tangram.managers.sandboxes.docker.shells import Run, Shell
from tangram.processes.streams import STDERR, STDOUT

BEGIN_S = 60.0
"""For a program to begin. It takes a twentieth of a second; a loaded engine takes its time."""
ANSWER_BYTES_MAX = 1 << 20
ANSWER_S = 60.0
"""For a small question. What it asks is bounded; a container that was granted little CPU takes its time."""

T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    code: int | None
    stdout: bytes
    stderr: str
    complete: bool
    """All of its output is there."""


class Programs:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shells: dict[str, Shell] = {}

    def on_exec_die(self, exec_id: str, code: int) -> None:
        shell = self._shells.get(exec_id)
        if shell is not None:
            shell.on_engine_says_ended(code)

    async def start(
        self,
        container: Container,
        words: list[str],
        *,
        token: str,
        run: Run,
        env: dict[str, str] | None = None,
        stdin: bytes | None = None,
        holds_stdin: bool = False,
    ) -> Shell:
        """A shell that has begun to run. To be closed by the caller. Its input ends after `stdin`, unless it is held;
        None: it has none."""
        container.require()
        container.tokens.add(token)
        body = {
            "AttachStdin": stdin is not None,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Cmd": words,
            "Env": [f"{name}={value}" for name, value in ((env or {}) | {TOKEN: token}).items()],
            "User": f"{container.user}:{container.user}",
            "WorkingDir": "/",
        }
        started: list[Shell] = []

        async def launch() -> None:
            shell = await self._launch(container, body)
            started.append(shell)
            shell.run = run
            if stdin is not None:
                shell.write(stdin, then_close=not holds_stdin)
            await begun(container, shell, run)

        try:
            async with container.launching():
                await to_its_end(launch())
        except BaseException as error:
            for shell in started:
                await to_its_end(shell.close())
            if isinstance(error, EngineRefused) and error.status in (NOT_FOUND, CONFLICT):
                raise ManagerError(f"sandbox {container.sandbox} does not run: {error.answer}", retry=False) from error
            raise
        return started[0]

    async def _launch(self, container: Container, body: Json) -> Shell:
        path = f"/containers/{container.id}/exec"
        made = await _caught_up(lambda: self._engine.json("POST", path, what="make a program", body=body))
        exec_id = made["Id"]
        streams = await _caught_up(lambda: self._engine.start_exec(exec_id))
        shell = self._shells[exec_id] = Shell(self._engine, exec_id, streams, self._forget)
        return shell

    def _forget(self, exec_id: str) -> None:
        self._shells.pop(exec_id, None)

    async def ask(
        self, container: Container, script: str, *arguments: str, bytes_max: int = ANSWER_BYTES_MAX
    ) -> Answer:
        """Run a small script in a container that runs, as the user of its programs."""
        token = secrets.token_hex(16)
        run = Run(token, bytes_max)
        words = run_words(token, "", "/", ("sh", "-c", script, "tangram", *arguments))
        shell = await self.start(container, words, token=token, run=run)
        try:
            waited: set[asyncio.Future[Any]] = {run.ended, shell.gone, container.gone}
            done, _ = await asyncio.wait(waited, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ManagerError(f"sandbox {container.sandbox} did not answer within {ANSWER_S:.0f} s")
            container.require()
            if run.ended.done():
                await shell.linger()
        finally:
            await to_its_end(shell.close())
        out, err = run.captures[STDOUT], run.captures[STDERR]
        return Answer(
            code=run.ended.result() if run.ended.done() else None,
            stdout=out.content(),
            stderr=err.text().strip(),
            complete=not out.missing_bytes,
        )


async def _caught_up(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask an engine that may still believe that a container stands still, until it has caught up with itself."""
    give_up = time.monotonic() + LAG_S
    while True:
        try:
            return await ask()
        except EngineRefused as error:
            if "is paused" not in error.answer or time.monotonic() > give_up:
                raise
        await asyncio.sleep(LAG_PAUSE_S)


async def begun(container: Container, shell: Shell, run: Run) -> None:
    """Until the command runs. ManagerError: it does not."""
    waited: set[asyncio.Future[Any]] = {run.begun, shell.gone, container.gone}
    done, _ = await asyncio.wait(waited, timeout=BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
    container.require()
    if not done:
        raise ManagerError(f"the Docker engine did not start a program within {BEGIN_S:.0f} s")
    if not run.begun.done():
        reason = run.stray or "it ended at once"
        raise ManagerError(
            f"a program could not be started in sandbox {container.sandbox}: {reason}",
            retry="executable file not found" not in reason,
        )
