"""Leases of programs in bwrap sandboxes.

Owns the slot of an action in its sandbox, which gives an exec the cores of its grant (cpuset, weight, quota), and the
usage measured there. There are two kinds: a separate program, and a command for the shell of a session. The life cycle
of a lease is in `sandboxes/leases.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

from tangram.core.action import Usage
from tangram.core.demand import CORE, CPU
from tangram.core.messages import Grant, Share
from tangram.errors import ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.sandboxes.bwrap.images.store import SANDBOX_UID
from tangram.managers.sandboxes.bwrap.sandbox import ActionSlot, BwrapSandbox, BwrapSession
from tangram.managers.sandboxes.bwrap.spawner.client import ExecFailed, Program, SpawnerClient
from tangram.managers.sandboxes.cpuset_allocator import CpusetAllocator, Moves
from tangram.managers.sandboxes.leases import BASE_ENVIRONMENT, DEFAULT_PATH, ExecLease, ProgramExit, session_command
from tangram.managers.work import WORKSPACE, Exec, sandbox_path
from tangram.processes.exit_codes import NOT_EXECUTABLE, NOT_FOUND, shell_exit_code
from tangram.processes.streams import STDERR, STDOUT, Output, Stream, standard_input
from tangram.processes.width import substitute_width, with_width

POLL_S = 0.005
"""Pause between two polls of the processes of an action that is being stopped."""


class CpuSlots:
    """Applies grants: the slot of each exec, with its cpuset, weight and quota. When an exec ends, another may move to
    its CPUs."""

    def __init__(self, cpusets: CpusetAllocator) -> None:
        self._cpusets = cpusets
        self._slots: dict[str, ActionSlot] = {}

    def acquire_slot(
        self, action: str, grant: Grant, share: Share, sandbox: BwrapSandbox, preferred_slot: ActionSlot | None
    ) -> tuple[ActionSlot, int]:
        """The slot of an action, with the cores of its grant, and its width on this machine."""
        cpusets = self._cpusets
        cpus, moves = cpusets.place(action, width=grant.width, reserved=share.reserved, cells=share.cells)
        try:
            slot = sandbox.acquire_slot(
                weight=cpusets.weight(action),
                limit=min(share.limit, cpusets.total),
                cpus=cpus,
                preferred=preferred_slot,
            )
        except BaseException:
            moves |= cpusets.release(action)
            raise
        finally:
            self._move(moves)
        self._slots[action] = slot
        return slot, len(cpus) * CORE

    def has_slot(self, action: str) -> bool:
        return action in self._slots

    def resize(self, action: str, sandbox: BwrapSandbox, *, reserved: int, limit: int) -> None:
        self._cpusets.resize(action, reserved)
        weight = self._cpusets.weight(action)
        sandbox.resize(self._slots[action], weight=weight, limit=min(limit, self._cpusets.total))

    def release_slot(self, action: str) -> None:
        del self._slots[action]
        self._move(self._cpusets.release(action))

    def _move(self, moves: Moves) -> None:
        for action, cpus in moves.items():
            slot = self._slots.get(action)
            if slot is not None:
                with contextlib.suppress(ManagerError):  # its sandbox may be ending
                    slot.group.set_cpus(cpus)


class BwrapProgramLease(ExecLease):
    """A program in a slot of its sandbox."""

    def __init__(
        self,
        action: str,
        grant: Grant,
        work: Exec,
        output: Output | None,
        *,
        sandbox: BwrapSandbox,
        spawner: SpawnerClient,
        cpu_slots: CpuSlots,
    ) -> None:
        self.action = action
        self.sandbox = sandbox
        self._spawner = spawner
        self._cpu_slots = cpu_slots
        share = next(share for share in grant.shares if share.pool.startswith(CPU))
        self._reserved = share.reserved
        self.slot, width = cpu_slots.acquire_slot(action, grant, share, sandbox, self._previous_slot(work))
        super().__init__(work, width, output)
        self._program: Program | None = None
        self._failure: ExecFailed | None = None
        self._starved_s = 0.0
        self._delay_before_s = 0.0
        """Run delay of the session's shell before this command."""

    def _previous_slot(self, work: Exec) -> ActionSlot | None:
        """The slot in which the shell of the session waits."""
        return None

    # ---- start ----

    async def _launch(self) -> None:
        try:
            await self._start_program()
        except ExecFailed as error:
            self._failure = error
        except BaseException:
            await self._release(keep=False)
            raise

    async def _start_program(self) -> None:
        command = substitute_width(self.work.command, self.width)
        argv = [self.sandbox.image.shell, "-c", command] if isinstance(command, str) else list(command)
        self._program = await self._execute(argv, self.work.stdin, (_new_stream(STDOUT), _new_stream(STDERR)))

    async def _execute(
        self, argv: list[str], stdin: bytes, streams: tuple[Stream, ...], extra: dict[int, int] | None = None
    ) -> Program:
        """`extra`: further descriptors of the shell of a session, by their number in it."""
        extra = extra or {}
        source = standard_input(stdin)
        try:
            self.capture_output(streams)
            return await self._spawner.execute(
                self.sandbox.sandbox_id,
                [source, *(stream.writer for stream in self.streams), *extra.values()],
                argv=argv,
                env=self._environment(),
                cwd=sandbox_path(self.work.cwd or self.sandbox.image.cwd or WORKSPACE),
                groups=self.slot.join_files,
                targets=(0, 1, 2, *extra),
                affinity=self.slot.affinity,
                session=self.work.session,
                streams=self.streams,
            )
        finally:
            os.close(source)
            for stream in self.streams:
                stream.close_writer()

    def _environment(self) -> dict[str, str]:
        sandbox = self.sandbox
        home = "/root" if sandbox.spec.user == "root" else "/home/agent"
        variables = {"PATH": DEFAULT_PATH} | BASE_ENVIRONMENT | {"HOME": home, "USER": sandbox.spec.user}
        return with_width(self.width, variables | sandbox.image.env | sandbox.spec.env | self.work.env)

    # ---- while it runs ----

    def resize(self, *, reserved: int, limit: int) -> None:
        """Has no effect after the end of the program: another action may have the slot by then."""
        if self._cpu_slots.has_slot(self.action):
            self._reserved = reserved
            self._cpu_slots.resize(self.action, self.sandbox, reserved=reserved, limit=limit)

    def cpu_seconds(self) -> float | None:
        return self.slot.cpu_s_so_far() if self._cpu_slots.has_slot(self.action) else None

    async def _terminate(self) -> None:
        """Signals each process once, also those that appear later: the program may still be on its way into the
        slot."""
        self._starved_s = self._starvation_s()
        signalled: set[int] = set()
        for _ in range(int(STOP_GRACE_S / POLL_S)):
            pids = self.slot.group.processes()
            if not pids and self._has_ended():
                return
            for pid in pids:
                if pid not in signalled:
                    signalled.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(POLL_S)
        await self.sandbox.kill(self.slot)
        while not self._has_ended():
            await asyncio.sleep(POLL_S)
            await self.sandbox.kill(self.slot)

    def _has_ended(self) -> bool:
        return self._program is None or self._program.has_ended

    def _starvation_s(self) -> float:
        """Seconds for which it waited for CPU while it had less than its reserve."""
        elapsed_s = self._loop.time() - self._started_s
        used_s = self.slot.cpu_s_so_far()
        lacking_s = elapsed_s - used_s * CORE / max(self._reserved, 1)
        if lacking_s <= 0.0:
            return 0.0
        return max(0.0, min(lacking_s, sum(map(_run_delay_s, self.slot.group.processes())) - self._delay_before_s))

    # ---- end ----

    def _end_futures(self) -> tuple[asyncio.Future[Any], ...]:
        return (self._program.ended,) if self._failure is None and self._program is not None else ()

    async def _collect_exit(self) -> ProgramExit:
        code: int | None = None
        lost_reason = self._stop_error
        try:
            code = await self._wait_exit_code() if not lost_reason else None
        except ManagerError as error:
            lost_reason = f"sandbox {self.sandbox.name} is gone" if self.sandbox.is_ending() else str(error)
        if not lost_reason and code == -signal.SIGKILL and not self.is_stopped and self.sandbox.is_ending():
            lost_reason = f"sandbox {self.sandbox.name} is gone: it ended while the action ran"
        usage, out_of_memory = self._usage()
        await self._release(keep=not self.is_stopped and not lost_reason)
        return ProgramExit(
            code=None if code is None else shell_exit_code(code),
            lost=lost_reason,
            usage=usage,
            out_of_memory=out_of_memory,
            session_ended=self._session_ended(),
        )

    async def _wait_exit_code(self) -> int | None:
        try:
            if self._failure is not None:
                raise self._failure
            return await self._exit_code()
        except ExecFailed as error:
            self._captures[1].feed(f"tangram: {error.reason}\n".encode())
            return NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE

    async def _exit_code(self) -> int:
        assert self._program is not None
        return await self._program.exit_code()

    def _session_ended(self) -> bool:
        return False

    def _usage(self) -> tuple[Usage, bool]:
        try:
            cpu_s, throttled_s = self.slot.take_usage()
            peak = self.sandbox.group.memory_peak_bytes()
            killed = self.sandbox.new_oom_kills() > 0
        except OSError:
            return Usage(starved_s=self._starved_s), False  # its groups have been removed with the sandbox
        usage = Usage(cpu_s=cpu_s, throttled_s=throttled_s, starved_s=self._starved_s, memory_peak_bytes=peak)
        return usage, killed

    async def _release(self, *, keep: bool) -> None:
        """Release the slot. Processes that the action left running stay in the sandbox if `keep`, else they are
        killed."""
        try:
            if not keep:
                await self.sandbox.kill(self.slot)
            self._leave_slot()
        except (OSError, ManagerError):
            pass  # its groups have been removed with the sandbox
        self._cpu_slots.release_slot(self.action)
        self._release_streams()

    def _leave_slot(self) -> None:
        self.sandbox.release_slot(self.slot)

    def _release_streams(self) -> None:
        self.sandbox.discard(self._spawner.drain(self.sandbox.sandbox_id, self.streams))


