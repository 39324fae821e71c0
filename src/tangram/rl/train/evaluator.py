"""Looks at the policy of a run, on held-out seeds: how well it does before its training, beside it and after it.

Owns the number of each, so that no two have groups of the same name. Never changes weights; whoever asks has seen to it
that the engines have those that are meant.
"""

from __future__ import annotations

from collections.abc import Callable

from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.rollout.assembly import Assembled
from tangram.rl.train.evaluation import evaluate, held_out
from tangram.rl.train.records import AnyLine, Evaluated, Warmed
from tangram.rl.train.trainer import Trainer
from tangram.rl.train.warm_start import Look, shown, warm_start, warmed_tasks


class Looks:
    def __init__(
        self,
        settings: TrainSettings,
        made: Assembled,
        *,
        count: int,
        looked: int,
        now: Callable[[], float],
        tell: Callable[[AnyLine], None],
    ) -> None:
        """`count`: how many there were already. `looked`: the version of the last; -1, if there was none."""
        self.count = count
        self.version = looked
        """The last that was evaluated."""
        self._settings, self._made, self._now, self._tell = settings, made, now, tell

    def due(self, version: int) -> bool:
        every = self._settings.evaluation.every
        return every > 0 and version % every == 0

    async def evaluate(self, version: int) -> None:
        """What the engines have is this version."""
        own, began_s = self._settings.evaluation, self._now()
        self.count += 1
        self.version = version
        upcoming = held_out(self._settings, own.episodes, temperature=own.temperature, number=self.count)
        scores = await evaluate(self._made.rollout, upcoming)
        line = Evaluated(
            at_s=self._now(), step=version, seconds=self._now() - began_s, scores=scores.mean, spread=scores.spread,
            episodes=scores.episodes, temperature=own.temperature,
        )  # fmt: skip
        self._tell(line)

    async def warm(self, trainer: Trainer, progress: Progress | None) -> Warmed | None:
        """The warm start, until it is enough; None: no task has one. Raises TrainerDied and ManagerError."""
        if not warmed_tasks(self._settings):
            return None
        demonstrations = await shown(self._settings, self._made.client, self._made.codec, progress)

        async def score() -> dict[str, float]:
            await self._made.gateway.update(await trainer.publish(0))
            return await self._scores(self._settings.warm_start.check_episodes, 1.0)

        last = await warm_start(self._settings, trainer, demonstrations, score, self._looked)
        greedy = await self._scores(self._settings.evaluation.episodes, 0.0)
        cause = f"not reached by {', '.join(last.behind)} in {last.step} steps" if last.behind else "reached by all"
        warmed = Warmed(
            at_s=self._now(), step=last.step, loss=last.loss, scores=last.scores, greedy=greedy, over=True, cause=cause
        )
        self._tell(warmed)
        return warmed

    async def _scores(self, episodes: int, temperature: float) -> dict[str, float]:
        """Each time on other seeds: a policy that was unlucky with some is not so for ever."""
        self.count += 1
        number = self.count
        upcoming = held_out(self._settings, episodes, temperature=temperature, number=number, first=number * episodes)
        return (await evaluate(self._made.rollout, upcoming)).mean

    def _looked(self, look: Look) -> None:
        self._tell(Warmed(at_s=self._now(), step=look.step, loss=look.loss, scores=look.scores))
