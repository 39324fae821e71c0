"""The `coding` workload: a rollout batch of software-engineering agents in sandboxes, rewarded by test suites.

Owns the shape of such trajectories. An episode starts its container, alternates thinking and tool calls, and ends with
the reward: the test suite of its data set item. Groups of siblings work on one item, so the number of their calls, the
length of their test runs and their rewards correlate. Episode k is the same for every batch size.

Fitted to measurements of real agents (left: the measured range; right: the exact value of the fit):

    calls per trajectory        mean 29-59, p95 60-118                       44, 92
    think before a call         p50 1.8-3.7 s, p95 6-17 s                    3.1, 11.6
    call duration               p50 0.06-0.12, p90 1.8-2.3, p95 4-5.5 s      0.075, 2.1, 4.7
                                p99 73-120, max 360, mean 2.7-3.1, CV 5-6    110, 360, 2.8, 5.6
    test commands               p50 1.2-2.1, p95 20-29, p99 110-120 s        1.3, 24, 120
                                70 % of shell time                           70 %
    within 2x of class median   0.65-0.77 of the calls                       0.71
    cores while tools run       0.14-0.43, peak of a trajectory 1 (p50)-12   0.26, 1.0-12
    tools busy                  36-52 % of a span of 165-468 s               39 % of 312 s
    container start             p50 0.45, p90 2.1, p99 5.3 s                 0.45, 2.05, 5.2
    reward                      p50 5.7, p95 63, p99 120 s                   5.7, 63, 120
                                mean 17, CV 2.1                              17, 2.1
    log reward in a group       standard deviation 0.5                       0.5
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from tangram.core.demand import CPU, Demand, cores, learned
from tangram.core.speedup import PowerLaw
from tangram.sim.episode import SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.workloads import options
from tangram.sim.workloads.fit import SECONDS_MIN, Floats, LognormalComponent, Mixture, lognormal, random_stream

TOOL_LIMIT_S = 120.0
"""Default time limit of a shell tool: every measurement shows a peak of durations at 120 s."""

LONG_LIMIT_S = 360.0
LONG_LIMIT_SHARE = 0.25
"""Share of the commands that hit a time limit for which the agent set a longer limit. Reproduces the measured maximum
and coefficient of variation."""

CALL_COUNT = lognormal(38.0, 0.54)
CALL_COUNT_SIGMA_ITEM = 0.4
"""Part of that spread that siblings share: the difficulty of the item."""
CALL_COUNT_MIN, CALL_COUNT_MAX = 3, 150
"""The maximum is a limit of turns, as in every rollout: above all measured p95, and rarely reached."""

THINK_S = lognormal(3.1, 0.8)

TESTS_SIGMA_ITEM = 0.35
"""Part of the spread of test commands that comes from the repository, and that its reward shares."""

REWARD_SIGMA = 0.5
"""Spread of the log duration of one item's test suite between siblings."""
REWARD_BUSY = 0.3
"""Cores that a test suite keeps busy per core of its width: as measured for the test commands of agents. The rest of
the time it installs packages, reads files and waits."""
REWARD_CORES_MIN = 0.5
"""Guaranteed cores of a test suite: the request of a pod per trajectory in the baseline of the papers."""
REWARD_EXPONENTS = (0.6, 0.85)
"""Test suites parallelise like the better developer commands (lint 0.6, type checks 0.76-0.88)."""

START_S = Mixture((LognormalComponent(0.75, 0.42, 0.15), LognormalComponent(0.25, 1.75, 0.62)))
"""Most containers start from a warm image immediately; a quarter wait for the disk."""

REWARD_S = Mixture(
    (
        LognormalComponent(0.628, 3.54, 0.61, 120.0),
        LognormalComponent(0.36, 24.7, 0.762, 120.0),
        LognormalComponent(0.012, 180.0, 0.81, 600.0),
    )
)
"""Small suites, large suites, and the few data set items with a limit of ten minutes."""

START_BUSY = 0.3
LIMIT_CORES = 4.0
"""Core limit of a pod per trajectory in the baseline of the papers."""


class CallClass(msgspec.Struct, frozen=True):
    """Calls with the same behaviour, predicted from the tool and the first word of the command."""

    key: str
    share: float
    seconds: Mixture
    cores: Mixture


def _limited(weight: float, median: float, sigma: float) -> tuple[LognormalComponent, LognormalComponent]:
    """Commands that mostly end at their time limit; some have the long limit."""
    return (
        LognormalComponent(weight * (1.0 - LONG_LIMIT_SHARE), median, sigma, TOOL_LIMIT_S),
        LognormalComponent(weight * LONG_LIMIT_SHARE, median, sigma, LONG_LIMIT_S),
    )


def _quick(median: float, sigma: float, slow: float = 0.0) -> Mixture:
    """Calls of tens of milliseconds. The share `slow` hits a cold cache or a large tree and takes about a second."""
    if not slow:
        return lognormal(median, sigma, TOOL_LIMIT_S)
    return Mixture(
        (LognormalComponent(1.0 - slow, median, sigma, TOOL_LIMIT_S), LognormalComponent(slow, 0.9, 0.5, TOOL_LIMIT_S))
    )


