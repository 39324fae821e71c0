"""Leases: the way of one action in a container, from its grant to its end.

Owns the claim of the action on its container, its command and what it used. Promises what `managers.base` asks of a
lease. Two kinds of programs: one of its own, and a command for a held shell. And errands, which are work of the manager
itself.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import Callable
from typing import Any, Self

from tangram.core.action import Usage
from tangram.core.demand import CPU
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.sandboxes.cpuset_allocator import Cores
from tangram.managers.sandboxes.docker.container import Claim, Container
from tangram.managers.sandboxes.docker.engine import to_its_end
from tangram.managers.sandboxes.docker.files import home
from tangram.managers.sandboxes.docker.output_framing import run_words, session_message, session_words
from tangram.managers.sandboxes.docker.processes import end_all, now_ticks
from tangram.managers.sandboxes.docker.programs import Programs, begun
from tangram.managers.sandboxes.docker.shells import Run, Session, Shell
from tangram.managers.work import WORKSPACE, Ended, Exec, Executed, inside
from tangram.processes.streams import STDERR, STDOUT, Output
from tangram.processes.width import filled_in, told, whole_cores

BASE_ENVIRONMENT = {"LANG": "C.UTF-8", "TERM": "dumb"}
KILLED = 137
DEATH_S = 1.0
"""For the engine to tell that a container has ended, after a program in it was killed by nobody we know."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Errand:
    """Work of the manager itself, which has been done when the lease is there."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    async def wait(self) -> Ended:
        return self._ended

    def resize(self, *, reserved: int, limit: int) -> None:
        """There is nothing to resize."""

    def used(self) -> float | None:
        return None

    async def stop(self) -> None:
        """There is nothing to stop."""


class ProgramLease:
    """A program of its own."""

    def __init__(
        self,
        action: str,
        grant: Grant,
        work: Exec,
        output: Output | None,
        *,
        container: Container,
        programs: Programs,
        cores: Cores,
    ) -> None:
        self.work = work
        self.container = container
        self._action = action
        self._programs = programs
        self._cores = cores
        self._width = grant.width
        reserved, limit, cells = _granted(grant)
        cpus, _ = cores.place(action, width=grant.width, reserved=reserved, cells=cells)
        self._claim = Claim(reserved=reserved, limit=limit, cpus=cpus)
        self._run = Run(self._claim.token, work.capture_bytes_max, output)
        self._shell: Shell | None = None
        self._began_ticks = 0
        self._began_at = 0.0
        self._over = asyncio.Event()
        """There is a reason to believe that it has ended."""
        self._watching: asyncio.Task[Ended] | None = None
        self._killing: asyncio.Task[None] | None = None
        """Given: it was asked to stop."""
        self._ending = False
        self._settling: set[asyncio.Task[None]] = set()

    # ---- beginning ----

    async def begin(self, on_end: Callable[[Self], None]) -> None:
        """Returns when the program runs; else leaves nothing behind."""
        try:
            await self.container.enter(self._claim)
            self._began_ticks, self._began_at = now_ticks(), asyncio.get_running_loop().time()
            await self._launch()
        except BaseException:
            await to_its_end(self._undo())
            raise
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(lambda _: on_end(self))

    async def _launch(self) -> None:
        command = filled_in(self.work.command, self._width)
        shell = "bash" if self.container.image.has("bash") else "sh"
        words = (shell, "-c", command) if isinstance(command, str) else command
        environment = self._environment()
        # A shell does not hand on what cannot be a variable of its own.
        odd = [f"{name}={value}" for name, value in environment.items() if not _VARIABLE.fullmatch(name)]
        if odd:
            words = ("env", *odd, *words)
        directory = inside(self.work.cwd or self._directory())
        self._shell = await self._programs.start(
            self.container,
            run_words(self._claim.token, self._mask(), directory, words),
            token=self._claim.token,
            run=self._run,
            env=environment,
            stdin=self.work.stdin or None,
        )

    async def _undo(self) -> None:
        if self._began_ticks and not self.container.gone.done():
            await self._end_processes()
        await self._vacate(keep=False)

    def _directory(self) -> str:
        """Where commands start."""
        return self.container.image.directory or WORKSPACE

    def _mask(self) -> str:
        """Of the CPUs that it sees, hexadecimal; empty: the image has nothing to set it with."""
        if not self.container.image.has("taskset"):
            return ""
        return format(sum(1 << cpu for cpu in self._claim.cpus), "x")

    def _environment(self) -> dict[str, str]:
        container = self.container
        own = BASE_ENVIRONMENT | {"HOME": home(container.user), "USER": container.spec.user}
        return told(self._width, own | container.image.env | container.spec.env | self.work.env)

    # ---- running ----

    def resize(self, *, reserved: int, limit: int) -> None:
        if self._ending:
            return
        self._claim.reserved, self._claim.limit = reserved, limit
        self._cores.change(self._action, reserved)
        task = asyncio.create_task(self._settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self) -> None:
        try:
            await self.container.settle()
        except ManagerError as error:
            self.container.lose(f"its CPU could not be changed: {error}")

    def used(self) -> float | None:
        return self.container.used(self._claim)

    async def stop(self) -> None:
        if not self._ending and self._killing is None:
            self._killing = asyncio.create_task(self._end_processes())
            self._killing.add_done_callback(self._on_over)
        await self.wait()

    async def _end_processes(self) -> None:
        """If they cannot be ended, the container is."""
        try:
            await end_all(self.container, self._programs, self._claim, self._began_ticks, self._session_token())
        except (ManagerError, OSError) as error:
            self.container.lose(f"an action in it could not be stopped: {error}")
            await self.container.kill()

    def _session_token(self) -> str:
        return ""

    # ---- ending ----

    async def wait(self) -> Ended:
        assert self._watching is not None
        return await asyncio.shield(self._watching)

    def _on_over(self, _: asyncio.Future[Any]) -> None:
        self._over.set()

    async def _watch(self) -> Ended:
        assert self._shell is not None
        signs: tuple[asyncio.Future[Any], ...] = (self._run.ended, self._shell.gone, self.container.gone)
        for sign in signs:
            sign.add_done_callback(self._on_over)
        await self._over.wait()
        for sign in signs:
            sign.remove_done_callback(self._on_over)
        if self._killing is not None:
            await asyncio.wait([self._killing])
        self._ending = True
        ended_at = asyncio.get_running_loop().time()
        try:
            code, lost = await self._end()
            await self._vacate(keep=self._killing is None and not lost)
        except Exception as error:  # whoever waits must learn of it
            code, lost = None, f"the end of the action failed: {error!r}"
        return self._ended(code, lost, asyncio.get_running_loop().time() - ended_at)

    async def _end(self) -> tuple[int | None, str]:
        """Its exit code, and why it was lost if it was."""
        assert self._shell is not None
        container = self.container
        if self._run.ended.done():
            # Also if its shell has ended with it.
            return (None if self._killing is not None else self._run.ended.result()), ""
        if self._killing is None and not container.gone.done() and self._shell.gone.result() == KILLED:
            # All that is in a container is killed with it, and its own end may be told later.
            await asyncio.wait([container.gone], timeout=DEATH_S)
        if container.gone.done():
            return None, f"sandbox {container.sandbox} ended while the action ran: {container.gone.result()}"
        if self._killing is not None:
            return None, ""
        code = self._shell.gone.result()
        return code, "" if code is not None else "the Docker engine lost the program"

    async def _vacate(self, *, keep: bool) -> None:
        """Give everything back. What the action left running stays in the container if `keep`."""
        try:
            await self._linger()
            await self.container.leave(self._claim)
        finally:
            self._cores.leave(self._action)
            await self._let_shell_go(keep)

    async def _linger(self) -> None:
        """The script that ran the command should end before the container stands still."""
        if self._shell is not None and self._run.ended.done():
            await self._shell.linger()

    async def _let_shell_go(self, keep: bool) -> None:
        if self._shell is not None:
            await self._shell.close()

    def _ended(self, code: int | None, lost: str, overhead_s: float) -> Ended:
        claim, out, err = self._claim, self._run.captures[STDOUT], self._run.captures[STDERR]
        cpu_s, peak = claim.cpu_s, claim.memory_peak_bytes
        if self.container.meter.group is None:
            cpu_s, peak = self._used_from_inside()
        return Ended(
            usage=Usage(cpu_s=cpu_s, throttled_s=claim.throttled_s, memory_peak_bytes=peak, overhead_s=overhead_s),
            executed=Executed(
                exit_code=code,
                stdout=out.content(),
                stderr=err.content(),
                stdout_bytes=out.total_bytes,
                stderr_bytes=err.total_bytes,
                out_of_memory=claim.memory_kills > 0,
                cpus=whole_cores(self._width),
                session_ended=self._session_ended(),
            ),
            lost=lost,
        )

    def _used_from_inside(self) -> tuple[float, int]:
        """What a program says of itself, as far as it can be true."""
        cpu_s, peak = self._run.used
        elapsed_s = asyncio.get_running_loop().time() - self._began_at
        return min(cpu_s, elapsed_s * len(self._cores.all)), min(peak, self.container.spec.memory_bytes)

    def _session_ended(self) -> bool:
        return False


class SessionLease(ProgramLease):
    """A command for a held shell, which is started if there is none."""

    _session: Session | None = None

    async def _launch(self) -> None:
        session, ended = self._own_session()
        if ended is not None:
            await ended.close()
        message = session_message(self._claim.token, self._setup(session), self._command())
        if session.shell is None:
            session.shell = self._shell = await self._programs.start(
                self.container,
                session_words(),
                token=session.token,
                run=self._run,
                env=self._environment(),
                stdin=message,
                holds_stdin=True,
            )
            return
        self._shell = session.shell
        self._shell.run = self._run
        self._shell.write(message)
        await begun(self.container, self._shell, self._run)

    def _own_session(self) -> tuple[Session, Shell | None]:
        """And the shell of an earlier one of that name, which has ended meanwhile."""
        name, container = self.work.session, self.container
        if not container.image.has("bash"):
            raise ManagerError(f"a session needs bash, which the image of {container.sandbox} lacks", retry=False)
        session = container.sessions.get(name)
        if session is not None and session.busy:
            raise ManagerError(f"session {name} of sandbox {container.sandbox} runs a command already", retry=False)
        ended: Shell | None = None
        if session is not None and session.shell is not None and session.shell.gone.done():
            ended = session.shell
            session = None
        if session is None:
            session = container.sessions[name] = Session(secrets.token_hex(16))
        session.busy = True
        self._session = session
        return session, ended

    def _setup(self, session: Session) -> str:
        """What a program of its own would be told by its environment. It stays, as if it had been exported by hand."""
        lines = [] if session.width else [f"cd -- {shlex.quote(self._directory())}"]
        told_here = told(self._width, {}) if session.width not in (0, self._width) else {}
        session.width = self._width
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in (told_here | self.work.env).items()
            if _VARIABLE.fullmatch(name)
        ]
        if mask := self._mask():
            lines.append(f"taskset -p {mask} $$ >/dev/null 2>&1")
        return "\n".join(lines)

    def _command(self) -> str:
        command = filled_in(self.work.command, self._width)
        assert isinstance(command, str)
        if self.work.cwd:
            return f"cd -- {shlex.quote(inside(self.work.cwd))} && eval {shlex.quote(command)}"
        return command

    def _session_token(self) -> str:
        return self._session.token if self._session is not None else ""

    def _session_ended(self) -> bool:
        return self._session is not None and self.container.sessions.get(self.work.session) is not self._session

    async def _linger(self) -> None:
        """The shell is held."""

    async def _let_shell_go(self, keep: bool) -> None:
        session = self._session
        if session is None:
            return
        session.busy = False
        shell = session.shell
        if keep and shell is not None and not shell.gone.done() and not self._run.shell_ended:
            shell.run = None
            return
        self.container.sessions.pop(self.work.session, None)
        if shell is not None:
            await shell.close()


def _granted(grant: Grant) -> tuple[int, int, tuple[int, ...]]:
    """Milli-cores reserved and at most, and the NUMA nodes."""
    shares = [share for share in grant.shares if share.pool.partition("@")[0] == CPU]
    cells = tuple([cell for share in shares for cell in share.cells])
    return sum(share.reserved for share in shares), sum(share.limit for share in shares), cells
