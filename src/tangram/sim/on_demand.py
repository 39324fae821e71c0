"""A baseline for devices: load models on demand, as a serverless system for models does.

The module owns the placement of models on devices and the loads; the engine gets models that restore in no time
(`without_restores`). It takes the same events and returns the same effects as the scheduler. It serves only device
calls and refuses all others. Devices belong to one instance at a time. An instance that loads or serves is never
evicted.

The model is ServerlessLLM under the best conditions. From its publication (OSDI 24) and its released code:

- an instance of a model has a fixed number of devices, which it does not share;
- every model has a FIFO queue; a ready instance serves the call at its head;
- a model requests one instance for every `target` calls that wait or are served, at most `instances_max`;
- models that lack instances get them in the order in which their oldest waiting calls arrived;
- an instance starts where it is ready soonest: a node reads a checkpoint from storage once and keeps it in host memory
  from then on, because the nodes in the publication have 3 TB for ten models of at most 140 GiB.

It is better than the released system in these respects:

- an idle instance is kept until its devices are needed; then the least recently used is evicted immediately. The
released
  system has a fixed keep-alive: no other model gets the devices before it ends, and they are empty after it.
- starting an engine takes no time in addition to loading (`start_s` adds some), and loads do not slow each other;
- decisions take no time; the released router waits a second before every call of a model (`turn_s` restores that).

Like static services, an instance serves one call at a time. Faults have the same effect as on the other baselines: a
failing node loses its instances, their calls and its host copies; a failed start is retried immediately; there are no
time limits."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from tangram.core.action import NO_USAGE, Action, Status, Usage
from tangram.core.demand import GPU
from tangram.core.messages import (
    Cancel,
    Effect,
    Event,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Share,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    WakeAt,
)
from tangram.errors import InvalidConfig
from tangram.sim.baselines import ATTEMPTS_MAX, CANCELLED, BaselineCall, nearest_degree
from tangram.sim.episode import ServiceModel, Workload

NAME = "on-demand"


class OnDemandConfig(msgspec.Struct, frozen=True, kw_only=True):
    devices_per_instance: int = 4
    """As many devices as a static service has. A model that cannot use this number gets the nearest one that it can."""
    storage_gib_s: float = 19.0
    host_gib_s: float = 47.0
    """Rates of loading from storage and from host memory. ServerlessLLM publishes 3.2 s and 1.3 s for the 61 GiB of
    Qwen3-32B, on H100 with NVMe."""
    start_s: float = 0.0
    """Time to start an engine, in addition to loading. The end-to-end latencies in the publication leave no room for
    any."""
    target: int = 1
    """Calls per instance, as in its default configuration."""
    instances_max: int = 10
    """Instances per model: the default of its configuration."""
    turn_s: float = 0.0
    """Minimum interval between two calls that the router hands to a model; 0: no limit."""

    def __post_init__(self) -> None:
        for name in ("devices_per_instance", "target", "instances_max"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InvalidConfig(f"on-demand {name}", getattr(self, name), "a whole number, at least 1")
        for name in ("storage_gib_s", "host_gib_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InvalidConfig(f"on-demand {name}", getattr(self, name), "GiB per second, more than 0")
        for name in ("start_s", "turn_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InvalidConfig(f"on-demand {name}", getattr(self, name), "seconds, at least 0")


def without_restores(workload: Workload, config: OnDemandConfig, device_gib: float) -> Workload:
    """Return the work for an engine that leaves loading to the baseline; every instance fills its devices."""
    services = []
    for service in workload.services:
        degree = nearest_degree(service, config.devices_per_instance)
        whole_gib = max(service.memory_gib, degree * device_gib)
        services.append(
            msgspec.structs.replace(service, restore_s=0.0, memory_gib=whole_gib, degrees=(degree,)),
        )
    return msgspec.structs.replace(workload, services=tuple(services))


class _OnDemandCall(BaselineCall, eq=False, kw_only=True):
    model: _Model
    instance: _Instance | None = None
    """The instance that serves the call; None while the call waits."""


class _Instance(msgspec.Struct, eq=False, kw_only=True):
    """One copy of a model on its own devices."""

    model: _Model
    node: str
    devices: tuple[int, ...]
    loading_from: float
    ready_at: float
    used_at: float
    fresh: bool = True
    """The instance has not served a call yet."""
    call: _OnDemandCall | None = None


class _Model(msgspec.Struct, eq=False):
    """One service: its waiting calls and its instances."""

    name: str
    memory_gib: float
    size: int
    """Devices of an instance."""
    queue: deque[_OnDemandCall] = msgspec.field(default_factory=deque)
    instances: list[_Instance] = []
    next_turn_at: float = 0.0


class _Node(msgspec.Struct, eq=False):
    name: str
    total: int
    closed: bool = False
    """The service currently accepts neither calls nor instances."""
    instances: list[_Instance] = []
    in_host_at: dict[str, float] = {}
    """When each model's checkpoint is, or will be, in host memory."""


