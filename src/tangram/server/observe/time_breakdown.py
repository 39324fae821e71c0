"""Spending: where the time of trajectories went.

Owns the division of every second between the first submission of a trajectory and its last end. Each goes to exactly
one of these, the first that is true of it:

    execution   an action of the trajectory executes; of that the part that its manager measured as its own is overhead
    `start`     units are granted, and the manager has yet to start an action with them
    waiting     an action waits for units, by the kind of pool that was short
    thinking    no action of the trajectory is under way

A second that several actions of one trajectory share, because they all execute or all wait, is divided among them in
equal parts. So nothing is counted twice, and the parts add up to the whole. What an action had is entered in the sums
of its run when it leaves a phase; what is under way is not in them yet. Never looks at a clock or at the scheduler.

A trajectory is what actions say it is; where they say nothing it is their sandbox, else the action itself. It ends when
its last sandbox was closed, and one without ends when nothing was under way in it for IDLE_S: what comes later under
its name is another trajectory, so a longer pause is nobody's thinking.
"""

from __future__ import annotations

from tangram.core.action import Action
from tangram.runtime.views import Spending

IDLE_S = 3600.0
IDLE_MAX = 100_000
"""Trajectories in which nothing is under way. Beyond, the one that has been so for longest is forgotten sooner."""
KINDS_MAX = 64
"""Kinds of pools by name; beyond, their waiting counts under OTHER."""
OTHER = "other"
START = "start"

WAITING, STARTING, EXECUTING = 0, 1, 2
"""The phases of an action, from the one that counts least."""


class Sums:
    """Of one run."""

    __slots__ = ("execution_s", "overhead_s", "thinking_s", "waiting_s")

    def __init__(self) -> None:
        self.waiting_s: dict[str, float] = {}
        self.execution_s = self.overhead_s = self.thinking_s = 0.0

    def waited(self, kind: str, seconds: float) -> None:
        waiting_s = self.waiting_s
        if kind not in waiting_s and len(waiting_s) >= KINDS_MAX:
            kind = OTHER
        waiting_s[kind] = waiting_s.get(kind, 0.0) + seconds

    def parts(self) -> dict[str, float]:
        """As in the label of the metric."""
        waiting = {f"waiting:{kind}": seconds for kind, seconds in self.waiting_s.items()}
        rest = {"execution": self.execution_s, "overhead": self.overhead_s, "thinking": self.thinking_s}
        return waiting | rest

    def view(self) -> Spending:
        return Spending(
            total_s=sum(self.waiting_s.values()) + self.execution_s + self.overhead_s + self.thinking_s,
            waiting_s=dict(self.waiting_s),
            execution_s=self.execution_s,
            overhead_s=self.overhead_s,
            thinking_s=self.thinking_s,
        )


class Trajectory:
    """What is under way in one. The shares count, per phase, the seconds that each action in it has had since the
    trajectory began: an action remembers the count at which it came, and what it had is the difference."""

    __slots__ = ("at_s", "boxes", "closed", "counts", "key", "shares", "sums")

    def __init__(self, key: tuple[str, str] | None, sums: Sums, now: float) -> None:
        self.key = key
        """Its run and name. None: it consists of one action, and ends with it."""
        self.sums = sums
        self.at_s = now
        self.boxes = 0
        """Sandboxes that were opened in it and not closed."""
        self.closed = False
        """The last of them was closed. What was under way in it then may end later."""
        self.counts = [0, 0, 0]
        self.shares = [0.0, 0.0, 0.0]

    def advance(self, now: float) -> None:
        elapsed_s = now - self.at_s
        if elapsed_s <= 0.0:
            return
        self.at_s = now
        waiting, starting, executing = self.counts
        if executing:
            self.shares[EXECUTING] += elapsed_s / executing
        elif starting:
            self.shares[STARTING] += elapsed_s / starting
        elif waiting:
            self.shares[WAITING] += elapsed_s / waiting
        else:
            self.sums.thinking_s += elapsed_s

    def enter(self, phase: int) -> float:
        """An action is in this phase from now on. Returns what `leave` wants to know."""
        self.counts[phase] += 1
        return self.shares[phase]

    def leave(self, phase: int, since: float) -> float:
        """It is so no more. Returns its seconds."""
        self.counts[phase] -= 1
        return self.shares[phase] - since


class Trajectories:
    """All that are under way or were so within the hour."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Trajectory] = {}
        self._idle: dict[tuple[str, str], Trajectory] = {}
        """Those in which nothing is under way, since longest first."""

    def __len__(self) -> int:
        return len(self._by_key)

    def of(self, action: Action, sums: Sums, now: float) -> Trajectory:
        """The one that an action belongs to which is submitted now."""
        name = action.trajectory or action.sandbox
        if not name:
            return Trajectory(None, sums, now)
        key = (action.run, name)
        trajectory = self._by_key.get(key)
        if trajectory is None:
            trajectory = self._by_key[key] = Trajectory(key, sums, now)
        else:
            self._idle.pop(key, None)
            trajectory.sums = sums
            trajectory.advance(now)
        return trajectory

    def left(self, trajectory: Trajectory, kind: str, succeeded: bool) -> None:
        """One of its actions, of this kind, has settled."""
        if kind == "open":
            trajectory.boxes += succeeded
            trajectory.closed = trajectory.closed and not succeeded
        elif kind == "close":
            trajectory.boxes -= 1
            trajectory.closed = trajectory.boxes <= 0
        if trajectory.key is None or any(trajectory.counts):
            return
        if trajectory.closed:
            del self._by_key[trajectory.key]
            return
        self._idle[trajectory.key] = trajectory
        if len(self._idle) > IDLE_MAX:
            self._forget()

    def forget_before(self, since_s: float) -> None:
        """Those in which nothing has been under way since."""
        while self._idle and next(iter(self._idle.values())).at_s <= since_s:
            self._forget()

    def _forget(self) -> None:
        key = next(iter(self._idle))
        del self._idle[key], self._by_key[key]
