"""The weight store: transfers the weights of a version from a trainer to engines.

    FOLDER/00000007/manifest.json   name, shape and place of each tensor
    FOLDER/00000007/00000.bucket    raw bytes of whole tensors, one after the other
    FOLDER/00000007/00001.bucket    ...

This is the store of a single machine. Its interface is `publish`, `pull`, `versions`, `prune_versions` and `rollback`,
and engines get only a `PolicyWeights`; a store over a network could replace it.

Owns this layout. Never decides which version is used. Promises that a version is published completely or not at all;
that a model which pulls one has all of it, or is unchanged; and that errors name the unusable file. One process at a
time publishes into a folder, any number pulls. A folder in memory, such as under /dev/shm, avoids the disk.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tangram.errors import InvalidInput, ManagerError
from tangram.files.atomic_directory import atomic_directory, remove_atomically, remove_unfinished
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.model.transformer import Transformer, TransformerConfig

MANIFEST = "manifest.json"
CHECKPOINT = "config.json"
"""File of a version that is a Hugging Face checkpoint for external servers."""
BUCKET_BYTES = 64 << 20
"""Size of a file: large enough to make the overhead of a call negligible, small enough to be transferred while the next
one is written."""
CHUNK_BYTES = 4 << 20
CHUNK_ELEMENTS = 1 << 20
"""Elements read at once: one or two milliseconds, between which other threads run."""
ALIGNMENT = 64
"""Tensors start at multiples of this in a bucket: the width of a cache line, a multiple of every element size."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.half)
}


class TensorLocation(msgspec.Struct, frozen=True, kw_only=True):
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


