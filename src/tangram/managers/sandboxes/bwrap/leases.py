"""Programs: the leases of actions that execute something in a sandbox.

Owns the way of one program from its grant to its end: the slot that it runs in, its streams, what it used. Promises
what `managers.base` asks of a lease. Two kinds: a program of its own, and a command for a held shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shlex
import signal
from pathlib import Path
from typing import Any, NoReturn

from tangram.core.action import Usage
from tangram.core.demand import CORE, CPU
from tangram.core.messages import Grant, Share
from tangram.errors import ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.sandboxes.bwrap.images.store import SANDBOX_UID
from tangram.managers.sandboxes.bwrap.sandbox import Sandbox, Slot
from tangram.managers.sandboxes.bwrap.session import Session
from tangram.managers.sandboxes.bwrap.spawner.client import ExecFailed, KeptStream, Program, Spawning
from tangram.managers.sandboxes.cpuset_allocator import Cores, Moves
from tangram.managers.work import WORKSPACE, Ended, Exec, Executed, inside
from tangram.processes.capture import Capture
from tangram.processes.streams import STDERR, STDOUT, Output, standard_input
from tangram.processes.width import filled_in, told, whole_cores

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes, as a shell gives them."""
LOOK_S = 0.005
"""How often the processes of an action that was asked to end are looked at."""


