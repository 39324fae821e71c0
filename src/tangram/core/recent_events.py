"""Recent events: the last events and their effects in memory, as the history of one action.

An InvariantError carries the story of its action. A trace on disk keeps all events; this keeps RECENT_EVENTS_MAX of
them.
"""

from __future__ import annotations

from collections import deque

from tangram.core.messages import Effect, Event
from tangram.core.trace import describe, mentions
from tangram.errors import InvariantError

RECENT_EVENTS_MAX = 1024
"""The number of events that are kept."""


class RecentEvents:
    """The last events."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, Event, list[Effect]]] = deque(maxlen=RECENT_EVENTS_MAX)

    def record(self, now: float, event: Event, effects: list[Effect]) -> None:
        """Keeps an event. `effects` may still grow."""
        self._events.append((now, event, effects))

    def story(self, action_id: str) -> list[str]:
        """One line per event and effect that mentions the action."""
        lines: list[str] = []
        for now, event, effects in self._events:
            lines.extend(describe(now, message) for message in (event, *effects) if mentions(message, action_id))
        return lines

    def error(self, what: str, action_id: str) -> InvariantError:
        """The error to raise for a bug that concerns the action, with its story."""
        return InvariantError(what, self.story(action_id))
