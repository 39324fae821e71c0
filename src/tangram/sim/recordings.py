"""Recordings: a recorded trace read back as a workload.

runtime/trace_recorder.py writes and reads the files. What a recording means as a workload:

    trajectory  what the actions of one run say; of those that say nothing their sandbox, else the action alone
    thinking    the time from the end of a trajectory's turn to the next submission; what is submitted at one time, or
                while a turn still runs, belongs to one turn
    work        seconds of execution less those that it lost to others, brought to one unit by the speed-up that the
                action declares, else by the exponent that a scheduler has learned by the end of the trace
    overhead    as recorded, all of it before the start; of an action on devices it is the restore
    CPU use     CPU seconds over both and the cores that it ran on; unless it is elastic, no more than its limit, to
                which our own work on sandboxes is not held, and which a short program may exceed for a moment
    quotas      the most of each pool that belongs to no node, in the header or later; an API counts as its pool does
    caps        left out: how much a run may have running is a rule of the service that recorded it, and no baseline
                knows it; so its actions wait for what they use alone
    services    a restore takes the median of what was recorded; the weights fill the smallest chunk that it ran on;
                a call in a batch of n is taken to have lasted the square root of n times as long as alone
    sandboxes   as reserved
    left out    actions that never settled, or that our side lost, refused or cancelled: their work is unknown

Promises InvalidTrace with file and line for whatever is malformed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

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
from tangram.core.profile import Knowledge
from tangram.core.speedup import RIGID, PowerLaw, Speedup
from tangram.core.trace import Line
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.runtime.trace_recorder import opened
from tangram.sim.episode import (
    BATCH_GROWTH,
    ApiLimit,
    ApiModel,
    Counting,
    Episode,
    ServiceModel,
    Step,
    Turn,
    Workload,
)
from tangram.sim.result import COMPLETED
from tangram.sim.size import Size

WEIGHTS_GIB = 72.0
"""Of a device of 80 GiB, by the weights of a service at its smallest degree; the rest is for activations."""
CAPS = ("running/", "instances/")
"""What pools begin with that count what a run has running, or its calls of functions.
A quota of that name counts in windows of time."""
BUSY_MIN = 0.001
SECONDS_MIN = 1e-4
"""An action that the trace shows with no time at all still took some."""


def is_recording(path: str | Path) -> bool:
    """Told by the first character: a header line is a JSON object, a csv file starts with the name of a column."""
    try:
        with Path(path).open("rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError as error:
        raise InvalidConfig("trace", str(path), f"a file that can be read ({error.strerror})") from error


def recorded_size(path: str | Path) -> Size:
    """The pools that the trace was recorded with."""
    with opened(path) as (header, _):
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
    """The policy that scheduled it."""
    with opened(path) as (header, _):
        return header.policy


def load_recording(path: str | Path) -> Workload:
    """The work of a recorded trace, each trajectory once."""
    with opened(path) as (header, lines):
        reading = _Reading(header.pools)
        for line in lines:
            if isinstance(line.message, Submit) and line.message.action.id in reading.seen:
                raise InvalidTrace(f"{path} seq {line.seq}", line.message.action.id, "an id that is submitted once")
            reading.take(line)
    episodes = reading.episodes()
    if not episodes:
        raise InvalidTrace(str(path), "the end of the file", "at least one action that ran to its end")
    return Workload(name=Path(path).stem, seed=0, episodes=episodes, services=reading.services(), apis=reading.apis())


class _Seen:
    """One action as the trace shows it."""

    __slots__ = (
        "action",
        "batch",
        "cores_max",
        "devices",
        "ended_at",
        "granted_at",
        "outcome",
        "stretches",
        "submitted_at",
        "width",
    )

    def __init__(self, action: Action, now: float) -> None:
        self.action = action
        self.submitted_at = now
        self.granted_at = now
        self.ended_at = now
        self.cores_max = math.inf
        """That it is taken to use at most; of an elastic one, its width says so."""
        self.devices = 0
        self.batch = ""
        """As its last grant says."""
        self.outcome: Outcome | None = None
        self.width = 1.0
        self.stretches: list[tuple[float, float]] = []
        """(since, units at work), in order."""

    @property
    def unit(self) -> int:
        return CORE if self.action.demand.elastic == CPU else 1

    def launch(self, start: Start, now: float) -> None:
        elastic = self.action.demand.elastic
        self.granted_at = now
        self.batch = start.grant.batch
        self.width = start.grant.width / self.unit if elastic else 1.0
        limits = {share.pool.partition("@")[0]: share.limit for share in start.grant.shares}
        self.devices = limits.get(GPU, 0)
        if CPU in limits and elastic != CPU:
            self.cores_max = limits[CPU] / CORE
        self.stretches = [(now, self._at_work(limits.get(elastic, self.unit)))]

    def resize(self, limit: int, now: float) -> None:
        if self.action.demand.elastic == CPU:
            self.stretches.append((now, self._at_work(limit)))

    def _at_work(self, limit: int) -> float:
        return max(1.0, min(limit / self.unit, self.width))

    def own_share(self) -> float:
        """Of its execution, the part in which it had all that it could use."""
        assert self.outcome is not None
        usage, seconds = self.outcome.usage, max(self.outcome.execution_s, SECONDS_MIN)
        return max(0.0, 1.0 - min(seconds, max(usage.throttled_s, usage.starved_s)) / seconds)

    def over_time(self, value: Callable[[float], float]) -> float:
        """The integral over its execution of a function of the units at work."""
        assert self.outcome is not None
        begin = self.ended_at - self.outcome.execution_s
        ends = [since for since, _ in self.stretches[1:]] + [self.ended_at]
        total = 0.0
        for (since, units), end in zip(self.stretches, ends, strict=True):
            total += value(units) * max(0.0, end - max(since, begin))
        return total


class _Reading:
    """All that one pass over a trace gathers."""

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self.quotas: dict[str, Pool] = {}
        """By kind, each as it was when it allowed most: less is a complaint of the API or a fault, and passes."""
        self.caps: set[str] = set()
        """Kinds of pools."""
        for pool in pools:
            self._allowed(pool)
        self.seen: dict[str, _Seen] = {}
        self.together: Counter[str] = Counter()
        """How many calls were in each batch."""
        self.sandboxes: dict[str, tuple[float, int]] = {}
        """When each was reserved, and with how much memory."""
        self.restores_s: dict[str, list[float]] = {}
        self.batch_max: dict[str, int] = {}
        """By service."""
        self._loading: dict[str, tuple[float, float]] = {}
        self.knowledge = Knowledge()

    def take(self, line: Line) -> None:
        message, now = line.message, line.t
        if isinstance(message, Submit):
            self.seen[message.action.id] = _Seen(message.action, now)
        elif isinstance(message, Reserve):
            self.sandboxes[message.sandbox] = (now, message.memory)
        elif isinstance(message, PoolChanged):
            self._allowed(message.pool)
        elif isinstance(message, Restore):
            self._loading[message.service] = (now, -1.0)
        elif isinstance(message, Resident):
            self.batch_max[message.service] = message.batch_max
            since, until = self._loading.pop(message.service, (now, now))
            self.restores_s.setdefault(message.service, []).append((now if until < 0.0 else until) - since)
        elif isinstance(message, Start):
            if (seen := self.seen.get(message.action.id)) is not None:
                seen.launch(message, now)
        elif isinstance(message, Started | Resized):
            if (seen := self.seen.get(message.action)) is not None:
                self._moved(seen, message, now)
        elif isinstance(message, Settle) and (seen := self.seen.get(message.outcome.action)) is not None:
            self._settled(seen, message.outcome, now)

    def _allowed(self, pool: Pool) -> None:
        if pool.kind.startswith(CAPS) and pool.window is None:
            self.caps.add(pool.kind)
            return
        known = self.quotas.get(pool.kind)
        if not pool.node and (known is None or pool.total > known.total):
            self.quotas[pool.kind] = pool

    def _moved(self, seen: _Seen, message: Started | Resized, now: float) -> None:
        if isinstance(message, Resized):
            seen.resize(message.limit, now)
        elif seen.action.service:
            self._loading[seen.action.service] = (seen.granted_at, now)

    def _settled(self, seen: _Seen, outcome: Outcome, now: float) -> None:
        seen.ended_at = now
        seen.outcome = outcome
        if outcome.status.value not in COMPLETED or not seen.stretches or not seen.action.demand.elastic:
            return
        units = seen.over_time(lambda units: units) / max(outcome.execution_s, SECONDS_MIN)
        self.knowledge.observe(
            seen.action,
            execution_s=outcome.execution_s * seen.own_share(),
            units=max(1.0, units),
            cpu_s=outcome.usage.cpu_s,
        )

    # ---- what it adds up to ----

    def episodes(self) -> tuple[Episode, ...]:
        self.together.update(seen.batch for seen in self.seen.values() if seen.batch)
        by_trajectory: dict[tuple[str, str], list[_Seen]] = {}
        for seen in self.seen.values():
            if seen.outcome is not None and seen.outcome.status.value in COMPLETED and seen.stretches:
                by_trajectory.setdefault((seen.action.run, _trajectory(seen.action)), []).append(seen)
        runs = Counter(name for _, name in by_trajectory)
        return tuple(
            self._episode(name if runs[name] == 1 else f"{run}/{name}", members)
            for (run, name), members in by_trajectory.items()
        )

    def _episode(self, name: str, members: list[_Seen]) -> Episode:
        first = members[0]
        boxes = dict.fromkeys(seen.action.sandbox for seen in members if seen.action.sandbox in self.sandboxes)
        reserved = [self.sandboxes[box] for box in boxes]
        start_s = min([first.submitted_at, *(at for at, _ in reserved)])
        turns, end = [], start_s
        for together in _turns(members):
            steps = tuple(self._step(seen, first.action.task) for seen in together)
            turns.append(Turn(think_s=max(0.0, together[0].submitted_at - end), steps=steps))
            end = max(seen.ended_at for seen in together)
        return Episode(
            id=name,
            run=first.action.run,
            task=first.action.task,
            start_s=start_s,
            memory=sum(memory for _, memory in reserved),
            turns=tuple(turns),
        )

    def _step(self, seen: _Seen, task: str) -> Step:
        action, outcome = seen.action, seen.outcome
        assert outcome is not None
        law = self._law(action)
        own = seen.own_share()
        unit_s = seen.over_time(lambda units: units) * own
        overhead_s = 0.0 if GPU in action.demand.pools else outcome.overhead_s
        unit_s += overhead_s
        slower = self.together.get(seen.batch, 1) ** BATCH_GROWTH
        busy = outcome.usage.cpu_s / unit_s if unit_s > 0.0 else 1.0
        return Step(
            kind=action.kind,
            key=action.key,
            demand=self._demand(action.demand),
            service=action.service,
            work_s=max(SECONDS_MIN, seen.over_time(law.at) * own / slower),
            busy=max(BUSY_MIN, min(busy, seen.cores_max)),
            speedup=law,
            overhead_s=overhead_s,
            task="" if action.task == task else action.task,
            spent=outcome.usage.spent,
            at_once=action.at_once,
        )

    def _demand(self, demand: Demand) -> Demand:
        """Without caps, unless there is nothing else."""
        pools = {kind: amounts for kind, amounts in demand.pools.items() if kind not in self.caps}
        return Demand(pools, demand.speedup) if pools and len(pools) < len(demand.pools) else demand

    def _law(self, action: Action) -> Speedup:
        if not action.demand.elastic:
            return RIGID
        return action.demand.speedup or PowerLaw(self.knowledge.estimate(action).exponent)

    def services(self) -> tuple[ServiceModel, ...]:
        degrees: dict[str, tuple[int, ...]] = {}
        smallest: dict[str, float] = {}
        for seen in self.seen.values():
            name = seen.action.service
            if name and GPU in seen.action.demand.pools:
                amounts = seen.action.demand.pools[GPU]
                degrees.setdefault(name, amounts.choices or tuple(dict.fromkeys((amounts.min, amounts.max))))
                smallest[name] = min(smallest.get(name, amounts.min), seen.devices or amounts.min)
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
        """`name` counts what is under way, `name/...` what a window allows."""
        limits: dict[str, list[ApiLimit]] = {}
        for kind, pool in self.quotas.items():
            limits.setdefault(kind.partition("/")[0], []).append(ApiLimit(pool=pool, counting=_counting(pool)))
        return tuple(ApiModel(name=name, limits=tuple(found)) for name, found in limits.items())


def _trajectory(action: Action) -> str:
    return action.trajectory or action.sandbox or action.id


def _turns(members: list[_Seen]) -> Iterator[list[_Seen]]:
    """Members come in the order of submission; one that comes while others still run belongs to their turn."""
    together: list[_Seen] = []
    end = 0.0
    for seen in members:
        if together and seen.submitted_at != together[0].submitted_at and seen.submitted_at >= end:
            yield together
            together = []
        end = max(end, seen.ended_at) if together else seen.ended_at
        together.append(seen)
    yield together


def _counting(pool: Pool) -> Counting:
    """As its scheduler counted: of the API itself a trace says nothing."""
    if pool.window is not None and pool.window.sliding:
        return Counting.SLIDING
    return Counting.BUCKET if pool.window is not None and pool.window.bucket else Counting.FIXED


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
