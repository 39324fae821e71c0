"""The shared service: everything put together, from a config to the last answer.

Owns the order in which things come up and go down. Coming up: the journal, the managers, the scheduler, what the
journal remembers, then the door. Going down: the door takes nothing more in, what runs may end within a limit, what
waits stays in the journal, then the gate is closed to all else that managers are asked for, sandboxes stay for the next
start or are closed, as the config says.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec

from tangram.clock import Clock, WallClock
from tangram.config import Config, DeviceConfig, ModelConfig, QuotaConfig, RateConfig, admin_token, require_files
from tangram.core.demand import CORE, CPU, MEMORY
from tangram.core.messages import Effect, Event, Pool
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.core.trace import Header
from tangram.errors import InvalidConfig, ManagerError, TangramError
from tangram.managers.base import Executor, Manager
from tangram.managers.functions import BoxedFunctionManager, Call, EndpointManager, Post
from tangram.managers.models import Cuda, Emulated, Infer, ModelManager, Service, discover
from tangram.managers.models.devices import DeviceSpec
from tangram.managers.models.preparation import require_importable
from tangram.managers.quotas.manager import Quota, QuotaManager, Rate
from tangram.managers.work import CAPTURE_BYTES_MAX, GIB, MEMORY_BYTES_MIN, MIB, Hold, Work
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.wire import About
from tangram.server.actions.images import OwnedImages
from tangram.server.actions.instance_limits import WhoWaits
from tangram.server.actions.service import SWEEP_S, Desk, quota_pools
from tangram.server.actions.tenants import space_of
from tangram.server.actions.translate import ERRAND, Rules
from tangram.server.http.app import application
from tangram.server.http.auth import Runs
from tangram.server.http.listener import bind, serving
from tangram.server.http.middleware import Door
from tangram.server.http.routes import Api
from tangram.server.journal.adapter import Remembering
from tangram.server.journal.journal import RECORD_BYTES_MAX, Journal, JournalFailed, Recovered
from tangram.server.journal.recovery import Report, recover
from tangram.server.observe.event_log import EventLog
from tangram.server.observe.metrics import Metrics
from tangram.server.observe.observer import Picture
from tangram.server.observe.visibility import Sight

VERSION = version("arl-tangram")
COMPACT_S = 120.0
"""How often results that arrived or are too old are deleted."""
STREAM_BYTES_MAX = (RECORD_BYTES_MAX - MIB) // 2
"""Of each stream of a program: both of them, and what else is told of an end, are one record of the journal."""
GATE_S = 10.0
"""For work on files, sandboxes and images that is under way when nothing runs any more."""
CORES_MIN = max(ERRAND.values())
"""What the service does with a sandbox takes so many."""
OWNER = "service"
"""Whose sandboxes they are: the next service of this name takes them over."""

log = logging.getLogger("tangram.server")


class Up:
    """A service that is up."""

    def __init__(self, desk: Desk, address: str, recovered: Report) -> None:
        self.desk = desk
        self.address = address
        self.recovered = recovered
        self.stop = asyncio.Event()
        """Set it to have the service end as SIGTERM does."""
        self.stop_now = asyncio.Event()
        """Set it to wait for nothing that runs."""


async def serve(config: Config, *, on_up: Callable[[Up], None] = lambda up: None) -> None:
    """Until SIGTERM or Ctrl-C. Raises what keeps it from starting or going on."""
    loop = asyncio.get_running_loop()
    async with running(config) as up:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _signalled, up, number)
        try:
            _calm_collector()
            on_up(up)
            _notify("READY=1")
            await up.stop.wait()
            _notify("STOPPING=1")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _calm_collector() -> None:
    """All that is there by now stays: no collection needs to look at it again. What comes and goes with an action is
    freed without it, so it need not look often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _signalled(up: Up, number: int) -> None:
    if up.stop.is_set():
        up.stop_now.set()
    up.stop.set()
    log.info("stopping signal=%s", signal.Signals(number).name)


