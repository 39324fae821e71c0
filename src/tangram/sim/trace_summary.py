"""Survey of a recorded trace: its contents, where the time went, and whether a replay reproduces it.

Covers a trace as a whole. The story of one action is in `core.trace`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tangram.core.action import Action, Outcome, Status
from tangram.core.messages import Concluded, Effect, Event, Refuse, Settle, Submit
from tangram.core.policies import POLICIES, policy
from tangram.core.scheduler import Scheduler
from tangram.core.trace import EVENTS, Line, describe
from tangram.errors import InvalidConfig
from tangram.runtime.trace_recorder import open_trace

# ---- where the time went --------------------------------------------------------------------------------------


class RunTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one run went, in seconds summed over its trajectories."""

    run: str
    trajectories: int
    actions: int
    statuses: dict[str, int]
    waiting_s: dict[str, float]
    """Seconds by the pool kinds of the demands."""
    execution_s: float
    overhead_s: float
    thinking_s: float
    """Seconds between the end of a turn and the next submission of its trajectory."""


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    note: str
    pools: dict[str, int]
    first_s: float
    last_s: float
    messages: dict[str, int]
    """Lines by kind of message."""
    unsettled: int
    runs: list[RunTime]


class _RunTotals:
    """Running sums of one run."""

    def __init__(self) -> None:
        self.actions = 0
        self.statuses: dict[str, int] = {}
        self.waiting_s: dict[str, float] = {}
        self.execution_s = self.overhead_s = self.thinking_s = 0.0
        self.running: dict[str, int] = {}
        """Live actions by trajectory."""
        self.idle_since: dict[str, float] = {}

    def on_submitted(self, action: Action, now: float) -> None:
        self.actions += 1
        name = action.trajectory or action.id
        if not self.running.get(name) and name in self.idle_since:
            self.thinking_s += now - self.idle_since[name]
        self.running[name] = self.running.get(name, 0) + 1

    def on_settled(self, action: Action, outcome: Outcome, now: float) -> None:
        name, kinds = action.trajectory or action.id, " + ".join(action.demand.pools)
        self.statuses[outcome.status.value] = self.statuses.get(outcome.status.value, 0) + 1
        self.waiting_s[kinds] = self.waiting_s.get(kinds, 0.0) + outcome.waiting_s
        self.execution_s += outcome.execution_s
        self.overhead_s += outcome.overhead_s
        self.running[name] -= 1
        self.idle_since[name] = now

    def on_concluded(self, outcome: Outcome) -> None:
        self.actions += 1
        self.statuses[outcome.status.value] = self.statuses.get(outcome.status.value, 0) + 1

    def result(self, run: str) -> RunTime:
        return RunTime(
            run=run,
            trajectories=len(self.running),
            actions=self.actions,
            statuses=self.statuses,
            waiting_s=self.waiting_s,
            execution_s=self.execution_s,
            overhead_s=self.overhead_s,
            thinking_s=self.thinking_s,
        )


def summarize(path: str | Path) -> TraceSummary:
    """Summarize a recorded trace in one pass."""
    runs: dict[str, _RunTotals] = {}
    live: dict[str, Action] = {}
    messages: dict[str, int] = {}
    times: list[float] = []
    with open_trace(path) as (header, lines):
        for line in lines:
            message = line.message
            name = str(message.__struct_config__.tag)
            messages[name] = messages.get(name, 0) + 1
            times = [times[0] if times else line.t, line.t]
            if isinstance(message, Submit):
                live[message.action.id] = message.action
                runs.setdefault(message.action.run, _RunTotals()).on_submitted(message.action, line.t)
            elif isinstance(message, Concluded):
                runs.setdefault(message.action.run, _RunTotals()).on_concluded(message.outcome)
            elif isinstance(message, Settle | Refuse):
                outcome = _outcome(message)
                if (action := live.pop(outcome.action, None)) is not None:
                    runs[action.run].on_settled(action, outcome, line.t)
    return TraceSummary(
        policy=header.policy,
        note=header.note,
        pools={pool.name: pool.total for pool in header.pools},
        first_s=times[0] if times else 0.0,
        last_s=times[-1] if times else 0.0,
        messages=messages,
        unsettled=len(live),
        runs=[gathering.result(run) for run, gathering in runs.items()],
    )


def _outcome(message: Settle | Refuse) -> Outcome:
    if isinstance(message, Settle):
        return message.outcome
    return Outcome(action=message.action, status=Status.REFUSED, reason=message.reason)


# ---- replay ---------------------------------------------------------------------------------------------------


class TraceDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference between a recording and its replay."""

    event: str
    at_seq: int
    recorded: list[str]
    replayed: list[str]


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    events: int
    effects: int
    difference: TraceDifference | None = None


def replay(path: str | Path) -> Replay:
    """Feed the recorded events to a new scheduler with the recorded policy and compare the effects."""
    with open_trace(path) as (header, lines):
        if header.policy.partition(":")[0] not in {name.partition(":")[0] for name in POLICIES}:
            raise InvalidConfig("trace", str(path), f"a trace of a scheduling policy, not of {header.policy}")
        scheduler = Scheduler(policy(header.policy), header.pools, limits=header.limits)
        events = effects = 0
        event: Line | None = None
        recorded: list[Effect] = []
        for line in lines:
            if not isinstance(line.message, EVENTS):
                recorded.append(line.message)
                continue
            if event is not None and (difference := _step(scheduler, event, recorded)):
                return Replay(policy=header.policy, events=events, effects=effects, difference=difference)
            effects += len(recorded)
            events += 1
            event, recorded = line, []
        difference = _step(scheduler, event, recorded) if event is not None else None
    return Replay(policy=header.policy, events=events, effects=effects + len(recorded), difference=difference)


def _step(scheduler: Scheduler, line: Line, recorded: list[Effect]) -> TraceDifference | None:
    event = line.message
    assert isinstance(event, EVENTS)
    replayed = scheduler.handle(event, line.t)
    if replayed == recorded:
        return None
    return TraceDifference(
        event=describe(line.t, event),
        at_seq=line.seq,
        recorded=[_describe_effect(line.t, effect) for effect in recorded],
        replayed=[_describe_effect(line.t, effect) for effect in replayed],
    )


def _describe_effect(now: float, effect: Event | Effect) -> str:
    subject = getattr(effect, "action", "") or getattr(getattr(effect, "outcome", None), "action", "")
    return f"{describe(now, effect)}  [{getattr(subject, 'id', subject)}]"
