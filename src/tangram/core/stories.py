"""Stories: the last events and their effects in memory, as the history of one action.

An InvariantError carries the story of its action. A trace on disk keeps all events; this keeps STORY_EVENTS of them.
"""

from __future__ import annotations

from collections import deque

from tangram.core.action import TRANSITIONS, State, wrong_transition
from tangram.core.lanes import Entry
from tangram.core.messages import Effect, Event
from tangram.core.trace import describe, mentions
from tangram.errors import InvariantError

STORY_EVENTS = 1024
"""The number of events that are kept."""


class Stories:
    """The last events."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, Event, list[Effect]]] = deque(maxlen=STORY_EVENTS)

    def record(self, now: float, event: Event, effects: list[Effect]) -> None:
        """Keep an event. `effects` may still grow."""
        self._events.append((now, event, effects))

    def of(self, action_id: str) -> list[str]:
        """One line per event and effect that mentions the action."""
        lines: list[str] = []
        for now, event, effects in self._events:
            lines.extend(describe(now, message) for message in (event, *effects) if mentions(message, action_id))
        return lines

    def error(self, what: str, action_id: str) -> InvariantError:
        return InvariantError(what, self.of(action_id))

    def transition(self, entry: Entry, state: State) -> None:
        """Move an action to another state. Raises InvariantError if the table has no such transition."""
        if state not in TRANSITIONS[entry.state]:
            raise self.error(wrong_transition(entry.state, state, entry.id), entry.id)
        entry.state = state

    def expect(self, entry: Entry, state: State, why: str) -> None:
        """Raises InvariantError if the action is in another state."""
        if entry.state is not state:
            raise self.error(f"{entry.id} is {entry.state.value}, not {state.value}, when {why}", entry.id)
