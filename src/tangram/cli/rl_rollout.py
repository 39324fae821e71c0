"""`tangram rl rollout`: play the tasks of a config with its policy, and keep every trajectory."""

from __future__ import annotations

import asyncio
import shlex
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import options, show
from tangram.cli.options import Json
from tangram.errors import InvalidConfig
from tangram.reports import live, terminal

if TYPE_CHECKING:
    from tangram.rl.config.rollout_settings import RolloutSettings
    from tangram.rl.inference.router_records import AnyRouterEvent
    from tangram.rl.observe.rollout_progress import RolloutProgress
    from tangram.rl.rollout.assembly import RolloutAssembly
    from tangram.rl.rollout.rollout import CollectedBatch
    from tangram.rl.trajectories.trajectory import Trajectory

POLL_S = 0.5
"""Seconds between two polls of the engines, for the live view."""

EXAMPLES = """[bold]Examples[/bold]

tangram rl rollout examples/rollout.toml

tangram rl rollout examples/rollout.toml --explain  [dim]# which engine serves which task; nothing is started[/dim]

tangram rl rollout examples/rollout.toml --groups 64 --out rollout.jsonl

tangram rl show rollout.jsonl
"""


def rollout(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A TOML file with engines, tasks and groups. The config of a training run works too."
        ),
    ],
    groups: Annotated[int, typer.Option("--groups", metavar="N", min=1, help="Number of groups to play.")] = 16,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", metavar="N", min=1, help="Groups played at once. Default: all.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write all trajectories to this file; .gz compresses it."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Override the seed of the config.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print the engines of each task with the reason, and the source of its reward; start nothing.",
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no live view.")] = False,
    as_json: Json = False,
) -> None:
    """Play the tasks of a config, each trajectory at its own pace, and print how they ended.

    No trainer runs: use it to test environments, engines and rewards, to evaluate, and to collect data.
    """
    import msgspec

    from tangram.cli.training_config import add_config_folders, load_config
    from tangram.rl.config.training_settings import TrainSettings
    from tangram.rl.inference.affinity import explain as explained
    from tangram.rl.rollout.assembly import require_playable
    from tangram.rl.rollout.rewards import describe, effective_settings

    settings: RolloutSettings = load_config(TrainSettings, config)
    if seed is not None:
        settings = msgspec.structs.replace(settings, seed=seed)
    modules = add_config_folders(config)
    with options.config_errors_in(config):
        tasks, _ = require_playable(settings)
        binding = explained(settings)
    if explain:
        rewards = {
            task_settings.name: describe(effective_settings(task, task_settings.reward))
            for task, task_settings in zip(tasks, settings.tasks, strict=True)
        }
        if as_json:
            show.print_json({**msgspec.to_builtins(binding), "rewards": rewards})
        else:
            typer.echo("\n".join([*binding.lines(), "", *_reward_lines(rewards)]))
        return
    if out is not None:
        options.check_output_files(out=out)
        if out.exists() and out.stat().st_size:
            raise InvalidConfig("out", str(out), "a file that does not exist")
    happened = EngineEventSummary()
    endings: Counter[str] = Counter()
    try:
        with options.config_errors_in(config):
            playing = _play(settings, modules, groups, in_flight, out, happened, endings, quiet=quiet or as_json)
            collected = asyncio.run(playing)
    except KeyboardInterrupt:
        typer.echo(_interrupted(endings, out), err=True)
        raise
    finally:
        for sentence in happened.lines():
            typer.echo(sentence, err=True)
    if as_json:
        show.print_json(_summary(collected))
    else:
        _print(collected, out)


def _reward_lines(rewards: dict[str, str]) -> list[str]:
    return terminal.text_table([("task", "rewarded by"), *rewards.items()])


