"""Measurements from the recording of a side: every action with its times, and the use of the cores.

Reads a trace and nothing else. Times count from the first reservation of a trajectory, and the step ends when the last
one has been released. At every moment the cores are divided into

    used       by programs of actions: their CPU seconds, spread evenly over the time of their grant
    held       reserved for a running action that did not use them: its program waited, started or ended
    thinking   reserved for a trajectory without a running action: its agent was thinking
    wanted     not reserved and unused, while some action waited
    unwanted   not reserved and unused, and no action waited

which sum to all cores over the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from tangram.core.action import Action, Outcome
from tangram.core.demand import CORE, CPU
from tangram.core.messages import Finished, Message, Release, Reserve, Resize, Settle, Start, Submit
from tangram.runtime.trace_recorder import open_trace
from tangram.sim.result import COMPLETED, ActionRow, SimulationResult

USED, HELD, THINKING, WAITING = range(4)
CURVES = 4
"""Curves over time: cores of the first three kinds, and the number of waiting actions."""


class CoreTime(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the core time of a step; they sum to 1."""

    used: float
    held: float
    thinking: float
    wanted: float
    unwanted: float


class SideMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One side under one seed."""

    result: SimulationResult
    core_time: CoreTime


class _TracedAction(msgspec.Struct, eq=False):
    """One action in the trace."""

    action: Action
    submitted_at: float
    ended_at: float
    granted_at: float | None = None
    outcome: Outcome | None = None
    node: str = ""
    width: float = 0.0
    reserves: list[tuple[float, float]] = []
    """(since, cores), in order."""


def read_recording(path: Path, trajectories: Iterable[str], *, name: str, keeps_cores: float = 0.0) -> SideMeasurement:
    """Read the given trajectories of a recording. `keeps_cores`: cores that each one keeps from its first grant to its
    release."""
    selected = frozenset(trajectories)
    acts: dict[str, _TracedAction] = {}
    sandboxes: dict[str, tuple[float, float]] = {}
    """When each sandbox was reserved and released."""
    with open_trace(path) as (header, lines):
        cores = sum(pool.total for pool in header.pools if pool.kind == CPU) / CORE
        for line in lines:
            _apply_message(line.message, line.t, acts, sandboxes)
    measured = [act for act in acts.values() if act.action.trajectory in selected]
    assert all(act.outcome is not None for act in measured), "every action of a whole recording has settled"
    spans = {act.action.sandbox: sandboxes[act.action.sandbox] for act in measured}
    start = min(since for since, _ in spans.values())
    end = max(until for _, until in spans.values())
    moments = _CoreTimeline(cores, start, end)
    for act in measured:
        moments.add_action(act)
    if keeps_cores:
        moments.add_trajectories(measured, spans, keeps_cores)
    result = SimulationResult(
        name=name,
        workload="coding agents",
        seed=0,
        rows=_rows(measured, start),
        episode_ends=[until - start for _, until in spans.values()],
        episodes_failed=len({act.action.sandbox for act in measured if not _is_completed(act)}),
        makespan_s=end - start,
        cores=cores,
        core_s=sum(act.outcome.usage.cpu_s for act in measured if act.outcome is not None),
        busy=moments.busy(),
    )
    return SideMeasurement(result=result, core_time=moments.core_time())


def _apply_message(
    message: Message, now: float, acts: dict[str, _TracedAction], sandboxes: dict[str, tuple[float, float]]
) -> None:
    if isinstance(message, Submit):
        acts[message.action.id] = _TracedAction(message.action, now, now)
    elif isinstance(message, Reserve):
        sandboxes[message.sandbox] = (now, now)
    elif isinstance(message, Release):
        sandboxes[message.sandbox] = (sandboxes[message.sandbox][0], now)
    elif isinstance(message, Start):
        act, share = acts[message.action.id], message.grant.shares[0]
        act.granted_at, act.node, act.width = now, message.grant.node, message.grant.width / CORE
        act.reserves = [(now, share.reserved / CORE)]
    elif isinstance(message, Resize):
        acts[message.action].reserves.append((now, message.reserved / CORE))
    elif isinstance(message, Finished):
        acts[message.action].ended_at = now
    elif isinstance(message, Settle):
        act = acts[message.outcome.action]
        act.ended_at, act.outcome = now, message.outcome


def _is_completed(act: _TracedAction) -> bool:
    return act.outcome is not None and act.outcome.status.value in COMPLETED


def _rows(acts: list[_TracedAction], start: float) -> list[ActionRow]:
    rows = []
    turns: dict[str, int] = {}
    for act in acts:
        outcome, action = act.outcome, act.action
        assert outcome is not None
        turn = turns[action.trajectory] = turns.get(action.trajectory, -1) + 1
        rows.append(
            ActionRow(
                id=f"{action.trajectory}.{turn}.0",
                run=action.run,
                kind=action.kind,
                key=action.key,
                status=outcome.status.value,
                submitted_at=act.submitted_at - start,
                ended_at=act.ended_at - start,
                waiting_s=outcome.waiting_s,
                execution_s=outcome.execution_s,
                overhead_s=outcome.overhead_s,
                node=act.node,
                width=act.width,
                cpu_s=outcome.usage.cpu_s,
            )
        )
    return sorted(rows, key=lambda row: row.ended_at)


class _CoreTimeline:
    """Cores in use, held, kept and wanted over time, as sums of step functions."""

    def __init__(self, cores: float, start: float, end: float) -> None:
        self._cores = cores
        self._start, self._end = start, end
        self._steps: list[tuple[float, int, float]] = []
        """(time, curve, change of its value)."""

    def _between(self, since: float, until: float, curve: int, amount: float) -> None:
        if until > since and amount:
            self._steps += [(since, curve, amount), (until, curve, -amount)]

    def add_action(self, act: _TracedAction) -> None:
        granted = act.ended_at if act.granted_at is None else act.granted_at
        self._between(act.submitted_at, granted, WAITING, 1.0)
        if act.granted_at is None or act.outcome is None:
            return
        rate = act.outcome.usage.cpu_s / max(act.ended_at - granted, 1e-9)
        self._between(granted, act.ended_at, USED, rate)
        ends = [since for since, _ in act.reserves[1:]] + [act.ended_at]
        for (since, reserved), until in zip(act.reserves, ends, strict=True):
            self._between(since, until, HELD, max(0.0, reserved - rate))

    def add_trajectories(self, acts: list[_TracedAction], spans: dict[str, tuple[float, float]], cores: float) -> None:
        """Add the cores kept from the first grant to the release, except while an action holds them."""
        for sandbox, (_, released) in spans.items():
            granted = [(act.granted_at, act.ended_at) for act in acts if act.action.sandbox == sandbox]
            inside = sorted((since, until) for since, until in granted if since is not None)
            at = inside[0][0] if inside else released
            for since, until in inside:
                self._between(at, since, THINKING, cores)
                at = max(at, until)
            self._between(at, released, THINKING, cores)

    def _curves(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the times at which anything changes, and the curves from each of them to the next."""
        times = np.unique(np.clip([self._start, self._end, *(at for at, _, _ in self._steps)], self._start, self._end))
        changes = np.zeros((CURVES, len(times)))
        for at, curve, amount in self._steps:
            changes[curve, np.searchsorted(times, min(max(at, self._start), self._end))] += amount
        return times, np.cumsum(changes, axis=1)

    def busy(self) -> list[tuple[float, float]]:
        times, curves = self._curves()
        used = np.maximum(curves[USED], 0.0)
        return list(zip((times - self._start).tolist(), used.tolist(), strict=True))

    def core_time(self) -> CoreTime:
        times, curves = self._curves()
        lasts = np.diff(times)
        used, held, thinking, waiting = (np.maximum(curve[:-1], 0.0) for curve in curves)
        held = np.minimum(held, np.maximum(self._cores - used, 0.0))
        thinking = np.minimum(thinking, np.maximum(self._cores - used - held, 0.0))
        free = self._cores - used - held - thinking
        is_waiting = waiting > 0.5
        total = self._cores * (self._end - self._start)

        def share(curve: np.ndarray) -> float:
            return float((curve * lasts).sum() / total)

        return CoreTime(
            used=share(used),
            held=share(held),
            thinking=share(thinking),
            wanted=share(np.where(is_waiting, free, 0.0)),
            unwanted=share(np.where(is_waiting, 0.0, free)),
        )
