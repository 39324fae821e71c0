"""Preparation: reads or creates the weights of every service once and writes them to host memory.

Runs in a separate process that ends afterwards and frees its memory, so neither the manager nor the processes of
devices hold a second copy. Prepares services one after the other: imports of engines happen once, and at most one
service is in memory twice. Logs each service, because a preparation may take long.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.models import host_copy
from tangram.managers.models.device_process import DeviceProcess, ServiceFailed, search_path_code
from tangram.managers.models.messages import PreparedService, PrepareService
from tangram.managers.models.service import Service
from tangram.processes.child import START_S_MAX
from tangram.processes.fork_server import ForkServer
from tangram.processes.process_tree import ProcessTable
from tangram.processes.run_program import run_program

log = logging.getLogger("tangram")

PREPARE_S_MAX = 3600.0
"""Time limit for preparing one service: weights may come from a slow disk."""


class PreparationResult(NamedTuple):
    record: PreparedService
    need_by_degree: dict[int, int]
    """Bytes on each device."""
    batch_max: int


async def prepare(
    services: Sequence[Service], copies: Mapping[str, int], process_table: ProcessTable, fork_server: ForkServer
) -> list[PreparationResult]:
    """`copies`: the descriptor of an empty host copy for each service, by name; they are sealed afterwards. Raises
    ManagerError, InvalidConfig."""
    process = DeviceProcess("the process that prepares services", process_table, lambda _: None, fork_server)
    await process.open(None, list(copies.values()))
    try:
        results = [await _prepare(process, service, copies[service.name]) for service in services]
    finally:
        await process.end("it has prepared the services")
    for copy_fd in copies.values():
        host_copy.seal(copy_fd)
    return results


async def _prepare(process: DeviceProcess, service: Service, copy_fd: int) -> PreparationResult:
    engine = service.pickled()
    began_at = asyncio.get_running_loop().time()
    log.info("preparing service %s", service.name)
    request = PrepareService(id=process.next_number(), engine=engine, copy_fd=copy_fd, degrees=service.degrees)
    try:
        async with asyncio.timeout(PREPARE_S_MAX):
            done = await process.call(request)
    except TimeoutError:
        raise ManagerError(f"service {service.name} was not ready after {PREPARE_S_MAX:.0f} s", retry=False) from None
    except ManagerError as error:
        if isinstance(error, ServiceFailed) and error.failed.whose == "config":
            failed = error.failed
            raise InvalidConfig(f"service {service.name} {failed.field}", failed.reason, failed.expected) from None
        raise ManagerError(f"service {service.name} cannot be prepared: {error}", retry=False) from error
    assert done.layout is not None
    log.info("service %s is prepared, after %.1f s", service.name, asyncio.get_running_loop().time() - began_at)
    service.require_memory(external_weights=done.external_weights)
    weights_bytes, declared_bytes = done.layout.total_bytes, service.memory_bytes
    if declared_bytes and declared_bytes < weights_bytes:
        expected = f"at least {weights_bytes}, which its weights take"
        raise InvalidConfig(f"service {service.name} memory_bytes", declared_bytes, expected)
    spare = max(0, declared_bytes - weights_bytes)
    need_by_degree = {degree: need + -(-spare // degree) for degree, need in done.needs.items()}
    record = PreparedService(service=service.name, engine=engine, copy_fd=copy_fd, layout=done.layout)
    return PreparationResult(record, need_by_degree, done.batch_max)


def require_importable(service: str, engine: str) -> None:
    """Raises InvalidConfig unless a process like those of devices can import the engine, which is tried in another
    process."""
    program = f"{search_path_code()}; from {__package__}.service import imported; imported({engine!r})"
    try:
        result = run_program([sys.executable, "-c", program], seconds=START_S_MAX)
    except TimeoutError:
        raise InvalidConfig(
            f"service {service} engine", engine, f"an engine that is imported within {START_S_MAX:g} s"
        ) from None
    if result.failure:
        expected = f'"module:name" that can be imported ({result.failure})'
        raise InvalidConfig(f"service {service} engine", engine, expected)
