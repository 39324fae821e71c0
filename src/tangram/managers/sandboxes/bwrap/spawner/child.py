"""The steps of a fork of the spawner before it executes a program: the holder of a sandbox, a runner in it, a copy.

Standard library only, imported by the spawner before it forks. Owns every step between fork and exec. A function named
`become_*` never returns: it executes a program, or reports an error and exits. Promises that a waiting runner has no
descriptor, privilege or namespace of the spawner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import NoReturn, Protocol

from tangram.processes.libc import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    SeccompFilter,
    die_with_parent,
    forbid_new_privileges,
    make_mounts_private,
    mount,
    prctl,
    setns,
    unshare,
)
from tangram.processes.packets import Message, decode_packet, encode_packet, receive_packet, send_packet

ROOT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31)
"""Capabilities of user 0 in a user namespace, as containers usually have: chown, dac_override, fowner, fsetid, kill,
setgid, setuid, setpcap, net_bind_service, sys_chroot, mknod, audit_write, setfcap."""
CAPABILITIES_MAX = 64
"""Capabilities that are dropped at most; no kernel has as many."""

CHANNEL_FD = 3
"""The descriptor on which a runner receives its command and reports an error; exec closes it."""
INFO_FD, INIT_FD, FILTER_FD = 4, 5, 6
"""Descriptors of bubblewrap: where it reports the first process, the program that this process executes, and its filter
of system calls."""
LOW_FDS = 16
"""The spawner's own descriptors are not below this, so that they never collide with those of children."""

OOM_SCORE_ADJ = b"500"
"""When the memory of a sandbox is exhausted, the kernel kills a program of it rather than its first process."""

DESCRIPTORS_MAX = 1 << 16
"""Descriptors of the spawner: some ten for each sandbox. Children close all below this."""
FILES_MIN = 128
"""Descriptors that a runner needs, even if its program may have fewer."""

RLIMITS = {"nofile": resource.RLIMIT_NOFILE, "core": resource.RLIMIT_CORE, "nice": resource.RLIMIT_NICE}
REASON_CHARACTERS = 2000
"""Length limit of a path or a word of the caller in an error message."""


def _join(pid: int, groups: list[str]) -> None:
    for path in groups:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(pid).encode())
        finally:
            os.close(fd)


def _reset_signals() -> None:
    """A program inherits ignored signals."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)


# ---- steps of creating a sandbox ------------------------------------------------------------------------------------


def _make_directory(path: str, user: int, mode: int) -> None:
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)
    os.chown(path, user, user)


_PREPARE_STEPS: dict[str, Callable[..., None]] = {"mkdir": _make_directory, "mount": mount}


def become_holder(request: Message, filter_code: bytes, status: int, info: int, spawner: int) -> NoReturn:
    """Mounts the files of a sandbox in a new mount namespace, and becomes bubblewrap."""
    try:
        _reset_signals()
        os.dup2(status, 2)
        die_with_parent(spawner)
        _join(os.getpid(), request["groups"])
        unshare(CLONE_NEWNS)
        make_mounts_private()
        for step, *arguments in request["prepare"]:
            _PREPARE_STEPS[step](*arguments)
        init = fcntl.fcntl(os.open(request["init"], os.O_RDONLY), fcntl.F_DUPFD, LOW_FDS)
        info = fcntl.fcntl(info, fcntl.F_DUPFD, LOW_FDS)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(info, INFO_FD)
        os.dup2(init, INIT_FD)
        os.dup2(_filter_file(filter_code), FILTER_FD)
        os.close(CHANNEL_FD)
        os.closerange(FILTER_FD + 1, DESCRIPTORS_MAX)
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
    """Copies a directory in the holder's mount namespace to one that all processes can access."""
    try:
        _reset_signals()
        os.dup2(status, 2)
        die_with_parent(spawner)
        setns("joining the mounts", holder_fd, CLONE_NEWNS)
        os.closerange(3, DESCRIPTORS_MAX)
        os.execvp("cp", ["cp", "--archive", "--reflink=auto", "--", f"{source}/.", target])
    except BaseException as error:
        os.write(2, str(error).encode(errors="replace"))
    finally:
        os._exit(127)


# ---- the runner -----------------------------------------------------------------------------------------------------


class SandboxHandle(Protocol):
    """The data of a sandbox that entering it requires."""

    init_fd: int
    """A pidfd of its first process, whose namespaces are joined."""
    uid: int
    rlimits: dict[str, int]
    has_user_namespace: bool


Commands = dict[str, Callable[[Message, list[int], SandboxHandle], Message]]
"""Commands that a runner can execute; each returns the reply."""


def become_runner(
    channel: int,
    sandbox: SandboxHandle,
    seccomp_filter: SeccompFilter,
    handlers: Commands,
    fds_max: int,
) -> NoReturn:
    """Waits inside a sandbox for one command with at most `fds_max` descriptors. Errors are reported on the channel."""
    try:
        _reset_signals()
        os.dup2(channel, CHANNEL_FD, inheritable=False)
        _enter(sandbox)
        seccomp_filter.install()
        command_socket = socket.socket(fileno=CHANNEL_FD)
        data, fds = receive_packet(command_socket, fds_max)
        if data:
            request = decode_packet(data)
            reply = handlers[request["do"]](request, fds, sandbox)
            send_packet(command_socket, encode_packet(reply))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(CHANNEL_FD, encode_packet({"error": (str(error) or repr(error))[:REASON_CHARACTERS]}))
    finally:
        os._exit(127)


def _enter(sandbox: SandboxHandle) -> None:
    """Enter the sandbox, as an unprivileged user, with nothing open but the channel."""
    os.setsid()
    file = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(file, OOM_SCORE_ADJ)
    clone_flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    if sandbox.has_user_namespace:
        clone_flags |= CLONE_NEWUSER
    setns("joining the namespaces", sandbox.init_fd, clone_flags)
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.closerange(CHANNEL_FD + 1, DESCRIPTORS_MAX)
    for name, value in sandbox.rlimits.items():
        limit = max(value, FILES_MIN) if name == "nofile" else value
        resource.setrlimit(RLIMITS[name], (limit, limit))
    for capability in range(CAPABILITIES_MAX):
        if not (sandbox.has_user_namespace and capability in ROOT_CAPABILITIES) and (
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0
        ):
            break
    if not sandbox.has_user_namespace:
        os.setgroups([])
    os.setresgid(sandbox.uid, sandbox.uid, sandbox.uid)
    os.setresuid(sandbox.uid, sandbox.uid, sandbox.uid)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    forbid_new_privileges()
    os.umask(0o022)


def execute(request: Message, fds: list[int], sandbox: SandboxHandle) -> Message:
    """Returns only if the program could not be executed, which is the caller's fault."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in fds]
    os.closerange(CHANNEL_FD + 1, 64)
    for target, fd in zip(request["targets"], above, strict=True):
        os.dup2(fd, target)
    if request["affinity"]:
        os.sched_setaffinity(0, request["affinity"])
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        return {"errno": error.errno, "error": f"cwd {request['cwd'][:REASON_CHARACTERS]}: {error.strerror}"}
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (sandbox.rlimits["nofile"], sandbox.rlimits["nofile"]))
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        return {"errno": error.errno, "error": f"{request['argv'][0][:REASON_CHARACTERS]}: {error.strerror}"}
