"""The engine for servers: a model behind an OpenAI-compatible API that can sleep, as vLLM has it.

Owns the servers that it started, one for each chunk. To load is to start the server or to wake it, to evict is to put
it to sleep: level 1 keeps the weights in host memory, which is the copy that other engines have from `prepare`. So the
memory of a service has to be said: `Service(memory_bytes=...)`, which is what the server takes of its devices.

The contract: `GET /health` is 200 when it serves; `POST /sleep?level=1`, `POST /wake_up`, `GET /is_sleeping`. This
engine is contract-tested: against a small server that keeps the contract, not against vLLM on real devices.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tangram.errors import InvalidAction, InvalidConfig
from tangram.managers.models.devices import Device
from tangram.managers.models.engine import Engine, Weights

SLEEP_MODE = (
    "expected GET /is_sleeping, POST /sleep and POST /wake_up; "
    "vLLM has them with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 in its environment"
)
LOOK_S = 0.05
"""Between two looks at a server that starts, wakes or goes to sleep."""
CONTROL_S_MAX = 120.0
"""Of one request that does not run the model."""
END_S = 0.5
"""Between the last word of a server that crashes and its end."""
REFUSED = range(400, 500)
"""What is the fault of the caller, but for these:"""
BUSY = (408, 425, 429)
"""It says nothing of the payload, which may well be taken later."""
SET_UP = (401, 403, 404, 405, 407)
"""Whoever set the service up: the path, the name of the model, a key."""
SHOWN = 500
TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Runs a command that is killed when the process that started it ends, however that ends."""


class ServerEngine(Engine):
    """`command` starts a server; or `url` is where one runs. In both, `{device}` is the first device of the chunk,
    `{devices}` all of them and `{degree}` their number; in a command, `{port}` is the one to listen on. A payload is
    the body of a request to `path`, and the answer is the body of its response.
    """

    elsewhere = True

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        url: str = "",
        path: str = "/v1/completions",
        batch_max: int = 64,
        start_s_max: float = 900.0,
        call_s_max: float = 3600.0,
    ) -> None:
        if bool(command) == bool(url):
            raise InvalidConfig("server", command or url, "either a command that starts one, or the URL of one")
        self.batch_max = batch_max
        self._command = tuple(command)
        self._url = url
        self._path = path
        self._start_s_max = start_s_max
        self._call_s_max = call_s_max
        self._servers: dict[tuple[int, ...], Server] = {}

    def prepare(self) -> Weights:
        if self._command and shutil.which(self._command[0]) is None:
            raise FileNotFoundError(f"there is no program {self._command[0]} to start the server with")
        return Weights([])

    def load(self, weights: Weights, devices: Sequence[Device]) -> Server:
        key = tuple(device.index for device in devices)
        server = self._servers.get(key)
        if server is None:
            server = self._servers[key] = Server(self._command, self._url, self._start_s_max, devices)
        server.wake()
        return server

    def call(self, loaded: Server, payloads: list[bytes]) -> list[bytes]:
        loaded.wake_if_dead()
        if len(payloads) == 1:
            return [loaded.infer(self._path, payloads[0], self._call_s_max)]
        try:
            with ThreadPoolExecutor(len(payloads)) as pool:
                waiting = [pool.submit(loaded.infer, self._path, body, self._call_s_max) for body in payloads]
                try:
                    return [each.result() for each in waiting]
                except BaseException:
                    loaded.hang_up()  # else the pool waits for the others
                    raise
        finally:
            loaded.hang_up()

    def unload(self, loaded: Server) -> None:
        loaded.sleep()


