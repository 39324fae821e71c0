"""Owner labels of containers and images, and whether an owner is alive.

An owner is one manager in one process; its name identifies that process. Promises to report only an owner as dead whose
process has certainly ended: one of this machine and this process namespace that does not exist any more, or one from
before the last boot. An owner elsewhere counts as alive.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from tangram.processes.process_tree import read_process

OWNER_LABEL = "tangram.owner"
SANDBOX_LABEL = "tangram.sandbox"
IMAGE_LABEL = "tangram.image"
"""Labels of containers and images."""


def new_owner_name() -> str:
    """Host, boot, process namespace, process, its start time, and a random suffix for each manager."""
    process = read_process(os.getpid())
    assert process is not None
    return "/".join([*_host_identity(), str(process.pid), str(process.started), secrets.token_hex(4)])


def _host_identity() -> tuple[str, str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname(), boot, str(os.stat("/proc/self/ns/pid").st_ino)


def is_dead(owner: str) -> bool:
    parts = owner.split("/")
    if len(parts) != 6 or not parts[3].isdigit() or not parts[4].isdigit():
        return False
    host, boot, namespace = _host_identity()
    if parts[0] != host:
        return False
    if parts[1] != boot:
        return True
    if parts[2] != namespace:
        return False
    process = read_process(int(parts[3]))
    return process is None or process.started != int(parts[4])
