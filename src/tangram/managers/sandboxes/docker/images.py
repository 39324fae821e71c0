"""Images of the engine: found, added, created by Commit, and removed with their owner.

Owns the names of commits, and the known properties of each image. Never pulls: an image that the engine does not have
is refused. Promises that an image of this owner is removed with it, unless it is remembered, and that other images
stay."""

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

from tangram.cancellation import run_to_completion
from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.sandboxes.docker.container import HTTP_NOT_FOUND, Container, ImageInfo
from tangram.managers.sandboxes.docker.engine import DockerEngine, EngineRefused, Json, read_chunks
from tangram.managers.sandboxes.docker.owners import IMAGE_LABEL, OWNER_LABEL
from tangram.managers.work import HOST_IMAGE, require_forgettable

REPOSITORY = "tangram"
"""The repository of commits in the engine, with their name below it."""
TAGGED_REPOSITORY = "tangram-kept"
"""The repository of remembered images in the engine, with the hash of their key as the tag."""

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_COMMIT_NAME = re.compile(rf"({_PART}(?:/{_PART})*)(?::(\w[\w.-]{{0,127}}))?", re.ASCII)
"""Names that an engine accepts. Others are replaced by their hash there."""
_NAME = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)
"""References that an engine accepts: a name, with a tag or a digest, or an id."""
_LOADED = re.compile(r"Loaded image(?: ID)?: (\S+)")