class Placement:
    """Which slot sees which CPUs. When an action ends, another one may move to where it was."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._slots: dict[str, Slot] = {}

    def enter(self, action: str, grant: Grant, share: Share, sandbox: Sandbox, again: Slot | None) -> tuple[Slot, int]:
        """The slot of an action, and its width on this machine."""
        cores = self._cores
        cpus, moves = cores.place(action, width=grant.width, reserved=share.reserved, cells=share.cells)
        try:
            slot = sandbox.enter(
                weight=cores.weight(action), limit=min(share.limit, cores.total), cpus=cpus, again=again
            )
        except BaseException:
            moves |= cores.leave(action)
            raise
        finally:
            self._move(moves)
        self._slots[action] = slot
        return slot, len(cpus) * CORE

    def resize(self, action: str, sandbox: Sandbox, *, reserved: int, limit: int) -> None:
        self._cores.change(action, reserved)
        weight = self._cores.weight(action)
        sandbox.resize(self._slots[action], weight=weight, limit=min(limit, self._cores.total))

    def leave(self, action: str) -> None:
        del self._slots[action]
        self._move(self._cores.leave(action))

    def _move(self, moves: Moves) -> None:
        for action, cpus in moves.items():
            slot = self._slots.get(action)
            if slot is not None:
                with contextlib.suppress(ManagerError):  # its sandbox may be going
                    slot.group.set_cpus(cpus)


class ProgramLease:
    """A program of its own in a slot of its sandbox."""

    def __init__(
        self,
        action: str,
        grant: Grant,
        work: Exec,
        output: Output | None,
        *,
        sandbox: Sandbox,
        spawning: Spawning,
        place: Placement,
    ) -> None:
        self.action = action
        self.work = work
        self.sandbox = sandbox
        self._spawning = spawning
        self._place = place
        self._loop = asyncio.get_running_loop()
        share = next(share for share in grant.shares if share.pool.startswith(CPU))
        self._reserved = share.reserved
        self.slot, self._width = place.enter(action, grant, share, sandbox, self._slot_before())
        self._output = output
        self._captures = (Capture(work.capture_bytes_max), Capture(work.capture_bytes_max))
        self._program: Program | None = None
        self._failure: ExecFailed | None = None
        self._streams: tuple[KeptStream, ...] = ()
        self._began_at = self._loop.time()
        self._stopped: asyncio.Event | None = None
        """Given: it was asked to stop; set when nothing of it is left."""
        self._starved_s = 0.0
        self._delay_before_s = 0.0
        """For which a held shell had waited for CPU before this command."""

    def _slot_before(self) -> Slot | None:
        """That in which it goes on."""
        return None

    # ---- beginning ----

    async def begin(self) -> None:
        try:
            await self._launch()
        except ExecFailed as error:
            self._failure = error
        except BaseException:
            await self._vacate(keep=False)
            raise
        self._began_at = self._loop.time()

    async def _launch(self) -> None:
        command = filled_in(self.work.command, self._width)
        argv = [self.sandbox.image.shell, "-c", command] if isinstance(command, str) else list(command)
        self._streams = (_stream(STDOUT), _stream(STDERR))
        self._program = await self._execute(argv, self.work.stdin)

    async def _execute(self, argv: list[str], stdin: bytes, extra: dict[int, int] | None = None) -> Program:
        """`extra`: descriptors that the shell of a session gets besides its three streams, by their number there."""
        extra = extra or {}
        source = standard_input(stdin)
        try:
            for stream, capture in zip(self._streams, self._captures, strict=True):
                stream.begin(capture, self._output)
            return await self._spawning.execute(
                self.sandbox.box,
                [source, *(stream.writer for stream in self._streams), *extra.values()],
                argv=argv,
                env=self._environment(),
                cwd=inside(self.work.cwd or self.sandbox.image.cwd or WORKSPACE),
                groups=self.slot.joins,
                targets=(0, 1, 2, *extra),
                affinity=self.slot.affinity,
                session=self.work.session,
                streams=self._streams,
            )
        finally:
            os.close(source)
            for stream in self._streams:
                stream.close_writer()

    def _environment(self) -> dict[str, str]:
        sandbox = self.sandbox
        home = "/root" if sandbox.spec.user == "root" else "/home/agent"
        given = BASE_ENVIRONMENT | {"HOME": home, "USER": sandbox.spec.user}
        return told(self._width, given | sandbox.image.env | sandbox.spec.env | self.work.env)

    # ---- running ----

    def resize(self, *, reserved: int, limit: int) -> None:
        self._reserved = reserved
        self._place.resize(self.action, self.sandbox, reserved=reserved, limit=limit)

    def used(self) -> float | None:
        return self.slot.cpu_s_so_far()

    async def stop(self) -> None:
        if self._stopped is None:
            self._stopped = asyncio.Event()
            try:
                self._starved_s = self._starvation()
                await self._stop()
            finally:
                self._stopped.set()
        await self._stopped.wait()

    async def _stop(self) -> None:
        """Ask everybody once, whoever turns up later included: the program may still be on its way into the slot."""
        asked: set[int] = set()
        for _ in range(int(STOP_GRACE_S / LOOK_S)):
            there = self.slot.group.processes()
            if not there and self._has_ended():
                return
            for pid in there:
                if pid not in asked:
                    asked.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(LOOK_S)
        await self.sandbox.kill(self.slot)
        while not self._has_ended():
            await asyncio.sleep(LOOK_S)
            await self.sandbox.kill(self.slot)

    def _has_ended(self) -> bool:
        return self._program is None or self._program.has_ended

    def _starvation(self) -> float:
        """Seconds for which it waited for CPU while it had less than its reserve."""
        elapsed = self._loop.time() - self._began_at
        had = self.slot.cpu_s_so_far()
        lacking = elapsed - had * CORE / max(self._reserved, 1)
        if lacking <= 0.0:
            return 0.0
        return max(0.0, min(lacking, sum(map(_run_delay_s, self.slot.group.processes())) - self._delay_before_s))

    # ---- ending ----

    async def wait(self) -> Ended:
        """Whatever happens to it, this returns once, and its units are free then."""
        code: int | None = None
        lost = ""
        try:
            code = await self._end()
        except ManagerError as error:
            lost = f"sandbox {self.sandbox.name} is gone" if self.sandbox.is_ending() else str(error)
        ended_at = self._loop.time()
        if self._stopped is not None:
            await self._stopped.wait()
        for stream in self._streams:
            stream.end()
        if not lost and code == -signal.SIGKILL and self._stopped is None and self.sandbox.is_ending():
            code, lost = None, f"sandbox {self.sandbox.name} is gone: it ended while the action ran"
        usage, out_of_memory = self._used()
        await self._vacate(keep=self._stopped is None and not lost)
        usage = _with_overhead(usage, self._loop.time() - ended_at, self._starved_s)
        return Ended(usage=usage, executed=self._executed(code, out_of_memory), lost=lost)

    async def _end(self) -> int | None:
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

    def _executed(self, code: int | None, out_of_memory: bool) -> Executed:
        out, err = self._captures
        return Executed(
            exit_code=None if self._stopped is not None or code is None else code if code >= 0 else 128 - code,
            stdout=out.content(),
            stderr=err.content(),
            stdout_bytes=out.total_bytes,
            stderr_bytes=err.total_bytes,
            out_of_memory=out_of_memory,
            cpus=whole_cores(self._width),
            session_ended=self._session_ended(),
        )

    def _session_ended(self) -> bool:
        return False

    def _used(self) -> tuple[Usage, bool]:
        try:
            cpu_s, throttled_s = self.slot.used()
            peak = self.sandbox.group.memory_peak_bytes()
            killed = self.sandbox.new_memory_kills() > 0
        except OSError:
            return Usage(), False  # its groups are gone with the sandbox
        return Usage(cpu_s=cpu_s, throttled_s=throttled_s, memory_peak_bytes=peak), killed

    async def _vacate(self, *, keep: bool) -> None:
        """Give the slot back. What the action left running stays in the sandbox if `keep`, else it is killed."""
        try:
            if not keep:
                await self.sandbox.kill(self.slot)
            self._leave()
        except (OSError, ManagerError):
            pass  # its groups are gone with the sandbox
        self._place.leave(self.action)
        self._let_streams_go()

    def _leave(self) -> None:
        self.sandbox.leave(self.slot)

    def _let_streams_go(self) -> None:
        self.sandbox.discard(self._spawning.drain(self.sandbox.box, self._streams))


class SessionLease(ProgramLease):
    """A command for a held shell, which is started if there is none."""

    _session: Session | None = None
    _status: asyncio.Future[int] | None = None
    _shell_gone = False

    async def _launch(self) -> None:
        name = self.work.session
        if name in self.sandbox.sessions_lost:
            self.sandbox.sessions_lost.remove(name)
            self._spawning.session_over(self.sandbox.box, name)
            self._say_lost()
        session = self.sandbox.sessions.get(name)
        if session is not None and session.busy:
            raise ManagerError(f"session {name} of sandbox {self.sandbox.name} runs a command already", retry=False)
        if session is not None and session.has_ended:
            self._give_up(session)
        if session is None:
            session = await self._hold_shell()
            self.sandbox.sessions[name] = session
        else:
            assert session.program is not None
            if session.slot is not self.slot:
                self.slot.group.adopt([session.program.pid])
            self._delay_before_s = _run_delay_s(session.program.pid)
            for stream, capture in zip(session.streams, self._captures, strict=True):
                stream.begin(capture, self._output)
        self._streams = session.streams
        self._status = session.run(self._command(session))
        session.busy = True
        self._session = session

    def _slot_before(self) -> Slot | None:
        session = self.sandbox.sessions.get(self.work.session)
        return session.slot if session is not None and not session.busy else None

    def _give_up(self, session: Session) -> NoReturn:
        """Its shell has ended between two commands: what it held is lost, and the caller must know."""
        self._drop(session)
        self._say_lost()

    def _drop(self, session: Session) -> None:
        """Of which this action tells the caller."""
        del self.sandbox.sessions[self.work.session]
        session.close()
        self._spawning.session_over(self.sandbox.box, self.work.session)

    def _say_lost(self) -> NoReturn:
        self._shell_gone = True
        if self.sandbox.is_ending():
            raise ManagerError(f"sandbox {self.sandbox.name} is gone, and its sessions with it", retry=False)
        raise ExecFailed(errno.EPIPE, f"the shell of session {self.work.session} has ended; its state is lost")

    async def _hold_shell(self) -> Session:
        self._streams = streams = (_stream(STDOUT), _stream(STDERR))
        session = Session(streams)
        try:
            session.program = await self._execute(session.argv(self.sandbox.image.shell), b"", session.given)
        except BaseException:
            session.close()
            self._spawning.session_over(self.sandbox.box, self.work.session)
            raise
        session.close_given()
        return session

    def _command(self, session: Session) -> str:
        lines = []
        if session.width != self._width:
            lines += [f"export {name}={shlex.quote(value)}" for name, value in told(self._width, {}).items()]
            session.width = self._width
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.work.env.items()]
        command = filled_in(self.work.command, self._width)
        assert isinstance(command, str)
        # Evaluated apart: what is no command leaves the lines before it alone.
        run = f"eval {shlex.quote(command)}"
        if self.work.cwd:
            run = f"cd -- {shlex.quote(inside(self.work.cwd))} && {run}"
        return "\n".join([*lines, run])

    async def _exit_code(self) -> int:
        """Of the command, or of the shell if it took the shell along."""
        assert self._session is not None and self._session.program is not None and self._status is not None
        program = self._session.program
        either: set[asyncio.Future[Any]] = {self._status, program.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._status.result() if self._status.done() else await program.exit_code()

    def _has_ended(self) -> bool:
        return self._session is None or self._session.has_ended

    def _session_ended(self) -> bool:
        held = self.sandbox.sessions.get(self.work.session)
        return self._shell_gone or (self._session is not None and held is not self._session)

    async def _vacate(self, *, keep: bool) -> None:
        session = self._session
        if session is not None:
            session.busy = False
            if not keep or (self._status is not None and not self._status.done()):
                self._drop(session)
        await super()._vacate(keep=keep)

    def _leave(self) -> None:
        session = self._session
        if session is None or session.program is None or self.sandbox.sessions.get(self.work.session) is not session:
            super()._leave()
            return
        session.slot = None
        if self.sandbox.leave(self.slot, held=session.program.pid):
            session.slot = self.slot

    def _let_streams_go(self) -> None:
        """They are the shell's."""


BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


def _stream(number: int) -> KeptStream:
    """A program may open its stream again, as /dev/stdout."""
    stream = KeptStream(number)
    os.fchown(stream.writer, SANDBOX_UID, SANDBOX_UID)
    return stream


def _run_delay_s(pid: int) -> float:
    """Seconds for which the threads of a process were ready to run and did not."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        pass
    return total / 1e9


def _with_overhead(usage: Usage, overhead_s: float, starved_s: float) -> Usage:
    return Usage(
        cpu_s=usage.cpu_s,
        throttled_s=usage.throttled_s,
        memory_peak_bytes=usage.memory_peak_bytes,
        overhead_s=overhead_s,
        starved_s=starved_s,
    )
