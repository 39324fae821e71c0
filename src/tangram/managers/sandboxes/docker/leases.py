"""Leases of programs in containers.

Owns the use of a container by an action. There are two kinds: a separate program, and a command for the shell of a
session. The life cycle of a lease is in `sandboxes/leases.py`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from typing import Any

from tangram.cancellation import run_to_completion
from tangram.core.action import Usage
from tangram.core.demand import CPU
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.sandboxes.cpuset_allocator import CpusetAllocator
from tangram.managers.sandboxes.docker.container import Claim, Container
from tangram.managers.sandboxes.docker.files import home_directory
from tangram.managers.sandboxes.docker.output_framing import run_argv, session_argv, session_message
from tangram.managers.sandboxes.docker.processes import now_ticks, stop_processes
from tangram.managers.sandboxes.docker.programs import Programs, wait_started
from tangram.managers.sandboxes.docker.shells import CommandRun, DockerSession, Shell
from tangram.managers.sandboxes.leases import BASE_ENVIRONMENT, ExecLease, ProgramExit, export_lines
from tangram.managers.work import WORKSPACE, Exec, sandbox_path
from tangram.processes.exit_codes import KILLED
from tangram.processes.streams import Output
from tangram.processes.width import substitute_width, with_width

DEATH_S = 1.0
"""Time limit for the engine to report the end of a container, after a program in it was killed for no known reason."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class DockerProgramLease(ExecLease):
    """A separate program."""

    def __init__(
        self,
        action: str,
        grant: Grant,
        work: Exec,
        output: Output | None,
        *,
        container: Container,
        programs: Programs,
        cpusets: CpusetAllocator,
    ) -> None:
        super().__init__(work, grant.width, output)
        self.container = container
        self._action = action
        self._programs = programs
        self._cpusets = cpusets
        reserved, limit, cells = _cpu_share(grant)
        cpus, _ = cpusets.place(action, width=grant.width, reserved=reserved, cells=cells)
        self._claim = Claim(reserved=reserved, limit=limit, cpus=cpus)
        self._run_output = CommandRun(self._claim.token, self._captures, output)
        self._shell: Shell | None = None
        self._began_ticks = 0
        self._began_at = 0.0
        self._resize_tasks: set[asyncio.Task[None]] = set()

    # ---- start ----

    async def _launch(self) -> None:
        try:
            await self.container.enter(self._claim)
            self._began_ticks, self._began_at = now_ticks(), self._loop.time()
            await self._start_program()
        except BaseException:
            await run_to_completion(self._rollback())
            raise

    async def _start_program(self) -> None:
        command = substitute_width(self.work.command, self.width)
        shell = "bash" if self.container.image.has("bash") else "sh"
        words = (shell, "-c", command) if isinstance(command, str) else command
        environment = self._environment()
        # A shell drops variables whose names are not valid identifiers.
        odd = [f"{name}={value}" for name, value in environment.items() if not _VARIABLE.fullmatch(name)]
        if odd:
            words = ("env", *odd, *words)
        directory = sandbox_path(self.work.cwd or self._default_directory())
        self._shell = await self._programs.start(
            self.container,
            run_argv(self._claim.token, self._cpu_mask(), directory, words),
            token=self._claim.token,
            run=self._run_output,
            env=environment,
            stdin=self.work.stdin or None,
        )

    async def _rollback(self) -> None:
        if self._began_ticks and not self.container.gone.done():
            await self._terminate()
        await self._release(keep=False)

    def _default_directory(self) -> str:
        """Where commands start."""
        return self.container.image.directory or WORKSPACE

    def _cpu_mask(self) -> str:
        """The CPUs that it sees, as a hexadecimal mask; empty if the image has no taskset."""
        if not self.container.image.has("taskset"):
            return ""
        return format(sum(1 << cpu for cpu in self._claim.cpus), "x")

    def _environment(self) -> dict[str, str]:
        container = self.container
        defaults = BASE_ENVIRONMENT | {"HOME": home_directory(container.user), "USER": container.spec.user}
        return with_width(self.width, defaults | container.image.env | container.spec.env | self.work.env)

    # ---- while it runs ----

    def resize(self, *, reserved: int, limit: int) -> None:
        if self._is_ending:
            return
        self._claim.reserved, self._claim.limit = reserved, limit
        self._cpusets.resize(self._action, reserved)
        task = asyncio.create_task(self._apply_resize())
        self._resize_tasks.add(task)
        task.add_done_callback(self._resize_tasks.discard)

    async def _apply_resize(self) -> None:
        try:
            await self.container.apply_grants()
        except ManagerError as error:
            self.container.mark_lost(f"its CPU could not be changed: {error}")

    def cpu_seconds(self) -> float | None:
        return self.container.used(self._claim)

    async def _terminate(self) -> None:
        """If they cannot be killed, the container is."""
        try:
            await stop_processes(self.container, self._programs, self._claim, self._began_ticks, self._session_token())
        except (ManagerError, OSError) as error:
            self.container.mark_lost(f"an action in it could not be stopped: {error}")
            await self.container.kill()

    def _session_token(self) -> str:
        return ""

    # ---- end ----

    def _end_futures(self) -> tuple[asyncio.Future[Any], ...]:
        assert self._shell is not None
        return (self._run_output.ended, self._shell.exited, self.container.gone)

    async def _collect_exit(self) -> ProgramExit:
        code, lost = await self._exit_status()
        await self._release(keep=not self.is_stopped and not lost)
        claim = self._claim
        cpu_s, peak = claim.cpu_s, claim.memory_peak_bytes
        if self.container.meter.group is None:
            cpu_s, peak = self._self_reported_usage()
        return ProgramExit(
            code=code,
            lost=lost,
            usage=Usage(cpu_s=cpu_s, throttled_s=claim.throttled_s, memory_peak_bytes=peak),
            out_of_memory=claim.oom_kills > 0,
            session_ended=self._session_ended(),
        )

    async def _exit_status(self) -> tuple[int | None, str]:
        """Returns the exit code of the program, and the reason if it was lost."""
        assert self._shell is not None
        container = self.container
        if self._run_output.ended.done():
            # Also if its shell has ended with it.
            return self._run_output.ended.result(), ""
        if not self.is_stopped and not container.gone.done() and self._shell.exited.result() == KILLED:
            # All processes of a container are killed with it, and its own end may be reported later.
            await asyncio.wait([container.gone], timeout=DEATH_S)
        if container.gone.done():
            return None, f"sandbox {container.sandbox} ended while the action ran: {container.gone.result()}"
        if self.is_stopped:
            return None, ""
        code = self._shell.exited.result()
        return code, "" if code is not None else "the Docker engine lost the program"

    async def _release(self, *, keep: bool) -> None:
        """Release everything. Processes that the action left running stay in the container if `keep`."""
        try:
            await self._wait_shell_exit()
            await self.container.leave(self._claim)
        finally:
            self._cpusets.release(self._action)
            await self._release_shell(keep)

    async def _wait_shell_exit(self) -> None:
        """The script that ran the command should end before the container is paused."""
        if self._shell is not None and self._run_output.ended.done():
            await self._shell.wait_exit()

    async def _release_shell(self, keep: bool) -> None:
        if self._shell is not None:
            await self._shell.close()

    def _self_reported_usage(self) -> tuple[float, int]:
        """The usage that the script reports from inside, limited to plausible values."""
        cpu_s, peak = self._run_output.reported_usage
        elapsed_s = self._loop.time() - self._began_at
        return min(cpu_s, elapsed_s * len(self._cpusets.cpus)), min(peak, self.container.spec.memory_bytes)

    def _session_ended(self) -> bool:
        return False


