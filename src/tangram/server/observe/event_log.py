"""The event log: every event of the scheduler and its effects, as JSON lines in the trace format.

`tangram sim`, `tangram plan` and `tangram trace` read it. Each start of the server begins a new file and renames the
previous one: `events.jsonl` becomes `events.20260131T235959.jsonl`, by the time of its end. An error of writing ends
the log, not the server: everything that must survive is in the journal.
"""

from __future__ import annotations

import time
from pathlib import Path

from tangram.core.trace import Header
from tangram.errors import ManagerError
from tangram.runtime.trace_recorder import TraceLog

EVENT_LOG_BYTES_MAX = 4 << 30
"""Maximum size: about ten million actions, more than a simulation handles in a day."""


def open_event_log(path: Path, header: Header) -> TraceLog:
    """Raises ManagerError."""
    try:
        if path.exists():
            ended = time.strftime("%Y%m%dT%H%M%S", time.localtime(path.stat().st_mtime))
            path.replace(path.with_name(f"{path.stem}.{ended}{path.suffix}"))
        return TraceLog(path, header, permissions=0o600, bytes_max=EVENT_LOG_BYTES_MAX)
    except OSError as error:
        raise ManagerError(f"the event log {path} cannot be written: {error}", retry=False) from error
