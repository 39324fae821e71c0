"""Adoption: takes over the sandboxes that the previous owner of a name left behind.

Owns nothing beyond a call. A sandbox is adopted if its record is intact and matches the spawner's sandbox: the same
number and the same first process. Promises that no process, group, directory or record of other sandboxes is left.
"""

from __future__ import annotations

import shutil

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.owner import SANDBOX_ID, SandboxOwner, SandboxRecord
from tangram.managers.sandboxes.bwrap.sandbox import BwrapSandbox
from tangram.managers.sandboxes.bwrap.spawner.client import OrphanedSandbox


class Adoption:
    def __init__(self, owner: SandboxOwner, orphans: dict[str, OrphanedSandbox], attach_error: str = "") -> None:
        """`orphans`: the sandboxes of the spawner, by number. `attach_error`: why there is no spawner."""
        assert owner.records is not None
        self._owner = owner
        self._records = owner.records
        self._orphans = orphans
        self.missing: dict[str, str] = {}
        """Returns why a recorded sandbox was not adopted."""
        records, invalid = self._records.read()
        self.missing |= invalid
        self._adoptable: list[SandboxRecord] = []
        existing = owner.group.children()
        for record in records.values():
            reason = attach_error or self._mismatch_reason(record, existing)
            if reason:
                self.missing[record.name] = reason
            else:
                self._adoptable.append(record)
        sandbox_ids = [*existing, *orphans, *(record.box for record in records.values())]
        self.number_max = max(
            [int(sandbox_id) for sandbox_id in sandbox_ids if SANDBOX_ID.fullmatch(sandbox_id)], default=0
        )
        """New sandboxes get higher numbers."""

    def _mismatch_reason(self, record: SandboxRecord, existing: list[str]) -> str:
        orphan = self._orphans.get(record.box)
        if orphan is None:
            return "its first process has ended, and all its programs with it"
        if orphan.init != record.init:
            return f"its record belongs to another sandbox: its first process is {orphan.init}, not {record.init}"
        if record.box not in existing:
            return "its control groups are not below those of this process"
        return ""

    def sandboxes(self) -> list[BwrapSandbox]:
        """Sandboxes that match their records; `adopt` takes them over."""
        owner = self._owner
        return [
            BwrapSandbox(
                adoptable.name,
                adoptable.box,
                adoptable.spec,
                adoptable.image,
                owner.group.child(adoptable.box),
                owner.sandboxes_directory / adoptable.box,
            )
            for adoptable in self._adoptable
        ]

    def adopt(self, sandboxes: list[BwrapSandbox]) -> list[BwrapSandbox]:
        """Remove all others, then take these over. Blocks. Returns those that were adopted."""
        self._clean({sandbox.sandbox_id for sandbox in sandboxes})
        adopted = []
        for sandbox in sandboxes:
            orphan = self._orphans[sandbox.sandbox_id]
            try:
                sandbox.adopt(orphan.init, orphan.sessions)
                adopted.append(sandbox)
            except ManagerError as error:  # it has just ended
                self.missing[sandbox.name] = f"it cannot be taken over: {error}"
        if len(adopted) < len(sandboxes):
            self._clean({sandbox.sandbox_id for sandbox in adopted})
        return adopted

    def _clean(self, sandbox_ids: set[str]) -> None:
        """Killing its whole group ends a sandbox; its mounts vanish with it, and the spawner notices its end."""
        for sandbox_id in self._owner.group.children():
            if sandbox_id not in sandbox_ids:
                self._owner.group.child(sandbox_id).remove()
        for directory in self._owner.sandboxes_directory.iterdir():
            if directory.name not in sandbox_ids:
                shutil.rmtree(directory, ignore_errors=True)
        self._records.remove_all_except(sandbox_ids)
