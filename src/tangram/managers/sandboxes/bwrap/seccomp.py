"""The seccomp filter of programs in sandboxes.

Owns the list of refused system calls, and compiles it to the BPF program that the kernel runs before each call. Does
not install it. Promises that the same machine always gets the same bytes.

Protection. A sandbox is isolated by namespaces, control groups and an unprivileged user; the kernel is shared. The
filter refuses calls that programs of agents do not need and that past escapes used: mounting and changing the root, new
namespaces (in which an unprivileged user has capabilities), modules and kexec, clocks, key rings, BPF, performance
counters, userfaultfd, io_uring, file handles (which lead past a mount), input to another user's terminal, and all
socket families except Unix, IP and the routing part of netlink. Calls newer than this list are refused, even if the
kernel has them.

Limits. It allows by default: kernel bugs in allowed calls stay reachable. It checks numbers, never memory such as the
content of a path or an address. It prevents neither side channels nor resource exhaustion. Debugging (ptrace,
process_vm_*) is allowed: the process namespace of the sandbox limits it. Tenants that must not share a kernel need
virtual machines.

The list was compared with those of Docker and Flatpak. Docker lists what is allowed instead, and allows
name_to_handle_at, modify_ldt, adjtimex and most socket families; Flatpak lets clone create all namespaces but one.

Refused calls fail with EPERM. Where programs have a fallback, they get the error of a kernel without the call: ENOSYS
for clone3, whose flags are in memory (the C library falls back to clone), for io_uring and for unknown calls;
EAFNOSUPPORT for a socket. Programs that create namespaces (a browser's sandbox, bubblewrap) must be configured not to.
`socketcall` of 32-bit programs on x86 keeps the family in memory, so it cannot open a socket; their
`socket` is filtered by family. The other 32-bit entries, x32 and ARM, are closed.

The filter adds to the start time of every program: the kernel (since 5.11) evaluates it for each number to find the
calls that are always allowed, and does not run it again for those. So numbers are looked up in a search tree whose
paths are shortest for the largest ranges."""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Callable

from tangram.errors import ManagerError
from tangram.processes.libc import CLONE_NAMESPACES

X86_64, I386, AARCH64 = 0xC000003E, 0x40000003, 0xC00000B7
"""AUDIT_ARCH_*: the kernel's names of system call entries."""

ARCHITECTURES = {"x86_64": (X86_64, I386), "aarch64": (AARCH64,)}
"""Entries that stay open, by machine. A process that uses another one is killed."""

NEWEST_SYSCALL = 469
"""file_setattr, of Linux 6.17: the last number that was reviewed. The numbers of x32 are above it too."""

_COLUMNS = (X86_64, I386, AARCH64)
_NONE = -1
"""The architecture has no such call."""

