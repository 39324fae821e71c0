"""Messages between the process of an engine and its owner, over a socket pair.

Owns the messages; processes/framing.py encodes them. Commands and responses each arrive in the order in which they were
sent.
"""

from __future__ import annotations

import msgspec

from tangram.processes.framing import FrameDecoder
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines.protocol import EngineStatistics, Generation, GenerationRequest, PolicyWeights

# ---- commands ---------------------------------------------------------------------------------------------------


class EngineCommand(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    pass


class EngineHello(EngineCommand, frozen=True, kw_only=True, tag="Hello"):
    """The first command. The response is EngineReady when the engine can serve, or EngineNotReady."""

    name: str
    settings: EngineSettings
    dtype: str
    weights: PolicyWeights
    beat_s: float
    """Heartbeat interval while it works."""
    record_steps: bool = False


class AddRequest(EngineCommand, frozen=True, kw_only=True, tag="Add"):
    """The response is GenerationDone or GenerationRefused, preceded by any number of TokenDelta."""

    request: GenerationRequest


class AbortRequest(EngineCommand, frozen=True, kw_only=True, tag="Abort"):
    """Has no response. The response to the request may already be on its way."""

    id: str


class Suspend(EngineCommand, frozen=True, kw_only=True, tag="Suspend"):
    request_id: int
    """Returned in the response."""


class Fetch(EngineCommand, frozen=True, kw_only=True, tag="Fetch"):
    """Reads weights while decoding continues. The response is Fetched or UpdateFailed, preceded by any number of
    Fetching. A second one replaces the first, which fails then."""

    request_id: int
    weights: PolicyWeights


class Update(EngineCommand, frozen=True, kw_only=True, tag="Update"):
    """Switches to fetched weights; others are read first. The response is Updated or UpdateFailed."""

    request_id: int
    weights: PolicyWeights


class Resume(EngineCommand, frozen=True, kw_only=True, tag="Resume"):
    request_id: int


class CloseEngine(EngineCommand, frozen=True, kw_only=True, tag="Close"):
    """The only response is the end of the process."""


# ---- replies ----------------------------------------------------------------------------------------------------


class EngineReply(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    pass


class EngineReady(EngineReply, frozen=True, kw_only=True, tag="Ready"):
    pass


class EngineNotReady(EngineReply, frozen=True, kw_only=True, tag="NotReady"):
    reason: str


class TokenDelta(EngineReply, frozen=True, kw_only=True, tag="Written"):
    """Tokens of a running request since its last message. GenerationDone repeats all of them."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...] | None = None


class GenerationDone(EngineReply, frozen=True, kw_only=True, tag="Done"):
    id: str
    generation: Generation
    """The complete result."""


class GenerationRefused(EngineReply, frozen=True, kw_only=True, tag="Refused"):
    """This engine cannot serve the request. The fields are those of InvalidInput."""

    id: str
    field: str
    value: str
    expected: str


class EngineAcknowledged(EngineReply, frozen=True, kw_only=True, tag="Acknowledged"):
    """Response to Suspend and Resume; takes effect with the next step."""

    request_id: int


class Fetching(EngineReply, frozen=True, kw_only=True, tag="Fetching"):
    """A heartbeat: an engine that does not decode sends nothing else."""

    request_id: int


class Fetched(EngineReply, frozen=True, kw_only=True, tag="Fetched"):
    request_id: int
    version: int


class Updated(EngineReply, frozen=True, kw_only=True, tag="Updated"):
    request_id: int
    version: int


class UpdateFailed(EngineReply, frozen=True, kw_only=True, tag="UpdateFailed"):
    """The old weights stay."""

    request_id: int
    reason: str


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step, by the clock of the engine's process."""

    ended_s: float
    commands: tuple[str, ...]
    """Requests accepted since the step before."""
    prefilled: int
    """Prefilled tokens."""
    decoded: int
    """Requests that decoded one token."""


class EngineHeartbeat(EngineReply, frozen=True, kw_only=True, tag="Beat"):
    """A heartbeat with statistics. Also sent when it runs out of work."""

    statistics: EngineStatistics
    steps: tuple[StepRecord, ...] = ()
    """Steps since the last heartbeat, if they are recorded."""


AnyEngineCommand = EngineHello | AddRequest | AbortRequest | Suspend | Fetch | Update | Resume | CloseEngine
AnyEngineReply = (
    EngineReady
    | EngineNotReady
    | TokenDelta
    | GenerationDone
    | GenerationRefused
    | EngineAcknowledged
    | Fetching
    | Fetched
    | Updated
    | UpdateFailed
    | EngineHeartbeat
)


def command_frames() -> FrameDecoder[AnyEngineCommand]:
    return FrameDecoder(AnyEngineCommand)


def reply_frames() -> FrameDecoder[AnyEngineReply]:
    return FrameDecoder(AnyEngineReply)
