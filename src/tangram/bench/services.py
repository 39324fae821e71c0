"""Six model services on two devices, against one device each.

The devices are emulated: their memory is real, and weights are really copied there and freed; their size, the speed of
their link and the duration of a call are settings. Both sides get the same calls at the same times: Poisson arrivals
for each service, as for reward models, a few percent of a device each. Every answer is a checksum of all weights on the
device.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import statistics
import time
import zlib

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_least, at_most, paired_ratio_of_values, step_counter
from tangram.bench.services_engine import content
from tangram.client.client import Client, connect
from tangram.client.transport import LocalTransport
from tangram.managers.models import Emulated, ModelManager, Service
from tangram.managers.work import MIB


class ServicesSizes(msgspec.Struct, frozen=True, kw_only=True):
    services: int = 6
    devices: int = 2
    weights_bytes: int = 32 * MIB
    bandwidth: float = 25e9
    call_s: float = 0.06
    load: float = 0.05
    """Share of one device, per service."""
    calls: int = 150
    seeds: int = 2
    large_bytes: int = 256 * MIB
    """Size of the services that measure the bandwidth."""
    restores: int = 20
    resident_calls: int = 1000


LABEL = "emulated"
FULL = ServicesSizes()
QUICK = ServicesSizes(calls=40, seeds=1, restores=6, resident_calls=200)

SPARE_BYTES = 1 * MIB


async def measure(sizes: ServicesSizes, run: BenchRun) -> None:
    advance = step_counter(run.progress, 2 * sizes.seeds + 2)
    static, shared, restores = [], [], []
    for seed in range(sizes.seeds):
        act_s, _ = await _run_calls(sizes, sizes.services, seed)
        static.append(act_s)
        advance("")
        act_s, share = await _run_calls(sizes, sizes.devices, seed)
        shared.append(act_s)
        restores.append(share)
        advance("")
    run.add("act_ratio", paired_ratio_of_values(static, shared), at_least(0.9))
    run.add("devices_saved", 1.0 - sizes.devices / sizes.services, PRINTED)
    run.add("act_mean_s_static", statistics.fmean(static), PRINTED)
    run.add("act_mean_s_shared", statistics.fmean(shared), PRINTED)
    run.add("restores_per_call", statistics.fmean(restores), PRINTED)
    run.add("load", sizes.load * sizes.services / sizes.devices, PRINTED)
    run.add("restore_bandwidth_share", await _measure_bandwidth(sizes), at_least(0.5))
    advance("")
    run.add("resident_overhead_ms_p50", await _measure_resident(sizes), at_most(2.0))
    advance("")
    run.notes.append("load: use of the two devices, without restores.")


def _service(number: int, size: int) -> Service:
    arguments = {"seed": number, "size": size}
    return Service(name=f"model-{number}", engine="tangram.bench.services_engine:Checksum", arguments=arguments)


async def _run_calls(sizes: ServicesSizes, devices: int, seed: int) -> tuple[float, float]:
    """Return the mean ACT, and restores per call."""
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
    began_at_s = time.monotonic()
    result = await t.infer(name, {"seconds": seconds}, run=name)
    act_s = time.monotonic() - began_at_s
    assert result.json() == checksum, f"{name} answered from other weights than its own"
    return act_s


def _models(t: Client) -> ModelManager:
    assert isinstance(t.transport, LocalTransport) and t.transport.models is not None
    return t.transport.models


async def _measure_bandwidth(sizes: ServicesSizes) -> float:
    """Measure two services that alternate on one device; the first copies of each do not count."""
    services = [_service(number, sizes.large_bytes) for number in range(2)]
    emulated = [Emulated(memory_bytes=sizes.large_bytes + SPARE_BYTES, bandwidth=1e15)]
    shares = []
    async with connect(backend="process", services=services, devices=emulated) as t:
        models, memory = _models(t), _MemoryCopy(sizes.large_bytes)
        for number in range(sizes.restores + 2):
            before = models.statistics().load_s
            await models.restore(services[number % 2].name, (0,))
            restore_s = models.statistics().load_s - before
            if number >= 2:
                shares.append(memory.copy() / restore_s)
    return statistics.median(shares)


class _MemoryCopy:
    """Two memory blocks that are already mapped."""

    def __init__(self, size: int) -> None:
        self._from, self._to = (mmap.mmap(-1, size) for _ in range(2))
        for piece in (self._from, self._to):
            for offset in range(0, size, MIB):
                piece[offset : offset + MIB] = random.randbytes(MIB)

    def copy(self) -> float:
        """Copy, and return the seconds."""
        began_at_s = time.perf_counter()
        memoryview(self._to)[:] = memoryview(self._from)
        return time.perf_counter() - began_at_s


async def _measure_resident(sizes: ServicesSizes) -> float:
    seconds = []
    emulated = [Emulated(memory_bytes=2 * MIB, bandwidth=1e15)]
    async with connect(backend="process", services=[_service(0, MIB)], devices=emulated) as t:
        for number in range(sizes.resident_calls + 20):
            began_at_s = time.perf_counter()
            (await t.infer("model-0", {"checks": False})).check()
            if number >= 20:
                seconds.append(time.perf_counter() - began_at_s)
    return statistics.median(seconds) * 1e3
