"""The layer worker: runs layers.py, the program that touches files of untrusted archives.

Starts one process for each request. Promises that the process has ended when a call returns or is cancelled, and that a
failure is raised as the error that names its cause: the image, a limit or the machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from tangram.errors import AdmissionRefused, InvalidConfig, ManagerError
from tangram.managers.sandboxes.bwrap.images import layers
from tangram.managers.sandboxes.bwrap.images.archives import ArchivedLayer
from tangram.managers.sandboxes.bwrap.images.base_layers import ImageContents
from tangram.processes.isolated import isolated_argv
from tangram.processes.run_program import OutputTooLong, run_program_async

UNPACK_S_MAX = 3600.0
"""Time limit for one request."""
REPLY_BYTES_MAX = 1 << 28
"""Output of the program: more than the names of `layers.INDEX_ENTRIES_MAX` files can take."""
MEMORY_BYTES_MAX = 1 << 30
"""Address space of the program: a header may claim any length, and is read as a whole."""


class UnpackLimits(msgspec.Struct):
    """The remaining limits of an image. Decreases as its layers are unpacked."""

    bytes: int
    entries: int
    free_bytes_min: int
    """Free bytes that must remain on the disk for other users of it."""


class LayerWorker:
    """Works as the user `uid`, confined to the directory that each call names."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    async def index(
        self, image: str, source: int, spool: int, folder: Path, allowed: UnpackLimits
    ) -> tuple[int, dict[str, tuple[int, int]]]:
        """Returns the descriptor that holds the plain tar (the source or the spool), and offset and size by name in
        it."""
        request = {"do": "index", "source": source, "spool": spool, **_limits(allowed)}
        reply = await self._request(image, request, folder, [source, spool])
        at = {name: (offset, size) for name, (offset, size) in reply["at"].items()}
        return (spool if reply["spooled"] else source), at

    async def unpack(self, image: str, layer: ArchivedLayer, folder: Path, allowed: UnpackLimits) -> None:
        """Unpack a layer into an empty directory. A failure leaves files in it."""
        blob = layer.blob
        request = {"do": "unpack", "source": blob.fd, "offset": blob.offset, "size": blob.size}
        request |= {"digest": layer.digest, "diff_id": layer.diff_id, **_limits(allowed)}
        used = await self._request(image, request, folder, [blob.fd])
        allowed.bytes -= used["bytes"]
        allowed.entries -= used["entries"]

    async def inspect(self, image: str, layers: tuple[str, ...], folder: Path, paths: list[str]) -> ImageContents:
        """What an image contains, and the kind of each of these paths. Several layers are mounted on the empty
        directory `folder` meanwhile."""
        inside = folder if len(layers) > 1 else Path(layers[0])
        request = {"do": "look", "layers": layers, "target": str(folder), "paths": paths}
        reply = await self._request(image, request, inside, [])
        return msgspec.convert(reply, ImageContents)

    async def _request(self, image: str, request: dict[str, Any], folder: Path, fds: list[int]) -> dict[str, Any]:
        root_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            request = {**request, "folder": root_fd, "user": self._uid, "memory_bytes_max": MEMORY_BYTES_MAX}
            reply = await _run(json.dumps(request).encode(), [*fds, root_fd])
        finally:
            os.close(root_fd)
        if "ok" in reply:
            return reply["ok"]  # type: ignore[no-any-return]
        kind, reason = reply["kind"], reply["error"]
        if kind == "world":
            raise ManagerError(f"image {image} could not be unpacked: {reason}")
        if kind == "invalid":
            raise InvalidConfig("image", image, f"an image that can be unpacked ({reason})")
        raise AdmissionRefused(kind, f"image {image} exceeds the limit {kind} of the store: {reason}")


def _limits(allowed: UnpackLimits) -> dict[str, int]:
    return {
        "bytes_max": allowed.bytes,
        "entries_max": allowed.entries,
        "free_bytes_min": allowed.free_bytes_min,
    }


async def _run(request: bytes, fds: list[int]) -> dict[str, Any]:
    try:
        result = await run_program_async(
            isolated_argv(layers.__name__, str(os.getpid()), options=("-X", "utf8")),
            request=request,
            seconds=UNPACK_S_MAX,
            output_bytes_max=REPLY_BYTES_MAX,
            # The environment of this process may contain secrets.
            env={"PATH": os.defpath},
            cwd="/",
            pass_fds=fds,
        )
    except (TimeoutError, OutputTooLong) as error:
        return {"kind": "invalid", "error": f"the unpacking was stopped: {error}"}
    except OSError as error:
        raise ManagerError(f"the program that unpacks images could not be started: {error}") from error
    if not result.stdout:
        output = result.stderr[-500:] or "it was killed"
        return {"kind": "invalid", "error": f"the unpacking ended with {result.code}: {output}"}
    return json.loads(result.stdout)  # type: ignore[no-any-return]
