"""A shared service in a process of its own, for benchmarks: `tangram serve`, as everybody starts it.

Owns the process and the folder of its files: config, journal and log. Promises that leaving the context ends the
process, and that what the service wrote to its log is part of the error if it does not come up.

`python -m tangram.bench.service_process CONFIG FILE` is the same service, which on SIGUSR1 also writes to a file what
cannot be seen from outside: Inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tangram.errors import InvalidConfig, ManagerError

HOST = "127.0.0.1"
UP_S = 30.0
"""A service that did not answer by then is not coming up."""
STOP_S = 30.0
RETRY_S = 0.002
"""Between two attempts to connect to one that is starting."""
LOG_BYTES = 2000
"""Of its log, in an error."""
TRACE_VARIABLE = "TANGRAM_BENCH_TRACEMALLOC"
"""Set to a number of frames, the service also tells where its memory was allocated."""
PLACES = 25
"""Of allocations that are told."""


BACKENDS = ("sandbox", "process")


@contextlib.contextmanager
def a_folder(backend: str) -> Iterator[tuple[Path, str]]:
    """For the files of a service whose sandboxes are of this backend, or, if none is named, of the best there is."""
    from tangram.bench.reservation import usual_backend  # a service that is watched has no use for it

    backend = backend or usual_backend()[0]
    if backend not in BACKENDS:
        raise InvalidConfig("backend", backend, f"one of {', '.join(BACKENDS)}")
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        Path(folder).chmod(0o711)  # programs in sandboxes are nobody's; what is secret in it has modes of its own
        yield Path(folder), backend


class Inside(msgspec.Struct, frozen=True):
    """What a service knows of itself."""

    asked: int
    """Which request this answers, counted from 1."""
    tasks: int
    """Of its loop."""
    objects: int
    """That the garbage collector knows, after a collection."""
    places: list[str] = []
    """Where most memory was allocated since the first time it was asked, if that is traced."""


class ServiceProcess:
    """A service from start to end, or to several ends."""

    def __init__(
        self,
        folder: Path,
        tables: Mapping[str, Mapping[str, Any]],
        *,
        watched: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`tables`: of the config, besides where it listens and its journal. `watched`: it can be asked for Inside.
        `variables`: of its environment, besides those of this process."""
        self.folder = folder
        self.port = 0
        """A free one, from the first start on."""
        self._variables = dict(variables or {})
        self._tables = tables
        self._watched = watched
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0

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

    # ---- its life ----

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._end)

    async def start(self) -> float:
        """Seconds until it says that it is ready."""
        return await asyncio.to_thread(self._start)

    async def start_and_kill(self, after_s: float) -> None:
        """So long after its start, whatever it has done by then."""
        self._launch()
        await asyncio.sleep(after_s)
        self.kill()

    def _start(self) -> float:
        began = time.perf_counter()
        self._launch()
        try:
            self._until_ready(began + UP_S)
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
            words = ["-m", "tangram.bench.service_process", str(config), str(self._inside)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if _status(self.port, "/readyz") == 200:
                    return
            if self._process.poll() is not None or time.perf_counter() > deadline:
                said = (self.folder / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace")
                raise ManagerError(f"expected a service on {self.url}; it did not come up:\n{said}", retry=False)
            time.sleep(RETRY_S)

    def kill(self) -> None:
        """As `kill -9` does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    # ---- what it uses ----

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> list[str]:
        """What each descriptor that it has stands for."""
        found = []
        folder = f"/proc/{self.pid}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"{folder}/{name}"))
        return found

    @property
    def _inside(self) -> Path:
        return self.folder / "inside.json"

    async def inside(self) -> Inside:
        """Of one that is watched."""
        assert self._watched
        self._asked += 1
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.perf_counter() + UP_S
        while True:
            with contextlib.suppress(OSError):
                found = msgspec.json.decode(self._inside.read_bytes(), type=Inside)
                if found.asked == self._asked:
                    return found
            if time.perf_counter() > deadline:
                raise ManagerError(f"the service did not tell about itself within {UP_S:g} s", retry=False)
            await asyncio.sleep(0.01)


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection(HOST, port, timeout=UP_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def free_port() -> int:
    """That nobody listens on now; whoever needs it again after a restart asks for the same."""
    with socket.socket() as asked:
        asked.bind((HOST, 0))
        port: int = asked.getsockname()[1]
        return port


def config_text(tables: Mapping[str, Mapping[str, Any]], listen: str, journal: Path) -> str:
    """The file for `tangram serve`. Each value is a text, a number or a flag; one of `quotas` is its name's maximum of
    concurrent requests."""
    quotas = tables.get("quotas", {})
    service = {"listen": listen, "journal": str(journal), **tables.get("service", {})}
    lines = []
    for name, table in {**{key: each for key, each in tables.items() if key != "quotas"}, "service": service}.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    for name, concurrent in quotas.items():
        lines += ["[[quotas]]", f"name = {_toml(name)}", f"concurrent = {_toml(concurrent)}"]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """JSON is TOML as far as it goes here."""
    return msgspec.json.encode(value).decode()


# ---- a service that is watched --------------------------------------------------------------------------------------


def _way(frames: Iterable[Any]) -> str:
    """The innermost first."""
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(list(frames)))


async def _serve(config: Path, told: Path) -> None:
    import gc
    import tracemalloc

    from tangram.config import load
    from tangram.server.serve import serve

    frames = int(os.environ.get(TRACE_VARIABLE, "0"))
    if frames:
        tracemalloc.start(frames)
    asked = 0
    before: tracemalloc.Snapshot | None = None

    def tell() -> None:
        nonlocal asked, before
        asked += 1
        gc.collect()
        places = []
        if frames:
            now = tracemalloc.take_snapshot()
            before = before or now
            grown = now.compare_to(before, "traceback" if frames > 1 else "lineno")
            places = [f"{each.size_diff:+d} B {each.count_diff:+d}: {_way(each.traceback)}" for each in grown[:PLACES]]
        found = Inside(asked=asked, tasks=len(asyncio.all_tasks()), objects=len(gc.get_objects()), places=places)
        fresh = told.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(found))
        fresh.rename(told)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    await serve(load(config))


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), Path(sys.argv[2])))
