"""The two sides: the same trajectories on the same cores, once reserved by trajectory, once scheduled by action.

Owns how a side is run for real and recorded. Both go through the same client, orchestrator and manager; what differs is
who decides. Promises that no sandbox, process or file of a side is left when it has ended, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tangram.bench.reservation.agents import Script, play
from tangram.bench.reservation.project import ENVIRONMENT, Bug, setup
from tangram.client.client import Client, connect
from tangram.client.sandbox import Image
from tangram.core.messages import cpu_node
from tangram.managers.work import GIB
from tangram.sim.baselines import Baseline, PodsConfig

RESERVED, BY_ACTION = "reserved", "by action"
SIDES = (RESERVED, BY_ACTION)
REQUEST = 1.0
"""Cores that a trajectory reserves, and may use at most: with less, its tests would take longer than on a machine of
its own."""
POLICY = "adaptive"
NODE = "local"
MEMORY_BYTES = 4 * GIB
"""Of all sandboxes together: more than they reserve, so that cores alone are scarce."""


def client(side: str, *, cores: int, backend: str, state: Path, record: Path | None = None) -> Client:
    """A connection whose actions are decided as this side has it."""
    pods = side == RESERVED
    config = PodsConfig(request=REQUEST, limit=REQUEST)
    baseline = Baseline(cpu_node(NODE, cores, MEMORY_BYTES / GIB), (), config)
    return connect(
        backend=backend,
        cores=cores,
        memory=MEMORY_BYTES,
        policy_name=baseline.name if pods else POLICY,
        record=record or "",
        state=state,
        decider=baseline if pods else None,
    )


async def images_of(t: Client, bugs: list[Bug]) -> dict[str, Image]:
    """An image for each bug: the project, tested once, and the bug on top of it. Copies of both are made on write."""
    project = await t.image(setup=setup(), env=ENVIRONMENT)
    return {bug.name: await t.image(base=project, setup=(bug.plant,), env=ENVIRONMENT) for bug in bugs}


async def run_side(
    side: str,
    scripts: tuple[Script, ...],
    *,
    cores: int,
    backend: str,
    state: Path,
    record: Path,
    told: Callable[[str], None],
) -> dict[str, float]:
    """All trajectories at once, each as soon as it may. Returns their rewards. `told` hears who has done an action."""
    async with client(side, cores=cores, backend=backend, state=state, record=record) as t:
        images = await images_of(t, list({script.bug.name: script.bug for script in scripts}.values()))
        rewards = await t.gather(
            *(play(t, script, images[script.bug.name], partial(told, script.name)) for script in scripts)
        )
    return {script.name: reward for script, reward in zip(scripts, rewards, strict=True)}


def prepare(bugs: list[Bug], *, cores: int, backend: str, state: Path) -> None:
    """Make the images, where they outlive a connection, so that no side pays for it."""

    async def make() -> None:
        async with client(BY_ACTION, cores=cores, backend=backend, state=state) as t:
            await images_of(t, bugs)

    if backend == "sandbox":
        asyncio.run(make())
