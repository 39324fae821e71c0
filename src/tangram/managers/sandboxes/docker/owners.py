"""Owners: whose a container or an image is, and whether its owner still lives.

Owns the labels. An owner is one manager in one process; its name says which process that is. Promises to call dead only
an owner whose process has surely ended: one of this machine and of this process namespace that is not there any more,
or one from before the machine came up last. Of an owner elsewhere nothing is known, and so it lives.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from tangram.processes.process_tree import look_up

OWNER = "tangram.owner"
SANDBOX = "tangram.sandbox"
IMAGE = "tangram.image"
"""Labels."""


def own_name() -> str:
    """Host, boot, process namespace, process, its start, and a number of its own for each manager."""
    me = look_up(os.getpid())
    assert me is not None
    return "/".join([*_place(), str(me.pid), str(me.started), secrets.token_hex(4)])


def _place() -> tuple[str, str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname(), boot, str(os.stat("/proc/self/ns/pid").st_ino)


def is_dead(owner: str) -> bool:
    parts = owner.split("/")
    if len(parts) != 6 or not parts[3].isdigit() or not parts[4].isdigit():
        return False
    host, boot, namespace = _place()
    if parts[0] != host:
        return False
    if parts[1] != boot:
        return True
    if parts[2] != namespace:
        return False
    process = look_up(int(parts[3]))
    return process is None or process.started != int(parts[4])
