"""Devices: memory for models, behind a link of limited speed.

Owns blocks of device memory. Never decides what is loaded. An allocation beyond the memory of a device raises
DeviceFull and changes nothing.

CUDA devices are those of PyTorch. On machines without them, devices can be *emulated*: memory of the machine is really
allocated, filled and freed; only its size and the speed of the link are parameters. A copy takes as long as the link
needs, or longer if the machine is slower. Results from emulated devices are labelled emulated.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import mmap
import sys
import threading
import time
from typing import Any, Protocol

import msgspec

from tangram.errors import InvalidConfig, ManagerError
from tangram.processes.run_program import run_program

CUDA_MEMORY_SHARE = 0.92
"""The part of the memory of a CUDA device for services; the rest is for contexts, kernels and libraries of each process
that uses it."""
DISCOVER_S_MAX = 120.0
"""Time limit for importing PyTorch from a cold disk and listing its devices."""


COPY_BYTES = 1 << 26
"""Size of one copy: Python holds the interpreter lock during a copy, and the other thread of the process must run."""


class DeviceFull(ManagerError):
    """A device does not have enough free memory."""


# ---- declarations ------------------------------------------------------------------------------------------------


class Emulated(msgspec.Struct, frozen=True, kw_only=True, tag="Emulated"):
    memory_bytes: int
    bandwidth: float = 25e9
    """Bytes per second from host memory: the practical rate of PCIe 4.0 with 16 lanes (nominally 32e9)."""

    def __post_init__(self) -> None:
        if type(self.memory_bytes) is not int or self.memory_bytes < 1:
            raise InvalidConfig("device.memory_bytes", self.memory_bytes, "a positive whole number of bytes")
        if type(self.bandwidth) not in (float, int) or not self.bandwidth > 0.0 or math.isnan(self.bandwidth):
            raise InvalidConfig("device.bandwidth", self.bandwidth, "a positive number of bytes per second")


class Cuda(msgspec.Struct, frozen=True, kw_only=True, tag="Cuda"):
    """A device of PyTorch."""

    place: str
    """The PyTorch device, such as `cuda:0`."""
    memory_bytes: int
    name: str = ""


DeviceSpec = Emulated | Cuda


def discover() -> tuple[Cuda, ...]:
    """The CUDA devices of this machine; none if PyTorch is not installed. A separate process imports PyTorch, because
    an import cannot be undone."""
    if importlib.util.find_spec("torch") is None:
        return ()
    code = f"from {__name__} import _print_cuda; _print_cuda()"
    try:
        result = run_program([sys.executable, "-c", code], seconds=DISCOVER_S_MAX)
    except OSError as error:
        raise ManagerError(f"the devices of PyTorch cannot be listed: {error}") from error
    if result.failure:
        raise ManagerError(f"the devices of PyTorch cannot be listed: {result.failure}")
    return tuple(msgspec.convert(json.loads(result.stdout.splitlines()[-1]), list[Cuda]))


def _print_cuda() -> None:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = int(properties.total_memory * CUDA_MEMORY_SHARE)
        devices.append(Cuda(place=f"cuda:{index}", memory_bytes=memory, name=properties.name))
    print(json.dumps(msgspec.to_builtins(devices)))


# ---- in the process of a device -----------------------------------------------------------------------------------


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
    """The PyTorch device of its tensors: `cpu` for an emulated one."""
    blocks: dict[Block, None]
    """Allocated by this process."""

    def allocate(self, size: int) -> Block:
        """Raises DeviceFull."""
        ...

    def copy(self, block: Block, offset: int, content: memoryview) -> None: ...

    def synchronize(self, block: Block, began_at: float) -> None:
        """Block until the copies into the block since `began_at` are complete."""
        ...

    def free(self, block: Block) -> None: ...


class EmulatedMemoryUsage:
    """Bytes that each process holds on each emulated device; for real devices, the driver has this table. In memory
    shared by all processes: each writes only its own column, and the manager clears that of a dead one. Needs no lock
    between processes, because one process at a time allocates on a device."""

    def __init__(self, fd: int, devices: int) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._map = mmap.mmap(fd, self.size(devices))
        self._cells = memoryview(self._map).cast("q")

    @staticmethod
    def size(devices: int) -> int:
        return 8 * max(1, devices * devices)

    def used_bytes(self, device: int) -> int:
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

    def __init__(self, index: int, spec: Emulated, counts: EmulatedMemoryUsage, process: int) -> None:
        self.index = index
        self.blocks: dict[Block, None] = {}
        self._spec = spec
        self._memory_usage = counts
        self._process = process

    def allocate(self, size: int) -> Block:
        memory, used = self._spec.memory_bytes, self._memory_usage.used_bytes(self.index)
        if used + size > memory:
            raise DeviceFull(
                f"device {self.index} has {memory - used} of its {memory} bytes free, and {size} are needed"
            )
        block = Block(size, mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        # With pages of 4 KiB, page faults take ten times as long as filling the pages.
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            block.memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory_usage.add(self.index, self._process, size)
        self.blocks[block] = None
        return block

    def copy(self, block: Block, offset: int, content: memoryview) -> None:
        with memoryview(block.memory) as target, content.cast("B") as source:
            for start in range(0, source.nbytes, COPY_BYTES):
                part = source[start : start + COPY_BYTES]
                target[offset + start : offset + start + part.nbytes] = part

    def synchronize(self, block: Block, began_at: float) -> None:
        """The links of several devices work in parallel: each began at `began_at`."""
        left_s = began_at + block.size / self._spec.bandwidth - time.monotonic()
        if left_s > 0.0:
            time.sleep(left_s)

    def free(self, block: Block) -> None:
        """Raises BufferError if a view of it still exists."""
        block.memory.close()
        del self.blocks[block]
        self._memory_usage.add(self.index, self._process, -block.size)


class CudaDevice:
    """Uses only what every device of PyTorch supports, so that its CPU can replace a CUDA device in tests."""

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
            raise DeviceFull(f"device {self.index} ({self.place}) does not have {size} bytes free: {error}") from error
        self.blocks[block] = None
        return block

    def copy(self, block: Block, offset: int, content: memoryview) -> None:
        import torch

        if content.nbytes:
            source = torch.frombuffer(content, dtype=torch.uint8)
            block.memory[offset : offset + content.nbytes].copy_(source, non_blocking=True)

    def synchronize(self, block: Block, began_at: float) -> None:
        import torch

        if self.place != "cpu":
            torch.cuda.synchronize(self.place)

    def free(self, block: Block) -> None:
        import torch

        del self.blocks[block]
        block.memory = None
        if self.place != "cpu":
            torch.cuda.empty_cache()  # else PyTorch caches it, and other processes cannot use it


def open_devices(specs: list[DeviceSpec], counts: EmulatedMemoryUsage, process: int) -> list[Device]:
    """All devices, since the device of a process may be the first of a chunk."""
    return [
        EmulatedDevice(index, spec, counts, process) if isinstance(spec, Emulated) else CudaDevice(index, spec)
        for index, spec in enumerate(specs)
    ]


def pin_memory(content: mmap.mmap, size: int) -> bool:
    """Pin the host copy, so that a CUDA device can read it directly. Returns whether that was possible."""
    import torch

    if not size or not torch.cuda.is_available():
        return False
    with memoryview(content) as view:
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    cudart: Any = torch.cuda.cudart
    read_only = 8  # cudaHostRegisterReadOnly
    return int(cudart().cudaHostRegister(address, size, read_only)) == 0
