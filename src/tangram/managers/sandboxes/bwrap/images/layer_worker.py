"""Unpacking: how the store talks to the program that touches what came from elsewhere.

Owns the process of layers.py: one for each request. Decides nothing. Promises that the process has ended when a call
has, also when the caller is cancelled, and that what it found wrong is raised as whose fault it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from tangram.errors import AdmissionRefused, InvalidConfig, ManagerError
from tangram.managers.sandboxes.bwrap.images import layers
from tangram.managers.sandboxes.bwrap.images.archives import ArchivedLayer
from tangram.managers.sandboxes.bwrap.images.base_layers import Seen

UNPACK_S_MAX = 3600.0
"""Of one layer, or of one look."""


class Allowance(msgspec.Struct):
    """What an image may still take. Shrinks as its layers are unpacked."""

    bytes: int
    entries: int
    free_bytes_min: int
    """What is left on the disk for all others that write to it."""


class Unpacker:
    """Works as the user `uid`, shut into the directory that each call names."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    async def index(
        self, image: str, source: int, spool: int, folder: Path, allowed: Allowance
    ) -> tuple[int, dict[str, tuple[int, int]]]:
        """Which descriptor holds the plain tar, the source or the spool, and what is where in it."""
        request = {"do": "index", "source": source, "spool": spool, **_limits(allowed)}
        answer = await self._ask(image, request, folder, [source, spool])
        at = {name: (offset, size) for name, (offset, size) in answer["at"].items()}
        return (spool if answer["spooled"] else source), at

    async def unpack(self, image: str, layer: ArchivedLayer, folder: Path, allowed: Allowance) -> None:
        """A layer into an empty directory, in which something is left if this fails."""
        blob = layer.blob
        request = {"do": "unpack", "source": blob.fd, "offset": blob.offset, "size": blob.size}
        request |= {"digest": layer.digest, "diff_id": layer.diff_id, **_limits(allowed)}
        used = await self._ask(image, request, folder, [blob.fd])
        allowed.bytes -= used["bytes"]
        allowed.entries -= used["entries"]

    async def look(self, image: str, layers: tuple[str, ...], folder: Path, paths: list[str]) -> Seen:
        """What is in an image, and of which kind these paths are. Several layers are mounted on `folder`, an empty one,
        for as long as it takes."""
        inside = folder if len(layers) > 1 else Path(layers[0])
        request = {"do": "look", "layers": layers, "target": str(folder), "paths": paths}
        answer = await self._ask(image, request, inside, [])
        return msgspec.convert(answer, Seen)

    async def _ask(self, image: str, request: dict[str, Any], folder: Path, fds: list[int]) -> dict[str, Any]:
        shut_in = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            request = {**request, "folder": shut_in, "user": self._uid}
            answer = await _run(json.dumps(request).encode(), [*fds, shut_in])
        finally:
            os.close(shut_in)
        if "ok" in answer:
            return answer["ok"]  # type: ignore[no-any-return]
        kind, reason = answer["kind"], answer["error"]
        if kind == "world":
            raise ManagerError(f"image {image} could not be unpacked: {reason}")
        if kind == "invalid":
            raise InvalidConfig("image", image, f"an image that can be unpacked ({reason})")
        raise AdmissionRefused(kind, f"image {image} is beyond the limit {kind} of the store: {reason}")


def _limits(allowed: Allowance) -> dict[str, int]:
    return {
        "bytes_max": allowed.bytes,
        "entries_max": allowed.entries,
        "free_bytes_min": allowed.free_bytes_min,
    }


async def _run(request: bytes, fds: list[int]) -> dict[str, Any]:
    process = _start(fds)
    talk = asyncio.ensure_future(asyncio.to_thread(_talk, process, request))
    try:
        stdout, stderr = await asyncio.shield(talk)
    except asyncio.CancelledError:
        process.kill()
        await asyncio.wait([talk])
        raise
    if not stdout:
        said = stderr.decode(errors="replace").strip()[-500:] or "it was killed"
        return {"kind": "invalid", "error": f"the unpacking ended with {process.returncode}: {said}"}
    return json.loads(stdout)  # type: ignore[no-any-return]


def _start(fds: list[int]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", layers.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            # What is in the environment of this process is no business of an archive.
            env={"PATH": os.defpath},
            cwd="/",
        )
    except OSError as error:
        raise ManagerError(f"the program that unpacks images could not be started: {error}") from error


def _talk(process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, bytes]:
    with process:
        try:
            return process.communicate(request, timeout=UNPACK_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            return b"", f"it took longer than {UNPACK_S_MAX:g} seconds".encode()
        except BaseException:
            process.kill()
            raise
