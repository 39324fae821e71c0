"""The engine for servers: a model behind an OpenAI-compatible API with a sleep mode, such as vLLM.

Owns the servers that it started, one for each chunk. Loading starts or wakes the server; evicting puts it to sleep at
level 1, which keeps the weights in host memory, as `prepare` does for other engines. A service must declare the memory
of the server on its devices: `Service(memory_bytes=...)`.

The contract: `GET /health` is 200 when it serves; `POST /sleep?level=1`, `POST /wake_up`, `GET /is_sleeping`. The tests
run against a small server that implements this contract, not against vLLM on real devices.
"""

from __future__ import annotations

import contextlib
import http
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

from tangram.clock import Clock, WallClock
from tangram.errors import InvalidAction, InvalidConfig
from tangram.managers.http import BlockingHttpClient
from tangram.managers.models.devices import Device
from tangram.managers.models.engine import Engine, Weights
from tangram.processes import libc

SLEEP_MODE = (
    "expected GET /is_sleeping, POST /sleep and POST /wake_up; "
    "vLLM has them with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 in its environment"
)
POLL_S = 0.05
"""Interval of polling a server that starts, wakes or enters sleep."""
CONTROL_S_MAX = 120.0
"""Time limit of a request that does not run the model."""
EXIT_WAIT_S = 0.5
"""Time between the closed connection of a crashing server and its exit."""
CLIENT_ERROR_STATUSES = range(400, 500)
"""Errors of the caller, except for the following two."""
BUSY_STATUSES = (408, 425, 429)
"""The server may accept the same payload later."""
MISCONFIGURED_STATUSES = (401, 403, 404, 405, 407)
"""Errors in the configuration of the service: the path, the name of the model, a key."""
SHOWN_CHARACTERS_MAX = 500


class ServerEngine(Engine):
    """`command` starts a server; `url` is the address of one that runs. In both, `{device}` is the first device of the
    chunk, `{devices}` all of them and `{degree}` their number; in a command, `{port}` is the port to listen on. A
    payload is the body of a request to `path`, and the answer is the body of the response.
    """

    external_weights = True

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
        self._clock: Clock = WallClock()
        """Measures the wait for a server. Pickled with the engine."""
        self._servers: dict[tuple[int, ...], ServerHandle] = {}

    def prepare(self) -> Weights:
        if self._command and shutil.which(self._command[0]) is None:
            raise FileNotFoundError(f"the program {self._command[0]} that starts the server does not exist")
        return Weights([])

    def load(self, weights: Weights, devices: Sequence[Device]) -> ServerHandle:
        key = tuple(device.index for device in devices)
        server = self._servers.get(key)
        if server is None:
            server = self._servers[key] = ServerHandle(
                self._command, self._url, self._start_s_max, devices, self._clock
            )
        server.wake()
        return server

    def call(self, loaded: ServerHandle, payloads: list[bytes]) -> list[bytes]:
        loaded.restart_if_dead()
        if len(payloads) == 1:
            return [loaded.infer(self._path, payloads[0], self._call_s_max)]
        try:
            with ThreadPoolExecutor(len(payloads)) as pool:
                waiting = [pool.submit(loaded.infer, self._path, body, self._call_s_max) for body in payloads]
                try:
                    return [task.result() for task in waiting]
                except BaseException:
                    loaded.abort_requests()  # else the pool waits for the other requests
                    raise
        finally:
            loaded.abort_requests()

    def unload(self, loaded: ServerHandle) -> None:
        loaded.sleep()


