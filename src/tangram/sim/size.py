"""Size: the pools of a simulation, and the load that a workload puts on them.

Converts a few numbers (cores, nodes, devices) into pools, and owns the default size of a workload and its load. Raises
InvalidConfig before anything runs if some action of the workload could never start on these pools.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from tangram.core.demand import CORE, CPU, GPU, Demand
from tangram.core.messages import Pool, cpu_node
from tangram.errors import InvalidConfig
from tangram.sim.episode import ServiceModel, SimEpisode, SimStep, Workload

MEMORY_PER_CORE_GIB = 9.4
"""Memory per core as on the nodes in the publication: 2.4 TB for 256 cores."""
DEVICES_PER_NODE = 8
STATIC_DEGREE = 4
"""Devices per service in today's static deployment, if the service can use that many."""
TRAJECTORIES_PER_CORE = 8
"""The default number, a quarter of what pods with a request of half a core would admit at once, so that cores are
contended; 512 trajectories on 64 cores, as in the least loaded case of the `coding` benchmark."""
CORES_MIN = 4


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The pools of one simulation, except quotas, which belong to the workload."""

    cores: int = 0
    nodes: int = 1
    """Nodes that share the cores evenly."""
    memory_per_core_gib: float = MEMORY_PER_CORE_GIB
    """0: memory is not counted."""
    devices: int = 0
    """Devices, on separate nodes of eight."""

    def __post_init__(self) -> None:
        for name in ("cores", "devices"):
            if getattr(self, name) < 0:
                raise InvalidConfig(name, getattr(self, name), "a whole number, at least 0")
        if self.nodes < 1 or self.nodes > max(1, self.cores):
            raise InvalidConfig("nodes", self.nodes, f"1 to {max(1, self.cores)}, so that each node has a core")
        if not 0.0 <= self.memory_per_core_gib < math.inf:
            raise InvalidConfig("memory-per-core", self.memory_per_core_gib, "GiB, at least 0 (0: not counted)")

    def pools(self, workload: Workload) -> tuple[Pool, ...]:
        """Return all pools that the workload uses. Raises InvalidConfig if they can never serve it."""
        demands = list(_demands(workload))
        kinds = dict.fromkeys(kind for demand, _ in demands for kind in demand.pools)
        pools: list[Pool] = []
        if CPU in kinds:
            pools.extend(self._cpu_pools())
        if GPU in kinds:
            pools.extend(self._gpu_pools())
        pools.extend(pool for api in workload.apis for pool in api.pools)
        _check(workload, demands, pools)
        return tuple(pools)

    def _cpu_pools(self) -> Iterator[Pool]:
        each, more = divmod(self.cores, self.nodes)
        for node in range(self.nodes):
            cores = each + (node < more)
            yield from cpu_node(f"cpu-{node}", cores, cores * self.memory_per_core_gib)

    def _gpu_pools(self) -> Iterator[Pool]:
        for node, first in enumerate(range(0, self.devices, DEVICES_PER_NODE)):
            yield Pool(kind=GPU, node=f"gpu-{node}", total=min(DEVICES_PER_NODE, self.devices - first))

    def describe(self) -> str:
        parts = []
        if self.cores:
            parts.append(f"{self.cores} cores" + (f" on {self.nodes} nodes" if self.nodes > 1 else ""))
        if self.devices:
            parts.append(f"{self.devices} devices")
        return " and ".join(parts) or "quotas alone"


def default_size(workload: Workload) -> Size:
    """Return a contended default: a core for eight sandboxes, static devices for every service."""
    sandboxes = sum(1 for episode in workload.episodes if episode.memory)
    widest = max(
        (math.ceil(demand.pools[CPU].max / CORE) for demand, _ in _demands(workload) if CPU in demand.pools), default=0
    )
    cores = max(CORES_MIN, math.ceil(sandboxes / TRAJECTORIES_PER_CORE)) if sandboxes else widest
    return Size(cores=cores if widest else 0, devices=static_devices(workload.services))


def static_devices(services: tuple[ServiceModel, ...]) -> int:
    """Return the devices of a deployment in which every service has its own."""
    return sum(static_degree(service) for service in services)


def static_degree(service: ServiceModel) -> int:
    fitting = [degree for degree in service.degrees if degree <= STATIC_DEGREE]
    return max(fitting) if fitting else min(service.degrees)


def pods_can_run(workload: Workload) -> bool:
    """Return whether every CPU action runs in a sandbox; the pods baseline has no place for others."""
    return all(
        episode.memory or not any(CPU in step.demand.pools for turn in episode.turns for step in turn.steps)
        for episode in workload.episodes
    )


class LoadEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Required over available capacity, in the time that the work takes without waiting."""

    span_s: float
    """Seconds from the first start to the end of the longest trajectory if nothing ever waits."""
    core_s: float
    """CPU seconds of all actions, each on one core."""
    device_s: float
    """Device seconds of all actions, each on its smallest degree."""
    cpu: float
    """core_s / (cores x span_s)"""
    gpu: float
    """device_s / (devices x span_s)"""

    def describe(self) -> str:
        parts = [f"{share:.2f} of the {what}" for share, what in ((self.cpu, "cores"), (self.gpu, "devices")) if share]
        return f"load {' and '.join(parts)}" if parts else "load set by quotas"