REFUSED: dict[str, tuple[int, int, int]] = {
    # The file tree.
    "mount": (165, 21, 40),
    "umount": (_NONE, 22, _NONE),
    "umount2": (166, 52, 39),
    "pivot_root": (155, 217, 41),
    "chroot": (161, 61, 51),
    "open_tree": (428, 428, 428),
    "move_mount": (429, 429, 429),
    "fsopen": (430, 430, 430),
    "fsconfig": (431, 431, 431),
    "fsmount": (432, 432, 432),
    "fspick": (433, 433, 433),
    "mount_setattr": (442, 442, 442),
    "open_tree_attr": (467, 467, 467),
    "name_to_handle_at": (303, 341, 264),
    "open_by_handle_at": (304, 342, 265),
    "fanotify_init": (300, 338, 262),
    "quotactl": (179, 131, 60),
    "quotactl_fd": (443, 443, 443),
    "swapon": (167, 87, 224),
    "swapoff": (168, 115, 225),
    "nfsservctl": (180, 169, 42),
    "sysfs": (139, 135, _NONE),
    "uselib": (134, 86, _NONE),
    # The machine.
    "reboot": (169, 88, 142),
    "kexec_load": (246, 283, 104),
    "kexec_file_load": (320, _NONE, 294),
    "create_module": (174, 127, _NONE),
    "init_module": (175, 128, 105),
    "finit_module": (313, 350, 273),
    "delete_module": (176, 129, 106),
    "get_kernel_syms": (177, 130, _NONE),
    "query_module": (178, 167, _NONE),
    "syslog": (103, 103, 116),
    "_sysctl": (156, 149, _NONE),
    "acct": (163, 51, 89),
    "iopl": (172, 110, _NONE),
    "ioperm": (173, 101, _NONE),
    "vm86": (_NONE, 166, _NONE),
    "vm86old": (_NONE, 113, _NONE),
    "modify_ldt": (154, 123, _NONE),
    "settimeofday": (164, 79, 170),
    "stime": (_NONE, 25, _NONE),
    "clock_settime": (227, 264, 112),
    "clock_settime64": (_NONE, 404, _NONE),
    "clock_adjtime": (305, 343, 266),
    "clock_adjtime64": (_NONE, 405, _NONE),
    "adjtimex": (159, 124, 171),
    # Kernel internals.
    "bpf": (321, 357, 280),
    "perf_event_open": (298, 336, 241),
    "lookup_dcookie": (212, 253, 18),
    "userfaultfd": (323, 374, 282),
    "add_key": (248, 286, 217),
    "request_key": (249, 287, 218),
    "keyctl": (250, 288, 219),
    "setns": (308, 346, 268),
}
"""EPERM, for all arguments. The kernel never reuses a number."""

UNKNOWN: dict[str, tuple[int, int, int]] = {
    "io_uring_setup": (425, 425, 425),
    "io_uring_enter": (426, 426, 426),
    "io_uring_register": (427, 427, 427),
    "clone3": (435, 435, 435),
}
"""ENOSYS."""

CHECKED: dict[str, tuple[int, int, int]] = {
    "clone": (56, 120, 220),
    "unshare": (272, 310, 97),
    "personality": (135, 136, 92),
    "ioctl": (16, 54, 29),
    "socket": (41, 359, 198),
    "socketpair": (53, 360, 199),
    "socketcall": (_NONE, 102, _NONE),
}
"""Refused depending on their arguments. Compares the lower half of each argument, as the kernel does: upper bits that
the kernel ignores could hide a forbidden value."""

NAMESPACE_TIME = 0x80
"""CLONE_NEWTIME; for clone these bits mean a signal."""
PERSONALITIES = (0, 0x40000, 0xFFFFFFFF)
"""The usual one, ADDR_NO_RANDOMIZE (debuggers set it), and the query of the current one."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX insert input into a terminal."""
SOCKET_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6."""
NETLINK, NETLINK_ROUTE = 16, 0
SOCKETCALLS = (1, 8)
"""SYS_SOCKET and SYS_SOCKETPAIR of i386."""

# ---- BPF instructions -----------------------------------------------------------------------------------------------

LOAD, RETURN, JUMP = 0x20, 0x06, 0x05
IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT = 0x15, 0x35, 0x45
"""Classic BPF, as in linux/filter.h."""
OFFSET_NUMBER, OFFSET_ARCHITECTURE, OFFSET_ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; arguments have 8 bytes each, on little-endian machines the lower half first."""
JUMP_MAX = 255
INSTRUCTIONS_MAX = 4096

ALLOW, KILL = "allow", "kill"
NOT_PERMITTED, NO_SUCH_CALL, NO_SUCH_FAMILY = "not permitted", "no such call", "no such family"
_RETURN_ERRNO = 0x00050000
VERDICTS = {
    ALLOW: 0x7FFF0000,
    KILL: 0x80000000,
    NOT_PERMITTED: _RETURN_ERRNO | errno.EPERM,
    NO_SUCH_CALL: _RETURN_ERRNO | errno.ENOSYS,
    NO_SUCH_FAMILY: _RETURN_ERRNO | errno.EAFNOSUPPORT,
}
"""The result of a RETURN instruction, by label."""


