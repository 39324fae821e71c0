"""Append-only log with torn-tail recovery: the writer, and readers of its two framings, lines and checksummed frames.

    with AppendLog(path, recover=complete_lines_bytes) as log:
        log.append(b"a line\n")

Promises that a record is in the file as soon as `append` returns (without `buffer_bytes`), and that a record is
complete or absent, also after a full disk or a kill: a failed write is truncated away, and a record that a killed
process left incomplete is cut off when the log is opened again. Records survive the process, not a power failure:
nothing is fsynced. Never interprets a record.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from tangram.errors import InvalidInput, InvalidTrace, ManagerError

FRAME_HEADER = struct.Struct("<II")
"""Length and CRC-32 of the record that follows. It detects damage, not forgery."""
FRAMED_RECORD_BYTES_MAX = 1 << 30
"""Size limit of a record in a frame. A greater length is damage: a million tokens take 15 MB."""
LINE_BYTES_MAX = 256 << 20
"""Limits the memory of readers: a million tokens with log-probabilities and versions take 40 MB."""
CHUNK_BYTES = 64 << 10


# ---- writing --------------------------------------------------------------------------------------------------


class AppendLog:
    """The writer. Use it as a context manager."""

    def __init__(
        self,
        path: Path,
        *,
        recover: Callable[[BinaryIO], int] | None = None,
        permissions: int = 0o644,
        buffer_bytes: int = 0,
        bytes_max: int | None = None,
    ) -> None:
        """Open or create the file and its directory. Raises OSError.

        recover: called with the existing file; returns how many bytes hold complete records. The rest is cut off.
        buffer_bytes: hold back up to this many bytes until `flush`.
        bytes_max: limit of the file; an `append` beyond it raises ManagerError.
        """
        self.path = path
        self.size = 0
        """Bytes in the file, without buffered records; above 0 after opening if the log existed."""
        self._buffer_bytes = buffer_bytes
        self._bytes_max = bytes_max
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._is_torn = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, permissions)
        try:
            self.size = os.fstat(self._fd).st_size
            if self.size and recover is not None:
                with open(os.dup(self._fd), "rb") as file:
                    complete = recover(file)
                if complete < self.size:
                    os.ftruncate(self._fd, complete)
                    self.size = complete
        except BaseException:
            self.close()
            raise

    def append(self, record: bytes) -> None:
        """Add a record at the end. Raises ManagerError if it cannot be written; every record before it is complete."""
        if self._fd < 0 or self._is_torn:
            state = "ends with an incomplete record" if self._is_torn else "is closed"
            raise ManagerError(f"{self.path}: the log {state}", retry=False)
        self._pending.append(record)
        self._pending_bytes += len(record)
        if self._pending_bytes > self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. Raises ManagerError; the buffered records that were not written are lost then."""
        records, self._pending, self._pending_bytes = self._pending, [], 0
        if not records or self._fd < 0 or self._is_torn:
            return
        content = records[0] if len(records) == 1 else b"".join(records)
        if self._bytes_max is not None and self.size + len(content) > self._bytes_max:
            raise ManagerError(f"{self.path}: the log has {self.size:,} bytes, of at most {self._bytes_max:,}")
        written = 0
        try:
            remaining = memoryview(content)
            while remaining:
                count = os.write(self._fd, remaining)
                written += count
                remaining = remaining[count:]
        except BaseException as error:
            self._truncate(self.size + max(end for end in accumulate(map(len, records), initial=0) if end <= written))
            if not isinstance(error, OSError):
                raise
            reason = f"the log cannot be written ({error.strerror}); all records before are complete"
            raise ManagerError(f"{self.path}: {reason}") from error
        self.size += written

    def open_snapshot(self) -> BinaryIO:
        """A reader of the `size` bytes that are in the file now; later records are not in it. Its caller closes it."""
        return cast(BinaryIO, _FilePrefix(os.dup(self._fd), self.size))

    def close(self) -> None:
        """Close the file; records that are still buffered are lost, so call `flush` before. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
            self.size = size
        except OSError:
            self._is_torn = True  # a further record would become part of the incomplete one


class _FilePrefix(io.RawIOBase):
    """The first `size` bytes of a growing file. Reads by position, because the descriptor shares its own offset."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size = fd, size
        self._offset = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._fd, [memoryview(buffer)[: self._size - self._offset]], self._offset)
        self._offset += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


