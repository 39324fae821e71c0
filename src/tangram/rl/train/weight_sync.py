"""Weight sync: engines take the newest weights, and samples that are too stale for the next step are discarded.

Owns which version is the newest and which one the engines have. Never trains. Promises that no group starts while
engines take weights, so that what starts afterwards is sampled by the new version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tangram.errors import ManagerError
from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.inference.router import Router
from tangram.rl.inference.router_records import NoEngine
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.train.background_tasks import BackgroundEvaluation
from tangram.rl.train.coordination import DispatchPause
from tangram.rl.train.step_metrics import StepMetrics


class WeightSync:
    def __init__(
        self,
        weights: PolicyWeights,
        router: Router,
        rollout: Rollout,
        buffer: SampleBuffer,
        pause: DispatchPause,
        evaluation: BackgroundEvaluation,
        metrics: StepMetrics,
        *,
        in_batches: bool,
        aborts_stale: bool,
    ) -> None:
        """`weights`: what the engines have now. `in_batches`: groups start in batches, so the engines are idle between
        two batches, and a sync waits there for a running evaluation. `aborts_stale`: samples that are too stale for the
        next step are stopped immediately (mode `async`)."""
        self.newest = weights
        """The newest weights that the trainer has published."""
        self.engine_version = weights.version
        self._router, self._rollout, self._buffer = router, rollout, buffer
        self._pause, self._evaluation, self._metrics = pause, evaluation, metrics
        self._in_batches, self._aborts_stale = in_batches, aborts_stale
        self._lock = asyncio.Lock()

    async def sync(self) -> None:
        """Blocks until the engines have the newest weights. Raises NoEngine, and ManagerError if no engine takes
        them."""
        async with self._lock:
            if self._in_batches:
                # So that one version plays all of it; no group is in flight between two batches.
                await self._evaluation.wait()
            if self.newest.version == self.engine_version:
                return
            with self._pause.held():
                self.engine_version = await self._update_engines()
            self.discard_stale()

    async def rollback(self, restart: Callable[[], Awaitable[PolicyWeights]], version: int, cause: str) -> None:
        """Restarts the trainer at `version`, rolls the engines back to it, and discards members with tokens of later
        versions. Raises what `restart` raises."""
        async with self._lock:
            self.newest = await restart()
            self._rollout.discard_newer_than(version, cause)
            await self._router.update(self.newest, rollback=True)
            self.engine_version = version
            # Again: until the engines were rolled back, turns could still end with tokens of later versions.
            self._rollout.discard_newer_than(version, cause)

    def on_published(self, weights: PolicyWeights) -> None:
        """The trainer has published newer weights."""
        self.newest = weights
        self.discard_stale()

    def discard_stale(self) -> None:
        """Enforces the staleness bound after new weights: discards what is too stale for the next step, which may be
        groups in the buffer and members of groups in flight, ended or not. Does nothing in modes that do not abort
        stale samples."""
        if self._aborts_stale:
            self._metrics.on_dropped(self._buffer.drop_stale())
            # A member that replaces a stale one must not be stale at its start: engines may still have older weights.
            oldest = min(self._buffer.version_min, self.engine_version)
            self._rollout.discard_older_than(oldest, f"sampled by weights older than version {oldest}")

    async def _update_engines(self) -> int:
        """Returns the version that the engines took."""
        while True:
            newest = self.newest
            try:
                await self._router.update(newest)
                return newest.version
            except NoEngine:
                raise
            except ManagerError:
                if newest is self.newest:
                    raise
                # The trainer deleted the version while engines read it, having published several newer ones.