class WeightBucket(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    crc32: int
    """Detects damage, not malice; checked at 2.5 GB/s here, BLAKE2 at 0.9."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    config: TransformerConfig
    tensors: tuple[TensorLocation, ...]
    buckets: tuple[WeightBucket, ...]


def publish(
    model: Transformer | Mapping[str, Tensor],
    config: TransformerConfig,
    folder: Path | str,
    version: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    replace: bool = False,
) -> PolicyWeights:
    """Writes a version of the weights. Raises ManagerError if it exists and `replace` is not set, or if it cannot be
    written; then nothing of it remains, and an existing version stays."""
    state = model.state_dict() if isinstance(model, Transformer) else model
    if mismatch := shape_mismatch({name: tuple(tensor.shape) for name, tensor in state.items()}, config):
        raise InvalidInput("model", mismatch, "the weights of such a model")
    if version < 0:
        raise InvalidInput("version", version, "at least 0")
    tensors = assign_buckets(state, bucket_bytes)
    path = Path(folder) / f"{version:08d}"
    remove_unfinished(path.parent)
    with atomic_directory(path, replace=replace) as unfinished:
        buckets = tuple(
            write_bucket(
                unfinished / bucket_name(index), [tensor for tensor in tensors if tensor.bucket == index], state
            )
            for index in range(tensors[-1].bucket + 1)
        )
        manifest = Manifest(version=version, config=config, tensors=tensors, buckets=buckets)
        (unfinished / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return PolicyWeights(version=version, folder=str(path))


def pull(weights: PolicyWeights, into: Transformer | None = None) -> Transformer:
    """Reads published weights into a model of the same kind, in its dtype, or into a new one. Raises ManagerError if
    they are missing or incomplete, and leaves the model unchanged then."""
    manifest = read_version_manifest(weights)
    if into is None:
        with torch.inference_mode(False):  # otherwise the model could not be trained
            into = Transformer(manifest.config, DTYPES[manifest.tensors[0].dtype])
    for _ in pull_incrementally(weights, into):
        pass
    return into


def pull_incrementally(weights: PolicyWeights, into: Transformer) -> Iterator[None]:
    """Like `pull`, in small pieces between which the caller can do other work. The model is unchanged until all data is
    verified; when the copy that follows is abandoned, the model is unusable."""
    folder, manifest = Path(weights.folder), read_version_manifest(weights)
    if into.config != manifest.config:
        raise ManagerError(f"{folder / MANIFEST}: expected {into.config}, got {manifest.config}", retry=False)
    paths = [folder / bucket_name(index) for index in range(len(manifest.buckets))]
    # All buckets are mapped here, so that a deletion of the version has no effect from now on.
    buckets = [map_bucket(path, each) for path, each in zip(paths, manifest.buckets, strict=True)]
    for path, each, mapped in zip(paths, manifest.buckets, buckets, strict=True):
        yield from verify_checksum(path, mapped, each.crc32)
    # Nothing from here on can fail.
    state = into.state_dict()
    for placed in manifest.tensors:
        with torch.inference_mode():
            old = state[placed.name].view(-1)
            new = torch.frombuffer(
                buckets[placed.bucket], dtype=DTYPES[placed.dtype], count=old.numel(), offset=placed.offset
            )
            pairs = list(zip(old.split(CHUNK_ELEMENTS), new.split(CHUNK_ELEMENTS), strict=True))
        for old_piece, new_piece in pairs:
            with torch.inference_mode():
                old_piece.copy_(new_piece)
            yield


def read_version_manifest(weights: PolicyWeights) -> Manifest:
    """Reads the manifest of this version."""
    manifest = read_manifest(Path(weights.folder))
    if manifest.version != weights.version:
        path = Path(weights.folder) / MANIFEST
        raise ManagerError(f"{path}: expected version {weights.version}, got {manifest.version}", retry=False)
    return manifest


def versions(folder: Path | str) -> list[PolicyWeights]:
    """Returns what is published in a folder, oldest first; checkpoints for external servers too."""
    numbers = (path for path in Path(folder).glob("*") if path.name.isdecimal())
    published = (path for path in numbers if any((path / name).exists() for name in (MANIFEST, CHECKPOINT)))
    numbered = sorted((int(path.name), str(path)) for path in published)
    return [PolicyWeights(version=version, folder=path) for version, path in numbered]


def prune_versions(folder: Path | str, keep: int = 2) -> list[PolicyWeights]:
    """Deletes all but the newest versions, and returns those. A concurrent pull gets a complete version or an error."""
    removed = versions(folder)[: -keep or None]
    for each in removed:
        remove_atomically(Path(each.folder))
    return removed


def rollback(folder: Path | str, version: int) -> list[PolicyWeights]:
    """Deletes all newer versions, and returns them: they were rolled back."""
    removed = [each for each in versions(folder) if each.version > version]
    for each in reversed(removed):
        remove_atomically(Path(each.folder))
    return removed


# ---- folders ----


def bucket_name(index: int) -> str:
    return f"{index:05d}.bucket"


# ---- layout ----


def assign_buckets(state: Mapping[str, Tensor], bucket_bytes: int) -> tuple[TensorLocation, ...]:
    """Assigns tensors to buckets. A tensor larger than a bucket gets a larger bucket of its own."""
    locations: list[TensorLocation] = []
    bucket = end = 0
    for name, tensor in state.items():
        offset = align(end)
        if end and offset + tensor.nbytes > bucket_bytes:
            bucket, offset = bucket + 1, 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise InvalidInput(name, dtype, f"one of {', '.join(DTYPES)}")
        locations.append(
            TensorLocation(name=name, dtype=dtype, shape=tuple(tensor.shape), bucket=bucket, offset=offset)
        )
        end = locations[-1].end
    return tuple(locations)


def shape_mismatch(shapes: Mapping[str, tuple[int, ...]], config: TransformerConfig) -> str:
    """Returns how these tensors differ from the weights of such a model; empty if they match."""
    if config.layers > len(shapes):  # check a huge layer count before using it
        return f"expected {config.layers} layers, got {len(shapes)} tensors"
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}
    for name in (*expected, *shapes):
        if shapes.get(name) != expected.get(name):
            return f"{name}: expected {expected.get(name, 'none')}, got {shapes.get(name, 'none')}"
    return ""


def layout_error(manifest: Manifest) -> str:
    """Returns the first tensor that does not follow its predecessor without a gap; empty if all buckets are filled."""
    bucket = end = 0
    sizes = [bucket.size_bytes for bucket in manifest.buckets]
    for tensor in manifest.tensors:
        if tensor.dtype not in DTYPES:
            return f"{tensor.name}: expected one of {', '.join(DTYPES)}, got {tensor.dtype}"
        if tensor.bucket == bucket + 1 and sizes[bucket : bucket + 1] == [end]:
            bucket, end = tensor.bucket, 0
        if (tensor.bucket, tensor.offset) != (bucket, align(end)):
            return f"{tensor.name}: expected at {align(end)} of bucket {bucket}, got {tensor.offset} of {tensor.bucket}"
        end = tensor.end
    return "" if sizes[bucket:] == [end] else f"the tensors do not fill {len(sizes)} buckets"


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, InvalidInput) as error:
        raise ManagerError(f"{path}: not a manifest of weights: {error}", retry=False) from error
    mismatch = shape_mismatch(
        {tensor.name: tensor.shape for tensor in manifest.tensors}, manifest.config
    ) or layout_error(manifest)
    if mismatch:
        raise ManagerError(f"{path}: {mismatch}", retry=False)
    return manifest


# ---- buckets ----


def write_bucket(path: Path, tensors: Sequence[TensorLocation], state: Mapping[str, Tensor]) -> WeightBucket:
    crc32 = end = 0
    with path.open("wb") as file:
        for tensor in tensors:
            for piece in (bytes(tensor.offset - end), tensor_bytes(state[tensor.name])):
                file.write(piece)
                crc32 = zlib.crc32(piece, crc32)
            end = tensor.end
    return WeightBucket(size_bytes=end, crc32=crc32)


def map_bucket(path: Path, bucket: WeightBucket) -> mmap.mmap:
    """Maps a bucket into memory; unmapped with the last reference."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != bucket.size_bytes:
                raise ManagerError(f"{path}: expected {bucket.size_bytes} bytes, got {size}", retry=False)
            # A private mapping, never written: PyTorch requires writable memory for a tensor.
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror}") from error
    return mapped


def verify_checksum(path: Path, mapped: mmap.mmap, crc32: int) -> Iterator[None]:
    """Checks a bucket piece by piece."""
    checksum = 0
    with memoryview(mapped) as content:
        for begin in range(0, len(content), CHUNK_BYTES):
            checksum = zlib.crc32(content[begin : begin + CHUNK_BYTES], checksum)
            yield
    if checksum != crc32:
        raise ManagerError(f"{path}: damaged: its checksum is not that of the manifest", retry=False)


def tensor_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