class DockerSessionLease(DockerProgramLease):
    """A command for the shell of a session, which is started if there is none."""

    _session: DockerSession | None = None

    async def _start_program(self) -> None:
        session, ended = self._acquire_session()
        if ended is not None:
            await ended.close()
        message = session_message(self._claim.token, self._setup(session), self._command())
        if session.shell is None:
            session.shell = self._shell = await self._programs.start(
                self.container,
                session_argv(),
                token=session.token,
                run=self._run_output,
                env=self._environment(),
                stdin=message,
                holds_stdin=True,
            )
            return
        self._shell = session.shell
        self._shell.run = self._run_output
        self._shell.write(message)
        await wait_started(self.container, self._shell, self._run_output)

    def _acquire_session(self) -> tuple[DockerSession, Shell | None]:
        """The session, and the shell of an earlier one of that name which has ended."""
        name, container = self.work.session, self.container
        if not container.image.has("bash"):
            raise ManagerError(f"a session needs bash, which the image of {container.sandbox} lacks", retry=False)
        session = container.sessions.get(name)
        if session is not None and session.busy:
            raise ManagerError(f"session {name} of sandbox {container.sandbox} runs a command already", retry=False)
        ended: Shell | None = None
        if session is not None and session.shell is not None and session.shell.exited.done():
            ended = session.shell
            session = None
        if session is None:
            session = container.sessions[name] = DockerSession(secrets.token_hex(16))
        session.busy = True
        self._session = session
        return session, ended

    def _setup(self, session: DockerSession) -> str:
        """The environment that a separate program would get. It stays in the shell, as after an export."""
        lines = [] if session.width else [f"cd -- {shlex.quote(self._default_directory())}"]
        width_variables = with_width(self.width, {}) if session.width not in (0, self.width) else {}
        session.width = self.width
        variables = {
            name: value for name, value in (width_variables | self.work.env).items() if _VARIABLE.fullmatch(name)
        }
        lines += export_lines(variables)
        if mask := self._cpu_mask():
            lines.append(f"taskset -p {mask} $$ >/dev/null 2>&1")
        return "\n".join(lines)

    def _command(self) -> str:
        command = substitute_width(self.work.command, self.width)
        assert isinstance(command, str)
        if self.work.cwd:
            return f"cd -- {shlex.quote(sandbox_path(self.work.cwd))} && eval {shlex.quote(command)}"
        return command

    def _session_token(self) -> str:
        return self._session.token if self._session is not None else ""

    def _session_ended(self) -> bool:
        return self._session is not None and self.container.sessions.get(self.work.session) is not self._session

    async def _wait_shell_exit(self) -> None:
        """The shell stays."""

    async def _release_shell(self, keep: bool) -> None:
        session = self._session
        if session is None:
            return
        session.busy = False
        shell = session.shell
        if keep and shell is not None and not shell.exited.done() and not self._run_output.shell_ended:
            shell.run = None
            return
        self.container.sessions.pop(self.work.session, None)
        if shell is not None:
            await shell.close()


def _cpu_share(grant: Grant) -> tuple[int, int, tuple[int, ...]]:
    """Milli-cores reserved and at most, and the NUMA nodes."""
    shares = [share for share in grant.shares if share.pool.partition("@")[0] == CPU]
    cells = tuple([cell for share in shares for cell in share.cells])
    return sum(share.reserved for share in shares), sum(share.limit for share in shares), cells
