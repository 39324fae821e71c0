"""Recordings: a recorded trace read back as a workload.

runtime/trace_recorder.py writes and reads the files. What a recording means as a workload:

    trajectory  as the actions of one run declare it; otherwise their sandbox, otherwise the action alone
    thinking    the time from the end of a trajectory's turn to the next submission; what is submitted at one time, or
                while a turn still runs, belongs to one turn
    work        seconds of execution minus those lost to contention, converted to one unit by the speed-up that the
                action declares, otherwise by the exponent that a scheduler learns by the end of the trace
    overhead    as recorded, all of it before the start; of an action on devices it is the restore
    CPU use     CPU seconds over both and the cores that it ran on; unless it is elastic, no more than its limit, to
                which the work of the sandbox manager is not held, and which a short program may exceed briefly
    quotas      the most of each pool that belongs to no node, in the header or later; an API counts as its pool does
    caps        left out: how much a run may have running is a rule of the recording service, and no baseline
                has it; actions wait only for what they use
    services    a restore takes the median of what was recorded; the weights fill the smallest chunk that it ran on;
                a call in a batch of n is assumed to have taken sqrt(n) times as long as alone
    sandboxes   as reserved
    left out    actions that never settled, or were lost, refused or cancelled: their work is unknown

Malformed input raises InvalidTrace with file and line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tangram.core.action import Action, Outcome
from tangram.core.demand import CORE, CPU, GPU, MEMORY, Demand
from tangram.core.messages import (
    Pool,
    PoolChanged,
    Reserve,
    Resident,
    Resized,
    Restore,
    Settle,
    Start,
    Started,
    Submit,
)
from tangram.core.profile import ProfileStore
from tangram.core.speedup import RIGID, PowerLaw, Speedup
from tangram.core.trace import Line
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.runtime.trace_recorder import open_trace
from tangram.sim.episode import (
    BATCH_GROWTH,
    ApiLimit,
    ApiModel,
    Counting,
    ServiceModel,
    SimEpisode,
    SimStep,
    SimTurn,
    Workload,
)
from tangram.sim.result import COMPLETED
from tangram.sim.size import Size

WEIGHTS_GIB = 72.0
"""Weights of a service at its smallest degree on a device of 80 GiB; the rest is for activations."""
CAP_PREFIXES = ("running/", "instances/")
"""Prefixes of pools that count a run's running actions or function calls. A quota of that name counts in time windows.
"""
BUSY_MIN = 0.001
SECONDS_MIN = 1e-4
"""Minimum duration of an action whose recorded duration is zero."""


def is_recording(path: str | Path) -> bool:
    """Return whether the file is a recording. Decided by the first character: a recording starts with a JSON object, a
    CSV file with the name of a column."""
    try:
        with Path(path).open("rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError as error:
        raise InvalidConfig("trace", str(path), f"a file that can be read ({error.strerror})") from error


def recorded_size(path: str | Path) -> Size:
    """The pools that the trace was recorded with."""
    with open_trace(path) as (header, _):
        cpus = [pool.total for pool in header.pools if pool.kind == CPU]
        memory = sum(pool.total for pool in header.pools if pool.kind == MEMORY)
        cores = round(sum(cpus) / CORE)
        return Size(
            cores=cores,
            nodes=max(1, min(len(cpus), cores)),
            memory_per_core_gib=memory / 1024 / cores if cores else 0.0,
            devices=sum(pool.total for pool in header.pools if pool.kind == GPU),
        )


def recorded_policy(path: str | Path) -> str:
    """Return the policy that scheduled the recording."""
    with open_trace(path) as (header, _):
        return header.policy


def load_recording(path: str | Path) -> Workload:
    """Return the work of a recorded trace, each trajectory once."""
    with open_trace(path) as (header, lines):
        reading = _TraceReader(header.pools)
        for line in lines:
            if isinstance(line.message, Submit) and line.message.action.id in reading.actions:
                raise InvalidTrace(f"{path} seq {line.seq}", line.message.action.id, "an id that is submitted once")
            reading.add_line(line)
    episodes = reading.episodes()
    if not episodes:
        raise InvalidTrace(str(path), "the end of the file", "at least one action that ran to its end")
    return Workload(name=Path(path).stem, seed=0, episodes=episodes, services=reading.services(), apis=reading.apis())


class _RecordedAction(msgspec.Struct, eq=False):
    """One action of the trace."""

    action: Action
    submitted_at: float
    granted_at: float
    ended_at: float
    cores_max: float = math.inf
    """Assumed maximum of cores in use; for an elastic action its width decides."""
    devices: int = 0
    batch: str = ""
    """The batch of its last grant."""
    outcome: Outcome | None = None
    width: float = 1.0
    stretches: list[tuple[float, float]] = []
    """(since, units at work), in order."""

    @property
    def unit(self) -> int:
        return CORE if self.action.demand.elastic == CPU else 1

    def on_start(self, start: Start, now: float) -> None:
        elastic = self.action.demand.elastic
        self.granted_at = now
        self.batch = start.grant.batch
        self.width = start.grant.width / self.unit if elastic else 1.0
        limits = {share.pool.partition("@")[0]: share.limit for share in start.grant.shares}
        self.devices = limits.get(GPU, 0)
        if CPU in limits and elastic != CPU:
            self.cores_max = limits[CPU] / CORE
        self.stretches = [(now, self._units_at_work(limits.get(elastic, self.unit)))]

    def on_resize(self, limit: int, now: float) -> None:
        if self.action.demand.elastic == CPU:
            self.stretches.append((now, self._units_at_work(limit)))

    def _units_at_work(self, limit: int) -> float:
        return max(1.0, min(limit / self.unit, self.width))

    def unthrottled_share(self) -> float:
        """Return the share of the execution in which the action got all CPU that it could use."""
        assert self.outcome is not None
        usage, seconds = self.outcome.usage, max(self.outcome.execution_s, SECONDS_MIN)
        return max(0.0, 1.0 - min(seconds, max(usage.throttled_s, usage.starved_s)) / seconds)

    def integrate(self, value: Callable[[float], float]) -> float:
        """Integrate a function of the units at work over the execution."""
        assert self.outcome is not None
        begin = self.ended_at - self.outcome.execution_s
        ends = [since for since, _ in self.stretches[1:]] + [self.ended_at]
        total = 0.0
        for (since, units), end in zip(self.stretches, ends, strict=True):
            total += value(units) * max(0.0, end - max(since, begin))
        return total


class _TraceReader:
    """What one pass over a trace collects."""

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self.quotas: dict[str, Pool] = {}
        """By kind, each at its highest limit: lower limits are temporary reactions to the API or to faults."""
        self.caps: set[str] = set()
        """Kinds of pools."""
        for pool in pools:
            self._add_pool(pool)
        self.actions: dict[str, _RecordedAction] = {}
        self.batch_sizes: Counter[str] = Counter()
        """Calls in each batch."""
        self.sandboxes: dict[str, tuple[float, int]] = {}
        """When each sandbox was reserved, and its memory."""
        self.restores_s: dict[str, list[float]] = {}
        self.batch_max: dict[str, int] = {}
        """By service."""
        self._loading: dict[str, tuple[float, float]] = {}
        self.profiles = ProfileStore()

    def add_line(self, line: Line) -> None:
        message, now = line.message, line.t
        if isinstance(message, Submit):
            self.actions[message.action.id] = _RecordedAction(message.action, now, now, now)
        elif isinstance(message, Reserve):
            self.sandboxes[message.sandbox] = (now, message.memory)
        elif isinstance(message, PoolChanged):
            self._add_pool(message.pool)
        elif isinstance(message, Restore):
            self._loading[message.service] = (now, -1.0)
        elif isinstance(message, Resident):
            self.batch_max[message.service] = message.batch_max
            since, until = self._loading.pop(message.service, (now, now))
            self.restores_s.setdefault(message.service, []).append((now if until < 0.0 else until) - since)
        elif isinstance(message, Start):
            if (recorded := self.actions.get(message.action.id)) is not None:
                recorded.on_start(message, now)
        elif isinstance(message, Started | Resized):
            if (recorded := self.actions.get(message.action)) is not None:
                self._on_started_or_resized(recorded, message, now)
        elif isinstance(message, Settle) and (recorded := self.actions.get(message.outcome.action)) is not None:
            self._on_settled(recorded, message.outcome, now)

    def _add_pool(self, pool: Pool) -> None:
        if pool.kind.startswith(CAP_PREFIXES) and pool.window is None:
            self.caps.add(pool.kind)
            return
        known = self.quotas.get(pool.kind)
        if not pool.node and (known is None or pool.total > known.total):
            self.quotas[pool.kind] = pool

    def _on_started_or_resized(self, recorded: _RecordedAction, message: Started | Resized, now: float) -> None:
        if isinstance(message, Resized):
            recorded.on_resize(message.limit, now)
        elif recorded.action.service:
            self._loading[recorded.action.service] = (recorded.granted_at, now)

    def _on_settled(self, recorded: _RecordedAction, outcome: Outcome, now: float) -> None:
        recorded.ended_at = now
        recorded.outcome = outcome
        if outcome.status.value not in COMPLETED or not recorded.stretches or not recorded.action.demand.elastic:
            return
        units = recorded.integrate(lambda units: units) / max(outcome.execution_s, SECONDS_MIN)
        self.profiles.observe(
            recorded.action,
            execution_s=outcome.execution_s * recorded.unthrottled_share(),
            units=max(1.0, units),
            cpu_s=outcome.usage.cpu_s,
        )

    # ---- the result ------------

    def episodes(self) -> tuple[SimEpisode, ...]:
        self.batch_sizes.update(recorded.batch for recorded in self.actions.values() if recorded.batch)
        by_trajectory: dict[tuple[str, str], list[_RecordedAction]] = {}
        for recorded in self.actions.values():
            if recorded.outcome is not None and recorded.outcome.status.value in COMPLETED and recorded.stretches:
                by_trajectory.setdefault((recorded.action.run, _trajectory(recorded.action)), []).append(recorded)
        runs = Counter(name for _, name in by_trajectory)
        return tuple(
            self._episode(name if runs[name] == 1 else f"{run}/{name}", members)
            for (run, name), members in by_trajectory.items()
        )

    def _episode(self, name: str, members: list[_RecordedAction]) -> SimEpisode:
        first = members[0]
        sandboxes = dict.fromkeys(
            recorded.action.sandbox for recorded in members if recorded.action.sandbox in self.sandboxes
        )
        reserved = [self.sandboxes[sandbox] for sandbox in sandboxes]
        start_s = min([first.submitted_at, *(at for at, _ in reserved)])
        turns, end = [], start_s
        for turn in _turns(members):
            steps = tuple(self._step(recorded, first.action.task) for recorded in turn)
            turns.append(SimTurn(think_s=max(0.0, turn[0].submitted_at - end), steps=steps))
            end = max(recorded.ended_at for recorded in turn)
        return SimEpisode(
            id=name,
            run=first.action.run,
            task=first.action.task,
            start_s=start_s,
            memory=sum(memory for _, memory in reserved),
            turns=tuple(turns),
        )

    def _step(self, recorded: _RecordedAction, task: str) -> SimStep:
        action, outcome = recorded.action, recorded.outcome
        assert outcome is not None
        law = self._speedup(action)
        unthrottled = recorded.unthrottled_share()
        unit_s = recorded.integrate(lambda units: units) * unthrottled
        overhead_s = 0.0 if GPU in action.demand.pools else outcome.overhead_s
        unit_s += overhead_s
        slower = self.batch_sizes.get(recorded.batch, 1) ** BATCH_GROWTH
        busy = outcome.usage.cpu_s / unit_s if unit_s > 0.0 else 1.0
        return SimStep(
            kind=action.kind,
            key=action.key,
            demand=self._demand(action.demand),
            service=action.service,
            work_s=max(SECONDS_MIN, recorded.integrate(law.at) * unthrottled / slower),
            busy=max(BUSY_MIN, min(busy, recorded.cores_max)),
            speedup=law,
            overhead_s=overhead_s,
            task="" if action.task == task else action.task,
            spent=outcome.usage.spent,
            at_once=action.at_once,
        )

    def _demand(self, demand: Demand) -> Demand:
        """Return the demand without caps, unless caps are all it has."""
        pools = {kind: amounts for kind, amounts in demand.pools.items() if kind not in self.caps}
        return Demand(pools, demand.speedup) if pools and len(pools) < len(demand.pools) else demand

    def _speedup(self, action: Action) -> Speedup:
        if not action.demand.elastic:
            return RIGID
        return action.demand.speedup or PowerLaw(self.profiles.estimate(action).exponent)

    def services(self) -> tuple[ServiceModel, ...]:
        degrees: dict[str, tuple[int, ...]] = {}
        smallest: dict[str, float] = {}
        for recorded in self.actions.values():
            name = recorded.action.service
            if name and GPU in recorded.action.demand.pools:
                amounts = recorded.action.demand.pools[GPU]
                degrees.setdefault(name, amounts.choices or tuple(dict.fromkeys((amounts.min, amounts.max))))
                smallest[name] = min(smallest.get(name, amounts.min), recorded.devices or amounts.min)
        return tuple(
            ServiceModel(
                name=name,
                memory_gib=WEIGHTS_GIB * smallest[name],
                restore_s=_median(self.restores_s.get(name, [])),
                degrees=choices,
                batch_max=self.batch_max.get(name, 1),
            )
            for name, choices in degrees.items()
        )

    def apis(self) -> tuple[ApiModel, ...]:
        """Models of the APIs. Pool `name` counts concurrency, `name/...` a window."""
        limits: dict[str, list[ApiLimit]] = {}
        for kind, pool in self.quotas.items():
            limits.setdefault(kind.partition("/")[0], []).append(ApiLimit(pool=pool, counting=_counting(pool)))
        return tuple(ApiModel(name=name, limits=tuple(api_limits)) for name, api_limits in limits.items())


def _trajectory(action: Action) -> str:
    return action.trajectory or action.sandbox or action.id


def _turns(members: list[_RecordedAction]) -> Iterator[list[_RecordedAction]]:
    """Group members, given in order of submission, into turns: a member submitted while others run belongs to their
    turn."""
    turn: list[_RecordedAction] = []
    end = 0.0
    for recorded in members:
        if turn and recorded.submitted_at != turn[0].submitted_at and recorded.submitted_at >= end:
            yield turn
            turn = []
        end = max(end, recorded.ended_at) if turn else recorded.ended_at
        turn.append(recorded)
    yield turn


def _counting(pool: Pool) -> Counting:
    """Return how the recorded scheduler counted the pool; the trace contains nothing about the API itself."""
    if pool.window is not None and pool.window.sliding:
        return Counting.SLIDING
    return Counting.BUCKET if pool.window is not None and pool.window.bucket else Counting.FIXED


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
