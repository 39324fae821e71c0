"""The program inside an instance: it loads a function once and makes its calls, one after the other.

It runs in sandboxes of any image, where it needs only Python, and as a forked process on the machine of the client. It
executes the commands that it receives. The owner must not trust its replies: code of the user runs in this process.

    serve COMMANDS STATUSES  replaces a held shell: reads commands, each terminated by NUL, from one descriptor and
                             writes a status line to the other after each, as processes.streams describes. The manager
                             of the sandbox attributes its resource usage to the action
    once TOKEN               makes one call, with the arguments on its standard input
    main(FD)                 for the fork server: like `serve`, with one socket for both

Output of a call goes to the streams of the process. When no process of the call can write there any more, the reply is
written to the first stream, after a mark with a token that only the owner and this program have.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import inspect
import os
import pickle
import re
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

if __name__.startswith("tangram."):
    from tangram.managers.functions.plain_values import UnserialisableValue, encode_value
    from tangram.processes.libc import become_subreaper
    from tangram.processes.orphans import kill_children, list_children
else:  # in a sandbox, where all of these are in one package
    from .libc import become_subreaper  # type: ignore[import-not-found,no-redef,unused-ignore]
    from .orphans import kill_children, list_children  # type: ignore[import-not-found,no-redef,unused-ignore]
    from .plain_values import UnserialisableValue, encode_value  # type: ignore[no-redef,unused-ignore]

DIRECTORY = ".tangram"
"""The directory in the workspace of a sandbox with the program, its library and the function."""
PACKAGE = "tangram_inside"
LIBRARY = "library"
SPEC_FILE = f"{DIRECTORY}/spec"
PRELOADED = "tangram.managers.functions.preloaded"
"""The module that a fork server imports: it loads the function before instances are forked."""
SPEC_VARIABLE = "TANGRAM_FUNCTION"
"""An environment variable of the fork server: the path of the file with the function."""
STARTER = (
    "import sys\n"
    "if sys.version_info < (3, 10): sys.exit('functions need Python 3.10 or newer, and this is ' + sys.version)\n"
    f"from {PACKAGE}.program import run\n"
    "run()"
)
"""The program that the interpreter executes in DIRECTORY."""

TOKEN_BYTES = 32
BEGIN, ANSWER = b"\0tangram begin ", b"\0tangram answer "
"""The marks in the output stream, each followed by the token: output of the call comes after the first, the reply after
the second."""
FRAME = struct.Struct("!I")
"""The length of a reply, after its token."""
REPLY = struct.Struct("!IQ")
"""The head of a reply: the length of the record about the call, and of the value."""
NONE = b"\xc0"
"""None as msgpack."""
ANSWERED = 114
"""The exit code after a single call that has replied and left no process."""
PROGRAM_FAILED = 113
"""The exit code of an instance when this program failed, not the function."""
COMMAND = re.compile(rb"tangram:(load|call):([0-9a-f]{32}):(inline|file):([A-Za-z0-9+/=]*)")
READ_BYTES = 1 << 16
END_S_MAX = 1.0
"""The time limit for killing the processes that a call has left. If some remain, the instance is not used again."""

TRACEBACK_CHARACTERS_MAX = 20_000
"""The limit of the traceback of a failure. Its beginning and its end are kept."""
MESSAGE_CHARACTERS_MAX = 2_000
RESERVE_BYTES = 64 << 20
"""Headroom above the memory limit for reporting out-of-memory."""
START_BYTES = 8 << 20
"""The memory that must remain below the limit after the import for a function to be callable."""

Message = dict[str, Any]


class FunctionFailure(Exception):
    """The function failed; `record` has the fields of `Failure`."""

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        self.record = {"kind": kind, "message": message[:MESSAGE_CHARACTERS_MAX], "traceback": trace}


# ---- loading ------------------------------------------------------------------------------------------------------


def load(spec: Message) -> Callable[..., Any]:
    """Import or unpickle the function. Raises FunctionFailure."""
    version = sys.version_info[:2]
    if spec["pickled"] and spec["python"] and tuple(spec["python"]) != version:
        spec_version, own_version = ".".join(map(str, spec["python"])), ".".join(map(str, version))
        message = (
            f"{spec['name']} was pickled by Python {spec_version}, and image {spec['image']} has Python {own_version}"
        )
        raise FunctionFailure("import", f"{message}; code sent by value needs equal versions")
    set_import_path(spec)
    what = spec["name"]
    try:
        if spec["pickled"]:
            function: Any = pickle.loads(spec["pickled"])
        else:
            what = spec["module"]
            function = importlib.import_module(what)
            for part in spec["qualname"].split("."):
                function = getattr(function, part)
        # A declared function is called as the plain one that it declares.
        function = getattr(function, "__tangram_function__", function)
        if not callable(function):
            raise TypeError(f"{spec['name']} is {function!r}, which cannot be called")
    except BaseException as error:
        failure = FunctionFailure("import", f"{what} cannot be imported: {one_line(error)}", format_traceback(error))
        raise with_hint(failure, error, spec) from None
    used = memory()["VmData"]
    if used + START_BYTES > spec["memory_bytes"]:
        message = f"importing {what} takes {used >> 20} MiB of its limit of {spec['memory_bytes'] >> 20} MiB"
        raise FunctionFailure("memory", f"{message}; give it more memory")
    call: Callable[..., Any] = function
    return call


def set_import_path(spec: Message) -> None:
    if spec["paths"] is not None:
        sys.path[:] = spec["paths"]


def with_hint(failure: FunctionFailure, cause: BaseException, spec: Message) -> FunctionFailure:
    """Add a hint if a module is missing in an image."""
    if spec["image"] and isinstance(cause, ModuleNotFoundError) and cause.name:
        missing = f"there is no module {cause.name} in image {spec['image']}; put it into an image"
        failure.record["message"] += f"; {missing}, or define the functions that you need in your script"
    return failure


def one_line(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return "".join(traceback.format_exception_only(error)).strip()[:MESSAGE_CHARACTERS_MAX]
    return type(error).__name__  # its __str__ fails


def format_traceback(error: BaseException) -> str:
    """Format a traceback like Python, without its first frame, which belongs to this program."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:
        return type(error).__name__
    if len(text) <= TRACEBACK_CHARACTERS_MAX:
        return text
    half = TRACEBACK_CHARACTERS_MAX // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are not shown ...]\n{text[-half:]}"


