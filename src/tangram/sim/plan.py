"""Plan: the smallest pool with which a policy reaches a target, against what is reserved today.

Owns the search over sizes. Each size is simulated under several seeds with the same work. A larger pool is assumed to
be no worse. Same question, same answer, for any number of worker processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from tangram.core.demand import CPU, GPU
from tangram.core.policies import DEFAULT_POLICY
from tangram.errors import InvalidConfig
from tangram.processes.process_pool import ProcessPool
from tangram.reports.formatting import digits_to_distinguish, pluralize, seconds
from tangram.sim.compare import Progress, Setup, SimulationRun, SimulationTask, Source, build_workload, simulate_task
from tangram.sim.episode import Workload
from tangram.sim.size import Size, pods_can_run, static_devices
from tangram.sim.workloads import options

TARGETS = {"mean": "act_mean_s", "p95": "act_p95_s"}
NUMBERS = {"act_mean_s": "mean ACT", "act_p95_s": "p95", "act_p99_s": "p99", "step_s": "step"}
"""Metrics that a plan reports for each size, with their labels."""
RESOURCES = ("cores", "devices")
PRECISION = 0.02
"""The search ends when the answer is known within this share, or within one unit."""
DOUBLINGS_MAX = 4
"""The search does not go beyond this many doublings of today's reservation: a target still missed there is not limited
by the pool."""
FLAT = 0.001
"""If doubling the pool improves the ACT by less than this share, further doublings are not tried."""
SIZES_PER_ROUND = 2
"""Bisection points simulated in parallel."""
CURVE_UP_TO = 2.0
"""Halving stops at the first size that misses the target by this factor: smaller ones only take long."""
REFERENCE_POLICY = "pods:0.5"


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The question of a plan."""

    source: Source
    size: Size
    """Pools that are not searched keep this size."""
    resource: str = "cores"
    policy: str = DEFAULT_POLICY
    target: str = "mean"
    act_s: float | None = None
    """Target in seconds. None: the ACT that `like` reaches."""
    like: str = REFERENCE_POLICY
    like_size: int = 0
    """Size of that reservation; 0: computed from the workload."""
    recorded: bool = False
    """`like` is the policy that the work was recorded with."""
    seeds: tuple[int, ...] = (0, 1, 2)
    knowledge: str = "learned"

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise InvalidConfig("target", self.target, f"{' or '.join(TARGETS)} (which ACT; its seconds go to --act)")
        options.check_choice("resource", self.resource, RESOURCES)
        options.check_integer("like", self.like_size, least=0)
        if self.act_s is not None:
            options.check_positive("act", self.act_s)

    def setup(self, policy: str, size: int) -> Setup:
        return Setup(
            source=self.source,
            size=resized(self.size, self.resource, size),
            policies=(policy,),
            seeds=self.seeds,
            knowledge=self.knowledge,
        )


