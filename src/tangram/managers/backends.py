"""Backends: creates the sandbox manager of a given name, and imports no other one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tangram.errors import InvalidConfig
from tangram.managers.base import Manager
from tangram.managers.work import GIB


def create_manager(
    backend: str,
    *,
    cores: float | None,
    memory_bytes: int | None,
    state: Path | None,
    node: str = "local",
    warm: int = 0,
    owner: str = "",
    keeps: bool = True,
    expected: Iterable[str] = (),
) -> Manager:
    """`state`: the directory of the backends `sandbox` and `process`. Only `sandbox` has the options after `node`."""
    if backend == "sandbox":
        from tangram.managers.sandboxes.bwrap.manager import BwrapManager

        return BwrapManager(
            state=state,
            cores=cores,
            memory_bytes=memory_bytes,
            node=node,
            warm=warm,
            owner=owner,
            keeps=keeps,
            expected=expected,
        )
    if backend == "process":
        from tangram.managers.sandboxes.process import ProcessManager

        return ProcessManager(root=state, cores=cores, memory_bytes=memory_bytes, node=node)
    if backend == "docker":
        from tangram.managers.sandboxes.docker import DockerManager

        return DockerManager(cores=cores, memory_bytes=memory_bytes, node=node)
    if backend != "fake":
        raise InvalidConfig("backend", backend, "one of sandbox, process, docker and fake")
    from tangram.managers.fake import FakeManager

    return FakeManager(cores=cores or float(os.cpu_count() or 1), memory_bytes=memory_bytes or 16 * GIB, node=node)
