"""A sandbox: its control groups, who runs in it, and whether it stands still.

Owns the groups below its own: a *slot* for each action that runs at the same time, used again and again, and one group
for what actions leave running. Decides nothing. Promises that nothing in a sandbox runs while no action does, that CPU
is given by weight and quota as granted, and that a sandbox which is closed leaves no group, process or directory.

    sandbox          weight: the reserves of its running actions; memory; number of processes
    ├── init         (version 2 only, where a group with children holds no process; in version 1 the sandbox itself)
    ├── a0, a1, …    slots: weight and quota of one action, the CPUs that it sees; or a held shell that rests
    ├── files        file work of the owner: counts as the sandbox's memory, never stands still
    └── background   what actions left running; like shells that rest, frozen while no action runs
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.images.store import Image
from tangram.managers.sandboxes.bwrap.session import Session
from tangram.managers.sandboxes.cgroups.groups import Group
from tangram.managers.work import SandboxSpec
from tangram.processes.streams import Stream

SLOT_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "freezer")
"""Version 1: memory and the number of processes are limited for the sandbox as a whole."""
WHOLE_CONTROLLERS = ("memory", "pids")
SLOT = re.compile(r"a[0-9]{1,6}")
BACKGROUND_RESERVE = 10
"""Milli-cores, as weight: what was left running yields to actions."""
MOVE_ROUNDS_MAX = 100
"""A process that waits for its quota is not yet frozen, and may fork once more."""
DISCARDED_MAX = 64
"""Streams that are read though nobody wants them: each is a descriptor of the owner. The oldest are closed."""
KILL_PAUSE_S = 0.002
KILL_ROUNDS_MAX = 5000
"""A process in the middle of a system call, such as a write to a slow disk, ends after it."""


class Slot:
    """The place of one running action."""

    def __init__(self, group: Group, joins: list[str]) -> None:
        self.group = group
        self.joins = joins
        """A process whose id is written to each of these files is in the slot."""
        self.affinity: tuple[int, ...] = ()
        """CPUs that a program must be told itself, where the group cannot say so."""
        self._cpu_s = 0.0
        self._throttled_s = 0.0
        """Of all actions before the present one."""

    def cpu_s_so_far(self) -> float:
        """CPU seconds of the present action."""
        return max(0.0, self.group.cpu_s() - self._cpu_s)

    def used(self) -> tuple[float, float]:
        """CPU and throttled seconds since the last call."""
        cpu_s, throttled_s = self.group.cpu_s(), self.group.throttled_s()
        used = (cpu_s - self._cpu_s, throttled_s - self._throttled_s)
        self._cpu_s, self._throttled_s = cpu_s, throttled_s
        return max(0.0, used[0]), max(0.0, used[1])


class Sandbox:
    def __init__(self, name: str, box: str, spec: SandboxSpec, image: Image, group: Group, directory: Path) -> None:
        self.name = name
        self.box = box
        """Its name for the spawner and in paths."""
        self.spec = spec
        self.image = image
        self.group = group
        self.directory = directory
        """Where its holder mounts its files; others see an empty directory."""
        self.init = 0
        """Its first process."""
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it is no more."""
        self.closing = asyncio.Lock()
        """Held by whoever ends it: two may ask for that."""
        self.sessions: dict[str, Session] = {}
        self.sessions_lost: set[str] = set()
        """Those whose shell ended with the last owner, and whose callers do not know it yet."""
        self._discarding: list[Stream] = []
        """Streams of actions that have ended, which what they left running still holds."""
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._resting: set[Slot] = set()
        """Those of held shells between two commands. No other action gets them."""
        self._weight_by_slot: dict[Slot, int] = {}
        self._background: Group | None = None
        self._files: Slot | None = None
        self._frozen = False
        self._ending = False
        self._abandoned = False
        """It belongs to the next owner: an action that has not quite ended touches nothing of it any more."""
        self._holds = 0
        """How many want it to stand still, whoever else wants it to run."""
        self._memory_kills = 0

    # ---- groups ----

    def prepare(self) -> list[str]:
        """Set the limits of the whole. Returns what its first process joins."""
        self.group.set_memory(self.spec.memory_bytes)
        self.group.set_processes_max(self.spec.processes_max)
        self.group.delegate()
        init = self.group if self.group.version == 1 else self.group.child("init")
        return init.join_files

    def _make_slot(self, name: str) -> Slot:
        if self.group.version == 2:
            group = self.group.child(name)
            return Slot(group, group.join_files)
        group = self.group.child(name, SLOT_CONTROLLERS)
        return Slot(group, group.join_files + self.group.part(WHOLE_CONTROLLERS).join_files)

    @property
    def files(self) -> list[str]:
        """What file work joins."""
        if self.group.version == 1:
            return self.group.part(WHOLE_CONTROLLERS).join_files
        if self._files is None:
            self._files = self._make_slot("files")
        return self._files.joins

    def _background_group(self) -> Group:
        if self._background is None:
            self._background = self._make_slot("background").group
            self._background.set_weight(BACKGROUND_RESERVE)
            if self._holds:
                self._background.freeze()
        return self._background

    def take_over(self, init: int, sessions_lost: Iterable[str]) -> None:
        """It comes from an owner that is gone: its groups are there, and its spawner has let all in it stand still or
        end. Blocks. Raises ManagerError if it is dying."""
        self.init = init
        self.require_alive()
        self.sessions_lost = set(sessions_lost)
        there = self.group.children()
        for number in range(1 + max([int(name[1:]) for name in there if SLOT.fullmatch(name)], default=-1)):
            slot = self._make_slot(f"a{number}")
            slot.group.kill()
            slot.group.thaw()
            slot.used()
            self._slots.append(slot)
            self._free.append(slot)
        if "background" in there:
            self._background_group().freeze()
            self._frozen = True
        self.new_memory_kills()

    # ---- actions ----

    def enter(self, *, weight: int, limit: int, cpus: tuple[int, ...], again: Slot | None = None) -> Slot:
        """A slot with these units; the sandbox runs. `again`: the one in which a held shell was left."""
        if again in self._resting:
            assert again is not None
            slot = again
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._make_slot(f"a{len(self._slots)}")
            self._slots.append(slot)
        try:
            if self._holds:
                slot.group.freeze()
            slot.group.set_cpu(reserved=weight, limit=limit)
            slot.affinity = () if slot.group.set_cpus(cpus) else cpus
        except BaseException:
            if slot not in self._resting:
                self._free.append(slot)
            raise
        if not self._weight_by_slot:
            self.wake()
            if self.group.version == 1:
                self.group.forget_memory_peak()
        self._resting.discard(slot)
        self._weigh(slot, weight)
        return slot

    def resize(self, slot: Slot, *, weight: int, limit: int) -> None:
        slot.group.set_cpu(reserved=weight, limit=limit)
        self._weigh(slot, weight)

    def leave(self, slot: Slot, held: int = 0) -> bool:
        """Whatever still runs there goes to the background; without any action the sandbox stands still. A held shell
        that is alone there stays: True."""
        if self._abandoned:
            return False
        there = slot.group.processes()
        rests = bool(held) and there == [held] and not self._ending and not self.is_ending()
        if rests:
            self._resting.add(slot)
        elif there:
            slot.group.freeze()  # whoever stands still does not fork while it is moved
            for _ in range(MOVE_ROUNDS_MAX):
                left = slot.group.processes()
                if not left:
                    break
                self._background_group().adopt(left)
            slot.group.thaw()
        del self._weight_by_slot[slot]
        if not rests:
            self._free.append(slot)
        if self._weight_by_slot:
            self._weigh()
        elif not self._frozen and not self._ending and (self._resting or self._background) and not self.is_ending():
            self._stand_still()
        return rests

    def _stand_still(self) -> None:
        for slot in self._resting:
            slot.group.freeze(wait=False)  # it waits for its next command
        if self._background is not None:
            self._background.freeze()
        self._frozen = True

    async def kill(self, slot: Slot) -> None:
        """Everything in the slot, and nothing else."""
        if self._abandoned:
            return
        for _ in range(KILL_ROUNDS_MAX):
            if slot.group.kill_round():
                return
            await asyncio.sleep(KILL_PAUSE_S)
        raise ManagerError(f"processes of sandbox {self.name} cannot be killed: {slot.group.processes()[:8]}")

    def _weigh(self, slot: Slot | None = None, weight: int = 0) -> None:
        if slot is not None:
            self._weight_by_slot[slot] = weight
        self.group.set_weight(sum(self._weight_by_slot.values()))

    def wake(self) -> None:
        """What was left running runs, and what rests may."""
        if self._frozen:
            if not self._holds:
                for group in self._left():
                    group.thaw()
            self._frozen = False

    def _left(self) -> list[Group]:
        """Of those that belong to no action. They stand still while none runs."""
        found = [slot.group for slot in self._resting]
        return [*found, self._background] if self._background is not None else found

    def let_end(self) -> None:
        """It is about to be killed: from now on nothing in it is made to stand still, for what does cannot die."""
        self._ending = True
        self.wake()

    def abandon(self) -> None:
        self._abandoned = True

    # ---- standing still for a moment ----

    def hold_still(self) -> None:
        """Nothing in it runs, actions included, until `go_on`. An action that starts meanwhile waits."""
        self._holds += 1
        for group in self._groups():
            group.freeze()

    def go_on(self) -> None:
        self._holds -= 1
        still = set(self._left()) if self._frozen else set()
        for group in self._groups():
            if not self._holds and group not in still:
                group.thaw()

    def _groups(self) -> list[Group]:
        found = [slot.group for slot in self._slots]
        return [*found, self._background] if self._background is not None else found

    # ---- what was used, and the end ----

    def new_memory_kills(self) -> int:
        """Processes that the kernel has killed for want of memory since the last call."""
        count = self.group.memory_kills()
        new, self._memory_kills = count - self._memory_kills, count
        return new

    def require_alive(self) -> None:
        """Raises ManagerError once its first process has begun to exit. The spawner notices that later: when the
        holder has ended, which waits for every process of the sandbox, frozen ones included."""
        if self.gone.done() or self.is_ending():
            raise self.gone_error()

    def gone_error(self) -> ManagerError:
        reason = self.gone.result() if self.gone.done() else "its first process has ended"
        return ManagerError(f"sandbox {self.name} is gone: {reason}", retry=False)

    def is_ending(self) -> bool:
        """Its first process is about to go, and with it all others."""
        try:
            with open(f"/proc/{self.init}/stat", "rb") as file:
                state, _, _, _, _, _, flags = file.read().rpartition(b")")[2].split()[:7]
        except OSError:
            return True
        return state in (b"Z", b"X") or bool(int(flags) & PF_EXITING)

    def discard(self, streams: Iterable[Stream]) -> None:
        """Go on reading what nobody wants, so that whoever still writes there can."""
        kept = [stream for stream in (*self._discarding, *streams) if stream.open]
        for stream in kept[:-DISCARDED_MAX]:
            stream.close()
        self._discarding = kept[-DISCARDED_MAX:]

    def close_descriptors(self) -> None:
        for session in self.sessions.values():
            session.close()
        for stream in self._discarding:
            stream.close()
        self.sessions, self._discarding = {}, []

    def remove(self) -> None:
        """Blocks until every process in it has ended and its groups are gone."""
        if self._frozen:
            for group in self._left():
                group.signal_all(9)
                group.thaw()
        self.group.remove()
        with contextlib.suppress(FileNotFoundError):
            self.directory.rmdir()


PF_EXITING = 0x4
"""In the flags of a process: it is on its way out."""
