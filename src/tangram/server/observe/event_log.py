"""The event log: every event and its effects as lines of JSON, in the format of a trace.

Owns the file. Never waits for a disk on the way of an action longer than a write into the page cache takes. Promises a
file that `tangram sim`, `tangram plan` and `tangram trace` read: it begins with its header, and a line is whole or, the
last one, missing. One file per start of the service; those of the starts before are kept beside it, with the
time of their end in their names.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

from tangram.core.messages import Effect, Event
from tangram.core.trace import Header, Recorder
from tangram.errors import ManagerError

FLUSH_BYTES = 64 << 10
FLUSH_S = 1.0
"""What happened is in the file after so many bytes, or with the first event after so long: whoever reads along sees it,
and a service that is killed loses no more."""
BYTES_MAX = 4 << 30
"""Then nothing more is written: some ten million actions, more than a simulation takes in a day."""

log = logging.getLogger("tangram.server")


class EventLog:
    def __init__(self, path: Path, header: Header, *, bytes_max: int = BYTES_MAX) -> None:
        self.path = path
        self._recorder = Recorder()
        self._bytes_max = bytes_max
        self._size = 0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._flush_at = 0.0
        self._full = False
        try:
            if path.exists():
                began = time.strftime("%Y%m%dT%H%M%S", time.localtime(path.stat().st_mtime))
                path.replace(path.with_name(f"{path.stem}.{began}{path.suffix}"))
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ManagerError(f"the event log {path} cannot be written: {error}", retry=False) from error
        self._put(self._recorder.header(header))
        self.flush()

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        """An observer of the orchestrator."""
        if not self._full:
            self._put(self._recorder.lines(now, event, effects))
            if self._pending_bytes > FLUSH_BYTES or now >= self._flush_at:
                self._flush_at = now + FLUSH_S
                self.flush()

    def _put(self, lines: bytes) -> None:
        self._pending.append(lines)
        self._pending_bytes += len(lines)

    def flush(self) -> None:
        """What cannot be written ends the log, not the service: the journal keeps what must not be lost."""
        data = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        if self._full or not data:
            return
        if self._size + len(data) > self._bytes_max:
            self._stop(f"it has {self._size} bytes, which is the most")
            return
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            written = data.rfind(b"\n", 0, written) + 1  # what was written of a line is cut off again
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size + written)
            self._stop(str(error))
        self._size += written

    def _stop(self, why: str) -> None:
        self._full = True
        log.warning("event log ended path=%s: %s", self.path, why)

    def opened(self) -> tuple[BinaryIO, int]:
        """All that was written so far, as a file that the reader closes, and its size. It ends there, however much is
        written while it is read."""
        self.flush()
        return cast(BinaryIO, _SoFar(os.dup(self._fd), self._size)), self._size

    def close(self) -> None:
        self.flush()
        os.close(self._fd)


class _SoFar(io.RawIOBase):
    """The beginning of a file that grows. Reads by position: the descriptor shares its own with whoever writes."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size = fd, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = os.preadv(self._fd, [memoryview(buffer)[: self._size - self._at]], self._at)
        self._at += read
        return read

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()
