"""Run one simulation: a workload, the name of a policy or baseline, and pools in; a SimulationResult out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tangram.core.action import Action
from tangram.core.limits import Limits
from tangram.core.messages import Decider, Observer, Pool
from tangram.core.policies import DEFAULT_POLICY, POLICIES, policy
from tangram.core.profile import Estimate, ProfileStore
from tangram.core.scheduler import Scheduler
from tangram.errors import InvalidConfig
from tangram.sim.baselines import Baseline, PodsConfig, pods_config
from tangram.sim.engine import DEVICE_MEMORY_GIB, Simulator
from tangram.sim.episode import SimStep, Workload
from tangram.sim.faults import InjectedFault, inject
from tangram.sim.on_demand import NAME as ON_DEMAND
from tangram.sim.on_demand import OnDemand, OnDemandConfig, without_restores
from tangram.sim.result import SimulationResult

BASELINES = {
    "pods:R": "one pod per trajectory with a request of R cores, fixed devices per service, uncontrolled API calls",
    ON_DEMAND: "only device calls: models are loaded on demand, on a fixed number of devices",
    "alone": "every action alone on cores of its own: no waiting, no sharing; the most any scheduler could reach",
}
"""Names that `simulate` takes in addition to policies."""

KNOWLEDGE = ("learned", "hints", "perfect")


def simulate(
    workload: Workload,
    name: str,
    pools: tuple[Pool, ...],
    *,
    knowledge: str = "learned",
    limits: Limits | None = None,
    faults: tuple[InjectedFault, ...] = (),
    pods: PodsConfig | None = None,
    on_demand: OnDemandConfig | None = None,
    timeout_s: float | None = None,
    observer: Observer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Play the workload under a policy or a baseline.

    `knowledge`: "learned" gives the scheduler no prior information, "hints" gives every action its duration, "perfect"
    gives it durations, speed-ups and CPU use.
    """
    if knowledge not in KNOWLEDGE:
        raise InvalidConfig("knowledge", knowledge, f"one of {', '.join(KNOWLEDGE)}")
    if name == "alone":
        # Its calls are never delayed, so an API that counted them would reject calls that no scheduler would send.
        pools, workload = _unlimited_pools(pools), msgspec.structs.replace(workload, apis=())
    truth: dict[str, SimStep] = {}
    orchestrator: Decider
    if name == ON_DEMAND:
        config = on_demand or OnDemandConfig()
        orchestrator = OnDemand(pools, workload.services, config)
        workload = without_restores(workload, config, DEVICE_MEMORY_GIB)
    else:
        profiles = Oracle(truth) if knowledge == "perfect" else ProfileStore()
        orchestrator = _orchestrator(name, workload, pools, profiles, limits, pods)
    engine = Simulator(
        workload,
        orchestrator,
        pools,
        truth=truth,
        name=name,
        hints=knowledge == "hints",
        timeout_s=timeout_s,
        observer=observer,
        progress=progress,
    )
    inject(engine, faults)
    return engine.run()


def _orchestrator(
    name: str,
    workload: Workload,
    pools: tuple[Pool, ...],
    profiles: ProfileStore,
    limits: Limits | None,
    pods: PodsConfig | None,
) -> Decider:
    family = name.partition(":")[0]
    if family == "pods":
        return Baseline(pools, workload.services, pods or pods_config(name))
    if name == "alone":
        return Scheduler(policy(DEFAULT_POLICY), pools, limits=limits, profiles=profiles)
    if family not in {known.partition(":")[0] for known in POLICIES}:
        raise InvalidConfig("policy", name, f"one of {', '.join([*POLICIES, *BASELINES])}")
    return Scheduler(policy(name), pools, limits=limits, profiles=profiles)


def _unlimited_pools(pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
    """Return pools so large that no action ever waits or shares."""
    return tuple(
        Pool(kind=pool.kind, node=pool.node, total=pool.total * 10_000 if pool.kind != "gpu" else pool.total)
        for pool in pools
    )


class Oracle(ProfileStore):
    """Knows every action before it runs and learns nothing."""

    __slots__ = ("_truth",)

    def __init__(self, truth: dict[str, SimStep]) -> None:
        super().__init__()
        self._truth = truth

    def estimate(self, action: Action) -> Estimate:
        step = self._truth[action.id]
        return Estimate(step.work_s, 0.0, min(0.98, step.speedup.exponent_near(8.0)), step.busy, 1.0)

    def observe(self, action: Action, *, execution_s: float, units: float | None, cpu_s: float | None) -> None:
        pass
