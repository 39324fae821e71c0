"""Six model services on two devices, against a device for each.

The devices are emulated: their memory is real, the weights are really copied there and freed, their size and the speed
of their link are invented, and the time of a call is as stated. Both sides get the same calls at the same times:
Poisson arrivals for each service, as reward models have them, a few percent of a device each. Every answer is a
checksum of all weights that lie on the device.

`act_ratio` is the mean ACT with a device for each service over that with two for all. `restore_bandwidth_share` is the
speed at which a service is restored over that of copying as much memory in this process, in turn with it.
`resident_overhead_ms_p50` is a call to a service that is there, as an action, less what the call itself lasts.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import statistics
import time
import zlib
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, at_most, paired_values
from tangram.bench.services_engine import content
from tangram.client.client import Client, connect
from tangram.client.transport import LocalTransport
from tangram.managers.models import Emulated, ModelManager, Service
from tangram.managers.work import MIB


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    services: int = 6
    devices: int = 2
    weights_bytes: int = 32 * MIB
    bandwidth: float = 25e9
    call_s: float = 0.06
    load: float = 0.05
    """Of one device, by each service."""
    calls: int = 150
    seeds: int = 2
    large_bytes: int = 256 * MIB
    """Of the services by which the bandwidth is measured."""
    restores: int = 20
    resident_calls: int = 1000


FULL = Sizes()
QUICK = Sizes(calls=40, seeds=1, restores=6, resident_calls=200)

SPARE_BYTES = 1 * MIB


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found = Findings()
    steps = 2 * sizes.seeds + 2
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done / steps, "")

    static, shared, restores = [], [], []
    for seed in range(sizes.seeds):
        act_s, _ = await _played(sizes, sizes.services, seed)
        static.append(act_s)
        step()
        act_s, share = await _played(sizes, sizes.devices, seed)
        shared.append(act_s)
        restores.append(share)
        step()
    found.add("act_ratio", paired_values(static, shared), at_least(0.9))
    found.add("devices_saved", 1.0 - sizes.devices / sizes.services, PRINTED)
    found.add("act_mean_s_static", statistics.fmean(static), PRINTED)
    found.add("act_mean_s_shared", statistics.fmean(shared), PRINTED)
    found.add("restores_per_call", statistics.fmean(restores), PRINTED)
    found.add("load", sizes.load * sizes.services / sizes.devices, PRINTED)
    found.add("restore_bandwidth_share", await _bandwidth(sizes), at_least(0.5))
    step()
    found.add("resident_overhead_ms_p50", await _resident(sizes), at_most(2.0))
    step()
    found.notes.append("load: of the two devices, restores not counted.")
    return found.result("services", "emulated", sizes)


def _service(number: int, size: int) -> Service:
    arguments = {"seed": number, "size": size}
    return Service(name=f"model-{number}", engine="tangram.bench.services_engine:Checksum", arguments=arguments)


async def _played(sizes: Sizes, devices: int, seed: int) -> tuple[float, float]:
    """The mean ACT, and restores per call."""
    services = [_service(number, sizes.weights_bytes) for number in range(sizes.services)]
    emulated = [Emulated(memory_bytes=sizes.weights_bytes + SPARE_BYTES, bandwidth=sizes.bandwidth)] * devices
    checksums = {
        service.name: zlib.crc32(content(number, sizes.weights_bytes)) for number, service in enumerate(services)
    }
    draw = random.Random(seed)
    arrivals = []
    for service in services:
        at = 0.0
        for _ in range(sizes.calls // sizes.services):
            at += draw.expovariate(sizes.load / sizes.call_s)
            arrivals.append((at, service.name))
    async with connect(backend="process", services=services, devices=emulated) as t:
        before = _models(t).statistics().loads
        acts = await t.gather(*(_call(t, at, name, sizes.call_s, checksums[name]) for at, name in arrivals))
        loads = _models(t).statistics().loads - before
    return statistics.fmean(acts), loads / len(arrivals)


async def _call(t: Client, at: float, name: str, seconds: float, checksum: int) -> float:
    await asyncio.sleep(at)
    began = time.monotonic()
    found = await t.infer(name, {"seconds": seconds}, run=name)
    act_s = time.monotonic() - began
    assert found.json() == checksum, f"{name} answered from other weights than its own"
    return act_s


def _models(t: Client) -> ModelManager:
    assert isinstance(t.transport, LocalTransport) and t.transport.models is not None
    return t.transport.models


async def _bandwidth(sizes: Sizes) -> float:
    """Of two services that take turns on one device; the first copies of each are not counted."""
    services = [_service(number, sizes.large_bytes) for number in range(2)]
    emulated = [Emulated(memory_bytes=sizes.large_bytes + SPARE_BYTES, bandwidth=1e15)]
    shares = []
    async with connect(backend="process", services=services, devices=emulated) as t:
        models, memory = _models(t), _Memory(sizes.large_bytes)
        for number in range(sizes.restores + 2):
            before = models.statistics().load_s
            await models.restore(services[number % 2].name, (0,))
            restore_s = models.statistics().load_s - before
            if number >= 2:
                shares.append(memory.copy() / restore_s)
    return statistics.median(shares)


class _Memory:
    """Two pieces of memory that the machine has given already."""

    def __init__(self, size: int) -> None:
        self._from, self._to = (mmap.mmap(-1, size) for _ in range(2))
        for piece in (self._from, self._to):
            for offset in range(0, size, MIB):
                piece[offset : offset + MIB] = random.randbytes(MIB)

    def copy(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        memoryview(self._to)[:] = memoryview(self._from)
        return time.perf_counter() - began


async def _resident(sizes: Sizes) -> float:
    seconds = []
    emulated = [Emulated(memory_bytes=2 * MIB, bandwidth=1e15)]
    async with connect(backend="process", services=[_service(0, MIB)], devices=emulated) as t:
        for number in range(sizes.resident_calls + 20):
            began = time.perf_counter()
            (await t.infer("model-0", {"checks": False})).check()
            if number >= 20:
                seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3
