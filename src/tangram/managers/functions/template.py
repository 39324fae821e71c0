"""The template of a function: a small program that imports the function once and forks instances of it.

It is run by its path, knows nothing of the package around it, and needs msgspec beside the standard library. Owns the
processes of one function: every instance is a child of it, and whatever an instance leaves behind becomes one. Decides
nothing: it does what the messages on its socket say. Promises that an instance is said to be gone only when nothing
that it started is left, that one with more processes than it may have is ended, and that everything dies with the
template, and the template with its owner.

    template.py CONTROL SPEC OWNER          the template
    template.py SOCKET SPEC OWNER alone     an instance that imports the function itself

CONTROL is a socket on which single messages come and go, SPEC a file with the function, OWNER the process without which
there is no use for this one. An instance serves one call at a time on a socket of its own. If importing started
threads, a fork would copy a process in the middle of what they do, so instances are then executed anew and import for
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import gc
import importlib
import inspect
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MESSAGE_BYTES_MAX = 1 << 17
FDS_MAX = 3
TRACEBACK_CHARACTERS_MAX = 20_000
"""Of a failure: its beginning and its end are kept."""
MESSAGE_CHARACTERS_MAX = 2_000
RESERVE_BYTES = 64 << 20
"""Above the limit of memory: with which an instance that has reached it says so."""
START_BYTES = 8 << 20
"""Below its limit, that a function needs to be called at all."""
KILL_PAUSE_S = 0.002
"""Between looks at processes that were killed."""
KILL_S_MAX = 10.0
"""For killed processes to be gone."""
LOOK_S = 0.2
"""Between looks at how many processes instances have. A look at one that has started nothing takes less than 0.1 ms;
what forks as fast as it can has a few hundred more than it may when it is seen."""

OUR_EXIT = 113
"""With which an instance ends when it is not the function that failed."""

REQUEST = struct.Struct("!Q")
"""Before the arguments of a call: their length."""
REPLY = struct.Struct("!IQ")
"""Before an answer: the length of what is said about the call, and of the value."""

Message = dict[str, Any]
_libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """Of the function, in the words of `Failure`."""

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        self.said = {"kind": kind, "message": message[:MESSAGE_CHARACTERS_MAX], "traceback": trace}


def die_with(parent: int, number: int) -> None:
    """Get this signal when the parent has died, also if it has already."""
    _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


# ---- the function -------------------------------------------------------------------------------------------------


def load(spec: Message) -> Callable[..., Any]:
    """Import the function, or read it. Raises Failed."""
    sys.path[:] = spec["paths"]
    what = spec["name"]
    try:
        if spec["pickled"]:
            found: Any = pickle.loads(spec["pickled"])
        else:
            what = spec["module"]
            found = importlib.import_module(what)
            for part in spec["qualname"].split("."):
                found = getattr(found, part)
        # What the decorator made records the function, which is called here.
        found = getattr(found, "__tangram_function__", found)
        if not callable(found):
            raise TypeError(f"{spec['name']} is {found!r}, which cannot be called")
    except BaseException as error:
        raise Failed("import", f"{what} cannot be imported: {one_line(error)}", printed(error, 1)) from None
    used = memory()["VmData"]
    if used + START_BYTES > spec["memory_bytes"]:
        said = f"importing {what} takes {used >> 20} MiB of the {spec['memory_bytes'] >> 20} MiB that it may use"
        raise Failed("memory", f"{said}; give it more memory")
    call: Callable[..., Any] = found
    return call


def one_line(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return "".join(traceback.format_exception_only(error)).strip()[:MESSAGE_CHARACTERS_MAX]
    return type(error).__name__  # its own way of showing itself fails


def printed(error: BaseException, skip: int) -> str:
    """As Python prints it, without the first `skip` frames, which are ours."""
    trace = error.__traceback__
    for _ in range(skip):
        trace = trace.tb_next if trace is not None else None
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:
        return type(error).__name__
    if len(text) <= TRACEBACK_CHARACTERS_MAX:
        return text
    half = TRACEBACK_CHARACTERS_MAX // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are not shown ...]\n{text[-half:]}"


def memory() -> dict[str, int]:
    """In bytes: `VmData` is what the limit counts, `RssAnon` what is really there, `VmHWM` the most that was."""
    found = {"VmData": 0, "RssAnon": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, words = line.partition(":")
            if name in found:
                found[name] = int(words.split()[0]) << 10
    return found


# ---- an instance --------------------------------------------------------------------------------------------------


class Instance:
    """Serves calls, one after the other, until its socket ends."""

    def __init__(self, function: Callable[..., Any], spec: Message, channel: socket.socket) -> None:
        self._function = function
        self._spec = spec
        self._channel = channel
        self._limit: int = spec["memory_bytes"]
        self._hard = self._limit + RESERVE_BYTES
        ceiling = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if ceiling != resource.RLIM_INFINITY:
            self._limit, self._hard = min(self._limit, ceiling), min(self._hard, ceiling)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit, self._hard))
        self._began_bytes = memory()["RssAnon"]

    def serve(self) -> NoReturn:
        with contextlib.suppress(ConnectionError):  # its owner has gone
            while head := self._receive(REQUEST.size):
                try:
                    data = self._receive(REQUEST.unpack(head)[0])
                except MemoryError:
                    self._raise_limit()
                    self._reply(self._out_of_memory("").said, b"", 0.0, keep=False)
                    break
                self._answer(data)
                del data
        os._exit(0)

    def _receive(self, length: int) -> bytes:
        """So many bytes, or none at the end."""
        data = bytearray(length)
        view, have = memoryview(data), 0
        while have < length:
            count = self._channel.recv_into(view[have:])
            if not count:
                return b""
            have += count
        return bytes(data)

    def _answer(self, data: bytes) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak of memory is that of this call
        before = cpu_s()
        failure, value, keep = None, b"", True
        try:
            value = self._call(data)
        except Failed as error:
            failure = error.said
            keep = failure["kind"] != "memory"
        flush()
        self._reply(failure, value, cpu_s() - before, keep=keep and not has_children())

    def _reply(self, failure: Message | None, value: bytes, used_s: float, *, keep: bool) -> None:
        """`keep`: whether another call may come. It may not if this one keeps more than half of what it may use beyond
        what it began with: the next one might fail for what the ones before it left."""
        found = memory()
        leaked = 2 * (found["RssAnon"] - self._began_bytes) > self._limit - self._began_bytes
        said = {
            "failure": failure,
            "cpu_s": max(0.0, used_s),
            "peak_bytes": found["VmHWM"],
            "keep": keep and not leaked,
        }
        head = msgspec.msgpack.encode(said)
        self._channel.sendall(REPLY.pack(len(head), len(value)) + head + value)

    def _raise_limit(self) -> None:
        """So that there is room to say that there was none."""
        resource.setrlimit(resource.RLIMIT_DATA, (self._hard, self._hard))

    def _call(self, data: bytes) -> bytes:
        """The value as msgpack. Raises Failed."""
        try:
            args, kwargs = pickle.loads(data)
        except MemoryError:
            self._raise_limit()
            raise self._out_of_memory("") from None
        except BaseException as error:
            raise Failed("arguments", f"its arguments cannot be read: {one_line(error)}", printed(error, 1)) from None
        try:
            value = self._function(*args, **kwargs)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        except MemoryError as error:
            self._raise_limit()
            raise self._out_of_memory(printed(error, 1)) from None
        except BaseException as error:
            raise Failed("raised", one_line(error), printed(error, 1)) from None
        return self._encoded(value)

    def _encoded(self, value: Any) -> bytes:
        most = self._spec["answer_bytes_max"]
        try:
            data = msgspec.msgpack.encode(plain(value))
        except MemoryError as error:
            self._raise_limit()
            raise self._out_of_memory(printed(error, 1)) from None
        except Foreign as error:
            said = f"it returned what would not come back as it is: {error}"
            raise Failed("unserialisable", f"{said}; return numbers, text, bytes, lists or dicts") from None
        except BaseException as error:
            said = f"it returned a {type(value).__name__}, which cannot be serialised: {one_line(error)}"
            raise Failed("unserialisable", said) from None
        if len(data) > most:
            said = f"it returned {len(data)} bytes, and at most {most} can be taken"
            raise Failed("unserialisable", f"{said}; return less, or write a file")
        return data

    def _out_of_memory(self, trace: str) -> Failed:
        return Failed("memory", f"out of memory: it may use {self._limit >> 20} MiB, which it has used up", trace)


# ---- what may be returned -----------------------------------------------------------------------------------------

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""Come back as they are."""


