"""The process of a device: runs engines and holds what they load.

There is one for each device. It serves the chunks whose first device is its own, so its services may span several
devices. One thread runs engines; another reads requests, unloads services while a call to another service runs, and
interrupts calls. Owns the loaded services: `kill -9` loses them and the running call, and the manager starts another
process. It ends with the manager.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import signal
import threading
import time
import traceback
import warnings
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import msgspec

from tangram.errors import InvalidInput
from tangram.managers.models import host_copy
from tangram.managers.models.devices import Block, Device, DeviceFull, EmulatedMemoryUsage, open_devices, pin_memory
from tangram.managers.models.engine import Engine, Loaded, Weights
from tangram.managers.models.error_location import describe_error
from tangram.managers.models.messages import (
    FRAME_BYTES_MAX,
    AnyDeviceReply,
    AnyDeviceRequest,
    AnyFinalReply,
    CallService,
    CallStarted,
    DeviceChunk,
    DeviceHello,
    InterruptCall,
    LoadService,
    PrepareService,
    RequestDone,
    RequestFailed,
    UnloadService,
)
from tangram.managers.models.service import engine_of, has_external_weights
from tangram.managers.models.work import PAYLOAD_BYTES_MAX
from tangram.processes.child_side import SupervisorConnection
from tangram.processes.framing import FrameDecoder

REASON_CHARACTERS_MAX = 4000


class CallInterrupted(BaseException):
    """A call was interrupted. Not an Exception, so that engines do not catch it."""


class LoadedService(NamedTuple):
    loaded: Loaded
    blocks: dict[Block, Device]


class DeviceServer:
    def __init__(self, fd: int) -> None:
        """`fd`: the socket to the manager."""
        self._connection = SupervisorConnection[AnyDeviceRequest](fd, FrameDecoder(AnyDeviceRequest, FRAME_BYTES_MAX))
        self._requests: queue.SimpleQueue[AnyDeviceRequest] = queue.SimpleQueue()
        self._engines: dict[str, Engine] = {}
        self._weights: dict[str, Weights] = {}
        self._maps: list[Any] = []
        self._devices: list[Device] = []
        self._loaded_services: dict[tuple[str, DeviceChunk], LoadedService] = {}
        self._running_call = 0
        """0: none."""
        self._interrupted_call = 0

    # ---- threads ----

    def run(self) -> NoReturn:
        signal.signal(signal.SIGUSR1, self._on_interrupt)
        threading.Thread(target=self._read_requests, name="requests", daemon=True).start()
        while True:
            self._handle(self._requests.get())

    def _read_requests(self) -> None:
        """Ends the process when the manager closes the socket."""
        main = threading.main_thread().ident
        assert main is not None
        try:
            while True:
                for request in self._connection.receive_first():
                    if isinstance(request, UnloadService):
                        self._handle(request)
                    elif isinstance(request, InterruptCall):
                        self._interrupted_call = request.call
                        signal.pthread_kill(main, signal.SIGUSR1)
                    else:
                        self._requests.put(request)
        finally:
            self._connection.exit_process()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Runs in the thread of engines. Ignores an interrupt of a call that has ended."""
        if self._running_call and self._running_call == self._interrupted_call:
            self._running_call = 0
            raise CallInterrupted

    # ---- requests ----

    def _handle(self, request: AnyDeviceRequest) -> None:
        blocks = self._blocks_of(request)
        reply: AnyFinalReply
        try:
            reply = self._dispatch(request)
        except CallInterrupted:
            reply = RequestFailed(id=request.id, whose="stopped", reason="it was stopped")
        except BaseException as error:
            reply = _failure_reply(request, error)
            # The frames of the failure still refer to memory of the devices.
            traceback.clear_frames(error.__traceback__)
        if (
            isinstance(reply, RequestFailed)
            and isinstance(request, LoadService | UnloadService)
            and not self._free_leftovers(request, blocks)
        ):
            reply = msgspec.structs.replace(reply, unclean=True)
        self._reply(reply)

    def _dispatch(self, request: AnyDeviceRequest) -> RequestDone:
        match request:
            case DeviceHello():
                return self._initialize(request)
            case PrepareService():
                return self._prepare(request)
            case LoadService():
                return self._load(request)
            case UnloadService():
                return self._unload(request)
            case CallService():
                return self._call(request)
        raise AssertionError(request)

    def _reply(self, reply: AnyDeviceReply) -> None:
        self._connection.send(reply)

    def _initialize(self, request: DeviceHello) -> RequestDone:
        counts = EmulatedMemoryUsage(request.counts_fd, len(request.devices))
        self._devices = open_devices(request.devices, counts, request.process)
        for known in request.services:
            engine = engine_of(known.engine)
            weights, shared = host_copy.attach(known.layout, known.copy_fd)
            engine.warm(weights)
            self._engines[known.service], self._weights[known.service] = engine, weights
            if shared is not None:
                self._maps.append(shared)
                if not all(device.emulated for device in self._devices):
                    pin_memory(shared, known.layout.total_bytes)
        gc.collect()
        gc.freeze()  # collecting what is loaded now would take longer than a restore
        return RequestDone(id=request.id)

    def _prepare(self, request: PrepareService) -> RequestDone:
        engine = engine_of(request.engine)
        engine.warm(None)
        weights = engine.prepare()
        layout = host_copy.write(weights, request.copy_fd)
        needs = {degree: weights.need(degree) for degree in request.degrees}
        return RequestDone(
            id=request.id,
            layout=layout,
            needs=needs,
            batch_max=max(1, engine.batch_max),
            external_weights=has_external_weights(engine),
        )

    def _load(self, request: LoadService) -> RequestDone:
        key = (request.service, request.devices)
        assert key not in self._loaded_services, f"{key} is loaded already"
        devices = [self._devices[index] for index in request.devices]
        before = self._blocks_of(request)
        began_at = time.monotonic()
        loaded = self._engines[request.service].load(self._weights[request.service], devices)
        blocks = {block: device for block, device in self._blocks_of(request).items() if block not in before}
        self._loaded_services[key] = LoadedService(loaded, blocks)
        return RequestDone(id=request.id, seconds=time.monotonic() - began_at)

    def _unload(self, request: UnloadService) -> RequestDone:
        holding = self._loaded_services.pop((request.service, request.devices))
        self._engines[request.service].unload(holding.loaded)
        blocks = holding.blocks
        del holding
        for block, device in blocks.items():
            _free(device, block)
        return RequestDone(id=request.id)

    def _call(self, request: CallService) -> RequestDone:
        engine = self._engines[request.service]
        loaded = self._loaded_services[request.service, request.devices].loaded
        self._reply(CallStarted(id=request.id))
        began_at = time.monotonic()
        try:
            self._running_call = request.id
            answers = engine.call(loaded, request.payloads)
        finally:
            self._running_call = 0  # later interrupts are ignored
        seconds = time.monotonic() - began_at
        if not isinstance(answers, list) or len(answers) != len(request.payloads):
            count = len(answers) if isinstance(answers, list) else f"not a list but {type(answers).__name__} of"
            raise TypeError(f"the engine gave {count} answers to {len(request.payloads)} payloads")
        for answer in answers:
            if not isinstance(answer, bytes) or len(answer) > PAYLOAD_BYTES_MAX:
                raise TypeError(f"expected an answer of at most {PAYLOAD_BYTES_MAX} bytes, got {type(answer).__name__}")
        return RequestDone(id=request.id, answers=answers, seconds=seconds)

    # ---- clean-up after failures ----

    def _blocks_of(self, request: AnyDeviceRequest) -> dict[Block, Device]:
        """Load: all blocks on its devices. Unload: those of the service. Both threads may work on the same devices,
        each with separate blocks."""
        if isinstance(request, LoadService):
            devices = [self._devices[index] for index in request.devices]
            return {block: device for device in devices for block in list(device.blocks)}
        if isinstance(request, UnloadService):
            return self._loaded_services[request.service, request.devices].blocks
        return {}

    def _free_leftovers(self, request: LoadService | UnloadService, blocks: dict[Block, Device]) -> bool:
        """Free memory of a failed load or unload. Returns whether all of it is free."""
        if isinstance(request, LoadService):
            left = {block: device for block, device in self._blocks_of(request).items() if block not in blocks}
        else:
            left = {block: device for block, device in blocks.items() if block in device.blocks}
        clean = True
        for block, device in left.items():
            try:
                _free(device, block)
            except BufferError:
                clean = False
        return clean


def _free(device: Device, block: Block) -> None:
    """Raises BufferError if a view of it exists outside of garbage cycles. Collecting cycles takes longer than a
    restore, so it is done only where necessary: real devices do not report remaining views."""
    if device.emulated:
        with contextlib.suppress(BufferError):
            device.free(block)
            return
    gc.collect()
    device.free(block)


def _failure_reply(request: AnyDeviceRequest, error: BaseException) -> RequestFailed:
    if isinstance(error, DeviceFull):
        return RequestFailed(id=request.id, whose="full", reason=str(error))
    if isinstance(error, InvalidInput) and isinstance(request, CallService | PrepareService):
        subject = "payload" if isinstance(request, CallService) else "config"
        value = str(error.value)[:REASON_CHARACTERS_MAX]
        return RequestFailed(id=request.id, whose=subject, field=error.field, reason=value, expected=error.expected)
    traceback.print_exception(error)
    return RequestFailed(id=request.id, reason=describe_error(error, REASON_CHARACTERS_MAX))


def main(fd: int) -> NoReturn:
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    DeviceServer(fd).run()
