"""Functions that tests call, good ones and bad ones. Fork servers import this module, so it imports little."""

from __future__ import annotations

import ctypes
import datetime
import decimal
import enum
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tangram.client.functions import function

IDLE_S = 0.3
"""Short, so that tests see instances end."""
LONG_S = 1000.0
"""That of `tests.passing_time`, which imports more."""
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
    """The process ids of the instance and of its fork server."""
    return [os.getpid(), os.getppid()]


@declared(idle_s=30.0)
def environment(name: str) -> str | None:
    return os.environ.get(name)


@declared()
async def later(value: int) -> int:
    return value


@declared(pure=True)
def counted(log: str, value: int) -> int:
    """Logs that it ran."""
    note(log)
    return value


@declared(idle_s=30.0)
def noted(log: str, wait_for: str = "") -> int:
    """Logs that it runs, and waits for a file."""
    note(log)
    while wait_for and not Path(wait_for).exists():
        time.sleep(0.01)
    return os.getpid()


@declared(idle_s=30.0)
def stubborn(log: str, wait_for: str) -> int:
    """Ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(log)
    while not Path(wait_for).exists():
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


@declared(idle_s=30.0)
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

    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    found = {"large": bytes(20 << 20), "huge int": 1 << 70, "half a character": "\udcff", "deep": deep}
    numbers = {"float32": numpy.float32(0.5), "int64": [numpy.int64(3)], "bool": {"x": numpy.bool_(True)}}
    plain = {"tuple": (1, {"a": b"b"}), "counter": Counter("aab"), "bytearray": [bytearray(b"x")], "text": [Text("x")]}
    keys = {"keys": {(1, 2): 3, None: 4, 5: 6.0, True: [(7,)]}, "infinite": [float("inf")], "nothing": None}
    return (found | numbers | plain | keys)[what]


class Text(str):
    pass


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int


@dataclass
class Score:
    value: float


@declared()
def returns_foreign(what: str) -> Any:
    import numpy

    moment = datetime.datetime(2020, 1, 1)
    found = {
        "object": object(), "function": raises, "moment": {"when": moment}, "date": [0, moment.date()],
        "decimal": {"a": [1, (decimal.Decimal("1.5"),)]}, "uuid": uuid.UUID(int=1), "set": {"of": {1}},
        "key": {moment: 1}, "enum": [Colour.RED], "level": Level.LOW, "record": {"best": Score(0.5)}, "point": Point(1),
        "array": numpy.zeros(2), "numpy moment": numpy.datetime64(5, "ns"), "numpy span": numpy.timedelta64(5, "ns"),
        "complex": [1j], "generator": (number for number in ()),
    }  # fmt: skip
    return found[what]


@declared(idle_s=30.0)
def leaks(mib: int) -> int:
    kept.append(b"x" * (mib << 20))
    return os.getpid()


@declared()
def exhausts() -> int:
    grown = []
    while True:
        grown.append(bytearray(8 << 20))


@declared(memory="64MiB")
def aborts(how: str) -> None:
    """Aborts as C libraries do that get no memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    if how == "without memory":
        while block := libc.malloc(1 << 20):
            ctypes.memset(block, 1, 1 << 20)
    if how == "with words":
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


class Swells:
    """Small when it is pickled, and 100 MiB when it is read."""

    def __reduce__(self) -> Any:
        return bytearray, (100 << 20,)


@declared(memory="64MiB")
def takes_little(value: Any) -> int:
    return len(value)


@declared(processes=20)
def multiplies(log: str, how: str) -> None:
    """Starts more processes or threads than it may have, but a bounded number."""
    threading.stack_size(1 << 18)  # so that it is not its memory that stops it
    for _ in range(300):
        if how == "threads":
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        elif os.fork() == 0:
            if how == "daemons" and (os.setsid() or os.fork()):  # type: ignore[func-returns-value]
                os._exit(0)
            note(log)
            time.sleep(600)
    time.sleep(600)


@declared(processes=20)
def has_few(log: str) -> int:
    """Starts fewer than it may have, for long enough to be counted."""
    for _ in range(10):
        if os.fork() == 0:
            note(log)
            time.sleep(600)
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    time.sleep(1.0)
    return 10


class Grader:
    """Static methods can be functions."""

    @staticmethod
    @declared()
    def above(value: int) -> int:
        return value + 1

    @declared()
    @staticmethod
    def below(value: int) -> int:
        return value - 1


@declared()
def sums(mib: int) -> int:
    return len(bytearray(mib << 20)) >> 20


@declared(idle_s=30.0)
def forks(log: str) -> int:
    """Leaves a child, and a daemon in another session."""
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
    """Leaves a process that forks into a new session every millisecond and ends."""
    if os.fork() == 0:
        note(log)
        while os.fork() == 0:
            os.setsid()
            time.sleep(0.001)
        os._exit(0)
    while not Path(log).exists():
        time.sleep(0.001)


@declared(timeout_s=LONG_S)
def hangs_in_c(log: str) -> None:
    """Sleeps in C with all signals blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    subprocess.Popen(["sleep", "600"])
    note(log)
    ctypes.CDLL(None).sleep(600)


@declared(timeout_s=LONG_S)
def slow(log: str) -> None:
    print("begun", flush=True)
    note(log)
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
    """Closes descriptors of the program, now or a little later."""
    if late:
        threading.Timer(0.05, os.closerange, (3, 100)).start()
    else:
        os.closerange(3, 100)
    return os.getpid()


@declared()
def says_garbage() -> None:
    """Writes to the socket of its instance, among other descriptors."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.write(int(name), b"\0\0\0\4\0\0\0\0\0\0\0\0junk")
            except OSError:
                continue
    time.sleep(600)