class Foreign(Exception):
    """What would come back as something else: `result["when"]: datetime`."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__qualname__
        self.steps: list[str] = []
        """From it up to what was returned."""

    def __str__(self) -> str:
        return f"result{''.join(reversed(self.steps))}: {self.kind}"


def plain(value: Any) -> Any:
    """The same of plain types. Numbers of numpy, which rewards often are, and subclasses of plain types that are equal
    to a plain value become that; a tuple is a list. Raises Foreign for all else: a moment or a decimal would come back
    as text, a record as a dict, a set in an order of its own."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is list or kind is tuple:
        return value if ATOMS.issuperset(map(type, value)) else [_part(part, at) for at, part in enumerate(value)]
    if kind is dict:
        if ATOMS.issuperset(map(type, value)) and ATOMS.issuperset(map(type, value.values())):
            return value
        return {_key(key): _part(part, key) for key, part in value.items()}
    return plain(_equal(value))


def _part(value: Any, step: object) -> Any:
    if type(value) in ATOMS:
        return value
    try:
        return plain(value)
    except Foreign as foreign:
        foreign.steps.append(f"[{json.dumps(step, ensure_ascii=False) if isinstance(step, str) else repr(step)}]")
        raise


def _key(key: Any) -> Any:
    """A tuple stays one: only so it is found again."""
    if type(key) is tuple:
        return tuple(map(_key, key))
    try:
        return plain(key)
    except Foreign as foreign:
        foreign.steps.append(" (a key)")
        raise


