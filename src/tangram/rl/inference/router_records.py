"""Records of the router: its events, its statistics, and the errors of requests that no engine could serve.

Records only. Times are those of the event loop's clock: only differences have a meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from tangram.errors import ManagerError


class EngineState(StrEnum):
    """State of an engine, as the router sees it."""

    STARTING = "starting"
    SERVING = "serving"
    """Also during a weight update: it accepts requests and continues them afterwards."""
    DOWN = "down"
    """It died; it will be restarted after a backoff."""
    REMOVED = "removed"
    """It died too often."""
    CLOSED = "closed"


ENGINE_TRANSITIONS: Mapping[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: frozenset({EngineState.SERVING, EngineState.DOWN, EngineState.REMOVED, EngineState.CLOSED}),
    EngineState.SERVING: frozenset({EngineState.DOWN, EngineState.REMOVED, EngineState.CLOSED}),
    EngineState.DOWN: frozenset({EngineState.STARTING, EngineState.REMOVED, EngineState.CLOSED}),
    EngineState.REMOVED: frozenset({EngineState.CLOSED}),
    EngineState.CLOSED: frozenset(),
}


# ---- errors -------------------------------------------------------------------------------------------------------


class NoEngine(ManagerError):
    """No engine can serve a request now or later."""


class RequestAbandoned(ManagerError):
    """Too many engines died with this request inside, so it is not sent to another one."""

    def __init__(self, request: str, deaths: int, engines: tuple[str, ...], last: str) -> None:
        self.request = request
        super().__init__(
            f"request {request} was inside {deaths} engines when they died ({', '.join(engines)}) and is abandoned, so "
            f"that it does not kill others; the last error: {last}",
            retry=False,
        )


# ---- events -------------------------------------------------------------------------------------------------------


class RouterEvent(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    """Fields of all events."""

    at_s: float


class EngineStarted(RouterEvent, frozen=True, kw_only=True, tag="EngineStarted"):
    engine: str
    hardware: str
    version: int
    took_s: float
    incarnation: int = msgspec.field(name="life")
    """1 for the first start, and one more after each death."""


class EngineUpdated(RouterEvent, frozen=True, kw_only=True, tag="EngineUpdated"):
    engine: str
    version: int
    took_s: float
    """Time from the start of fetching to the end of the suspension."""
    pull_s: float = 0.0
    """The part in which it read the weights or switched to them."""
    exposed_s: float = 0.0
    """The part in which it could not decode. Recomputing the KV cache afterwards counts as prefill of other requests
    does."""


class EngineLost(RouterEvent, frozen=True, kw_only=True, tag="EngineLost"):
    """It died, failed to start, or refused weights that others took. It will be restarted."""

    engine: str
    reason: str
    requests: int
    """Requests inside."""
    deaths: int
    """Deaths within the window, this one included."""


class EngineRemoved(RouterEvent, frozen=True, kw_only=True, tag="EngineRemoved"):
    engine: str
    reason: str


class FallbackBegan(RouterEvent, frozen=True, kw_only=True, tag="FellBack"):
    """A task is now served by a class that it does not prefer."""

    task: str
    wanted: str
    used: str


class FallbackEnded(RouterEvent, frozen=True, kw_only=True, tag="CameBack"):
    """A task is served by its preferred class again."""

    task: str
    hardware: str


class RequestResumed(RouterEvent, frozen=True, kw_only=True, tag="RequestResumed"):
    """Its engine died; the request continues from its tokens."""

    request: str
    session: str
    task: str
    engine: str
    """The dead engine."""
    written: int
    """Tokens that it already has."""


class RequestDropped(RouterEvent, frozen=True, kw_only=True, tag="RequestDropped"):
    """It was abandoned, or its engine refused it; see RequestAbandoned and RequestRefused."""

    request: str
    reason: str


AnyRouterEvent = (
    EngineStarted
    | EngineUpdated
    | EngineLost
    | EngineRemoved
    | FallbackBegan
    | FallbackEnded
    | RequestResumed
    | RequestDropped
)


def describe_event(event: AnyRouterEvent) -> str:
    """An event as one sentence, for a terminal."""
    match event:
        case EngineStarted(engine=engine, hardware=hardware, version=version, took_s=took_s):
            return f"engine {engine} ({hardware}) serves version {version}; it started in {took_s:.1f} s."
        case EngineUpdated(engine=engine, version=version, pull_s=pull_s, exposed_s=exposed_s):
            return (
                f"engine {engine} generates with version {version}, read in {pull_s:.2f} s; it was suspended for "
                f"{exposed_s:.2f} s."
            )
        case EngineLost(engine=engine, reason=reason, requests=requests, deaths=deaths):
            inside = f" with {requests} request{'' if requests == 1 else 's'} inside" if requests else ""
            return f"engine {engine} was lost{inside} and is restarted (death {deaths}): {_sentence(reason)}"
        case EngineRemoved(engine=engine, reason=reason):
            return f"engine {engine} is removed: {_sentence(reason)}"
        case FallbackBegan(task=task, wanted=wanted, used=used):
            return f"task {task} falls back to {used}, since no engine of class {wanted} serves."
        case FallbackEnded(task=task, hardware=hardware):
            return f"task {task} is served by class {hardware} again."
        case RequestResumed(request=request, engine=engine, written=written):
            return f"request {request} continues after the death of engine {engine} from {written} tokens."
        case RequestDropped(reason=reason):
            return _sentence(reason)


def _sentence(text: str) -> str:
    """One line with a full stop: the last output of an engine may have several lines."""
    return " ".join(text.split()).rstrip(".") + "."


# ---- counts -------------------------------------------------------------------------------------------------------


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as the router sees it."""

    name: str
    hardware: str
    state: EngineState
    output_is_trainable: bool
    version: int
    requests: int
    """Requests inside."""
    load: int
    """Upper bound of the tokens to prefill and decode."""
    served: int
    incarnations: int
    """Number of starts."""
    reason: str = ""
    """The reason why it does not serve."""


class RouterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """The newest version that an engine took, or that is being distributed."""
    engines: tuple[EngineStatus, ...]
    requests: int
    """Requests in service or waiting."""
    waiting: int
    """The part for which no engine serves at the moment."""
    served: int
    cancelled: int
    failed: int
    """Requests that ended with an error."""
    resumed: int
    """How often a request continued after the death of its engine."""
    stayed: int
    """Requests sent to the engine with their prefix."""
    moved: int
    """Requests that left that engine because of its load."""
    fallbacks: Mapping[str, int]
    """By task: requests served by a class that is not preferred."""
