"""Images: found at the engine, added to it, made by Commit, removed with their owner.

Owns the names that commits gave, and what is known of each image. Never fetches one: what the engine does not have is
refused. Promises that an image which this owner made is gone after it, unless it was to be remembered; what others use
stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import msgspec

from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.sandboxes.docker.container import NOT_FOUND, Container, Traits
from tangram.managers.sandboxes.docker.engine import Engine, EngineRefused, Json, pieces_of, to_its_end
from tangram.managers.sandboxes.docker.owners import IMAGE, OWNER
from tangram.managers.work import HOST_IMAGE, require_forgettable

REPOSITORY = "tangram"
"""What commits are called at the engine, with their name below it."""
KEPT = "tangram-kept"
"""What remembered images are called at the engine, with the hash of their key as the tag."""

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_COMMIT_NAME = re.compile(rf"({_PART}(?:/{_PART})*)(?::(\w[\w.-]{{0,127}}))?", re.ASCII)
"""What an engine takes. Other names are replaced by their hash there."""
_NAME = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)
"""What may be asked of an engine: a name, with a tag or a digest, or an id."""
_LOADED = re.compile(r"Loaded image(?: ID)?: (\S+)")


class Images:
    def __init__(self, engine: Engine, owner: str, default: str) -> None:
        self._engine = engine
        self._owner = owner
        self._default = default
        self._committed: dict[str, str] = {}
        """Ids by the name that a Commit gave."""
        self._traits: dict[str, Traits] = {}
        """By id."""
        self._forgotten: set[str] = set()
        """Ids of images that may still be in use."""

    # ---- finding ----

    async def find(self, name: str) -> Traits:
        found = await self._describe(name)
        if found is None:
            wanted = self._wanted(name)
            raise ManagerError(
                f"the Docker engine has no image {wanted}; fetch it first: docker pull {wanted}", retry=False
            )
        return self._traits.get(found["Id"]) or _traits(found)

    def _wanted(self, name: str) -> str:
        return self._committed.get(name) or (self._default if name == HOST_IMAGE else name)

    async def _describe(self, name: str) -> Json | None:
        wanted = self._wanted(name)
        if not _NAME.fullmatch(wanted) or ".." in wanted:
            raise ManagerError(f"{wanted!r} is no name of an image", retry=False)
        try:
            return await self._engine.json("GET", f"/images/{wanted}/json", what="describe an image")
        except EngineRefused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def learn(self, image: Traits, programs: Iterable[str]) -> Traits:
        learned = msgspec.structs.replace(image, programs=frozenset(programs))
        self._traits[image.id] = learned
        return learned

    # ---- making ----

    async def commit(self, container: Container, name: str) -> None:
        """Programs in it stand still meanwhile. Raises ManagerError if the container has ended: an engine commits one
        that has, with files that a killed program may have written in part. The image gets its name last, so that no
        name refers to such an image."""
        matched = _COMMIT_NAME.fullmatch(name)
        repository = matched[1] if matched else f"name-{_hash(name)}"
        tag = (matched and matched[2]) or "latest"
        image = ""
        try:
            image = await self._commit(container, name)
            query = {"repo": f"{REPOSITORY}/{repository}", "tag": tag}
            await to_its_end(self._engine.json("POST", f"/images/{image}/tag", what="name an image", query=query))
        except BaseException as error:
            if image:
                await to_its_end(self._discard(image))
            if isinstance(error, EngineRefused):
                await container.require_running()  # its end says more than what the engine refused for it
            raise
        self._committed[name] = image
        assert container.image.programs is not None
        self.learn(msgspec.structs.replace(container.image, id=image), container.image.programs)

    async def _commit(self, container: Container, name: str) -> str:
        """The id of an image without a name."""
        query = {"container": container.id, "pause": "false"}
        body = {"Labels": {OWNER: self._owner, IMAGE: name}}
        image = ""
        try:
            async with container.still():
                made = await to_its_end(
                    self._engine.json("POST", "/commit", what="commit a container", query=query, body=body)
                )
                image = str(made["Id"])
                # A container that runs after the copy ran throughout.
                await container.require_running()
        except BaseException:
            if image:
                await to_its_end(self._discard(image))
            raise
        return image

    async def _discard(self, image: str) -> None:
        """If the engine does not answer, the image is removed with those of its owner."""
        with contextlib.suppress(ManagerError):
            await self._remove(image)

    async def add(self, path: str) -> str:
        """A root directory is imported and goes with its owner; a tar of images is loaded and stays."""
        source = Path(path)
        if await asyncio.to_thread(source.is_dir):
            with tempfile.TemporaryFile() as tar:
                await asyncio.to_thread(_pack, source, tar)
                changes = [f"LABEL {OWNER}={self._owner}", f"LABEL {IMAGE}={_hash(path)}"]
                query = [("fromSrc", "-"), *(("changes", change) for change in changes)]
                said = await to_its_end(self._post("/images/create", tar, "import an image", query))
            return str(said[-1]["status"])
        try:
            file = await asyncio.to_thread(open, source, "rb")
        except OSError as error:
            raise InvalidConfig("image", path, f"a directory or a tar ({error.strerror})") from error
        with file:
            said = await to_its_end(self._post("/images/load", file, "load an image", [("quiet", "true")]))
        loaded = _LOADED.findall("".join(line.get("stream", "") for line in said))
        if len(loaded) != 1:
            raise InvalidConfig("image", path, f"a tar with one image, as `docker save` writes it; it had {loaded}")
        return str(loaded[0])

    async def _post(self, path: str, tar: IO[bytes], what: str, query: list[tuple[str, str]]) -> list[Json]:
        answer = await self._engine.upload("POST", path, pieces_of(tar), what=what, query=query)
        said = [json.loads(line) for line in answer.splitlines() if line.strip()]
        for line in said:
            if "error" in line:
                raise ManagerError(f"the Docker engine refused to {what}: {line['error']}", retry=False)
        return said

    # ---- keeping and removing ----

    async def recall(self, key: str) -> str:
        kept = f"{KEPT}:{_hash(key)}"
        found = await self._describe(kept)
        if found is None:
            return ""
        return next((name for name, id in self._committed.items() if id == found["Id"]), kept)

    async def remember(self, key: str, name: str) -> None:
        image = await self.find(name)
        query = {"repo": KEPT, "tag": _hash(key)}
        await self._engine.json("POST", f"/images/{image.id}/tag", what="name an image", query=query)

    async def forget(self, name: str) -> None:
        """Only names that we gave. The engine keeps what a container uses until the container goes."""
        require_forgettable(name)
        found = await self._describe(name)
        self._committed.pop(name, None)
        if found is not None:
            self._forgotten.add(found["Id"])
            for tag in _own_tags(found):
                await self._remove(tag)
        await self.remove_forgotten()

    async def remove_forgotten(self) -> None:
        """What is no longer in use."""
        for image in list(self._forgotten):
            found = await self._describe(image)
            if found is None or found["RepoTags"]:
                self._forgotten.discard(image)
            else:
                await self._remove(image)

    async def remove_all(self, of_owner: Callable[[str], bool]) -> None:
        """The newest first: an image below another one cannot be removed. Of those made within one second the engine
        does not tell which is newer, so what is refused is tried again once another one has gone."""
        await self.remove_forgotten()
        query = {"filters": json.dumps({"label": [OWNER]})}
        listed = await self._engine.json("GET", "/images/json", what="list images", query=query)
        names: list[str] = []
        for image in sorted(listed, key=lambda image: -int(image["Created"])):
            if of_owner((image["Labels"] or {}).get(OWNER, "")):
                kept = any(tag.startswith(f"{KEPT}:") for tag in image["RepoTags"] or [])
                tags = [tag for tag in _own_tags(image) if not tag.startswith(f"{KEPT}:")]
                names += tags if kept else [image["Id"]]
        while names:
            left = [name for name in names if not await self._remove(name)]
            if len(left) == len(names):
                return
            names = left

    async def _remove(self, image: str) -> bool:
        """False: it is in use, or below another image."""
        try:
            await self._engine.json("DELETE", f"/images/{image}", what="remove an image", query={"force": "true"})
        except EngineRefused:
            return False
        return True


def _traits(found: Json) -> Traits:
    config = found.get("Config") or {}
    directory = config.get("WorkingDir") or ""
    return Traits(
        id=found["Id"],
        env=dict(line.partition("=")[::2] for line in config.get("Env") or []),
        directory="" if directory == "/" else directory,
    )


def _own_tags(found: Json) -> list[str]:
    return [tag for tag in found["RepoTags"] or [] if tag.startswith((f"{REPOSITORY}/", f"{KEPT}:"))]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _pack(directory: Path, into: IO[bytes]) -> None:
    """As it is, but for sockets, devices and pipes. Blocks."""

    def sound(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None

    with tarfile.open(fileobj=into, mode="w") as tar:
        tar.add(directory, arcname=".", filter=sound)