class DockerImages:
    def __init__(self, engine: DockerEngine, owner: str, default: str) -> None:
        self._engine = engine
        self._owner = owner
        self._default = default
        self._committed: dict[str, str] = {}
        """Ids by the name of a Commit."""
        self._info_by_id: dict[str, ImageInfo] = {}
        """Properties of images, by id."""
        self._forgotten: set[str] = set()
        """Ids of images that may still be in use."""

    # ---- find ----

    async def find(self, name: str) -> ImageInfo:
        description = await self._describe(name)
        if description is None:
            reference = self._engine_name(name)
            raise ManagerError(
                f"the Docker engine has no image {reference}; fetch it first: docker pull {reference}", retry=False
            )
        return self._info_by_id.get(description["Id"]) or _image_info(description)

    def _engine_name(self, name: str) -> str:
        return self._committed.get(name) or (self._default if name == HOST_IMAGE else name)

    async def _describe(self, name: str) -> Json | None:
        reference = self._engine_name(name)
        if not _NAME.fullmatch(reference) or ".." in reference:
            raise ManagerError(f"{reference!r} is not a valid image name", retry=False)
        try:
            return await self._engine.request_json("GET", f"/images/{reference}/json", purpose="describe an image")
        except EngineRefused as error:
            if error.status == HTTP_NOT_FOUND:
                return None
            raise

    def record_programs(self, image: ImageInfo, programs: Iterable[str]) -> ImageInfo:
        learned = msgspec.structs.replace(image, programs=frozenset(programs))
        self._info_by_id[image.id] = learned
        return learned

    # ---- create ----

    async def commit(self, container: Container, name: str) -> None:
        """The container is paused meanwhile. Raises ManagerError if it has ended: an engine also commits an ended
        container, in which a killed program may have left a partial file. The image gets its name last, so that no name
        refers to such an image."""
        matched = _COMMIT_NAME.fullmatch(name)
        repository = matched[1] if matched else f"name-{_hash(name)}"
        tag = (matched and matched[2]) or "latest"
        image = ""
        try:
            image = await self._commit(container, name)
            query = {"repo": f"{REPOSITORY}/{repository}", "tag": tag}
            await run_to_completion(
                self._engine.request_json("POST", f"/images/{image}/tag", purpose="name an image", query=query)
            )
        except BaseException as error:
            if image:
                await run_to_completion(self._discard(image))
            if isinstance(error, EngineRefused):
                await container.require_running()  # its end explains more than the refusal of the engine
            raise
        self._committed[name] = image
        assert container.image.programs is not None
        self.record_programs(msgspec.structs.replace(container.image, id=image), container.image.programs)

    async def _commit(self, container: Container, name: str) -> str:
        """The id of an image without a name."""
        query = {"container": container.id, "pause": "false"}
        body = {"Labels": {OWNER_LABEL: self._owner, IMAGE_LABEL: name}}
        image = ""
        try:
            async with container.paused():
                committed = await run_to_completion(
                    self._engine.request_json("POST", "/commit", purpose="commit a container", query=query, body=body)
                )
                image = str(committed["Id"])
                # A container that runs after the copy ran throughout.
                await container.require_running()
        except BaseException:
            if image:
                await run_to_completion(self._discard(image))
            raise
        return image

    async def _discard(self, image: str) -> None:
        """If the engine does not respond, the image is removed with those of its owner."""
        with contextlib.suppress(ManagerError):
            await self._remove(image)

    async def add(self, path: str) -> str:
        """A root directory is imported and removed with its owner; a tar of images is loaded and stays."""
        source = Path(path)
        if await asyncio.to_thread(source.is_dir):
            with tempfile.TemporaryFile() as tar:
                await asyncio.to_thread(_pack, source, tar)
                changes = [f"LABEL {OWNER_LABEL}={self._owner}", f"LABEL {IMAGE_LABEL}={_hash(path)}"]
                query = [("fromSrc", "-"), *(("changes", change) for change in changes)]
                lines = await run_to_completion(self._post("/images/create", tar, "import an image", query))
            return str(lines[-1]["status"])
        try:
            file = await asyncio.to_thread(open, source, "rb")
        except OSError as error:
            raise InvalidConfig("image", path, f"a directory or a tar ({error.strerror})") from error
        with file:
            lines = await run_to_completion(self._post("/images/load", file, "load an image", [("quiet", "true")]))
        loaded = _LOADED.findall("".join(line.get("stream", "") for line in lines))
        if len(loaded) != 1:
            raise InvalidConfig("image", path, f"a tar with one image, as `docker save` writes it; it had {loaded}")
        return str(loaded[0])

    async def _post(self, path: str, tar: IO[bytes], purpose: str, query: list[tuple[str, str]]) -> list[Json]:
        response = await self._engine.upload("POST", path, read_chunks(tar), purpose=purpose, query=query)
        lines = [json.loads(line) for line in response.splitlines() if line.strip()]
        for line in lines:
            if "error" in line:
                raise ManagerError(f"the Docker engine refused to {purpose}: {line['error']}", retry=False)
        return lines

    # ---- keep and remove ----

    async def find_by_key(self, key: str) -> str:
        kept = f"{TAGGED_REPOSITORY}:{_hash(key)}"
        description = await self._describe(kept)
        if description is None:
            return ""
        return next((name for name, id in self._committed.items() if id == description["Id"]), kept)

    async def tag(self, key: str, name: str) -> None:
        image = await self.find(name)
        query = {"repo": TAGGED_REPOSITORY, "tag": _hash(key)}
        await self._engine.request_json("POST", f"/images/{image.id}/tag", purpose="name an image", query=query)

    async def forget(self, name: str) -> None:
        """Removes only names that a manager gave. The engine keeps what a container uses until that is removed."""
        require_forgettable(name)
        description = await self._describe(name)
        self._committed.pop(name, None)
        if description is not None:
            self._forgotten.add(description["Id"])
            for tag in _own_tags(description):
                await self._remove(tag)
        await self.remove_forgotten()

    async def remove_forgotten(self) -> None:
        """Remove images that are no longer in use."""
        for image in list(self._forgotten):
            description = await self._describe(image)
            if description is None or description["RepoTags"]:
                self._forgotten.discard(image)
            else:
                await self._remove(image)

    async def remove_all(self, matches_owner: Callable[[str], bool]) -> None:
        """The newest first: an image below another one cannot be removed. The engine does not order images that were
        created within one second, so a refused one is tried again after another has been removed."""
        await self.remove_forgotten()
        query = {"filters": json.dumps({"label": [OWNER_LABEL]})}
        listed = await self._engine.request_json("GET", "/images/json", purpose="list images", query=query)
        names: list[str] = []
        for image in sorted(listed, key=lambda image: -int(image["Created"])):
            if matches_owner((image["Labels"] or {}).get(OWNER_LABEL, "")):
                kept = any(tag.startswith(f"{TAGGED_REPOSITORY}:") for tag in image["RepoTags"] or [])
                tags = [tag for tag in _own_tags(image) if not tag.startswith(f"{TAGGED_REPOSITORY}:")]
                names += tags if kept else [image["Id"]]
        while names:
            left = [name for name in names if not await self._remove(name)]
            if len(left) == len(names):
                return
            names = left

    async def _remove(self, image: str) -> bool:
        """False if it is in use, or below another image."""
        try:
            await self._engine.request_json(
                "DELETE", f"/images/{image}", purpose="remove an image", query={"force": "true"}
            )
        except EngineRefused:
            return False
        return True


def _image_info(description: Json) -> ImageInfo:
    config = description.get("Config") or {}
    directory = config.get("WorkingDir") or ""
    return ImageInfo(
        id=description["Id"],
        env=dict(line.partition("=")[::2] for line in config.get("Env") or []),
        directory="" if directory == "/" else directory,
    )


def _own_tags(description: Json) -> list[str]:
    return [tag for tag in description["RepoTags"] or [] if tag.startswith((f"{REPOSITORY}/", f"{TAGGED_REPOSITORY}:"))]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _pack(directory: Path, into: IO[bytes]) -> None:
    """Pack a directory, without sockets, devices and pipes. Blocks."""

    def sound(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None

    with tarfile.open(fileobj=into, mode="w") as tar:
        tar.add(directory, arcname=".", filter=sound)