class EngineEventSummary:
    """Failures of engines and requests: the first of each kind, and their number."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], str] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, event: AnyRouterEvent) -> None:
        from tangram.rl.inference.router_records import (
            EngineLost,
            EngineRemoved,
            FallbackBegan,
            FallbackEnded,
            RequestDropped,
            describe_event,
        )

        match event:
            case (
                EngineLost(engine=whose)
                | EngineRemoved(engine=whose)
                | FallbackBegan(task=whose)
                | FallbackEnded(task=whose)
            ):
                kind = type(event).__name__, whose
            case RequestDropped():
                kind = type(event).__name__, ""
            case _:
                return
        self._counts[kind] += 1
        if kind not in self._first:
            self._first[kind] = describe_event(event)

    def lines(self) -> list[str]:
        return [
            f"{sentence} {self._counts[kind] - 1:,} more of this kind." if self._counts[kind] > 1 else sentence
            for kind, sentence in self._first.items()
        ]


async def _play(
    settings: RolloutSettings,
    modules: tuple[str, ...],
    groups: int,
    in_flight: int | None,
    out: Path | None,
    happened: EngineEventSummary,
    endings: Counter[str],
    *,
    quiet: bool,
) -> CollectedBatch:
    """Play the rollout. Fills `happened` and `endings` as it goes, so that they are complete after an error too."""
    from contextlib import AsyncExitStack

    from tangram.rl.observe.rollout_progress import RolloutProgress
    from tangram.rl.rollout.assembly import assembled, require_playable
    from tangram.rl.rollout.rollout import tickets
    from tangram.rl.runs.trajectory_log import GroupClosing, TrajectoryLog, engine_event
    from tangram.rl.trajectories.codec import WordCodec

    _, codec = require_playable(settings)
    began_at_s = asyncio.get_running_loop().time()  # includes the start of the engines
    async with AsyncExitStack() as stack:
        log = None
        if out is not None:
            words = codec.words if isinstance(codec, WordCodec) else ()
            log = stack.enter_context(TrajectoryLog(out, settings=settings, words=words, modules=modules))

        def on_event(event: AnyRouterEvent) -> None:
            if log is not None:
                log.append(engine_event(event, since=began_at_s))
            happened.add(event)

        def on_end(trajectory: Trajectory) -> None:
            endings[trajectory.ending.value] += 1
            if log is not None:
                log.append(trajectory)

        progress = RolloutProgress(groups, quiet=quiet)
        with live.progress("starting", "steps") as starting:
            assembly = await stack.enter_async_context(
                assembled(
                    settings,
                    on_end=on_end,
                    observer=progress,
                    on_event=on_event,
                    began_at_s=began_at_s,
                    progress=lambda share, words: (
                        starting(round(100 * share), 100, words) if starting is not None else None
                    ),
                )
            )
        stack.enter_context(progress)
        looking = asyncio.create_task(_poll_engines(assembly, progress))
        try:
            collected = await assembly.rollout.collect(tickets(settings), groups, in_flight=in_flight)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        if log is not None:
            for group in (*collected.groups, *collected.left_out):
                log.append(GroupClosing.of(group, collected.ended_s))
    return collected


async def _poll_engines(assembly: RolloutAssembly, progress: RolloutProgress) -> None:
    while True:
        progress.set_engines(assembly.router.engine_statistics())
        await asyncio.sleep(POLL_S)


# ---- printing --------------------------------------------------------------------------------------------------------


def _summary(collected: CollectedBatch) -> dict[str, Any]:
    import msgspec

    from tangram.rl.rollout.redundancy import report
    from tangram.rl.trajectories.trajectory import Ending

    tasks: dict[str, dict[str, Any]] = {}
    rewards: dict[str, list[float]] = {}
    causes: dict[str, str] = {}
    for trajectory in collected.all_trajectories():
        row = tasks.setdefault(trajectory.task, {"trajectories": 0, "turns": 0, "tokens": 0, "endings": {}})
        row["trajectories"] += 1
        row["turns"] += len(trajectory.turns)
        row["tokens"] += len(trajectory.logprobs)
        row["endings"][trajectory.ending.value] = row["endings"].get(trajectory.ending.value, 0) + 1
        if trajectory.reward is not None:
            rewards.setdefault(trajectory.task, []).append(trajectory.reward)
        elif trajectory.ending in (Ending.ENV_FAILED, Ending.REWARD_FAILED):
            causes.setdefault(f"{trajectory.task} {trajectory.ending}", trajectory.cause)
    for name, row in tasks.items():
        row["reward_mean"] = statistics.fmean(rewards[name]) if name in rewards else None
    redundancy = report(collected.groups, collected.left_out)
    return {
        "seconds": collected.ended_s - collected.began_s,
        "groups": len(collected.groups),
        "groups_left_out": len(collected.left_out),
        "tasks": tasks,
        "causes": causes,
        "redundancy": msgspec.to_builtins(redundancy),
    }


def _interrupted(endings: Counter[str], out: Path | None) -> str:
    """The summary of an interrupted rollout."""
    from tangram.reports.formatting import pluralize

    how = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    message = (
        f"interrupted: {pluralize(endings.total(), 'trajectory', 'trajectories')} ended{f' ({how})' if how else ''}"
    )
    if out is None:
        return f"{message}; without --out FILE they are not saved"
    return f"{message}; the trajectories are in {out}: tangram rl show {shlex.quote(str(out))}"


def _lines(collected: CollectedBatch, causes: dict[str, str]) -> list[str]:
    """Prints the first failure of each kind, and the trajectories that were played and discarded."""
    from tangram.rl.rollout.redundancy import report

    lines = [f"{kind}, first cause: {cause}" for kind, cause in causes.items()]
    if any(group.left_out for group in collected.groups) or collected.left_out:
        lines += report(collected.groups, collected.left_out).lines()
    return lines


def _print(collected: CollectedBatch, out: Path | None) -> None:
    from tangram.reports.formatting import pluralize

    summary = _summary(collected)
    console = terminal.stdout_console()
    title = f"{pluralize(summary['groups'], 'group')} in {summary['seconds']:.1f} s"
    numbers = ("trajectories", "turns", "tokens decoded", "reward")
    table = terminal.table(title, "task", *numbers, "endings", right=numbers)
    for name, row in sorted(summary["tasks"].items()):
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(row["endings"].items()))
        reward = "" if row["reward_mean"] is None else f"{row['reward_mean']:.3f}"
        table.add_row(name, str(row["trajectories"]), str(row["turns"]), str(row["tokens"]), reward, endings)
    console.print(table)
    for line in _lines(collected, summary["causes"]):
        typer.echo(line)
    if out is not None:
        typer.echo(f"wrote {out}; look at it with: tangram rl show {shlex.quote(str(out))}")
