"""A sandbox, as its user sees it: commands, files, sessions, servers, copies.

Owns the ids of its actions and the order of opening and closing. Opening and closing are actions as well: they wait
for their turn like any other.
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
from types import TracebackType
from typing import BinaryIO, Self, cast

import msgspec

from tangram.client.result import Result, result_of
from tangram.client.transport import Pending, Transport
from tangram.client.tree_archive import pack_tree, unpack_tree
from tangram.client.validation import (
    Command,
    Content,
    Life,
    OnOutput,
    PathText,
    Quotas,
    bytes_of,
    path_of,
    quota_demand,
    require_listener,
    require_mode,
    variables_of,
    words_of,
)
from tangram.core.action import PRIORITY_MAX, Action, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.core.sizes import Cpus, amounts, in_bytes
from tangram.core.speedup import Speedup
from tangram.errors import FileFailed, InvalidAction, ManagerError, SessionEnded
from tangram.managers.base import Files
from tangram.managers.work import (
    CAPTURE_BYTES_CEILING,
    CAPTURE_BYTES_MAX,
    MIB,
    WORKSPACE,
    Close,
    Commit,
    Entry,
    Exec,
    Executed,
    Open,
    SandboxSpec,
    Work,
)
from tangram.processes.streams import HELD_BY
from tangram.runtime.orchestrator import Settled, undisturbed

FILE_BYTES_MAX = 256 * MIB
"""Of one `read`, unless the caller says otherwise."""
TREE_BYTES_MAX = 2048 * MIB
"""Of one `download`."""
CLOSE_WAIT_S = 10.0
"""Until closing no longer waits for its turn."""
TREE_MEMORY_MAX = 64 * MIB
"""Of a tree on its way; a larger one goes through a temporary file."""
OPEN_CORES, CLOSE_CORES, COMMIT_CORES = 0.2, 0.1, 0.5
"""Cores that opening, closing and sealing are granted: a few milliseconds of work each."""


class Image(msgspec.Struct, frozen=True):
    """Sealed files from which sandboxes open copy-on-write."""

    name: str


class Sandbox:
    """Files and processes that are kept between actions, and hold cores only while one runs."""

    def __init__(
        self,
        transport: Transport,
        connection: Life,
        name: str,
        spec: SandboxSpec,
        *,
        run: str,
        trajectory: str,
        task: str,
        opened: Callable[[SandboxSpec], None] | None = None,
    ) -> None:
        self.name = name
        self._transport = transport
        self._connection = connection
        self._life = Life("the sandbox")
        self._spec = spec
        self._run = run
        self.trajectory = trajectory or name
        """Whose its actions are. Whoever hands the sandbox on says so here."""
        self._task = task
        self._opened = opened
        """Told when it has been opened."""
        self._numbers = count(1)
        self._under_way: dict[Pending, None] = {}
        """Programs that have not settled."""

    # ---- its life ----

    async def __aenter__(self) -> Self:
        self._connection.require()
        self._life.begin()
        try:
            await self._errand("open", Open(spec=self._spec), OPEN_CORES)
        except BaseException:
            await self.close()
            raise
        self._life.opened()
        if self._opened is not None:
            self._opened(self._spec)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything in it, also what still runs; its files are forgotten. Whoever is cancelled here goes when that
        is done."""
        self._connection.require_loop()
        if self._life.begun:
            await undisturbed(self._close())

    async def _close(self) -> None:
        self._life.closed()
        for pending in list(self._under_way):
            pending.cancel()
            await pending.settled()
        if not self._connection.is_open:
            return  # the connection ends all that it has
        # An action like others, but one that does not wait for ever: somebody may hold all cores. Then it ends without.
        action = self._action(
            "close", Demand({CPU: cores(CLOSE_CORES)}), idempotent=True, priority=PRIORITY_MAX, deadline_s=CLOSE_WAIT_S
        )
        settled = await self._transport.submit(action, Close()).settled()
        if settled.outcome.status is Status.LOST:
            raise ManagerError(settled.outcome.reason)

    async def _errand(self, kind: str, work: Work, size: float) -> None:
        """Work of ours on the sandbox: it succeeds, or raises what kept it from that."""
        action = self._action(kind, Demand({CPU: cores(size)}), idempotent=True)
        settled = await self._transport.submit(action, work).settled()
        result_of(kind, settled.outcome, settled.executed or _DONE).check()

    def _require_open(self) -> None:
        self._connection.require()
        self._life.require()

    def _action(
        self,
        kind: str,
        demand: Demand,
        *,
        key: str = "",
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        idempotent: bool = False,
        duration_s: float | None = None,
    ) -> Action:
        return Action(
            id=f"{self.name}.{next(self._numbers)}",
            demand=demand,
            run=self._run,
            task=self._task,
            trajectory=self.trajectory,
            sandbox=self.name,
            kind=kind,
            key=key,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            priority=priority,
            idempotent=idempotent,
            duration_s=duration_s,
            at_once=demand.pools.keys() == {CPU},  # a program asks an API whenever it likes
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
        capture: int | str = CAPTURE_BYTES_MAX,
        on_output: OnOutput | None = None,
    ) -> Result:
        """Run a command to its end, as one action.

        A string goes through a shell, a list of words does not; `{cpus}` in it becomes the number of cores that it got.
        `cpus`: a number, or (least, most) for commands that run faster on more, or None for what is learned. `quotas`:
        how many requests it makes of which API, at any time until it ends. `key`: your word for commands that behave
        alike. `timeout_s` counts from its start, `deadline_s` from now.
        """
        work = _work(command, cwd=cwd, env=env, stdin=stdin, capture=capture)
        action = self._action(
            "exec", self._demand(cpus, quotas, speedup), key=key, timeout_s=timeout_s, deadline_s=deadline_s,
            priority=priority, idempotent=idempotent, duration_s=duration_s,
        )  # fmt: skip
        return await self._run_to_end(action, work, on_output)

    def _demand(self, cpus: Cpus, quotas: Quotas | None, speedup: Speedup | None) -> Demand:
        """All that it needs is granted together."""
        return Demand({CPU: amounts(cpus), **quota_demand("quotas", quotas, self._transport.quota)}, speedup)

    async def start(
        self,
        command: Command,
        *,
        cpus: Cpus = 1,
        cwd: PathText = "",
        env: Mapping[str, str] | None = None,
        key: str = "",
        capture: int | str = CAPTURE_BYTES_MAX,
        on_output: OnOutput | None = None,
    ) -> Server:
        """Start a program that stays up, such as a server. It holds its cores until it is stopped.

        Returns when it runs, or raises what kept it from starting, as `Result.check()` does.
        """
        work = _work(command, cwd=cwd, env=env, capture=capture)
        pending = self._submit(self._action("server", Demand({CPU: amounts(cpus)}), key=key), work, on_output)
        server = Server(pending, work.shown, self._connection)
        try:
            runs = await pending.started()
        except asyncio.CancelledError:
            pending.cancel()
            raise
        if not runs:
            (await server.wait()).check()
        return server

    def session(self) -> Session:
        """A shell that is held between commands: its directory, variables and functions stay."""
        return Session(self, f"session-{next(self._numbers)}")

    async def _run_to_end(self, action: Action, work: Exec, on_output: OnOutput | None) -> Result:
        settled = await self._submit(action, work, on_output).settled()
        return result_of(work.shown, settled.outcome, settled.executed)

    def _submit(self, action: Action, work: Exec, on_output: OnOutput | None) -> Pending:
        self._require_open()
        require_listener(on_output)
        output = None if on_output is None else lambda stream, data: on_output(_STREAMS[stream], data)
        pending = self._transport.submit(action, work, output)
        self._under_way[pending] = None
        pending.when_settled(lambda: self._under_way.pop(pending, None))
        return pending

    # ---- files ----

    async def read(self, path: PathText, *, bytes_max: int | str = FILE_BYTES_MAX) -> bytes:
        """The content of a file. Raises FileFailed if it is not there, not readable or larger."""
        return await self._files.read(self.name, path_of("path", path), bytes_max=in_bytes("bytes_max", bytes_max))

    async def read_text(self, path: PathText, *, bytes_max: int | str = FILE_BYTES_MAX) -> str:
        return (await self.read(path, bytes_max=bytes_max)).decode(errors="replace")

    async def write(self, path: PathText, content: Content, *, mode: int = 0o644) -> None:
        """Make or replace a file; it appears whole. Directories above it are made."""
        require_mode(mode)
        await self._files.write(self.name, path_of("path", path), bytes_of("content", content), mode=mode)

    async def list(self, path: PathText = ".") -> list[Entry]:
        return await self._files.list(self.name, path_of("path", path))

    async def delete(self, path: PathText) -> None:
        """A file or a whole tree. Links are removed, not followed."""
        place = path_of("path", path)
        if place and posixpath.normpath(posixpath.join(WORKSPACE, place)) in ("/", WORKSPACE):
            raise FileFailed(place, "is where commands start; delete what is in it instead")
        await self._files.delete(self.name, place)

    async def upload(self, source: PathText, path: PathText = ".") -> None:
        """Copy a file or a directory of this machine below a directory of the sandbox, under its own name."""
        files, below = self._files, path_of("path", path)
        tar = await asyncio.to_thread(pack_tree, Path(path_of("source", source)))
        with tar:
            await files.unpack(self.name, below, tar)

    async def download(self, path: PathText, target: PathText, *, bytes_max: int | str = TREE_BYTES_MAX) -> Path:
        """Copy a file or a directory of the sandbox below a directory of this machine, under its own name.

        What comes from a sandbox is not trusted: links that lead out of the target, devices and pipes are left out, and
        nothing that is there already is replaced.
        """
        place, below = path_of("path", path), Path(path_of("target", target))
        with tempfile.SpooledTemporaryFile(TREE_MEMORY_MAX) as tar:
            file = cast(BinaryIO, tar)
            await self._files.pack(self.name, place, file, bytes_max=in_bytes("bytes_max", bytes_max))
            tar.seek(0)
            return await asyncio.to_thread(unpack_tree, file, below)

    @property
    def _files(self) -> Files:
        self._require_open()
        return self._transport.files(self.name)

    # ---- copies ----

    async def commit(self, name: str = "") -> Image:
        """Seal its files as an image from which others open copy-on-write. Programs in it stand still meanwhile."""
        self._require_open()
        name = name or f"{self.name}-{next(self._numbers)}"
        await self._errand("commit", Commit(image=name), COMMIT_CORES)
        return Image(name)