def estimate_load(workload: Workload, size: Size) -> LoadEstimate:
    core_s = device_s = 0.0
    for episode in workload.episodes:
        for turn in episode.turns:
            for step in turn.steps:
                if CPU in step.demand.pools:
                    core_s += step.work_s * step.busy
                elif GPU in step.demand.pools:
                    fewest = step.demand.pools[GPU].min
                    device_s += fewest * step.work_s / step.speedup.at(fewest)
    span_s = span(workload)
    return LoadEstimate(
        span_s=span_s,
        core_s=core_s,
        device_s=device_s,
        cpu=core_s / (size.cores * span_s) if size.cores and span_s else 0.0,
        gpu=device_s / (size.devices * span_s) if size.devices and span_s else 0.0,
    )


def span(workload: Workload) -> float:
    """Return the seconds from the first start to the last end if nothing ever waits."""
    start_s = min((episode.start_s for episode in workload.episodes), default=0.0)
    return max((_end(episode) for episode in workload.episodes), default=0.0) - start_s


def _end(episode: SimEpisode) -> float:
    return episode.start_s + sum(
        turn.think_s + max((_undisturbed_s(step) for step in turn.steps), default=0.0) for turn in episode.turns
    )


def _undisturbed_s(step: SimStep) -> float:
    elastic = step.demand.elastic
    if not elastic:
        return step.work_s
    return step.work_s / step.speedup.at(step.demand.pools[elastic].max / (CORE if elastic == CPU else 1))


def _demands(workload: Workload) -> Iterator[tuple[Demand, SimStep]]:
    """Yield every demand once, with a step that has it. Steps share their demand objects, so there are few."""
    demands: dict[int, None] = {}
    for episode in workload.episodes:
        for turn in episode.turns:
            for step in turn.steps:
                if id(step.demand) not in demands:
                    demands[id(step.demand)] = None
                    yield step.demand, step


def _check(workload: Workload, demands: list[tuple[Demand, SimStep]], pools: list[Pool]) -> None:
    """Check that every demand fits an empty node, and every sandbox the memory of one."""
    largest: dict[str, int] = {}
    for pool in pools:
        largest[pool.kind] = max(largest.get(pool.kind, 0), pool.total)
    for demand, step in demands:
        for kind, amounts in demand.pools.items():
            least = max(amounts.min, 1)
            if largest.get(kind, 0) < least:
                _raise_too_small(workload.name, step, kind, least, largest.get(kind, 0))
    memory = max((episode.memory for episode in workload.episodes), default=0)
    if "memory" in largest and largest["memory"] < memory:
        raise InvalidConfig(
            "memory-per-core",
            f"{largest['memory']} MiB on the largest node",
            f"at least the {memory} MiB of one sandbox of {workload.name}",
        )


def _raise_too_small(workload: str, step: SimStep, kind: str, least: int, has: int) -> None:
    what = f"{step.kind} {step.key} of {workload}".replace("  ", " ")
    if kind == CPU:
        raise InvalidConfig("cores", has / CORE, f"at least {math.ceil(least / CORE)} on one node: {what} needs them")
    if kind == GPU:
        raise InvalidConfig("devices", has, f"at least {least} on one node: {what} needs them")
    raise InvalidConfig(f"pool {kind}", has, f"at least {least} units: {what} needs them")