def _equal(value: Any) -> Any:
    """The value of a plain type that is equal to it. Raises Foreign."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        found = value.item()
        kinds = (numpy.number, numpy.bool_, str, bytes)
        if type(found) in ATOMS and isinstance(value, kinds) and not isinstance(value, numpy.timedelta64):
            return found
    elif isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    elif not isinstance(value, enum.Enum):
        plain_kinds: tuple[Any, ...] = (int, float, str, bytes, list, dict)
        for kind in plain_kinds:
            if isinstance(value, kind):
                return kind(value)
    raise Foreign(value)


def cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            stream.flush()


def has_children() -> bool:
    """Whether something that calls started is left. What has ended is waited for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def become_instance(parent: int, streams: tuple[int, int]) -> None:
    """In a session of its own, with these streams; orphans below it become its children."""
    die_with(parent, signal.SIGKILL)
    os.setsid()
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for target, fd in enumerate(streams, start=1):
        os.dup2(fd, target)
        os.close(fd)
    with contextlib.suppress(Exception):  # the module of the function may have replaced it
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


# ---- the template -------------------------------------------------------------------------------------------------


class Template:
    def __init__(self, control: socket.socket, spec: Message, spec_fd: int, function: Callable[..., Any]) -> None:
        self._control = control
        self._spec = spec
        self._spec_fd = spec_fd
        self._function = function
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._on_message)
        self._pids: dict[int, int] = {}
        """Of instances that live, by their numbers."""
        self._fds: dict[int, int] = {}
        """By which their ends are noticed."""
        self._kill_at: dict[int, float] = {}
        self._excess: dict[int, int] = {}
        """Processes of those that had too many, and are on their way out."""
        self._look_at = 0.0
        self._spawned: dict[int, subprocess.Popen[bytes]] = {}
        self._forks = threads() == 1
        self._others = children()
        """What importing started lives as long as the template."""

    def serve(self) -> None:
        self._send({"ready": True, "forks": self._forks})
        try:
            while True:
                pause = min([*self._kill_at.values(), *([self._look_at] if self._pids else [])], default=None)
                timeout = None if pause is None else max(0.0, pause - time.monotonic())
                for key, _ in self._selector.select(timeout):
                    key.data()
                self._kill_late()
                self._look()
        except EOFError:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._end_all()

    def _send(self, message: Message) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None

    def _on_message(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, FDS_MAX)
        except ConnectionResetError:
            raise EOFError from None
        if not data:
            raise EOFError
        message = json.loads(data)
        number = message["id"]
        if message["do"] == "begin":
            try:
                self._begin(number, fds)
            except OSError as error:
                self._send({"gone": number, "error": str(error)})
            finally:
                for fd in fds:
                    os.close(fd)
        elif number in self._pids:
            self._end(number, message["grace_s"])

    # ---- instances ----

    def _begin(self, number: int, fds: list[int]) -> None:
        pid = self._fork(fds) if self._forks else self._spawn(number, fds)
        self._pids[number] = pid
        self._fds[number] = fd = os.pidfd_open(pid)
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._on_exit(number))
        self._send({"begun": number, "pid": pid})

    def _fork(self, fds: list[int]) -> int:
        template = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._selector.close()
            for fd in (self._control.fileno(), self._spec_fd, *self._fds.values()):
                os.close(fd)
            become_instance(template, (fds[1], fds[2]))
            Instance(self._function, self._spec, socket.socket(fileno=fds[0])).serve()
        except BaseException:
            traceback.print_exc()
        finally:
            flush()
            os._exit(OUR_EXIT)

    def _spawn(self, number: int, fds: list[int]) -> int:
        words = [sys.executable, "-P", __file__, str(fds[0]), str(self._spec_fd), str(os.getpid()), "alone"]
        keep = (fds[0], self._spec_fd)
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=fds[1], stderr=fds[2], pass_fds=keep)
        self._spawned[number] = process
        return process.pid

    def _end(self, number: int, grace_s: float) -> None:
        """Ask it and what is in its group to end, and kill it after `grace_s`."""
        if not grace_s:
            self._signal(number, signal.SIGKILL)
            return
        self._signal(number, signal.SIGTERM)
        self._kill_at.setdefault(number, time.monotonic() + grace_s)

    def _signal(self, number: int, signal_number: int) -> None:
        for kill in (os.killpg, os.kill):  # the group is there as soon as it has begun
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._pids[number], signal_number)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for number in [number for number, at in self._kill_at.items() if at <= now]:
            del self._kill_at[number]
            self._signal(number, signal.SIGKILL)

    def _look(self) -> None:
        """End the instances that have more processes than they may."""
        now = time.monotonic()
        if now < self._look_at:
            return
        for number, pid in self._pids.items():
            count = tasks(pid)
            if count > self._spec["processes_max"]:
                self._excess[number] = max(count, self._excess.get(number, 0))
                self._signal(number, signal.SIGKILL)
        self._look_at = time.monotonic() + LOOK_S

    def _on_exit(self, number: int) -> None:
        fd, pid = self._fds.pop(number), self._pids[number]
        self._selector.unregister(fd)
        os.close(fd)
        self._signal(number, signal.SIGKILL)  # its group, at one blow, while its number is its own
        _, status, used = os.wait4(pid, 0)
        del self._pids[number]
        self._kill_at.pop(number, None)
        process = self._spawned.pop(number, None)
        if process is not None:
            process.returncode = status
        said: Message = {"left": self._kill_orphans()}
        said |= {"code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
        said |= {"excess": self._excess.pop(number, 0)}
        self._send({"gone": number, "peak_bytes": used.ru_maxrss << 10, **said})

    def _kill_orphans(self) -> list[int]:
        """What an instance that has ended left behind has become a child of this process. What is below it will, as
        soon as it is dead. Returns those that could not be killed, such as one that changed its user."""
        deadline = time.monotonic() + KILL_S_MAX
        while orphans := [pid for pid in children() if pid not in (*self._pids.values(), *self._others)]:
            if time.monotonic() > deadline:
                return orphans
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == 0:
                        time.sleep(KILL_PAUSE_S)
        return []

    def _end_all(self) -> None:
        self._pids, self._others = {}, []
        self._kill_orphans()


def children() -> list[int]:
    """Of this process, which has one thread that forks."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without that list
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit():
                    with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                        if int(file.read().rpartition(")")[2].split()[1]) == me:
                            found.append(int(name))
        return found


def tasks(top: int) -> int:
    """Processes and threads of a process and of all below it. Whose parent has ended is found below the next one above
    that adopts orphans, which an instance does. A kernel without the list of children tells of threads alone."""
    count, ahead = 0, [top]
    while ahead:
        pid = ahead.pop()
        try:
            own = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue  # it has ended
        count += len(own)
        for task in own:
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file,
            ):
                ahead += map(int, file.readall().split())
    return count


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def read_spec(fd: int) -> Message:
    """From its beginning, whoever else reads it."""
    spec: Message = pickle.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return spec


def run_template(control_fd: int, spec_fd: int, owner: int) -> None:
    control = socket.socket(fileno=control_fd)
    die_with(owner, signal.SIGKILL)  # whatever an import does
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    spec = read_spec(spec_fd)
    try:
        function = load(spec)
    except Failed as error:
        flush()
        control.send(json.dumps({"failed": error.said}).encode())
        return
    flush()
    gc.collect()
    gc.freeze()  # what is here now is never looked at again, so its memory stays shared
    signal.signal(signal.SIGTERM, _raise_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a module that ignores it would take the ends of instances away
    die_with(owner, signal.SIGTERM)  # from here on the end is orderly: orphans must not outlive it
    with contextlib.suppress(EOFError):
        Template(control, spec, spec_fd, function).serve()


def _raise_end(number: int, frame: object) -> NoReturn:
    raise EOFError


def run_alone(channel_fd: int, spec_fd: int, parent: int) -> None:
    streams = (os.dup(1), os.dup(2))
    become_instance(parent, streams)
    channel = socket.socket(fileno=channel_fd)
    spec = read_spec(spec_fd)
    os.close(spec_fd)
    try:
        function = load(spec)
    except Failed as error:
        flush()
        greet(channel, error.said)
        return
    greet(channel, None)
    Instance(function, spec, channel).serve()


def greet(channel: socket.socket, failure: Message | None) -> None:
    """The first answer of an instance that imports for itself: whether it can be called."""
    head = msgspec.msgpack.encode({"failure": failure, "cpu_s": cpu_s(), "peak_bytes": 0, "keep": failure is None})
    channel.sendall(REPLY.pack(len(head), 0) + head)


def main() -> None:
    first, spec_fd, parent = map(int, sys.argv[1:4])
    (run_alone if sys.argv[4:] == ["alone"] else run_template)(first, spec_fd, parent)
    flush()
    os._exit(0)  # threads of the function's module do not keep it


if __name__ == "__main__":
    main()
