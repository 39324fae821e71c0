"""Adoption: which sandboxes of the last owner of a name are back, which are not, and what is left of those.

Owns nothing beyond a call. A sandbox is back if its record is whole and speaks of what the spawner has: the same number
and the same first process. Promises that of all others nothing is left: no process, group, directory or record.
"""

from __future__ import annotations

import shutil

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.owner import Owner
from tangram.managers.sandboxes.bwrap.records import BOX, Record
from tangram.managers.sandboxes.bwrap.sandbox import Sandbox
from tangram.managers.sandboxes.bwrap.spawner.client import Left


class Adoption:
    def __init__(self, owner: Owner, left: dict[str, Left], why_none: str = "") -> None:
        """`left`: what the spawner has, by number. `why_none`: why there is no spawner any more."""
        assert owner.records is not None
        self._owner = owner
        self._records = owner.records
        self._left = left
        self.missing: dict[str, str] = {}
        """Why a sandbox that was on record is not back."""
        records, wrong = self._records.read()
        self.missing |= wrong
        self._fitting: list[Record] = []
        there = owner.group.children()
        for record in records.values():
            reason = why_none or self._reason(record, there)
            if reason:
                self.missing[record.name] = reason
            else:
                self._fitting.append(record)
        numbers = [*there, *left, *(record.box for record in records.values())]
        self.number_max = max([int(number) for number in numbers if BOX.fullmatch(number)], default=0)
        """Whoever is made from now on has a higher number."""

    def _reason(self, record: Record, there: list[str]) -> str:
        left = self._left.get(record.box)
        if left is None:
            return "its first process has ended, and with it all that ran in it"
        if left.init != record.init:
            return f"its record is of another one: its first process is {left.init}, not {record.init}"
        if record.box not in there:
            return "its control groups are not where this process has its own"
        return ""

    def sandboxes(self) -> list[Sandbox]:
        """Those that are back, not yet taken over."""
        owner = self._owner
        return [
            Sandbox(each.name, each.box, each.spec, each.image, owner.group.child(each.box), owner.boxes / each.box)
            for each in self._fitting
        ]

    def take_over(self, sandboxes: list[Sandbox]) -> list[Sandbox]:
        """Remove what is left of all others, then take these over. Blocks. Returns those that are really back."""
        self._clean({sandbox.box for sandbox in sandboxes})
        back = []
        for sandbox in sandboxes:
            left = self._left[sandbox.box]
            try:
                sandbox.take_over(left.init, left.sessions)
                back.append(sandbox)
            except ManagerError as error:  # it ended just now
                self.missing[sandbox.name] = f"it cannot be taken over: {error}"
        if len(back) < len(sandboxes):
            self._clean({sandbox.box for sandbox in back})
        return back

    def _clean(self, boxes: set[str]) -> None:
        """Killing all of its group ends a sandbox; its mounts vanish with it, and the spawner forgets it."""
        for number in self._owner.group.children():
            if number not in boxes:
                self._owner.group.child(number).remove()
        for directory in self._owner.boxes.iterdir():
            if directory.name not in boxes:
                shutil.rmtree(directory, ignore_errors=True)
        self._records.remove_others(boxes)
