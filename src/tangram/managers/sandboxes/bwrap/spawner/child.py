"""Forked: what a fork of the spawner does before it is something else: the holder of a sandbox, a runner in it, a copy.

Loaded by the spawner at its start, by path: standard library only. Owns every step between fork and exec. What is
called `become_` never returns: it executes a program, or says what went wrong and ends. Promises that a runner has
nothing of the spawner left when it waits for its order: no descriptor, no privilege, no namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 24, 38, 22
SECCOMP_MODE_FILTER = 2

KEPT_BY_ROOT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31)
"""Capabilities of user 0 in a user namespace, as containers usually have: chown, dac_override, fowner, fsetid, kill,
setgid, setuid, setpcap, net_bind_service, sys_chroot, mknod, audit_write, setfcap."""
CAPABILITIES = 64
"""More than any kernel has."""

ORDER = 3
"""The descriptor of a runner on which its order comes and its failure goes; exec closes it."""
INFO, INIT, FILTER = 4, 5, 6
"""Descriptors of bubblewrap: where it says who the first process is, the program that this becomes, and the filter of
system calls that it gets."""
LOW_FDS = 16
"""The spawner's own descriptors stay above those that children are given."""

FIRST_TO_GO = b"500"
"""When the memory of a sandbox is used up, a program of it is killed rather than the sandbox."""

DESCRIPTORS_MAX = 1 << 16
"""Of the spawner: some ten for each sandbox. Children close all below this."""
FILES_MIN = 128
"""Descriptors that a runner needs, however few its program may have."""

RLIMITS = {"nofile": resource.RLIMIT_NOFILE, "core": resource.RLIMIT_CORE, "nice": resource.RLIMIT_NICE}
REASON_CHARACTERS = 2000
"""Of a path or a word of the caller in an answer."""

libc = ctypes.CDLL(None, use_errno=True)
prctl = libc.prctl
prctl.argtypes = [ctypes.c_int, *([ctypes.c_ulong] * 4)]  # converts arguments in a tenth of the time

Message = dict[str, Any]


