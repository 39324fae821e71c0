"""The parts of the server, constructed from its config.

`Components` wires them top down; the functions below it convert tables of the config to managers, and their errors to
keys of the config.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from tangram.clock import Clock
from tangram.config import Config, DeviceConfig, ModelConfig, QuotaConfig, RateConfig, admin_token
from tangram.core.demand import CORE, CPU, MEMORY
from tangram.core.messages import Effect, Event, Pool
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.core.trace import Header
from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.backends import create_manager
from tangram.managers.base import Executor, Manager
from tangram.managers.functions.endpoint import EndpointManager
from tangram.managers.functions.host import MemoryQueue
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call, Post
from tangram.managers.models import Cuda, Emulated, Infer, ModelManager, Service, discover
from tangram.managers.models.devices import DeviceSpec
from tangram.managers.quotas.manager import Quota, QuotaManager, Rate
from tangram.managers.work import CAPTURE_BYTES_DEFAULT, MAINTENANCE_CORES, MEMORY_BYTES_MIN, MIB, HoldGrant, Work
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.trace_recorder import TraceLog
from tangram.runtime.wire import ServerInfo
from tangram.server.actions.instance_limits import InstanceLimits
from tangram.server.actions.registry import ActionRegistry
from tangram.server.actions.service import ActionService, quota_pools
from tangram.server.actions.tenant_images import TenantImages
from tangram.server.actions.translate import AdmissionPolicy
from tangram.server.drain_gate import DrainGate
from tangram.server.http.auth import RunRegistry
from tangram.server.http.middleware import ApiMiddleware
from tangram.server.http.routes import RouteHandlers
from tangram.server.journal.adapter import JournalAdapter
from tangram.server.journal.journal import RECORD_BYTES_MAX, Journal
from tangram.server.observe.metrics import MetricsCollector, ReportedMetrics
from tangram.server.observe.state_observer import StateObserver
from tangram.server.observe.visibility import VisibilityFilter
from tangram.server.tenants import tenant_of

VERSION = version("arl-tangram")
STREAM_BYTES_MAX = (RECORD_BYTES_MAX - MIB) // 2
"""Per output stream of a program: both, with the rest of the result, must fit one journal record."""
EVENT_LOG_BYTES_MAX = 4 << 30
"""The event log ends at this size: about ten million actions, more than a simulation handles in a day."""
CORES_MIN = max(MAINTENANCE_CORES.values())
"""Cores for maintenance of a sandbox."""
OWNER = "service"
"""Owner of the sandboxes: the next server of this name adopts them."""


class Components:
    """The parts of a server. Each is constructed from parts above it."""

    def __init__(self, config: Config, journal: Journal, metrics: ReportedMetrics, clock: Clock) -> None:
        node, limits, recovered = config.node.name, config.limits, journal.recovered
        sink = EventSink()
        self.drain_gate = DrainGate()

        self.manager = create_node_manager(config, [sandbox.name for sandbox in recovered.sandboxes])
        quotas = QuotaManager(map(to_quota, config.quotas), sink.send)
        models = create_model_manager(config, sink.send)
        machine = self.manager.pools()
        require_capacity(machine)
        pools = (*machine, *quotas.pools(), *(models.pools() if models is not None else ()))
        scheduler = Scheduler(policy(config.service.policy), pools, limits=config.scheduler)

        registry = ActionRegistry(clock.now)
        instance_limits = InstanceLimits(registry, scheduler.ledger, sink.send, limits.sandboxes_max)
        functions = FunctionManager(
            self.manager,
            partial(sink.reserve, node=node, yields=True),
            sink.release,
            idle_s_max=limits.sandbox_idle_s,
            tenant_of=lambda action: tenant_of(action.id),
            instances_max=instance_limits.remaining,
            queue=MemoryQueue(scheduler),
        )
        executors: dict[type[Work], Executor] = {HoldGrant: quotas, Post: EndpointManager()}
        if self.manager.isolates and self.manager.backend != "fake":
            executors[Call] = functions
        if models is not None:
            executors[Infer] = models

        self.observer = StateObserver(
            scheduler,
            instances=functions.instance_views,
            version=VERSION,
            durability=config.service.durability,
            clock=clock,
            drain_gate=self.drain_gate,
        )
        self.event_log = _open_event_log(config, pools)
        event_logs = [self.event_log] if self.event_log is not None else []
        images = TenantImages(self.manager, journal, recovered.notes)

        def reclaim_idle_instances(now: float, event: Event, effects: list[Effect]) -> None:
            functions.reclaim_idle()

        self.orchestrator = Orchestrator(
            scheduler,
            {node: self.manager},
            executors,
            clock=clock,
            observers=[self.observer, *event_logs, reclaim_idle_instances],
            journal=JournalAdapter(journal, images.on_committed, node, results_bytes_max=limits.results_bytes_max),
            sink=sink,
        )

        self.action_service = ActionService(
            self.orchestrator,
            journal,
            quotas,
            images,
            functions,
            registry,
            instance_limits,
            self.drain_gate,
            admission_policy=AdmissionPolicy(
                quota_pools=quota_pools(quotas.all()),
                services=frozenset(service.name for service in config.services),
                functions=Call in executors,
                endpoints=config.service.endpoints,
                network=limits.network,
                capture_bytes_max=min(max(limits.body_bytes_max, CAPTURE_BYTES_DEFAULT), STREAM_BYTES_MAX),
            ),
            limits=limits,
            node=node,
            warm=config.node.warm > 0,
            now=clock.now,
        )
        self.runs = RunRegistry(journal, recovered.runs, admin_token(config))

        self.middleware = ApiMiddleware(
            self.runs,
            metrics,
            requests_per_s=limits.requests_per_s,
            requests_burst=limits.requests_burst,
            now=clock.now,
        )
        about = ServerInfo(
            version=VERSION, instance=self.observer.instance, run="", admin=False, node=node,
            backend=self.manager.backend, isolates=self.manager.isolates,
        )  # fmt: skip
        collector = MetricsCollector(metrics, self.observer)
        visibility = VisibilityFilter(machine, self.observer, collector.render, models, self.event_log)
        self.handlers = RouteHandlers(self.action_service, self.runs, self.manager, images, visibility, about)


def _open_event_log(config: Config, pools: tuple[Pool, ...]) -> TraceLog | None:
    """The event log: every event of the scheduler and its effects, in the trace format, which `tangram sim`, `tangram
    plan` and `tangram trace` read. Each start begins a new file and renames the previous one: `events.jsonl` becomes
    `events.20260131T235959.jsonl`, by the time of its end. A later write error ends the log, not the server: the
    journal has what must not be lost. Raises ManagerError."""
    if not config.service.event_log:
        return None
    path = Path(config.service.event_log)
    header = Header(policy=config.service.policy, pools=pools, limits=config.scheduler, note=config.node.backend)
    try:
        if path.exists():
            ended = time.strftime("%Y%m%dT%H%M%S", time.localtime(path.stat().st_mtime))
            path.replace(path.with_name(f"{path.stem}.{ended}{path.suffix}"))
        return TraceLog(path, header, permissions=0o600, bytes_max=EVENT_LOG_BYTES_MAX)
    except OSError as error:
        raise ManagerError(f"the event log {path} cannot be written: {error}", retry=False) from error


def create_node_manager(config: Config, expected: Sequence[str]) -> Manager:
    """`expected`: sandboxes that were open when the previous server ended."""
    node = config.node
    return create_manager(
        node.backend,
        cores=node.cores,
        memory_bytes=node.memory,
        state=Path(node.state) if node.state else None,
        node=node.name,
        warm=node.warm,
        owner=OWNER,
        keeps=config.service.sandboxes_on_stop == "keep",
        expected=expected,
    )


def to_quota(quota: QuotaConfig) -> Quota:
    def rate(config: RateConfig | None) -> Rate | None:
        return None if config is None else Rate(config.units, config.seconds)

    return Quota(quota.name, quota.concurrent, rate(quota.requests), rate(quota.tokens))


def create_model_manager(config: Config, notify: Callable[[Event], None]) -> ModelManager | None:
    if not config.services and not config.devices:
        return None
    devices = [_to_device(device) for device in config.devices] or list(discover())
    if not devices:
        names = [service.name for service in config.services]
        raise InvalidConfig("services", names, "at least one [[devices]]: this machine has no CUDA device")
    return ModelManager([_to_service(service) for service in config.services], devices, notify, node=config.node.name)


def _to_service(service: ModelConfig) -> Service:
    return Service(**msgspec.structs.asdict(service))


def _to_device(device: DeviceConfig) -> DeviceSpec:
    if device.kind == "emulated":
        return Emulated(memory_bytes=device.memory_bytes, bandwidth=device.bandwidth)
    return Cuda(place=device.place, memory_bytes=device.memory_bytes, name=device.name)


_NODE_CONFIG_KEYS = {"cores": "node.cores", "memory_bytes": "node.memory"}
_SERVICE_FIELD_PATTERN = re.compile(
    r"service (.+) (engine|arguments|degrees|memory_bytes|load_s_max|call_s_max|at degree \d+)"
)


@contextmanager
def map_config_errors(config: Config) -> Iterator[None]:
    """Renames fields in errors of managers to the config keys that they come from."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(_config_key(config, error.field), error.value, error.expected) from error.__cause__


def _config_key(config: Config, field: str) -> str:
    match = _SERVICE_FIELD_PATTERN.fullmatch(field)
    numbers = [number for number, service in enumerate(config.services) if match and service.name == match[1]]
    if match is None or not numbers:
        return _NODE_CONFIG_KEYS.get(field, field)
    return f"services[{numbers[0]}].{'degrees' if match[2].startswith('at ') else match[2]}"


def require_capacity(machine: Sequence[Pool]) -> None:
    """Raises InvalidConfig for a machine too small to open and maintain a sandbox."""
    total = {kind: sum(pool.total for pool in machine if pool.kind == kind) for kind in (CPU, MEMORY)}
    if total[CPU] < CORES_MIN * CORE:
        raise InvalidConfig("cores", total[CPU] / CORE, f"at least {CORES_MIN:g}: fewer cannot open or copy a sandbox")
    if total[MEMORY] * MIB < MEMORY_BYTES_MIN:
        expected = f"at least {MEMORY_BYTES_MIN // MIB} MiB: the minimum of a sandbox"
        raise InvalidConfig("memory_bytes", f"{total[MEMORY]} MiB", expected)
