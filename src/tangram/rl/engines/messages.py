"""What an engine's process and its owner say to each other, over a socket pair.

Owns the messages and their frames. A frame is its length in four bytes and a message in msgpack; nothing in it can be
executed. Commands go in, answers come out, both in the order in which they were said. Promises that a frame is never
longer than FRAME_BYTES_MAX: whoever reads a greater length is no longer in step, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from tangram.errors import ManagerError
from tangram.rl.engines.base import EngineStatistics, Generation, Request, Weights
from tangram.rl.settings import EngineSettings

HEADER_BYTES = 4
FRAME_BYTES_MAX = 1 << 28
"""Ids that sampling left (`keep_ids`) may be a whole vocabulary for each token; everything else is far smaller."""


# ---- commands ---------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Hello(Command, frozen=True, kw_only=True):
    """The first one. It is answered by Ready when the engine can serve, or by NotReady."""

    name: str
    settings: EngineSettings
    dtype: str
    weights: Weights
    beat_s: float
    """How often it says what it does while it works."""
    record_steps: bool = False


class Add(Command, frozen=True, kw_only=True):
    """Answered by Done or Refused; ahead of that by any number of Written."""

    request: Request


class Abort(Command, frozen=True, kw_only=True):
    """Not answered. An answer to the request may be on its way."""

    id: str


class Suspend(Command, frozen=True, kw_only=True):
    ask: int
    """Comes back in the answer."""


class Update(Command, frozen=True, kw_only=True):
    ask: int
    weights: Weights


class Resume(Command, frozen=True, kw_only=True):
    ask: int


class Close(Command, frozen=True, kw_only=True):
    """Not answered but by its end."""


# ---- answers ----------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Ready(Answer, frozen=True, kw_only=True):
    pass


class NotReady(Answer, frozen=True, kw_only=True):
    reason: str


class Written(Answer, frozen=True, kw_only=True):
    """Of a request that goes on: its tokens since the last message about it. Done repeats them all."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...] | None = None


class Done(Answer, frozen=True, kw_only=True):
    id: str
    generation: Generation
    """All of it."""


class Refused(Answer, frozen=True, kw_only=True):
    """The request cannot be served by this engine. The words are those of InvalidInput."""

    id: str
    field: str
    value: str
    expected: str


class Acknowledged(Answer, frozen=True, kw_only=True):
    """Of Suspend and Resume: it is so from the next step on."""

    ask: int


class Updated(Answer, frozen=True, kw_only=True):
    ask: int
    version: int


class UpdateFailed(Answer, frozen=True, kw_only=True):
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


class Beat(Answer, frozen=True, kw_only=True):
    """It lives, and this is what it has done. Also said when it runs out of work."""

    statistics: EngineStatistics
    steps: tuple[StepRecord, ...] = ()
    """Since the last beat, if they are recorded."""


AnyCommand = Hello | Add | Abort | Suspend | Update | Resume | Close
AnyAnswer = Ready | NotReady | Written | Done | Refused | Acknowledged | Updated | UpdateFailed | Beat

_encoder = msgspec.msgpack.Encoder()
_Message = TypeVar("_Message")


def framed(message: AnyCommand | AnyAnswer) -> bytes:
    """Raises FrameTooLong."""
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > FRAME_BYTES_MAX:
        raise FrameTooLong(size)
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "little")
    return bytes(frame)


class FrameTooLong(ManagerError):
    def __init__(self, size: int) -> None:
        super().__init__(f"expected a message of at most {FRAME_BYTES_MAX} bytes, got one of {size}", retry=False)


class Frames(Generic[_Message]):
    """Bytes as they come, cut into messages."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, content: bytes) -> Iterator[_Message]:
        """Raises FrameTooLong, and msgspec.DecodeError for what is no message: the two ends are out of step."""
        buffer = self._buffer
        buffer += content
        while len(buffer) >= HEADER_BYTES:
            size = int.from_bytes(buffer[:HEADER_BYTES], "little")
            if size > FRAME_BYTES_MAX:
                raise FrameTooLong(size)
            if len(buffer) < HEADER_BYTES + size:
                return
            frame = bytes(memoryview(buffer)[HEADER_BYTES : HEADER_BYTES + size])
            del buffer[: HEADER_BYTES + size]
            yield self._decoder.decode(frame)


def commands() -> Frames[AnyCommand]:
    return Frames(AnyCommand)


def answers() -> Frames[AnyAnswer]:
    return Frames(AnyAnswer)
