"""Files and images of a shared service over HTTP, streamed in both directions.

Owns nothing. Holds content in memory only if the caller passes or requests bytes.
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
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import msgspec

from tangram.client.remote_connection import RemoteConnection
from tangram.errors import FileFailed, InvalidAction
from tangram.managers.work import FileEntry
from tangram.runtime.wire import DirectoryReply, ImageKeyRequest, ImageReply

CHUNK_BYTES = 256 << 10
TRANSFER_TIMEOUT_S = 3600.0
"""Time limit of one file or tree."""


class RemoteFiles:
    def __init__(self, connection: RemoteConnection) -> None:
        self._connection = connection

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes:
        return await self._connection.call("GET", _sandbox_path(sandbox, "files"), path=path, bytes_max=str(bytes_max))

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        await _upload(self._connection, "PUT", _sandbox_path(sandbox, "files"), content, path=path, mode=f"{mode:04o}")

    async def list(self, sandbox: str, path: str) -> list[FileEntry]:
        content = await self._connection.call("GET", _sandbox_path(sandbox, "list"), path=path)
        return msgspec.json.decode(content, type=DirectoryReply).entries

    async def delete(self, sandbox: str, path: str) -> None:
        await self._connection.call("DELETE", _sandbox_path(sandbox, "files"), path=path)

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        begin = into.tell()
        query = {"path": path, "bytes_max": str(bytes_max)}

        async def once() -> None:
            into.seek(begin)
            into.truncate()
            async with await self._connection.send(
                "GET", _sandbox_path(sandbox, "tree"), None, query, TRANSFER_TIMEOUT_S
            ) as response:
                if response.status >= 400:
                    self._connection.check_response(response.status, await response.read())
                size = 0
                async for piece in response.chunks():
                    size += len(piece)
                    if size > bytes_max + (1 << 20):
                        raise FileFailed(path, f"has more than {bytes_max} bytes")
                    await asyncio.to_thread(into.write, piece)

        await self._connection.retry_until_answered(once)

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        await _upload(self._connection, "PUT", _sandbox_path(sandbox, "tree"), tar, path=path)


class RemoteImages:
    def __init__(self, connection: RemoteConnection) -> None:
        self._connection = connection
        self.committed: dict[str, None] = {}
        """Images committed over this connection. Its end deletes those that are not remembered."""
        self.remembered: set[str] = set()
        """Images that are kept under a key."""

    async def add_image(self, path: str) -> str:
        """A tar is sent unchanged; a directory is packed first."""
        with tempfile.TemporaryFile() as packed:
            file = await asyncio.to_thread(_open_archive, Path(path), cast(BinaryIO, packed))
            with file:
                return _decode_image_name(await _upload(self._connection, "POST", "/v1/images", file))

    async def find_image(self, key: str) -> str:
        return _decode_image_name(await self._connection.call("GET", f"/v1/image-keys/{quote(key, safe='')}"))

    async def tag_image(self, key: str, name: str) -> None:
        await self._connection.call("PUT", f"/v1/image-keys/{quote(key, safe='')}", ImageKeyRequest(name=name))
        self.remembered.add(name)

    async def forget_image(self, name: str) -> None:
        await self._connection.call("DELETE", f"/v1/images/{quote(name, safe='')}")
        self.committed.pop(name, None)


async def _upload(
    connection: RemoteConnection, method: str, path: str, content: bytes | BinaryIO, /, **query: Any
) -> bytes:
    """Sends a streamed body, from its beginning again if it did not arrive."""
    begin = 0 if isinstance(content, bytes) else content.tell()

    async def pieces() -> AsyncIterator[bytes]:
        if isinstance(content, bytes):
            for at in range(0, len(content), CHUNK_BYTES):
                yield content[at : at + CHUNK_BYTES]
            return
        while piece := await asyncio.to_thread(content.read, CHUNK_BYTES):
            yield piece

    async def once() -> bytes:
        if not isinstance(content, bytes):
            content.seek(begin)
        async with await connection.send(method, path, pieces(), query, TRANSFER_TIMEOUT_S) as response:
            body = await response.read()
        return connection.check_response(response.status, body)

    return await connection.retry_until_answered(once)


def _sandbox_path(sandbox: str, what: str) -> str:
    return f"/v1/sandboxes/{quote(sandbox, safe='')}/{what}"


def _decode_image_name(body: bytes) -> str:
    return msgspec.json.decode(body, type=ImageReply).name


def _open_archive(path: Path, packed: BinaryIO) -> BinaryIO:
    """The archive at the path, or one that is packed from a directory: an OCI image layout, or a root directory."""
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
    """Packs a root directory as an image with one layer, in the format of `docker save`."""
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
            _add_member(tar, name, len(data), io.BytesIO(data))
        layer.seek(0)
        _add_member(tar, "layer.tar", size, cast(BinaryIO, layer))


def _add_member(tar: tarfile.TarFile, name: str, size: int, content: BinaryIO) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    tar.addfile(member, content)
