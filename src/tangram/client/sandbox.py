"""The API of a sandbox: commands, files, sessions, servers, copies.

Owns the ids of its actions and the order of opening and closing. Opening and closing are actions too: they wait for
their grant like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import msgspec

from tangram.cancellation import run_to_completion
from tangram.client.result import Result, result_of
from tangram.client.transport import Pending, Transport
from tangram.client.tree_archive import pack_tree, unpack_tree
from tangram.client.validation import (
    Command,
    Content,
    Lifecycle,
    OnOutput,
    PathText,
    Quotas,
    bytes_of,
    path_of,
    quota_demand,
    require_mode,
    require_output_callback,
    variables_of,
    words_of,
)
from tangram.core.action import PRIORITY_MAX, Action, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.core.sizes import Cpus, amounts, parse_size
from tangram.core.speedup import Speedup
from tangram.errors import FileFailed, InvalidAction, ManagerError, SessionEnded
from tangram.managers.base import Files
from tangram.managers.work import (
    CAPTURE_BYTES_DEFAULT,
    CAPTURE_BYTES_MAX,
    MAINTENANCE_CORES,
    MIB,
    WORKSPACE,
    Close,
    Commit,
    Exec,
    ExecResult,
    FileEntry,
    Open,
    SandboxSpec,
    Work,
)
from tangram.processes.streams import COMMAND_VARIABLE
from tangram.runtime.orchestrator import SettledAction

FILE_BYTES_MAX = 256 * MIB
"""Default limit of one `read`."""
TREE_BYTES_MAX = 2048 * MIB
"""Limit of one `download`."""
CLOSE_WAIT_S = 10.0
"""After this time, closing proceeds without a grant."""
TREE_MEMORY_MAX = 64 * MIB
"""A tree in transit uses a temporary file above this size."""


class Image(msgspec.Struct, frozen=True):
    """Committed files from which sandboxes open copy-on-write."""

    name: str


class Sandbox:
    """Files and processes that persist between actions and hold cores only while an action runs."""

    def __init__(
        self,
        transport: Transport,
        connection: Lifecycle,
        name: str,
        spec: SandboxSpec,
        *,
        run: str,
        trajectory: str,
        task: str,
        on_opened: Callable[[SandboxSpec], None] | None = None,
    ) -> None:
        self.name = name
        self._transport = transport
        self._connection = connection
        self._lifecycle = Lifecycle("the sandbox")
        self._spec = spec
        self._run = run
        self.trajectory = trajectory or name
        """Run, task and trajectory of its actions. May be changed when the sandbox is reused."""
        self._task = task
        self._on_opened = on_opened
        """Called when the sandbox has been opened."""
        self._numbers = count(1)
        self._pending: dict[Pending, None] = {}
        """Programs that have not settled."""

    # ---- opening and closing

    async def __aenter__(self) -> Self:
        self._connection.require_open()
        self._lifecycle.begin()
        try:
            await self._run_maintenance("open", Open(spec=self._spec))
        except BaseException:
            await self.close()
            raise
        self._lifecycle.mark_open()
        if self._on_opened is not None:
            self._on_opened(self._spec)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all actions and processes in it and delete its files. A cancelled caller still waits until that is
        done."""
        self._connection.require_loop()
        if self._lifecycle.has_begun:
            await run_to_completion(self._close())

    async def _close(self) -> None:
        self._lifecycle.mark_closed()
        for pending in list(self._pending):
            pending.cancel()
            await pending.settled()
        if not self._connection.is_open:
            return  # the end of the connection closes all sandboxes
        # An action like others, but with a deadline: other actions may hold all cores. After it, the sandbox closes
        # without a grant.
        action = self._action(
            "close",
            Demand({CPU: cores(MAINTENANCE_CORES[Close])}),
            idempotent=True,
            priority=PRIORITY_MAX,
            deadline_s=CLOSE_WAIT_S,
        )
        settled = await self._transport.submit(action, Close()).settled()
        if settled.outcome.status is Status.LOST:
            raise ManagerError(settled.outcome.reason)

    async def _run_maintenance(self, kind: str, work: Work) -> None:
        """Runs internal work on the sandbox; raises if it does not succeed."""
        action = self._action(kind, Demand({CPU: cores(MAINTENANCE_CORES[type(work)])}), idempotent=True)
        settled = await self._transport.submit(action, work).settled()
        result_of(kind, settled.outcome, settled.executed or _NO_PROGRAM).check()

    def _require_open(self) -> None:
        self._connection.require_open()
        self._lifecycle.require_open()

    def _action(self, kind: str, demand: Demand, **options: Any) -> Action:
        """`options`: further fields of the action."""
        return Action(
            id=f"{self.name}.{next(self._numbers)}",
            demand=demand,
            run=self._run,
            task=self._task,
            trajectory=self.trajectory,
            sandbox=self.name,
            kind=kind,
            at_once=demand.pools.keys() == {CPU},  # a program calls an API at any time
            **options,
        )

    # ---- commands ----

    async def exec(
        self,
        command: Command,
        *,
        cpus: Cpus = None,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        cwd: PathText = "",
        env: Mapping[str, str] | None = None,
        stdin: Content = b"",
        key: str = "",
        quotas: Quotas | None = None,
        speedup: Speedup | None = None,
        duration_s: float | None = None,
        priority: int = 0,
        idempotent: bool = False,
        capture: int | str = CAPTURE_BYTES_DEFAULT,
        on_output: OnOutput | None = None,
    ) -> Result:
        """Run a command to its end, as one action.

        A string is run by a shell, a list of words without one; `{cpus}` in it is replaced by the number of granted
        cores. `cpus`: a number, or (min, max) for commands that run faster on more, or None to use what was learned.
        `quotas`: the number of requests that the command makes, by API, at any time until it ends. `key` names commands
        that behave alike. `timeout_s` counts from its start, `deadline_s` from now."""
        work = _exec_work(command, cwd=cwd, env=env, stdin=stdin, capture=capture)
        action = self._action(
            "exec", self._demand(cpus, quotas, speedup), key=key, timeout_s=timeout_s, deadline_s=deadline_s,
            priority=priority, idempotent=idempotent, duration_s=duration_s,
        )  # fmt: skip
        return await self._run_to_end(action, work, on_output)

    def _demand(self, cpus: Cpus, quotas: Quotas | None, speedup: Speedup | None) -> Demand:
        """The demand of a command: cores and quotas, granted together."""
        return Demand({CPU: amounts(cpus), **quota_demand(quotas, self._transport.quota)}, speedup)

    async def start(
        self,
        command: Command,
        *,
        cpus: Cpus = 1,
        cwd: PathText = "",
        env: Mapping[str, str] | None = None,
        key: str = "",
        capture: int | str = CAPTURE_BYTES_DEFAULT,
        on_output: OnOutput | None = None,
    ) -> Server:
        """Start a program that keeps running, such as a server. It holds its cores until it is stopped.

        Returns once it runs, or raises as `Result.check()` does if it could not start.
        """
        work = _exec_work(command, cwd=cwd, env=env, capture=capture)
        pending = self._submit(self._action("server", Demand({CPU: amounts(cpus)}), key=key), work, on_output)
        server = Server(pending, work.command_line, self._connection)
        try:
            runs = await pending.started()
        except asyncio.CancelledError:
            pending.cancel()
            raise
        if not runs:
            (await server.wait()).check()
        return server

    def session(self) -> Session:
        """A shell that persists between commands: its directory, variables and functions stay."""
        return Session(self, f"session-{next(self._numbers)}")

    async def _run_to_end(self, action: Action, work: Exec, on_output: OnOutput | None) -> Result:
        settled = await self._submit(action, work, on_output).settled()
        return result_of(work.command_line, settled.outcome, settled.executed)

    def _submit(self, action: Action, work: Exec, on_output: OnOutput | None) -> Pending:
        self._require_open()
        require_output_callback(on_output)
        output = None if on_output is None else lambda stream, data: on_output(_STREAMS[stream], data)
        pending = self._transport.submit(action, work, output)
        self._pending[pending] = None
        pending.add_done_callback(lambda: self._pending.pop(pending, None))
        return pending

    # ---- files ----

    async def read(self, path: PathText, *, bytes_max: int | str = FILE_BYTES_MAX) -> bytes:
        """The content of a file. Raises FileFailed if it does not exist, is not readable, or is larger."""
        return await self._files.read(self.name, path_of("path", path), bytes_max=parse_size("bytes_max", bytes_max))

    async def read_text(self, path: PathText, *, bytes_max: int | str = FILE_BYTES_MAX) -> str:
        return (await self.read(path, bytes_max=bytes_max)).decode(errors="replace")

    async def write(self, path: PathText, content: Content, *, mode: int = 0o644) -> None:
        """Create or replace a file atomically. Creates missing directories above it."""
        require_mode(mode)
        await self._files.write(self.name, path_of("path", path), bytes_of("content", content), mode=mode)

    async def list(self, path: PathText = ".") -> list[FileEntry]:
        return await self._files.list(self.name, path_of("path", path))

    async def delete(self, path: PathText) -> None:
        """Delete a file or a whole tree. Links are removed, not followed."""
        place = path_of("path", path)
        if place and posixpath.normpath(posixpath.join(WORKSPACE, place)) in ("/", WORKSPACE):
            raise FileFailed(place, "is where commands start; delete its contents instead")
        await self._files.delete(self.name, place)

    async def upload(self, source: PathText, path: PathText = ".") -> None:
        """Copy a file or directory of this machine into a directory of the sandbox, under its own name."""
        files, below = self._files, path_of("path", path)
        tar = await asyncio.to_thread(pack_tree, Path(path_of("source", source)))
        with tar:
            await files.unpack(self.name, below, tar)

    async def download(self, path: PathText, target: PathText, *, bytes_max: int | str = TREE_BYTES_MAX) -> Path:
        """Copy a file or directory of the sandbox into a directory of this machine, under its own name.

        The content of a sandbox is not trusted: links that lead out of the target, devices and pipes are skipped, and
        existing files are never replaced.
        """
        place, below = path_of("path", path), Path(path_of("target", target))
        with tempfile.SpooledTemporaryFile(TREE_MEMORY_MAX) as tar:
            file = cast(BinaryIO, tar)
            await self._files.pack(self.name, place, file, bytes_max=parse_size("bytes_max", bytes_max))
            tar.seek(0)
            return await asyncio.to_thread(unpack_tree, file, below)

    @property
    def _files(self) -> Files:
        self._require_open()
        return self._transport.files(self.name)

    # ---- copies ----

    async def commit(self, name: str = "") -> Image:
        """Commit its files as an image from which others open copy-on-write. Its programs are frozen meanwhile."""
        self._require_open()
        name = name or f"{self.name}-{next(self._numbers)}"
        await self._run_maintenance("commit", Commit(image=name))
        return Image(name)


