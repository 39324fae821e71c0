"""Trainers: what turns batches into new weights. The protocol; rl/train/trainer_process.py has the real one.

A trainer does one thing at a time, in the order in which it is asked. It publishes what it makes. One that dies is made
anew and given a checkpoint: whoever owns it decides which, as the samples and the engines have to go back with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tangram.errors import ManagerError
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.train.records import Batch, Demonstration, Stepped


class TrainerDied(ManagerError):
    """It ended, hung or broke down. What it was doing is not done; what it had published may be whole."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"trainer: {reason}")


class Trainer(Protocol):
    async def start(self, checkpoint: Path | None = None) -> Weights:
        """Ready, with the weights of a checkpoint (as `save` wrote it; its version goes on) or with the first ones,
        version 0. They are published, and what was published of later versions is gone. Also after it died. Raises
        TrainerDied and ManagerError, and InvalidConfig for settings of which it cannot be made."""
        ...

    async def imitate(self, episodes: Sequence[Demonstration]) -> float:
        """One supervised step; its loss. Nothing is published and the version stays."""
        ...

    async def publish(self, version: int) -> Weights:
        """The weights as they are, as this version; for the looks at a warm start. A version that is there is
        replaced."""
        ...

    async def step(self, batch: Batch) -> Stepped:
        """Raises TrainerDied; InvalidInput for a batch that cannot be trained on, in which case nothing changed."""
        ...

    async def save(self, folder: Path) -> None:
        """Into a folder that is there: weights, optimiser and random state, so that the next step from it is the same
        to the last bit. Raises ManagerError, if it cannot be written."""
        ...

    async def close(self) -> None: ...
