"""Training: one run from its first step to its last, with all that it needs made already.

Owns what happens when. For each step a batch is taken from the buffer, whatever is too old for the next one is stopped,
the trainer makes a version of it while the rollout goes on, and the engines take it, each between two of its steps,
with all trajectories kept. The modes differ in when groups begin (dispatcher.py) and when engines take weights, and in
nothing else. A trainer that dies is started again from the last checkpoint, and samples and engines go back with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tangram.errors import ManagerError
from tangram.rl.buffer.sample_buffer import Dropped, SampleBuffer
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.inference.router_records import (
    CameBack,
    EngineLost,
    EngineRemoved,
    EngineUpdated,
    Event,
    FellBack,
    NoEngine,
    said,
)
from tangram.rl.observe.pool_usage import PoolWatch
from tangram.rl.rollout.assembly import Assembled, save_codec
from tangram.rl.rollout.episode import Episode
from tangram.rl.rollout.records import Group, Ticket
from tangram.rl.runs.checkpoints import RunState, folder_name, write_state
from tangram.rl.runs.run_folder import RunFolder
from tangram.rl.runs.sample_log import Put, SampleLog
from tangram.rl.train.dispatcher import Bell, Feeder
from tangram.rl.train.evaluator import Looks
from tangram.rl.train.records import AnyLine, Batch, Noticed, Over
from tangram.rl.train.step_metrics import StepLedger, lost_by
from tangram.rl.train.trainer import Trainer, TrainerDied
from tangram.rl.train.watchdog import StallWatch, free, seen
from tangram.runtime.orchestrator import undisturbed

INTERRUPTED = "interrupted"
"""The cause of an end that waits for nothing but the step that is under way."""
LOOK_S = 0.1
"""Between two looks at what trajectories do, while a batch is waited for."""
WATCH_S = 2.0
"""Between two looks at whether anything moves."""
TRAINER_DEATHS_MAX = 3
"""Without a version between them that is further than any before: what kills it kills it always."""


class Training:
    """`run` it once; `stop` it at any time, and it ends after the step that is under way."""

    def __init__(
        self,
        settings: TrainSettings,
        run: RunFolder,
        log: SampleLog,
        made: Assembled,
        trainer: Trainer,
        buffer: SampleBuffer,
        upcoming: Iterator[Ticket],
        *,
        state: RunState | None,
        dropped: Collection[str] = (),
        looked: int = -1,
        tell: Callable[[AnyLine], None],
        progress: Progress | None,
    ) -> None:
        """`state`: of the checkpoint that it goes on from; None: it begins. `dropped`: causes of the groups that were
        dropped by going on from there. `looked`: the version that was evaluated last."""
        self.buffer = buffer
        self._settings = settings
        self._schedule = settings.training
        self._run = run
        self._log = log
        self._made = made
        self._trainer = trainer
        self._tell = tell
        self._progress = progress
        self._resumed = state is not None
        self._dropped_before = dropped
        self._began = time.monotonic() - (state.at_s if state is not None else 0.0)
        self._trains_since_s = 0.0
        self._waves = self._schedule.mode in ("sync", "sync+", "one-off") or self._schedule.alpha == 0
        self._newest = made.weights
        self._in_engines = made.weights.version
        """The version that they have."""
        self._updating = asyncio.Lock()
        self._evaluating: asyncio.Task[None] | None = None
        self._looks = Looks(
            settings, made, count=state.evaluations if state is not None else 0, looked=looked, now=self._now,
            tell=tell,
        )  # fmt: skip
        self._saved = state.step if state is not None else None
        """The step of the newest checkpoint."""
        self._warmed = state.warm if state is not None else None
        self.warming = False
        """Nothing is saved of a warm start that is not over."""
        self._savable = state is not None
        """The trainer has the version of the buffer, so that both can be saved."""
        self._cause = ""
        """Why it is to end."""
        self._failure: Exception | None = None
        self._deaths = 0
        """Of the trainer, since a version was reached that was not before."""
        self._furthest = buffer.version
        self._bell = Bell()
        self._steps_since_s: float | None = None
        """Since when the trainer has worked on a step."""
        self._stall = StallWatch(self._schedule.stall_s, self._schedule.stalls_max, self._now())
        self._besides: set[asyncio.Task[None]] = set()
        self._ledger = StepLedger(self._now())
        self._pools = PoolWatch(made.client)
        self._last_ticket = state.ticket_next - 1 if state is not None else -1
        self._feeder = Feeder(
            made.rollout, buffer, self._counted(upcoming),
            wave=self._schedule.batch if self._waves else None, bell=self._bell, now=self._now,
            up_to_date=self._bring_up_to_date, ended=self._group_ended, dropped=self._drop,
        )  # fmt: skip

    # ---- what it is asked and told ----

    def close(self) -> None:
        self._pools.close()
        self._log.close()

    def stop(self, cause: str) -> None:
        self._cause = cause if cause == INTERRUPTED else self._cause or cause
        if cause == INTERRUPTED and self._evaluating is not None:
            self._evaluating.cancel()
        self._bell.ring()

    def fresh(self, episode: Episode) -> bool:
        """Whether it can still be trained on. Whatever is played for another reason can."""
        first = episode.version_first
        if first is None or self._schedule.mode != "rollart" or episode.group not in self._feeder.playing:
            return True
        return first >= self._oldest_wanted

    def happened(self, event: Event) -> None:
        """In the gateway, which is not to suffer from a log that cannot be written."""
        if isinstance(event, EngineUpdated):
            self._ledger.updated(event)
        elif isinstance(event, EngineLost | EngineRemoved | FellBack | CameBack):
            try:
                self.notice("engine", said(event))
            except ManagerError as error:
                self._fail(error)

    # ---- its way ----

    async def run(self) -> Over:
        """Raises ManagerError for what cannot go on; what was reached is saved then."""
        failure = None
        try:
            await self._go()
        except Exception as error:
            failure = error
        finally:
            await self._end_besides()
        if failure is not None and self._savable:
            with contextlib.suppress(Exception):
                await self._save(last=True)
        return self._over(str(failure) if failure is not None else self._unsaved or self._cause, raised=failure)

    async def _go(self) -> None:
        if not self._resumed:
            await self._warm_up()
        self._trains_since_s = self._now()
        self._ledger = StepLedger(
            self._now(), started=self.buffer.started, engines=self._made.gateway.engine_statistics()
        )
        self._ledger.dropped_before(self._dropped_before)
        self._pools.since_last()
        async with self._beside(self._watch(), "watching"):
            async with self._beside(self._feeder.run(), "feeding"):
                if self._looks.due(self.buffer.version) and not self._resumed:
                    self._evaluate_beside()
                while not await self._learned():
                    pass
            if self._cause in ("steps", "seconds") and self._settings.evaluation.every:
                await self._bring_up_to_date()
                if self._looks.version != self._in_engines:
                    self._evaluate_beside()
                    await self._evaluated()
            if self._failure is not None:
                raise self._failure

    async def _learned(self) -> bool:
        """To the end, which is saved. Whether it is: a trainer that dies of saving the last step has not made it."""
        await self._learn()
        try:
            with self._feeder.holding():
                await self._save(last=True)
                await self._evaluated()
        except TrainerDied as error:
            if self._cause != "steps":
                self.notice("checkpoint", f"no checkpoint of step {self.buffer.version}: {error}")
                return True
            self._cause = ""
            await self._go_back(error)
            return False
        return True

    async def _end_besides(self) -> None:
        left = list(self._besides)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    @property
    def _unsaved(self) -> str:
        """That steps were made which nobody can go on from, in words; empty: there are none."""
        if self._saved == self.buffer.version:
            return ""
        newest = "there is no checkpoint" if self._saved is None else f"the newest checkpoint is of step {self._saved}"
        return f"reached step {self.buffer.version}, but {newest}"

    def _over(self, cause: str, raised: Exception | None = None) -> Over:
        saved = str(self._run.checkpoints / folder_name(self._saved)) if self._saved is not None else ""
        over = Over(
            at_s=self._now(), step=self.buffer.version, cause=cause, checkpoint=saved,
            dropped_so_far=dict(self.buffer.dropped),
        )  # fmt: skip
        self._tell(over)
        if raised is not None:
            raise raised
        return over

    async def _learn(self) -> None:
        while (batch := await self._batch()) is not None:
            if self._waves and self.buffer.oldest_wanted > self._in_engines:
                self._feeder.leave_behind()
            if self._schedule.pull == "after_batch" and not self._waves:
                await self._bring_up_to_date()
            self._expire()
            self._steps_since_s = self._now()
            try:
                stepped = await self._trainer.step(batch)
            except ManagerError as error:  # it died, or has made a version that nobody can read
                await self._go_back(error)
                continue
            finally:
                self._steps_since_s = None
            if batch.version >= self._furthest:  # what was lost is made up for
                self._furthest, self._deaths = batch.version + 1, 0
            self._stall.progress(self._now())
            self.buffer.trained(batch)
            self._newest = stepped.weights
            self._expire()
            self._tell(
                self._ledger.line(
                    batch,
                    stepped,
                    now_s=self._now(),
                    started=self.buffer.started,
                    dropped=self.buffer.dropped,
                    buffered=self.buffer.statistics().waiting,
                    in_flight=len(self._feeder.playing),
                    stages=self._stages(),
                    pools=self._pools.since_last(),
                    engines=self._made.gateway.engine_statistics(),
                )
            )
            await self._after_step()

    async def _after_step(self) -> None:
        if not self._waves and self._schedule.pull == "at_once":
            self._update_beside()
        last = self.buffer.version >= self._schedule.steps  # which is saved at the end
        if self.buffer.version % self._settings.checkpoints.every == 0 and not last:
            try:
                await self._save()
            except TrainerDied as error:
                await self._go_back(error)
                return
        if self._looks.due(self.buffer.version) and not last:
            if self._schedule.alpha == 0:
                began_s = self._now()
                with self._feeder.holding():
                    await self._bring_up_to_date()
                    self._evaluate_beside()
                    await self._evaluated()
                self._ledger.evaluated(self._now() - began_s)
            else:
                self._evaluate_beside()
        self._bell.ring()

    async def _batch(self) -> Batch | None:
        """The next one; None if there is an end to it."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self.buffer.version >= self._schedule.steps:
                self.stop("steps")
            elif self._seconds_left() <= 0.0:
                self.stop("seconds")
            if self._cause:
                return None
            now_s = self._now()
            self._ledger.dropped(self.buffer.evict())
            batch = self.buffer.take(now_s)
            if batch is not None:
                return batch
            wake_at = self.buffer.wake_at()
            patience_s = min(LOOK_S, self._seconds_left(), wake_at - now_s if wake_at is not None else LOOK_S)
            stages = self._stages()
            await self._bell.heard(patience_s)
            self._ledger.waited(self._now() - now_s, stages)

    def _seconds_left(self) -> float:
        most = self._schedule.seconds_max
        return math.inf if most is None else self._trains_since_s + most - self._now()

    def _expire(self) -> None:
        """What is too old for the next step, wherever it is."""
        if self._schedule.mode == "rollart":
            self._ledger.dropped(self.buffer.evict())
            oldest = self._oldest_wanted
            self._made.rollout.expire(oldest, f"begun by weights older than version {oldest}")

    @property
    def _oldest_wanted(self) -> int:
        """What is in play and older is stopped. What the engines would write in its place has to be newer, or it would
        be stopped as well, and so on until they have their weights."""
        return min(self.buffer.oldest_wanted, self._in_engines)

    # ---- weights ----

    async def _bring_up_to_date(self) -> None:
        """Until the engines have the newest weights. Nothing begins meanwhile, so that what begins is new."""
        async with self._updating:
            if self._waves:
                await self._evaluated()  # by one version, where that costs nothing
            if self._newest.version == self._in_engines:
                return
            with self._feeder.holding():
                self._in_engines = await self._updated()
            self._expire()

    async def _updated(self) -> int:
        """The version that the engines took. Raises NoEngine, and ManagerError if they take none."""
        while True:
            newest = self._newest
            try:
                await self._made.gateway.update(newest)
                return newest.version
            except NoEngine:
                raise
            except ManagerError:
                if newest is self._newest:
                    raise
                # It was deleted while they read it: there are so many newer ones.

    def _update_beside(self) -> None:
        task = asyncio.create_task(self._bring_up_to_date(), name=f"update to {self._newest.version}")
        self._besides.add(task)
        task.add_done_callback(self._beside_ended)

    def _beside_ended(self, task: asyncio.Task[None]) -> None:
        self._besides.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, Exception):
            raise error
        self._failure = self._failure or error
        if self._evaluating is not None:
            self._evaluating.cancel()
        self._bell.ring()

    @asynccontextmanager
    async def _beside(self, work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
        """What fails there fails the run; it ends with the block."""
        task = asyncio.create_task(work, name=name)
        self._besides.add(task)
        task.add_done_callback(self._beside_ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _watch(self) -> None:
        """Raises ManagerError when nothing has moved for too long."""
        while True:
            await asyncio.sleep(min(WATCH_S, self._schedule.stall_s / 4.0))
            now_s = self._now()
            since_s = self._steps_since_s
            training = (self.buffer.version + 1, now_s - since_s) if since_s is not None else None
            stall = self._stall.look(
                now_s, seen(self._made.rollout, self._made.gateway, self._made.client, training=training)
            )
            if stall is None:
                continue
            self.notice("stall", stall.text)
            if stall.give_up:
                raise ManagerError(f"{stall.number} stalls in a row; {stall.text}", retry=False)
            free(self._made.rollout, stall)

    # ---- looking at the policy ----

    async def _evaluate(self) -> None:
        if not self._waves and self._schedule.pull == "at_once":
            await self._bring_up_to_date()
        await self._looks.evaluate(self._in_engines)

    def _evaluate_beside(self) -> None:
        """Unless one is under way: whoever is slower than the steps skips some. Nor when the run is to end at once."""
        if self._cause == INTERRUPTED or self._failure is not None:
            return
        if self._evaluating is None or self._evaluating.done():
            self._evaluating = asyncio.create_task(self._evaluate(), name="evaluation")
            self._besides.add(self._evaluating)
            self._evaluating.add_done_callback(self._beside_ended)

    async def _evaluated(self) -> None:
        """Until none is under way."""
        if self._evaluating is not None:
            await asyncio.wait({self._evaluating})

    async def _warm_up(self) -> None:
        """The policy before its first step, saved."""
        while not self._savable:
            self.warming = True
            try:
                self._warmed = await self._looks.warm(self._trainer, self._progress)
                self.warming, self._savable = False, True
                await self._save()
            except TrainerDied as error:
                self._savable = False
                await self._made.gateway.update(await self._restarted(error, None), rollback=True)
                self.notice("trainer", f"{error}; the warm start begins anew")

    # ---- checkpoints, and back to them ----

    async def _save(self, *, last: bool = False) -> None:
        """A checkpoint that cannot be written is told; the one before it stays. `last`: there will be no other, so that
        older ones go, if that makes room for it."""
        step, freed = self.buffer.version, False
        while not self._run.has(step):
            try:
                await self._write(step)
            except TrainerDied:
                raise
            except ManagerError as error:
                if last and await asyncio.to_thread(self._run.make_room):
                    freed = True
                    continue
                self.notice("checkpoint", f"no checkpoint of step {step}: {error}")
                return
        self._saved = step
        if freed:
            self.notice("checkpoint", f"the disk is full: older checkpoints were deleted for that of step {step}")

    async def _write(self, step: int) -> None:
        """Raises ManagerError."""
        state = RunState(
            version=step, step=step, ticket_next=self._last_ticket + 1, buffer=self.buffer.state(), at_s=self._now(),
            warm=self._warmed, evaluations=self._looks.count,
        )  # fmt: skip
        self._log.rotate(step)
        async with self._run.checkpoint(step) as path:
            await self._trainer.save(path)
            # To their end: of what is cancelled the folder is removed, and nobody may write into it then.
            await undisturbed(asyncio.to_thread(save_codec, self._made.codec, path))
            await undisturbed(asyncio.to_thread(write_state, path, state))

    async def _restarted(self, error: ManagerError, checkpoint: Path | None) -> Weights:
        """A trainer that lives. Raises ManagerError, if there is no end to its dying."""
        while True:
            self._deaths += 1
            if self._deaths > TRAINER_DEATHS_MAX:
                raise ManagerError(f"the trainer died {self._deaths} times and got no further: {error}") from error
            try:
                return await self._trainer.start(checkpoint)
            except TrainerDied as another:
                error = another

    async def _go_back(self, error: ManagerError) -> None:
        """The trainer is gone, and with it every version since the last checkpoint: its samples return, what newer
        versions wrote is dropped, and the engines take the older weights. Raises ManagerError, if it cannot."""
        self._savable = False
        found = await asyncio.to_thread(self._run.latest)
        if found is None:
            raise ManagerError(f"{error}; there is no checkpoint to go back to") from error
        version = found.state.version
        cause = f"of a lineage that was lost: training goes on from version {version}"
        if self._looks.version > version:
            self._looks.version = -1
            if self._evaluating is not None:
                self._evaluating.cancel()
        with self._feeder.holding():
            async with self._updating:
                self._newest = await self._restarted(error, found.path)
                self._made.rollout.expire_after(version, cause)
                await self._made.gateway.update(self._newest, rollback=True)
                self._in_engines = version
                self._made.rollout.expire_after(version, cause)
            since = [each.group for each in self._run.samples_after(found.step) if isinstance(each, Put)]
            dropped = self.buffer.rollback(found.state.buffer, since, self._now())
            self._ledger.dropped(dropped)
            self._log.close()
            self._log = self._run.go_on(found)
            self._savable, self._saved = True, found.step
        waiting = self.buffer.statistics().waiting
        self.notice(
            "rollback",
            f"{error}; training goes on from the checkpoint of step {found.step}: {waiting} groups wait to be trained "
            f"on, and {len(dropped)} are dropped as samples of versions that are lost",
            step=found.step,
        )

    # ---- small things ----

    def _group_ended(self, group: Group) -> None:
        """What cannot be written down is played again, should the run be resumed from before it."""
        try:
            if group.members:
                self._log.append(group)
            else:
                self._log.append_lost(group.id, lost_by(group))
        except ManagerError as error:
            self.notice("checkpoint", f"{group.id} is not in the log of samples: {error}")
        self._ledger.group_ended(group)
        if group.members:
            self._stall.progress(self._now())

    def _drop(self, dropped: tuple[Dropped, ...]) -> None:
        self._ledger.dropped(dropped)

    def _counted(self, upcoming: Iterator[Ticket]) -> Iterator[Ticket]:
        for ticket in upcoming:
            self._last_ticket = max(self._last_ticket, ticket.number)
            yield ticket

    def _stages(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for task in self._made.rollout.statistics().tasks.values():
            counts.update(task.playing)
        return dict(counts)

    def notice(self, kind: str, text: str, step: int | None = None) -> None:
        self._tell(Noticed(at_s=self._now(), kind=kind, text=text, step=step))

    def _now(self) -> float:
        return time.monotonic() - self._began