TEST_S = Mixture(
    (
        LognormalComponent(0.783, 1.08, 0.62, TOOL_LIMIT_S),
        LognormalComponent(0.176, 6.0, 0.85, TOOL_LIMIT_S),
        *_limited(0.041, 140, 0.45),
    )
)
"""One test file, the whole suite, and suites that hang until the limit."""
INSTALL_S = Mixture((LognormalComponent(0.70, 1.5, 0.45, TOOL_LIMIT_S), *_limited(0.30, 62.0, 0.9)))
"""Already installed, or downloaded and built."""

LIGHT_CORES = lognormal(0.12, 0.6, 1.0)
"""Waiting for the disk and for the tool itself."""
SCRIPT_CORES = Mixture((LognormalComponent(0.6, 0.15, 0.6, 1.0), LognormalComponent(0.4, 0.95, 0.1, 1.2)))
TEST_CORES = Mixture(
    (
        LognormalComponent(0.88, 0.12, 0.7, 1.0),
        LognormalComponent(0.11, 0.92, 0.08, 1.2),
        LognormalComponent(0.01, 2.4, 0.7, 12.0),
    )
)
"""Most tests wait, a tenth fill one core, a few start threads on every core they see."""
INSTALL_CORES = Mixture(
    (
        LognormalComponent(0.88, 0.1, 0.7, 1.0),
        LognormalComponent(0.11, 0.9, 0.1, 1.2),
        LognormalComponent(0.01, 2.0, 0.5, 12.0),
    )
)
"""Downloads wait, unpacking and byte-compiling fill a core, a compiler run fills several."""

CLASSES = (
    CallClass("read", 0.181, _quick(0.040, 0.40, slow=0.14), LIGHT_CORES),
    CallClass("grep", 0.108, _quick(0.042, 0.45, slow=0.10), LIGHT_CORES),
    CallClass("edit", 0.12, _quick(0.045, 0.42), LIGHT_CORES),
    CallClass("write", 0.03, _quick(0.044, 0.35), LIGHT_CORES),
    CallClass("todo", 0.05, _quick(0.025, 0.45), LIGHT_CORES),
    CallClass("glob", 0.02, _quick(0.08, 0.60, slow=0.30), LIGHT_CORES),
    CallClass("bash:ls", 0.09, _quick(0.055, 0.50, slow=0.20), LIGHT_CORES),
    CallClass("bash:git", 0.06, _quick(0.07, 0.60, slow=0.30), LIGHT_CORES),
    CallClass("bash:python", 0.05, _quick(0.9, 0.6), SCRIPT_CORES),
    CallClass("bash:pytest", 0.259, TEST_S, TEST_CORES),
    CallClass("bash:pip", 0.032, INSTALL_S, INSTALL_CORES),
)
"""Short calls dominate the count, tests the time. A class predicts the duration of its calls only roughly."""


class _MixtureTable:
    """Mixtures of all classes as one table, so that one vectorized pass draws all calls of an episode."""

    def __init__(self, mixtures: list[Mixture], sigma_shared: list[float]) -> None:
        width = max(len(mixture.components) for mixture in mixtures)
        self.edges = np.ones((len(mixtures), width))
        self.logs, self.sigmas = np.zeros_like(self.edges), np.zeros_like(self.edges)
        self.caps = np.full_like(self.edges, math.inf)
        for row, (mixture, shared) in enumerate(zip(mixtures, sigma_shared, strict=True)):
            count = len(mixture.components)
            self.edges[row, : count - 1] = np.cumsum([component.weight for component in mixture.components])[:-1]
            self.logs[row, :count] = np.log([component.median for component in mixture.components])
            self.sigmas[row, :count] = [math.sqrt(component.sigma**2 - shared**2) for component in mixture.components]
            self.caps[row, :count] = [component.cap for component in mixture.components]

    def draw(self, rng: np.random.Generator, rows: np.ndarray, shift: Floats) -> Floats:
        """One value per row; `shift` is added to its logarithm before the cap."""
        chosen = (rng.random(len(rows))[:, None] >= self.edges[rows]).sum(axis=1)
        logs = self.logs[rows, chosen] + self.sigmas[rows, chosen] * rng.standard_normal(len(rows)) + shift
        values: Floats = np.minimum(np.exp(logs), self.caps[rows, chosen])
        return values


_TESTS_ROW = next(row for row, c in enumerate(CLASSES) if c.key == "bash:pytest")
_SHARED_SIGMAS = np.where(np.arange(len(CLASSES)) == _TESTS_ROW, TESTS_SIGMA_ITEM, 0.0)
_SECONDS = _MixtureTable([c.seconds for c in CLASSES], _SHARED_SIGMAS.tolist())
_CORES = _MixtureTable([c.cores for c in CLASSES], [0.0] * len(CLASSES))
_CLASS_EDGES = np.cumsum([c.share for c in CLASSES])[:-1]
_KEYS = [c.key for c in CLASSES]


