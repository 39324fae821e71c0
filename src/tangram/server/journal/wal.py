"""The write-ahead log of SQLite, read without SQLite: how much of it is whole.

SQLite itself drops everything behind the last whole commit of a log and says nothing of it. This says it: a log is a
header of 32 bytes and frames, each a header of 24 bytes and a page. A frame counts if it carries the salts of the log
and the checksum of everything before it; a commit is whole if its last frame, which is marked as such, counts.

Owns nothing and changes nothing. Promises to agree with SQLite on which commits count.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import msgspec

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
MAGIC = 0x377F0682
"""Its lowest bit says in which order of bytes the checksums read the words: 0 little, 1 big."""
FORMAT = 3007000
PAGE_BYTES_MIN, PAGE_BYTES_MAX = 512, 65536
WORD = 0xFFFFFFFF

Sums = tuple[int, int]


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """What a log holds."""

    commits: int
    """That are whole, and before which everything is."""
    frames: int
    """Of those commits."""
    whole_bytes: int
    """Up to the end of the last of them; 0 if there is none."""
    size_bytes: int

    @property
    def rest_bytes(self) -> int:
        """Behind the last whole commit: the beginning of another, or damage."""
        return self.size_bytes - self.whole_bytes


def read_log(path: Path) -> Log:
    """A log that is not there has nothing in it. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Log(commits=0, frames=0, whole_bytes=0, size_bytes=0)
    with file:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        commits, frames, whole_bytes = _whole(file)
    return Log(commits=commits, frames=frames, whole_bytes=whole_bytes, size_bytes=size_bytes)


def _whole(file: BinaryIO) -> tuple[int, int, int]:
    """Commits, their frames, and where they end."""
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return 0, 0, 0
    magic, form, page_bytes, _, salt_1, salt_2, sum_1, sum_2 = struct.unpack(">8I", header)
    order = ">" if magic & 1 else "<"
    sums = _summed(order, (0, 0), header[:24])
    in_range = PAGE_BYTES_MIN <= page_bytes <= PAGE_BYTES_MAX and page_bytes & (page_bytes - 1) == 0
    if magic & ~1 != MAGIC or form != FORMAT or not in_range or sums != (sum_1, sum_2):
        return 0, 0, 0
    frame_bytes = FRAME_HEADER_BYTES + page_bytes
    commits = frames = read = 0
    while len(frame := file.read(frame_bytes)) == frame_bytes:
        page, pages_after, *salts, sum_1, sum_2 = struct.unpack(">6I", frame[:FRAME_HEADER_BYTES])
        if page == 0 or salts != [salt_1, salt_2]:
            break
        sums = _summed(order, _summed(order, sums, frame[:8]), frame[FRAME_HEADER_BYTES:])
        if sums != (sum_1, sum_2):
            break
        read += 1
        if pages_after:  # the size of the database after the commit that this frame ends; 0 within a commit
            commits += 1
            frames = read
    return commits, frames, HEADER_BYTES + frames * frame_bytes if commits else 0


def _summed(order: str, sums: Sums, content: bytes) -> Sums:
    """The running checksum after more content."""
    first, second = sums
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & WORD
        second = (second + odd + first) & WORD
    return first, second
