"""Images per tenant: which names a tenant may open sandboxes from.

Owns the names, each visible to its tenant only; the store behind is shared and holds equal content once. Promises that
content is deleted when the last tenant has forgotten it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable

from tangram.errors import AdmissionRefused, InvalidAction
from tangram.managers.base import Images
from tangram.runtime.error_records import NotFound, Unauthorized
from tangram.server.actions.translate import TenantNamespace
from tangram.server.journal.journal import Journal, JournaledNote
from tangram.server.tenants import Principal

NOTE_KEY_PREFIX = "image/"
TOMBSTONE = b""


class TenantImages:
    def __init__(self, images: Images, journal: Journal, notes: Iterable[JournaledNote] = ()) -> None:
        self._images = images
        self._journal = journal
        self.by_name: dict[str, str] = {
            note.key.removeprefix(NOTE_KEY_PREFIX): note.value.decode()
            for note in notes
            if note.key.startswith(NOTE_KEY_PREFIX) and note.value != TOMBSTONE
        }
        """Name in the store by qualified name."""

    def require_capacity(self, tenant: str, images_max: int, name: str = "") -> None:
        """Raises AdmissionRefused without room for one more image. Replacing the image `name` needs no room."""
        start = f"{tenant}:"
        if name not in self.by_name and sum(each.startswith(start) for each in self.by_name) >= images_max:
            raise AdmissionRefused("images_max", f"this run has {images_max} images, the maximum; forget one")

    async def register(self, caller: Principal, image: str) -> str:
        """Returns the tenant's name for an image that was added to the store. Raises Unauthorized if the run was
        revoked meanwhile; the image is deleted then."""
        name = f"image-{hashlib.sha256(image.encode()).hexdigest()[:16]}"
        try:
            caller.require_not_revoked()
        except Unauthorized:
            await self._delete_unreferenced(image)
            raise
        inner = TenantNamespace(caller.tenant, self.by_name).qualify_image(name)
        self.by_name[inner] = image  # before the note is written, so that ending the run finds and forgets it
        await self._journal.put_note(NOTE_KEY_PREFIX + inner, image.encode())
        return name

    async def forget(self, names: TenantNamespace, name: str) -> None:
        inner = names.qualify_image(name)
        image = self.by_name.get(inner)
        if image is None:
            raise NotFound("image", name)
        await self._remove(inner, image)

    async def _remove(self, inner: str, image: str) -> None:
        await self._journal.put_note(NOTE_KEY_PREFIX + inner, TOMBSTONE)
        self.by_name.pop(inner, None)
        await self._delete_unreferenced(image)

    async def _delete_unreferenced(self, image: str) -> None:
        """Deletes it from the store if no tenant has it."""
        if image not in self.by_name.values():
            await self._images.forget_image(image)

    def names_of_tenant(self, tenant: str) -> list[str]:
        """Qualified names of the tenant's images."""
        return [inner for inner in self.by_name if inner.startswith(f"{tenant}:")]

    async def forget_of_ended_run(self, inner: str) -> None:
        """Ignores an image that the store does not have."""
        with contextlib.suppress(InvalidAction):  # the store lost it before
            await self._remove(inner, self.by_name[inner])

    async def on_committed(self, inner: str) -> None:
        await self._journal.put_note(NOTE_KEY_PREFIX + inner, inner.encode())
        self.by_name[inner] = inner

    async def recall(self, names: TenantNamespace, key: str) -> str:
        image = await self._images.recall_image(names.qualify_image_key(key))
        return names.image_name(image) if image else ""

    async def remember(self, names: TenantNamespace, key: str, name: str) -> None:
        await self._images.remember_image(names.qualify_image_key(key), names.resolve_image(name))
