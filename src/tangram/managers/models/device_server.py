"""The process of a device: engines run here, and what they load lies here.

One for each device. It serves the chunks whose first device is its own, so what it holds may lie on several devices.
One thread runs engines; another reads requests, unloads services while a call to another one runs, and interrupts
calls. It owns what it has loaded and nothing else: `kill -9` loses that and the call that runs, and the manager starts
another. It ends with the manager.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import threading
import time
import traceback
import warnings
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import msgspec

from tangram.errors import InvalidInput
from tangram.managers.models import host_copy
from tangram.managers.models.devices import Block, Counts, Device, DeviceFull, open_devices, pin
from tangram.managers.models.engine import Engine, Loaded, Weights
from tangram.managers.models.error_location import in_words
from tangram.managers.models.messages import (
    HEADER_BYTES,
    AnyReply,
    AnyRequest,
    AnyWord,
    Begun,
    Call,
    Chunk,
    Done,
    Failed,
    Hello,
    Interrupt,
    Load,
    Prepare,
    Unload,
    framed,
    requests,
)
from tangram.managers.models.service import engine_of, is_elsewhere
from tangram.managers.models.work import PAYLOAD_BYTES_MAX

REASON_CHARACTERS_MAX = 4000


class Interrupted(BaseException):
    """A call was asked to end. Not an Exception, so that no engine takes it for one of its own."""


class Holding(NamedTuple):
    """A service that is loaded."""

    loaded: Loaded
    blocks: dict[Block, Device]


class Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: queue.SimpleQueue[AnyRequest] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._engines: dict[str, Engine] = {}
        self._weights: dict[str, Weights] = {}
        self._maps: list[Any] = []
        self._devices: list[Device] = []
        self._holdings: dict[tuple[str, Chunk], Holding] = {}
        self._calling = 0
        """The call that runs; 0: none."""
        self._interrupt = 0

    # ---- its life ----

    def run(self) -> NoReturn:
        signal.signal(signal.SIGUSR1, self._on_interrupt)
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        while True:
            self._carry_out(self._waiting.get())

    def _read(self) -> None:
        """Until the manager has gone, and this process with it."""
        main = threading.main_thread().ident
        assert main is not None
        try:
            while True:
                size = int.from_bytes(self._receive(HEADER_BYTES), "little")
                request = requests.decode(self._receive(size))
                if isinstance(request, Unload):
                    self._carry_out(request)
                elif isinstance(request, Interrupt):
                    self._interrupt = request.call
                    signal.pthread_kill(main, signal.SIGUSR1)
                else:
                    self._waiting.put(request)
        except OSError:
            pass
        finally:
            os._exit(0)

    def _receive(self, size: int) -> bytearray:
        content = bytearray(size)
        with memoryview(content) as left:
            at = 0
            while at < size:
                count = self._connection.recv_into(left[at:])
                if not count:
                    raise ConnectionError("the manager has gone")
                at += count
        return content

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """In the thread that runs engines. One that comes late means a call that has ended."""
        if self._calling and self._calling == self._interrupt:
            self._calling = 0
            raise Interrupted

    # ---- requests ----

    def _carry_out(self, request: AnyRequest) -> None:
        blocks = self._blocks_around(request)
        reply: AnyReply
        try:
            reply = self._done(request)
        except Interrupted:
            reply = Failed(id=request.id, whose="stopped", reason="it was stopped")
        except BaseException as error:
            reply = _failed(request, error)
            # The frames of the failure still hold what lies on the devices.
            traceback.clear_frames(error.__traceback__)
        if isinstance(reply, Failed) and isinstance(request, Load | Unload) and not self._freed(request, blocks):
            reply = msgspec.structs.replace(reply, unclean=True)
        self._reply(reply)

    def _done(self, request: AnyRequest) -> Done:
        match request:
            case Hello():
                return self._begin(request)
            case Prepare():
                return self._prepare(request)
            case Load():
                return self._load(request)
            case Unload():
                return self._unload(request)
            case Call():
                return self._call(request)
        raise AssertionError(request)

    def _reply(self, reply: AnyWord) -> None:
        frame = framed(reply)
        with self._sending:
            self._connection.sendall(frame)

    def _begin(self, request: Hello) -> Done:
        counts = Counts(request.counts_fd, len(request.devices))
        self._devices = open_devices(request.devices, counts, request.process)
        for known in request.services:
            engine = engine_of(known.engine)
            weights, shared = host_copy.attach(known.layout, known.copy_fd)
            engine.warm(weights)
            self._engines[known.service], self._weights[known.service] = engine, weights
            if shared is not None:
                self._maps.append(shared)
                if not all(device.emulated for device in self._devices):
                    pin(shared, known.layout.total_bytes)
        gc.collect()
        gc.freeze()  # what is there now stays: looking for garbage among it takes longer than a restore
        return Done(id=request.id)

    def _prepare(self, request: Prepare) -> Done:
        engine = engine_of(request.engine)
        engine.warm(None)
        weights = engine.prepare()
        layout = host_copy.write(weights, request.copy_fd)
        needs = {degree: weights.need(degree) for degree in request.degrees}
        return Done(
            id=request.id,
            layout=layout,
            needs=needs,
            batch_max=max(1, engine.batch_max),
            elsewhere=is_elsewhere(engine),
        )

    def _load(self, request: Load) -> Done:
        key = (request.service, request.devices)
        assert key not in self._holdings, f"{key} is loaded already"
        devices = [self._devices[index] for index in request.devices]
        before = self._blocks_around(request)
        begun_s = time.monotonic()
        loaded = self._engines[request.service].load(self._weights[request.service], devices)
        blocks = {block: device for block, device in self._blocks_around(request).items() if block not in before}
        self._holdings[key] = Holding(loaded, blocks)
        return Done(id=request.id, seconds=time.monotonic() - begun_s)

    def _unload(self, request: Unload) -> Done:
        holding = self._holdings.pop((request.service, request.devices))
        self._engines[request.service].unload(holding.loaded)
        blocks = holding.blocks
        del holding
        for block, device in blocks.items():
            _free(device, block)
        return Done(id=request.id)

    def _call(self, request: Call) -> Done:
        engine = self._engines[request.service]
        loaded = self._holdings[request.service, request.devices].loaded
        self._reply(Begun(id=request.id))
        begun_s = time.monotonic()
        try:
            self._calling = request.id
            answers = engine.call(loaded, request.payloads)
        finally:
            self._calling = 0  # whoever interrupts it from now on is late
        seconds = time.monotonic() - begun_s
        if not isinstance(answers, list) or len(answers) != len(request.payloads):
            count = len(answers) if isinstance(answers, list) else f"no list but {type(answers).__name__} of"
            raise TypeError(f"the engine gave {count} answers to {len(request.payloads)} payloads")
        for answer in answers:
            if not isinstance(answer, bytes) or len(answer) > PAYLOAD_BYTES_MAX:
                raise TypeError(f"expected an answer of at most {PAYLOAD_BYTES_MAX} bytes, got {type(answer).__name__}")
        return Done(id=request.id, answers=answers, seconds=seconds)

    # ---- what is left of a failure ----

    def _blocks_around(self, request: AnyRequest) -> dict[Block, Device]:
        """Load: all on its devices. Unload: those of the service. Both threads may be at the same devices, each with
        blocks of its own."""
        if isinstance(request, Load):
            devices = [self._devices[index] for index in request.devices]
            return {block: device for device in devices for block in list(device.blocks)}
        if isinstance(request, Unload):
            return self._holdings[request.service, request.devices].blocks
        return {}

    def _freed(self, request: Load | Unload, blocks: dict[Block, Device]) -> bool:
        """Free what a load that failed has allocated, or an unload that failed has left."""
        if isinstance(request, Load):
            left = {block: device for block, device in self._blocks_around(request).items() if block not in blocks}
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
    """Raises BufferError if somebody still looks at it, and not only from a cycle. Looking for cycles takes longer than
    a restore, so it is done only where it has to be: real devices do not say that somebody looks."""
    if device.emulated:
        with contextlib.suppress(BufferError):
            device.free(block)
            return
    gc.collect()
    device.free(block)


def _failed(request: AnyRequest, error: BaseException) -> Failed:
    if isinstance(error, DeviceFull):
        return Failed(id=request.id, whose="full", reason=str(error))
    if isinstance(error, InvalidInput) and isinstance(request, Call | Prepare):
        whose = "payload" if isinstance(request, Call) else "config"
        value = str(error.value)[:REASON_CHARACTERS_MAX]
        return Failed(id=request.id, whose=whose, field=error.field, reason=value, expected=error.expected)
    traceback.print_exception(error)
    return Failed(id=request.id, reason=in_words(error, REASON_CHARACTERS_MAX))


def main(fd: int) -> NoReturn:
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    Server(socket.socket(fileno=fd)).run()
