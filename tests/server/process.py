"""`tangram serve` as a process of its own, which tests kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

START_S_MAX = 60.0

CONFIG = """
[service]
listen = "127.0.0.1:{port}"
journal = "journal.db"
event_log = "events.jsonl"
drain_s = 5
{service}
[node]
backend = "{backend}"
state = "state"
{node}
"""


class Process:
    """A service that can be killed and started again on the same files and port."""

    def __init__(self, folder: Path, *, backend: str = "process", service: str = "", node: str = "") -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.port = 0
        self._said = dict(backend=backend, service=service, node=node)
        self._running: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def configure(self, **said: str) -> None:
        """Other lines of its config, from its next start on."""
        self._said |= said

    def start(self) -> None:
        """Returns when it is ready."""
        path = self.folder / "tangram.toml"
        path.write_text(CONFIG.format(port=self.port, **self._said))
        with (self.folder / "log").open("a") as log:
            self._running = subprocess.Popen(
                [sys.executable, "-m", "tangram", "serve", "--config", str(path)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._running.stdout is not None
        line = self._running.stdout.readline()  # the address, or nothing if it has ended
        assert line, self.log
        self.port = int(line.split()[0].rpartition(":")[2])
        self._until_ready()

    def _until_ready(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.01)
        raise AssertionError(f"not ready: {self.log}")

    def ended(self) -> int:
        """Its exit code, when it has ended by itself."""
        running, self._running = self._running, None
        assert running is not None and running.stdout is not None
        code = running.wait(timeout=60.0)
        running.stdout.close()
        return code

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        running, self._running = self._running, None
        assert running is not None
        os.kill(running.pid, number)
        code = running.wait(timeout=60.0)
        assert running.stdout is not None
        running.stdout.close()
        return code

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self.stop()
