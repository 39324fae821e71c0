"""What an engine's process and its owner say to each other, over a socket pair.

Owns the messages; processes/framing.py encodes them. Commands go in, answers come out, both in the order in which they
were said.
"""

from __future__ import annotations

import msgspec

from tangram.processes.framing import Frames
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines.protocol import EngineStatistics, Generation, Request, Weights

# ---- commands ---------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    pass


class Hello(Command, frozen=True, kw_only=True, tag="Hello"):
    """The first one. It is answered by Ready when the engine can serve, or by NotReady."""

    name: str
    settings: EngineSettings
    dtype: str
    weights: Weights
    beat_s: float
    """How often it says what it does while it works."""
    record_steps: bool = False


class Add(Command, frozen=True, kw_only=True, tag="Add"):
    """Answered by Done or Refused; ahead of that by any number of Written."""

    request: Request


class Abort(Command, frozen=True, kw_only=True, tag="Abort"):
    """Not answered. An answer to the request may be on its way."""

    id: str


class Suspend(Command, frozen=True, kw_only=True, tag="Suspend"):
    ask: int
    """Comes back in the answer."""


class Fetch(Command, frozen=True, kw_only=True, tag="Fetch"):
    """Weights are read while it goes on writing. Answered by Fetched or UpdateFailed; ahead of that by any number of
    Fetching. A second one takes the place of the first, which has failed then."""

    ask: int
    weights: Weights


class Update(Command, frozen=True, kw_only=True, tag="Update"):
    """Weights that were fetched take the place of the old ones; others are read first. Answered by Updated or
    UpdateFailed."""

    ask: int
    weights: Weights


class Resume(Command, frozen=True, kw_only=True, tag="Resume"):
    ask: int


class Close(Command, frozen=True, kw_only=True, tag="Close"):
    """Not answered but by its end."""


# ---- answers ----------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    pass


class Ready(Answer, frozen=True, kw_only=True, tag="Ready"):
    pass


class NotReady(Answer, frozen=True, kw_only=True, tag="NotReady"):
    reason: str


class Written(Answer, frozen=True, kw_only=True, tag="Written"):
    """Of a request that goes on: its tokens since the last message about it. Done repeats them all."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...] | None = None


class Done(Answer, frozen=True, kw_only=True, tag="Done"):
    id: str
    generation: Generation
    """All of it."""


class Refused(Answer, frozen=True, kw_only=True, tag="Refused"):
    """The request cannot be served by this engine. The words are those of InvalidInput."""

    id: str
    field: str
    value: str
    expected: str


class Acknowledged(Answer, frozen=True, kw_only=True, tag="Acknowledged"):
    """Of Suspend and Resume: it is so from the next step on."""

    ask: int


class Fetching(Answer, frozen=True, kw_only=True, tag="Fetching"):
    """It goes on: nothing else is said by an engine that has nothing to write."""

    ask: int


class Fetched(Answer, frozen=True, kw_only=True, tag="Fetched"):
    ask: int
    version: int


class Updated(Answer, frozen=True, kw_only=True, tag="Updated"):
    ask: int
    version: int


class UpdateFailed(Answer, frozen=True, kw_only=True, tag="UpdateFailed"):
    """The old weights stay."""

    ask: int
    reason: str


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step, by the clock of the engine's process."""

    ended_s: float
    commands: tuple[str, ...]
    """Taken since the step before."""
    prefilled: int
    """Tokens that were read."""
    decoded: int
    """Requests for which one token was written after another."""


class Beat(Answer, frozen=True, kw_only=True, tag="Beat"):
    """It lives, and this is what it has done. Also said when it runs out of work."""

    statistics: EngineStatistics
    steps: tuple[StepRecord, ...] = ()
    """Since the last beat, if they are recorded."""


AnyCommand = Hello | Add | Abort | Suspend | Fetch | Update | Resume | Close
AnyAnswer = (
    Ready | NotReady | Written | Done | Refused | Acknowledged | Fetching | Fetched | Updated | UpdateFailed | Beat
)


def commands() -> Frames[AnyCommand]:
    return Frames(AnyCommand)


def answers() -> Frames[AnyAnswer]:
    return Frames(AnyAnswer)
