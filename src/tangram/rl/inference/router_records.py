"""What a gateway tells: its events, its counts, and the errors of requests that it could not have served.

Records only. Times are those of the loop's clock: only the difference of two of them means anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from tangram.errors import ManagerError


class State(StrEnum):
    """What an engine is doing for a gateway."""

    STARTING = "starting"
    SERVING = "serving"
    """Also while its weights are updated: it takes requests then, and goes on with them afterwards."""
    DOWN = "down"
    """It died; it will be started again after a while."""
    REMOVED = "removed"
    """It died too often."""
    CLOSED = "closed"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SERVING, State.DOWN, State.REMOVED, State.CLOSED}),
    State.SERVING: frozenset({State.DOWN, State.REMOVED, State.CLOSED}),
    State.DOWN: frozenset({State.STARTING, State.REMOVED, State.CLOSED}),
    State.REMOVED: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}


# ---- errors -------------------------------------------------------------------------------------------------------


class NoEngine(ManagerError):
    """No engine is left that could serve a request, nor will there be one."""


class RequestGivenUp(ManagerError):
    """A request was inside so many engines when they died that it is not given to another one."""

    def __init__(self, request: str, deaths: int, engines: tuple[str, ...], last: str) -> None:
        self.request = request
        super().__init__(
            f"request {request} was inside at {deaths} deaths of engines ({', '.join(engines)}) and is given up, so "
            f"that it does not take down the others; the last one said: {last}",
            retry=False,
        )


# ---- events -------------------------------------------------------------------------------------------------------


class Happening(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    """What all events have."""

    at_s: float


class EngineStarted(Happening, frozen=True, kw_only=True, tag="EngineStarted"):
    engine: str
    hardware: str
    version: int
    took_s: float
    life: int
    """1 for the first start, and one more after each death."""


class EngineUpdated(Happening, frozen=True, kw_only=True, tag="EngineUpdated"):
    engine: str
    version: int
    took_s: float
    """From when it began to fetch to when it went on."""
    pull_s: float = 0.0
    """Of these, when it read the weights or switched to them."""
    exposed_s: float = 0.0
    """Of these, when it could not write. What was read under the old weights is read again after that, which counts as
    the reading of any other tokens."""


class EngineLost(Happening, frozen=True, kw_only=True, tag="EngineLost"):
    """It died, failed to start, or did not take weights that others took. It will be started again."""

    engine: str
    reason: str
    requests: int
    """That were inside."""
    deaths: int
    """Within the window, this one included."""


class EngineRemoved(Happening, frozen=True, kw_only=True, tag="EngineRemoved"):
    engine: str
    reason: str


class FellBack(Happening, frozen=True, kw_only=True, tag="FellBack"):
    """From now on a task is served by another class than it prefers."""

    task: str
    wanted: str
    used: str


class CameBack(Happening, frozen=True, kw_only=True, tag="CameBack"):
    """From now on a task is served by the class that it prefers again."""

    task: str
    hardware: str


class RequestResumed(Happening, frozen=True, kw_only=True, tag="RequestResumed"):
    """Its engine died; it goes on from the tokens that it has."""

    request: str
    session: str
    task: str
    engine: str
    """That died."""
    written: int
    """Tokens that it has."""


class RequestDropped(Happening, frozen=True, kw_only=True, tag="RequestDropped"):
    """It was given up, or its engine does not take it: see RequestGivenUp and RequestRefused."""

    request: str
    reason: str


Event = (
    EngineStarted | EngineUpdated | EngineLost | EngineRemoved | FellBack | CameBack | RequestResumed | RequestDropped
)


def said(event: Event) -> str:
    """An event in one sentence, for a terminal."""
    match event:
        case EngineStarted(engine=engine, hardware=hardware, version=version, took_s=took_s):
            return f"engine {engine} ({hardware}) serves version {version}; it took {took_s:.1f} s to start."
        case EngineUpdated(engine=engine, version=version, pull_s=pull_s, exposed_s=exposed_s):
            return (
                f"engine {engine} writes with version {version}, which it read in {pull_s:.2f} s; it stood still for "
                f"{exposed_s:.2f} s."
            )
        case EngineLost(engine=engine, reason=reason, requests=requests, deaths=deaths):
            inside = f" with {requests} request{'' if requests == 1 else 's'} inside" if requests else ""
            return f"engine {engine} was lost{inside} and is started again (death {deaths}): {_ended(reason)}"
        case EngineRemoved(engine=engine, reason=reason):
            return f"engine {engine} is given up: {_ended(reason)}"
        case FellBack(task=task, wanted=wanted, used=used):
            return f"task {task} falls back to {used}, since no engine of class {wanted} serves."
        case CameBack(task=task, hardware=hardware):
            return f"task {task} is served by class {hardware} again."
        case RequestResumed(request=request, engine=engine, written=written):
            return f"request {request} goes on after the death of engine {engine} from {written} tokens."
        case RequestDropped(reason=reason):
            return _ended(reason)


def _ended(words: str) -> str:
    """On one line, and with a full stop: what an engine said last may have several lines."""
    return " ".join(words.split()).rstrip(".") + "."


# ---- counts -------------------------------------------------------------------------------------------------------


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as its gateway sees it."""

    name: str
    hardware: str
    state: State
    trains: bool
    version: int
    requests: int
    """Inside."""
    load: int
    """Tokens that are to be read and written, at most."""
    served: int
    lives: int
    """How often it was started."""
    reason: str = ""
    """Why it does not serve."""


class GatewayStatistics(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """The newest that an engine took, or that is being handed to them."""
    engines: tuple[Kept, ...]
    requests: int
    """Being served or waiting."""
    waiting: int
    """Of these, those for which no engine serves at the moment."""
    served: int
    cancelled: int
    failed: int
    """Ended with an error."""
    resumed: int
    """Times that a request went on after the death of its engine."""
    stayed: int
    """Requests that went to the engine that has their prefix."""
    moved: int
    """Requests that left it because it was overloaded."""
    fallbacks: Mapping[str, int]
    """By task: requests that were served by another class than it prefers."""
    falling_back: tuple[str, ...]
    """Tasks that are, at the moment."""
