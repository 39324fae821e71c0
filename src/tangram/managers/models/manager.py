"""The manager of model services: evict on execution.

Owns the devices of one node, the processes that run engines on them and the host copies of all services. Starts what a
grant says, on exactly the devices that it says; chooses only who is evicted for it. Promises that a device never holds
more than its memory, that nothing in use is evicted, that Evicted and Resident are told in the order in which they
happened, and that after leaving no process, memory or descriptor is left.

`start` returns when the service is on its devices and the call begins, so what a restore takes lies between the grant
and Started, where the scheduler learns it. `Usage.overhead_s` is what was ours after that.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Self

import msgspec

from tangram.clock import Clock, WallClock
from tangram.core.action import Action
from tangram.core.demand import GPU
from tangram.core.messages import Event, Evicted, Grant, Pool, Resident
from tangram.errors import InvalidAction, InvalidConfig, InvariantError, ManagerError
from tangram.managers.base import Lease
from tangram.managers.models import host_copy
from tangram.managers.models.batch_lease import Turn
from tangram.managers.models.circuit_breaker import PAUSE_S, Circuit
from tangram.managers.models.device_process import PROGRAM, DeviceProcess, ProcessLost, ServiceFailed, environment
from tangram.managers.models.devices import Counts, Cuda, DeviceSpec, Emulated
from tangram.managers.models.messages import Hello, Known, Load, Unload
from tangram.managers.models.placement import Place, Room
from tangram.managers.models.preparation import prepare
from tangram.managers.models.service import Service, all_of
from tangram.managers.models.work import Infer
from tangram.managers.work import Work
from tangram.processes.fork_server import Nursery
from tangram.processes.process_tree import Census
from tangram.processes.streams import Output

log = logging.getLogger("tangram")

UNLOAD_S_MAX = 30.0
"""Freeing memory takes milliseconds; a server that is put to sleep copies its weights first."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Since it was entered."""

    emulated: bool
    """Whether any device is invented, and with it every figure here."""
    host_bytes: int
    """Of all host copies."""
    device_bytes: tuple[int, ...]
    """In use on each emulated device; 0 for others, whose drivers know it."""
    residents: tuple[Place, ...]
    """Least recently used first."""
    loads: int
    load_s: float
    load_bytes: int
    evictions: int
    calls: int
    call_s: float


