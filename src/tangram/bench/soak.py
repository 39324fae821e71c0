"""Soak test of the shared service: memory and resources under constant load.

The service runs in a separate process, as `tangram serve` does, and clients of all kinds use it without a pause. The
service keeps the last settled actions for its dashboard; the warm-up fills that history. It also keeps the trajectories
of the last hour, which no warm-up fills: every sandbox of the load is new, so their memory is part of the growth.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from tangram.bench.base import PRINTED, BenchRun, Progress, at_most
from tangram.bench.service_process import ServiceProcess
from tangram.client.client import Client, connect
from tangram.client.functions import function
from tangram.errors import ManagerError, TangramError
from tangram.managers.http import HttpClient, HttpError
from tangram.managers.sandboxes.cgroups.hierarchies import find_hierarchies
from tangram.managers.work import MIB, Exec
from tangram.processes.process_tree import processes_below
from tangram.runtime.views import TIMELINE_ROWS_MAX
from tangram.runtime.wire import Submission

OPTIONS = ("backend",)

MEMORY = "32MiB"
"""Memory per sandbox."""
QUOTA = "search"
FILLING, FILLERS = "filling", 16
"""A quota for the warm-up only, and its concurrent users."""
SAMPLE_S = 0.25
IDLE_S_MAX = 20.0
"""Time for work to end after the load has stopped."""
POLL_S = 0.25
STABLE_POLLS = 4
"""Number of equal consecutive counts after which the service counts as idle."""
KEPT_S = 5.0
"""Retention of results that were not fetched because their clients disconnected."""
BYTES = 40_000
"""Size of a file that is written and read back."""
VANISH_S = 0.05
CORES = 2.0
"""Cores of the service."""
JSON = {"content-type": "application/json"}


class SoakSizes(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 600.0
    """Time under load, without the warm-up."""
    warm_s: float = 20.0
    """Warm-up under the whole load, after the history is filled."""
    remembered: int = TIMELINE_ROWS_MAX
    """Actions that fill the history."""
    clients: int = 2
    """Clients of each kind."""
    seed: int = 0


LABEL = "measured"
FULL = SoakSizes()
QUICK = SoakSizes(seconds=60.0, warm_s=5.0)


async def measure(sizes: SoakSizes, run: BenchRun) -> None:
    for name in ("state", "tmp"):
        (run.folder / name).mkdir(mode=0o711)
    tables: dict[str, dict[str, Any]] = {
        "service": {"sandboxes_on_stop": "close", "results_keep_s": KEPT_S},
        "node": {"backend": run.backend, "cores": CORES, "state": str(run.folder / "state")},
        "quotas": {QUOTA: 4, FILLING: FILLERS},
    }
    service = ServiceProcess(run.folder, tables, watched=True, variables={"TMPDIR": str(run.folder / "tmp")})
    async with service:
        footprint = Footprint(service, run.folder)
        load = SoakLoad(service.url, sizes)
        await load.fill(sizes.remembered)
        run.progress(0.1)
        await load.run(sizes.warm_s)
        before, descriptors = await footprint.wait_until_idle(), footprint.descriptors()
        samples = await _sample_memory(service, load, sizes.seconds, run.progress)
        after = await footprint.wait_until_idle()
        more = footprint.descriptors() - descriptors
        inside = await service.internals()
    add_metrics(run, samples, before, after)
    done = sum(load.done.values())
    run.add("actions", float(done), PRINTED)
    run.notes.append(
        f"Backend {run.backend}. Completed, by kind: "
        + ", ".join(f"{name} {count}" for name, count in load.done.items())
    )
    run.notes += load.notes
    if after["descriptors"] > before["descriptors"]:
        run.notes.append("new descriptors: " + ", ".join(sorted(more.elements())))
    if load.failed:
        run.notes.append(f"{len(load.failed)} of them failed, the first with: {load.failed[0]}")
    run.add("failed", float(len(load.failed)), at_most(0.0))
    run.notes += [f"allocated since the warm-up: {place}" for place in inside.places]


async def _sample_memory(service: ServiceProcess, load: SoakLoad, seconds: float, progress: Progress) -> list[int]:
    samples = []

    async def sample() -> None:
        began_at_s = time.monotonic()
        while True:
            samples.append(service.rss_bytes())
            progress(0.1 + 0.9 * min(1.0, (time.monotonic() - began_at_s) / seconds))
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    try:
        await load.run(seconds)
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    return samples


def add_metrics(run: BenchRun, samples: list[int], before: dict[str, int], after: dict[str, int]) -> None:
    """Add the growth of memory from its samples, and leaks from the counts before and after."""
    run.add("rss_growth", growth(samples), at_most(0.05))
    run.add("leaks", float(sum(max(0, after[kind] - before[kind]) for kind in before)), at_most(0.0))
    run.add("rss_mib", statistics.median(samples[-max(1, len(samples) // 4) :]) / MIB, PRINTED)
    for kind in before:
        run.add(f"left_{kind}", float(after[kind] - before[kind]), PRINTED)


def growth(samples: list[int]) -> float:
    """Return the last quarter over the second, as a share."""
    quarter = max(1, len(samples) // 4)
    return statistics.median(samples[-quarter:]) / statistics.median(samples[quarter : 2 * quarter] or samples) - 1.0


# ---- resources ------------------------------------------------------------------------------------------------------


class Footprint:
    """Every resource that a service could leak."""

    def __init__(self, service: ServiceProcess, folder: Path) -> None:
        self._service = service
        self._folder = folder

    async def wait_until_idle(self) -> dict[str, int]:
        """Wait until the counts are stable, at most IDLE_S_MAX."""
        deadline = time.monotonic() + IDLE_S_MAX
        counts, still = await self._counts(), 0
        while still < STABLE_POLLS and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            now = await self._counts()
            still = still + 1 if now == counts else 0
            counts = now
        return counts

    async def _counts(self) -> dict[str, int]:
        inside = await self._service.internals()
        return {
            "descriptors": len(self._service.descriptors()),
            "tasks": inside.tasks,
            "processes": sum(len(processes_below(pid)) for pid in (self._service.pid, *self.spawners())),
            "control_groups": self._control_groups(),
            "mounts": self._mounts(),
            "sandbox_files": sum(1 for _ in (self._folder / "state").rglob("*")),
            "temporary_files": sum(1 for _ in (self._folder / "tmp").rglob("*")),
        }

    def descriptors(self) -> Counter[str]:
        """Return what the descriptors refer to, without numbers that are unique to one instance."""
        return Counter(re.sub(r"\d+", "N", each) for each in self._service.descriptors())

    def _control_groups(self) -> int:
        owners = self._folder / "state" / "owners"
        if not owners.is_dir():
            return 0
        places = dict.fromkeys(find_hierarchies().by_controller.values())
        roots = [place / "tangram" / owner.name for owner in owners.iterdir() for place in places]
        return sum(1 for root in roots for _, folders, _ in os.walk(root) for _ in folders)

    def spawners(self) -> list[int]:
        """Return the spawners of the service's sandboxes. They are not its child processes; their process ids are in
        their lock files."""
        locks = (self._folder / "state" / "owners").glob("*/kept/spawner.lock")
        return [int(pid) for lock in locks if (pid := lock.read_text().strip()).isdigit()]

    def _mounts(self) -> int:
        """Mounts in the service's mount namespace."""
        text = Path(f"/proc/{self._service.pid}/mountinfo").read_text()
        return sum(f" {self._folder}/" in line for line in text.splitlines())


