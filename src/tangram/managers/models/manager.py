"""The manager of model services: evict on execution.

Owns the devices of one node, the processes that run engines on them and the host copies of all services. Starts each
grant on exactly its devices, and decides only which services are evicted for it. Promises that a device never holds
more than its memory, that no service in use is evicted, that Evicted and Resident are published in order, and that no
process, memory or descriptor is left after `__aexit__`.

`start` returns when the service is on its devices and the call begins. So the time of a restore is between the grant
and Started, where the scheduler learns it. `Usage.overhead_s` is the overhead after Started.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable
from typing import Self

import msgspec

from tangram.cancellation import run_to_completion
from tangram.clock import Clock, WallClock
from tangram.core.action import Action
from tangram.core.demand import GPU
from tangram.core.messages import Event, Evicted, Grant, Pool, Resident
from tangram.errors import InvalidAction, InvalidConfig, InvariantError, ManagerError
from tangram.managers.base import Lease
from tangram.managers.models import host_copy
from tangram.managers.models.batch_lease import BatchLease
from tangram.managers.models.circuit_breaker import PAUSE_S, CircuitBreaker
from tangram.managers.models.device_process import PROGRAM, DeviceProcess, ProcessLost, ServiceFailed, child_environment
from tangram.managers.models.devices import Cuda, DeviceSpec, Emulated, EmulatedMemoryUsage
from tangram.managers.models.messages import DeviceHello, LoadService, PreparedService, UnloadService
from tangram.managers.models.placement import PlacementTable, ServicePlacement
from tangram.managers.models.preparation import prepare
from tangram.managers.models.service import Service, require_all
from tangram.managers.models.work import Infer
from tangram.managers.work import Work
from tangram.processes.fork_server import SINGLE_THREADED_ENV, ForkServer
from tangram.processes.process_tree import ProcessTable
from tangram.processes.streams import Output

log = logging.getLogger("tangram")

UNLOAD_S_MAX = 30.0
"""Freeing memory takes milliseconds, but a server copies its weights before it sleeps."""


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the manager was entered."""

    emulated: bool
    """Whether any device, and with it every figure here, is emulated."""
    host_bytes: int
    """Bytes of all host copies."""
    device_bytes: tuple[int, ...]
    """Bytes in use on each emulated device; 0 for other devices."""
    residents: tuple[ServicePlacement, ...]
    """Loaded services, the least recently used first."""
    loads: int
    load_s: float
    evictions: int
    calls: int


