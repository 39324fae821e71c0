"""`tangram rl`: show the log of a rollout and its timeline, and replay it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cancellation import unwrap_first
from tangram.cli import options, show
from tangram.cli.options import Json
from tangram.errors import InvalidConfig
from tangram.reports import live

if TYPE_CHECKING:
    from tangram.rl.config.rollout_settings import TaskSettings
    from tangram.rl.observe.timeline import RolloutTimeline
    from tangram.rl.rollout.replay import ReplayResult
    from tangram.rl.runs.trajectory_log import TrajectoryLogReader
    from tangram.rl.trajectories.trajectory import Trajectory

EXAMPLES = """[bold]Examples[/bold]

tangram rl rollout examples/rollout.toml  [dim]# play episodes, without training[/dim]

tangram rl show rollout.jsonl

tangram rl check codefix  [dim]# whether a task implements the protocol[/dim]
"""

app = typer.Typer(
    help="Play, show, time and replay rollouts; evaluate checkpoints; check environments; plan hardware.",
    epilog=EXAMPLES,
    no_args_is_help=True,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A trajectory log; it may still be growing.")]
TaskName = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only trajectories of this task.")]

Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Where the commands of environments run: sandbox, docker, or process, which isolates nothing.",
    ),
]

LIMIT = 50
"""Rows of a table by default."""
CONCURRENCY_MAX = 8
"""Concurrent episodes of a replay: enough to hide the waits of an environment, few enough for a laptop."""
SORTS = ("began", "ended", "time", "reward", "turns", "tokens", "waiting", "id")
SHOW = """[bold]Examples[/bold]

tangram rl show rollout.jsonl

tangram rl show rollout.jsonl --task frozenlake --ending truncated --sort -tokens --limit 10

tangram rl show rollout.jsonl frozenlake/3/0.0  [dim]# the whole trajectory, token by token[/dim]
"""


@app.command("show", epilog=SHOW)
def show_log(
    file: File,
    trajectory: Annotated[
        str | None, typer.Argument(metavar="ID", help="A trajectory to show in full, such as frozenlake/3/0.0.")
    ] = None,
    task: TaskName = None,
    ending: Annotated[
        str | None,
        typer.Option(
            "--ending",
            metavar="NAME",
            help="Only trajectories with this end: finished, truncated, stale, cancelled, env_failed or reward_failed.",
        ),
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="ID", help="Only trajectories of this group, such as frozenlake/3.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="KEY", help=f"Sort by {', '.join(SORTS)}; a leading - sorts in descending order."
        ),
    ] = "began",
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Maximum number of rows.")] = LIMIT,
    as_json: Json = False,
) -> None:
    """Show the trajectories of a rollout: how each ended, its reward, its turns, tokens and time."""
    from tangram.cli import rl_screen
    from tangram.rl.runs.trajectory_log import read

    reading = read(file)
    if trajectory is not None:
        (selected,) = _select(reading, [trajectory])
        if as_json:
            rl_screen.print_json(selected)
        else:
            rl_screen.print_trajectory(selected, rl_screen.token_decoder(reading.header))
        return
    listing = rl_screen.TrajectoryListing(task=task, ending=_ending(ending), group=group)
    for record in reading:
        listing.add(record)
    _warn_torn(reading)
    _require_match("task", task, listing.tasks, file)
    _require_match("group", group, listing.groups, file)
    rows = _sorted(listing.rows, sort)[: _limit(limit)]
    if as_json:
        rl_screen.print_json({"trajectories": rows, "summary": listing.summary()})
    else:
        rl_screen.print_listing(file, reading.header, listing, rows)


def _ending(name: str | None) -> str | None:
    from tangram.rl.trajectories.trajectory import Ending

    if name is not None and name not in list(Ending):
        raise InvalidConfig("ending", name, f"one of {', '.join(Ending)}")
    return name


def _limit(limit: int) -> int:
    if limit < 1:
        raise InvalidConfig("limit", limit, "at least 1")
    return limit


def _sorted(rows: list[Any], key: str) -> list[Any]:
    name, largest_first = key.removeprefix("-"), key.startswith("-")
    if name not in SORTS:
        raise InvalidConfig("sort", key, f"one of {', '.join(SORTS)}; with a - before it, the largest first")
    field = {"began": "began_s", "ended": "ended_s", "time": "time_s", "waiting": "waiting_s"}.get(name, name)
    known = [row for row in rows if getattr(row, field) is not None]
    unknown = [row for row in rows if getattr(row, field) is None]
    return sorted(known, key=lambda row: getattr(row, field), reverse=largest_first) + unknown


def _require_match(option: str, value: str | None, names: list[str], file: Path) -> None:
    if value is not None and value not in names:
        raise InvalidConfig(option, value, f"a {option} in {file}{_nearest(value, names)}")


def _nearest(value: str, names: list[str]) -> str:
    import difflib

    from tangram.reports.printable import truncate

    with_prefix = [name for name in names if name.startswith(value)][:3]
    near = with_prefix or difflib.get_close_matches(value, names, n=3, cutoff=0.0)
    return f", such as {', '.join(truncate(each, 80) for each in near)}" if near else ", which holds none"


def _select(reading: TrajectoryLogReader, ids: list[str]) -> list[Trajectory]:
    """The trajectories with these ids. Raises InvalidConfig for an unknown id."""
    from tangram.rl.trajectories.trajectory import Trajectory

    selected = set(ids)
    names: list[str] = []
    trajectories: dict[str, Trajectory] = {}
    for record in reading:
        if isinstance(record, Trajectory):
            names.append(record.id)
            if record.id in selected:
                trajectories[record.id] = record
    _warn_torn(reading)
    for each in ids:
        if each not in trajectories:
            raise InvalidConfig("trajectory", each, f"the id of one in {reading.path}{_nearest(each, names)}")
    return list(trajectories.values())


def _warn_torn(reading: TrajectoryLogReader) -> None:
    if reading.torn:
        typer.echo(f"tangram: {reading.torn}", err=True)


# ---- timeline -------------------------------------------------------------------------------------------------

TIMELINE = """[bold]Examples[/bold]