def memory() -> dict[str, int]:
    """Memory in bytes: `VmData` is what the limit counts, `RssAnon` its resident part, `VmHWM` the peak."""
    sizes = {"VmData": 0, "RssAnon": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in sizes:
                sizes[name] = int(value.split()[0]) << 10
    return sizes


def cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            stream.flush()


# ---- calling ------------------------------------------------------------------------------------------------------


class ReplyChannel:
    """Writes replies to the first stream that this program was started with, even if a call has replaced it."""

    def __init__(self) -> None:
        self._streams = (os.dup(1), os.dup(2))
        self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._imported_children = list_children()
        """Children that were started by the import; they end with this process."""
        self.token = ""
        self.no_orphans = True
        """Whether all processes that the last call started have ended."""

    def begin(self, token: str) -> None:
        for target, fd in enumerate(self._streams, start=1):
            os.dup2(fd, target)
        self.token = token
        self._write(BEGIN + token.encode())

    def keep_children(self) -> None:
        self._imported_children = list_children()

    def send(self, failure: Message | None, value: bytes, used_s: float, peak_bytes: int, *, keep: bool) -> None:
        """Send the reply. Processes that the call has started are killed first. From then on output of its threads is
        discarded, so that nothing is written between the parts of the reply."""
        record = {"failure": failure, "cpu_s": used_s, "peak_bytes": peak_bytes, "keep": keep}
        head = encode_value(record)
        self.no_orphans = not kill_children(spare=self._imported_children, wait_s=END_S_MAX)
        for target in (1, 2):
            os.dup2(self._null, target)
        length = FRAME.pack(REPLY.size + len(head) + len(value))
        self._write(ANSWER + self.token.encode() + length + REPLY.pack(len(head), len(value)) + head + value)

    def send_loaded(self, failure: FunctionFailure | None) -> None:
        record = None if failure is None else failure.record
        self.send(record, NONE, 0.0, 0, keep=failure is None)

    def _write(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            unsent = unsent[os.write(self._streams[0], unsent) :]


class FunctionRunner:
    """Makes calls of a function within its limit of memory."""

    def __init__(self, function: Callable[..., Any], spec: Message, channel: ReplyChannel) -> None:
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
        self._loaded_bytes = memory()["RssAnon"]

    def reply(self, arguments: Callable[[], bytes]) -> None:
        """Make one call and send its reply."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak of memory is that of this call
        before = cpu_s()
        failure, value = None, b""
        try:
            value = self._call(arguments)
        except FunctionFailure as error:
            failure = error.record
        except MemoryError:
            self._raise_limit()
            failure = self._out_of_memory("").record
        flush()
        sizes = memory()
        # An instance that keeps more than half of its memory limit is replaced: the next call might fail because of it.
        leaked = 2 * (sizes["RssAnon"] - self._loaded_bytes) > self._limit - self._loaded_bytes
        keep = not leaked and (failure is None or failure["kind"] != "memory")
        self._channel.send(failure, value, max(0.0, cpu_s() - before), sizes["VmHWM"], keep=keep)

    def _raise_limit(self) -> None:
        """Free memory, so that the failure can be reported."""
        resource.setrlimit(resource.RLIMIT_DATA, (self._hard, self._hard))

    def _call(self, arguments: Callable[[], bytes]) -> bytes:
        """The value as msgpack. Raises FunctionFailure."""
        try:
            args, kwargs = pickle.loads(arguments())
        except MemoryError:
            self._raise_limit()
            raise self._out_of_memory("") from None
        except BaseException as error:
            message = f"its arguments cannot be read: {one_line(error)}"
            raise with_hint(FunctionFailure("arguments", message, format_traceback(error)), error, self._spec) from None
        process = os.getpid()
        try:
            value = self._function(*args, **kwargs)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        except MemoryError as error:
            self._raise_limit()
            raise self._out_of_memory(format_traceback(error)) from None
        except BaseException as error:
            raise FunctionFailure("raised", one_line(error), format_traceback(error)) from None
        finally:
            if os.getpid() != process:  # the function forked, and this is the child
                os._exit(PROGRAM_FAILED)
        return self._encoded(value)

    def _encoded(self, value: Any) -> bytes:
        try:
            data = encode_value(value)
        except MemoryError as error:
            self._raise_limit()
            raise self._out_of_memory(format_traceback(error)) from None
        except UnserialisableValue as error:
            message = f"it returned a value that would reach the caller as another type: {error}"
            raise FunctionFailure("unserialisable", f"{message}; return numbers, text, bytes, lists or dicts") from None
        except BaseException as error:
            message = f"it returned a {type(value).__name__}, which cannot be serialised: {one_line(error)}"
            raise FunctionFailure("unserialisable", message) from None
        bytes_max = self._spec["answer_bytes_max"]
        if len(data) > bytes_max:
            message = f"it returned {len(data)} bytes, and the maximum is {bytes_max}"
            raise FunctionFailure("unserialisable", f"{message}; return less, or write a file")
        return data

    def _out_of_memory(self, trace: str) -> FunctionFailure:
        message = f"out of memory: it has used up its limit of {self._limit >> 20} MiB"
        return FunctionFailure("memory", message, trace)


# ---- the program --------------------------------------------------------------------------------------------------


class CommandLoop:
    """Loads the function and makes its calls, command by command."""

    def __init__(self, commands: int, statuses: int) -> None:
        self._commands = commands
        self._statuses = statuses
        self._channel = ReplyChannel()
        self._runner: FunctionRunner | None = None
        self._disk_bytes = 0

    def serve(self) -> None:
        received = b""
        while data := os.read(self._commands, READ_BYTES):
            received += data
            while b"\0" in received:
                command, _, received = received.partition(b"\0")
                status = self._run(command)
                os.write(self._statuses, b"%d\n" % status)

    def _run(self, command: bytes) -> int:
        """Returns the status: 0 if the instance can be used again."""
        match = COMMAND.search(command)
        if match is None:
            return 1
        kind, token, place, content = match[1], match[2].decode(), match[3], match[4]
        self._channel.begin(token)
        if kind == b"load":
            return self._load(place, content)
        assert self._runner is not None
        self._runner.reply(lambda: read_content(place, content))
        return 0 if self._channel.no_orphans and has_room(self._disk_bytes) else 1

    def _load(self, place: bytes, content: bytes) -> int:
        preloaded = sys.modules.get(PRELOADED)
        try:
            if preloaded is not None:
                spec, function = preloaded.SPEC, preloaded.FUNCTION
                set_import_path(spec)
            else:
                spec = pickle.loads(read_content(place, content))
                function = load(spec)
        except FunctionFailure as failure:
            flush()
            self._channel.send_loaded(failure)
            return 1
        flush()
        self._channel.keep_children()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(Exception):  # the module of the function may have replaced it
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if spec["umask"] is not None:
            os.umask(spec["umask"])
        self._disk_bytes = spec["disk_bytes"]
        self._runner = FunctionRunner(function, spec, self._channel)
        self._channel.send_loaded(None)
        return 0


def has_room(disk_bytes: int) -> bool:
    """Whether at least half of the disk is free. 0: the disk has no limit. A larger disk is not that of the sandbox."""
    if not disk_bytes:
        return True
    disk = os.statvfs(".")
    total = disk.f_blocks * disk.f_frsize
    return total > 2 * disk_bytes or (2 * disk.f_bavail >= disk.f_blocks and 2 * disk.f_favail >= disk.f_files)


def read_content(place: bytes, content: bytes) -> bytes:
    """The content of a command, or of the file that it names. The file is deleted: it may be large."""
    data = base64.b64decode(content)
    if place == b"inline":
        return data
    with open(data, "rb") as file:
        with contextlib.suppress(OSError):  # a file in the memory of the owner has no name to delete
            os.unlink(data)
        return file.read()


def run_once(token: str) -> NoReturn:
    channel = ReplyChannel()
    channel.begin(token)
    with open(0, "rb", closefd=False) as file:
        arguments = file.read()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    with open(SPEC_FILE, "rb") as file:
        spec = pickle.load(file)
    try:
        function = load(spec)
    except FunctionFailure as failure:
        flush()
        channel.send_loaded(failure)
        os._exit(1)
    FunctionRunner(function, spec, channel).reply(lambda: arguments)
    os._exit(ANSWERED if channel.no_orphans and has_room(spec["disk_bytes"]) else 1)


def run() -> None:
    """The program in a sandbox."""
    words = sys.argv[1:]
    sys.argv[1:] = []
    # The first entry is this directory: from here on modules come from the image, and the library that was brought.
    sys.path[:1] = [os.path.join(os.getcwd(), LIBRARY)]
    os.chdir("..")
    become_subreaper()  # so that what calls leave running can be found
    try:
        if words[0] == "serve":
            commands, statuses = int(words[1]), int(words[2])
            for fd in (commands, statuses):
                os.set_inheritable(fd, False)
            CommandLoop(commands, statuses).serve()
        else:
            run_once(words[1])
    except BaseException:
        traceback.print_exc()
        flush()
        os._exit(PROGRAM_FAILED)
    flush()
    os._exit(0)  # threads of the function's module do not keep it


def main(fd: int) -> NoReturn:
    """The program as a child of a fork server."""
    become_subreaper()  # so that what calls leave running can be found
    os.set_inheritable(fd, False)
    try:
        CommandLoop(fd, fd).serve()
    except ConnectionError:  # the owner has gone
        pass
    except BaseException:
        traceback.print_exc()
        flush()
        os._exit(PROGRAM_FAILED)
    flush()
    os._exit(0)