class OnDemand:
    """Load models on demand."""

    def __init__(self, pools: tuple[Pool, ...], services: tuple[ServiceModel, ...], config: OnDemandConfig) -> None:
        self.config = config
        self.name = NAME
        self._nodes = {pool.node: _Node(pool.node, pool.total) for pool in pools if pool.kind == GPU}
        self._models = {
            service.name: _Model(service.name, service.memory_gib, nearest_degree(service, config.devices_per_instance))
            for service in services
        }
        self._calls: dict[str, _OnDemandCall] = {}
        self._effects: list[Effect] = []
        self._now = 0.0
        largest = max((node.total for node in self._nodes.values()), default=0)
        for model in self._models.values():
            if model.size > largest:
                raise InvalidConfig("devices", largest, f"at least {model.size} on one node for {model.name}")

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._now = now
        self._effects = []
        if isinstance(event, Started):
            self._calls[event.action].started_at = now
            return self._effects
        if isinstance(event, Submit):
            self._submit(event.action)
        elif isinstance(event, Finished):
            self._on_finished(event)
        elif isinstance(event, Cancel):
            self._cancel(event.action)
        elif isinstance(event, StartFailed):
            self._on_start_failed(event)
        elif isinstance(event, NodeChanged):
            self._on_node_changed(event)
        elif isinstance(event, PoolChanged):
            self._on_pool_changed(event.pool)
        elif not isinstance(event, Tick):
            return self._effects
        self._serve()
        self._load_instances()
        return self._effects

    # ---- calls ----

    def _submit(self, action: Action) -> None:
        model = self._models.get(action.service)
        if model is None or GPU not in action.demand.pools:
            reason = "models on demand serve calls to a known service on devices, nothing else"
            self._effects.append(Refuse(action=action.id, limit="service", reason=reason))
            return
        call = self._calls[action.id] = _OnDemandCall(action, self._now, model=model)
        model.queue.append(call)

    def _serve(self) -> None:
        """Assign calls to ready instances, in order of arrival."""
        for model in self._models.values():
            while model.queue:
                instance = next((each for each in model.instances if self._is_free(each)), None)
                if instance is None or self._now < model.next_turn_at:
                    break
                self._start(model.queue.popleft(), instance)
                if self.config.turn_s:
                    model.next_turn_at = self._now + self.config.turn_s
                    self._effects.append(WakeAt(at=model.next_turn_at))

    def _is_free(self, instance: _Instance) -> bool:
        """Return whether the instance can serve a call now."""
        node = self._nodes[instance.node]
        fits = not node.closed and instance.devices[-1] < node.total
        return fits and instance.call is None and instance.ready_at <= self._now

    def _start(self, call: _OnDemandCall, instance: _Instance) -> None:
        """Charge the first call of an instance for the part of the load that it waited for."""
        held_up_s = instance.ready_at - max(instance.loading_from, call.submitted_at) if instance.fresh else 0.0
        call.granted_at = self._now - max(0.0, held_up_s)
        call.started_at = self._now
        call.attempts += 1
        call.instance, instance.call, instance.fresh = instance, call, False
        width = len(instance.devices)
        share = Share(f"{GPU}@{instance.node}", width, width, instance.devices)
        grant = Grant(call.action.id, instance.node, (share,), width, call.attempts)
        self._effects.append(Start(action=call.action, grant=grant))

    def _release(self, call: _OnDemandCall) -> None:
        if call.instance is not None:
            call.instance.call = None
            call.instance.used_at = self._now
            call.instance = None

    def _on_finished(self, event: Finished) -> None:
        call = self._calls[event.action]
        if call.cancelled:
            self._settle(call, Status.CANCELLED, CANCELLED, event.usage)
        else:
            self._settle(call, Status.LOST if event.lost else Status.SUCCEEDED, event.lost, event.usage)

    def _cancel(self, action: str) -> None:
        """A waiting call settles immediately, and its load continues. A running call is stopped and settles when it has
        ended."""
        call = self._calls.get(action)
        if call is None or call.cancelled:
            return
        if call.instance is None:
            call.model.queue.remove(call)
            self._settle(call, Status.CANCELLED, CANCELLED)
        else:
            call.cancelled = True
            self._effects.append(Stop(action=action, reason=CANCELLED))

    def _on_start_failed(self, event: StartFailed) -> None:
        call = self._calls[event.action]
        if call.cancelled:
            self._settle(call, Status.CANCELLED, CANCELLED)
        elif not event.retry or call.attempts >= ATTEMPTS_MAX:
            self._settle(call, Status.LOST, f"start failed {call.attempts} times, last: {event.reason}")
        else:
            self._release(call)
            call.model.queue.appendleft(call)

    def _settle(self, call: _OnDemandCall, status: Status, reason: str, usage: Usage = NO_USAGE) -> None:
        self._effects.append(call.settle(status, reason, usage, self._now, ran=call.instance is not None))
        del self._calls[call.action.id]
        self._release(call)

    # ---- instances ----

    def _load_instances(self) -> None:
        """Load instances for models that lack some. The model whose oldest call has waited longest comes first."""
        waiting = [model for model in self._models.values() if model.queue]
        no_place = math.inf
        """No place was found for an instance of this many devices, so none exists for more."""
        for model in sorted(waiting, key=lambda model: model.queue[0].submitted_at):
            while model.size < no_place and len(model.instances) < self._instances_wanted(model):
                place = self._place(model)
                if place is None:
                    no_place = model.size
                else:
                    self._load_instance(model, *place)

    def _instances_wanted(self, model: _Model) -> int:
        served = sum(instance.call is not None for instance in model.instances)
        return min(self.config.instances_max, math.ceil((len(model.queue) + served) / self.config.target))

    def _place(self, model: _Model) -> tuple[_Node, tuple[int, ...]] | None:
        """Return the place where an instance is ready soonest. Ties: an empty place first, then the least recently
        used."""
        places = [
            (self._load_s(model, node), used_at, number, start)
            for number, node in enumerate(self._nodes.values())
            if not node.closed
            for start in range(0, node.total - model.size + 1, model.size)
            if (used_at := self._used_at(node, range(start, start + model.size))) is not None
        ]
        if not places:
            return None
        _, _, number, start = min(places)
        return list(self._nodes.values())[number], tuple(range(start, start + model.size))

    def _used_at(self, node: _Node, devices: range) -> float | None:
        """Return when these devices were last used: -1 if they are empty, None if their instance cannot be evicted."""
        overlapping = [instance for instance in node.instances if _overlaps(instance, devices)]
        if any(each.call is not None or each.ready_at > self._now or each.model.queue for each in overlapping):
            return None
        return max((each.used_at for each in overlapping), default=-1.0)

    def _load_s(self, model: _Model, node: _Node) -> float:
        """Return the load time. A checkpoint that is being read from storage becomes available to all instances at
        once."""
        if model.name not in node.in_host_at:
            return self.config.start_s + model.memory_gib / self.config.storage_gib_s
        left_s = node.in_host_at[model.name] - self._now
        return self.config.start_s + max(model.memory_gib / self.config.host_gib_s, left_s)

    def _load_instance(self, model: _Model, node: _Node, devices: tuple[int, ...]) -> None:
        for instance in [each for each in node.instances if _overlaps(each, devices)]:
            self._evict(instance)
        ready_at = self._now + self._load_s(model, node)
        instance = _Instance(
            model=model, node=node.name, devices=devices, loading_from=self._now, ready_at=ready_at, used_at=ready_at
        )
        node.in_host_at.setdefault(model.name, instance.ready_at - self.config.start_s)
        node.instances.append(instance)
        model.instances.append(instance)
        self._effects.append(WakeAt(at=instance.ready_at))

    def _evict(self, instance: _Instance) -> None:
        assert instance.call is None, f"{instance.model.name} on {instance.node} serves {instance.call}"
        instance.model.instances.remove(instance)
        self._nodes[instance.node].instances.remove(instance)

    # ---- faults ----

    def _on_node_changed(self, event: NodeChanged) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.closed = event.state is not NodeState.UP
        if event.state is NodeState.DOWN:
            for instance in list(node.instances):
                if instance.call is not None:
                    self._settle(instance.call, Status.LOST, f"node {node.name} went down")
                self._evict(instance)
            node.in_host_at = {}

    def _on_pool_changed(self, pool: Pool) -> None:
        """Retire instances whose devices were removed."""
        if pool.kind == GPU:
            self._nodes.setdefault(pool.node, _Node(pool.node, 0)).total = pool.total


def _overlaps(instance: _Instance, devices: range | tuple[int, ...]) -> bool:
    return instance.devices[0] <= devices[-1] and devices[0] <= instance.devices[-1]
