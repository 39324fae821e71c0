"""Functions that tests call, good ones and bad ones. Templates import this module, so it imports little."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tangram.client.functions import function

IDLE_S = 0.3
"""Short, so that tests see instances end."""
MEMORY = "192MiB"

kept: list[bytes] = []
calls = 0


def declared(**options: Any) -> Any:
    return function(**(dict(cpus=0.1, memory=MEMORY, idle_s=IDLE_S, timeout_s=30.0) | options))


@declared()
def add(left: float, right: float = 1) -> float:
    return left + right


@declared(idle_s=30.0)
def who() -> list[int]:
    """This instance and its template."""
    return [os.getpid(), os.getppid()]


@declared(idle_s=30.0)
def environment(name: str) -> str | None:
    return os.environ.get(name)


@declared()
async def later(value: int) -> int:
    return value


@declared(pure=True)
def counted(log: str, value: int) -> int:
    """Notes that it ran."""
    note(log)
    return value


@declared(idle_s=30.0)
def noted(log: str, wait_for: str = "") -> int:
    """Notes that it runs, and waits for a file."""
    note(log)
    while wait_for and not Path(wait_for).exists():
        time.sleep(0.01)
    return os.getpid()


@declared(max_instances=8)
def held(log: str, wait_for: str) -> int:
    note(log)
    while not Path(wait_for).exists():
        time.sleep(0.01)
    return os.getpid()


@declared(max_instances=1)
def alone(log: str, wait_for: str) -> int:
    note(log)
    while not Path(wait_for).exists():
        time.sleep(0.01)
    return os.getpid()


def note(log: str) -> None:
    with open(log, "a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")


# ---- bad ones ----


@declared()
def raises() -> None:
    print("on its way")
    print("and to errors", file=sys.stderr)
    raise LookupError("no such answer")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@declared()
def raises_unprintable() -> None:
    raise Unprintable


@declared()
def returns(what: str) -> Any:
    import numpy

    found = {"object": object(), "large": bytes(20 << 20), "huge int": 1 << 70, "function": raises}
    numbers = {"float32": numpy.float32(0.5), "int64": [numpy.int64(3)], "tuple": (1, {"a": b"b"}), "set": {1}}
    return (found | numbers)[what]


@declared(idle_s=30.0)
def leaks(mib: int) -> int:
    kept.append(b"x" * (mib << 20))
    return os.getpid()


@declared()
def exhausts() -> int:
    grown = []
    while True:
        grown.append(bytearray(8 << 20))


@declared()
def sums(mib: int) -> int:
    return len(bytearray(mib << 20)) >> 20


@declared(idle_s=30.0)
def forks(log: str) -> int:
    """Leaves a child, and a daemon that nobody waits for in a session of its own."""
    subprocess.Popen(["sleep", "600"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(log)
            time.sleep(600)
        os._exit(0)
    while not Path(log).exists():
        time.sleep(0.01)
    return os.getpid()


@declared()
def runs_away(log: str) -> None:
    """Leaves a process that is another one every millisecond, each in a session of its own."""
    if os.fork() == 0:
        note(log)
        while os.fork() == 0:
            os.setsid()
            time.sleep(0.001)
        os._exit(0)
    while not Path(log).exists():
        time.sleep(0.001)


@declared(timeout_s=0.5)
def hangs_in_c(log: str) -> None:
    """Sleeps in C with every signal blocked that can be."""
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    subprocess.Popen(["sleep", "600"])
    note(log)
    ctypes.CDLL(None).sleep(600)


@declared(timeout_s=0.5)
def slow() -> None:
    print("begun", flush=True)
    time.sleep(600)


@declared()
def exits(code: int) -> None:
    os._exit(code)


@declared()
def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@declared()
def floods(mib: int) -> int:
    block = b"x" * (1 << 20)
    for _ in range(mib):
        os.write(1, block)
    return mib


@declared()
def floods_and_raises(mib: int) -> None:
    floods(mib)
    raise ValueError("after all that")


@declared(retries=1)
def dies(log: str) -> None:
    note(log)
    os.kill(os.getpid(), signal.SIGKILL)


@declared(retries=2)
def dies_once(log: str) -> str:
    first = not Path(log).exists()
    note(log)
    if first:
        os.kill(os.getpid(), signal.SIGKILL)
    return "at last"


@declared()
def takes(value: Any) -> str:
    return type(value).__name__


@declared(idle_s=30.0)
def closes_everything(late: bool) -> int:
    """Closes descriptors that are not its own, now or a little later."""
    if late:
        threading.Timer(0.05, os.closerange, (3, 100)).start()
    else:
        os.closerange(3, 100)
    return os.getpid()


@declared()
def says_garbage() -> None:
    """Writes to the socket of its instance."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.write(int(name), b"\0\0\0\4\0\0\0\0\0\0\0\0junk")
            except OSError:
                continue
    time.sleep(600)
