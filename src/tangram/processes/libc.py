"""The C library: system calls that Python's `os` lacks (prctl, unshare, setns, mount), and their constants.

Standard library only: isolated programs (isolated.py) import it, and it is sent into sandboxes. As a program,
`libc.py PARENT COMMAND...`, it runs a command that the kernel kills when the process PARENT ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP = 1, 4, 15, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
SECCOMP_MODE_FILTER = 2
BPF_INSTRUCTION_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)
prctl = _libc.prctl
prctl.argtypes = [ctypes.c_int, *([ctypes.c_ulong] * 4)]  # converts arguments in a tenth of the time


class SystemCallFailed(OSError):
    """The message names the step for which the system call was made."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(code, f"{step}: {os.strerror(code)}")

    def __str__(self) -> str:
        return str(self.strerror)


def check_result(step: str, result: int) -> None:
    if result != 0:
        raise SystemCallFailed(step, ctypes.get_errno())


# ---- process attributes ---------------------------------------------------------------------------------------------


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends. Exits immediately if `parent` has ended.

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


def forbid_new_privileges() -> None:
    check_result("no new privileges", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


class SeccompFilter:
    """A filter of system calls. Made before a fork, so that installing it afterwards takes one system call."""

    def __init__(self, code: bytes) -> None:
        """`code`: instructions of classic BPF."""
        self.code = code
        self._body = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // BPF_INSTRUCTION_BYTES, ctypes.addressof(self._body))
        self._program = ctypes.create_string_buffer(program, len(program))

    def install(self) -> None:
        address = ctypes.addressof(self._program)
        check_result("system call filter", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address, 0, 0))


# ---- namespaces and mounts ------------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    check_result("unshare", _libc.unshare(flags))


def setns(step: str, fd: int, flags: int) -> None:
    check_result(step, _libc.setns(fd, flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(options) or None
    )
    check_result(f"mount of {kind} on {target}", result)


def make_mounts_private() -> None:
    """What this process mounts from now on is not visible in other mount namespaces."""
    check_result("private mounts", _libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