class ModelManager:
    def __init__(
        self,
        services: Iterable[Service],
        devices: Iterable[DeviceSpec],
        tell: Callable[[Event], None],
        *,
        node: str = "local",
        circuit_pause_s: float = PAUSE_S,
        clock: Clock | None = None,
    ) -> None:
        """`tell` is called with Resident and Evicted. `clock` measures `circuit_pause_s`. Raises InvalidConfig if a
        service cannot fit its devices."""
        services = all_of("services", services, Service, "tangram.Service, such as [Service(name='a', engine=...)]")
        devices = all_of("devices", devices, Emulated | Cuda, "devices: Emulated(memory_bytes=...), or discover()")
        self._services = {service.name: service for service in services}
        if len(self._services) != len(services):
            raise InvalidConfig("services", [service.name for service in services], "each name once")
        if not devices:
            raise InvalidConfig("devices", devices, "at least one device")
        self._devices = list(devices)
        self._node = node
        self._tell = tell
        self._clock = clock or WallClock()
        self._memory = [device.memory_bytes for device in devices]
        self._need = {(s.name, d): -(-s.memory_bytes // d) for s in services for d in s.degrees}
        """Bytes on each device, by service and degree."""
        self._require_room()
        for service in services:
            service.pickled()  # raises, if it cannot be
        self._known: list[Known] = []
        self._batch_max: dict[str, int] = {}
        self._circuits = {service.name: Circuit(service.name, circuit_pause_s) for service in services}
        self._unloadable: set[str] = set()
        """Services whose last load failed."""
        self._room = Room(self._memory)
        self._census = Census()
        modules = dict.fromkeys(module for service in services for module in service.modules)
        self._nursery = Nursery(PROGRAM, *modules, env=environment())
        self._processes: dict[int, DeviceProcess] = {}
        self._locks = [asyncio.Lock() for _ in devices]
        self._turns: dict[tuple[str, Place], Turn] = {}
        self._evicting: dict[Place, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counts | None = None
        self._descriptors: list[int] = []
        self._closing = "the manager of model services is not entered"
        self._loads = self._load_bytes = self._evictions = self._calls = 0
        self._load_s = self._call_s = 0.0

    def _require_room(self) -> None:
        for service in self._services.values():
            service.require_room({d: self._need[service.name, d] for d in service.degrees}, self._memory)

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

    def statistics(self) -> Statistics:
        return Statistics(
            emulated=any(isinstance(device, Emulated) for device in self._devices),
            host_bytes=sum(known.layout.total_bytes for known in self._known),
            device_bytes=tuple(self._counts.used(index) if self._counts else 0 for index in range(len(self._devices))),
            residents=tuple(self._room.residents()),
            loads=self._loads,
            load_s=self._load_s,
            load_bytes=self._load_bytes,
            evictions=self._evictions,
            calls=self._calls,
            call_s=self._call_s,
        )

    def process_ids(self) -> dict[int, int]:
        """Of the processes that live, by the device that they are the process of."""
        return {index: process.pid for index, process in self._processes.items() if process.alive}

    # ---- its life ----

    async def __aenter__(self) -> Self:
        """Prepare every service, and have a process ready for every device."""
        try:
            self._closing = ""
            counts_fd = self._descriptor(os.memfd_create("counts", os.MFD_CLOEXEC))
            os.ftruncate(counts_fd, Counts.size(len(self._devices)))
            self._counts = Counts(counts_fd, len(self._devices))
            await self._prepare_all()
            begun_s = asyncio.get_running_loop().time()
            log.info("starting the processes of %d devices", len(self._devices))
            await asyncio.gather(*(self._running(index) for index in range(len(self._devices))))
            log.info("devices are ready, after %.1f s", asyncio.get_running_loop().time() - begun_s)
        except BaseException:
            await self._end_all("it was never entered")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is evicted by the end is not told: whoever would hear it ends too."""
        await asyncio.shield(asyncio.ensure_future(self._end_all("the manager of model services was closed")))

    def _descriptor(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    async def _end_all(self, why: str) -> None:
        self._closing = why
        await asyncio.gather(*(process.end(why) for process in self._processes.values()), return_exceptions=True)
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._nursery.close()
        if self._counts is not None:
            self._counts.close()
            self._counts = None
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors, self._known, self._processes = [], [], {}

    async def _prepare_all(self) -> None:
        copies = {name: self._descriptor(host_copy.create(name)) for name in self._services}
        for prepared in await prepare(list(self._services.values()), copies, self._census, self._nursery):
            service = self._services[prepared.known.service]
            self._known.append(prepared.known)
            self._batch_max[service.name] = prepared.batch_max
            self._need |= {(service.name, degree): need for degree, need in prepared.need_by_degree.items()}
        self._require_room()

    # ---- actions ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        """Raises AdmissionRefused while the service is left alone because it kept failing."""
        if not isinstance(work, Infer):
            raise ManagerError(f"model services do no {type(work).__name__}", retry=False)
        place = self._place(action, grant)
        key = (grant.batch or action.id, place)
        turn = self._turns.get(key)
        if turn is None or turn.over:
            self._require_open()
            circuit = self._circuits[place.service]
            circuit.admit(self._clock.now())
            turn = self._turns[key] = Turn(self, place, self._batch_max[place.service], circuit, self._clock)
            task = self._task(turn.run())
            task.add_done_callback(lambda _: self._turns.pop(key) if self._turns.get(key) is turn else None)
        return await turn.join(action, work.payload, grant.attempt)

    def _place(self, action: Action, grant: Grant) -> Place:
        service = self.service(action.service)
        shares = [share for share in grant.shares if share.pool == self.pools()[0].name]
        if len(shares) != 1 or not all(0 <= device < len(self._devices) for device in shares[0].cells):
            raise InvariantError(f"the grant of {action.id} names no devices of {self._node}: {grant}")
        devices = shares[0].cells
        if len(devices) not in service.degrees:
            degrees = ", ".join(map(str, service.degrees))
            raise InvalidAction(f"devices for service {service.name}", len(devices), f"one of {degrees}")
        return Place(service.name, devices)

    async def restore(self, service: str, devices: tuple[int, ...]) -> None:
        """Load a service ahead of its next action. Devices that somebody uses by now are left alone, and so is a
        service that could not be loaded the last time: what was not done is told as Evicted. Raises ManagerError."""
        self._require_open()
        place = Place(service, devices)
        assert (service, len(devices)) in self._need, place
        try:
            failing = self._circuits[service].is_open or service in self._unloadable
            if failing or any(self._locks[device].locked() for device in devices):
                return
            await self.hold(devices)
            try:
                await self.have(place)
                self._room.end_use(place)
            finally:
                self.let_go(devices)
        finally:
            if place not in self._room:
                self._say(Evicted(service=service, node=self._node, devices=devices))

    def _require_open(self) -> None:
        if self._closing:
            raise ManagerError(self._closing, retry=False)

    # ---- what turns ask ----

    async def hold(self, devices: tuple[int, ...]) -> None:
        """One action at a time on a device. In increasing order, so that nobody waits in a circle."""
        taken = []
        try:
            for device in sorted(devices):
                await self._locks[device].acquire()
                taken.append(device)
        except BaseException:
            self.let_go(tuple(taken))
            raise

    def let_go(self, devices: tuple[int, ...]) -> None:
        for device in devices:
            self._locks[device].release()

    async def have(self, place: Place) -> DeviceProcess:
        """The process that has the service on these devices, which are held. In use until `used`."""
        self._require_open()
        process = self._processes.get(place.devices[0])
        if process is not None and process.has_ended:
            await self.kill(process, "")  # what lay there is gone, whether anybody was told or not
        if place not in self._room:
            await self._load(place)
        self._room.touch(place)
        self._room.begin_use(place)
        return self._processes[place.devices[0]]

    def used(self, place: Place, calls: int, seconds: float) -> None:
        self._room.end_use(place)
        self._calls += calls
        self._call_s += seconds

    async def unload(self, place: Place) -> None:
        await self._evict(place)

    async def kill(self, process: DeviceProcess, why: str) -> None:
        await process.end(why)
        self._forget(process)

    # ---- processes ----

    async def _running(self, index: int) -> DeviceProcess:
        """The process of a device, which is held: it is started if there is none."""
        process = self._processes.get(index)
        if process is not None and process.alive:
            return process
        if process is not None:
            await process.end("")
            self._forget(process)
        self._require_open()
        process = self._processes[index] = DeviceProcess(
            f"the process of device {index}", self._census, lambda ended: self._forget(ended), self._nursery
        )
        descriptors = list(self._descriptors)
        hello = Hello(
            id=process.next_id(),
            process=index,
            devices=self._devices,
            counts_fd=descriptors[0],
            services=self._known,
        )
        await process.start(hello, descriptors)
        return process

    def _forget(self, process: DeviceProcess) -> None:
        """It has ended. What lay on devices is gone with it."""
        index = next((index for index, other in self._processes.items() if other is process), None)
        if index is None or self._closing:
            return
        assert self._counts is not None
        self._counts.clear(index)
        for place in self._room.residents():
            if place.devices[0] == index:
                self._room.lose(place)
                self._say(Evicted(service=place.service, node=self._node, devices=place.devices))

    # ---- loading and evicting ----

    async def _load(self, place: Place) -> None:
        """Make room, and copy it there. Who went for it does not come back if that fails: whether a load succeeds is
        known only when its memory is free. Nobody goes who need not, and who went is restored at its next call."""
        service, need = self._services[place.service], self._need[place.service, len(place.devices)]
        for victim in self._room.victims(place.devices, need):
            await self._evict(victim)
        process = await self._running(place.devices[0])  # now, because who does not let go loses its process
        self._unloadable.add(place.service)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            async with asyncio.timeout(service.load_s_max):
                await process.ask(Load(id=process.next_id(), service=place.service, devices=place.devices))
        except (TimeoutError, ServiceFailed, ProcessLost) as error:
            why = f"it took longer than {service.load_s_max} s" if isinstance(error, TimeoutError) else str(error)
            if isinstance(error, TimeoutError) or (isinstance(error, ServiceFailed) and error.failed.unclean):
                await self.kill(process, f"loading {place.service}: {why}")
            raise ManagerError(
                f"service {place.service} cannot be loaded on devices {list(place.devices)}, "
                f"of which it needs {need} bytes each: {why}"
            ) from error
        if not process.alive:
            raise ManagerError(f"{process.name} ended as soon as it had loaded {place.service}")
        self._unloadable.discard(place.service)
        self._room.add(place, need)
        self._circuits[place.service].loaded(place.devices)
        self._loads += 1
        self._load_s += loop.time() - begun_s
        self._load_bytes += next(known.layout.total_bytes for known in self._known if known.service == place.service)
        self._say(
            Resident(
                service=place.service,
                node=self._node,
                devices=place.devices,
                batch_max=self._batch_max[place.service],
            )
        )

    async def _evict(self, place: Place) -> None:
        """Two may want the same one to go, if it lies on the devices of both."""
        if place in self._room and place not in self._evicting:
            task = self._evicting[place] = self._task(self._unload(place))
            task.add_done_callback(lambda _: self._evicting.pop(place))
        if place in self._evicting:
            await asyncio.shield(self._evicting[place])

    async def _unload(self, place: Place) -> None:
        """Nothing is written back: the host copy is the same. A process that does not let go is ended."""
        process = self._processes[place.devices[0]]
        try:
            async with asyncio.timeout(UNLOAD_S_MAX):
                await process.ask(Unload(id=process.next_id(), service=place.service, devices=place.devices))
        except (TimeoutError, ServiceFailed, ProcessLost) as error:
            if not isinstance(error, ServiceFailed) or error.failed.unclean:
                await self.kill(process, f"{place.service} could not be evicted: {error}")
        if place in self._room:
            self._room.remove(place)
            self._evictions += 1
            self._say(Evicted(service=place.service, node=self._node, devices=place.devices))

    def _say(self, event: Event) -> None:
        if not self._closing:
            self._tell(event)

    def _task(self, doing: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
