"""The training pipeline: makes all parts of a run, resumes it, and closes everything at its end.

    ended = await train(settings, Path("build/runs/mine"))
    ended = await train(settings, Path("build/runs/mine"), resume=True)    # after an interruption or a crash

Owns the parts of a run and their order; loop.py drives them. Promises that no sample is trained on twice in the lineage
of the weights that survive, that none is staler than the bound, that each dropped sample is counted, whichever process
dies meanwhile, and that only the folder of the run remains afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tangram.client.client import Client
from tangram.errors import InvalidConfig
from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.inference.engines.protocol import Sampling
from tangram.rl.inference.weights_folder import weights_folder
from tangram.rl.rollout.assembly import (
    TrainedWeights,
    assembled,
    fork_server_of,
    require_playable,
    require_servable,
)
from tangram.rl.rollout.rollout import RolloutObserver, tickets
from tangram.rl.runs.checkpoints import Checkpoint
from tangram.rl.runs.metrics_lines import AnyMetricsLine, RunBegan, RunEnded
from tangram.rl.runs.metrics_log import MetricsLog, last_logged
from tangram.rl.runs.recovery import recover_buffer
from tangram.rl.runs.run_folder import RunFolder, open_run
from tangram.rl.train.background_tasks import BackgroundTasks
from tangram.rl.train.coordination import ChangeCondition
from tangram.rl.train.loop import INTERRUPTED, TrainingLoop
from tangram.rl.train.run_reporter import EngineEventListener, RunReporter
from tangram.rl.train.step_metrics import StepMetrics
from tangram.rl.train.trainer_process import ProcessTrainer
from tangram.rl.train.warm_start import require_agents
from tangram.rl.trajectories.trajectory import GroupTicket

STOP_S_MAX = 60.0
"""Time limit for the current step and its checkpoint when a run is interrupted."""

NO_CHECKPOINT = "there was no checkpoint yet, so the run starts from the beginning"


async def train(
    settings: TrainSettings,
    folder: Path,
    *,
    resume: bool = False,
    modules: tuple[str, ...] = (),
    on_line: Callable[[AnyMetricsLine], None] | None = None,
    client: Client | None = None,
    progress: Progress | None = None,
    observer: RolloutObserver | None = None,
) -> RunEnded:
    """Trains a policy from the beginning, or from the last checkpoint of the folder, until its steps are done.

    `modules`: folders with the user's own environments, stored with the run. `on_line` gets each metrics line,
    `observer` the events of the rollout, `progress` the slow phases before the first step. A cancelled run finishes and
    saves its current step, then raises CancelledError; during a warm start, which cannot be saved, and when cancelled
    again, it stops immediately. Raises InvalidConfig, and ManagerError if the run cannot continue, after saving what it
    reached."""
    require_trainable(settings)
    with open_run(folder, settings, resume=resume, modules=modules) as run, MetricsLog(folder, resume=resume) as log:

        def write(line: AnyMetricsLine) -> None:
            log.append(line)
            if on_line is not None:
                on_line(line)

        async with _build_training(settings, run, write, client, progress, observer, resume) as (training, reporter):
            if log.tensorboard_error:
                reporter.notice("metrics", log.tensorboard_error)
            return await _run_until_end(training)


def require_trainable(settings: TrainSettings) -> None:
    """Raises InvalidConfig for settings that a rollout accepts and training does not."""
    sampling = settings.sampling
    Sampling(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, keep_ids=sampling.keep_ids
    ).require_trainable()
    settings.require_group_baseline()
    if settings.groups.groups_extra:
        expected = (
            "0 for training, in which training.batch and training.staleness say how many groups are in flight; "
            "groups.members_extra, or training.batch_min with batch_wait_s, keep a step from waiting for the slowest"
        )
        raise InvalidConfig("groups.groups_extra", settings.groups.groups_extra, expected)
    require_agents(settings)
    require_servable(settings)


async def _run_until_end(training: TrainingLoop) -> RunEnded:
    """Lets the current step finish on the first cancellation; a second one stops it immediately."""
    task = asyncio.create_task(training.run(), name="training")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            training.stop(INTERRUPTED)
            if not training.in_warm_start:
                await asyncio.wait({task}, timeout=STOP_S_MAX)
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _build_training(
    settings: TrainSettings,
    run: RunFolder,
    write: Callable[[AnyMetricsLine], None],
    client: Client | None,
    progress: Progress | None,
    observer: RolloutObserver | None,
    resume: bool,
) -> AsyncIterator[tuple[TrainingLoop, RunReporter]]:
    """Makes all parts of a run, each from the parts above it, and closes them in reverse order."""
    checkpoint, last_evaluated = _resume_point(run) if resume else (None, -1)
    recovered = recover_buffer(checkpoint, run.samples_after(checkpoint.step)) if checkpoint is not None else None
    bounds = buffer_options(settings)
    buffer = SampleBuffer(**bounds) if recovered is None else SampleBuffer.restore(recovered.buffer, now=0.0, **bounds)
    _, codec = require_playable(settings)
    async with AsyncExitStack() as stack:
        reporter = RunReporter(write, at_s=checkpoint.state.at_s if checkpoint is not None else 0.0)
        metrics = StepMetrics()
        changed = ChangeCondition()
        background = BackgroundTasks(changed)
        engine_events = EngineEventListener(reporter, metrics, background)

        fork_server = await stack.enter_async_context(aclosing(fork_server_of(settings)))
        folder = stack.enter_context(weights_folder())
        trainer = ProcessTrainer(settings, codec.size, folder, fork_server=fork_server)
        stack.push_async_callback(trainer.close)
        start_trainer = partial(trainer.start, checkpoint.path if checkpoint is not None else None)
        parts = assembled(
            settings.with_trainable_groups(), client=client, observer=observer, on_event=engine_events.on_event,
            progress=progress, trained=TrainedWeights(folder, start_trainer), fork_server=fork_server,
            barrier=settings.training.mode == "sync",
        )  # fmt: skip
        assembly = await stack.enter_async_context(parts)
        log = run.open_sample_log(checkpoint)
        reporter.start()
        training = TrainingLoop(
            settings, run, log, assembly, trainer, buffer, remaining_tickets(settings, buffer), reporter, metrics,
            changed, background,
            state=checkpoint.state if checkpoint is not None else None, last_evaluated=last_evaluated,
            dropped=tuple(recovered.dropped.values()) if recovered is not None else (), progress=progress,
        )  # fmt: skip
        stack.callback(training.close)
        at_s = checkpoint.state.at_s if checkpoint is not None else 0.0
        outcome = NO_CHECKPOINT if resume else ""
        if recovered is not None:
            outcome = recovered.describe(buffer.statistics())
        reporter.write(
            RunBegan(
                at_s=at_s,
                began_at=time.time() - at_s,
                step=buffer.version,
                mode=settings.training.mode,
                alpha=settings.training.staleness_bound,
                settings=msgspec.to_builtins(settings),
                resumed_from=str(checkpoint.path) if checkpoint is not None else "",
                left=outcome,
            )
        )
        for change in run.setting_changes:
            reporter.notice("settings", change)
        yield training, reporter


def _resume_point(run: RunFolder) -> tuple[Checkpoint | None, int]:
    """Returns the checkpoint to resume from, with the clock where the run stopped, and the last evaluated version."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        return None, -1
    logged = last_logged(run.metrics, checkpoint.step)
    state = msgspec.structs.replace(checkpoint.state, at_s=max(checkpoint.state.at_s, logged.at_s))
    return msgspec.structs.replace(checkpoint, state=state), logged.last_evaluated


def buffer_options(settings: TrainSettings) -> dict[str, Any]:
    """Returns the arguments of SampleBuffer."""
    schedule = settings.training
    return dict(
        batch=schedule.batch,
        staleness_bound=schedule.staleness_bound,
        enforces_staleness=schedule.enforces_staleness,
        bytes_max=schedule.buffer_bytes,
        batch_min=schedule.batch_min,
        wait_s=schedule.batch_wait_s,
    )


def remaining_tickets(settings: TrainSettings, buffer: SampleBuffer) -> Iterator[GroupTicket]:
    """Returns tickets of the groups that were never started."""
    return (ticket for ticket in tickets(settings) if not buffer.has_started(ticket.number))
