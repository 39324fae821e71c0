"""Files and images of a shared service, over HTTP: streamed in both directions.

Owns nothing. What is on its way is held in memory only where it is asked for as bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import platform
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote

import msgspec

from tangram.errors import FileFailed, InvalidAction
from tangram.managers.work import Entry
from tangram.runtime.wire import Entries, ImageReply, Remember

if TYPE_CHECKING:
    from tangram.client.remote import Wire

PIECE_BYTES = 256 << 10
TREE_S_MAX = 3600.0
"""For one file or tree."""


class RemoteFiles:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes:
        return await self._wire.ask("GET", _place(sandbox, "files"), path=path, bytes_max=str(bytes_max))

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        await self._send("PUT", _place(sandbox, "files"), content, path=path, mode=f"{mode:04o}")

    async def list(self, sandbox: str, path: str) -> list[Entry]:
        found = await self._wire.ask("GET", _place(sandbox, "list"), path=path)
        return msgspec.json.decode(found, type=Entries).entries

    async def delete(self, sandbox: str, path: str) -> None:
        await self._wire.ask("DELETE", _place(sandbox, "files"), path=path)

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        begin = into.tell()
        query = {"path": path, "bytes_max": str(bytes_max)}

        async def once() -> None:
            into.seek(begin)
            into.truncate()
            async with self._wire.request("GET", _place(sandbox, "tree"), None, query, TREE_S_MAX) as response:
                if response.status >= 400:
                    self._wire.checked(response.status, await response.read())
                size = 0
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    size += len(piece)
                    if size > bytes_max + (1 << 20):
                        raise FileFailed(path, f"has more than {bytes_max} bytes")
                    await asyncio.to_thread(into.write, piece)

        await self._wire.until_answered(once)

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        await self._send("PUT", _place(sandbox, "tree"), tar, path=path)

    async def _send(self, method: str, place: str, content: bytes | BinaryIO, **query: Any) -> bytes:
        return await send(self._wire, method, place, content, **query)


class RemoteImages:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.committed: dict[str, None] = {}
        """Made over this connection, with which they go,"""
        self.remembered: set[str] = set()
        """unless they are kept under a key."""

    async def add_image(self, path: str) -> str:
        """A tar goes as it is; a directory is packed first."""
        with tempfile.TemporaryFile() as packed:
            file = await asyncio.to_thread(_opened, Path(path), cast(BinaryIO, packed))
            with file:
                return await self._add(file)

    async def _add(self, file: BinaryIO) -> str:
        return _image(await send(self._wire, "POST", "/v1/images", file))

    async def recall_image(self, key: str) -> str:
        return _image(await self._wire.ask("GET", f"/v1/image-keys/{quote(key, safe='')}"))

    async def remember_image(self, key: str, name: str) -> None:
        await self._wire.ask("PUT", f"/v1/image-keys/{quote(key, safe='')}", Remember(name=name))
        self.remembered.add(name)

    async def forget_image(self, name: str) -> None:
        await self._wire.ask("DELETE", f"/v1/images/{quote(name, safe='')}")
        self.committed.pop(name, None)


async def send(wire: Wire, method: str, place: str, content: bytes | BinaryIO, **query: Any) -> bytes:
    """A body as a stream. Sent again from its beginning if it did not arrive."""
    begin = 0 if isinstance(content, bytes) else content.tell()

    async def pieces() -> AsyncIterator[bytes]:
        if isinstance(content, bytes):
            for at in range(0, len(content), PIECE_BYTES):
                yield content[at : at + PIECE_BYTES]
            return
        while piece := await asyncio.to_thread(content.read, PIECE_BYTES):
            yield piece

    async def once() -> bytes:
        if not isinstance(content, bytes):
            content.seek(begin)
        async with wire.request(method, place, pieces(), query, TREE_S_MAX) as response:
            answer = await response.read()
        return wire.checked(response.status, answer)

    return await wire.until_answered(once)


def _place(sandbox: str, what: str) -> str:
    return f"/v1/sandboxes/{quote(sandbox, safe='')}/{what}"


def _image(answer: bytes) -> str:
    return msgspec.json.decode(answer, type=ImageReply).name


def _opened(path: Path, packed: BinaryIO) -> BinaryIO:
    """The archive at that place, or one that is made of a directory: the layout of an OCI image, or a root."""
    try:
        if not path.is_dir():
            return path.open("rb")
        with tarfile.open(fileobj=packed, mode="w") as tar:
            if (path / "index.json").exists():
                for each in sorted(path.iterdir()):
                    tar.add(each, arcname=each.name)
            else:
                _add_root(tar, path)
    except (OSError, tarfile.TarError) as error:
        raise InvalidAction("source", str(path), f"a directory, or a tar, that can be read ({error})") from None
    packed.seek(0)
    return packed


def _add_root(tar: tarfile.TarFile, root: Path) -> None:
    """A root directory as the one layer of an image, as `docker save` writes it."""
    with tempfile.TemporaryFile() as layer:
        with tarfile.open(fileobj=layer, mode="w") as inner:
            for each in sorted(root.iterdir()):
                inner.add(each, arcname=each.name)
        size = layer.seek(0, 2)
        layer.seek(0)
        digest = hashlib.file_digest(layer, "sha256").hexdigest()
        config = {
            "architecture": platform.machine(),
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        manifest = [{"Config": "config.json", "RepoTags": None, "Layers": ["layer.tar"]}]
        for name, data in (
            ("config.json", msgspec.json.encode(config)),
            ("manifest.json", msgspec.json.encode(manifest)),
        ):
            _add(tar, name, len(data), io.BytesIO(data))
        layer.seek(0)
        _add(tar, "layer.tar", size, cast(BinaryIO, layer))


def _add(tar: tarfile.TarFile, name: str, size: int, content: BinaryIO) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    tar.addfile(member, content)
