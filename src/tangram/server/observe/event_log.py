"""The event log: every event of the scheduler and its effects, as JSON lines in the trace format.

Owns the file, which `tangram sim`, `tangram plan` and `tangram trace` read. Writes to the page cache only, so an action
never waits for a disk. Promises that the file begins with its header and that every line is complete. Each start of the
server begins a new file and renames the previous one: `events.jsonl` becomes `events.20260131T235959.jsonl`, by the
time of its end.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import BinaryIO

from tangram.core.messages import Effect, Event
from tangram.core.trace import Header, Recorder
from tangram.errors import ManagerError
from tangram.files.append_log import AppendLog

FLUSH_BYTES = 64 << 10
FLUSH_INTERVAL_S = 1.0
"""Buffered events are written above this many bytes, or with the first event after this time. Limits what a killed
server loses."""
EVENT_LOG_BYTES_MAX = 4 << 30
"""The log ends at this size: about ten million actions, more than a simulation handles in a day."""

log = logging.getLogger("tangram.server")


class EventLog:
    def __init__(self, path: Path, header: Header, *, bytes_max: int = EVENT_LOG_BYTES_MAX) -> None:
        """Raises ManagerError."""
        self.path = path
        self._recorder = Recorder()
        self._flush_at = 0.0
        self._is_stopped = False
        try:
            if path.exists():
                ended = time.strftime("%Y%m%dT%H%M%S", time.localtime(path.stat().st_mtime))
                path.replace(path.with_name(f"{path.stem}.{ended}{path.suffix}"))
            self._log = AppendLog(path, permissions=0o600, buffer_bytes=FLUSH_BYTES, bytes_max=bytes_max)
        except OSError as error:
            raise ManagerError(f"the event log {path} cannot be written: {error}", retry=False) from error
        self._append(self._recorder.header(header))
        self.flush()

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        """Observe an event of the orchestrator."""
        if self._is_stopped:
            return
        self._append(self._recorder.lines(now, event, effects))
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_INTERVAL_S
            self.flush()

    def _append(self, lines: bytes) -> None:
        try:
            self._log.append(lines)
        except ManagerError as error:
            self._stop(error)

    def flush(self) -> None:
        """Write the buffered events. An error ends the log, not the server: the journal has what must not be lost."""
        if self._is_stopped:
            return
        try:
            self._log.flush()
        except ManagerError as error:
            self._stop(error)

    def _stop(self, error: ManagerError) -> None:
        self._is_stopped = True
        log.warning("event log ended: %s", error)

    def open_snapshot(self) -> tuple[BinaryIO, int]:
        """A reader of all events until now, and its size. Its caller closes it."""
        self.flush()
        return self._log.open_snapshot(), self._log.size

    def close(self) -> None:
        self.flush()
        self._log.close()
