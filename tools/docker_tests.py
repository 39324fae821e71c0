"""Run the tests that need a Docker engine: `python -m tools.docker_tests [WORD ...]`.

The words are arguments of pytest; without a path among them, it runs DOCKER_TESTS. The tests start private engines, see
tests/managers/sandboxes/docker/docker_engine.py. Installs docker.io with apt if there is no engine, without starting
its service. Pulls no image. The exit code is that of pytest, 2 if the engine cannot be installed.

All files of the tests are below one temporary directory, whose name is also in TMPDIR of their processes and in their
control groups. All of it is removed at the end, also after Ctrl-C and SIGTERM. An installed package is not removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.conftest import DOCKER_TESTS
from tests.managers.sandboxes.docker.docker_engine import PREFIX, kill_all, read_proc, why_not

PACKAGE = "docker.io"
POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian calls this program to decide whether a package may start its services; exit code 101 forbids it."""
STOP_S = 20.0
"""Time for pytest to print its report after Ctrl-C."""
NEVER_RAN = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Unable(Exception):
    """The message states what is missing and what to do."""


class Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def main(words: list[str]) -> int:
    install()
    if reason := why_not():
        raise Unable(reason)
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))  # short: the path of a socket has at most 107 bytes
    try:
        scratch.chmod(0o711)  # an engine that maps users accesses it as another user
        return run(words, scratch)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        sweep(scratch)


def install() -> None:
    if shutil.which("dockerd") is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unable(
            "needs root and a Docker engine. On Debian or Ubuntu:\n"
            f"    sudo apt-get install {PACKAGE}\n"
            "    sudo make test-docker"
        )
    print(f"installing {PACKAGE}", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", PACKAGE]
    with services_stay_off():
        # Existing package lists usually suffice; if not, update them first.
        if subprocess.run(words, env=environment, capture_output=True).returncode == 0:
            return
        subprocess.run(["apt-get", "update", "-qq"], env=environment, capture_output=True)
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unable(f"{' '.join(words)} failed:\n{done.stderr}")


@contextlib.contextmanager
def services_stay_off() -> Iterator[None]:
    try:
        with POLICY.open("x") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield  # the machine has its own policy
        return
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink()


def run(words: list[str], scratch: Path) -> int:
    """Runs pytest in a new session: Ctrl-C is forwarded to pytest and does not reach the engines."""
    environment = os.environ | {"CI": "true", "TANGRAM_DOCKER_TESTS": "1", "TMPDIR": str(scratch)}
    if not any(Path(word.partition("::")[0]).exists() for word in words):
        words = [*words, *DOCKER_TESTS]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-m", "docker", *words], env=environment, start_new_session=True
    )
    try:
        return process.wait()
    except Stopped:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, Stopped):
            process.wait(STOP_S)
        raise
    finally:
        process.kill()
        process.wait()


def sweep(scratch: Path) -> None:
    """Kills processes that stopped tests left running, and removes their control groups and files."""
    mark = f"TMPDIR={scratch}\0".encode()
    engines = {path.name for path in scratch.glob(f"{PREFIX}*")}
    kill_all(lambda pid: mark in read_proc(pid, "environ"), engines)
    shutil.rmtree(scratch)


def stop(number: int, _: FrameType | None) -> None:
    raise Stopped(number)


if __name__ == "__main__":
    for each in SIGNALS:
        signal.signal(each, stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except Unable as error:
        print(f"test-docker: {error}", file=sys.stderr)
        sys.exit(NEVER_RAN)
    except Stopped as error:
        sys.exit(128 + error.number)
