"""`tangram rl check`, `profile` and `hardware`: tasks and the hardware that suits them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import options, show
from tangram.cli.options import Json
from tangram.cli.rl import Backend
from tangram.reports import live

if TYPE_CHECKING:
    from tangram.rl.environments.conformance import ConformanceReport

CHECK = """[bold]Examples[/bold]

tangram rl check frozenlake

tangram rl check my_package.maze:Maze --option size=9

tangram rl check codefix --backend sandbox  [dim]# an environment that runs commands[/dim]
"""


def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A registered task, or module:name of a task.")],
    episodes: Annotated[int, typer.Option("--episodes", metavar="N", min=2, help="Episodes of each agent.")] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="The seed of the first episode.")] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="An option of the environment; several may be given."),
    ] = None,
    backend: Backend = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Time limit of one call of the environment."),
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Check an environment without a model: deterministic by seed, bounded, robust to garbage, free of leftovers.

    Random agents and the scripted agents of the task play it. Exits with 1 if a check fails.
    """
    import asyncio

    import msgspec

    report = asyncio.run(_run_checks(name, episodes, seed, options.parse_key_values(option), backend, timeout))
    if as_json:
        show.print_json({"ok": report.ok, **msgspec.to_builtins(report)})
    else:
        typer.echo(report.text())
    if not report.ok:
        raise typer.Exit(1)


async def _run_checks(
    name: str, episodes: int, seed: int, options: dict[str, Any], backend: str | None, timeout_s: float
) -> ConformanceReport:
    from contextlib import AsyncExitStack

    from tangram.client.client import connect
    from tangram.rl.environments.conformance import check as checked
    from tangram.rl.environments.protocol import ExternalResources
    from tangram.rl.environments.registry import resolve
    from tangram.rl.environments.shared_setup import needs_of, prepare_tasks, require_backend

    task = resolve(name)
    require_backend(name, task, backend)
    async with AsyncExitStack() as stack:
        client = None
        if backend is not None:
            client = await stack.enter_async_context(connect(backend=backend, **await needs_of([task])))
        await stack.enter_async_context(prepare_tasks([task], client))
        with live.progress("checking", unit="") as progress:

            def report_progress(done: int, total: int, requirement: str) -> None:
                if progress is not None:
                    progress(done, total, f"{requirement}: {done + 1} of {total}, each call within {timeout_s:g} s")

            return await checked(
                task, resources=ExternalResources(client=client), episodes=episodes, seed=seed, options=options,
                timeout_s=timeout_s, on_progress=report_progress,
            )  # fmt: skip


PROFILE = """[bold]Examples[/bold]

tangram rl profile rollout.jsonl
"""


def profile(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Trajectory logs.")],
    as_json: Json = False,
) -> None:
    """Recommend a class of hardware for each task, from the tokens that its trajectories read and decoded.

    Prefill is bound by compute, decoding by memory bandwidth; the published classes are compared at equal cost. To
    accept a recommendation, set `affinity` of the task to it.
    """
    import msgspec

    from tangram.rl.inference.profiler import Profiler
    from tangram.rl.runs.trajectory_log import read

    profiler = Profiler()
    for file in files:
        for trajectory in read(file).trajectories():
            profiler.add(trajectory)
    if as_json:
        show.print_json(msgspec.to_builtins(profiler.recommend()))
    else:
        typer.echo("\n".join(profiler.lines()))


HARDWARE = """[bold]Examples[/bold]

tangram rl hardware  [dim]# about half a minute[/dim]
"""


def hardware(as_json: Json = False) -> None:
    """Simulate the gain of hardware affinity and of separate prefill and decode on published GPUs."""
    import msgspec

    from tangram.sim.serving import affinity_gains, disaggregation_lines, disaggregation_predictions

    with live.progress("simulating", "predictions") as progress:
        gains = affinity_gains()
        if progress is not None:
            progress(1, 2)
        splits = disaggregation_predictions()
        if progress is not None:
            progress(2, 2)
    if as_json:
        show.print_json({"affinity": msgspec.to_builtins(gains), "split": msgspec.to_builtins(splits)})
        return
    typer.echo("\n".join([*gains.lines(), "", *disaggregation_lines(splits)]))
