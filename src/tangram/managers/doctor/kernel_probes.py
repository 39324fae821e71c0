"""Kernel probes: what the kernel allows this user, tested in short-lived child processes.

An isolated program (processes/isolated.py). Owns nothing: all changes of a probe are private to its process. Reads a
JSON object from its standard input, and prints one that maps the name of each probe to the reason of its failure; an
empty reason means success.

    user    the user for the probes, if this process is root
    filter  a filter of system calls, in hexadecimal digits; empty: no filter
    folder  an existing directory, over which a file system is mounted in a private namespace
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tangram.processes import libc
from tangram.processes.libc import MS_NODEV, MS_NOSUID, mount

NAMESPACES = {
    "mount": libc.CLONE_NEWNS,
    "pid": libc.CLONE_NEWPID,
    "net": libc.CLONE_NEWNET,
    "ipc": libc.CLONE_NEWIPC,
    "uts": libc.CLONE_NEWUTS,
    "cgroup": libc.CLONE_NEWCGROUP,
}
"""The namespaces of a sandbox, except the user namespace."""

REASON_BYTES_MAX = 1000
PROBE_S_MAX = 5
"""Time limit for one probe, which takes about a millisecond."""


def unshare(flags: int) -> None:
    """Creates namespaces. Without root, the other namespaces can only be created together with a user namespace."""
    user, group = os.geteuid(), os.getegid()
    flags |= libc.CLONE_NEWUSER if user != 0 else 0
    libc.unshare(flags)
    if flags & libc.CLONE_NEWUSER:
        for name, text in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
            write(f"/proc/self/{name}", text)


def write(path: str, text: str) -> None:
    """Writes bytes: a text encoding would be imported from files that may no longer be reachable."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


# ---- the probes -----------------------------------------------------------------------------------------------------


def user_namespace(user: int) -> None:
    """A user namespace that an unprivileged user creates, and may mount in."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        libc.prctl(libc.PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self still belongs to root
    unshare(libc.CLONE_NEWUSER | libc.CLONE_NEWNS)
    libc.make_mounts_private()


def namespace(flag: int) -> None:
    unshare(flag)
    if flag == libc.CLONE_NEWPID:
        child = os.fork()
        if child == 0:
            os._exit(0 if os.getpid() == 1 else 1)
        if os.waitpid(child, 0)[1] != 0:
            raise OSError("the first process of a namespace does not have process id 1")


def tmpfs(folder: str) -> None:
    unshare(libc.CLONE_NEWNS)
    libc.make_mounts_private()
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=64,mode=0755")


def overlay(folder: str) -> None:
    """Over a tmpfs, as in a sandbox: changing a file of the lower layer must write to the upper layer."""
    tmpfs(folder)
    lower, upper, work, root = (os.path.join(folder, name) for name in ("lower", "upper", "work", "root"))
    for place in (lower, upper, work, root):
        os.mkdir(place)
    write(f"{lower}/file", "lower")
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, layers)
    write(f"{root}/file", " and upper")
    with open(f"{upper}/file", "rb") as file:
        if file.read() != b"lower and upper":
            raise OSError("the change is not in the upper layer")


def seccomp(code: bytes) -> None:
    libc.forbid_new_privileges()
    libc.SeccompFilter(code).install()


# ---- running probes -------------------------------------------------------------------------------------------------


def run_probe(probe: Callable[[], None]) -> str:
    """Run a probe in a child process. Returns the reason of a failure, or an empty string."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PROBE_S_MAX)
        reason = ""
        try:
            probe()
        except OSError as error:
            reason = error.strerror or str(error)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        os.write(writer, reason.encode()[:REASON_BYTES_MAX])
        os._exit(0)
    os.close(writer)
    output = b""
    while part := os.read(reader, REASON_BYTES_MAX):
        output += part
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return output.decode() or ("" if code == 0 else f"it ended with {code}")


def run_all_probes(request: dict[str, Any]) -> dict[str, str]:
    probes: dict[str, Callable[[], None]] = {"user": lambda: user_namespace(request["user"])}
    probes |= {name: lambda flag=flag: namespace(flag) for name, flag in NAMESPACES.items()}  # type: ignore[misc]
    probes |= {"tmpfs": lambda: tmpfs(request["folder"]), "overlay": lambda: overlay(request["folder"])}
    if request["filter"]:
        probes["seccomp"] = lambda: seccomp(bytes.fromhex(request["filter"]))
    return {name: run_probe(probe) for name, probe in probes.items()}


def main() -> None:
    json.dump(run_all_probes(json.load(sys.stdin)), sys.stdout)
