"""Preparing: the weights of every service are read or made once, and laid down in host memory.

Owns nothing for long. It happens in a process of its own, which ends afterwards with whatever that took, so neither the
process of the manager nor those of devices hold a second copy. One after the other: what their engines import is
imported once, and no more than one service is in memory twice. Each is told to the log, because it may take long.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.models import host_copy
from tangram.managers.models.device_process import START_S_MAX, DeviceProcess, ServiceFailed, search_path
from tangram.managers.models.messages import Known, Prepare
from tangram.managers.models.service import Service
from tangram.processes.fork_server import Nursery
from tangram.processes.process_tree import Census

log = logging.getLogger("tangram")

PREPARE_S_MAX = 3600.0
"""Of one service: weights are read from a disk, perhaps a slow one."""


class Prepared(NamedTuple):
    known: Known
    need_by_degree: dict[int, int]
    """Bytes on each device."""
    batch_max: int


async def prepare(
    services: Sequence[Service], copies: Mapping[str, int], census: Census, nursery: Nursery
) -> list[Prepared]:
    """`copies`: the descriptor of an empty host copy for each service, by name; they are sealed. Raises
    ManagerError, or InvalidConfig."""
    process = DeviceProcess("the process that prepares services", census, lambda _: None, nursery)
    await process.start(None, list(copies.values()))
    try:
        found = [await _prepare(process, service, copies[service.name]) for service in services]
    finally:
        await process.end("it has prepared the services")
    for copy_fd in copies.values():
        host_copy.seal(copy_fd)
    return found


async def _prepare(process: DeviceProcess, service: Service, copy_fd: int) -> Prepared:
    engine = service.pickled()
    begun_s = asyncio.get_running_loop().time()
    log.info("preparing service %s", service.name)
    request = Prepare(id=process.next_id(), engine=engine, copy_fd=copy_fd, degrees=service.degrees)
    try:
        async with asyncio.timeout(PREPARE_S_MAX):
            done = await process.ask(request)
    except TimeoutError:
        raise ManagerError(f"service {service.name} was not ready after {PREPARE_S_MAX:.0f} s", retry=False) from None
    except ManagerError as error:
        if isinstance(error, ServiceFailed) and error.failed.whose == "config":
            said = error.failed
            raise InvalidConfig(f"service {service.name} {said.field}", said.reason, said.expected) from None
        raise ManagerError(f"service {service.name} cannot be prepared: {error}", retry=False) from error
    assert done.layout is not None
    log.info("service %s is prepared, after %.1f s", service.name, asyncio.get_running_loop().time() - begun_s)
    service.require_memory(elsewhere=done.elsewhere)
    taken, asked = done.layout.total_bytes, service.memory_bytes
    if asked and asked < taken:
        raise InvalidConfig(f"service {service.name} memory_bytes", asked, f"at least {taken}, which its weights take")
    spare = max(0, asked - taken)
    need_by_degree = {degree: need + -(-spare // degree) for degree, need in done.needs.items()}
    known = Known(service=service.name, engine=engine, copy_fd=copy_fd, layout=done.layout)
    return Prepared(known, need_by_degree, done.batch_max)


def require_importable(service: str, engine: str) -> None:
    """Raises InvalidConfig unless a process like those of devices can import it. Nothing of it stays here."""
    program = f"{search_path()}; from {__package__}.service import imported; imported({engine!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=START_S_MAX
        )
    except subprocess.TimeoutExpired:
        raise InvalidConfig(f"service {service} engine", engine, f"one that is imported in {START_S_MAX:g} s") from None
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise InvalidConfig(f"service {service} engine", engine, f'"module:name" that can be imported ({why})')