class _BpfProgram:
    """Instructions whose jumps name labels. All jumps go forward."""

    def __init__(self) -> None:
        self._instructions: list[tuple[int, int, str, str]] = []
        self._offset_by_label: dict[str, int] = {}

    def label(self, name: str) -> None:
        assert name not in self._offset_by_label, name
        self._offset_by_label[name] = len(self._instructions)

    def load(self, offset: int) -> None:
        self._instructions.append((LOAD, offset, "", ""))

    def test(self, code: int, value: int, then: str, otherwise: str = "") -> None:
        """Jump to one of two labels; an empty one is the next instruction."""
        self._instructions.append((code, value, then, otherwise))

    def test_any(self, values: tuple[int, ...], then: str, otherwise: str) -> None:
        for value in values[:-1]:
            self.test(IF_EQUAL, value, then)
        self.test(IF_EQUAL, values[-1], then, otherwise)

    def verdicts(self, section: str) -> None:
        """Once per section, so that every jump of it reaches them."""
        for name, value in VERDICTS.items():
            self.label(section + name)
            self._instructions.append((RETURN, value, "", ""))

    def assemble(self) -> bytes:
        assert len(self._instructions) <= INSTRUCTIONS_MAX
        return b"".join(self._instruction(at, *line) for at, line in enumerate(self._instructions))

    def _instruction(self, at: int, code: int, value: int, then: str, otherwise: str) -> bytes:
        if code == JUMP:
            return struct.pack("=HBBI", code, 0, 0, self._offset_by_label[then] - at - 1)
        jumps = [self._offset_by_label[name] - at - 1 if name else 0 for name in (then, otherwise)]
        assert all(0 <= jump <= JUMP_MAX for jump in jumps), (at, then, otherwise)
        return struct.pack("=HBBI", code, *jumps, value)


# ---- the search tree ------------------------------------------------------------------------------------------------

Segment = tuple[int, str]
"""The first of the numbers that share a label, and the label."""


def _segments(label_by_number: dict[int, str]) -> list[Segment]:
    """The range of numbers, cut where the label changes."""
    segments: list[Segment] = []
    for number in range(NEWEST_SYSCALL + 1):
        label = label_by_number.get(number, ALLOW)
        if not segments or segments[-1][1] != label:
            segments.append((number, label))
    return segments


def _tree(program: _BpfProgram, section: str, segments: list[Segment], end: int) -> None:
    """Emit the search: each test halves the count of numbers, not of segments."""
    first, label = segments[0]
    if len(segments) == 1:
        program.test(JUMP, 0, section + label)
        return
    if len(segments) == 3 and segments[2][1] == label and segments[2][0] == segments[1][0] + 1:
        program.test(IF_EQUAL, segments[1][0], section + segments[1][1], section + label)
        return
    middle = (first + end) / 2
    cut = min(range(1, len(segments)), key=lambda index: abs(segments[index][0] - middle))
    left, right = segments[:cut], segments[cut:]
    right_label = section + right[0][1] if len(right) == 1 else f"{section}from {right[0][0]}"
    left_label = section + left[0][1] if len(left) == 1 else ""
    program.test(IF_AT_LEAST, right[0][0], right_label, left_label)
    if len(left) > 1:
        _tree(program, section, left, right[0][0])
    if len(right) > 1:
        program.label(right_label)
        _tree(program, section, right, end)


# ---- arguments ----------------------------------------------------------------------------------------------------


def _argument(program: _BpfProgram, index: int) -> None:
    program.load(OFFSET_ARGUMENTS + 8 * index)


