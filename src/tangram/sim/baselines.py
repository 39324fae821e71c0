"""Baselines: use of the same resources without action-level scheduling.

Each takes the same events and returns the same effects as the scheduler. Therefore the simulation engine drives it, and
so does the orchestrator: pods can also run for real.

- pods: one pod per trajectory with a CPU request and limit, admitted in order of arrival, kept until the trajectory
  ends; inside, actions start immediately and the cores of a node are shared among its pods by request;
- static services: every model service keeps its own fixed devices, one call at a time each, in order of arrival;
- uncontrolled: API calls are sent immediately; a rejected call is retried after a pause, at most three times.

Faults affect them as they affect the policies. A failing node loses its pods and the calls on its devices. A pod is not
moved, because its files and processes are lost. A failed start is retried as often as under the scheduler. A pod waits
for a node without limit: there is no `stranded_s` here, and there are no time limits.
"""

from __future__ import annotations

from collections import deque

import msgspec

from tangram.core.action import NO_USAGE, Action, Outcome, Status, Usage
from tangram.core.demand import CORE, CPU, GPU, MEMORY
from tangram.core.limits import Limits
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
    Release,
    Reserve,
    Settle,
    Share,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    WakeAt,
)
from tangram.core.topology import Chunks
from tangram.errors import InvalidConfig
from tangram.sim.episode import ServiceModel

API_RETRIES_MAX = 3
"""Retries of a rejected API call, as in the publication's baseline."""
API_BACKOFF_S = 2.0
"""Pause before the first retry; doubles with each."""
ATTEMPTS_MAX = Limits().attempts_max
"""Starts of one action before it settles as lost; the same limit as in the scheduler."""

CANCELLED = "cancelled by the caller"

Replica = tuple[str, tuple[int, ...]]
"""The node and the devices of one copy of a service."""


class Pod(msgspec.Struct, eq=False):
    """One trajectory's reservation."""

    memory: int
    node: str = ""
    waiting: list[_PodCall] = []
    lost: str = ""
    """Why the pod is gone; empty while it exists."""


class BaselineCall(msgspec.Struct, eq=False):
    """An action until it settles."""

    action: Action
    submitted_at: float
    granted_at: float = 0.0
    started_at: float = 0.0
    """Both times are those of the last attempt."""
    attempts: int = 0
    cancelled: bool = False
    """A stop was requested and has not completed."""

    def settle(self, status: Status, reason: str, usage: Usage, now: float, *, ran: bool) -> Settle:
        """Return the end of the action with its time divided: waiting, from grant to start, and running."""
        ran_s, start_delay_s = (now - self.started_at, self.started_at - self.granted_at) if ran else (0.0, 0.0)
        ours_s = min(usage.overhead_s, ran_s)
        return Settle(
            outcome=Outcome(
                action=self.action.id,
                status=status,
                reason=reason,
                waiting_s=now - self.submitted_at - ran_s - start_delay_s,
                execution_s=ran_s - ours_s,
                overhead_s=start_delay_s + ours_s,
                usage=usage,
                attempts=self.attempts,
            )
        )


class _PodCall(BaselineCall, eq=False):
    pod: Pod | None = None
    service: _StaticService | None = None
    devices: Replica | None = None
    """The replica of its service that it runs on."""

    @property
    def node(self) -> str:
        """The node it runs on; empty while it waits, and for an API call."""
        if self.pod is not None:
            return self.pod.node
        return self.devices[0] if self.devices is not None else ""


class _StaticService(msgspec.Struct, eq=False):
    """The fixed devices of one service: as many replicas as it has chunks, and a queue."""

    free: list[Replica] = []
    away: list[Replica] = []
    """Replicas on nodes that are down."""
    queue: deque[_PodCall] = msgspec.field(default_factory=deque)


class PodsConfig(msgspec.Struct, frozen=True, kw_only=True):
    request: float = 0.5
    limit: float = 4.0
    devices_per_service: int = 4

    def __post_init__(self) -> None:
        if not 0.0 < self.request <= self.limit:
            raise InvalidConfig("pods request", self.request, f"cores above 0, at most the limit of {self.limit}")


def pods_config(name: str) -> PodsConfig:
    """Parse `pods:R`, which requests R cores for each pod."""
    try:
        request = float(name.partition(":")[2])
    except ValueError:
        raise InvalidConfig("policy", name, "pods:R with R cores, such as pods:0.5") from None
    return PodsConfig(request=request)


