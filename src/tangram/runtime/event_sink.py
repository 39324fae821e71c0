"""The event sink: where managers report events for the scheduler.

A manager reports events on its own: a pool changed, a service was loaded, a sandbox needs memory. It needs a receiver
when it is constructed, and the orchestrator is constructed from managers. The sink comes before both:

    sink = EventSink()
    quotas = QuotaManager(limits, sink.send)
    orchestrator = Orchestrator(scheduler, {}, {HoldGrant: quotas}, sink=sink)

Holds no events: the orchestrator handles each one before `send` returns.
"""

from __future__ import annotations

from collections.abc import Callable

from tangram.core.messages import Effect, Event, Refuse, Release, Reserve
from tangram.errors import AdmissionRefused, InvariantError

EventHandler = Callable[[Event], list[Effect]]
"""Handles an event and returns its effects."""


class EventSink:
    def __init__(self) -> None:
        self._handle: EventHandler = _reject_unconnected

    def connect(self, handle: EventHandler) -> None:
        """Passes every later event to `handle`. A sink is connected once."""
        assert self._handle is _reject_unconnected, "the sink is connected already"
        self._handle = handle

    def send(self, event: Event) -> None:
        self._handle(event)

    def reserve(self, sandbox: str, memory_mib: int, run: str, *, node: str = "", yields: bool = False) -> None:
        """Reserves memory for a sandbox. Raises AdmissionRefused."""
        for effect in self._handle(Reserve(sandbox=sandbox, memory=memory_mib, run=run, node=node, yields=yields)):
            if isinstance(effect, Refuse) and effect.action == sandbox:
                raise AdmissionRefused(effect.limit, effect.reason)

    def release(self, sandbox: str) -> None:
        """Returns the memory of a sandbox that is gone."""
        self._handle(Release(sandbox=sandbox))


def _reject_unconnected(event: Event) -> list[Effect]:
    raise InvariantError(f"no orchestrator is connected to this sink yet, got {event}")