# ---- the load -------------------------------------------------------------------------------------------------------


@function(cpus=0.5, memory="256MiB", max_instances=2, idle_s=5.0)
def double(number: int) -> int:
    return 2 * number


class SoakLoad:
    """Clients of all kinds."""

    def __init__(self, url: str, sizes: SoakSizes) -> None:
        self._url = url
        self._sizes = sizes
        self._draw = random.Random(sizes.seed)
        self._numbers = itertools.count(1)
        self.done: dict[str, int] = {}
        """Rounds by kind."""
        self.failed: list[str] = []
        self.notes: list[str] = []
        self._kinds: dict[str, Callable[[Client], Awaitable[None]]] = {
            "sandbox": self._sandbox,
            "files": self._files,
            "quota": self._quota,
            "cancelled": self._cancelled,
            "followed": self._followed,
            "vanished": self._vanished,
        }
        self._tried_functions = False

    async def fill(self, count: int) -> None:
        """Fill the service's history with the cheapest actions that get a grant, as those of the load do; an action
        without a grant takes less memory."""
        left = iter(range(count))

        async def use_quota(t: Client) -> None:
            for _ in left:  # shared by all
                async with t.quota(FILLING):
                    pass

        async with connect(self._url) as t:
            await asyncio.gather(*(use_quota(t) for _ in range(FILLERS)))

    async def run(self, seconds: float) -> None:
        """Run all kinds concurrently for `seconds`, then until each has finished its round."""
        end = time.monotonic() + seconds
        async with connect(self._url) as t:
            await self._try_functions(t)
            clients = [self._repeat(t, name, end) for name in self._kinds for _ in range(self._sizes.clients)]
            await asyncio.gather(*clients)

    async def _repeat(self, t: Client, name: str, end: float) -> None:
        while time.monotonic() < end:
            try:
                await self._kinds[name](t)
            except TangramError as error:
                self.failed.append(f"{name}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)
            self.done[name] = self.done.get(name, 0) + 1

    async def _try_functions(self, t: Client) -> None:
        if self._tried_functions:
            return
        self._tried_functions = True
        try:
            await self._function(t)
        except Exception as error:
            self.notes.append(f"Functions are left out: {error}")
        else:
            self._kinds["function"] = self._function

    async def _sandbox(self, t: Client) -> None:
        number = next(self._numbers)
        async with t.sandbox(memory=MEMORY, trajectory=f"t{number}") as sandbox:
            for _ in range(self._draw.randint(1, 5)):
                _require((await sandbox.exec("echo word; exit 3")).exit_code, 3)
            session = sandbox.session()
            _require((await session.exec("cd / && pwd")).stdout, "/\n")

    async def _files(self, t: Client) -> None:
        content = self._draw.randbytes(BYTES)
        async with t.sandbox(memory=MEMORY) as sandbox:
            await sandbox.write("folder/file", content)
            _require(await sandbox.read("folder/file"), content)
            _require([entry.name for entry in await sandbox.list("folder")], ["file"])
            with tempfile.TemporaryDirectory(prefix="tangram-bench-") as local:
                await sandbox.download("folder", local)
                await sandbox.upload(f"{local}/folder", "again")
            _require(await sandbox.read("again/folder/file"), content)
            await sandbox.delete("folder")

    async def _quota(self, t: Client) -> None:
        async with t.quota(QUOTA):
            await asyncio.sleep(self._draw.uniform(0.0, 0.02))

    async def _cancelled(self, t: Client) -> None:
        async with t.sandbox(memory=MEMORY) as sandbox:
            running = asyncio.create_task(sandbox.exec("sleep 100 & sleep 100"))
            await asyncio.sleep(self._draw.uniform(0.0, 0.2))
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    async def _followed(self, t: Client) -> None:
        output: list[str | bytes] = []
        async with t.sandbox(memory=MEMORY) as sandbox:
            command = "for i in 1 2 3 4 5; do echo $i; sleep 0.02; done"
            await sandbox.exec(command, on_output=lambda stream, data: output.append(data))
        _require(len(output) > 0, True)

    async def _vanished(self, t: Client) -> None:
        """A separate client that is cut off while it waits, and never fetches its result."""
        http = HttpClient()
        async with t.sandbox(memory=MEMORY) as sandbox:
            action_id = f"vanished-{os.getpid()}-{next(self._numbers)}"
            submission = Submission(id=action_id, work=Exec(command="sleep 0.1"), sandbox=sandbox.name)
            with contextlib.suppress(HttpError):
                url, body = f"{self._url}/v1/actions?wait_s=20", msgspec.json.encode(submission)
                try:
                    response = await http.request(
                        "POST", url, timeout_s=VANISH_S, bytes_max=1 << 20, content=body, headers=JSON
                    )
                finally:
                    await http.close()
                raise ManagerError(f"expected no answer yet, got {response.status}", retry=False)

    async def _function(self, t: Client) -> None:
        number = self._draw.randrange(1000)
        value: int = await t.call(double, number)
        _require(value, 2 * number)


def _require(actual: object, expected: object) -> None:
    if actual != expected:
        raise ManagerError(f"expected {expected!r}, got {actual!r}", retry=False)
