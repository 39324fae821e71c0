"""A learner without a gradient, in a module of its own: the process of a trainer imports it.

The tasks of its samples select its behaviour: each of them names a way in which a step ends.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

from tangram.errors import InvalidInput, ManagerError
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.model import weight_store
from tangram.rl.model.policy import Policy
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch

STATE = "state.pt"
HALF = "half.pt"
WAITS_S = 0.003
"""Between two pieces of what is computed: still computing for an observer, while other processes have the cores."""


class Adder:
    """Each step adds to all weights what depends on the batch and on chance."""

    def __init__(
        self, settings: TrainSettings, policy: Policy, *, reward_low: dict[str, float], tokens_longest: int
    ) -> None:
        self.version = 0
        self._model = policy.module
        self._told = {f"low_{task}": low for task, low in reward_low.items()} | {"longest": float(tokens_longest)}
        self._chance = torch.Generator().manual_seed(settings.seed)

    def imitate(self, demonstrations: tuple[Demonstration, ...]) -> float:
        self._add(0.5)
        return float(sum(len(each.tokens) for each in demonstrations))

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        for group in batch.groups:
            for member in group.members:
                assert not member.spans and not member.observation
                assert not any(turn.observation or turn.action for turn in member.turns)
            self._go(group.task, Path(group.cause))
        rewards = [member.reward or 0.0 for group in batch.groups for member in group.members]
        self._add(sum(rewards))
        self.version += 1
        return self._told | {"loss": sum(rewards), "threads": float(torch.get_num_threads())}

    def save(self, folder: Path) -> None:
        if (folder / "slow").exists():
            (folder / HALF).touch()
            time.sleep(600)
        state = (self.version, self._model.state_dict(), self._chance.get_state())
        torch.save((), folder / HALF)
        try:
            torch.save(state, folder / STATE)
        except RuntimeError as error:
            raise ManagerError(f"{folder / STATE} cannot be written: {error}") from error

    def restore(self, folder: Path) -> None:
        try:
            self.version, model, chance = torch.load(folder / STATE)
        except OSError as error:
            raise ManagerError(f"{folder / STATE}: {error.strerror}", retry=False) from error
        self._model.load_state_dict(model)
        self._chance.set_state(chance)

    def _add(self, amount: float) -> None:
        with torch.no_grad():
            for weight in self._model.parameters():
                weight += amount * torch.rand(weight.shape, generator=self._chance)

    def _go(self, how: str, file: Path) -> None:
        match how:
            case "wrong":
                raise InvalidInput("groups", 0, "what can be trained on")
            case "not finite":
                raise ManagerError("the loss is nan")
            case "broken":
                raise ZeroDivisionError("a loss of one's own")
            case "wait":
                file.touch()
                time.sleep(600)
            case "compute":
                until = time.monotonic() + float(file.name)
                while time.monotonic() < until:
                    torch.rand(400, 400).sum()
                    time.sleep(WAITS_S)
            case "memory":
                resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
                torch.ones(1 << 33)
            case "full":
                _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, most))
            case "room":
                _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            case "slow publishing":
                whole = weight_store.write_bucket

                def half(*arguments):
                    whole(*arguments)
                    file.touch()
                    time.sleep(600)

                weight_store.write_bucket = half