class ModelManager:
    def __init__(
        self,
        services: Iterable[Service],
        devices: Iterable[DeviceSpec],
        on_event: Callable[[Event], None],
        *,
        node: str = "local",
        circuit_pause_s: float = PAUSE_S,
        clock: Clock | None = None,
    ) -> None:
        """`on_event` is called with Resident and Evicted. `clock` measures `circuit_pause_s`. Raises InvalidConfig if a
        service does not fit on its devices."""
        services = require_all(
            "services", services, Service, "tangram.Service, such as [Service(name='a', engine=...)]"
        )
        devices = require_all("devices", devices, Emulated | Cuda, "devices: Emulated(memory_bytes=...), or discover()")
        self._services = {service.name: service for service in services}
        if len(self._services) != len(services):
            raise InvalidConfig("services", [service.name for service in services], "each name once")
        if not devices:
            raise InvalidConfig("devices", devices, "at least one device")
        self._devices = list(devices)
        self._node = node
        self._on_event = on_event
        self._clock = clock or WallClock()
        self._memory = [device.memory_bytes for device in devices]
        self._need = {(s.name, d): -(-s.memory_bytes // d) for s in services for d in s.degrees}
        """Bytes on each device, by service and degree."""
        self._require_fit()
        for service in services:
            service.pickled()  # raises if it cannot be pickled
        self._prepared_services: list[PreparedService] = []
        self._batch_max: dict[str, int] = {}
        self._circuit_breakers = {service.name: CircuitBreaker(service.name, circuit_pause_s) for service in services}
        self._failed_loads: set[str] = set()
        """Services whose last load failed."""
        self._placements = PlacementTable(self._memory)
        self._process_table = ProcessTable()
        modules = dict.fromkeys(module for service in services for module in service.modules)
        self._fork_server = ForkServer(PROGRAM, *modules, env=child_environment() | SINGLE_THREADED_ENV)
        self._processes: dict[int, DeviceProcess] = {}
        self._locks = [asyncio.Lock() for _ in devices]
        self._batch_leases: dict[tuple[str, ServicePlacement], BatchLease] = {}
        self._evicting: dict[ServicePlacement, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._memory_usage: EmulatedMemoryUsage | None = None
        self._descriptors: list[int] = []
        self._closed_reason = "the manager of model services is not open: use it inside `async with`"
        self._loads = self._evictions = self._calls = 0
        self._load_s = 0.0

    def _require_fit(self) -> None:
        for service in self._services.values():
            service.require_fit({d: self._need[service.name, d] for d in service.degrees}, self._memory)

    def services(self) -> list[Service]:
        return list(self._services.values())

    def service(self, name: str) -> Service:
        """Raises InvalidAction if there is none."""
        service = self._services.get(name) if isinstance(name, str) else None
        if service is None:
            raise InvalidAction("service", name, f"one of {', '.join(map(repr, self._services))}")
        return service

    def pools(self) -> tuple[Pool, ...]:
        return (Pool(kind=GPU, node=self._node, total=len(self._devices)),)

    def statistics(self) -> ModelStatistics:
        return ModelStatistics(
            emulated=any(isinstance(device, Emulated) for device in self._devices),
            host_bytes=sum(known.layout.total_bytes for known in self._prepared_services),
            device_bytes=tuple(
                self._memory_usage.used_bytes(index) if self._memory_usage else 0 for index in range(len(self._devices))
            ),
            residents=tuple(self._placements.residents()),
            loads=self._loads,
            load_s=self._load_s,
            evictions=self._evictions,
            calls=self._calls,
        )

    def process_ids(self) -> dict[int, int]:
        """The ids of the running processes, by their device."""
        return {index: process.pid for index, process in self._processes.items() if process.alive}

    # ---- start and end ----

    async def __aenter__(self) -> Self:
        """Prepare every service and start a process for every device."""
        try:
            self._closed_reason = ""
            counts_fd = self._keep_descriptor(os.memfd_create("counts", os.MFD_CLOEXEC))
            os.ftruncate(counts_fd, EmulatedMemoryUsage.size(len(self._devices)))
            self._memory_usage = EmulatedMemoryUsage(counts_fd, len(self._devices))
            await self._prepare_all()
            began_at = asyncio.get_running_loop().time()
            log.info("starting the processes of %d devices", len(self._devices))
            await asyncio.gather(*(self._ensure_process(index) for index in range(len(self._devices))))
            log.info("devices are ready, after %.1f s", asyncio.get_running_loop().time() - began_at)
        except BaseException:
            await run_to_completion(self._end_all("the manager of model services could not be entered"))
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Publishes no Evicted for services evicted by the shutdown: the scheduler ends too."""
        await run_to_completion(self._end_all("the manager of model services was closed"))

    def _keep_descriptor(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    async def _end_all(self, why: str) -> None:
        self._closed_reason = why
        await asyncio.gather(*(process.end(why) for process in self._processes.values()), return_exceptions=True)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._fork_server.aclose()
        if self._memory_usage is not None:
            self._memory_usage.close()
            self._memory_usage = None
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors, self._prepared_services, self._processes = [], [], {}

    async def _prepare_all(self) -> None:
        copies = {name: self._keep_descriptor(host_copy.create(name)) for name in self._services}
        for prepared in await prepare(list(self._services.values()), copies, self._process_table, self._fork_server):
            service = self._services[prepared.record.service]
            self._prepared_services.append(prepared.record)
            self._batch_max[service.name] = prepared.batch_max
            self._need |= {(service.name, degree): need for degree, need in prepared.need_by_degree.items()}
        self._require_fit()

    # ---- actions ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        """Raises AdmissionRefused while the circuit of the service is open."""
        if not isinstance(work, Infer):
            raise ManagerError(f"model services are called with Infer, not {type(work).__name__}", retry=False)
        placement = self._placement_of(action, grant)
        key = (grant.batch or action.id, placement)
        batch = self._batch_leases.get(key)
        if batch is None or batch.is_closed:
            self._require_open()
            circuit = self._circuit_breakers[placement.service]
            circuit.admit(self._clock.now())
            batch = self._batch_leases[key] = BatchLease(
                self, placement, self._batch_max[placement.service], circuit, self._clock
            )
            task = self._create_task(batch.run())
            task.add_done_callback(
                lambda _: self._batch_leases.pop(key) if self._batch_leases.get(key) is batch else None
            )
        return await batch.join(action, work.payload, grant.attempt)

    def _placement_of(self, action: Action, grant: Grant) -> ServicePlacement:
        service = self.service(action.service)
        shares = [share for share in grant.shares if share.pool == self.pools()[0].name]
        if len(shares) != 1 or not all(0 <= device < len(self._devices) for device in shares[0].cells):
            raise InvariantError(f"the grant of {action.id} names no devices of {self._node}: {grant}")
        devices = shares[0].cells
        if len(devices) not in service.degrees:
            degrees = ", ".join(map(str, service.degrees))
            raise InvalidAction(f"devices for service {service.name}", len(devices), f"one of {degrees}")
        return ServicePlacement(service.name, devices)

    async def restore(self, service: str, devices: tuple[int, ...]) -> None:
        """Load a service ahead of its next action. Does nothing if the devices are in use or the last load of the
        service failed, and publishes Evicted then. Raises ManagerError."""
        self._require_open()
        placement = ServicePlacement(service, devices)
        assert (service, len(devices)) in self._need, placement
        try:
            failing = self._circuit_breakers[service].is_open or service in self._failed_loads
            if failing or any(self._locks[device].locked() for device in devices):
                return
            await self.acquire(devices)
            try:
                await self.ensure_loaded(placement)
                self._placements.end_use(placement)
            finally:
                self.release(devices)
        finally:
            if placement not in self._placements:
                self._publish(Evicted(service=service, node=self._node, devices=devices))

    def _require_open(self) -> None:
        if self._closed_reason:
            raise ManagerError(self._closed_reason, retry=False)

    # ---- for batch leases ----

    async def acquire(self, devices: tuple[int, ...]) -> None:
        """Lock the devices: one batch at a time uses a device. In increasing order, so that there is no deadlock."""
        acquired = []
        try:
            for device in sorted(devices):
                await self._locks[device].acquire()
                acquired.append(device)
        except BaseException:
            self.release(tuple(acquired))
            raise

    def release(self, devices: tuple[int, ...]) -> None:
        for device in devices:
            self._locks[device].release()

    async def ensure_loaded(self, placement: ServicePlacement) -> DeviceProcess:
        """The process that has the service on these devices, which are locked. In use until `end_use`."""
        self._require_open()
        process = self._processes.get(placement.devices[0])
        if process is not None and process.has_ended:
            await self.kill(process, "")  # its end may not have been detected yet
        if placement not in self._placements:
            await self._load(placement)
        self._placements.touch(placement)
        self._placements.begin_use(placement)
        return self._processes[placement.devices[0]]

    def end_use(self, placement: ServicePlacement, calls: int) -> None:
        """Counts the calls that were made since `ensure_loaded`."""
        self._placements.end_use(placement)
        self._calls += calls

    async def kill(self, process: DeviceProcess, why: str) -> None:
        await process.end(why)
        self._on_process_ended(process)

    # ---- processes ----

    async def _ensure_process(self, index: int) -> DeviceProcess:
        """The process of a device, which is locked. Starts one if there is none."""
        process = self._processes.get(index)
        if process is not None and process.alive:
            return process
        if process is not None:
            await process.end("")
            self._on_process_ended(process)
        self._require_open()
        process = self._processes[index] = DeviceProcess(
            f"the process of device {index}",
            self._process_table,
            self._on_process_ended,
            self._fork_server,
        )
        descriptors = list(self._descriptors)
        hello = DeviceHello(
            id=process.next_number(),
            process=index,
            devices=self._devices,
            counts_fd=descriptors[0],
            services=self._prepared_services,
        )
        await process.open(hello, descriptors)
        return process

    def _on_process_ended(self, process: DeviceProcess) -> None:
        """Drop the placements of an ended process."""
        index = next((index for index, other in self._processes.items() if other is process), None)
        if index is None or self._closed_reason:
            return
        assert self._memory_usage is not None
        self._memory_usage.clear(index)
        for placement in self._placements.residents():
            if placement.devices[0] == index:
                self._placements.drop(placement)
                self._publish(Evicted(service=placement.service, node=self._node, devices=placement.devices))

    # ---- loading and evicting ----

    async def _load(self, placement: ServicePlacement) -> None:
        """Evict services to make room, and load the service. If the load fails, evicted services are not restored until
        their next call."""
        service, need = self._services[placement.service], self._need[placement.service, len(placement.devices)]
        for victim in self._placements.victims(placement.devices, need):
            await self.evict(victim)
        process = await self._ensure_process(placement.devices[0])  # now, because a failed eviction kills the process
        self._failed_loads.add(placement.service)
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            async with asyncio.timeout(service.load_s_max):
                await process.call(
                    LoadService(id=process.next_number(), service=placement.service, devices=placement.devices)
                )
        except (TimeoutError, ServiceFailed, ProcessLost) as error:
            why = f"it took longer than {service.load_s_max} s" if isinstance(error, TimeoutError) else str(error)
            if isinstance(error, TimeoutError) or (isinstance(error, ServiceFailed) and error.failed.unclean):
                await self.kill(process, f"loading {placement.service}: {why}")
            raise ManagerError(
                f"service {placement.service} cannot be loaded on devices {list(placement.devices)}, "
                f"of which it needs {need} bytes each: {why}"
            ) from error
        if not process.alive:
            raise ManagerError(f"{process.name} ended as soon as it had loaded {placement.service}")
        self._failed_loads.discard(placement.service)
        self._placements.add(placement, need)
        self._circuit_breakers[placement.service].on_loaded(placement.devices)
        self._loads += 1
        self._load_s += loop.time() - began_at
        self._publish(
            Resident(
                service=placement.service,
                node=self._node,
                devices=placement.devices,
                batch_max=self._batch_max[placement.service],
            )
        )

    async def evict(self, placement: ServicePlacement) -> None:
        """Two loads may evict the same placement, if it spans the devices of both."""
        if placement in self._placements and placement not in self._evicting:
            task = self._evicting[placement] = self._create_task(self._unload(placement))
            task.add_done_callback(lambda _: self._evicting.pop(placement))
        if placement in self._evicting:
            await asyncio.shield(self._evicting[placement])

    async def _unload(self, placement: ServicePlacement) -> None:
        """Nothing is written back: the host copy is the same. A process that does not free its memory is killed."""
        process = self._processes[placement.devices[0]]
        try:
            async with asyncio.timeout(UNLOAD_S_MAX):
                await process.call(
                    UnloadService(id=process.next_number(), service=placement.service, devices=placement.devices)
                )
        except (TimeoutError, ServiceFailed, ProcessLost) as error:
            if not isinstance(error, ServiceFailed) or error.failed.unclean:
                await self.kill(process, f"{placement.service} could not be evicted: {error}")
        if placement in self._placements:
            self._placements.remove(placement)
            self._evictions += 1
            self._publish(Evicted(service=placement.service, node=self._node, devices=placement.devices))

    def _publish(self, event: Event) -> None:
        if not self._closed_reason:
            self._on_event(event)

    def _create_task(self, doing: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
