"""Images of runs: who may open sandboxes from which.

Owns the names of images, each known to its run only; the store behind is shared, and holds equal content once.
Promises that a run names its own images only, and that content goes when the last run has forgotten it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable

from tangram.errors import AdmissionRefused, InvalidAction
from tangram.managers.base import Images
from tangram.runtime.error_records import NotFound, Unauthorized
from tangram.server.actions.translate import Names
from tangram.server.http.auth import Caller
from tangram.server.journal.journal import Journal, Note

NOTE = "image/"
FORGOTTEN = b""


class OwnedImages:
    def __init__(self, images: Images, journal: Journal, notes: Iterable[Note] = ()) -> None:
        self._images = images
        self._journal = journal
        self.by_name: dict[str, str] = {
            note.key.removeprefix(NOTE): note.value.decode()
            for note in notes
            if note.key.startswith(NOTE) and note.value != FORGOTTEN
        }
        """What an image is in the store, by its name with that of its run before it."""

    def require_room(self, space: str, most: int, name: str = "") -> None:
        """For one image more of a run; for one of a name that it has there is room always."""
        start = f"{space}:"
        if name not in self.by_name and sum(each.startswith(start) for each in self.by_name) >= most:
            raise AdmissionRefused("images_max", f"this run has {most} images, which is the most; forget one")

    async def alias(self, caller: Caller, image: str) -> str:
        """The name under which its run knows an image that was added to the store. Raises Unauthorized if the run was
        revoked while it was added: then nobody has it."""
        name = f"image-{hashlib.sha256(image.encode()).hexdigest()[:16]}"
        try:
            caller.require_standing()
        except Unauthorized:
            await self._drop(image)
            raise
        inner = Names(caller.space, self.by_name).own_image(name)
        self.by_name[inner] = image  # at once: whoever ends the run finds it, and forgets it after it was noted
        await self._journal.note(NOTE + inner, image.encode())
        return name

    async def forget(self, names: Names, name: str) -> None:
        inner = names.own_image(name)
        image = self.by_name.get(inner)
        if image is None:
            raise NotFound("image", name)
        await self._forget(inner, image)

    async def _forget(self, inner: str, image: str) -> None:
        await self._journal.note(NOTE + inner, FORGOTTEN)
        self.by_name.pop(inner, None)
        await self._drop(image)

    async def _drop(self, image: str) -> None:
        """From the store, if nobody has it any more."""
        if image not in self.by_name.values():
            await self._images.forget_image(image)

    def of(self, space: str) -> list[str]:
        """The names of those that a run has, with its own before them."""
        return [inner for inner in self.by_name if inner.startswith(f"{space}:")]

    async def forget_of_ended(self, inner: str) -> None:
        """One of a run that has ended."""
        with contextlib.suppress(InvalidAction):  # the store has lost it before
            await self._forget(inner, self.by_name[inner])

    async def committed(self, inner: str) -> None:
        await self._journal.note(NOTE + inner, inner.encode())
        self.by_name[inner] = inner

    async def recall(self, names: Names, key: str) -> str:
        image = await self._images.recall_image(names.image_key(key))
        return names.known_as(image) if image else ""

    async def remember(self, names: Names, key: str, name: str) -> None:
        await self._images.remember_image(names.image_key(key), names.image(name))