class Baseline:
    """All three baselines; the demand of an action selects one."""

    def __init__(self, pools: tuple[Pool, ...], services: tuple[ServiceModel, ...], config: PodsConfig) -> None:
        self.config = config
        self.name = f"pods:{config.request:g}"
        self._total = {pool.name: pool.total for pool in pools}
        self._cpu_free = {pool.node: pool.total for pool in pools if pool.kind == CPU}
        self._memory_free = {pool.node: pool.total for pool in pools if pool.kind == MEMORY}
        self._closed: dict[str, bool] = {}
        """Nodes that currently accept no pods."""
        self._pods: dict[str, Pod] = {}
        self._admission: deque[Pod] = deque()
        self._calls: dict[str, _PodCall] = {}
        self._services = _assign_devices(pools, services, config.devices_per_service)
        self._retries: list[tuple[float, _PodCall]] = []
        self._effects: list[Effect] = []
        self._now = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._now = now
        self._effects = []
        if isinstance(event, Submit):
            self._submit(event.action)
        elif isinstance(event, Finished):
            self._on_finished(event)
        elif isinstance(event, Cancel):
            self._cancel(event.action)
        elif isinstance(event, Started):
            call = self._calls[event.action]
            call.started_at = now
        elif isinstance(event, StartFailed):
            self._on_start_failed(event)
        elif isinstance(event, Reserve):
            pod = self._pods[event.sandbox] = Pod(event.memory)
            self._admission.append(pod)
            self._admit()
        elif isinstance(event, Release):
            self._release(event.sandbox)
        elif isinstance(event, Tick):
            self._retry()
        elif isinstance(event, PoolChanged):
            self._on_pool_changed(event.pool)
        elif isinstance(event, NodeChanged):
            self._on_node_changed(event)
        return self._effects

    # ---- pods ----

    def _admit(self) -> None:
        """Admit pods first come, first served, as a cluster scheduler does for equal pods."""
        request = round(self.config.request * CORE)
        while self._admission:
            pod = self._admission[0]
            node = self._node_for(request, pod.memory)
            if node is None:
                return
            self._admission.popleft()
            pod.node = node
            self._cpu_free[node] -= request
            if node in self._memory_free:
                self._memory_free[node] -= pod.memory
            for call in pod.waiting:
                self._start_in(pod, call)
            pod.waiting = []

    def _node_for(self, request: int, memory: int) -> str | None:
        fitting = [
            node
            for node, free in self._cpu_free.items()
            if not self._closed.get(node) and free >= request and self._memory_free.get(node, memory) >= memory
        ]
        return max(fitting, key=lambda node: self._cpu_free[node], default=None)

    def _release(self, sandbox: str) -> None:
        pod = self._pods.pop(sandbox, None)
        if pod is None or pod.lost:
            return
        if pod.node:
            self._cpu_free[pod.node] += round(self.config.request * CORE)
            if pod.node in self._memory_free:
                self._memory_free[pod.node] += pod.memory
        else:
            self._admission.remove(pod)
        self._admit()

    def _start_in(self, pod: Pod, call: _PodCall) -> None:
        """Start a call in its pod. It may use up to the limit; elastic actions are launched that wide."""
        request, limit = round(self.config.request * CORE), round(self.config.limit * CORE)
        amounts = call.action.demand.pools[CPU]
        width = max(CORE, min(limit, amounts.max) // CORE * CORE)
        call.pod = pod
        self._start(call, pod.node, (Share(f"{CPU}@{pod.node}", request, limit),), width)

    # ---- all ----

    def _submit(self, action: Action) -> None:
        call = self._calls[action.id] = _PodCall(action, self._now)
        if CPU in action.demand.pools:
            pod = self._pods.get(action.sandbox)
            if pod is None:
                del self._calls[action.id]
                self._effects.append(
                    Refuse(action=action.id, limit="sandbox", reason="a pod runs sandboxed actions only")
                )
            elif pod.lost:
                self._settle(call, Status.LOST, pod.lost)
            elif pod.node:
                self._start_in(pod, call)
            else:
                pod.waiting.append(call)
        elif GPU in action.demand.pools:
            call.service = self._services[action.service]
            call.service.queue.append(call)
            self._serve(call.service)
        else:
            self._start(call, "", (), 1)

    def _start(self, call: _PodCall, node: str, shares: tuple[Share, ...], width: int) -> None:
        call.granted_at = call.started_at = self._now
        call.attempts += 1
        grant = Grant(call.action.id, node, shares, width, call.attempts)
        self._effects.append(Start(action=call.action, grant=grant))

    def _serve(self, service: _StaticService) -> None:
        while service.queue and service.free:
            node, devices = replica = service.free.pop()
            call = service.queue.popleft()
            call.devices = replica
            share = Share(f"{GPU}@{node}", len(devices), len(devices), devices)
            self._start(call, node, (share,), len(devices))

    def _cancel(self, action: str) -> None:
        """A waiting call settles immediately. A running call is stopped and settles when it has ended."""
        call = self._calls.get(action)
        if call is None or call.cancelled:
            return
        if self._dequeue(call):
            self._settle(call, Status.CANCELLED, CANCELLED)
        else:
            call.cancelled = True
            self._effects.append(Stop(action=action, reason=CANCELLED))

    def _dequeue(self, call: _PodCall) -> bool:
        """Remove a waiting call from its queue. Return False if it is not waiting."""
        pod = self._pods.get(call.action.sandbox)
        if pod is not None and call in pod.waiting:
            pod.waiting.remove(call)
        elif call.service is not None and call in call.service.queue:
            call.service.queue.remove(call)
        elif any(call is waiting for _, waiting in self._retries):
            self._retries = [(at, waiting) for at, waiting in self._retries if waiting is not call]
        else:
            return False
        return True

    def _on_finished(self, event: Finished) -> None:
        call = self._calls[event.action]
        self._release_devices(call)
        if call.cancelled:
            self._settle(call, Status.CANCELLED, CANCELLED, event.usage)
            return
        if event.lost and call.service is None and call.pod is None and call.attempts <= API_RETRIES_MAX:
            wait = API_BACKOFF_S * 2.0 ** (call.attempts - 1)
            self._retries.append((self._now + wait, call))
            self._effects.append(WakeAt(at=self._now + wait))
            return
        status = Status.LOST if event.lost else Status.SUCCEEDED
        self._settle(call, status, event.lost, event.usage)

    def _release_devices(self, call: _PodCall) -> None:
        if call.service is not None and call.devices is not None:
            call.service.free.append(call.devices)
            call.devices = None
            self._serve(call.service)

    def _retry(self) -> None:
        due = [call for at, call in self._retries if at <= self._now]
        self._retries = [(at, call) for at, call in self._retries if at > self._now]
        for call in due:
            self._start(call, "", (), 1)

    def _settle(self, call: _PodCall, status: Status, reason: str, usage: Usage = NO_USAGE) -> None:
        del self._calls[call.action.id]
        self._effects.append(call.settle(status, reason, usage, self._now, ran=call.attempts > 0))

    # ---- faults ----

    def _on_start_failed(self, event: StartFailed) -> None:
        """Retry immediately in the same place: in its pod, or on the devices of its service."""
        call = self._calls[event.action]
        if call.cancelled:
            self._settle(call, Status.CANCELLED, CANCELLED)
            self._release_devices(call)
        elif not event.retry or call.attempts >= ATTEMPTS_MAX:
            self._settle(call, Status.LOST, f"start failed {call.attempts} times, last: {event.reason}")
            self._release_devices(call)
        elif call.pod is not None:
            self._start_in(call.pod, call)
        elif call.service is not None:
            call.service.queue.appendleft(call)
            self._release_devices(call)
        else:
            self._start(call, "", (), 1)

    def _on_pool_changed(self, pool: Pool) -> None:
        """Pods that no longer fit stay, as on a real node; no further pod is admitted until there is room."""
        grown = pool.total - self._total[pool.name]
        self._total[pool.name] = pool.total
        free = {CPU: self._cpu_free, MEMORY: self._memory_free}.get(pool.kind)
        if free is not None:
            free[pool.node] += grown
            self._admit()

    def _on_node_changed(self, event: NodeChanged) -> None:
        node = event.node
        self._closed[node] = event.state is not NodeState.UP
        if event.state is NodeState.DOWN:
            self._on_node_down(node)
            return
        self._admit()
        for service in self._services.values():
            service.free += [replica for replica in service.away if replica[0] == node]
            service.away = [replica for replica in service.away if replica[0] != node]
            self._serve(service)

    def _on_node_down(self, node: str) -> None:
        reason = f"node {node} went down"
        for pod in self._pods.values():
            if pod.node == node:
                pod.lost = reason
        for free, kind in ((self._cpu_free, CPU), (self._memory_free, MEMORY)):
            if node in free:
                free[node] = self._total[f"{kind}@{node}"]
        for call in [call for call in self._calls.values() if call.node == node]:
            if call.service is not None and call.devices is not None:
                call.service.away.append(call.devices)
            self._settle(call, Status.LOST, reason)
        for service in self._services.values():
            service.away += [replica for replica in service.free if replica[0] == node]
            service.free = [replica for replica in service.free if replica[0] != node]


def _assign_devices(
    pools: tuple[Pool, ...], services: tuple[ServiceModel, ...], each: int
) -> dict[str, _StaticService]:
    """Distribute the devices: every service in turn gets a replica of one size, until no chunk of that size remains."""
    devices = {pool.node: Chunks(pool.total) for pool in pools if pool.kind == GPU}
    statics = {service.name: _StaticService() for service in services}
    sizes = {service.name: nearest_degree(service, each) for service in services}
    # Wide replicas first, so that narrow ones do not split the chunks that they need.
    turn = sorted(services, key=lambda service: -sizes[service.name])
    dealt = bool(turn)
    while dealt:
        dealt = False
        for service in turn:
            size = sizes[service.name]
            node = next((node for node, chunks in devices.items() if chunks.fits(size)), None)
            if node is not None:
                dealt = True
                statics[service.name].free.append((node, devices[node].take(size).devices))
    without = [name for name, static in statics.items() if not static.free]
    if without:
        needed = sum(sizes.values())
        raise InvalidConfig(
            "devices",
            sum(chunks.count for chunks in devices.values()),
            f"at least {needed} for {len(services)} services",
        )
    return statics


def nearest_degree(service: ServiceModel, each: int) -> int:
    """Return the devices of one replica: `each`, or the nearest degree that the service supports."""
    return min(service.degrees, key=lambda degree: (abs(degree - each), degree))
