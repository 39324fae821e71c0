"""Warm sandboxes: made ahead, so that whoever asks for one like them gets it at once.

Owns those that belong to nobody yet. Decides nothing: callers say which to make. Promises to keep at most as many as it
was told, and never to hand out one that has ended.
"""

from __future__ import annotations

from tangram.managers.sandboxes.bwrap.images.store import Image
from tangram.managers.sandboxes.bwrap.sandbox import Sandbox
from tangram.managers.work import SandboxSpec


class Warm:
    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._kept: list[Sandbox] = []
        """The oldest first."""

    def take(self, spec: SandboxSpec, image: Image) -> Sandbox | None:
        """One that was made to this very specification, of this very image; it is the caller's then."""
        for sandbox in self._kept:
            if sandbox.spec == spec and sandbox.image == image and not sandbox.gone.done():
                self._kept.remove(sandbox)
                return sandbox
        return None

    def put(self, sandbox: Sandbox) -> Sandbox | None:
        """Keep one. Returns the one that has to go for it, which may be itself."""
        self._kept.append(sandbox)
        return self._kept.pop(0) if len(self._kept) > self._count_max else None

    def take_all(self) -> list[Sandbox]:
        """Nobody will ask for one any more."""
        found, self._kept = self._kept, []
        return found
