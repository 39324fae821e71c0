"""The training loop: one run from its first step to its last.

Owns what happens when. For each step it takes a batch from the buffer and has the trainer make a new version while the
rollout continues; engines take the version between two of their steps and keep all trajectories. The modes differ only
in when groups start (dispatcher.py) and when engines take weights (weight_sync.py). A trainer that dies is restarted
from the last checkpoint, and samples and engines are rolled back to the same version.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from tangram.cancellation import run_to_completion
from tangram.errors import ManagerError
from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.observe.pool_usage_monitor import PoolUsageMonitor
from tangram.rl.rollout.assembly import RolloutAssembly, save_codec
from tangram.rl.runs.checkpoints import Checkpoint, RunState, folder_name, write_state
from tangram.rl.runs.metrics_lines import RunEnded
from tangram.rl.runs.run_folder import RunFolder
from tangram.rl.runs.sample_log import GroupPut, SampleLog
from tangram.rl.train.background_tasks import BackgroundEvaluation, BackgroundTasks
from tangram.rl.train.coordination import ChangeCondition, DispatchPause
from tangram.rl.train.dispatcher import Dispatcher
from tangram.rl.train.evaluator import Evaluator
from tangram.rl.train.run_reporter import RunReporter
from tangram.rl.train.step_metrics import StepMetrics, drop_cause
from tangram.rl.train.trainer import Trainer, TrainerDied
from tangram.rl.train.watchdog import Watchdog, abort_stuck, snapshot_run
from tangram.rl.train.weight_sync import WeightSync
from tangram.rl.trajectories.training_batch import TrainingBatch
from tangram.rl.trajectories.trajectory import Group, GroupTicket

INTERRUPTED = "interrupted"
"""The cause of an end that waits only for the step that is under way."""
STAGE_SAMPLE_S = 0.1
"""Interval at which stages of trajectories are sampled while the loop waits for a batch."""
WATCHDOG_S = 2.0
"""Interval between two checks of the watchdog."""
TRAINER_DEATHS_MAX = 3
"""Deaths of the trainer without a higher version between them; a cause that repeats so often is permanent."""


class SampleRecorder:
    """Records each group that ends: in the sample log, in the metrics of the step, and as progress for the watchdog."""

    def __init__(
        self, run: RunFolder, log: SampleLog, metrics: StepMetrics, watchdog: Watchdog, reporter: RunReporter
    ) -> None:
        self._run, self._log = run, log
        self._metrics, self._watchdog, self._reporter = metrics, watchdog, reporter

    def on_group_end(self, group: Group) -> None:
        """A group that cannot be logged is played again if the run is resumed from an earlier checkpoint."""
        try:
            if group.members:
                self._log.append(group)
            else:
                self._log.append_lost(group.id, drop_cause(group))
        except ManagerError as error:
            self._reporter.notice("checkpoint", f"{group.id} is not in the log of samples: {error}")
        self._metrics.on_group_end(group)
        if group.members:
            self._watchdog.on_progress(self._reporter.now())

    def rotate(self, step: int) -> None:
        self._log.rotate(step)

    def reopen(self, checkpoint: Checkpoint) -> None:
        """Continues the log after a checkpoint."""
        self._log.close()
        self._log = self._run.open_sample_log(checkpoint)

    def close(self) -> None:
        self._log.close()


class TrainingLoop:
    """Call `run` once. `stop` ends it after the step that is under way."""

    def __init__(
        self,
        settings: TrainSettings,
        run: RunFolder,
        log: SampleLog,
        assembly: RolloutAssembly,
        trainer: Trainer,
        buffer: SampleBuffer,
        upcoming: Iterator[GroupTicket],
        reporter: RunReporter,
        metrics: StepMetrics,
        changed: ChangeCondition,
        background: BackgroundTasks,
        *,
        state: RunState | None,
        dropped: Collection[str] = (),
        last_evaluated: int = -1,
        progress: Progress | None,
    ) -> None:
        """`state`: of the checkpoint that the run is resumed from; None for a new run. `dropped`: causes of the groups
        that the resumption dropped. `last_evaluated`: the version of the last evaluation; -1 if there was none."""
        self.buffer = buffer
        self._settings, self._schedule = settings, settings.training
        self._run, self._assembly, self._trainer = run, assembly, trainer
        self._reporter, self._metrics = reporter, metrics
        self._changed, self._background = changed, background
        self._progress = progress
        self._resumed = state is not None
        self._dropped_by_resume = dropped
        self._training_began_at = 0.0
        self._in_batches = self._schedule.mode in ("sync", "sync+", "one-off") or self._schedule.staleness_bound == 0
        self._watchdog = Watchdog(self._schedule.stall_s, self._schedule.stalls_max, reporter.now())
        self._recorder = SampleRecorder(run, log, metrics, self._watchdog, reporter)
        self._pause = DispatchPause(changed)
        self._evaluation = BackgroundEvaluation(background)
        self._evaluator = Evaluator(
            settings, assembly, reporter,
            evaluations=state.evaluations if state is not None else 0, last_evaluated=last_evaluated,
        )  # fmt: skip
        self._weight_sync = WeightSync(
            assembly.weights, assembly.router, assembly.rollout, buffer, self._pause, self._evaluation, metrics,
            in_batches=self._in_batches, aborts_stale=self._schedule.mode == "async",
        )  # fmt: skip
        self._dispatcher = Dispatcher(
            assembly.rollout, buffer, upcoming, self._weight_sync, self._pause, changed,
            batch=self._schedule.batch if self._in_batches else None, now=reporter.now,
            ticket_next=state.ticket_next if state is not None else 0,
            on_group_end=self._recorder.on_group_end, on_dropped=metrics.on_dropped,
        )  # fmt: skip
        self._pool_usage = PoolUsageMonitor(assembly.client)
        self._saved_step = state.step if state is not None else None
        """The step of the newest checkpoint."""
        self._warm_start_line = state.warm if state is not None else None
        self.in_warm_start = False
        """A warm start runs. It cannot be saved before it ends."""
        self._can_save = state is not None
        """Trainer and buffer have the same version, so both can be saved."""
        self._stop_cause = ""
        self._trainer_deaths = 0
        """Since the highest version was reached."""
        self._highest_version = buffer.version
        self._step_began_at: float | None = None
        """When the trainer got the step that it works on."""

    def close(self) -> None:
        self._pool_usage.close()
        self._recorder.close()

    def stop(self, cause: str) -> None:
        self._stop_cause = cause if cause == INTERRUPTED else self._stop_cause or cause
        if cause == INTERRUPTED:
            self._evaluation.cancel()
        self._changed.notify_all()

    # ---- phases of a run ----

    async def run(self) -> RunEnded:
        """Raises ManagerError if the run cannot continue, after saving what it reached."""
        failure = None
        try:
            await self._run_phases()
        except Exception as error:
            failure = error
        finally:
            await self._background.cancel()
        if failure is not None and self._can_save:
            with contextlib.suppress(Exception):
                await self._save(last=True)
        return self._end_run(
            str(failure) if failure is not None else self._unsaved_reason or self._stop_cause, raised=failure
        )

    async def _run_phases(self) -> None:
        if not self._resumed:
            await self._run_warm_start()
        self._training_began_at = self._reporter.now()
        self._metrics.begin(
            self._training_began_at, started=self.buffer.started, engines=self._assembly.router.engine_statistics()
        )
        self._metrics.on_resume_dropped(self._dropped_by_resume)
        self._pool_usage.since_last()
        async with self._background.running(self._run_watchdog(), "watchdog"):
            async with self._background.running(self._dispatcher.run(), "dispatcher"):
                if self._evaluator.is_due(self.buffer.version) and not self._resumed:
                    self._evaluate_in_background()
                while not await self._train_to_end():
                    pass
            if self._stop_cause in ("steps", "seconds") and self._settings.evaluation.every:
                await self._weight_sync.sync()
                if self._evaluator.last_evaluated != self._weight_sync.engine_version:
                    self._evaluate_in_background()
                    await self._evaluation.wait()
            if self._background.failure is not None:
                raise self._background.failure

    async def _train_to_end(self) -> bool:
        """Trains until a cause to stop, and saves. Returns False if the trainer died while saving the last step, which
        must be repeated."""
        await self._train_steps()
        try:
            with self._pause.held():
                await self._save(last=True)
                await self._evaluation.wait()
        except TrainerDied as error:
            if self._stop_cause != "steps":
                self._reporter.notice("checkpoint", f"no checkpoint of step {self.buffer.version}: {error}")
                return True
            self._stop_cause = ""
            await self._rollback(error)
            return False
        return True

    @property
    def _unsaved_reason(self) -> str:
        """Why the last steps of the run are lost; empty if all steps are saved."""
        if self._saved_step == self.buffer.version:
            return ""
        newest = (
            "there is no checkpoint"
            if self._saved_step is None
            else f"the newest checkpoint is of step {self._saved_step}"
        )
        return f"reached step {self.buffer.version}, but {newest}"

    def _end_run(self, cause: str, raised: Exception | None = None) -> RunEnded:
        saved = str(self._run.checkpoints / folder_name(self._saved_step)) if self._saved_step is not None else ""
        line = RunEnded(
            at_s=self._reporter.now(), step=self.buffer.version, cause=cause, checkpoint=saved,
            dropped_so_far=dict(self.buffer.dropped),
        )  # fmt: skip
        self._reporter.write(line)
        if raised is not None:
            raise raised
        return line

    async def _run_warm_start(self) -> None:
        """Makes and saves the policy from which the first step starts."""
        while not self._can_save:
            self.in_warm_start = True
            try:
                self._warm_start_line = await self._evaluator.run_warm_start(self._trainer, self._progress)
                self.in_warm_start, self._can_save = False, True
                await self._save()
            except TrainerDied as error:
                self._can_save = False
                await self._assembly.router.update(await self._restart_trainer(error, None), rollback=True)
                self._reporter.notice("trainer", f"{error}; the warm start begins again")

    # ---- steps ----

    async def _train_steps(self) -> None:
        while (batch := await self._next_batch()) is not None:
            if self._in_batches and self.buffer.version_min > self._weight_sync.engine_version:
                # Groups still in flight are sampled by the version of the engines, which is too old for the next step.
                self._dispatcher.abandon_in_flight()
            self._weight_sync.discard_stale()
            if self._schedule.pull == "after_batch" and not self._in_batches:
                await self._weight_sync.sync()
                self._weight_sync.discard_stale()
            self._step_began_at = self._reporter.now()
            try:
                result = await self._trainer.step(batch)
            except ManagerError as error:  # it died, or published a version that engines cannot read
                await self._rollback(error)
                continue
            finally:
                self._step_began_at = None
            if batch.version >= self._highest_version:  # all steps lost by rollbacks are made again
                self._highest_version, self._trainer_deaths = batch.version + 1, 0
            self._watchdog.on_progress(self._reporter.now())
            self.buffer.finish_step(batch)
            self._weight_sync.on_published(result.weights)
            self._reporter.write(
                self._metrics.finish_step(
                    batch,
                    result,
                    now=self._reporter.now(),
                    started=self.buffer.started,
                    dropped=self.buffer.dropped,
                    buffered=self.buffer.statistics().waiting,
                    in_flight=len(self._dispatcher.in_flight),
                    stages=self._stage_counts(),
                    pools=self._pool_usage.since_last(),
                    engines=self._assembly.router.engine_statistics(),
                )
            )
            await self._after_step()

    async def _after_step(self) -> None:
        if not self._in_batches and self._schedule.pull == "at_once":
            self._background.start(self._weight_sync.sync(), f"update to {self._weight_sync.newest.version}")
        last = self.buffer.version >= self._schedule.steps  # `_train_to_end` saves the last step
        if self.buffer.version % self._settings.checkpoints.every == 0 and not last:
            try:
                await self._save()
            except TrainerDied as error:
                await self._rollback(error)
                return
        if self._evaluator.is_due(self.buffer.version) and not last:
            if self._schedule.staleness_bound == 0:
                began_at = self._reporter.now()
                with self._pause.held():
                    await self._weight_sync.sync()
                    self._evaluate_in_background()
                    await self._evaluation.wait()
                self._metrics.add_evaluation(self._reporter.now() - began_at)
            else:
                self._evaluate_in_background()
        self._changed.notify_all()

    async def _next_batch(self) -> TrainingBatch | None:
        """Returns None at the end of the run."""
        while True:
            if self._background.failure is not None:
                raise self._background.failure
            if self.buffer.version >= self._schedule.steps:
                self.stop("steps")
            elif self._seconds_left() <= 0.0:
                self.stop("seconds")
            if self._stop_cause:
                return None
            now = self._reporter.now()
            self._metrics.on_dropped(self.buffer.drop_stale())
            batch = self.buffer.take(now)
            if batch is not None:
                return batch
            wake_at = self.buffer.wake_at()
            timeout_s = min(
                STAGE_SAMPLE_S, self._seconds_left(), wake_at - now if wake_at is not None else STAGE_SAMPLE_S
            )
            stages = self._stage_counts()
            await self._changed.wait(timeout_s)
            self._metrics.add_wait(self._reporter.now() - now, stages)

    def _seconds_left(self) -> float:
        seconds_max = self._schedule.seconds_max
        return math.inf if seconds_max is None else self._training_began_at + seconds_max - self._reporter.now()

    def _stage_counts(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for task in self._assembly.rollout.statistics().tasks.values():
            counts.update(task.playing)
        return dict(counts)

    async def _run_watchdog(self) -> None:
        """Raises ManagerError after `stalls_max` stalls in a row."""
        while True:
            await asyncio.sleep(min(WATCHDOG_S, self._schedule.stall_s / 4.0))
            now = self._reporter.now()
            began_at = self._step_began_at
            training = (self.buffer.version + 1, now - began_at) if began_at is not None else None
            stall = self._watchdog.check(
                now,
                snapshot_run(self._assembly.rollout, self._assembly.router, self._assembly.client, training=training),
            )
            if stall is None:
                continue
            self._reporter.notice("stall", stall.text)
            if stall.give_up:
                raise ManagerError(f"{stall.number} stalls in a row; {stall.text}", retry=False)
            abort_stuck(self._assembly.rollout, stall)

    # ---- evaluation ----

    async def _evaluate(self) -> None:
        if not self._in_batches and self._schedule.pull == "at_once":
            await self._weight_sync.sync()
        await self._evaluator.evaluate(self._weight_sync.engine_version)

    def _evaluate_in_background(self) -> None:
        """Skips the evaluation if the one before still runs, or if the run is about to end."""
        if self._stop_cause == INTERRUPTED or self._background.failure is not None:
            return
        if not self._evaluation.is_running:
            self._evaluation.start(self._evaluate())

    # ---- checkpoints and rollback ----

    async def _save(self, *, last: bool = False) -> None:
        """Writes a checkpoint. If that fails, the run continues with a notice and the checkpoint before it. `last`: no
        other will follow, so older ones are deleted if that makes room for it."""
        step, freed = self.buffer.version, False
        while not self._run.has_checkpoint(step):
            try:
                await self._write_checkpoint(step)
            except TrainerDied:
                raise
            except ManagerError as error:
                if last and await asyncio.to_thread(self._run.make_room):
                    freed = True
                    continue
                self._reporter.notice("checkpoint", f"no checkpoint of step {step}: {error}")
                return
        self._saved_step = step
        if freed:
            text = f"the disk is full: older checkpoints were deleted for that of step {step}"
            self._reporter.notice("checkpoint", text)

    async def _write_checkpoint(self, step: int) -> None:
        """Raises ManagerError."""
        state = RunState(
            version=step, step=step, ticket_next=self._dispatcher.ticket_next, buffer=self.buffer.state(),
            at_s=self._reporter.now(), warm=self._warm_start_line, evaluations=self._evaluator.evaluations,
        )  # fmt: skip
        self._recorder.rotate(step)
        async with self._run.checkpoint(step) as path:
            await self._trainer.save(path)
            # Shielded: a cancelled checkpoint deletes its folder, and no thread may write into it then.
            await run_to_completion(asyncio.to_thread(save_codec, self._assembly.codec, path))
            await run_to_completion(asyncio.to_thread(write_state, path, state))

    async def _restart_trainer(self, error: ManagerError, checkpoint: Path | None) -> PolicyWeights:
        """Raises ManagerError after TRAINER_DEATHS_MAX deaths without progress."""
        while True:
            self._trainer_deaths += 1
            if self._trainer_deaths > TRAINER_DEATHS_MAX:
                raise ManagerError(
                    f"the trainer died {self._trainer_deaths} times and got no further: {error}"
                ) from error
            try:
                return await self._trainer.start(checkpoint)
            except TrainerDied as another:
                error = another

    async def _rollback(self, error: ManagerError) -> None:
        """Takes trainer, engines and samples back to the last checkpoint: samples trained on since wait again, samples
        with tokens of later versions are dropped. Raises ManagerError without a checkpoint."""
        self._can_save = False
        checkpoint = await asyncio.to_thread(self._run.latest_checkpoint)
        if checkpoint is None:
            raise ManagerError(f"{error}; there is no checkpoint to go back to") from error
        version = checkpoint.state.version
        if self._evaluator.rollback(version):
            self._evaluation.cancel()
        with self._pause.held():
            await self._weight_sync.rollback(
                partial(self._restart_trainer, error, checkpoint.path),
                version,
                f"sampled by weights that were rolled back: training continues from version {version}",
            )
            since = [
                record.group for record in self._run.samples_after(checkpoint.step) if isinstance(record, GroupPut)
            ]
            dropped = self.buffer.rollback(checkpoint.state.buffer, since, self._reporter.now())
            self._metrics.on_dropped(dropped)
            self._recorder.reopen(checkpoint)
            self._can_save, self._saved_step = True, checkpoint.step
        waiting = self.buffer.statistics().waiting
        self._reporter.notice(
            "rollback",
            f"{error}; training continues from the checkpoint of step {checkpoint.step}: {waiting} groups wait to be "
            f"trained on, and {len(dropped)} are dropped, because weights that sampled them were rolled back",
            step=checkpoint.step,
        )
