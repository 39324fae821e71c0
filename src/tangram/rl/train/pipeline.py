"""The pipeline: rollout, rewards, training and weights of one run, joined.

    over = await train(settings, Path("build/runs/mine"))
    over = await train(settings, Path("build/runs/mine"), resume=True)    # after whatever ended it

Owns what a run is made of, in which order, and that all of it is taken down again. What happens when is loop.py;
here nothing happens but a beginning, a resumption and an end. Promises that no sample is trained on twice in the
lineage of the weights that survive, none older than the bound, and none lost without a word, whoever dies meanwhile;
and that nothing of a run is left but its folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec

from tangram.client.client import Client
from tangram.errors import InvalidConfig
from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.inference.engines.protocol import Sampling, Weights
from tangram.rl.inference.router_records import Event
from tangram.rl.rollout.assembly import assembled, nursery_of, require_served
from tangram.rl.rollout.codec import Codec
from tangram.rl.rollout.episode import Episode
from tangram.rl.rollout.records import Ticket
from tangram.rl.rollout.rollout import Watches, tickets
from tangram.rl.runs.checkpoints import Checkpoint
from tangram.rl.runs.metrics_log import MetricsLog, left_at
from tangram.rl.runs.recovery import recovered
from tangram.rl.runs.run_folder import RunFolder, open_run
from tangram.rl.train.loop import INTERRUPTED, Training
from tangram.rl.train.records import AnyLine, Began, Over
from tangram.rl.train.trainer_process import ProcessTrainer
from tangram.rl.train.warm_start import require_agents

STOP_S_MAX = 60.0
"""For the step that is under way when a run is interrupted, and its checkpoint."""

NO_CHECKPOINT = "there was no checkpoint yet, so the run begins anew"


async def train(
    settings: TrainSettings,
    folder: Path,
    *,
    resume: bool = False,
    modules: tuple[str, ...] = (),
    tell: Callable[[AnyLine], None] | None = None,
    client: Client | None = None,
    progress: Progress | None = None,
    watch: Watches | None = None,
) -> Over:
    """Trains a policy, from the beginning or from the last checkpoint of the folder, until its steps are done.
    `modules`: folders in which environments of one's own are looked for, kept for those who play it later. `tell` is
    given each line of its metrics, `watch` what happens in its rollout, `progress` what takes long before the first
    step. Cancelled, it finishes the step that is under way, saves it and raises CancelledError; in a warm start, of
    which nothing is saved, and if it is cancelled again, it does so at once. Raises InvalidConfig, and ManagerError for
    what cannot go on; what was reached is saved then, as far as it can be."""
    require_trainable(settings)
    with open_run(folder, settings, resume=resume, modules=modules) as run, MetricsLog(folder, resume=resume) as log:

        def both(line: AnyLine) -> None:
            log.tell(line)
            if tell is not None:
                tell(line)

        async with _begun(settings, run, both, client, progress, watch, resume) as training:
            if log.left_out:
                training.notice("metrics", log.left_out)
            return await _until_over(training)


def require_trainable(settings: TrainSettings) -> None:
    """Raises InvalidConfig for what can be played and not trained on."""
    drawn = settings.sampling
    Sampling(
        temperature=drawn.temperature, top_k=drawn.top_k, top_p=drawn.top_p, keep_ids=drawn.keep_ids
    ).require_trainable()
    settings.require_differences()
    if settings.groups.groups_extra:
        expected = (
            "0 for training, in which training.batch and training.staleness say how many groups are in play; "
            "groups.members_extra, or training.batch_min with batch_wait_s, keep a step from waiting for the slowest"
        )
        raise InvalidConfig("groups.groups_extra", settings.groups.groups_extra, expected)
    require_agents(settings)
    require_served(settings)


async def _until_over(training: Training) -> Over:
    """Interrupted, it has time to finish; interrupted again, it has none."""
    working = asyncio.create_task(training.run(), name="training")
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        if not working.done():
            training.stop(INTERRUPTED)
            if not training.warming:
                await asyncio.wait({working}, timeout=STOP_S_MAX)
        raise
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


@asynccontextmanager
async def _begun(
    settings: TrainSettings,
    run: RunFolder,
    tell: Callable[[AnyLine], None],
    client: Client | None,
    progress: Progress | None,
    watch: Watches | None,
    resume: bool,
) -> AsyncIterator[Training]:
    found, looked = _left(run) if resume else (None, -1)
    back = recovered(found, run.samples_after(found.step)) if found is not None else None
    bounds = bounds_of(settings)
    buffer = SampleBuffer(**bounds) if back is None else SampleBuffer.restore(back.buffer, now=0.0, **bounds)
    async with AsyncExitStack() as stack:
        nursery = stack.enter_context(closing(nursery_of(settings)))
        trainers: list[ProcessTrainer] = []

        async def first(codec: Codec, folder: Path) -> Weights:
            trainer = ProcessTrainer(settings, codec.size, folder, nursery=nursery)
            stack.push_async_callback(trainer.close)
            trainers.append(trainer)
            return await trainer.start(found.path if found is not None else None)

        def fresh(episode: Episode) -> bool:
            return training.fresh(episode)

        def on_event(event: Event) -> None:
            if begun:
                training.happened(event)

        begun = False
        assembly = assembled(
            settings.as_played(), client=client, watch=watch, on_event=on_event, progress=progress, first=first,
            nursery=nursery, fresh=fresh, barrier=settings.training.mode == "sync",
        )  # fmt: skip
        made = await stack.enter_async_context(assembly)
        log = run.go_on(found)
        at_s = found.state.at_s if found is not None else 0.0
        training = Training(
            settings, run, log, made, trainers[0], buffer, upcoming(settings, buffer),
            state=found.state if found is not None else None, looked=looked,
            dropped=tuple(back.dropped.values()) if back is not None else (), tell=tell, progress=progress,
        )  # fmt: skip
        stack.callback(training.close)
        begun = True
        tell(
            Began(
                at_s=at_s,
                began_at=time.time() - at_s,
                step=buffer.version,
                mode=settings.training.mode,
                alpha=settings.training.alpha,
                settings=msgspec.to_builtins(settings),
                resumed_from=str(found.path) if found is not None else "",
                left=back.text(buffer.statistics()) if back is not None else (NO_CHECKPOINT if resume else ""),
            )
        )
        for change in run.changed:
            training.notice("settings", change)
        yield training


def _left(run: RunFolder) -> tuple[Checkpoint | None, int]:
    """What it goes on from, with the clock as the run left it, and the version that it evaluated last."""
    found = run.latest()
    if found is None:
        return None, -1
    left = left_at(run.metrics, found.step)
    state = msgspec.structs.replace(found.state, at_s=max(found.state.at_s, left.at_s))
    return msgspec.structs.replace(found, state=state), left.looked


def bounds_of(settings: TrainSettings) -> dict[str, Any]:
    """What a sample buffer of the run is made with."""
    schedule = settings.training
    return dict(
        batch=schedule.batch,
        alpha=schedule.alpha,
        enforced=schedule.bounds_age,
        bytes_max=schedule.buffer_bytes,
        batch_min=schedule.batch_min,
        wait_s=schedule.batch_wait_s,
    )


def upcoming(settings: TrainSettings, buffer: SampleBuffer) -> Iterator[Ticket]:
    """What was not begun yet."""
    return (each for each in tickets(settings) if not buffer.knows(each.number))
