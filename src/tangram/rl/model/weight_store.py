"""Published weights: how a trainer hands the weights of a version to engines.

    FOLDER/00000007/manifest.json   what is where
    FOLDER/00000007/00000.bucket    raw bytes of whole tensors, one after the other
    FOLDER/00000007/00001.bucket    ...

This is the weight store of one machine: `publish`, `pull`, `versions`, `forget` and `rollback` are all that anybody
asks of it, and a `Weights` all that engines are told, so a store in a network can take its place by doing these five.

Owns this layout. Never decides which version is to be used. Promises that a version is there whole or not at all; that
a model which pulls one has all of it, or all that it had before; and that what cannot be used is told with its file.
One process at a time publishes into a folder, and any number pull from it. A folder in memory, such as one under
/dev/shm, spares the disk.
"""

from __future__ import annotations

import mmap
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tangram.errors import InvalidInput, ManagerError
from tangram.files.atomic_directory import UNFINISHED, remove_whole, sweep, sync, whole_folder
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.model.transformer import ModelConfig, Transformer

MANIFEST = "manifest.json"
CHECKPOINT = "config.json"
"""What a folder has instead that servers of others read."""
BUCKET_BYTES = 64 << 20
"""Of one file: large enough that its call costs nothing, small enough to be sent on while the next one is written."""
PIECE_BYTES = 4 << 20
PIECE_NUMBERS = 1 << 20
"""That are read at once: a millisecond or two, in which other threads go on as they like."""
ALIGNMENT = 64
"""Where tensors may begin in a bucket: the width of a cache line, a multiple of every element."""
DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.float64, torch.bfloat16, torch.half)}


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int

    @property
    def end(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for each in self.shape:
            size *= each
        return self.offset + size


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    crc32: int
    """Damage is what is looked for, not malice; it is checked at 2.5 GB/s here, BLAKE2 at 0.9."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    config: ModelConfig
    tensors: tuple[Placed, ...]
    buckets: tuple[Bucket, ...]


def publish(
    model: Transformer | Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path | str,
    version: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    replace: bool = False,
) -> Weights:
    """Writes a version of the weights. Raises ManagerError if it is there already and is not to be replaced, or cannot
    be written, in which case nothing of it stays, and what was there does."""
    state = model.state_dict() if isinstance(model, Transformer) else model
    if wrong := misfit({name: tuple(tensor.shape) for name, tensor in state.items()}, config):
        raise InvalidInput("model", wrong, "the weights of such a model")
    if version < 0:
        raise InvalidInput("version", version, "at least 0")
    tensors = place(state, bucket_bytes)
    path = Path(folder) / f"{version:08d}"
    sweep(path.parent)
    place_taken = replace and path.exists()
    new = path.parent / f"{UNFINISHED}{uuid.uuid4().hex}" if place_taken else path
    with whole_folder(new) as unfinished:
        buckets = tuple(
            write_bucket(unfinished / bucket_name(index), [each for each in tensors if each.bucket == index], state)
            for index in range(tensors[-1].bucket + 1)
        )
        manifest = Manifest(version=version, config=config, tensors=tensors, buckets=buckets)
        (unfinished / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    if place_taken:
        exchange(new, path)
    return Weights(version=version, folder=str(path))


def pull(weights: Weights, into: Transformer | None = None) -> Transformer:
    """Reads published weights into a model of the same kind, in its dtype, or into a new one. Raises ManagerError if
    they are not there or not whole; then the model is as it was."""
    manifest = wanted(weights)
    if into is None:
        with torch.inference_mode(False):  # so that it can be trained
            into = Transformer(manifest.config, DTYPES[manifest.tensors[0].dtype])
    for _ in pulling(weights, into):
        pass
    return into


def pulling(weights: Weights, into: Transformer) -> Iterator[None]:
    """`pull`, piece by piece, for whoever does something else between them or beside them. The model is as it was until
    all is known to be right; if it is left in the middle of what follows, it is nobody's."""
    folder, manifest = Path(weights.folder), wanted(weights)
    if into.config != manifest.config:
        raise ManagerError(f"{folder / MANIFEST}: expected {into.config}, got {manifest.config}", retry=False)
    paths = [folder / bucket_name(index) for index in range(len(manifest.buckets))]
    # All at once: from here on it is all the same if the version is forgotten.
    buckets = [map_bucket(path, each) for path, each in zip(paths, manifest.buckets, strict=True)]
    for path, each, mapped in zip(paths, manifest.buckets, buckets, strict=True):
        yield from checking(path, mapped, each.crc32)
    # Nothing from here on can fail.
    state = into.state_dict()
    for placed in manifest.tensors:
        with torch.inference_mode():
            old = state[placed.name].view(-1)
            new = torch.frombuffer(
                buckets[placed.bucket], dtype=DTYPES[placed.dtype], count=old.numel(), offset=placed.offset
            )
            pairs = list(zip(old.split(PIECE_NUMBERS), new.split(PIECE_NUMBERS), strict=True))
        for old_piece, new_piece in pairs:
            with torch.inference_mode():
                old_piece.copy_(new_piece)
            yield


def wanted(weights: Weights) -> Manifest:
    """The manifest of this version."""
    manifest = read_manifest(Path(weights.folder))
    if manifest.version != weights.version:
        path = Path(weights.folder) / MANIFEST
        raise ManagerError(f"{path}: expected version {weights.version}, got {manifest.version}", retry=False)
    return manifest


def versions(folder: Path | str) -> list[Weights]:
    """What is published in a folder, oldest first; checkpoints for servers of others too."""
    numbers = (path for path in Path(folder).glob("*") if path.name.isdecimal())
    found = (path for path in numbers if any((path / name).exists() for name in (MANIFEST, CHECKPOINT)))
    numbered = sorted((int(path.name), str(path)) for path in found)
    return [Weights(version=version, folder=path) for version, path in numbered]


def forget(folder: Path | str, keep: int = 2) -> list[Weights]:
    """Removes all but the newest versions; returns those that are gone. Who is pulling one of them gets it whole or
    an error."""
    gone = versions(folder)[: -keep or None]
    for each in gone:
        remove_whole(Path(each.folder))
    return gone


def rollback(folder: Path | str, version: int) -> list[Weights]:
    """Removes all versions that are newer than this one; returns them. Their lineage has ended."""
    gone = [each for each in versions(folder) if each.version > version]
    for each in reversed(gone):
        remove_whole(Path(each.folder))
    return gone


# ---- folders ----


def bucket_name(index: int) -> str:
    return f"{index:05d}.bucket"


def exchange(new: Path, path: Path) -> None:
    """A folder takes the place of another one, which goes. For a moment neither is there; who reads the old one reads
    on, or is told."""
    old = path.parent / f"{UNFINISHED}{uuid.uuid4().hex}"
    try:
        path.rename(old)
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise
        sync(path.parent)
    except OSError as error:
        raise ManagerError(f"{path} cannot be replaced: {error.strerror}") from error
    finally:
        for left in (old, new):
            shutil.rmtree(left, ignore_errors=True)


# ---- what is where ----


def place(state: Mapping[str, Tensor], bucket_bytes: int) -> tuple[Placed, ...]:
    """Tensors in buckets. One that is larger than a bucket has a larger one for itself."""
    found: list[Placed] = []
    bucket = end = 0
    for name, tensor in state.items():
        offset = aligned(end)
        if end and offset + tensor.nbytes > bucket_bytes:
            bucket, offset = bucket + 1, 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise InvalidInput(name, dtype, f"one of {', '.join(DTYPES)}")
        found.append(Placed(name=name, dtype=dtype, shape=tuple(tensor.shape), bucket=bucket, offset=offset))
        end = found[-1].end
    return tuple(found)


def misfit(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> str:
    """What is wrong with these tensors as the weights of such a model; nothing, if they fit."""
    if config.layers > len(shapes):  # a lie is found out before it is made
        return f"expected {config.layers} layers, got {len(shapes)} tensors"
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}
    for name in (*expected, *shapes):
        if shapes.get(name) != expected.get(name):
            return f"{name}: expected {expected.get(name, 'none')}, got {shapes.get(name, 'none')}"
    return ""


def misplaced(manifest: Manifest) -> str:
    """Which tensor does not lie right behind the one before it; none, if all fill their buckets."""
    bucket = end = 0
    sizes = [each.size_bytes for each in manifest.buckets]
    for each in manifest.tensors:
        if each.dtype not in DTYPES:
            return f"{each.name}: expected one of {', '.join(DTYPES)}, got {each.dtype}"
        if each.bucket == bucket + 1 and sizes[bucket : bucket + 1] == [end]:
            bucket, end = each.bucket, 0
        if (each.bucket, each.offset) != (bucket, aligned(end)):
            return f"{each.name}: expected at {aligned(end)} of bucket {bucket}, got {each.offset} of {each.bucket}"
        end = each.end
    return "" if sizes[bucket:] == [end] else f"the tensors do not fill {len(sizes)} buckets"


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, InvalidInput) as error:
        raise ManagerError(f"{path}: not a manifest of weights: {error}", retry=False) from error
    wrong = misfit({each.name: each.shape for each in manifest.tensors}, manifest.config) or misplaced(manifest)
    if wrong:
        raise ManagerError(f"{path}: {wrong}", retry=False)
    return manifest