class Session:
    """A held shell of a sandbox. It runs one command at a time; others wait for it."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self._sandbox = sandbox
        self._name = name
        self._ended = ""
        """The command that ended it."""
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        capture: int | str = CAPTURE_BYTES_MAX,
        on_output: OnOutput | None = None,
    ) -> Result:
        """Run a command in the shell, when the one before it has ended. `deadline_s` counts from then.

        `cwd` and `env` change the shell itself: they hold for later commands as well, as `cd` and `export` do. A
        timeout or a cancellation ends the shell: `Result.session_ended` says so, and the next command raises
        SessionEnded.
        """
        box = self._sandbox
        work = _work(command, cwd=cwd, env=env, capture=capture, session=self._name)
        action = box._action(
            "exec", box._demand(cpus, quotas, speedup), key=key, timeout_s=timeout_s, deadline_s=deadline_s,
            priority=priority,
        )  # fmt: skip
        box._require_open()
        async with self._turn:
            if self._ended:
                raise SessionEnded(f"the session ended with {self._ended!r}; open another one with box.session()")
            try:
                result = await box._run_to_end(action, work, on_output)
            except asyncio.CancelledError:
                self._ended = work.shown
                raise
            if result.session_ended:
                self._ended = work.shown
            return result

    async def become(self, program: Sequence[str]) -> bool:
        """Put a program into the place of the shell: it reads the commands from now on. What it prints while it has
        one, and the cores that it uses, are of the action of the command.

        The program reads from descriptor 8, where each command ends with a NUL; it stands there as the last word of
        shell lines (`eval WORD`), so one without spaces and quotes is found best. When one is done, it writes its exit
        code and a newline to descriptor 9. False: here no program can be held, and the shell stays.
        """
        if isinstance(program, str):
            raise InvalidAction("program", program, "a list of words")
        # The shell asks for its next command by `read`, where its descriptors are those that it is held by.
        held = f"read() {{ exec {shlex.join(program)}; }}"
        result = await self.exec(f'[ -n "${{{HELD_BY}+x}}" ] && {held}')
        if result.status is not Status.SUCCEEDED:
            result.check()
        return result.exit_code == 0

    async def close(self) -> None:
        if not self._ended and self._sandbox._life.is_open:
            with contextlib.suppress(SessionEnded):  # by a command that was under way
                await self.exec("exit")
            self._ended = self._ended or "close"


class Server:
    """A program that stays up and holds its cores until it is stopped."""

    def __init__(self, pending: Pending, command: str, connection: Life) -> None:
        self._pending = pending
        self._command = command
        self._connection = connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> Result:
        """Ask it to end, kill it if it does not; what it wrote comes back."""
        self._connection.require_loop()
        self._pending.cancel()
        return self._result(await self._pending.settled())

    async def wait(self) -> Result:
        """Until it ends by itself. Whoever gives up waiting leaves it running."""
        self._connection.require_loop()
        return self._result(await self._pending.watched())

    def _result(self, settled: Settled) -> Result:
        return result_of(self._command, settled.outcome, settled.executed)


_STREAMS = {1: "stdout", 2: "stderr"}


_DONE = Executed(exit_code=0)
"""Of work that runs no program."""


def _work(
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
        env=variables_of("env", env),
        stdin=bytes_of("stdin", stdin),
        capture_bytes_max=in_bytes("capture", capture, least=0, most=CAPTURE_BYTES_CEILING),
        session=session,
    )