tangram rl timeline rollout.jsonl

tangram rl timeline rollout.jsonl --html timeline.html  [dim]# every trajectory over time, to zoom into[/dim]

tangram rl timeline rollout.jsonl --perfetto timeline.json  [dim]# the same for ui.perfetto.dev[/dim]
"""


@app.command("timeline", epilog=TIMELINE)
def timeline(
    file: File,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="OUT", help="Write the timeline as a single HTML file."),
    ] = None,
    perfetto: options.Perfetto = None,
    as_json: Json = False,
) -> None:
    """Show when each stage was busy, why it was idle, and where the time of each task went.

    Busy time and the causes of idle time add up to the total time; so do the parts of each task.
    """
    from tangram.cli import rl_screen

    options.check_output_files(html=html, perfetto=perfetto)
    rollout_timeline = _timeline(file)
    if html is not None:
        from tangram.rl.observe.timeline_page import write_timeline

        command = shlex.join(["tangram", "rl", "timeline", str(file), "--html", str(html)])
        write_timeline(html, rollout_timeline, file.name, command)
    if perfetto is not None:
        from tangram.rl.observe.timeline_trace import trace_of_timeline

        trace_of_timeline(rollout_timeline).write(perfetto)
    if as_json:
        rl_screen.print_json(rl_screen.timeline_as_dict(rollout_timeline))
        return
    rl_screen.print_timeline(file, rollout_timeline)
    if html is not None:
        show.print_report_path(html)
    if perfetto is not None:
        show.print_trace_path(perfetto)


def _timeline(file: Path) -> RolloutTimeline:
    from tangram.rl.observe.timeline import timeline_of_log
    from tangram.rl.runs.trajectory_log import read

    reading = read(file)
    timeline = timeline_of_log(reading)
    _warn_torn(reading)
    return timeline


# ---- replay ---------------------------------------------------------------------------------------------------

REPLAY = """[bold]Examples[/bold]

tangram rl replay rollout.jsonl

tangram rl replay rollout.jsonl frozenlake/3/0.0 frozenlake/3/1.0

