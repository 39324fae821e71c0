"""Sandbox states: the node and the memory of each sandbox.

Owns the memory that sandboxes hold from the start of their first action to their end. Never starts or stops an action:
it returns the actions concerned, and the scheduler acts.
"""

from __future__ import annotations

from tangram.core.demand import MEMORY, Need
from tangram.core.lanes import Entry, Run, SandboxState
from tangram.core.ledger import Ledger, PoolState
from tangram.core.messages import NodeState, Reserve
from tangram.errors import InvariantError


class SandboxStates:
    """All sandboxes that hold memory or wait for it."""

    def __init__(self, ledger: Ledger, sandboxes_max: int) -> None:
        self._ledger = ledger
        self._sandboxes_max = sandboxes_max
        self.by_id: dict[str, SandboxState] = {}
        self.yielding: dict[str, int] = {}
        """Per node, the memory of sandboxes that end when other sandboxes wait for it."""

    def refusal(self, event: Reserve) -> tuple[str, str] | None:
        """Returns the name of the limit that keeps a sandbox out and the reason, if there is one."""
        sandbox, memory, node = event.sandbox, event.memory, event.node
        pools = self._ledger.kinds.get(MEMORY, {})
        if sandbox in self.by_id:
            return "id", f"sandbox {sandbox} is already reserved"
        if len(self.by_id) >= self._sandboxes_max:
            return "sandboxes_max", f"{self._sandboxes_max} sandboxes are open; release some first"
        if node and self._ledger.nodes.get(node) is not NodeState.UP:
            return "node", f"node {node} is not up"
        if memory and not self._ledger.could_once_hold((), node, memory):
            most = max([pool.total for pool in pools.values()], default=0)
            return "capacity", f"sandbox {sandbox} requests {memory} MiB; the largest node has {most}"
        if node and memory and (node not in pools or not pools[node].fits(memory)):
            free = pools[node].free if node in pools else 0
            return "memory", f"sandbox {sandbox} requests {memory} MiB; node {node} has {free} free"
        return None

    def reserve(self, event: Reserve, run: Run) -> SandboxState:
        """Admits a sandbox. One whose node is given, because it is already there, holds its memory immediately."""
        sandbox = self.by_id[event.sandbox] = SandboxState(event.sandbox, event.memory, run, yields=event.yields)
        if event.node:
            self.assign_node(sandbox, event.node)
        return sandbox

    def assign_node(self, sandbox: SandboxState, node: str) -> None:
        """Places a sandbox on a node and holds its memory there until it ends."""
        sandbox.node = node
        sandbox.wants = ()
        if sandbox.memory:
            sandbox.reserved = self._ledger.hold(self._ledger.kinds[MEMORY][node], sandbox.memory, sandbox.run.usage)
        if sandbox.yields:
            self.yielding[node] = self.yielding.get(node, 0) + sandbox.memory

    def _give_back(self, sandbox: SandboxState) -> PoolState | None:
        """Frees the memory of a sandbox. Returns the pool if units came free."""
        reserved, sandbox.reserved = sandbox.reserved, None
        if sandbox.yields and sandbox.node:
            self.yielding[sandbox.node] -= sandbox.memory
        return reserved.pool if reserved is not None and self._ledger.give_back(reserved) else None

    def join(self, sandbox: SandboxState, entry: Entry) -> None:
        sandbox.actions[entry.id] = entry

    def combined_needs(self, sandbox: SandboxState) -> tuple[Need, ...]:
        """Returns what all actions of a sandbox need of its node: per kind, the largest need of any of them."""
        if len(sandbox.actions) < 2:
            return ()
        most: dict[str, int] = {}
        for entry in sandbox.actions.values():
            for kind, units in entry.needs:
                most[kind] = max(units, most.get(kind, units))
        return tuple(sorted(most.items()))

    def leave(self, sandbox: SandboxState, entry: Entry) -> PoolState | None:
        """Removes an action that has settled. Returns the memory pool if that freed the memory of a released
        sandbox."""
        del sandbox.actions[entry.id]
        return self.vacate(sandbox) if sandbox.released else None

    def detach(self, entry: Entry) -> SandboxState:
        """Separates an action from the sandbox for whose memory it waited."""
        sandbox = entry.sandbox
        assert sandbox is not None and entry.awaits_instance, entry.id
        del sandbox.actions[entry.id]
        entry.sandbox = None
        return sandbox

    def vacate(self, sandbox: SandboxState) -> PoolState | None:
        """Frees the memory of a released sandbox if it has no more actions."""
        if sandbox.actions or self.by_id.get(sandbox.id) is not sandbox:
            return None
        del self.by_id[sandbox.id]
        return self._give_back(sandbox)

    def drop_node(self, node: str) -> list[SandboxState]:
        """Removes and returns the sandboxes of a lost node."""
        lost = [sandbox for sandbox in self.by_id.values() if sandbox.node == node]
        for sandbox in lost:
            del self.by_id[sandbox.id]
            self._give_back(sandbox)
        self.yielding.pop(node, None)
        return lost

    def is_alive(self, sandbox: SandboxState) -> bool:
        return self.by_id.get(sandbox.id) is sandbox

    def check(self) -> None:
        """Checks that sandboxes with a node hold their memory there, and the others none. Raises InvariantError."""
        for node, memory in self.yielding.items():
            total = sum(sandbox.memory for sandbox in self.by_id.values() if sandbox.yields and sandbox.node == node)
            if memory != total:
                raise InvariantError(f"{memory} MiB on {node} counted as yielding, sandboxes add up to {total}")
        for sandbox in self.by_id.values():
            held_on = sandbox.reserved.pool.node if sandbox.reserved is not None else ""
            if held_on != (sandbox.node if sandbox.memory else ""):
                raise InvariantError(f"sandbox {sandbox.id} on {sandbox.node!r} holds memory on {held_on!r}")
            if sandbox.released and not sandbox.actions:
                raise InvariantError(f"sandbox {sandbox.id} is released and empty but not removed")