# ---- lines ----------------------------------------------------------------------------------------------------


def check_line_length(line: bytes) -> None:
    """Raise InvalidInput for a line that `LineReader` would reject."""
    if len(line) > LINE_BYTES_MAX:
        raise InvalidInput("record", f"{len(line):,} bytes", f"at most {LINE_BYTES_MAX:,} bytes")


def complete_lines_bytes(file: BinaryIO) -> int:
    """How many bytes of a file hold complete lines: `recover` of a log of lines."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - CHUNK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class LineReader:
    """Iterates over the complete lines of a file, without their newline. The file may be growing.

    A name that ends in `.gz` is decompressed: a sequence of gzip members; the last one may be incomplete.
    Raises InvalidTrace for a line that is too long and for malformed gzip.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.number = 0
        """Number of the last line, from 1."""
        self.rest = b""
        """The incomplete line at the end; set after the iteration."""
        self._is_truncated = False
        self._chunks = self._decompressed() if path.suffix == ".gz" else iter(lambda: file.read(CHUNK_BYTES), b"")
        self._lines = self._split()

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    @property
    def torn(self) -> str:
        """Describes the incomplete record at the end; empty if there is none. Set after the iteration."""
        if self.rest:
            return f"{self._path}:{self.number + 1}: {len(self.rest):,} bytes of an incomplete line are skipped"
        return f"{self._path}: an incomplete record after line {self.number} is skipped" if self._is_truncated else ""

    def _split(self) -> Iterator[bytes]:
        parts: list[bytes] = []
        size = 0
        for chunk in self._chunks:
            *lines, last = chunk.split(b"\n")
            for line in lines:
                self.number += 1
                yield b"".join((*parts, line))
                parts, size = [], 0
            parts.append(last)
            size += len(last)
            if size > LINE_BYTES_MAX:
                raise self._error(parts[0], f"a line of at most {LINE_BYTES_MAX:,} bytes")
        self.rest = b"".join(parts)

    def _decompressed(self) -> Iterator[bytes]:
        packed = self._file.read(CHUNK_BYTES)
        while packed:
            member = zlib.decompressobj(wbits=31)
            while packed and not member.eof:
                try:
                    yield member.decompress(packed, CHUNK_BYTES)
                except zlib.error as error:
                    raise self._error(packed, f"what gzip writes ({error})") from None
                packed = member.unused_data if member.eof else member.unconsumed_tail or self._file.read(CHUNK_BYTES)
            self._is_truncated = not member.eof
            packed = packed or self._file.read(CHUNK_BYTES)

    def _error(self, content: bytes, expected: str) -> InvalidTrace:
        return InvalidTrace(f"{self._path}:{self.number + 1}", preview(content), expected)


def preview(content: bytes) -> str:
    """The beginning of a malformed record, for an error message."""
    return content[:80].decode("utf-8", "replace")


# ---- frames ---------------------------------------------------------------------------------------------------


def encode_frame(record: bytes) -> bytes:
    return FRAME_HEADER.pack(len(record), zlib.crc32(record)) + record


def read_frame(file: BinaryIO) -> bytes | None:
    """The next record, or None if its frame is incomplete or damaged."""
    header = file.read(FRAME_HEADER.size)
    length, crc32 = FRAME_HEADER.unpack(header) if len(header) == FRAME_HEADER.size else (0, 0)
    record = file.read(length) if 0 < length <= FRAMED_RECORD_BYTES_MAX else b""
    return record if record and len(record) == length and zlib.crc32(record) == crc32 else None
