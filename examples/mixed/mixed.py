"""Three runs at once on shared pools: coding in sandboxes, search under a quota, teachers on emulated devices.

    .venv/bin/python examples/mixed/mixed.py --report build/mixed.html

The same agents run on two sides, one after the other. *Shared*: one connection with all pools, every use an action. *As
today*: a device for each teacher, and uncoordinated calls of the search API. This module owns the command and the order
of events; the other modules in this folder own the parts.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

# Must precede the import of numpy. In parallel with other programs its threads mostly wait for each other.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import aiohttp
import coding
import distillation
import msgspec
import search
from acts import RUNS, Act, RunNumbers
from devices import Timeline, read
from report import write
from server import library
from sides import SHARED, TODAY, Setting, Side, as_today, shared
from teachers import DOMAINS, TOLERANCE, Reference, TeacherCall, make

from tangram.bench.base import default_backend
from tangram.cli import show
from tangram.errors import TangramError
from tangram.files.atomic_file import check_writable
from tangram.reports import live, terminal
from tangram.reports.formatting import percent, seconds

EXIT_WRONG, EXIT_ERROR, EXIT_INTERRUPTED = 1, 2, 130
INSTALL = ".venv/bin/pip install -c constraints.txt '.[transformers]'"
SETUP_SHARE = 0.5
"""Approximate share of the total time: PyTorch is imported once on each side, by the fork server of its devices."""
EXAMPLES = f"""\
examples:
  .venv/bin/python examples/mixed/mixed.py --report build/mixed.html
  .venv/bin/python examples/mixed/mixed.py --quick --json