class StepFailed(Exception):
    """A step between fork and exec."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(f"{step}: {os.strerror(code)}")


def call(step: str, result: int) -> None:
    if result != 0:
        raise StepFailed(step, ctypes.get_errno())


def _join(pid: int, groups: list[str]) -> None:
    for path in groups:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(pid).encode())
        finally:
            os.close(fd)


def _die_with(parent: int) -> None:
    """From now on this process dies when its parent does, and at once if that has happened."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def _reset_signals() -> None:
    """A program inherits what is ignored."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)


# ---- steps of making a sandbox ------------------------------------------------------------------------------------


def _make_directory(path: str, user: int, mode: int) -> None:
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)
    os.chown(path, user, user)


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    call(f"mount of {kind} on {target}", result)


_PREPARE: dict[str, Callable[..., None]] = {"mkdir": _make_directory, "mount": _mount}


def become_holder(request: Message, filter_code: bytes, status: int, info: int, spawner: int) -> NoReturn:
    """Mounts what a sandbox sees, in a namespace of its own, and becomes bubblewrap."""
    try:
        _reset_signals()
        os.dup2(status, 2)
        _die_with(spawner)
        _join(os.getpid(), request["groups"])
        call("unshare", libc.unshare(CLONE_NEWNS))
        call("private mounts", libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        for step, *arguments in request["prepare"]:
            _PREPARE[step](*arguments)
        init = fcntl.fcntl(os.open(request["init"], os.O_RDONLY), fcntl.F_DUPFD, LOW_FDS)
        info = fcntl.fcntl(info, fcntl.F_DUPFD, LOW_FDS)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(info, INFO)
        os.dup2(init, INIT)
        os.dup2(_filter_file(filter_code), FILTER)
        os.close(ORDER)
        os.closerange(FILTER + 1, DESCRIPTORS_MAX)
        os.execve(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        os.write(2, str(error).encode(errors="replace"))
    finally:
        os._exit(127)


def _filter_file(code: bytes) -> int:
    file = os.memfd_create("filter")
    os.write(file, code)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def become_copy(holder_fd: int, source: str, target: str, status: int, spawner: int) -> NoReturn:
    """Copies a directory that only the holder of a sandbox sees to one that all see."""
    try:
        _reset_signals()
        os.dup2(status, 2)
        _die_with(spawner)
        call("joining the mounts", libc.setns(holder_fd, CLONE_NEWNS))
        os.closerange(3, DESCRIPTORS_MAX)
        os.execvp("cp", ["cp", "--archive", "--reflink=auto", "--", f"{source}/.", target])
    except BaseException as error:
        os.write(2, str(error).encode(errors="replace"))
    finally:
        os._exit(127)


# ---- the runner ---------------------------------------------------------------------------------------------------


class Place(Protocol):
    """A sandbox, as far as whoever enters it has to know."""

    init_fd: int
    """Of its first process, whose namespaces are joined."""
    uid: int
    rlimits: dict[str, int]
    has_user_namespace: bool


Orders = dict[str, Callable[[Message, list[int], Place], Message]]
"""What a runner can be told to do, and returns as its answer."""


def become_runner(
    channel: int, place: Place, program: ctypes.Array[ctypes.c_char], known: Orders, bytes_max: int, fds_max: int
) -> NoReturn:
    """Waits inside a sandbox for one order, of at most so many bytes and descriptors. `program`: the filter of system
    calls. What goes wrong is said on the channel."""
    try:
        _reset_signals()
        os.dup2(channel, ORDER, inheritable=False)
        _enter(place)
        call("system call filter", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0))
        orders = socket.socket(fileno=ORDER)
        data, fds, _, _ = socket.recv_fds(orders, bytes_max, fds_max)
        if data:
            request = json.loads(data)
            answer = known[request["do"]](request, fds, place)
            orders.send(json.dumps(answer).encode())
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(ORDER, json.dumps({"error": (str(error) or repr(error))[:REASON_CHARACTERS]}).encode())
    finally:
        os._exit(127)


def _enter(place: Place) -> None:
    """Into the sandbox, as an unprivileged user, with nothing open but the channel."""
    os.setsid()
    file = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(file, FIRST_TO_GO)
    kinds = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    if place.has_user_namespace:
        kinds |= CLONE_NEWUSER
    call("joining the namespaces", libc.setns(place.init_fd, kinds))
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.closerange(ORDER + 1, DESCRIPTORS_MAX)
    for name, value in place.rlimits.items():
        least = max(value, FILES_MIN) if name == "nofile" else value
        resource.setrlimit(RLIMITS[name], (least, least))
    for capability in range(CAPABILITIES):
        if not (place.has_user_namespace and capability in KEPT_BY_ROOT) and (
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0
        ):
            break
    if not place.has_user_namespace:
        os.setgroups([])
    os.setresgid(place.uid, place.uid, place.uid)
    os.setresuid(place.uid, place.uid, place.uid)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("no new privileges", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.umask(0o022)


def execute(request: Message, fds: list[int], place: Place) -> Message:
    """Returns only what kept the program from being executed; that is the caller's doing, not a failure of ours."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in fds]
    os.closerange(ORDER + 1, 64)
    for target, fd in zip(request["targets"], above, strict=True):
        os.dup2(fd, target)
    if request["affinity"]:
        os.sched_setaffinity(0, request["affinity"])
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        return {"errno": error.errno, "error": f"cwd {request['cwd'][:REASON_CHARACTERS]}: {error.strerror}"}
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (place.rlimits["nofile"], place.rlimits["nofile"]))
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        return {"errno": error.errno, "error": f"{request['argv'][0][:REASON_CHARACTERS]}: {error.strerror}"}