class BwrapSessionLease(BwrapProgramLease):
    """A command for the shell of a session, which is started if there is none."""

    _session: BwrapSession | None = None
    _is_shell_gone = False

    async def _start_program(self) -> None:
        name = self.work.session
        if name in self.sandbox.lost_sessions:
            self.sandbox.lost_sessions.remove(name)
            self._spawner.end_session(self.sandbox.sandbox_id, name)
            self._raise_session_lost()
        session = self.sandbox.sessions.get(name)
        if session is not None and session.busy:
            raise ManagerError(f"session {name} of sandbox {self.sandbox.name} runs a command already", retry=False)
        if session is not None and session.has_ended:
            self._raise_shell_ended(session)
        if session is None:
            session = await self._start_shell(name)
        else:
            assert session.program is not None
            if session.slot is not self.slot:
                self.slot.group.add_processes([session.program.pid])
            self._delay_before_s = _run_delay_s(session.program.pid)
            self.capture_output(session.streams)
        self._program = session.program
        session.run(self._command(session))
        self._session = session

    def _previous_slot(self, work: Exec) -> ActionSlot | None:
        session = self.sandbox.sessions.get(work.session)
        return session.slot if session is not None and not session.busy else None

    def _raise_shell_ended(self, session: BwrapSession) -> NoReturn:
        """The shell has ended between two commands: its state is lost, and the caller must be notified."""
        self._drop_session(session)
        self._raise_session_lost()

    def _drop_session(self, session: BwrapSession) -> None:
        """Remove a session whose end this action reports to the caller."""
        if self.sandbox.sessions.get(self.work.session) is not session:
            return  # closed with its sandbox
        del self.sandbox.sessions[self.work.session]
        session.close()
        self._spawner.end_session(self.sandbox.sandbox_id, self.work.session)

    def _raise_session_lost(self) -> NoReturn:
        self._is_shell_gone = True
        if self.sandbox.is_ending():
            raise ManagerError(f"sandbox {self.sandbox.name} is gone, and its sessions with it", retry=False)
        raise ExecFailed(errno.EPIPE, f"the shell of session {self.work.session} has ended; its state is lost")

    async def _start_shell(self, name: str) -> BwrapSession:
        streams = (_new_stream(STDOUT), _new_stream(STDERR))
        session = BwrapSession(streams)
        session.busy = True  # registered before the await: a concurrent command is refused, not given a second shell
        self.sandbox.sessions[name] = session
        try:
            argv = session.argv(self.sandbox.image.shell)
            session.program = await self._execute(argv, b"", streams, session.shell_fds)
            if self.sandbox.sessions.get(name) is not session:
                raise self.sandbox.gone_error()  # closed with its sandbox
        except BaseException:
            self._drop_session(session)
            raise
        session.close_shell_fds()
        return session

    def _command(self, session: BwrapSession) -> str:
        exports = self.work.env
        if session.width != self.width:
            exports = with_width(self.width, {}) | exports
            session.width = self.width
        return session_command(self.work, self.width, exports, sandbox_path(self.work.cwd) if self.work.cwd else "")

    def _end_futures(self) -> tuple[asyncio.Future[Any], ...]:
        ended = super()._end_futures()
        return (self._session.status, *ended) if self._session is not None else ended

    async def _exit_code(self) -> int:
        """The exit code of the command, or of the shell if the command ended it."""
        assert self._session is not None
        return self._session.status.result() if self._session.status.done() else await super()._exit_code()

    def _has_ended(self) -> bool:
        return self._session is None or self._session.has_ended

    def _session_ended(self) -> bool:
        held = self.sandbox.sessions.get(self.work.session)
        return self._is_shell_gone or (self._session is not None and held is not self._session)

    async def _release(self, *, keep: bool) -> None:
        session = self._session
        if session is not None:
            session.busy = False
            if not keep or not session.status.done():
                self._drop_session(session)
        await super()._release(keep=keep)

    def _leave_slot(self) -> None:
        session = self._session
        if session is None or session.program is None or self.sandbox.sessions.get(self.work.session) is not session:
            super()._leave_slot()
            return
        session.slot = None
        if self.sandbox.release_slot(self.slot, shell_pid=session.program.pid):
            session.slot = self.slot

    def _release_streams(self) -> None:
        """The streams belong to the session."""


def _new_stream(number: int) -> Stream:
    """Owned by the user of the sandbox: a program may open its stream again, as /dev/stdout."""
    stream = Stream(number)
    os.fchown(stream.writer, SANDBOX_UID, SANDBOX_UID)
    return stream


def _run_delay_s(pid: int) -> float:
    """Seconds for which the threads of a process were runnable and did not run."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        pass
    return total / 1e9
