"""Programs in containers, started through the engine.

Owns the list of shells, so that the engine's event of their end reaches them. Never pauses or resizes a container: the
caller makes sure that it runs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from tangram.cancellation import run_to_completion
from tangram.errors import ManagerError
from tangram.managers.sandboxes.docker.container import HTTP_CONFLICT, HTTP_NOT_FOUND, LAG_PAUSE_S, LAG_S, Container
from tangram.managers.sandboxes.docker.engine import DockerEngine, EngineRefused, Json
from tangram.managers.sandboxes.docker.output_framing import TOKEN_VARIABLE, run_argv
from tangram.managers.sandboxes.docker.shells import CommandRun, Shell
from tangram.processes.capture import Capture

BEGIN_S = 60.0
"""Time limit for the start of a program. It takes a twentieth of a second; a loaded engine takes longer."""
SCRIPT_OUTPUT_BYTES_MAX = 1 << 20
SCRIPT_S_MAX = 60.0
"""Time limit for a script. It does little work; a container with little CPU takes longer."""

T = TypeVar("T")


class ScriptResult(msgspec.Struct, frozen=True, kw_only=True):
    code: int | None
    stdout: bytes
    stderr: str
    complete: bool
    """None of its output is missing."""


class Programs:
    def __init__(self, engine: DockerEngine) -> None:
        self._engine = engine
        self._shells: dict[str, Shell] = {}

    def on_exec_die(self, exec_id: str, code: int) -> None:
        shell = self._shells.get(exec_id)
        if shell is not None:
            shell.on_exec_die(code)

    async def start(
        self,
        container: Container,
        argv: list[str],
        *,
        token: str,
        run: CommandRun,
        env: dict[str, str] | None = None,
        stdin: bytes | None = None,
        holds_stdin: bool = False,
    ) -> Shell:
        """Start a shell; returns when it runs. The caller closes it. Its input ends after `stdin`, unless it
        `holds_stdin`; None: it has no input."""
        container.require_alive()
        container.tokens.add(token)
        body = {
            "AttachStdin": stdin is not None,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Cmd": argv,
            "Env": [f"{name}={value}" for name, value in ((env or {}) | {TOKEN_VARIABLE: token}).items()],
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
            await wait_started(container, shell, run)

        try:
            async with container.launching():
                await run_to_completion(launch())
        except BaseException as error:
            for shell in started:
                await run_to_completion(shell.close())
            if isinstance(error, EngineRefused) and error.status in (HTTP_NOT_FOUND, HTTP_CONFLICT):
                raise ManagerError(f"sandbox {container.sandbox} does not run: {error.reason}", retry=False) from error
            raise
        return started[0]

    async def _launch(self, container: Container, body: Json) -> Shell:
        path = f"/containers/{container.id}/exec"
        created = await _retry_while_paused(
            lambda: self._engine.request_json("POST", path, purpose="create a program", body=body)
        )
        exec_id = created["Id"]
        streams = await _retry_while_paused(lambda: self._engine.start_exec(exec_id))
        shell = self._shells[exec_id] = Shell(self._engine, exec_id, streams, self._unregister)
        return shell

    def _unregister(self, exec_id: str) -> None:
        self._shells.pop(exec_id, None)

    async def run_script(
        self, container: Container, script: str, *arguments: str, bytes_max: int = SCRIPT_OUTPUT_BYTES_MAX
    ) -> ScriptResult:
        """Run a small script in a running container, as the user of its programs."""
        token = secrets.token_hex(16)
        out, err = Capture(bytes_max), Capture(bytes_max)
        run = CommandRun(token, (out, err))
        argv = run_argv(token, "", "/", ("sh", "-c", script, "tangram", *arguments))
        shell = await self.start(container, argv, token=token, run=run)
        try:
            waited: set[asyncio.Future[Any]] = {run.ended, shell.exited, container.gone}
            done, _ = await asyncio.wait(waited, timeout=SCRIPT_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ManagerError(f"sandbox {container.sandbox} did not respond within {SCRIPT_S_MAX:.0f} s")
            container.require_alive()
            if run.ended.done():
                await shell.wait_exit()
        finally:
            await run_to_completion(shell.close())
        return ScriptResult(
            code=run.ended.result() if run.ended.done() else None,
            stdout=out.content(),
            stderr=err.text().strip(),
            complete=not out.missing_bytes,
        )


async def _retry_while_paused(request: Callable[[], Awaitable[T]]) -> T:
    """Retry a request while an engine that lags still considers the container paused."""
    give_up = time.monotonic() + LAG_S
    while True:
        try:
            return await request()
        except EngineRefused as error:
            if "is paused" not in error.reason or time.monotonic() > give_up:
                raise
        await asyncio.sleep(LAG_PAUSE_S)


async def wait_started(container: Container, shell: Shell, run: CommandRun) -> None:
    """Blocks until the command runs. Raises ManagerError if it does not."""
    waited: set[asyncio.Future[Any]] = {run.started, shell.exited, container.gone}
    done, _ = await asyncio.wait(waited, timeout=BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
    container.require_alive()
    if not done:
        raise ManagerError(f"the Docker engine did not start a program within {BEGIN_S:.0f} s")
    if not run.started.done():
        reason = run.preamble or "it ended at once"
        raise ManagerError(
            f"a program could not be started in sandbox {container.sandbox}: {reason}",
            retry="executable file not found" not in reason,
        )
