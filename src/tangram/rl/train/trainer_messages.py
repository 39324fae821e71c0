"""What a trainer's process and its owner say to each other, over a socket pair.

Owns the messages; processes/framing.py encodes them. Every command but the first and the last has a number, which comes
back in its one answer; answers come in the order of the commands. Beats come between them.
"""

from __future__ import annotations

import msgspec

from tangram.processes.framing import Frames
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.train.records import Batch, Demonstration, Stepped

# ---- commands ---------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    ask: int
    """Comes back in the answer."""


class Hello(Command, frozen=True, kw_only=True, tag="Hello"):
    """The first one. It is answered by Ready when the trainer has its weights and has published them, or by
    NotReady or Refused."""

    settings: TrainSettings
    vocabulary: int
    """Tokens that a new policy knows."""
    folder: str
    """Where weights are published."""
    keep: int
    """Published versions that stay, the newest."""
    checkpoint: str | None
    learner: str
    """`module:name` of the class that learns."""
    reward_low: dict[str, float]
    tokens_longest: int
    beat_s: float
    """How often it says that it is at work."""


class Imitate(Command, frozen=True, kw_only=True, tag="Imitate"):
    """Answered by Imitated."""

    episodes: tuple[Demonstration, ...]


class Publish(Command, frozen=True, kw_only=True, tag="Publish"):
    """Answered by Published."""

    version: int


class Step(Command, frozen=True, kw_only=True, tag="Step"):
    """Answered by Done."""

    batch: Batch


class Save(Command, frozen=True, kw_only=True, tag="Save"):
    """Answered by Saved."""

    folder: str


class Close(Command, frozen=True, kw_only=True, tag="Close"):
    """Not answered but by its end."""


# ---- answers ----------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    ask: int


class Ready(Answer, frozen=True, kw_only=True, tag="Ready"):
    weights: Weights


class NotReady(Answer, frozen=True, kw_only=True, tag="NotReady"):
    reason: str
    retry: bool


class Imitated(Answer, frozen=True, kw_only=True, tag="Imitated"):
    loss: float


class Published(Answer, frozen=True, kw_only=True, tag="Published"):
    weights: Weights


class Done(Answer, frozen=True, kw_only=True, tag="Done"):
    stepped: Stepped


class Saved(Answer, frozen=True, kw_only=True, tag="Saved"):
    pass


class Refused(Answer, frozen=True, kw_only=True, tag="Refused"):
    """What came cannot be used, and nothing has changed; of Hello, the settings. The words are those of
    InvalidInput."""

    field: str
    value: str
    expected: str


class Failed(Answer, frozen=True, kw_only=True, tag="Failed"):
    """The world did not let it: a full disk, mostly."""

    reason: str
    retry: bool


class Beat(Answer, frozen=True, kw_only=True, tag="Beat"):
    """It is at work, and has used the processor since the last one. `ask` is that of what it does."""


AnyCommand = Hello | Imitate | Publish | Step | Save | Close
AnyAnswer = Ready | NotReady | Imitated | Published | Done | Saved | Refused | Failed | Beat


def commands() -> Frames[AnyCommand]:
    return Frames(AnyCommand)


def answers() -> Frames[AnyAnswer]:
    return Frames(AnyAnswer)
