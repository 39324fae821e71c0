"""Records: what the next owner has to know of a sandbox to adopt it, on disk.

Owns the directory `kept` of an owner with a name, but for what the spawner has there. A sandbox has a record for as
long as its caller has it: written when opening is complete, removed before closing begins. Promises that a record is
whole or not there, and that whatever else is found in the directory is a reason and never a failure.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec

from tangram.errors import TangramError
from tangram.managers.sandboxes.bwrap.images.store import Image
from tangram.managers.work import SandboxSpec

SUFFIX = ".json"
RECORD_BYTES_MAX = 1 << 20
"""A name, a specification with its environment and the layers of an image take a tenth of it."""
BOX = re.compile(r"[1-9][0-9]{0,17}")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """That the caller knows."""
    box: str
    """The number that stands for it in paths, and for the spawner."""
    init: int
    """Its first process."""
    spec: SandboxSpec
    image: Image
    """As it was when the sandbox was opened: the name may mean another one by now."""


class Records:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, record: Record) -> None:
        path = self._path(record.box)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(record))
        os.replace(part, path)

    def remove(self, box: str) -> None:
        self._path(box).unlink(missing_ok=True)

    def read(self) -> tuple[dict[str, Record], dict[str, str]]:
        """The records by the name that the caller knows, and why a file is none, by its own name."""
        records: dict[str, Record] = {}
        wrong: dict[str, str] = {}
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            try:
                record = _read(path)
                if record.name in records:
                    raise ValueError(f"it is of {record.name}, as another one is")
                records[record.name] = record
            except (OSError, ValueError, TangramError, msgspec.MsgspecError, RecursionError) as error:
                wrong[path.name] = f"its record cannot be read: {error}"
        return records, wrong

    def remove_others(self, boxes: set[str]) -> None:
        """All files but the records of these sandboxes."""
        kept = {self._path(box) for box in boxes}
        for path in [*self._directory.glob(f"*{SUFFIX}"), *self._directory.glob("*.part")]:
            if path not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, box: str) -> Path:
        assert BOX.fullmatch(box), f"a sandbox cannot be numbered {box!r}"
        return self._directory / f"{box}{SUFFIX}"


def _read(path: Path) -> Record:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        content = file.read(RECORD_BYTES_MAX + 1)
    if content is None or len(content) > RECORD_BYTES_MAX:
        raise ValueError(f"it is no file of at most {RECORD_BYTES_MAX} bytes")
    record = msgspec.json.decode(content, type=Record)
    if path.name != f"{record.box}{SUFFIX}" or not BOX.fullmatch(record.box):
        raise ValueError(f"it is that of sandbox {record.box!r}, under another name")
    return record
