"""Exit codes as a shell reports them: a signal that ended a program is a number above SIGNAL_BASE."""

from __future__ import annotations

import signal

NOT_EXECUTABLE, NOT_FOUND = 126, 127
SIGNAL_BASE = 128
KILLED = SIGNAL_BASE + signal.SIGKILL


def shell_exit_code(code: int) -> int:
    """Convert an exit code of Python, where a signal is a negative number."""
    return code if code >= 0 else SIGNAL_BASE - code


def signal_of(code: int | None) -> int:
    """The signal that probably ended a process with this exit code; 0 for other codes. A program may exit with it."""
    return 0 if code is None or not SIGNAL_BASE < code <= SIGNAL_BASE + signal.NSIG else code - SIGNAL_BASE
