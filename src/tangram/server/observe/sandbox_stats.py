"""Boxes: the sandboxes as the picture knows them.

Owns since when each is there, how many actions it has had and has, and when one was granted last. Which sandboxes there
are, the scheduler says.
"""

from __future__ import annotations

from tangram.core.places import Places
from tangram.server.observe.accounts import RunAccount


class Box:
    """A sandbox."""

    __slots__ = ("account", "actions", "active", "last_used_s", "name", "node", "opened_s", "run")

    def __init__(self, name: str, run: str, account: RunAccount, node: str, now: float) -> None:
        self.name = name
        self.run = run
        self.account = account
        self.node = node
        """Empty until an action of it is granted."""
        self.opened_s = self.last_used_s = now
        self.actions = self.active = 0


class Boxes:
    def __init__(self) -> None:
        self.by_name: dict[str, Box] = {}
        """The one used last at the end."""

    def open(self, name: str, run: str, account: RunAccount, node: str, now: float) -> None:
        self.by_name[name] = Box(name, run, account, node, now)
        account.sandboxes += 1

    def enter(self, box: Box, node: str, now: float) -> None:
        """An action of it is granted."""
        box.node = node or box.node
        box.actions += 1
        box.last_used_s = now
        box.active += 1
        if self.by_name.pop(box.name, None) is not None:
            self.by_name[box.name] = box
            if box.active == 1:
                box.account.active += 1

    def leave(self, box: Box, now: float) -> None:
        """It runs no more."""
        box.active -= 1
        box.last_used_s = now
        if not box.active and box.name in self.by_name:
            box.account.active -= 1

    def drop_if_gone(self, name: str, places: Places) -> None:
        if name not in places.by_sandbox:
            box = self.by_name.pop(name, None)
            if box is not None:
                box.account.sandboxes -= 1
                box.account.active -= bool(box.active)

    def drop_all_gone(self, places: Places) -> None:
        for name in [name for name in self.by_name if name not in places.by_sandbox]:
            self.drop_if_gone(name, places)