class Session:
    """A persistent shell in a sandbox. It runs one command at a time; others queue."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self._sandbox = sandbox
        self._name = name
        self._ended_by = ""
        """The command that ended the shell."""
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def exec(
        self,
        command: str,
        *,
        cpus: Cpus = None,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        cwd: PathText = "",
        env: Mapping[str, str] | None = None,
        key: str = "",
        quotas: Quotas | None = None,
        speedup: Speedup | None = None,
        priority: int = 0,
        capture: int | str = CAPTURE_BYTES_DEFAULT,
        on_output: OnOutput | None = None,
    ) -> Result:
        """Run a command in the shell, after the previous one has ended. `deadline_s` counts from then.

        `cwd` and `env` change the shell itself, as `cd` and `export` do, so they apply to later commands too. A timeout
        or a cancellation ends the shell: `Result.session_ended` is set, and the next command raises SessionEnded.
        """
        sandbox = self._sandbox
        work = _exec_work(command, cwd=cwd, env=env, capture=capture, session=self._name)
        action = sandbox._action(
            "exec", sandbox._demand(cpus, quotas, speedup), key=key, timeout_s=timeout_s, deadline_s=deadline_s,
            priority=priority,
        )  # fmt: skip
        sandbox._require_open()
        async with self._lock:
            if self._ended_by:
                raise SessionEnded(f"the session ended with {self._ended_by!r}; open another one with box.session()")
            try:
                result = await sandbox._run_to_end(action, work, on_output)
            except asyncio.CancelledError:
                self._ended_by = work.command_line
                raise
            if result.session_ended:
                self._ended_by = work.command_line
            return result

    async def become(self, program: Sequence[str]) -> bool:
        """Replace the shell with a program that reads the commands from now on. Its output and CPU time during a
        command belong to the action of that command.

        The program reads commands from descriptor 8, each ended by a NUL. Its name appears as the last word of shell
        lines (`eval WORD`), so choose one without spaces and quotes. After a command, it writes its exit code and a
        newline to descriptor 9. Returns False if the backend cannot do this; the shell stays.
        """
        if isinstance(program, str):
            raise InvalidAction("program", program, "a list of words")
        # The shell reads its next command with `read` from the descriptor that holds it.
        held = f"read() {{ exec {shlex.join(program)}; }}"
        result = await self.exec(f'[ -n "${{{COMMAND_VARIABLE}+x}}" ] && {held}')
        if result.status is not Status.SUCCEEDED:
            result.check()
        return result.exit_code == 0

    async def close(self) -> None:
        if not self._ended_by and self._sandbox._lifecycle.is_open:
            with contextlib.suppress(SessionEnded):  # ended by a running command
                await self.exec("exit")
            self._ended_by = self._ended_by or "close"


class Server:
    """A program that keeps running and holds its cores until it is stopped."""

    def __init__(self, pending: Pending, command: str, connection: Lifecycle) -> None:
        self._pending = pending
        self._command = command
        self._connection = connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> Result:
        """Terminate it, kill it if it does not end, and return its output."""
        self._connection.require_loop()
        self._pending.cancel()
        return self._result(await self._pending.settled())

    async def wait(self) -> Result:
        """Wait until it ends by itself. Cancelling the wait leaves it running."""
        self._connection.require_loop()
        return self._result(await self._pending.settled_shielded())

    def _result(self, settled: SettledAction) -> Result:
        return result_of(self._command, settled.outcome, settled.executed)


_STREAMS = {1: "stdout", 2: "stderr"}


_NO_PROGRAM = ExecResult(exit_code=0)
"""The result of work that runs no program."""


def _exec_work(
    command: Command,
    *,
    cwd: PathText,
    env: Mapping[str, str] | None,
    capture: int | str,
    stdin: Content = b"",
    session: str = "",
) -> Exec:
    return Exec(
        command=words_of(command),
        cwd=path_of("cwd", cwd),
        env=variables_of(env),
        stdin=bytes_of("stdin", stdin),
        capture_bytes_max=parse_size("capture", capture, least=0, most=CAPTURE_BYTES_MAX),
        session=session,
    )