tangram rl replay rollout.jsonl --task codefix --backend sandbox  [dim]# its commands run in sandboxes[/dim]
"""


@app.command("replay", epilog=REPLAY)
def replay(
    file: File,
    trajectories: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Only these trajectories. Default: all.")
    ] = None,
    task: TaskName = None,
    backend: Backend = None,
    as_json: Json = False,
) -> None:
    """Replay environments with the recorded actions and seeds, and compare their observations, without a model.

    Compares observations, endings and rewards. Rewards by a command, a function or a model need --backend, and so do
    environments that run commands. Exits with 1 if a trajectory differs or cannot be replayed. Imports and runs the
    environments that the log names: replay only logs that you trust.
    """
    import asyncio

    from tangram.cli import rl_screen
    from tangram.cli.training_config import add_import_folders
    from tangram.rl.runs.trajectory_log import read

    reading = read(file)
    chosen = _select(reading, trajectories) if trajectories else reading.trajectories()
    if not trajectories:
        _warn_torn(reading)
    _require_match("task", task, [each.task for each in chosen], file)
    chosen = [each for each in chosen if task is None or each.task == task]
    if backend == "sandbox" and os.geteuid() != 0:
        raise InvalidConfig("backend", backend, "root, for sandboxes; or process, which isolates nothing")
    add_import_folders(reading.header.modules)
    results = asyncio.run(_replay_all(chosen, _settings(chosen, reading), backend))
    if as_json:
        rl_screen.print_json([_as_dict(each) for each in results])
    else:
        rl_screen.print_replays(results)
    if not all(each.is_same for each in results):
        raise typer.Exit(1)


def _as_dict(replayed: ReplayResult) -> dict[str, Any]:
    import msgspec

    return {"same": replayed.is_same, **msgspec.structs.asdict(replayed)}


def _settings(trajectories: list[Trajectory], reading: TrajectoryLogReader) -> dict[str, TaskSettings]:
    from tangram.rl.rollout.replay import settings_of

    return {each.task: settings_of(each, reading.header.settings) for each in trajectories}


async def _replay_all(
    trajectories: list[Trajectory], settings: dict[str, TaskSettings], backend: str | None
) -> list[ReplayResult]:
    """Replay the trajectories concurrently; return the results in their order."""
    import asyncio
    from contextlib import AsyncExitStack

    from tangram.client.client import connect
    from tangram.rl.environments.registry import task_of
    from tangram.rl.environments.shared_setup import needs_of, prepare_tasks, require_backend
    from tangram.rl.rollout.replay import replay as replay_one

    makers = {name: task_of(each) for name, each in settings.items()}
    for name, maker in makers.items():
        require_backend(name, maker, backend)
    places = asyncio.Semaphore(CONCURRENCY_MAX)
    done: list[ReplayResult] = []
    with live.progress("replaying", "trajectories") as progress:
        async with AsyncExitStack() as stack:
            client = None
            if backend is not None:
                needs = await needs_of(makers.values())
                client = await stack.enter_async_context(connect(backend=backend, **needs))

            async def replay_trajectory(trajectory: Trajectory) -> ReplayResult:
                async with places:
                    task = trajectory.task
                    result = await replay_one(trajectory, settings[task], task=makers[task], client=client)
                done.append(result)
                if progress is not None:
                    progress(len(done), len(trajectories))
                return result

            with _first_error(backend):
                await stack.enter_async_context(prepare_tasks(makers.values(), client))
                async with asyncio.TaskGroup() as group:
                    playing = [group.create_task(replay_trajectory(each)) for each in trajectories]
    return [each.result() for each in playing]


@contextmanager
def _first_error(backend: str | None) -> Iterator[None]:
    """Raise the first of several errors; if a client is missing, name the option that provides one."""
    try:
        try:
            yield
        except BaseExceptionGroup as errors:
            raise unwrap_first(errors) from None
    except InvalidConfig as error:
        if backend is not None or error.field != "client":
            raise
        raise InvalidConfig("backend", None, "sandbox, docker or process, since it needs a client") from error
