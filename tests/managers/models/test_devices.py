"""Emulated devices: memory that is really there, of a size that holds, over a link that is never too fast."""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram.errors import InvalidConfig
from tangram.managers.models import devices as module
from tangram.managers.models.devices import (
    Cuda,
    CudaDevice,
    DeviceFull,
    Emulated,
    EmulatedDevice,
    EmulatedMemoryUsage,
    discover,
)
from tangram.managers.models.engine import Piece, Weights, place
from tangram.managers.work import MIB


@pytest.fixture
def counts() -> Iterator[EmulatedMemoryUsage]:
    fd = os.memfd_create("counts")
    os.ftruncate(fd, EmulatedMemoryUsage.size(2))
    made = EmulatedMemoryUsage(fd, 2)
    yield made
    made.close()
    os.close(fd)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_really_allocated_and_really_freed(counts: EmulatedMemoryUsage) -> None:
    device = EmulatedDevice(0, Emulated(memory_bytes=128 * MIB), counts, 0)
    content = memoryview(os.urandom(MIB))
    before = resident_bytes()
    block = device.allocate(64 * MIB)
    for offset in range(0, 64 * MIB, MIB):
        device.copy(block, offset, content)
    assert resident_bytes() - before >= 60 * MIB
    assert block.memory[63 * MIB :] == content
    device.free(block)
    assert resident_bytes() - before <= 8 * MIB
    assert (counts.used_bytes(0), device.blocks) == (0, {})


def test_an_allocation_beyond_the_memory_is_refused_and_leaves_what_was_there(counts: EmulatedMemoryUsage) -> None:
    device = EmulatedDevice(0, Emulated(memory_bytes=10_000), counts, 0)
    block = device.allocate(6_000)
    device.copy(block, 0, memoryview(b"mine"))
    with pytest.raises(DeviceFull, match="device 0 has 4000 of its 10000 bytes free, and 4001 are needed"):
        device.allocate(4_001)
    assert (block.memory[:4], counts.used_bytes(0), list(device.blocks)) == (b"mine", 6_000, [block])
    rest = device.allocate(4_000)
    device.free(rest)
    device.free(block)


def test_what_one_process_holds_another_cannot_have_until_it_is_dead(counts: EmulatedMemoryUsage) -> None:
    spec = Emulated(memory_bytes=10_000)
    one, other = EmulatedDevice(1, spec, counts, 0), EmulatedDevice(1, spec, counts, 1)
    block = one.allocate(8_000)
    with pytest.raises(DeviceFull):
        other.allocate(3_000)
    counts.clear(0)
    other.free(other.allocate(3_000))
    block.memory.close()


def test_a_block_with_a_reader_is_not_freed(counts: EmulatedMemoryUsage) -> None:
    device = EmulatedDevice(0, Emulated(memory_bytes=10_000), counts, 0)
    block = device.allocate(100)
    with memoryview(block.memory), pytest.raises(BufferError):
        device.free(block)
    assert counts.used_bytes(0) == 100
    device.free(block)


class FakeTime:
    """Copies take no time at all, so all that passes is the link."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(("degree", "seconds"), [(1, 4.0), (2, 2.0)])
def test_a_copy_is_never_faster_than_the_link_and_links_work_side_by_side(
    counts: EmulatedMemoryUsage, monkeypatch: pytest.MonkeyPatch, degree: int, seconds: float
) -> None:
    clock = FakeTime()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("tangram.managers.models.engine.time", clock)
    spec = Emulated(memory_bytes=MIB, bandwidth=1024.0)
    specs = [EmulatedDevice(index, spec, counts, 0) for index in range(degree)]
    weights = Weights([Piece(str(number), memoryview(bytes(1024))) for number in range(4)])
    placed = place(weights, specs)
    assert clock.now_s - 1000.0 == pytest.approx(seconds)
    for (block, _), device in zip(placed, specs, strict=True):
        device.free(block)


def test_a_link_that_is_faster_than_the_machine_is_not_waited_for(
    counts: EmulatedMemoryUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("slept"))
    device = EmulatedDevice(0, Emulated(memory_bytes=MIB, bandwidth=float("inf")), counts, 0)
    [(block, _)] = place(Weights([Piece("a", memoryview(bytes(1024)))]), [device])
    device.free(block)


@pytest.mark.parametrize("fields", [{"memory_bytes": 0}, {"memory_bytes": 1.5}, {"memory_bytes": 1, "bandwidth": 0.0}])
def test_a_device_that_cannot_be_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        Emulated(**fields)


def test_pieces_are_spread_whole_in_order_and_evenly() -> None:
    weights = Weights(
        [Piece(str(number), memoryview(bytes(256 * size))) for number, size in enumerate((1, 1, 4, 1, 1))]
    )
    names = [[piece.name for piece in part] for part in weights.split(2)]
    assert [name for part in names for name in part] == ["0", "1", "2", "3", "4"]
    assert weights.need(1) == weights.total_bytes == 256 * 8
    assert weights.need(2) == 256 * 6
    assert [len(part) for part in Weights([]).split(4)] == [0, 0, 0, 0]


# ---- PyTorch ------------------------------------------------------------------------------------------------------


def test_devices_of_pytorch_hold_what_is_copied_and_never_too_much() -> None:
    pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")
    device = CudaDevice(0, Cuda(place="cpu", memory_bytes=10_000))
    [(block, _)] = place(Weights([Piece("a", memoryview(bytearray(b"abc")))]), [device])
    assert bytes(block.memory[:3].tolist()) == b"abc"
    with pytest.raises(DeviceFull, match="are needed"):
        device.allocate(10_000)
    device.free(block)
    assert device.blocks == {}


def test_listing_devices_does_not_import_pytorch_in_this_process() -> None:
    if importlib.util.find_spec("torch") is None:
        assert discover() == ()
    else:
        assert all(found.memory_bytes > 0 for found in discover())
