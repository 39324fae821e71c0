"""The latency of the dashboard with many actions in view.

`tangram serve` runs in a separate process on the backend "fake". Clients fill it with settled actions of several runs
and tasks; then Chromium opens the dashboard and shows all of them on the timeline. Every interaction is timed from the
input to the frame that shows its effect, while further actions arrive and settle.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import random
import shutil
from collections.abc import Callable, Iterator

import msgspec

from tangram.bench.base import PRINTED, BenchRun, Progress, at_most, subprogress
from tangram.bench.service_process import ServiceProcess
from tangram.bench.shared_http_client import MEMORY_MIB, SharedHttpClient
from tangram.managers.work import Close, Exec

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LONGEST = "longest_task"
CORES = 16.0
"""Cores of the fake machine: fewer than the clients, so that actions also wait."""
COMMANDS, LIVE_COMMANDS = (
    ("true", "sleep 0.01", "sleep 0.03", "false", "echo word"),
    ("sleep 0.5", "sleep 1", "sleep 2"),
)
TASKS = 3
PROGRESS_EVERY = 100
"""Settled actions between two reports."""


class DashboardSizes(msgspec.Struct, frozen=True, kw_only=True):
    actions: int = 10_000
    clients: int = 48
    live: int = 12
    """Clients that continue while the dashboard is used."""
    runs: int = 4
    seed: int = 0


LABEL = "measured"
FULL = DashboardSizes()
QUICK = DashboardSizes()
"""Equal to FULL: the goal applies to this number of actions, and the benchmark takes less than a minute."""


def find_browser() -> tuple[str, str]:
    """Return the path of a browser, or what is missing."""
    if importlib.util.find_spec("playwright") is None:
        return "", "playwright is not installed (pip install playwright)"
    path = next(filter(None, map(shutil.which, BROWSERS)), "")
    return path, "" if path else "there is no Chromium (apt-get install chromium)"


async def measure(sizes: DashboardSizes, run: BenchRun) -> None:
    from tangram.bench import dashboard_probe

    chromium, missing = find_browser()
    if missing:
        run.notes.append(f"Nothing is measured: {missing}.")
        return
    tables = {"node": {"backend": "fake", "cores": CORES, "memory": f"{MEMORY_MIB * (sizes.clients + 4)}MiB"}}
    async with ServiceProcess(run.folder, tables) as service:
        await fill_history(service.url, sizes, subprogress(run.progress, 0.0, 0.6))
        living = asyncio.create_task(_run_live_actions(service.url, sizes))
        try:
            took = await dashboard_probe.measure(service.url, "", chromium)
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
    interactions = {name: ms for name, ms in took.items() if name != LONGEST}
    run.add("interaction_ms_max", max(interactions.values()), at_most(200.0))
    for name, ms in took.items():
        run.add(f"{name}_ms", ms, PRINTED)
    slowest = max(interactions, key=lambda name: interactions[name])
    run.notes.append(f"{sizes.actions} actions in view; the slowest of {len(interactions)} interactions: {slowest}.")


async def _run_live_actions(url: str, sizes: DashboardSizes) -> None:
    """Run actions that are long enough to be visible, until cancelled."""
    async with SharedHttpClient(url) as caller, asyncio.TaskGroup() as group:
        for number in range(sizes.live):
            group.create_task(_client(caller, sizes, number, itertools.count(), LIVE_COMMANDS, lambda share: None))


async def fill_history(url: str, sizes: DashboardSizes, progress: Progress) -> None:
    """Run actions until they have settled, and close all sandboxes."""
    left = iter(range(sizes.actions - 2 * sizes.clients))  # each client opens a sandbox and closes it
    async with SharedHttpClient(url) as caller, asyncio.TaskGroup() as group:
        for number in range(sizes.clients):
            group.create_task(_client(caller, sizes, number, left, COMMANDS, progress))


async def _client(
    caller: SharedHttpClient,
    sizes: DashboardSizes,
    number: int,
    left: Iterator[int],
    commands: tuple[str, ...],
    progress: Callable[[float], None],
) -> None:
    draw = random.Random(f"{sizes.seed} {number}")
    sandbox = await caller.open_sandbox()
    for index in left:  # shared by all clients
        work = Exec(command=draw.choice(commands))
        run, task = f"run-{number % sizes.runs}", f"task-{number % TASKS}"
        await caller.run_action(work, sandbox, run=run, task=task, trajectory=f"t{number}")
        if index % PROGRESS_EVERY == 0:
            progress(index / sizes.actions)
    await caller.run_action(Close(), sandbox)