def _check_clone(program: _BpfProgram, section: str) -> None:
    _argument(program, 0)
    program.test(IF_ANY_BIT, CLONE_NAMESPACES, section + NOT_PERMITTED, section + ALLOW)


def _check_unshare(program: _BpfProgram, section: str) -> None:
    _argument(program, 0)
    program.test(IF_ANY_BIT, CLONE_NAMESPACES | NAMESPACE_TIME, section + NOT_PERMITTED, section + ALLOW)


def _check_personality(program: _BpfProgram, section: str) -> None:
    _argument(program, 0)
    program.test_any(PERSONALITIES, section + ALLOW, section + NOT_PERMITTED)


def _check_ioctl(program: _BpfProgram, section: str) -> None:
    _argument(program, 1)
    program.test_any(TERMINAL_INPUT, section + NOT_PERMITTED, section + ALLOW)


def _check_socket(program: _BpfProgram, section: str) -> None:
    netlink = section + "netlink"
    _argument(program, 0)
    for family in SOCKET_FAMILIES:
        program.test(IF_EQUAL, family, section + ALLOW)
    program.test(IF_EQUAL, NETLINK, netlink, section + NO_SUCH_FAMILY)
    program.label(netlink)
    _argument(program, 2)
    program.test(IF_EQUAL, NETLINK_ROUTE, section + ALLOW, section + NO_SUCH_FAMILY)


def _check_socketcall(program: _BpfProgram, section: str) -> None:
    _argument(program, 0)
    program.test_any(SOCKETCALLS, section + NO_SUCH_FAMILY, section + ALLOW)


_CHECKS: dict[str, Callable[[_BpfProgram, str], None]] = {
    "clone": _check_clone,
    "unshare": _check_unshare,
    "personality": _check_personality,
    "ioctl": _check_ioctl,
    "socket": _check_socket,
    "socketcall": _check_socketcall,
}
_SAME_CHECK = {"socketpair": "socket"}


# ---- the filter ---------------------------------------------------------------------------------------------------


@functools.cache
def filter_program(machine: str = "") -> bytes:
    """The filter for a machine as `uname -m` names it, or for this one: an array of struct sock_filter."""
    machine = machine or os.uname().machine
    if machine not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise ManagerError(
            f"there is no filter of system calls for a machine of type {machine!r}, only for {known}: "
            "run sandboxes on one of those",
            retry=False,
        )
    program = _BpfProgram()
    program.load(OFFSET_ARCHITECTURE)
    architectures = ARCHITECTURES[machine]
    for index, architecture in enumerate(architectures):
        section = f"{architecture:x} "
        following = f"{architectures[index + 1]:x} start" if index + 1 < len(architectures) else section + KILL
        program.label(section + "start")
        program.test(IF_EQUAL, architecture, section + "numbers", section + "other")
        # A section is longer than a conditional jump can reach.
        program.label(section + "other")
        program.test(JUMP, 0, following)
        program.label(section + "numbers")
        _section(program, section, _COLUMNS.index(architecture))
    return program.assemble()


def _section(program: _BpfProgram, section: str, column: int) -> None:
    labels = [(numbers[column], NOT_PERMITTED) for numbers in REFUSED.values()]
    labels += [(numbers[column], NO_SUCH_CALL) for numbers in UNKNOWN.values()]
    labels += [(numbers[column], _SAME_CHECK.get(name, name)) for name, numbers in CHECKED.items()]
    label_by_number = {number: label for number, label in labels if number != _NONE}
    assert len(label_by_number) == sum(number != _NONE for number, _ in labels), "duplicate number"
    program.load(OFFSET_NUMBER)
    program.test(IF_AT_LEAST, NEWEST_SYSCALL + 1, section + NO_SUCH_CALL)
    _tree(program, section, _segments(label_by_number), NEWEST_SYSCALL + 1)
    for name, check in _CHECKS.items():
        if name in label_by_number.values():
            program.label(section + name)
            check(program, section)
    program.verdicts(section)
