"""Places: which sandbox stands on which node, with its memory.

Owns the memory that sandboxes hold from the start of their first action to their end. Never starts or stops an action:
it says which ones are concerned, and the scheduler acts.
"""

from __future__ import annotations

from tangram.core.demand import MEMORY, Need
from tangram.core.lanes import Entry, Place, Run
from tangram.core.ledger import Ledger, PoolState
from tangram.core.messages import NodeState, Reserve
from tangram.errors import InvariantError


class Places:
    """All sandboxes that hold memory or wait for it."""

    def __init__(self, ledger: Ledger, sandboxes_max: int) -> None:
        self._ledger = ledger
        self._sandboxes_max = sandboxes_max
        self.by_sandbox: dict[str, Place] = {}
        self.yielding: dict[str, int] = {}
        """Per node, the memory of sandboxes that end when others wait for it."""

    def refusal(self, event: Reserve) -> tuple[str, str] | None:
        """The limit that keeps a sandbox out and why, if one does."""
        sandbox, memory, node = event.sandbox, event.memory, event.node
        pools = self._ledger.kinds.get(MEMORY, {})
        if sandbox in self.by_sandbox:
            return "id", f"sandbox {sandbox} is already reserved"
        if len(self.by_sandbox) >= self._sandboxes_max:
            return "sandboxes_max", f"{self._sandboxes_max} sandboxes are open; release some first"
        if node and self._ledger.nodes.get(node) is not NodeState.UP:
            return "node", f"node {node} is not up"
        if memory and not self._ledger.once_held((), node, memory):
            most = max([pool.total for pool in pools.values()], default=0)
            return "capacity", f"sandbox {sandbox} asks for {memory} MiB; the largest node has {most}"
        if node and memory and (node not in pools or not pools[node].fits(memory)):
            free = pools[node].free if node in pools else 0
            return "memory", f"sandbox {sandbox} asks for {memory} MiB; node {node} has {free} free"
        return None

    def reserve(self, event: Reserve, run: Run) -> Place:
        """Let a sandbox in. One whose node the caller chose, as it already stands there, holds its memory at once."""
        place = self.by_sandbox[event.sandbox] = Place(event.sandbox, event.memory, run, yields=event.yields)
        if event.node:
            self.settle_down(place, event.node)
        return place

    def settle_down(self, place: Place, node: str) -> None:
        """The sandbox stands on this node from now on: memory for its whole life is held there."""
        place.node = node
        place.wants = ()
        if place.memory:
            place.reserved = self._ledger.hold(self._ledger.kinds[MEMORY][node], place.memory, place.run.usage)
        if place.yields:
            self.yielding[node] = self.yielding.get(node, 0) + place.memory

    def _give_back(self, place: Place) -> PoolState | None:
        """Its memory. Returns the pool if that is free again."""
        reserved, place.reserved = place.reserved, None
        if place.yields and place.node:
            self.yielding[place.node] -= place.memory
        return reserved.pool if reserved is not None and self._ledger.give_back(reserved) else None

    def join(self, place: Place, entry: Entry) -> None:
        place.actions[entry.id] = entry

    def wants(self, place: Place) -> tuple[Need, ...]:
        """What all actions of a sandbox want of its node: per kind, the most that one of them needs."""
        if len(place.actions) < 2:
            return ()
        most: dict[str, int] = {}
        for entry in place.actions.values():
            for kind, units in entry.needs:
                most[kind] = max(units, most.get(kind, units))
        return tuple(sorted(most.items()))

    def leave(self, place: Place, entry: Entry) -> PoolState | None:
        """An action has settled. Returns the memory pool if that freed the memory of a released sandbox."""
        del place.actions[entry.id]
        return self.vacate(place) if place.released else None

    def part(self, entry: Entry) -> Place:
        """It goes on without the sandbox whose memory it waited for."""
        place = entry.place
        assert place is not None and entry.is_guest, entry.id
        del place.actions[entry.id]
        entry.place = None
        return place

    def vacate(self, place: Place) -> PoolState | None:
        """Give the memory of a released sandbox back, if no action is left in it."""
        if place.actions or self.by_sandbox.get(place.id) is not place:
            return None
        del self.by_sandbox[place.id]
        return self._give_back(place)

    def drop_node(self, node: str) -> list[Place]:
        """The sandboxes of a dead node are gone, with their memory."""
        gone = [place for place in self.by_sandbox.values() if place.node == node]
        for place in gone:
            del self.by_sandbox[place.id]
            self._give_back(place)
        self.yielding.pop(node, None)
        return gone

    def is_alive(self, place: Place) -> bool:
        return self.by_sandbox.get(place.id) is place

    def check(self) -> None:
        """Recompute: a sandbox on a node holds its memory there, one without a node holds none."""
        for node, memory in self.yielding.items():
            found = sum(place.memory for place in self.by_sandbox.values() if place.yields and place.node == node)
            if memory != found:
                raise InvariantError(f"{memory} MiB on {node} counted as yielding, sandboxes add up to {found}")
        for place in self.by_sandbox.values():
            held_on = place.reserved.pool.node if place.reserved is not None else ""
            if held_on != (place.node if place.memory else ""):
                raise InvariantError(f"sandbox {place.id} on {place.node!r} holds memory on {held_on!r}")
            if place.released and not place.actions:
                raise InvariantError(f"sandbox {place.id} is released and empty but still there")