# ---- buckets ----


def write_bucket(path: Path, tensors: Sequence[Placed], state: Mapping[str, Tensor]) -> Bucket:
    crc32 = end = 0
    with path.open("wb") as file:
        for each in tensors:
            for piece in (bytes(each.offset - end), raw(state[each.name])):
                file.write(piece)
                crc32 = zlib.crc32(piece, crc32)
            end = each.end
    return Bucket(size_bytes=end, crc32=crc32)


def map_bucket(path: Path, bucket: Bucket) -> mmap.mmap:
    """Its bytes. They are unmapped with the last that refers to them."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != bucket.size_bytes:
                raise ManagerError(f"{path}: expected {bucket.size_bytes} bytes, got {size}", retry=False)
            # A private copy, of which nothing is ever made: a tensor wants memory that it may write.
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror}") from error
    return mapped


def checking(path: Path, mapped: mmap.mmap, crc32: int) -> Iterator[None]:
    """Looks through a bucket, piece by piece."""
    found = 0
    with memoryview(mapped) as content:
        for begin in range(0, len(content), PIECE_BYTES):
            found = zlib.crc32(content[begin : begin + PIECE_BYTES], found)
            yield
    if found != crc32:
        raise ManagerError(f"{path}: damaged: its checksum is not that of the manifest", retry=False)


def raw(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
