"""The two sides: the same trajectories on the same cores, reserved by trajectory and scheduled by action.

Owns the execution and recording of a side. Both use the same client, orchestrator and manager, and differ in the
scheduler. When a side has ended, even by an error, none of its sandboxes, processes or files remain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tangram.bench.reservation.agents import AgentScript, play_script
from tangram.bench.reservation.project import ENVIRONMENT, Bug, setup
from tangram.client.client import Client, connect
from tangram.client.sandbox import Image
from tangram.core.messages import cpu_node
from tangram.managers.work import GIB
from tangram.sim.baselines import Baseline, PodsConfig

RESERVED, BY_ACTION = "reserved", "by action"
SIDES = (RESERVED, BY_ACTION)
REQUEST = 1.0
"""Cores that a trajectory reserves, which is also its limit: with less, its tests would take longer than on a machine
of its own."""
POLICY = "adaptive"
NODE = "local"
MEMORY_BYTES = 4 * GIB
"""Memory of all sandboxes together: more than they reserve, so that only cores are scarce."""


def client(side: str, *, cores: int, backend: str, state: Path, record: Path | None = None) -> Client:
    """Connect with the scheduler of this side."""
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
    """Return an image for each bug: the project, tested once, with the bug on top. Both layers are copy-on-write."""
    project = await t.image(setup=setup(), env=ENVIRONMENT)
    return {bug.name: await t.image(base=project, setup=(bug.plant,), env=ENVIRONMENT) for bug in bugs}


async def run_side(
    side: str,
    scripts: tuple[AgentScript, ...],
    *,
    cores: int,
    backend: str,
    state: Path,
    record: Path,
    on_action: Callable[[str], None],
) -> dict[str, float]:
    """Run all trajectories concurrently and return their rewards. `on_action` is called after each action."""
    async with client(side, cores=cores, backend=backend, state=state, record=record) as t:
        images = await images_of(t, list({script.bug.name: script.bug for script in scripts}.values()))
        rewards = await t.gather(
            *(play_script(t, script, images[script.bug.name], partial(on_action, script.name)) for script in scripts)
        )
    return {script.name: reward for script, reward in zip(scripts, rewards, strict=True)}


def prepare(bugs: list[Bug], *, cores: int, backend: str, state: Path) -> None:
    """Build the images, if they outlive a connection, so that no side is charged for it."""

    async def make() -> None:
        async with client(BY_ACTION, cores=cores, backend=backend, state=state) as t:
            await images_of(t, bugs)

    if backend == "sandbox":
        asyncio.run(make())