def resized(size: Size, resource: str, amount: int) -> Size:
    if resource == "devices":
        return msgspec.structs.replace(size, devices=amount)
    return msgspec.structs.replace(size, cores=amount, nodes=max(1, min(size.nodes, amount)))


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One size, as means over seeds."""

    size: int
    act_mean_s: float
    act_p95_s: float
    act_p99_s: float
    step_s: float | None
    """None if a trajectory, and therefore the step, did not complete."""
    use: float
    """Share of the pool in use."""
    failed: float
    """Trajectories that did not complete."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    workload: str
    policy: str
    resource: str
    target: str
    target_s: float
    seeds: tuple[int, ...]
    like: str
    reference: Point
    """Today's reservation."""
    recorded: bool
    """Today's reservation is that of the recording being replayed."""
    points: list[Point]
    """Every size tried, in increasing order."""
    smallest: int | None
    """None: no size tried reaches the target."""

    @property
    def saved(self) -> float | None:
        """Share of today's reservation that is not needed."""
        return None if self.smallest is None else 1.0 - self.smallest / self.reference.size

    @property
    def today(self) -> str:
        """Describe what is reserved today. Pods take no devices; devices are fixed per service."""
        return "fixed devices" if self.resource == "devices" and self.like.startswith("pods") else self.like

    @property
    def today_in_full(self) -> str:
        """Describe today's reservation with its size and its source."""
        size = self.reference.size
        text = f"{size} {self.today}" if self.today != self.like else f"{self.like} on {self._amount(size)}"
        return f"{text}, as recorded" if self.recorded else text

    def _amount(self, size: int) -> str:
        return pluralize(size, self.resource.removesuffix("s"))

    @property
    def digits(self) -> int:
        """Return the number of digits that distinguishes the answer from every size that misses the target."""
        return digits_to_distinguish([_value(point, self.target) for point in self.points], self.target_s)

    def describe_point(self, point: Point) -> list[str]:
        """Return the times of a point as text; the target metric has enough digits."""
        target = TARGETS[self.target]
        return [seconds(getattr(point, column), self.digits if column == target else 0) for column in NUMBERS]

    def sentence(self) -> str:
        """The answer in words."""
        goal = f"{self.target} ACT of {seconds(self.target_s, self.digits)}"
        today = self.today_in_full
        if self.smallest is None or self.saved is None:
            most = self._amount(self.points[-1].size)
            answer = f"{self.policy} does not reach a {goal}, even with {most}; today: {today}."
            return " ".join([answer, *self._flatness(), *self._losses()])
        change = f"{100.0 * abs(self.saved):.0f} % {'fewer' if self.saved > 0.0 else 'more'} than {today}"
        if not self.saved:
            change = f"no fewer than {today}"
        answer = f"{self.policy} reaches a {goal} with {self._amount(self.smallest)}: {change}."
        return " ".join([answer, *self._worse(), *self._losses()])

    def _worse(self) -> Iterator[str]:
        """Yield the metrics other than the target that are worse than today."""
        smallest = next(point for point in self.points if point.size == self.smallest)
        worse = []
        for column, words in NUMBERS.items():
            new, old = getattr(smallest, column), getattr(self.reference, column)
            if new is not None and old is not None and new > old and seconds(new) != seconds(old):
                worse.append(f"{words} {seconds(new)} instead of {seconds(old)}")
        if worse:
            yield f"But this is worse than today: {', '.join(worse)}."

    def _flatness(self) -> Iterator[str]:
        if _is_flat(self.points, self.target):
            yield (
                f"From {self._amount(self.points[-2].size)} on, more of them change nothing: the rest of the ACT is"
                f" execution, or waiting for another resource than {self.resource}."
            )

    def _losses(self) -> Iterator[str]:
        if self.reference.failed:
            yield (
                f"Under {self.today} {self.reference.failed:.1f} trajectories did not complete: its ACT covers less"
                " work."
            )
        if any(point.failed for point in self.points):
            yield "A size on which trajectories did not complete does not reach the target."

    def reaches(self, point: Point) -> bool:
        return _reaches(point, self.target, self.target_s)


def _value(point: Point, target: str) -> float:
    value: float = getattr(point, TARGETS[target])
    return value


def _is_flat(points: list[Point], target: str) -> bool:
    """Return whether the last doubling brought no improvement."""
    if len(points) < 2 or points[-1].size < 2 * points[-2].size or points[-1].failed != points[-2].failed:
        return False
    before, after = (_value(point, target) for point in points[-2:])
    return after < math.inf and abs(before - after) <= FLAT * before


def _reaches(point: Point, target: str, target_s: float) -> bool:
    """Compare to nine digits. A point with incomplete trajectories never reaches the target: incomplete work must not
    count as fast."""
    return not point.failed and _value(point, target) <= target_s * (1.0 + 1e-9)


def plan(request: PlanRequest, *, workers: int | None = None, progress: Progress | None = None) -> Plan:
    """Simulate today's reservation, then a range of sizes, then bisect for the smallest that reaches the target."""
    workload = build_workload(request.source, request.seeds[0])
    today = reserved_today(workload, request.resource, request.like, request.like_size)
    least = _least(request, workload, today)
    with ProcessPool(workers) as pool:
        search = _Search(request, pool, progress, math.ceil(math.log2(today / least + 1)))
        reference = search.measure(request.like, [today])[0]
        target_s = request.act_s or getattr(reference, TARGETS[request.target])

        def reaches(size: int) -> bool:
            return _reaches(search.points[size], request.target, target_s)

        sizes = _halvings(today, least)
        for i in range(0, len(sizes), SIZES_PER_ROUND):
            search.try_sizes(sizes[i : i + SIZES_PER_ROUND])
            if search.value(min(search.points)) > CURVE_UP_TO * target_s:
                break
        for doubling in range(1, DOUBLINGS_MAX + 1):
            if reaches(max(search.points)) or _is_flat(search.increasing(), request.target):
                break
            search.try_sizes([today * 2**doubling])
        smallest = _bisect(search, reaches)
    return Plan(
        workload=request.source.name,
        policy=request.policy,
        resource=request.resource,
        target=request.target,
        target_s=target_s,
        seeds=request.seeds,
        like=request.like,
        reference=reference,
        recorded=request.recorded,
        points=search.increasing(),
        smallest=smallest,
    )


