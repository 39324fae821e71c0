"""A bwrap sandbox: its control groups, the actions that run in it, and whether it is frozen.

Owns the groups below its own: a reusable *slot* for each concurrent action, and one group for background processes.
Makes no decisions. Promises that no process of the agent runs while no action runs, that weight and quota are those of
the grant, and that a closed sandbox leaves no group, process or directory.

    sandbox          weight: the reserves of its running actions; memory; number of processes
    ├── init         (version 2 only, where a group with children holds no process; in version 1 the sandbox itself)
    ├── a0, a1, …    slots: weight, quota and CPUs of one action; or the shell of an idle session, then frozen too
    ├── files        file workers of the owner: count as the sandbox's memory, are never frozen
    └── background   processes that actions left running; frozen while no action runs
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.images.store import StoredImage
from tangram.managers.sandboxes.bwrap.spawner.client import Program
from tangram.managers.sandboxes.cgroups.groups import Cgroup
from tangram.managers.sandboxes.leases import ShellSession
from tangram.managers.work import SandboxSpec
from tangram.processes.process_tree import read_process
from tangram.processes.streams import Stream

SLOT_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "freezer")
"""Controllers of a slot in version 1: memory and the number of processes are limited for the sandbox as a whole."""
SANDBOX_CONTROLLERS = ("memory", "pids")
SLOT_NAME = re.compile(r"a[0-9]{1,6}")
BACKGROUND_RESERVE = 10
"""Weight of background processes, in milli-cores: background processes yield to actions."""
MOVE_ROUNDS_MAX = 100
"""Rounds of moving processes: a throttled one is not frozen yet and may fork again."""
DISCARDED_MAX = 64
"""Streams of ended actions that are drained; each takes a descriptor of the owner. The oldest are closed."""
SHELL_FDS = (10, 11)
"""The descriptors at which the shell of a session finds its ends of the two pipes."""
KILL_PAUSE_S = 0.002
KILL_ROUNDS_MAX = 5000
"""Rounds of killing: a process in a system call, such as a write to a slow disk, ends after it."""


class ActionSlot:
    """The control group of one running action."""

    def __init__(self, group: Cgroup, joins: list[str]) -> None:
        self.group = group
        self.join_files = joins
        """A process whose id is written to each of these files is in the slot."""
        self.affinity: tuple[int, ...] = ()
        """CPUs that a program must set as its affinity, where the group has no cpuset."""
        self._cpu_s = 0.0
        self._throttled_s = 0.0
        """Usage of all earlier actions."""

    def cpu_s_so_far(self) -> float:
        """CPU seconds of the current action."""
        return max(0.0, self.group.cpu_s() - self._cpu_s)

    def take_usage(self) -> tuple[float, float]:
        """CPU and throttled seconds since the last call."""
        cpu_s, throttled_s = self.group.cpu_s(), self.group.throttled_s()
        used = (cpu_s - self._cpu_s, throttled_s - self._throttled_s)
        self._cpu_s, self._throttled_s = cpu_s, throttled_s
        return max(0.0, used[0]), max(0.0, used[1])


class BwrapSession(ShellSession):
    """The shell of a session. Between commands it stays in the slot of the last one, or in the background group with
    the processes that this command left running."""

    def __init__(self, streams: tuple[Stream, Stream]) -> None:
        super().__init__()
        self.streams = streams
        self.program: Program | None = None
        self.slot: ActionSlot | None = None
        """The slot in which it stays."""

    def argv(self, shell: str) -> list[str]:
        return [*self._shell.argv(shell)[:-2], *map(str, SHELL_FDS)]

    @property
    def shell_fds(self) -> dict[int, int]:
        """The descriptors of the shell, by the number that they have there."""
        return dict(zip(SHELL_FDS, self._shell.child_fds, strict=True))

    def close_shell_fds(self) -> None:
        self._shell.close_child_fds()

    @property
    def has_ended(self) -> bool:
        return self.program is not None and self.program.has_ended

    def close(self) -> None:
        super().close()
        for stream in self.streams:
            stream.close()


class BwrapSandbox:
    def __init__(
        self, name: str, sandbox_id: str, spec: SandboxSpec, image: StoredImage, group: Cgroup, directory: Path
    ) -> None:
        self.name = name
        self.sandbox_id = sandbox_id
        """The name of the sandbox for the spawner and in paths."""
        self.spec = spec
        self.image = image
        self.group = group
        self.directory = directory
        """The directory on which its holder mounts its files; it is empty for other processes."""
        self.init = 0
        """Pid of the sandbox's first process."""
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason of its end."""
        self.closing = asyncio.Lock()
        """Held while it is being ended, which two callers may request."""
        self.sessions: dict[str, BwrapSession] = {}
        self.lost_sessions: set[str] = set()
        """Sessions whose shell ended with the previous owner, and whose callers have not been notified yet."""
        self._discarded_streams: list[Stream] = []
        """Streams of ended actions that processes left running still hold."""
        self._slots: list[ActionSlot] = []
        self._free_slots: list[ActionSlot] = []
        self._idle_session_slots: set[ActionSlot] = set()
        """Slots of idle sessions. No other action gets them."""
        self._weight_by_slot: dict[ActionSlot, int] = {}
        self._background: Cgroup | None = None
        self._file_slot: ActionSlot | None = None
        self._idle_frozen = False
        self._is_closing = False
        self._abandoned = False
        """Whether it belongs to the next owner: actions that are still ending must not touch it any more."""
        self._freeze_count = 0
        """The number of callers that have frozen it."""
        self._oom_kills = 0

    # ---- groups ----

    def apply_limits(self) -> list[str]:
        """Set the limits of the sandbox. Returns the files that its first process joins."""
        self.group.set_memory(self.spec.memory_bytes)
        self.group.set_processes_max(self.spec.processes_max)
        self.group.delegate()
        init = self.group if self.group.version == 1 else self.group.child("init")
        return init.join_files

    def _make_slot(self, name: str) -> ActionSlot:
        if self.group.version == 2:
            group = self.group.child(name)
            return ActionSlot(group, group.join_files)
        group = self.group.child(name, SLOT_CONTROLLERS)
        return ActionSlot(group, group.join_files + self.group.subset(SANDBOX_CONTROLLERS).join_files)

    @property
    def file_join_files(self) -> list[str]:
        if self.group.version == 1:
            return self.group.subset(SANDBOX_CONTROLLERS).join_files
        if self._file_slot is None:
            self._file_slot = self._make_slot("files")
        return self._file_slot.join_files

    def _background_group(self) -> Cgroup:
        if self._background is None:
            self._background = self._make_slot("background").group
            self._background.set_weight(BACKGROUND_RESERVE)
            if self._freeze_count:
                self._background.freeze()
        return self._background

    def adopt(self, init: int, sessions_lost: Iterable[str]) -> None:
        """Adopt a sandbox of a dead owner: its groups exist, and its spawner has frozen or ended all its processes.
        Blocks. Raises ManagerError if it is ending."""
        self.init = init
        self.require_alive()
        self.lost_sessions = set(sessions_lost)
        existing = self.group.children()
        for number in range(1 + max([int(name[1:]) for name in existing if SLOT_NAME.fullmatch(name)], default=-1)):
            slot = self._make_slot(f"a{number}")
            slot.group.kill()
            slot.group.thaw()
            slot.take_usage()
            self._slots.append(slot)
            self._free_slots.append(slot)
        if "background" in existing:
            self._background_group().freeze()
            self._idle_frozen = True
        self.new_oom_kills()

    # ---- actions ----

    def acquire_slot(
        self, *, weight: int, limit: int, cpus: tuple[int, ...], preferred: ActionSlot | None = None
    ) -> ActionSlot:
        """Returns a slot with these units, and thaws the sandbox. `preferred`: the slot of an idle session."""
        if preferred in self._idle_session_slots:
            assert preferred is not None
            slot = preferred
        elif self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._make_slot(f"a{len(self._slots)}")
            self._slots.append(slot)
        try:
            if self._freeze_count:
                slot.group.freeze()
            slot.group.set_cpu(reserved=weight, limit=limit)
            slot.affinity = () if slot.group.set_cpus(cpus) else cpus
        except BaseException:
            if slot not in self._idle_session_slots:
                self._free_slots.append(slot)
            raise
        if not self._weight_by_slot:
            self.thaw_idle()
            if self.group.version == 1:
                self.group.reset_memory_peak()
        self._idle_session_slots.discard(slot)
        self._update_weight(slot, weight)
        return slot

    def resize(self, slot: ActionSlot, *, weight: int, limit: int) -> None:
        slot.group.set_cpu(reserved=weight, limit=limit)
        self._update_weight(slot, weight)

    def release_slot(self, slot: ActionSlot, shell_pid: int = 0) -> bool:
        """Move remaining processes to the background group, and freeze the sandbox if no action is left. Returns True
        if only the shell of a session is left, which then stays in the slot."""
        if self._abandoned:
            return False
        pids = slot.group.processes()
        only_shell_left = bool(shell_pid) and pids == [shell_pid] and not self._is_closing and not self.is_ending()
        if only_shell_left:
            self._idle_session_slots.add(slot)
        elif pids:
            slot.group.freeze()  # frozen processes do not fork while they are moved
            for _ in range(MOVE_ROUNDS_MAX):
                left = slot.group.processes()
                if not left:
                    break
                self._background_group().add_processes(left)
            slot.group.thaw()
        del self._weight_by_slot[slot]
        if not only_shell_left:
            self._free_slots.append(slot)
        if self._weight_by_slot:
            self._update_weight()
        elif (
            not self._idle_frozen
            and not self._is_closing
            and (self._idle_session_slots or self._background)
            and not self.is_ending()
        ):
            self._freeze_idle()
        return only_shell_left

    def _freeze_idle(self) -> None:
        """Freeze background processes and idle sessions with the freezer: they run only while an action does."""
        for slot in self._idle_session_slots:
            slot.group.freeze(wait=False)  # it waits for its next command
        if self._background is not None:
            self._background.freeze()
        self._idle_frozen = True

    async def kill(self, slot: ActionSlot) -> None:
        """Kill all processes in the slot, and no others."""
        if self._abandoned:
            return
        for _ in range(KILL_ROUNDS_MAX):
            if slot.group.try_kill():
                return
            await asyncio.sleep(KILL_PAUSE_S)
        raise ManagerError(f"processes of sandbox {self.name} cannot be killed: {slot.group.processes()[:8]}")

    def _update_weight(self, slot: ActionSlot | None = None, weight: int = 0) -> None:
        if slot is not None:
            self._weight_by_slot[slot] = weight
        self.group.set_weight(sum(self._weight_by_slot.values()))

    def thaw_idle(self) -> None:
        """Thaw background processes and idle sessions."""
        if self._idle_frozen:
            if not self._freeze_count:
                for group in self._idle_cgroups():
                    group.thaw()
            self._idle_frozen = False

    def _idle_cgroups(self) -> list[Cgroup]:
        """The groups without an action. They are frozen while no action runs."""
        groups = [slot.group for slot in self._idle_session_slots]
        return [*groups, self._background] if self._background is not None else groups

    def prepare_kill(self) -> None:
        """Called before the sandbox is killed: from now on none of its processes is frozen, because a frozen process
        cannot end."""
        self._is_closing = True
        self.thaw_idle()

    def abandon(self) -> None:
        self._abandoned = True

    # ---- freezing for a commit ----

    def freeze(self) -> None:
        """Freeze everything in it, actions included, until `thaw`. An action that starts meanwhile waits."""
        self._freeze_count += 1
        for group in self._cgroups():
            group.freeze()

    def thaw(self) -> None:
        self._freeze_count -= 1
        still_frozen = set(self._idle_cgroups()) if self._idle_frozen else set()
        for group in self._cgroups():
            if not self._freeze_count and group not in still_frozen:
                group.thaw()

    def _cgroups(self) -> list[Cgroup]:
        groups = [slot.group for slot in self._slots]
        return [*groups, self._background] if self._background is not None else groups

    # ---- usage and end ----

    def new_oom_kills(self) -> int:
        """Processes that the kernel has killed for lack of memory since the last call."""
        count = self.group.oom_kills()
        new, self._oom_kills = count - self._oom_kills, count
        return new

    def require_alive(self) -> None:
        """Raises ManagerError once its first process has begun to exit. The spawner detects that later: when the holder
        has ended, which waits for every process of the sandbox, including frozen ones."""
        if self.gone.done() or self.is_ending():
            raise self.gone_error()

    def gone_error(self) -> ManagerError:
        reason = self.gone.result() if self.gone.done() else "its first process has ended"
        return ManagerError(f"sandbox {self.name} is gone: {reason}", retry=False)

    def is_ending(self) -> bool:
        """Whether the sandbox's first process is exiting, and with it all others."""
        process = read_process(self.init)
        return process is None or process.state in (b"Z", b"X") or process.is_exiting

    def discard(self, streams: Iterable[Stream]) -> None:
        """Drain streams of an ended action, so that processes which still write there do not block."""
        kept = [stream for stream in (*self._discarded_streams, *streams) if stream.is_open]
        for stream in kept[:-DISCARDED_MAX]:
            stream.close()
        self._discarded_streams = kept[-DISCARDED_MAX:]

    def close_descriptors(self) -> None:
        for session in self.sessions.values():
            session.close()
        for stream in self._discarded_streams:
            stream.close()
        self.sessions, self._discarded_streams = {}, []

    def remove(self) -> None:
        """Blocks until every process in it has ended and its groups are removed."""
        if self._idle_frozen:
            for group in self._idle_cgroups():
                group.signal_all(9)
                group.thaw()
        self.group.remove()
        with contextlib.suppress(FileNotFoundError):
            self.directory.rmdir()
