"""Mounts of a sandbox, and the command line of bubblewrap.

Owns the mount steps of a sandbox, as data; the spawner executes them.
"""

from __future__ import annotations

import shutil
from typing import Any

from tangram.managers.sandboxes.bwrap.images.store import SANDBOX_UID
from tangram.managers.sandboxes.bwrap.sandbox import BwrapSandbox
from tangram.managers.sandboxes.bwrap.spawner.child import FILTER_FD, INFO_FD, INIT_FD
from tangram.processes.libc import MS_BIND, MS_NODEV, MS_NOSUID

INODE_BYTES = 4096
"""Bytes of the disk limit per inode: many small files use memory as well as few large ones."""
SHM_SHARE = 4
"""Shared memory of a sandbox: this part of its memory limit."""
ROOT_MOUNT = "/mnt"
"""Where the holder of a sandbox binds its root, in its own mount namespace. Every user may enter it, unlike the state
directory."""


def mount_steps(sandbox: BwrapSandbox) -> list[list[Any]]:
    """Mounts below the sandbox's directory, in a namespace that vanishes with it. Its writable layer is a tmpfs, whose
    limit is exact and free of charge."""
    at = str(sandbox.directory)
    spec = sandbox.spec
    flags = MS_NOSUID | MS_NODEV
    size = f"size={spec.disk_bytes},nr_inodes={max(64, spec.disk_bytes // INODE_BYTES)},mode=0755"
    layers = f"lowerdir={':'.join(sandbox.image.layers)},upperdir={at}/upper,workdir={at}/work"
    return [
        ["mount", "tmpfs", at, "tmpfs", flags, size],
        ["mkdir", f"{at}/upper", SANDBOX_UID, 0o755],
        ["mkdir", f"{at}/work", 0, 0o755],
        ["mkdir", f"{at}/root", 0, 0o755],
        ["mount", "overlay", f"{at}/root", "overlay", flags, layers],
        ["mount", f"{at}/root", ROOT_MOUNT, "none", MS_BIND, ""],
    ]


def bwrap_argv(sandbox: BwrapSandbox) -> list[str]:
    """The command line of the holder."""
    spec = sandbox.spec
    as_root = ["--unshare-user", "--uid", "0", "--gid", "0"] if spec.user == "root" else ["--cap-drop", "ALL"]
    become = ["setpriv", f"--reuid={SANDBOX_UID}", f"--regid={SANDBOX_UID}", "--clear-groups", "--"]
    argv = [
        *([_which(become[0]), *become[1:]] if spec.user == "root" else []),
        *(
            _which("bwrap"),
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup",
            "--hostname",
            "sandbox",
        ),
        *([] if spec.network else ["--unshare-net"]),
        *("--die-with-parent", "--as-pid-1", "--info-fd", str(INFO_FD), "--seccomp", str(FILTER_FD)),
        *as_root,
        *("--bind", ROOT_MOUNT, "/"),
        *(["--ro-bind", "/usr", "/usr"] if sandbox.image.binds_usr else []),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(spec.memory_bytes // SHM_SHARE), "--perms", "01777", "--tmpfs", "/dev/shm"),
        *("--chdir", "/", "--", f"/proc/self/fd/{INIT_FD}", "-P"),
    ]
    return argv


def _which(name: str) -> str:
    program = shutil.which(name)
    assert program is not None, f"{name} was there when the manager started"
    return program
