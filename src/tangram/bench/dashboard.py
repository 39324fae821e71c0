"""How fast the dashboard answers a person, with many actions in view.

`tangram serve` runs in a process of its own, on the backend "fake". Clients fill it with actions of several runs and
tasks that have settled; then Chromium opens the dashboard, shows all of them on the timeline, and every interaction is
timed from the input to the frame that shows its effect, while some actions still come and go. `interaction_ms_max` is
the slowest of all, each of which is printed; `longest_task_ms` is the longest stretch in which the page could not have
answered at all.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_most, part
from tangram.bench.callers import MEMORY_MIB, Caller
from tangram.bench.service_process import ServiceProcess
from tangram.managers.work import Close, Exec

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LONGEST = "longest_task"
CORES = 16.0
"""Of the fake machine: fewer than there are clients, so that actions also wait."""
COMMANDS, LIVE_COMMANDS = (
    ("true", "sleep 0.01", "sleep 0.03", "false", "echo word"),
    ("sleep 0.5", "sleep 1", "sleep 2"),
)
TASKS = 3
TELL_EVERY = 100
"""Actions."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    actions: int = 10_000
    clients: int = 48
    live: int = 12
    """Of them, who go on while the dashboard is used."""
    runs: int = 4
    seed: int = 0


FULL = Sizes()
QUICK = Sizes()
"""The same: the goal is of so many actions in view, and it ends within a minute."""


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    found = Findings()
    chromium, missing = browser()
    if missing:
        found.notes.append(f"Nothing is measured: {missing}.")
        return found.result("dashboard", "measured", sizes)
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        asyncio.run(_measure(sizes, Path(folder), chromium, found, progress))
    return found.result("dashboard", "measured", sizes)


def browser() -> tuple[str, str]:
    """The path of a browser, or what is missing."""
    if importlib.util.find_spec("playwright") is None:
        return "", "playwright is not installed (pip install playwright)"
    path = next(filter(None, map(shutil.which, BROWSERS)), "")
    return path, "" if path else "there is no Chromium (apt-get install chromium)"


async def _measure(sizes: Sizes, folder: Path, chromium: str, found: Findings, progress: Progress) -> None:
    from tangram.bench.dashboard_probe import measure as probed

    tables = {"node": {"backend": "fake", "cores": CORES, "memory": f"{MEMORY_MIB * (sizes.clients + 4)}MiB"}}
    async with ServiceProcess(folder, tables) as service:
        await fill(service.url, sizes, part(progress, 0.0, 0.6))
        living = asyncio.create_task(_live(service.url, sizes))
        try:
            took = await probed(service.url, "", chromium)
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
        progress(1.0)
    interactions = {name: ms for name, ms in took.items() if name != LONGEST}
    found.add("interaction_ms_max", max(interactions.values()), at_most(200.0))
    for name, ms in took.items():
        found.add(f"{name}_ms", ms, PRINTED)
    slowest = max(interactions, key=lambda name: interactions[name])
    found.notes.append(f"{sizes.actions} actions in view; the slowest of {len(interactions)} interactions: {slowest}.")


async def _live(url: str, sizes: Sizes) -> None:
    """Actions that last long enough to be seen, until it is cancelled."""
    async with Caller(url) as caller, asyncio.TaskGroup() as group:
        for number in range(sizes.live):
            group.create_task(_client(caller, sizes, number, itertools.count(), LIVE_COMMANDS, lambda share: None))


async def fill(url: str, sizes: Sizes, progress: Progress) -> None:
    """So many actions that have settled, all sandboxes closed again."""
    left = iter(range(sizes.actions - 2 * sizes.clients))  # each opens a sandbox and closes it
    async with Caller(url) as caller, asyncio.TaskGroup() as group:
        for number in range(sizes.clients):
            group.create_task(_client(caller, sizes, number, left, COMMANDS, progress))


async def _client(
    caller: Caller,
    sizes: Sizes,
    number: int,
    left: Iterator[int],
    commands: tuple[str, ...],
    progress: Callable[[float], None],
) -> None:
    draw = random.Random(f"{sizes.seed} {number}")
    box = await caller.opened()
    for index in left:  # shared by all clients
        work = Exec(command=draw.choice(commands))
        run, task = f"run-{number % sizes.runs}", f"task-{number % TASKS}"
        await caller.do(work, box, run=run, task=task, trajectory=f"t{number}")
        if index % TELL_EVERY == 0:
            progress(index / sizes.actions)
    await caller.do(Close(), box)
