"""Devices: memory that models are loaded into, over a link of some speed.

Owns blocks of device memory. Never decides who is loaded. Promises that a device never holds more than its memory: an
allocation beyond it raises DeviceFull and changes nothing.

CUDA devices are those of PyTorch. Where there are none, devices are *emulated*: the memory is that of the machine,
really allocated, really filled and really freed; only its size and the speed of the link are invented. A copy takes at
least as long as the link would need, and at least as long as the machine does. Figures from them are labelled emulated.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import mmap
import subprocess
import sys
import threading
import time
from typing import Any, Protocol

import msgspec

from tangram.errors import InvalidConfig, ManagerError

CUDA_MEMORY_SHARE = 0.92
"""Of what a CUDA device has: contexts, kernels and libraries of each process that uses it take the rest."""
DISCOVER_S_MAX = 120.0
"""To import PyTorch from a cold disk and ask it."""


COPY_BYTES = 1 << 26
"""At a time, so that the other thread of a process gets its turn: Python does not give way within one copy."""


class DeviceFull(ManagerError):
    """A device has not so much memory left."""


# ---- what a manager is given --------------------------------------------------------------------------------------


class Emulated(msgspec.Struct, frozen=True, kw_only=True, tag="Emulated"):
    """A device that is not there."""

    memory_bytes: int
    bandwidth: float = 25e9
    """Bytes per second from host memory: what PCIe 4.0 with 16 lanes brings of its 32e9."""

    def __post_init__(self) -> None:
        if type(self.memory_bytes) is not int or self.memory_bytes < 1:
            raise InvalidConfig("device.memory_bytes", self.memory_bytes, "a positive whole number of bytes")
        if type(self.bandwidth) not in (float, int) or not self.bandwidth > 0.0 or math.isnan(self.bandwidth):
            raise InvalidConfig("device.bandwidth", self.bandwidth, "a positive number of bytes per second")


class Cuda(msgspec.Struct, frozen=True, kw_only=True, tag="Cuda"):
    """A device of PyTorch."""

    place: str
    """As PyTorch names it, such as `cuda:0`."""
    memory_bytes: int
    name: str = ""


DeviceSpec = Emulated | Cuda


def discover() -> tuple[Cuda, ...]:
    """The CUDA devices of this machine; none if PyTorch is not there. Asked in a process of its own, because whoever
    imports PyTorch keeps it."""
    if importlib.util.find_spec("torch") is None:
        return ()
    code = f"from {__name__} import _print_cuda; _print_cuda()"
    try:
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DISCOVER_S_MAX, check=True)
    except subprocess.SubprocessError as error:
        raise ManagerError(f"PyTorch cannot be asked for its devices: {error}") from error
    return tuple(msgspec.convert(json.loads(asked.stdout.splitlines()[-1]), list[Cuda]))


def _print_cuda() -> None:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = int(properties.total_memory * CUDA_MEMORY_SHARE)
        found.append(Cuda(place=f"cuda:{index}", memory_bytes=memory, name=properties.name))
    print(json.dumps(msgspec.to_builtins(found)))


# ---- what an engine is given --------------------------------------------------------------------------------------


class Block:
    """Memory of one device."""

    def __init__(self, size: int, memory: Any) -> None:
        self.size = size
        self.memory = memory
        """Emulated: an mmap, which has the buffer interface. CUDA: a tensor of bytes."""


class Device(Protocol):
    """One device in the process that uses it."""

    index: int
    emulated: bool
    place: str
    """Where PyTorch makes tensors for it: `cpu` for one that is emulated."""
    blocks: dict[Block, None]
    """What this process has allocated there."""

    def allocate(self, size: int) -> Block:
        """Raises DeviceFull."""
        ...

    def copy(self, block: Block, offset: int, content: memoryview) -> None: ...

    def settle(self, block: Block, begun_s: float) -> None:
        """Wait until what was copied into the block since `begun_s` is there."""
        ...

    def free(self, block: Block) -> None: ...


class Counts:
    """Bytes that each process holds of each emulated device: what a driver would know. All processes share it; each
    writes only its own column, and the manager clears that of a dead one. A device is in one hand at a time, which is
    why nobody locks it."""

    def __init__(self, fd: int, devices: int) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._map = mmap.mmap(fd, self.size(devices))
        self._cells = memoryview(self._map).cast("q")

    @staticmethod
    def size(devices: int) -> int:
        return 8 * max(1, devices * devices)

    def used(self, device: int) -> int:
        return sum(self._cells[device * self._devices : (device + 1) * self._devices])

    def add(self, device: int, process: int, size: int) -> None:
        with self._lock:  # the two threads of a process
            self._cells[device * self._devices + process] += size

    def clear(self, process: int) -> None:
        for device in range(self._devices):
            self._cells[device * self._devices + process] = 0

    def close(self) -> None:
        self._cells.release()
        self._map.close()


class EmulatedDevice:
    emulated = True
    place = "cpu"

    def __init__(self, index: int, spec: Emulated, counts: Counts, process: int) -> None:
        self.index = index
        self.blocks: dict[Block, None] = {}
        self._spec = spec
        self._counts = counts
        self._process = process

    def allocate(self, size: int) -> Block:
        memory, used = self._spec.memory_bytes, self._counts.used(self.index)
        if used + size > memory:
            raise DeviceFull(
                f"device {self.index} has {memory - used} of its {memory} bytes free, and {size} are needed"
            )
        block = Block(size, mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        # Without it the kernel hands out pages of 4 KiB one by one, which takes ten times as long as filling them.
        with contextlib.suppress(OSError):  # a kernel that has no others
            block.memory.madvise(mmap.MADV_HUGEPAGE)
        self._counts.add(self.index, self._process, size)
        self.blocks[block] = None
        return block

    def copy(self, block: Block, offset: int, content: memoryview) -> None:
        with memoryview(block.memory) as target, content.cast("B") as source:
            for start in range(0, source.nbytes, COPY_BYTES):
                part = source[start : start + COPY_BYTES]
                target[offset + start : offset + start + part.nbytes] = part

    def settle(self, block: Block, begun_s: float) -> None:
        """The links of several devices work side by side: each of them began then."""
        left_s = begun_s + block.size / self._spec.bandwidth - time.monotonic()
        if left_s > 0.0:
            time.sleep(left_s)

    def free(self, block: Block) -> None:
        """Raises BufferError if somebody still looks at it."""
        block.memory.close()
        del self.blocks[block]
        self._counts.add(self.index, self._process, -block.size)


class CudaDevice:
    """Only what every device of PyTorch can, so that its CPU can stand in for a CUDA device."""

    emulated = False

    def __init__(self, index: int, spec: Cuda) -> None:
        self.index = index
        self.blocks: dict[Block, None] = {}
        self.place = spec.place
        self._memory_bytes = spec.memory_bytes

    def allocate(self, size: int) -> Block:
        import torch

        used = sum(block.size for block in self.blocks)
        if used + size > self._memory_bytes:
            raise DeviceFull(
                f"device {self.index} has {self._memory_bytes - used} of its {self._memory_bytes} bytes free "
                f"for this process, and {size} are needed"
            )
        try:
            block = Block(size, torch.empty(size, dtype=torch.uint8, device=self.place))
        except torch.OutOfMemoryError as error:
            raise DeviceFull(f"device {self.index} ({self.place}) has no {size} bytes free: {error}") from error
        self.blocks[block] = None
        return block

    def copy(self, block: Block, offset: int, content: memoryview) -> None:
        import torch

        if content.nbytes:
            source = torch.frombuffer(content, dtype=torch.uint8)
            block.memory[offset : offset + content.nbytes].copy_(source, non_blocking=True)

    def settle(self, block: Block, begun_s: float) -> None:
        import torch

        if self.place != "cpu":
            torch.cuda.synchronize(self.place)

    def free(self, block: Block) -> None:
        import torch

        del self.blocks[block]
        block.memory = None
        if self.place != "cpu":
            torch.cuda.empty_cache()  # else PyTorch keeps it, and other processes cannot have it


def open_devices(specs: list[DeviceSpec], counts: Counts, process: int) -> list[Device]:
    """In the process of a device: all of them, since it may be the first of a chunk."""
    return [
        EmulatedDevice(index, spec, counts, process) if isinstance(spec, Emulated) else CudaDevice(index, spec)
        for index, spec in enumerate(specs)
    ]


def pin(content: mmap.mmap, size: int) -> bool:
    """Have the host copy where a CUDA device can fetch it by itself, if it can be. True: it is."""
    import torch

    if not size or not torch.cuda.is_available():
        return False
    with memoryview(content) as view:
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    cudart: Any = torch.cuda.cudart
    read_only = 8  # cudaHostRegisterReadOnly
    return int(cudart().cudaHostRegister(address, size, read_only)) == 0
