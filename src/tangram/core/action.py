"""Action: one atomic use of external resources, its states and what it ends with.

Owns the record of an action, the transition table of its states (a state machine) and the Outcome. Decides nothing.
"""

from __future__ import annotations

import enum
import math

import msgspec

from tangram.core.demand import Demand
from tangram.errors import InvalidAction, InvalidInput

ID_LENGTH_MAX = 200
"""Ids are written in every log line; a longer one is a mistake or an attack."""

PRIORITY_MAX = 100


class State(enum.Enum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # the default of Enum is a Python function, on every look into a table

    @property
    def terminal(self) -> bool:
        return not TRANSITIONS[self]

    @property
    def holds_units(self) -> bool:
        """A stopping action still holds its units: only Finished gives them back."""
        return self in (State.STARTING, State.RUNNING, State.STOPPING)


TRANSITIONS: dict[State, tuple[State, ...]] = {
    State.QUEUED: (State.STARTING, State.CANCELLED, State.FAILED),
    State.STARTING: (State.RUNNING, State.STOPPING, State.QUEUED, State.FAILED),
    State.RUNNING: (State.SUCCEEDED, State.FAILED, State.STOPPING, State.QUEUED),
    State.STOPPING: (State.CANCELLED, State.FAILED),
    State.SUCCEEDED: (),
    State.FAILED: (),
    State.CANCELLED: (),
}
"""Every allowed change of state. An attempt returns to QUEUED only if it was lost and may be repeated."""


def wrong_transition(before: State, after: State, action_id: str) -> str:
    """Returns the message for a change that the table does not allow."""
    allowed = ", ".join(state.value for state in TRANSITIONS[before]) or "nothing: it has settled"
    return f"action {action_id} cannot go from {before.value} to {after.value}; allowed from there: {allowed}"


class Status(enum.Enum):
    """How an action ended, from the caller's side."""

    SUCCEEDED = "succeeded"
    """It ran to its end. A non-zero exit code or a wrong answer is still a result."""
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """It was not admitted. The reason names the limit."""
    LOST = "lost"
    """The infrastructure failed, not the agent."""

    __hash__ = object.__hash__


class Usage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What an action really used, as its manager measured it."""

    cpu_s: float = 0.0
    throttled_s: float = 0.0
    starved_s: float = 0.0
    """Seconds in which it was ready to run but got less CPU than was reserved for it."""
    memory_peak_bytes: int = 0
    overhead_s: float = 0.0
    """Seconds between Started and Finished that the infrastructure used, not the action."""
    spent: dict[str, int] | None = None
    """Per spent pool kind, the units that were spent where the grant was an estimate (tokens)."""

    def __post_init__(self) -> None:
        try:
            if (
                0.0 <= self.cpu_s < math.inf
                and 0.0 <= self.throttled_s < math.inf
                and 0.0 <= self.starved_s < math.inf
                and 0.0 <= self.overhead_s < math.inf
                and type(self.memory_peak_bytes) is int
                and self.memory_peak_bytes >= 0
                and self.spent is None
            ):
                return
        except TypeError:
            pass
        self._require_measures()

    def _require_measures(self) -> None:
        """Rejects NaN and infinity: one would corrupt the profile of the class."""
        for field in ("cpu_s", "throttled_s", "starved_s", "overhead_s"):
            value = getattr(self, field)
            if type(value) not in (float, int) or not 0.0 <= value < math.inf:
                raise InvalidInput(f"usage.{field}", value, "a finite number of seconds, at least 0")
        if type(self.memory_peak_bytes) is not int or self.memory_peak_bytes < 0:
            raise InvalidInput("usage.memory_peak_bytes", self.memory_peak_bytes, "a whole number of bytes, at least 0")
        if self.spent is None:
            return
        if not isinstance(self.spent, dict):
            raise InvalidInput("usage.spent", self.spent, "whole numbers of units by pool kind, or None")
        for kind, units in self.spent.items():
            if type(units) is not int or units < 0:
                raise InvalidInput(f"usage.spent[{kind!r}]", units, "a whole number of units, at least 0")


NO_USAGE = Usage()


class Outcome(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The result of an action: every action has exactly one."""

    action: str
    status: Status
    reason: str = ""
    waiting_s: float = 0.0
    execution_s: float = 0.0
    overhead_s: float = 0.0
    usage: Usage = NO_USAGE
    attempts: int = 0

    @property
    def act_s(self) -> float:
        """Action completion time."""
        return self.waiting_s + self.execution_s + self.overhead_s


class Action(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One atomic use of external resources by one trajectory."""

    id: str
    demand: Demand
    run: str = "default"
    """The training or evaluation run. Fair share divides pools among runs."""
    task: str = ""
    """The RL task domain or data set item that the class of the action includes."""
    trajectory: str = ""
    sandbox: str = ""
    """The sandbox it runs in, if any: it runs on the node that holds that sandbox's memory."""
    kind: str = "exec"
    key: str = ""
    """A label of the user for actions that behave alike, such as "tests" or "grep"."""
    service: str = ""
    """The model service it calls, for actions on devices."""
    duration_s: float | None = None
    """A hint: seconds on one unit. None: learned."""
    timeout_s: float | None = None
    """Counts from Started."""
    deadline_s: float | None = None
    """Counts from submission."""
    priority: int = 0
    """Within its run, higher goes first."""
    idempotent: bool = False
    """It may run again after the infrastructure lost it."""
    at_once: bool = True
    """Its spent units are used as soon as it starts. False: at any time until it ends, so a sliding window counts them
    from its end."""

    def __post_init__(self) -> None:
        if not isinstance(self.demand, Demand):
            raise InvalidAction("demand", self.demand, "a Demand, such as Demand({'cpu': cores(1, 8)})")
        for field in ("id", "run"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value or len(value) > ID_LENGTH_MAX or not value.isprintable():
                raise InvalidAction(field, value, f"1 to {ID_LENGTH_MAX} printable characters")
        for field in ("task", "trajectory", "sandbox", "kind", "key", "service"):
            value = getattr(self, field)
            if not isinstance(value, str) or len(value) > ID_LENGTH_MAX or not value.isprintable():
                raise InvalidAction(field, value, f"at most {ID_LENGTH_MAX} printable characters")
        for field in ("duration_s", "timeout_s", "deadline_s"):
            seconds = getattr(self, field)
            if seconds is not None and not (type(seconds) in (float, int) and 0.0 < seconds < math.inf):
                raise InvalidAction(field, seconds, "a positive, finite number of seconds")
        if type(self.priority) is not int or not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise InvalidAction("priority", self.priority, f"a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}")
        for field in ("idempotent", "at_once"):
            if type(getattr(self, field)) is not bool:
                raise InvalidAction(field, getattr(self, field), "True or False")
