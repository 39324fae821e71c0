"""Places: the node and the memory of each sandbox.

Owns the memory that sandboxes hold from the start of their first action to their end. Never starts or stops an action:
it returns the actions concerned, and the scheduler acts.
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
        """Per node, the memory of sandboxes that end when other sandboxes wait for it."""

    def refusal(self, event: Reserve) -> tuple[str, str] | None:
        """Returns the name of the limit that keeps a sandbox out and the reason, if there is one."""
        sandbox, memory, node = event.sandbox, event.memory, event.node
        pools = self._ledger.kinds.get(MEMORY, {})
        if sandbox in self.by_sandbox:
            return "id", f"sandbox {sandbox} is already reserved"
        if len(self.by_sandbox) >= self._sandboxes_max:
            return "sandboxes_max", f"{self._sandboxes_max} sandboxes are open; release some first"
        if node and self._ledger.nodes.get(node) is not NodeState.UP:
            return "node", f"node {node} is not up"
        if memory and not self._ledger.could_once_hold((), node, memory):
            most = max([pool.total for pool in pools.values()], default=0)
            return "capacity", f"sandbox {sandbox} asks for {memory} MiB; the largest node has {most}"
        if node and memory and (node not in pools or not pools[node].fits(memory)):
            free = pools[node].free if node in pools else 0
            return "memory", f"sandbox {sandbox} asks for {memory} MiB; node {node} has {free} free"
        return None

    def reserve(self, event: Reserve, run: Run) -> Place:
        """Admits a sandbox. One whose node is given, because it is already there, holds its memory at once."""
        place = self.by_sandbox[event.sandbox] = Place(event.sandbox, event.memory, run, yields=event.yields)
        if event.node:
            self.assign_node(place, event.node)
        return place

    def assign_node(self, place: Place, node: str) -> None:
        """Places a sandbox on a node and holds its memory there until it ends."""
        place.node = node
        place.wants = ()
        if place.memory:
            place.reserved = self._ledger.hold(self._ledger.kinds[MEMORY][node], place.memory, place.run.usage)
        if place.yields:
            self.yielding[node] = self.yielding.get(node, 0) + place.memory

    def _give_back(self, place: Place) -> PoolState | None:
        """Frees the memory of a sandbox. Returns the pool if units came free."""
        reserved, place.reserved = place.reserved, None
        if place.yields and place.node:
            self.yielding[place.node] -= place.memory
        return reserved.pool if reserved is not None and self._ledger.give_back(reserved) else None

    def join(self, place: Place, entry: Entry) -> None:
        place.actions[entry.id] = entry

    def combined_needs(self, place: Place) -> tuple[Need, ...]:
        """Returns what all actions of a sandbox need of its node: per kind, the largest need of any of them."""
        if len(place.actions) < 2:
            return ()
        most: dict[str, int] = {}
        for entry in place.actions.values():
            for kind, units in entry.needs:
                most[kind] = max(units, most.get(kind, units))
        return tuple(sorted(most.items()))

    def leave(self, place: Place, entry: Entry) -> PoolState | None:
        """Removes an action that has settled. Returns the memory pool if that freed the memory of a released
        sandbox."""
        del place.actions[entry.id]
        return self.vacate(place) if place.released else None

    def detach(self, entry: Entry) -> Place:
        """Separates an action from the sandbox for whose memory it waited."""
        place = entry.place
        assert place is not None and entry.is_guest, entry.id
        del place.actions[entry.id]
        entry.place = None
        return place

    def vacate(self, place: Place) -> PoolState | None:
        """Frees the memory of a released sandbox if it has no more actions."""
        if place.actions or self.by_sandbox.get(place.id) is not place:
            return None
        del self.by_sandbox[place.id]
        return self._give_back(place)

    def drop_node(self, node: str) -> list[Place]:
        """Removes and returns the sandboxes of a lost node."""
        lost = [place for place in self.by_sandbox.values() if place.node == node]
        for place in lost:
            del self.by_sandbox[place.id]
            self._give_back(place)
        self.yielding.pop(node, None)
        return lost

    def is_alive(self, place: Place) -> bool:
        return self.by_sandbox.get(place.id) is place

    def check(self) -> None:
        """Checks that sandboxes with a node hold their memory there, and the others none. Raises InvariantError."""
        for node, memory in self.yielding.items():
            total = sum(place.memory for place in self.by_sandbox.values() if place.yields and place.node == node)
            if memory != total:
                raise InvariantError(f"{memory} MiB on {node} counted as yielding, sandboxes add up to {total}")
        for place in self.by_sandbox.values():
            held_on = place.reserved.pool.node if place.reserved is not None else ""
            if held_on != (place.node if place.memory else ""):
                raise InvariantError(f"sandbox {place.id} on {place.node!r} holds memory on {held_on!r}")
            if place.released and not place.actions:
                raise InvariantError(f"sandbox {place.id} is released and empty but not removed")
