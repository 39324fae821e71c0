"""Time breakdown: where the time of trajectories went.

Divides every second between the first submission of a trajectory and its last end. Each second counts as the first of
these that applies:

    execution   an action of the trajectory executes; the part that its manager measured as its own is overhead
    `start`     units are granted, and the manager has yet to start the action
    waiting     an action waits for units, by the kind of pool that was short
    thinking    no action of the trajectory is under way

A second that several actions of one trajectory share, because they all execute or all wait, is divided equally among
them. So nothing counts twice, and the parts add up to the whole. The time of an action is added to its run when it
leaves a phase. Never reads a clock or the scheduler.

A trajectory is the one that actions name, else their sandbox, else the action itself. It ends when its last sandbox
closes; one without sandboxes ends after IDLE_TIMEOUT_S without an action. A later action under its name starts another
trajectory, so a longer pause does not count as thinking.
"""

from __future__ import annotations

from tangram.core.action import Action
from tangram.runtime.views import TimeBreakdown

IDLE_TRAJECTORIES_MAX = 100_000
"""Maximum number of idle trajectories; beyond, the longest idle one is forgotten."""
KINDS_MAX = 64
"""Kinds of pools by name; waiting for others counts under OTHER."""
OTHER = "other"
START = "start"

WAITING, STARTING, EXECUTING = 0, 1, 2
"""Phases of an action, by rising precedence."""


class TimeSums:
    __slots__ = ("execution_s", "overhead_s", "thinking_s", "waiting_s")

    def __init__(self) -> None:
        self.waiting_s: dict[str, float] = {}
        self.execution_s = self.overhead_s = self.thinking_s = 0.0

    def add_waiting(self, kind: str, seconds: float) -> None:
        waiting_s = self.waiting_s
        if kind not in waiting_s and len(waiting_s) >= KINDS_MAX:
            kind = OTHER
        waiting_s[kind] = waiting_s.get(kind, 0.0) + seconds

    def parts(self) -> dict[str, float]:
        """By label value of the metric."""
        waiting = {f"waiting:{kind}": seconds for kind, seconds in self.waiting_s.items()}
        rest = {"execution": self.execution_s, "overhead": self.overhead_s, "thinking": self.thinking_s}
        return waiting | rest

    def view(self) -> TimeBreakdown:
        return TimeBreakdown(
            total_s=sum(self.waiting_s.values()) + self.execution_s + self.overhead_s + self.thinking_s,
            waiting_s=dict(self.waiting_s),
            execution_s=self.execution_s,
            overhead_s=self.overhead_s,
            thinking_s=self.thinking_s,
        )


class TrajectoryClock:
    """The time of one trajectory. `shares` counts, per phase, the seconds that each action in that phase has had since
    the trajectory began: an action remembers the count on entering, and its time is the difference on leaving."""

    __slots__ = ("advanced_at", "open_sandboxes", "is_closed", "counts", "key", "shares", "breakdown")

    def __init__(self, key: tuple[str, str] | None, sums: TimeSums, now: float) -> None:
        self.key = key
        """Run and name. None: a single action, which ends with it."""
        self.breakdown = sums
        self.advanced_at = now
        self.open_sandboxes = 0
        """Sandboxes opened and not closed."""
        self.is_closed = False
        """Its last sandbox was closed. Actions may end later."""
        self.counts = [0, 0, 0]
        self.shares = [0.0, 0.0, 0.0]

    def advance(self, now: float) -> None:
        elapsed_s = now - self.advanced_at
        if elapsed_s <= 0.0:
            return
        self.advanced_at = now
        waiting, starting, executing = self.counts
        if executing:
            self.shares[EXECUTING] += elapsed_s / executing
        elif starting:
            self.shares[STARTING] += elapsed_s / starting
        elif waiting:
            self.shares[WAITING] += elapsed_s / waiting
        else:
            self.breakdown.thinking_s += elapsed_s

    def enter_phase(self, phase: int) -> float:
        """Counts an action that enters this phase. Returns the value to pass to `leave_phase`."""
        self.counts[phase] += 1
        return self.shares[phase]

    def leave_phase(self, phase: int, since: float) -> float:
        """Ends the phase of an action. Returns its seconds."""
        self.counts[phase] -= 1
        return self.shares[phase] - since


class TrajectoryClocks:
    """Trajectories that are active or were within the hour."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], TrajectoryClock] = {}
        self._idle: dict[tuple[str, str], TrajectoryClock] = {}
        """Trajectories without a live action, longest idle first."""

    def __len__(self) -> int:
        return len(self._by_key)

    def trajectory_of(self, action: Action, sums: TimeSums, now: float) -> TrajectoryClock:
        """Returns the trajectory of an action that is being submitted."""
        name = action.trajectory or action.sandbox
        if not name:
            return TrajectoryClock(None, sums, now)
        key = (action.run, name)
        trajectory = self._by_key.get(key)
        if trajectory is None:
            trajectory = self._by_key[key] = TrajectoryClock(key, sums, now)
        else:
            self._idle.pop(key, None)
            trajectory.breakdown = sums
            trajectory.advance(now)
        return trajectory

    def on_settled(self, trajectory: TrajectoryClock, kind: str, succeeded: bool) -> None:
        """Counts the end of an action of this kind."""
        if kind == "open":
            trajectory.open_sandboxes += succeeded
            trajectory.is_closed = trajectory.is_closed and not succeeded
        elif kind == "close":
            trajectory.open_sandboxes -= 1
            trajectory.is_closed = trajectory.open_sandboxes <= 0
        if trajectory.key is None or any(trajectory.counts):
            return
        if trajectory.is_closed:
            del self._by_key[trajectory.key]
            return
        self._idle[trajectory.key] = trajectory
        if len(self._idle) > IDLE_TRAJECTORIES_MAX:
            self._drop_longest_idle()

    def forget_before(self, since_s: float) -> None:
        """Forgets trajectories that have been idle since then."""
        while self._idle and next(iter(self._idle.values())).advanced_at <= since_s:
            self._drop_longest_idle()

    def _drop_longest_idle(self) -> None:
        key = next(iter(self._idle))
        del self._idle[key], self._by_key[key]