class DatasetItem(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the data set: what the siblings of a group share."""

    name: str
    log_calls_mean: float
    """Mean of the log number of calls."""
    slowness: float
    """Standard normal: slowness of the repository's tests."""
    log_reward_mean: float
    """Mean of the log seconds of the test suite."""
    reward_cap_s: float
    speedup: PowerLaw


def draw_item(seed: int, number: int) -> DatasetItem:
    rng = random_stream("coding", seed, "item", number)
    slowness, difficulty = rng.standard_normal(2).tolist()
    suite_draw, exponent_draw = rng.random(2).tolist()
    suite = REWARD_S.components[
        int(
            np.searchsorted(
                np.cumsum([component.weight for component in REWARD_S.components])[:-1], suite_draw, "right"
            )
        )
    ]
    low, high = REWARD_EXPONENTS
    return DatasetItem(
        name=f"item-{seed}-{number}",
        log_calls_mean=math.log(CALL_COUNT.components[0].median) + CALL_COUNT_SIGMA_ITEM * difficulty,
        slowness=slowness,
        log_reward_mean=math.log(suite.median) + math.sqrt(suite.sigma**2 - REWARD_SIGMA**2) * slowness,
        reward_cap_s=suite.cap,
        speedup=PowerLaw(low + (high - low) * exponent_draw),
    )


class CallDraws(NamedTuple):
    """The tool calls of one trajectory, as columns."""

    think_s: list[float]
    keys: list[str]
    work_s: list[float]
    busy_cores: list[float]


def draw_calls(rng: np.random.Generator, item: DatasetItem) -> CallDraws:
    sigma = math.sqrt(CALL_COUNT.components[0].sigma ** 2 - CALL_COUNT_SIGMA_ITEM**2)
    count = round(math.exp(item.log_calls_mean + sigma * rng.standard_normal()))
    count = min(max(count, CALL_COUNT_MIN), CALL_COUNT_MAX)
    rows = np.searchsorted(_CLASS_EDGES, rng.random(count), side="right")
    seconds = np.maximum(_SECONDS.draw(rng, rows, _SHARED_SIGMAS[rows] * item.slowness), SECONDS_MIN)
    busy = np.maximum(_CORES.draw(rng, rows, np.zeros(count)), 0.01)
    keys = [_KEYS[row] for row in rows.tolist()]
    return CallDraws(THINK_S.draw(rng, count).tolist(), keys, seconds.tolist(), busy.tolist())


def build(
    *,
    batch: int = 1280,
    seed: int = 0,
    run: str = "coding",
    group: int = 8,
    memory: int = 256,
    reward_cores_max: int = 16,
    spread_s: float = 0.0,
) -> Workload:
    """Build the workload. `memory` is in MiB per sandbox; `spread_s` staggers the starts (default: all at 0)."""
    options.check_name("run", run)
    options.check_integer("group", group)
    options.check_integer("memory", memory, least=0)
    options.check_integer("reward_cores_max", reward_cores_max)
    options.check_number("spread_s", spread_s)
    call_demand = Demand({CPU: learned(LIMIT_CORES)})
    reward_demand = Demand({CPU: cores(REWARD_CORES_MIN, reward_cores_max)})
    items = [draw_item(seed, number) for number in range(-(-batch // group))]
    episodes = []
    for k in range(batch):
        rng = random_stream("coding", seed, "episode", k)
        episodes.append(
            SimEpisode(
                id=f"{run}/{k}",
                run=run,
                task="coding",
                group=f"{run}/g{k // group}",
                start_s=spread_s * float(rng.random()),
                memory=memory,
                turns=_turns(rng, items[k // group], call_demand, reward_demand),
            )
        )
    return Workload(name="coding", seed=seed, episodes=tuple(episodes))


def _turns(
    rng: np.random.Generator, item: DatasetItem, call_demand: Demand, reward_demand: Demand
) -> tuple[SimTurn, ...]:
    start_s = float(START_S.draw(rng, 1)[0])
    reward_think_s = float(THINK_S.draw(rng, 1)[0])
    log_reward_s = item.log_reward_mean + REWARD_SIGMA * float(rng.standard_normal())
    reward_s = max(SECONDS_MIN, min(item.reward_cap_s, math.exp(log_reward_s)))
    start = SimStep(kind="create", key="container", demand=call_demand, work_s=start_s, busy=START_BUSY)
    tests = SimStep(
        kind="reward",
        key="tests",
        demand=reward_demand,
        work_s=reward_s,
        busy=REWARD_BUSY,
        speedup=item.speedup,
        task=item.name,
    )
    turns = [SimTurn(think_s=0.0, steps=(start,))]
    turns.extend(
        SimTurn(think_s=think, steps=(SimStep(kind="exec", key=key, demand=call_demand, work_s=work, busy=busy),))
        for think, key, work, busy in zip(*draw_calls(rng, item), strict=True)
    )
    turns.append(SimTurn(think_s=reward_think_s, steps=(tests,)))
    return tuple(turns)
