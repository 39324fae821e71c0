"""A shared service in a separate process, for benchmarks: `tangram serve`, started as users start it.

Owns the process and the folder of its files: config, journal and log. Leaving the context ends the process. If the
service does not start, the error contains its log.

`python -m tangram.bench.service_process CONFIG FILE` runs the same service. On SIGUSR1 it also writes its internals,
`ServiceInternals`, to FILE.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tangram.errors import ManagerError
from tangram.files.atomic_file import write_file
from tangram.managers.http import BlockingHttpClient
from tangram.processes.process_tree import read_process, resident_bytes

HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
"""Time for the service to answer."""
STOP_TIMEOUT_S = 30.0
RETRY_S = 0.002
"""Pause between two attempts to connect during start-up."""
LOG_BYTES = 2000
"""Bytes of the log in an error."""
TRACE_VARIABLE = "TANGRAM_BENCH_TRACEMALLOC"
"""Number of frames; if set, the service also reports where its memory was allocated."""
ALLOCATION_SITES_MAX = 25
"""Reported allocations."""


class ServiceInternals(msgspec.Struct, frozen=True):
    """Internals of a service process."""

    request: int
    """The number of the request that this answers, from 1."""
    tasks: int
    """Tasks of its event loop."""
    places: list[str] = []
    """Largest allocations since the first request, if tracing is on."""


class ServiceProcess:
    """A service that can be started, killed and restarted."""

    def __init__(
        self,
        folder: Path,
        tables: Mapping[str, Mapping[str, Any]],
        *,
        watched: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`tables` of the config, in addition to the listen address and the journal. `watched`: `internals` is
        available. `variables` are added to the environment."""
        self.folder = folder
        self.port = 0
        """A free port, chosen at the first start."""
        self._variables = dict(variables or {})
        self._tables = tables
        self._watched = watched
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def journal(self) -> Path:
        return self.folder / "journal.db"

    # ---- start and stop

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._end)

    async def start(self) -> float:
        """Start, and return the seconds until the service is ready."""
        return await asyncio.to_thread(self._start)

    async def start_and_kill(self, after_s: float) -> None:
        """Start, and kill after `after_s` in any state."""
        self._launch()
        await asyncio.sleep(after_s)
        self.kill()

    def _start(self) -> float:
        began = time.perf_counter()
        self._launch()
        try:
            self._wait_until_ready(began + START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        return time.perf_counter() - began

    def _launch(self) -> None:
        assert self._process is None, "it is running"
        self.port = self.port or free_port()
        config = self.folder / "tangram.toml"
        config.write_text(config_text(self._tables, f"{HOST}:{self.port}", self.journal))
        words = ["-m", "tangram", "serve", "--config", str(config)]
        if self._watched:
            words = ["-m", "tangram.bench.service_process", str(config), str(self._read_internals)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while True:
            with contextlib.suppress(OSError):
                if BlockingHttpClient(self.url).request("GET", "/readyz", timeout_s=START_TIMEOUT_S)[0] == 200:
                    return
            if self._process.poll() is not None or time.perf_counter() > deadline:
                log = (self.folder / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace")
                raise ManagerError(f"expected a service on {self.url}; it did not start:\n{log}", retry=False)
            time.sleep(RETRY_S)

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    # ---- usage -----------

    def rss_bytes(self) -> int:
        return resident_bytes(self.pid)

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used."""
        process = read_process(self.pid)
        assert process is not None, "the service runs"
        return process.cpu_s

    def descriptors(self) -> list[str]:
        """Return the targets of all open descriptors."""
        targets = []
        folder = f"/proc/{self.pid}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(f"{folder}/{name}"))
        return targets

    @property
    def _read_internals(self) -> Path:
        return self.folder / "inside.json"

    async def internals(self) -> ServiceInternals:
        """Return the internals of a watched service."""
        assert self._watched
        self._requests += 1
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.perf_counter() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                internals = msgspec.json.decode(self._read_internals.read_bytes(), type=ServiceInternals)
                if internals.request == self._requests:
                    return internals
            if time.perf_counter() > deadline:
                raise ManagerError(f"the service did not write its internals within {START_TIMEOUT_S:g} s", retry=False)
            await asyncio.sleep(0.01)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def config_text(tables: Mapping[str, Mapping[str, Any]], listen: str, journal: Path) -> str:
    """Return the config file for `tangram serve`. Each value is a text, a number or a flag; one of `quotas` is the
    maximum of concurrent requests."""
    quotas = tables.get("quotas", {})
    service = {"listen": listen, "journal": str(journal), **tables.get("service", {})}
    lines = []
    for name, table in {**{key: each for key, each in tables.items() if key != "quotas"}, "service": service}.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    for name, concurrent in quotas.items():
        lines += ["[[quotas]]", f"name = {_toml(name)}", f"concurrent = {_toml(concurrent)}"]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Format a value as JSON, which is valid TOML for these values."""
    return msgspec.json.encode(value).decode()


# ---- a service that is watched --------------------------------------------------------------------------------------


def _stack_text(frames: Iterable[Any]) -> str:
    """Innermost frame first."""
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(list(frames)))


async def _serve(config: Path, output: Path) -> None:
    import gc
    import tracemalloc

    from tangram.config import load
    from tangram.server.serve import serve

    frames = int(os.environ.get(TRACE_VARIABLE, "0"))
    if frames:
        tracemalloc.start(frames)
    requests = 0
    before: tracemalloc.Snapshot | None = None

    def write_internals() -> None:
        nonlocal requests, before
        requests += 1
        gc.collect()
        places = []
        if frames:
            now = tracemalloc.take_snapshot()
            before = before or now
            grown = now.compare_to(before, "traceback" if frames > 1 else "lineno")
            places = [
                f"{each.size_diff:+d} B {each.count_diff:+d}: {_stack_text(each.traceback)}"
                for each in grown[:ALLOCATION_SITES_MAX]
            ]
        internals = ServiceInternals(request=requests, tasks=len(asyncio.all_tasks()), places=places)
        write_file(output, msgspec.json.encode(internals))

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write_internals)
    await serve(load(config))


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), Path(sys.argv[2])))
