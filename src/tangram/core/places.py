"""Places: which sandbox stands on which node, with its memory.

Owns the memory that sandboxes hold from the start of their first action to their end. Never starts or stops an action:
it says which ones are concerned, and the scheduler acts.
"""

from __future__ import annotations

from tangram.core.demand import MEMORY
from tangram.core.ledger import Ledger, PoolState
from tangram.core.messages import NodeState, Reserve
from tangram.core.queue import Entry, Place, Run
from tangram.errors import InvariantError


class Places:
    """All sandboxes that hold memory or wait for it."""

    def __init__(self, ledger: Ledger, sandboxes_max: int) -> None:
        self._ledger = ledger
        self._sandboxes_max = sandboxes_max
        self.by_sandbox: dict[str, Place] = {}

    def reserve(self, event: Reserve, run: Run) -> tuple[str, str] | None:
        """Let a sandbox in, or say the limit that keeps it out and why."""
        memory_max = max([pool.total for pool in self._ledger.kinds.get(MEMORY, {}).values()], default=0)
        if event.sandbox in self.by_sandbox:
            return "id", f"sandbox {event.sandbox} is already reserved"
        if len(self.by_sandbox) >= self._sandboxes_max:
            return "sandboxes_max", f"{self._sandboxes_max} sandboxes are open; release some first"
        if event.memory and not self._ledger.once_held((), event.node, event.memory):
            reason = f"sandbox {event.sandbox} asks for {event.memory} MiB; the largest node has {memory_max}"
            return "capacity", reason
        place = Place(event.sandbox, event.memory, run)
        refusal = self._adopt(place, event.node) if event.node else None
        if refusal is None:
            self.by_sandbox[event.sandbox] = place
        return refusal

    def _adopt(self, place: Place, node: str) -> tuple[str, str] | None:
        """A sandbox whose node the caller chose, as one that already stands there, holds its memory at once."""
        if self._ledger.nodes.get(node) is not NodeState.UP:
            return "node", f"node {node} is not up"
        pool = self._ledger.kinds.get(MEMORY, {}).get(node)
        if place.memory and (pool is None or not pool.fits(place.memory)):
            free = pool.free if pool is not None else 0
            return "capacity", f"sandbox {place.id} asks for {place.memory} MiB; node {node} has {free} free"
        self.settle_down(place, node)
        return None

    def settle_down(self, place: Place, node: str) -> None:
        """The sandbox stands on this node from now on: memory for its whole life is held there."""
        place.node = node
        if place.memory:
            place.reserved = self._ledger.hold(self._ledger.kinds[MEMORY][node], place.memory, place.run.usage)

    def join(self, place: Place, entry: Entry) -> None:
        place.actions[entry.id] = entry

    def leave(self, place: Place, entry: Entry) -> PoolState | None:
        """An action has settled. Returns the memory pool if that freed the memory of a released sandbox."""
        del place.actions[entry.id]
        return self.vacate(place) if place.released else None

    def vacate(self, place: Place) -> PoolState | None:
        """Give the memory of a released sandbox back, if no action is left in it."""
        if place.actions or self.by_sandbox.get(place.id) is not place:
            return None
        del self.by_sandbox[place.id]
        reserved, place.reserved = place.reserved, None
        if reserved is not None and self._ledger.give_back(reserved):
            return reserved.pool
        return None

    def drop_node(self, node: str) -> list[Place]:
        """The sandboxes of a dead node are gone, with their memory."""
        gone = [place for place in self.by_sandbox.values() if place.node == node]
        for place in gone:
            del self.by_sandbox[place.id]
            if place.reserved is not None:
                self._ledger.give_back(place.reserved)
                place.reserved = None
        return gone

    def is_alive(self, place: Place) -> bool:
        return self.by_sandbox.get(place.id) is place

    def check(self) -> None:
        """Recompute: a sandbox on a node holds its memory there, one without a node holds none."""
        for place in self.by_sandbox.values():
            held_on = place.reserved.pool.node if place.reserved is not None else ""
            if held_on != (place.node if place.memory else ""):
                raise InvariantError(f"sandbox {place.id} on {place.node!r} holds memory on {held_on!r}")
            if place.released and not place.actions:
                raise InvariantError(f"sandbox {place.id} is released and empty but still there")
