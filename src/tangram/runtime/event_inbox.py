"""The inbox through which managers report events to the scheduler.

A manager reports events on its own: a pool changed, a service was loaded, a sandbox needs memory. It needs a receiver
when it is constructed, and the orchestrator is constructed from managers. The inbox comes before both:

    inbox = EventInbox()
    quotas = QuotaManager(limits, inbox.send)
    orchestrator = Orchestrator(scheduler, {}, {HoldGrant: quotas}, inbox=inbox)

Holds no events: the orchestrator handles each one before `send` returns.
"""

from __future__ import annotations

from collections.abc import Callable

from tangram.core.messages import Effect, Event, Refuse, Release, Reserve
from tangram.errors import AdmissionRefused, InvariantError

EventHandler = Callable[[Event], list[Effect]]
"""Handles an event and returns its effects."""


class EventInbox:
    def __init__(self) -> None:
        self._handle: EventHandler = _require_reader

    def connect(self, handle: EventHandler) -> None:
        """Passes every later event to `handle`. An inbox has one reader."""
        assert self._handle is _require_reader, "the inbox has a reader already"
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


def _require_reader(event: Event) -> list[Effect]:
    raise InvariantError(f"no orchestrator reads this inbox yet, got {event}")
