"""prctl: attributes that a process sets for itself after a fork: parent-death signal, name, child subreaper.

Standard library only: the spawner runs without site-packages and loads this file by its path. As a program,
`prctl.py PARENT COMMAND...`, it runs a command that the kernel kills when the process PARENT ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36

libc = ctypes.CDLL(None, use_errno=True)
prctl = libc.prctl
prctl.argtypes = [ctypes.c_int, *([ctypes.c_ulong] * 4)]  # converts arguments in a tenth of the time


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends. Exits at once if `parent` has ended already.

    To the kernel the parent is the *thread* that called fork: the signal comes when that thread ends, although its
    process runs on. So start such a process on a thread that lives as long as it is needed, as that of the event loop.
    """
    prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def become_subreaper() -> None:
    """Adopt orphans among the descendants of this process, in place of the first process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_process_name(name: bytes) -> None:
    """The name that `top` shows: its first 15 bytes."""
    buffer = ctypes.create_string_buffer(name)
    prctl(PR_SET_NAME, ctypes.addressof(buffer), 0, 0, 0)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