def reserved_today(workload: Workload, resource: str, like: str, size: int = 0) -> int:
    """Return `size`, or if it is 0, what one pod per trajectory, or fixed devices per service, reserve at once."""
    if resource == "devices":
        devices = static_devices(workload.services)
        if not devices:
            raise InvalidConfig("resource", resource, f"cores: {workload.name} uses no devices")
        return size or devices
    if not _uses(workload, CPU):
        kind = "devices" if _uses(workload, GPU) else "none that can be sized"
        raise InvalidConfig("resource", resource, f"{kind}: {workload.name} uses no cores")
    if size:
        return size
    if not pods_can_run(workload):
        raise InvalidConfig("like", like, f"POLICY@CORES such as paper@32: {workload.name} has no sandboxes for pods")
    family, _, request = like.partition(":")
    if family != "pods":
        raise InvalidConfig("like", like, f"a size after the name, such as {like}@64")
    pods = sum(1 for episode in workload.episodes if episode.memory)
    return max(1, math.ceil(pods * float(request)))


def _uses(workload: Workload, kind: str) -> bool:
    return any(kind in step.demand.pools for e in workload.episodes for turn in e.turns for step in turn.steps)


def _least(question: PlanRequest, workload: Workload, today: int) -> int:
    """Return the smallest size on which every action can start; smaller ones are not simulated."""
    reason: InvalidConfig | None = None
    for size in range(1, today + 1):
        try:
            resized(question.size, question.resource, size).pools(workload)
        except InvalidConfig as error:
            reason = error
            continue
        return size
    raise reason or InvalidConfig("like", today, "at least 1")


def _halvings(today: int, least: int) -> list[int]:
    sizes = [today]
    while sizes[-1] > least:
        sizes.append(max(least, sizes[-1] // 2))
    return sizes


def _bisect(search: _Search, reaches: Callable[[int], bool]) -> int | None:
    """Bisect between the smallest size from which on all reach the target and the next smaller one."""
    sizes = sorted(search.points, reverse=True)
    if not reaches(sizes[0]):
        return None
    failing = next((size for size in sizes if not reaches(size)), None)
    if failing is None:
        return sizes[-1]
    enough = min(size for size in sizes if size > failing)
    while enough - failing > max(1, int(PRECISION * enough)):
        middle = (enough + failing) // 2
        search.try_sizes([middle])
        if reaches(middle):
            enough = middle
        else:
            failing = middle
    return enough


class _Search:
    """The sizes tried so far."""

    def __init__(self, question: PlanRequest, pool: ProcessPool, progress: Progress | None, rounds: int) -> None:
        self.points: dict[int, Point] = {}
        self._request = question
        self._pool = pool
        self._progress = progress
        self._done = 0
        # Today's reservation and its halvings, then about as many steps of bisection as halvings.
        self._expected = (1 + 2 * rounds) * len(question.seeds)

    def try_sizes(self, sizes: list[int]) -> None:
        new = [size for size in sizes if size not in self.points]
        for size, point in zip(new, self.measure(self._request.policy, new), strict=True):
            self.points[size] = point

    def increasing(self) -> list[Point]:
        return [self.points[size] for size in sorted(self.points)]

    def value(self, size: int) -> float:
        return _value(self.points[size], self._request.target)

    def measure(self, policy: str, sizes: list[int]) -> list[Point]:
        question = self._request
        # By seed first: a worker then builds the work of a seed once.
        setups = [question.setup(policy, size) for size in sizes]
        tasks = [SimulationTask(setup=setup, policy=policy, seed=seed) for seed in question.seeds for setup in setups]
        played: list[SimulationRun] = self._pool.map(simulate_task, tasks, self._report_progress)
        self._done += len(tasks)
        return [_point(size, question.resource, played[i :: len(sizes)]) for i, size in enumerate(sizes)]

    def _report_progress(self, done: float, total: int) -> None:
        if self._progress is not None:
            self._progress(self._done + done, max(self._expected, self._done + total))


def _point(size: int, resource: str, played: list[SimulationRun]) -> Point:
    def mean(metric: str) -> float:
        """Return the mean; infinity where nothing completed."""
        return sum(one.summary.get(metric, math.inf) for one in played) / len(played)

    failed = mean("failed")
    return Point(
        size=size,
        act_mean_s=mean("act_mean_s"),
        act_p95_s=mean("act_p95_s"),
        act_p99_s=mean("act_p99_s"),
        step_s=None if failed else mean("step_s"),
        use=mean("device_use" if resource == "devices" else "core_use"),
        failed=failed,
    )