class ServerHandle:
    """One server on one chunk."""

    def __init__(
        self, command: Sequence[str], url: str, start_s_max: float, devices: Sequence[Device], clock: Clock
    ) -> None:
        self._command = command
        self._start_s_max = start_s_max
        self._devices = devices
        self._clock = clock
        self._url = url and self._substitute(url)
        self._process: subprocess.Popen[bytes] | None = None
        self._http = BlockingHttpClient(self._url)

    def _substitute(self, text: str, port: int = 0) -> str:
        indexes = [str(device.index) for device in self._devices]
        values = {"device": indexes[0], "devices": ",".join(indexes), "degree": str(len(indexes)), "port": str(port)}
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    # ---- start, sleep and end ----

    def wake(self) -> None:
        """Returns when it serves. Starts a server that is new or dead. On failure its devices are free: a server
        that it started is killed, another one is put to sleep."""
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
                with contextlib.suppress(OSError, RuntimeError):
                    self._control("POST", "/sleep?level=1")
            raise

    def restart_if_dead(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.wake()

    def sleep(self) -> None:
        """Free its devices. Kills a server that it started and that fails to enter sleep."""
        try:
            self._control("POST", "/sleep?level=1")
            self._wait(self._is_sleeping, "did not go to sleep")
        except (OSError, RuntimeError):
            if self._process is None:
                raise
            self._kill()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [self._substitute(word, port) for word in self._command]
        self._url = f"http://127.0.0.1:{port}"
        self._http = BlockingHttpClient(self._url)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(_visible_devices(self._devices))}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", libc.__file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            env=os.environ | visible,
            start_new_session=True,
        )
        self._wait(self._is_healthy, "was not healthy")

    def _kill(self) -> None:
        """Kill it with its session; the manager kills processes that have left the session."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = self._clock.now() + self._start_s_max
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self._process.returncode}")
            if self._clock.now() > deadline:
                raise RuntimeError(f"the server at {self._url} {complaint} within {self._start_s_max:.0f} s")
            time.sleep(POLL_S)

    # ---- requests ----

    def infer(self, path: str, body: bytes, seconds_max: float) -> bytes:
        try:
            status, response = self._request("POST", path, body, seconds_max)
        except OSError as error:
            raise RuntimeError(
                f"the server at {self._url} failed: {type(error).__name__} {error}{self._exit_description()}"
            ) from error
        shown = f"{status}: {response[:SHOWN_CHARACTERS_MAX].decode(errors='replace')}"
        if status in MISCONFIGURED_STATUSES:
            raise RuntimeError(
                f"the service is misconfigured: the server at {self._url} responded to POST {path} with {shown}; "
                "check `path`, the name of the model in payloads, and the credentials that the server requires"
            )
        if status in CLIENT_ERROR_STATUSES and status not in BUSY_STATUSES:
            raise InvalidAction("payload", shown, f"a body that {path} takes")
        if status != http.HTTPStatus.OK:
            raise RuntimeError(f"the server responded {shown}")
        return response

    def _exit_description(self) -> str:
        """The exit code of a server that has ended. Its connection closes a moment before the code is available."""
        try:
            return f"; it ended with code {self._process.wait(EXIT_WAIT_S)}" if self._process is not None else ""
        except subprocess.TimeoutExpired:
            return ""

    def abort_requests(self) -> None:
        """Close the connections of all pending requests, so that the server stops working on them."""
        self._http.abort()

    def _is_healthy(self) -> bool:
        try:
            return self._request("GET", "/health", b"", CONTROL_S_MAX)[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def _is_sleeping(self) -> bool:
        response = self._control("GET", "/is_sleeping")
        try:
            is_sleeping = json.loads(response)["is_sleeping"]
        except (ValueError, TypeError, LookupError):
            is_sleeping = None
        if type(is_sleeping) is not bool:
            shown = response[:SHOWN_CHARACTERS_MAX].decode(errors="replace")
            raise RuntimeError(
                f"the server at {self._url} responded to GET /is_sleeping with {shown!r}; "
                'expected {"is_sleeping": true}, or false'
            )
        return is_sleeping

    def _control(self, method: str, path: str) -> bytes:
        status, response = self._request(method, path, b"", CONTROL_S_MAX)
        if status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED):
            raise RuntimeError(
                f"the server at {self._url} has no sleep mode: {status} to {method} {path}; {SLEEP_MODE}"
            )
        if status != http.HTTPStatus.OK:
            shown = response[:SHOWN_CHARACTERS_MAX].decode(errors="replace")
            raise RuntimeError(f"the server at {self._url} responded to {method} {path} with {status}: {shown}")
        return response

    def _request(self, method: str, path: str, body: bytes, seconds_max: float) -> tuple[int, bytes]:
        return self._http.request(
            method, path, body, timeout_s=seconds_max, headers={"Content-Type": "application/json"}
        )


def _visible_devices(devices: Sequence[Device]) -> list[str]:
    """The devices as the server numbers them, which depends on those visible to this process."""
    numbers = [int(device.place.partition(":")[2] or device.index) for device in devices]
    own = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [own[number] if number < len(own) else str(number) for number in numbers]
