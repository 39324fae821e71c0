"""One call for one simulation: a workload, the name of a policy or baseline, pools; out comes a Result."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tangram.core.action import Action
from tangram.core.limits import Limits
from tangram.core.messages import Effect, Event, Pool
from tangram.core.policies import POLICIES, policy
from tangram.core.profile import Estimate, Knowledge
from tangram.core.scheduler import Scheduler
from tangram.errors import InvalidConfig
from tangram.sim.baselines import Baseline, PodsConfig, pods_config
from tangram.sim.engine import DEVICE_MEMORY_GIB, Engine, Orchestrator
from tangram.sim.episode import Step, Workload
from tangram.sim.faults import Fault, inject
from tangram.sim.on_demand import NAME as ON_DEMAND
from tangram.sim.on_demand import OnDemand, OnDemandConfig, without_restores
from tangram.sim.result import Result

BASELINES = {
    "pods:R": "one pod per trajectory with a request of R cores, fixed devices per service, uncontrolled API calls",
    ON_DEMAND: "device calls alone: a model is loaded when it is asked for, on a fixed number of devices",
    "alone": "every action alone on cores of its own: no waiting, no sharing; the most any scheduler could reach",
}
"""Names beside the policies that `simulate` takes."""

KNOWLEDGE = ("learned", "hints", "perfect")


def simulate(
    workload: Workload,
    name: str,
    pools: tuple[Pool, ...],
    *,
    knowledge: str = "learned",
    limits: Limits | None = None,
    faults: tuple[Fault, ...] = (),
    pods: PodsConfig | None = None,
    on_demand: OnDemandConfig | None = None,
    timeout_s: float | None = None,
    observer: Callable[[float, Event, list[Effect]], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Play the workload under a policy or a baseline.

    `knowledge`: "learned" tells the scheduler nothing beforehand, "hints" gives every action its duration,
    "perfect" lets it know durations, speed-ups and CPU use.
    """
    if knowledge not in KNOWLEDGE:
        raise InvalidConfig("knowledge", knowledge, f"one of {', '.join(KNOWLEDGE)}")
    if name == "alone":
        # Its calls are not held back, so an API that counted them would refuse what no scheduler would have sent.
        pools, workload = _endless(pools), msgspec.structs.replace(workload, apis=())
    orchestrator: Orchestrator
    if name == ON_DEMAND:
        config = on_demand or OnDemandConfig()
        orchestrator = OnDemand(pools, workload.services, config)
        workload = without_restores(workload, config, DEVICE_MEMORY_GIB)
    else:
        orchestrator = _orchestrator(name, workload, pools, knowledge, limits, pods)
    engine = Engine(
        workload,
        orchestrator,
        pools,
        name=name,
        hints=knowledge == "hints",
        timeout_s=timeout_s,
        observer=observer,
        progress=progress,
    )
    scheduler = engine.orchestrator
    if knowledge == "perfect" and isinstance(scheduler, Scheduler):
        scheduler.knowledge = Oracle(engine.truth)
    inject(engine, faults)
    return engine.run()


def _orchestrator(
    name: str,
    workload: Workload,
    pools: tuple[Pool, ...],
    knowledge: str,
    limits: Limits | None,
    pods: PodsConfig | None,
) -> Orchestrator:
    family = name.partition(":")[0]
    if family == "pods":
        return Baseline(pools, workload.services, pods or pods_config(name))
    if name == "alone":
        return Scheduler(policy("adaptive"), pools, limits=limits)
    if family not in {known.partition(":")[0] for known in POLICIES}:
        raise InvalidConfig("policy", name, f"one of {', '.join([*POLICIES, *BASELINES])}")
    return Scheduler(policy(name), pools, limits=limits)


def _endless(pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
    """So much of everything that nobody ever waits or shares."""
    return tuple(
        Pool(kind=pool.kind, node=pool.node, total=pool.total * 10_000 if pool.kind != "gpu" else pool.total)
        for pool in pools
    )


class Oracle(Knowledge):
    """Knows every action before it runs and learns nothing."""

    __slots__ = ("_truth",)

    def __init__(self, truth: dict[str, Step]) -> None:
        super().__init__()
        self._truth = truth

    def estimate(self, action: Action) -> Estimate:
        step = self._truth[action.id]
        return Estimate(step.work_s, 0.0, min(0.98, step.speedup.exponent_near(8.0)), step.busy, 1.0)

    def observe(self, action: Action, *, execution_s: float, units: float | None, cpu_s: float | None) -> None:
        pass
