"""Plan: the smallest pool with which a policy reaches a target, against what is reserved today.

Owns the search over sizes. Each size is simulated under several seeds with the same work; more of a pool is taken to
be no worse. Promises the same answer for the same question, however many processes share the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from tangram.core.demand import CPU, GPU
from tangram.errors import InvalidConfig
from tangram.processes.process_pool import Workers
from tangram.reports.formatting import digits_apart, seconds, several
from tangram.sim.compare import Played, Progress, Setup, Source, Task, play, workload_of
from tangram.sim.episode import Workload
from tangram.sim.size import Size, pods_can_run, static_devices
from tangram.sim.workloads import options

TARGETS = {"mean": "act_mean_s", "p95": "act_p95_s"}
NUMBERS = {"act_mean_s": "mean ACT", "act_p95_s": "p95", "act_p99_s": "p99", "step_s": "step"}
"""What a plan tells of each size, with the words for it."""
RESOURCES = ("cores", "devices")
PRECISION = 0.02
"""The search ends when the answer is known to this share of it, or to one unit."""
DOUBLINGS_MAX = 4
"""Beyond this many times today's reservation, more of the pool is not what is missing."""
FLAT = 0.001
"""A doubling of the pool that brings less than this share of the ACT brings nothing, and neither would the next."""
AT_ONCE = 2
"""Halvings tried side by side."""
CURVE_UP_TO = 2.0
"""The row of halvings ends with the first that misses the target by so much: smaller ones only take long."""
TODAY = "pods:0.5"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be found out."""

    source: Source
    size: Size
    """The pools that are not searched stay at this size."""
    resource: str = "cores"
    policy: str = "adaptive"
    target: str = "mean"
    act_s: float | None = None
    """Seconds to reach. None: what `like` reaches."""
    like: str = TODAY
    like_size: int = 0
    """0: what that reservation takes today."""
    recorded: bool = False
    """`like` is what the work was recorded with."""
    seeds: tuple[int, ...] = (0, 1, 2)
    knowledge: str = "learned"

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise InvalidConfig("target", self.target, f"{' or '.join(TARGETS)} (which ACT; its seconds go to --act)")
        options.known("resource", self.resource, RESOURCES)
        options.whole("like", self.like_size, least=0)
        if self.act_s is not None:
            options.positive("act", self.act_s)

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
    """None: not every trajectory completed, so neither did the step."""
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
    """Today's reservation is that of the recording which is played."""
    points: list[Point]
    """Every size that was tried, increasing."""
    smallest: int | None
    """None: no size that was tried reaches the target."""

    @property
    def saved(self) -> float | None:
        """Share of today's reservation that is not needed."""
        return None if self.smallest is None else 1.0 - self.smallest / self.reference.size

    @property
    def today(self) -> str:
        """What is reserved today, in words: pods take no devices, those are fixed for each service."""
        return "fixed devices" if self.resource == "devices" and self.like.startswith("pods") else self.like

    @property
    def today_in_full(self) -> str:
        """With its size, and where it is known from."""
        size = self.reference.size
        told = f"{size} {self.today}" if self.today != self.like else f"{self.like} on {self._amount(size)}"
        return f"{told}, as recorded" if self.recorded else told

    def _amount(self, size: int) -> str:
        return several(size, self.resource.removesuffix("s"))

    @property
    def digits(self) -> int:
        """More digits than usual that tell every size that misses the target from it."""
        return digits_apart([_value(point, self.target) for point in self.points], self.target_s)

    def told(self, point: Point) -> list[str]:
        """Its times in words, the one that the target looks at with enough digits."""
        aimed = TARGETS[self.target]
        return [seconds(getattr(point, column), self.digits if column == aimed else 0) for column in NUMBERS]

    def sentence(self) -> str:
        """The answer in words."""
        goal = f"{self.target} ACT of {seconds(self.target_s, self.digits)}"
        today = self.today_in_full
        if self.smallest is None or self.saved is None:
            most = self._amount(self.points[-1].size)
            told = f"{self.policy} does not reach a {goal}, even with {most}; today: {today}."
            return " ".join([told, *self._flatness(), *self._losses()])
        change = f"{100.0 * abs(self.saved):.0f} % {'fewer' if self.saved > 0.0 else 'more'} than {today}"
        if not self.saved:
            change = f"no fewer than {today}"
        told = f"{self.policy} reaches a {goal} with {self._amount(self.smallest)}: {change}."
        return " ".join([told, *self._worse(), *self._losses()])

    def _worse(self) -> Iterator[str]:
        """What the target does not look at and what is worse there than today."""
        found = next(point for point in self.points if point.size == self.smallest)
        worse = []
        for column, words in NUMBERS.items():
            new, old = getattr(found, column), getattr(self.reference, column)
            if new is not None and old is not None and new > old and seconds(new) != seconds(old):
                worse.append(f"{words} {seconds(new)} instead of {seconds(old)}")
        if worse:
            yield f"But this is worse than today: {', '.join(worse)}."

    def _flatness(self) -> Iterator[str]:
        if _is_flat(self.points, self.target):
            yield (
                f"From {self._amount(self.points[-2].size)} on, more of them change nothing: what is left of the ACT is"
                f" execution, or waiting for something else than {self.resource}."
            )

    def _losses(self) -> Iterator[str]:
        if self.reference.failed:
            yield (
                f"Under {self.today} {self.reference.failed:.1f} trajectories did not complete: its ACT is that of less"
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
    """Whether the last doubling brought nothing."""
    if len(points) < 2 or points[-1].size < 2 * points[-2].size or points[-1].failed != points[-2].failed:
        return False
    before, after = (_value(point, target) for point in points[-2:])
    return after < math.inf and abs(before - after) <= FLAT * before


def _reaches(point: Point, target: str, target_s: float) -> bool:
    """To nine digits, and with every trajectory completed: what was not done must not count as done soon."""
    return not point.failed and _value(point, target) <= target_s * (1.0 + 1e-9)


def plan(question: Question, *, workers: int | None = None, progress: Progress | None = None) -> Plan:
    """Simulate today's reservation, then a row of sizes, then close in on the smallest that reaches the target."""
    workload = workload_of(question.source, question.seeds[0])
    today = reserved_today(workload, question.resource, question.like, question.like_size)
    least = _least(question, workload, today)
    with Workers(workers) as pool:
        search = _Search(question, pool, progress, math.ceil(math.log2(today / least + 1)))
        reference = search.measure(question.like, [today])[0]
        target_s = question.act_s or getattr(reference, TARGETS[question.target])

        def reaches(size: int) -> bool:
            return _reaches(search.points[size], question.target, target_s)

        sizes = _halvings(today, least)
        for i in range(0, len(sizes), AT_ONCE):
            search.try_sizes(sizes[i : i + AT_ONCE])
            if search.value(min(search.points)) > CURVE_UP_TO * target_s:
                break
        for doubling in range(1, DOUBLINGS_MAX + 1):
            if reaches(max(search.points)) or _is_flat(search.increasing(), question.target):
                break
            search.try_sizes([today * 2**doubling])
        smallest = _close_in(search, reaches)
    return Plan(
        workload=question.source.name,
        policy=question.policy,
        resource=question.resource,
        target=question.target,
        target_s=target_s,
        seeds=question.seeds,
        like=question.like,
        reference=reference,
        recorded=question.recorded,
        points=search.increasing(),
        smallest=smallest,
    )


def reserved_today(workload: Workload, resource: str, like: str, size: int = 0) -> int:
    """The size that is given; 0: what one pod per trajectory, or fixed devices per service, reserve at once."""
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


def _least(question: Question, workload: Workload, today: int) -> int:
    """The smallest size on which every action could start; below it there is nothing to simulate."""
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


def _close_in(search: _Search, reaches: Callable[[int], bool]) -> int | None:
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

    def __init__(self, question: Question, pool: Workers, progress: Progress | None, rounds: int) -> None:
        self.points: dict[int, Point] = {}
        self._question = question
        self._pool = pool
        self._progress = progress
        self._done = 0
        # Today's reservation and its halvings, then about as many steps of bisection as halvings.
        self._expected = (1 + 2 * rounds) * len(question.seeds)

    def try_sizes(self, sizes: list[int]) -> None:
        new = [size for size in sizes if size not in self.points]
        for size, point in zip(new, self.measure(self._question.policy, new), strict=True):
            self.points[size] = point

    def increasing(self) -> list[Point]:
        return [self.points[size] for size in sorted(self.points)]

    def value(self, size: int) -> float:
        return _value(self.points[size], self._question.target)

    def measure(self, policy: str, sizes: list[int]) -> list[Point]:
        question = self._question
        # By seed first: a worker then builds the work of a seed once.
        setups = [question.setup(policy, size) for size in sizes]
        tasks = [Task(setup=setup, policy=policy, seed=seed) for seed in question.seeds for setup in setups]
        played: list[Played] = self._pool.map(play, tasks, self._tell)
        self._done += len(tasks)
        return [_point(size, question.resource, played[i :: len(sizes)]) for i, size in enumerate(sizes)]

    def _tell(self, done: float, total: int) -> None:
        if self._progress is not None:
            self._progress(self._done + done, max(self._expected, self._done + total))


def _point(size: int, resource: str, played: list[Played]) -> Point:
    def mean(metric: str) -> float:
        """Endless where nothing completed."""
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