needs root (sandboxes) and the extra `transformers`: {INSTALL}
"""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    teachers: int = 6
    devices: int = 2
    """Shared by the teachers; as today there is one per teacher."""
    coding: int = 6
    searching: int = 8
    distilling: int = 12
    """Trajectories of this run; the same for the next fields."""
    turns: int = 3
    """Per search trajectory."""
    rollouts: int = 5
    """Per distillation trajectory."""
    units: int = 10
    window_s: float = 1.0
    """Window of the API quota."""


FULL = Sizes()
QUICK = Sizes(teachers=2, devices=1, coding=2, searching=3, distilling=4, turns=2, rollouts=2)
"""Two teachers: importing PyTorch takes most of the time."""


class SideNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one side."""

    runs: dict[str, RunNumbers]
    step_s: float
    """From the start of the first trajectory to the end of the last."""
    served: int
    rejected: int
    """Requests that the API answered, and those with a 429."""
    devices: int
    device_use: float
    """Share of their time in which a call held them."""
    restores: int
    """Copies of a teacher to a device."""
    answers: int
    answers_wrong: int
    """Answers of teachers: all, and those that differ from the reference."""
    answer_error_max: float


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One side, with all data for the report."""

    numbers: SideNumbers
    acts: list[Act]
    timeline: Timeline


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    quick: bool
    sizes: Sizes
    sides: dict[str, SideNumbers]


# ---- the two sides ----------------------------------------------------------------------------------------------


class Scripts:
    """The behaviour of all agents, drawn from the seed: the same for both sides."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        books, names = library(seed), DOMAINS[: sizes.teachers]
        self.coding = [coding.draw(number, seed, books) for number in range(sizes.coding)]
        self.search = [
            search.draw(number, seed, books, turns=sizes.turns, judges=names) for number in range(sizes.searching)
        ]
        self.distillation = [
            distillation.draw(number, seed, rollouts=sizes.rollouts, teachers=names)
            for number in range(sizes.distilling)
        ]

    @property
    def actions(self) -> int:
        each = (self.coding, self.search, self.distillation)
        counts: list[int] = [script.actions for scripts in each for script in scripts]
        return sum(counts)

    def play(self, side: Side) -> dict[str, list[Awaitable[float]]]:
        """Return trajectories that have not started, by run."""
        return {
            coding.RUN: [coding.play(side, script) for script in self.coding],
            search.RUN: [search.play(side, script) for script in self.search],
            distillation.RUN: [distillation.play(side, script) for script in self.distillation],
        }


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a side, collected before it was closed."""

    acts: list[Act]
    teacher_calls: list[TeacherCall]
    runs: dict[str, RunNumbers]
    step_s: float
    served: int
    rejected: int
    devices: int


async def play(side: Side, scripts: Scripts) -> Raw:
    """Run all three runs concurrently."""
    side.acts.begin()
    began = time.monotonic()
    by_run = scripts.play(side)
    rewards = iter(await side.client.gather(*(each for trajectories in by_run.values() for each in trajectories)))
    step_s = time.monotonic() - began
    served = await side.server.served()
    return Raw(
        acts=side.acts.rows,
        teacher_calls=side.teacher_calls,
        runs={run: side.acts.numbers(run, [next(rewards) for _ in each]) for run, each in by_run.items()},
        step_s=step_s,
        served=len(served.arrivals),
        rejected=served.rejected,
        devices=side.devices,
    )


async def play_both(setting: Setting, scripts: Scripts, progress: Progress) -> dict[str, Raw]:
    """Open both sides concurrently, because that takes long, and play them one after the other."""
    open_by_side = {SHARED: shared, TODAY: as_today}
    opened = asyncio.Barrier(len(open_by_side))
    ended = {name: asyncio.Event() for name in open_by_side}
    raw: dict[str, Raw] = {}

    async def one(name: str, before: asyncio.Event | None) -> None:
        async with open_by_side[name](setting, lambda: progress.acted(name)) as side:
            await side.warm([checkpoint.name for checkpoint in setting.checkpoints])
            await opened.wait()
            if before is not None:
                await before.wait()
            raw[name] = await play(side, scripts)
        ended[name].set()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(one(SHARED, None))
            group.create_task(one(TODAY, ended[SHARED]))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return raw


class Progress:
    def __init__(self, tell: live.ProgressCallback | None, scripts: Scripts) -> None:
        self._tell = tell
        self._done = 0
        self._each = scripts.actions

    def say(self, share: float, words: str) -> None:
        if self._tell is not None:
            self._tell(share, 1, words)

    def acted(self, side: str) -> None:
        self._done += 1
        share = SETUP_SHARE + (1.0 - SETUP_SHARE) * self._done / (2 * self._each)
        self.say(share, f"{side}: {(self._done - 1) % self._each + 1} of {self._each} actions")


# ---- what comes of it -------------------------------------------------------------------------------------------


def measure(sizes: Sizes, seed: int, tell: live.ProgressCallback | None) -> dict[str, Played]:
    scripts = Scripts(sizes, seed)
    progress = Progress(tell, scripts)
    with tempfile.TemporaryDirectory(prefix="tangram-mixed-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # programs in sandboxes run as another user
        # PyTorch creates this folder in any case and does not remove it.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")
        progress.say(0.0, "PyTorch is being imported")
        checkpoints = [make(domain, seed, folder) for domain in DOMAINS[: sizes.teachers]]
        setting = Setting(
            seed=seed,
            checkpoints=checkpoints,
            devices=sizes.devices,
            units=sizes.units,
            window_s=sizes.window_s,
            folder=folder,
        )
        raw = asyncio.run(play_both(setting, scripts, progress))
        progress.say(0.99, "comparing the answers of the teachers with the reference")
        reference = Reference(checkpoints)
        return {side: _played(raw[side], setting.recording(side), reference) for side in (SHARED, TODAY)}


def _played(raw: Raw, recording: Path, reference: Reference) -> Played:
    errors = [reference.error(call) for call in raw.teacher_calls]
    timeline = read(recording, raw.acts, devices=raw.devices, step_s=raw.step_s)
    numbers = SideNumbers(
        runs=raw.runs,
        step_s=raw.step_s,
        served=raw.served,
        rejected=raw.rejected,
        devices=raw.devices,
        device_use=timeline.busy_share(raw.step_s),
        restores=timeline.restores,
        answers=len(errors),
        answers_wrong=sum(not error <= TOLERANCE for error in errors),
        answer_error_max=max(errors),
    )
    return Played(numbers=numbers, acts=raw.acts, timeline=timeline)


def print_tables(outcome: Outcome) -> None:
    console = terminal.stdout_console()
    table = terminal.table("Every run on both sides")
    table.add_column("run")
    table.add_column("side")
    for head in ("actions", "mean ACT", "p95", "waiting", "overhead", "executing", "lost", "reward"):
        table.add_column(head, justify="right")
    for run in RUNS:
        for side, numbers in outcome.sides.items():
            own = numbers.runs[run]
            shares = (own.waiting_share, own.overhead_share, own.executing_share)
            table.add_row(
                run, side, str(own.actions), seconds(own.act_mean_s), seconds(own.act_p95_s),
                *map(percent, shares), str(own.lost), f"{own.reward_mean:.3f}",
                end_section=side == TODAY,
            )  # fmt: skip
    console.print(table)
    console.print(_whole(outcome))
    console.print(
        "Sandboxes, HTTP, weights and forward passes are real; devices are emulated, agents are scripted and sleep"
        " while they think.",
        highlight=False,
    )


def _whole(outcome: Outcome) -> Any:
    table = terminal.table("All three together")
    table.add_column("")
    for side in outcome.sides:
        table.add_column(side, justify="right")
    rows: dict[str, Callable[[SideNumbers], str]] = {
        "step": lambda numbers: seconds(numbers.step_s),
        "429s of the search API": lambda numbers: str(numbers.rejected),
        "calls lost": lambda numbers: str(sum(run.lost for run in numbers.runs.values())),
        "devices": lambda numbers: str(numbers.devices),
        "of their time, in use": lambda numbers: percent(numbers.device_use),
        "teachers copied to a device": lambda numbers: str(numbers.restores),
        "answers of teachers verified": lambda numbers: (
            f"{numbers.answers - numbers.answers_wrong} of {numbers.answers}"
        ),
    }
    for label, show_number in rows.items():
        table.add_row(label, *(show_number(numbers) for numbers in outcome.sides.values()))
    return table


# ---- the command ------------------------------------------------------------------------------------------------


def missing() -> str:
    """Return what prevents the example from running here, and what to do; empty if nothing."""
    absent = [name for name in ("torch", "transformers") if not _is_there(name)]
    if absent:
        return f"{' and '.join(absent)} cannot be imported; install what the teachers need: {INSTALL}"
    _, why = default_backend()
    return f"{why}; `tangram doctor` says what works on this machine and what to install" if why else ""


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mixed.py",
        description="Coding, search and distillation at once: on shared pools, and as today.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer agents, two teachers on one device")
    parser.add_argument("--seed", type=int, default=0, help="of the agents, the library and the weights (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page to open in a browser")
    given = parser.parse_args(words)
    if given.seed < 0:
        parser.error("--seed: expected a whole number, at least 0")
    return given


def run(options: argparse.Namespace) -> int:
    if options.report is not None:
        check_writable("report", options.report)
    sizes = QUICK if options.quick else FULL
    with live.progress("mixed", unit="") as tell:
        played = measure(sizes, options.seed, tell)
    numbers = {side: each.numbers for side, each in played.items()}
    outcome = Outcome(seed=options.seed, quick=options.quick, sizes=sizes, sides=numbers)
    if options.report is not None:
        write(options.report, outcome, played)
    if options.json:
        show.print_json(outcome)
    else:
        print_tables(outcome)
        if options.report is not None:
            show.print_report_path(options.report)
    return EXIT_WRONG if any(side.answers_wrong for side in numbers.values()) else 0


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    why = missing()
    if why:
        print(f"mixed: {why}", file=sys.stderr)
        return EXIT_ERROR
    try:
        return run(options)
    except (TangramError, aiohttp.ClientError) as error:
        print(f"mixed: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
