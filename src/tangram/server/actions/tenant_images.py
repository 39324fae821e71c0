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
from tangram.server.tenants import Principal, image_prefix

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
        if name not in self.by_name and len(self.names_of_tenant(tenant)) >= images_max:
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
        qualified_name = TenantNamespace(caller.tenant, self.by_name).qualify_image(name)
        self.by_name[qualified_name] = image  # before the note, so that ending the run finds and forgets it
        await self._journal.put_note(NOTE_KEY_PREFIX + qualified_name, image.encode())
        return name

    async def forget(self, namespace: TenantNamespace, name: str) -> None:
        qualified_name = namespace.qualify_image(name)
        image = self.by_name.get(qualified_name)
        if image is None:
            raise NotFound("image", name)
        await self._remove(qualified_name, image)

    async def _remove(self, qualified_name: str, image: str) -> None:
        await self._journal.put_note(NOTE_KEY_PREFIX + qualified_name, TOMBSTONE)
        self.by_name.pop(qualified_name, None)
        await self._delete_unreferenced(image)

    async def _delete_unreferenced(self, image: str) -> None:
        """Deletes it from the store if no tenant has it."""
        if image not in self.by_name.values():
            await self._images.forget_image(image)

    def names_of_tenant(self, tenant: str) -> list[str]:
        """Qualified names of the tenant's images."""
        prefix = image_prefix(tenant)
        return [name for name in self.by_name if name.startswith(prefix)]

    async def forget_of_ended_run(self, qualified_name: str) -> None:
        """Ignores an image that the store does not have."""
        with contextlib.suppress(InvalidAction):  # the store lost it before
            await self._remove(qualified_name, self.by_name[qualified_name])

    async def on_committed(self, qualified_name: str) -> None:
        await self._journal.put_note(NOTE_KEY_PREFIX + qualified_name, qualified_name.encode())
        self.by_name[qualified_name] = qualified_name

    async def find_by_key(self, namespace: TenantNamespace, key: str) -> str:
        image = await self._images.find_image(namespace.qualify_image_key(key))
        return namespace.image_name(image) if image else ""

    async def tag(self, namespace: TenantNamespace, key: str, name: str) -> None:
        await self._images.tag_image(namespace.qualify_image_key(key), namespace.resolve_image(name))