def _notify(state: str) -> None:
    """To systemd, if it asked for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


@asynccontextmanager
async def running(config: Config, clock: Clock | None = None) -> AsyncIterator[Up]:
    """A service inside this process. Leaving the context drains it. `clock`: the time by which rates are limited, idle
    sandboxes expire and actions are scheduled; the default is real time."""
    require_files(config)
    listening = bind(config.listen_host, config.listen_port)
    async with AsyncExitStack() as stack:
        stack.enter_context(as_keys(config))
        stack.callback(listening.close)
        path = Path(config.service.journal)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        service = config.service
        journal = Journal(path, service.durability, keep_s=service.results_keep_s)
        await stack.enter_async_context(journal)
        parts = _Parts(config, journal, clock or WallClock())
        if parts.event_log is not None:
            stack.callback(parts.event_log.close)
        async with parts.orchestrator:
            # The desk is there before the first answer, and the door is open before anything can end.
            for run in parts.runs.all():
                parts.desk.cap(run.name, run.caps)
            ending = parts.runs.ending
            report = await recover(parts.desk, journal.recovered, parts.manager, config.node.name, ending)
            journal.recovered = Recovered()  # what waits is with the desk, and what has settled is on disk
            for name in ending:
                await _end_run(parts, name)
            for run in parts.runs.all():
                parts.desk.weigh(run.name, run.weight)
            parts.picture.recovered = str(report)
            app = application(parts.api, parts.door)
            http = serving(
                app,
                listening,
                connections_max=config.limits.connections_max,
                certificate=service.tls_certificate,
                key=service.tls_key,
            )
            await stack.enter_async_context(http)
            scheme = "https" if service.tls_certificate else "http"
            up = Up(parts.desk, f"{scheme}://{_shown(listening)}", report)
            log.info("up address=%s backend=%s recovered=%r", up.address, config.node.backend, str(report))
            async with _sweeping(parts.desk, journal):
                try:
                    yield up
                finally:
                    parts.desk.draining = parts.picture.draining = True
                    await _drain(parts.orchestrator, up, service.drain_s)
                    left = await parts.desk.gate.close(0.0 if up.stop_now.is_set() else GATE_S)
                    if left:
                        log.warning("requests cut off: %d did not end within %g s", left, GATE_S)


async def _end_run(parts: _Parts, name: str) -> None:
    """One whose revocation the service before this one did not bring to its end. What is left again keeps its name, and
    nobody else from being served."""
    try:
        async with parts.runs.revoking(name):
            await parts.desk.end_run(name)
        log.info("run revoked run=%s", name)
    except JournalFailed:
        raise
    except ManagerError as error:
        log.error("run not ended run=%s: %s", name, error)


def require_usable(config: Config) -> None:
    """Raises InvalidConfig for what would keep a service from starting, as far as that shows without making
    anything."""
    require_files(config)
    with as_keys(config):
        require_room(manager_of(config, ()).pools())
        models_of(config, lambda event: None)
        for service in config.services:
            require_importable(service.name, service.engine)


def require_room(machine: Sequence[Pool]) -> None:
    """Raises InvalidConfig for a machine on which no sandbox could ever be opened, or nothing done with it."""
    total = {kind: sum(pool.total for pool in machine if pool.kind == kind) for kind in (CPU, MEMORY)}
    if total[CPU] < CORES_MIN * CORE:
        raise InvalidConfig(
            "cores", total[CPU] / CORE, f"at least {CORES_MIN:g}: less opens no sandbox, or copies none"
        )
    if total[MEMORY] * MIB < MEMORY_BYTES_MIN:
        expected = f"at least {MEMORY_BYTES_MIN // MIB} MiB: no sandbox has less"
        raise InvalidConfig("memory_bytes", f"{total[MEMORY]} MiB", expected)


async def _drain(orchestrator: Orchestrator, up: Up, limit_s: float) -> None:
    began = time.monotonic()
    draining = asyncio.create_task(orchestrator.pause(limit_s))
    hurry = asyncio.create_task(up.stop_now.wait())
    try:
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        left = draining.result() if draining.done() else await orchestrator.pause(0.0)
    finally:
        for task in (draining, hurry):
            task.cancel()
    log.info("drained seconds=%.1f left_running=%d", time.monotonic() - began, left)


@asynccontextmanager
async def _sweeping(desk: Desk, journal: Journal) -> AsyncIterator[None]:
    async def sweep() -> None:
        next_compact = time.monotonic() + COMPACT_S
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await desk.sweep()
                if time.monotonic() >= next_compact:
                    await journal.compact()
                    next_compact = time.monotonic() + COMPACT_S
            except JournalFailed as error:
                desk.orchestrator.fail(error)
                return
            except TangramError as error:
                log.error("sweeping failed: %s", error)

    task = asyncio.create_task(sweep(), name="sweeping")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _shown(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Parts:
    """All that a service is made of, made of its config."""

    def __init__(self, config: Config, journal: Journal, clock: Clock) -> None:
        node = config.node.name
        self.manager = manager_of(config, [sandbox.name for sandbox in journal.recovered.sandboxes])
        held = QuotaManager(map(quota_of, config.quotas), lambda event: self.orchestrator.tell(event))
        models = models_of(config, lambda event: self.orchestrator.tell(event))
        machine = self.manager.pools()
        require_room(machine)
        pools = (*machine, *held.pools(), *(models.pools() if models is not None else ()))
        scheduler = Scheduler(policy(config.service.policy), pools, limits=config.scheduler)
        self.event_log = _event_log(config, pools)
        self.picture = Picture(scheduler, version=VERSION, durability=config.service.durability, clock=clock)
        functions = BoxedFunctionManager(
            self.manager,
            lambda sandbox, memory_mib, run: self.orchestrator.reserve(sandbox, memory_mib, run, node, yields=True),
            lambda sandbox: self.orchestrator.release(sandbox),
            idle_s_max=config.limits.sandbox_idle_s,
            owner_of=lambda action: space_of(action.id),
            instances_max=lambda space: self.desk.rooms.left(space),
            queue=WhoWaits(scheduler),
        )
        self.picture.instances = functions.seen
        executors: dict[type[Work], Executor] = {Hold: held, Post: EndpointManager()}
        if self.manager.isolates and self.manager.backend != "fake":
            executors[Call] = functions
        if models is not None:
            executors[Infer] = models
        observers = [each for each in (self.picture, self.event_log) if each is not None]

        def observe(now: float, event: Event, effects: list[Effect]) -> None:
            for each in observers:
                each(now, event, effects)
            functions.look()

        images = OwnedImages(self.manager, journal, journal.recovered.notes)
        self.orchestrator = Orchestrator(
            scheduler,
            {node: self.manager},
            executors,
            clock=clock,
            observer=observe,
            memory=Remembering(journal, images, node, results_bytes_max=config.limits.results_bytes_max),
        )
        rules = Rules(
            quota_pools=quota_pools(held.all()),
            services=frozenset(service.name for service in config.services),
            functions=Call in executors,
            endpoints=config.service.endpoints,
            network=config.limits.network,
            capture_bytes_max=min(max(config.limits.body_bytes_max, CAPTURE_BYTES_MAX), STREAM_BYTES_MAX),
        )
        self.desk = Desk(
            self.orchestrator,
            journal,
            held,
            images,
            functions,
            rules=rules,
            limits=config.limits,
            node=node,
            warm=config.node.warm > 0,
            now=clock.now,
            held=lambda kind: scheduler.ledger.pools[kind].held,
        )
        self.runs = Runs(journal, journal.recovered.runs, admin_token(config))
        limits = config.limits
        self.door = Door(
            self.runs, requests_per_s=limits.requests_per_s, requests_burst=limits.requests_burst, now=clock.now
        )
        about = About(
            version=VERSION, instance=self.picture.instance, run="", admin=False, node=node,
            backend=self.manager.backend, isolates=self.manager.isolates,
        )  # fmt: skip
        metrics = Metrics(self.picture)
        self.door.observe = metrics.answered
        self.door.refused = metrics.refused
        journal.observe = metrics.committed
        sight = Sight(machine, self.picture, metrics.text, models, self.event_log)
        self.api = Api(self.desk, self.runs, self.manager, images, sight, lambda: about)


def _event_log(config: Config, pools: tuple[Pool, ...]) -> EventLog | None:
    if not config.service.event_log:
        return None
    header = Header(policy=config.service.policy, pools=pools, limits=config.scheduler, note=config.node.backend)
    return EventLog(Path(config.service.event_log), header)


def manager_of(config: Config, expected: Sequence[str]) -> Manager:
    """`expected`: sandboxes that were open when the last service ended."""
    node = config.node
    state = Path(node.state) if node.state else None
    if node.backend == "sandbox":
        from tangram.managers.sandboxes.bwrap.manager import SandboxManager

        return SandboxManager(
            state=state,
            cores=node.cores,
            memory_bytes=node.memory,
            node=node.name,
            warm=node.warm,
            owner=OWNER,
            keeps=config.service.sandboxes_on_stop == "keep",
            expected=expected,
        )
    if node.backend == "process":
        from tangram.managers.sandboxes.process import ProcessManager

        return ProcessManager(root=state, cores=node.cores, memory_bytes=node.memory, node=node.name)
    if node.backend == "docker":
        from tangram.managers.sandboxes.docker import DockerManager

        return DockerManager(cores=node.cores, memory_bytes=node.memory, node=node.name)
    from tangram.managers.fake import FakeManager

    cores, memory_bytes = node.cores or float(os.cpu_count() or 1), node.memory or 16 * GIB
    return FakeManager(cores=cores, memory_bytes=memory_bytes, node=node.name)


def quota_of(said: QuotaConfig) -> Quota:
    def rate(given: RateConfig | None) -> Rate | None:
        return None if given is None else Rate(given.units, given.seconds)

    return Quota(said.name, said.concurrent, rate(said.requests), rate(said.tokens))


def models_of(config: Config, tell: Callable[[Event], None]) -> ModelManager | None:
    if not config.services and not config.devices:
        return None
    devices = [_device(each) for each in config.devices] or list(discover())
    if not devices:
        names = [service.name for service in config.services]
        raise InvalidConfig("services", names, "at least one [[devices]] beside them: this machine has none of CUDA")
    return ModelManager([_service(each) for each in config.services], devices, tell, node=config.node.name)


def _service(said: ModelConfig) -> Service:
    return Service(**msgspec.structs.asdict(said))


def _device(said: DeviceConfig) -> DeviceSpec:
    if said.kind == "emulated":
        return Emulated(memory_bytes=said.memory_bytes, bandwidth=said.bandwidth)
    return Cuda(place=said.place, memory_bytes=said.memory_bytes, name=said.name)


_OF_NODE = {"cores": "node.cores", "memory_bytes": "node.memory"}
_OF_SERVICE = re.compile(r"service (.+) (engine|arguments|degrees|memory_bytes|load_s_max|call_s_max|at degree \d+)")


@contextmanager
def as_keys(config: Config) -> Iterator[None]:
    """What managers find wrong inside is said of the key that they were made of."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(_key(config, error.field), error.value, error.expected) from error.__cause__


def _key(config: Config, field: str) -> str:
    found = _OF_SERVICE.fullmatch(field)
    numbers = [number for number, service in enumerate(config.services) if found and service.name == found[1]]
    if found is None or not numbers:
        return _OF_NODE.get(field, field)
    return f"services[{numbers[0]}].{'degrees' if found[2].startswith('at ') else found[2]}"