class Server:
    """One server on one chunk."""

    def __init__(self, command: Sequence[str], url: str, start_s_max: float, devices: Sequence[Device]) -> None:
        self._command = command
        self._start_s_max = start_s_max
        self._devices = devices
        self._url = url and self._filled(url)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: set[http.client.HTTPConnection] = set()

    def _filled(self, text: str, port: int = 0) -> str:
        indexes = [str(device.index) for device in self._devices]
        values = {"device": indexes[0], "devices": ",".join(indexes), "degree": str(len(indexes)), "port": str(port)}
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    # ---- its life ----

    def wake(self) -> None:
        """Have it serving. A server that is new, or dead, is started. If that fails, it is off its devices: one of ours
        is killed, another one is asked to sleep."""
        try:
            if self._command and (self._process is None or self._process.poll() is not None):
                self._start()
            if self._is_sleeping():
                self._control("POST", "/wake_up")
            self._wait(lambda: not self._is_sleeping() and self._is_healthy(), "did not wake up")
        except BaseException:
            if self._process is not None:
                self._kill()
            else:
                with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException):
                    self._control("POST", "/sleep?level=1")
            raise

    def wake_if_dead(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.wake()

    def sleep(self) -> None:
        """Off its devices. One of ours that does not go to sleep is killed: then it is off as well."""
        try:
            self._control("POST", "/sleep?level=1")
            self._wait(self._is_sleeping, "did not go to sleep")
        except (OSError, RuntimeError, http.client.HTTPException):
            if self._process is None:
                raise
            self._kill()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [self._filled(word, port) for word in self._command]
        self._url = f"http://127.0.0.1:{port}"
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(_visible(self._devices))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", TIED, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            env=os.environ | visible,
            start_new_session=True,
        )
        self._wait(self._is_healthy, "was not healthy")

    def _kill(self) -> None:
        """With what it started, as far as that stayed in its session; the manager looks for the rest."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + self._start_s_max
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server at {self._url} {complaint} within {self._start_s_max:.0f} s")
            time.sleep(LOOK_S)

    # ---- requests ----

    def infer(self, path: str, body: bytes, seconds_max: float) -> bytes:
        try:
            status, answer = self._request("POST", path, body, seconds_max)
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(
                f"the server at {self._url} failed: {type(error).__name__} {error}{self._end()}"
            ) from error
        said = f"{status}: {answer[:SHOWN].decode(errors='replace')}"
        if status in SET_UP:
            raise RuntimeError(
                f"the service is set up wrongly: the server at {self._url} said to POST {path} {said}; "
                "look at `path`, at the name of the model in payloads, and at what the server asks of its clients"
            )
        if status in REFUSED and status not in BUSY:
            raise InvalidAction("payload", said, f"a body that {path} takes")
        if status != http.HTTPStatus.OK:
            raise RuntimeError(f"the server said {said}")
        return answer

    def _end(self) -> str:
        """How it ended, if it did: its line breaks a moment before its code can be had."""
        try:
            return f"; it ended with code {self._process.wait(END_S)}" if self._process is not None else ""
        except subprocess.TimeoutExpired:
            return ""

    def hang_up(self) -> None:
        """End every request that is still under way: the server notices and stops working on it."""
        for line in list(self._lines):
            with contextlib.suppress(OSError):
                if line.sock is not None:
                    line.sock.shutdown(socket.SHUT_RDWR)

    def _is_healthy(self) -> bool:
        try:
            return self._request("GET", "/health", b"", CONTROL_S_MAX)[0] == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    def _is_sleeping(self) -> bool:
        answer = self._control("GET", "/is_sleeping")
        try:
            found = json.loads(answer)["is_sleeping"]
        except (ValueError, TypeError, LookupError):
            found = None
        if type(found) is not bool:
            shown = answer[:SHOWN].decode(errors="replace")
            raise RuntimeError(
                f"the server at {self._url} said to GET /is_sleeping: {shown!r}; "
                'expected {"is_sleeping": true}, or false'
            )
        return found

    def _control(self, method: str, path: str) -> bytes:
        status, answer = self._request(method, path, b"", CONTROL_S_MAX)
        if status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED):
            raise RuntimeError(
                f"the server at {self._url} has no sleep mode: {status} to {method} {path}; {SLEEP_MODE}"
            )
        if status != http.HTTPStatus.OK:
            shown = answer[:SHOWN].decode(errors="replace")
            raise RuntimeError(f"the server at {self._url} said {status} to {method} {path}: {shown}")
        return answer

    def _request(self, method: str, path: str, body: bytes, seconds_max: float) -> tuple[int, bytes]:
        parts = urlsplit(self._url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        line = kind(parts.hostname or "", parts.port, timeout=seconds_max)
        self._lines.add(line)
        try:
            line.request(method, parts.path.rstrip("/") + path, body, {"Content-Type": "application/json"})
            response = line.getresponse()
            return response.status, response.read()
        finally:
            self._lines.discard(line)
            line.close()


def _visible(devices: Sequence[Device]) -> list[str]:
    """The devices as the server counts them: by what this process may see itself."""
    numbers = [int(device.place.partition(":")[2] or device.index) for device in devices]
    own = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [own[number] if number < len(own) else str(number) for number in numbers]
