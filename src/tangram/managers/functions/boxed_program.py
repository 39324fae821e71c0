"""The program inside an instance sandbox: it loads the function once and makes its calls, one after the other.

It goes into sandboxes beside `template`, of which it is an instance, and `boxed_msgpack`; it needs nothing but Python.
Decides nothing: it does what comes in as a command. Promises nothing to whoever reads its answers: what runs here
belongs to a tenant, and so does everything that it says.

    hold COMMANDS STATUSES   takes the place of a held shell: reads commands, each ended by NUL, from one descriptor and
                             writes a status line to the other when one is done, as processes.streams describes. So the
                             manager moves it into the place of each action, and what it does there is the action's
    once TOKEN               one call, with the arguments on its standard input

What a call prints goes to the streams of the action. Its answer goes to the first of them, after a mark that only the
owner and this program know, when nothing else of the call can write there any more.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from . import template

DIRECTORY = ".tangram"
"""Below the workspace: where all of this lies."""
PACKAGE = "tangram_inside"
LIBRARY = "library"
SPEC = "spec"
STARTER = (
    "import sys\n"
    "if sys.version_info < (3, 10): sys.exit('functions need Python 3.10 or newer, and this is ' + sys.version)\n"
    f"from {PACKAGE}.boxed_program import main\n"
    "main()"
)
"""What the interpreter is given, in DIRECTORY."""

TOKEN_BYTES = 32
BEGIN, ANSWER = b"\0tangram begin ", b"\0tangram answer "
"""Before the token, in what a call writes: from there on it is the call's, and here is its answer."""
FRAME = struct.Struct("!I")
"""After the token of an answer: its length."""
NONE = b"\xc0"
"""The value that is none, as msgpack."""
ANSWERED = 114
"""With which the process of a single call ends that has answered and left nothing."""
COMMAND = re.compile(rb"tangram:(load|call):([0-9a-f]{32}):(here|file):([A-Za-z0-9+/=]*)")
READ_BYTES = 1 << 16
END_S_MAX = 1.0
"""For what a call has left running to be gone. If it is not, the whole sandbox goes."""
PAUSE_S = 0.001


def arguments_file(token: str) -> str:
    return f"{DIRECTORY}/arguments-{token}"


# ---- answers ------------------------------------------------------------------------------------------------------


class Channel:
    """Where answers go: the first stream that this program was started with, whatever a call makes of it."""

    def __init__(self) -> None:
        self._streams = (os.dup(1), os.dup(2))
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._own = template.children()
        """Children that importing has started. They live as long as this process."""
        self.token = ""
        self.tidy = True
        """Of the last call: nothing that it started is left."""

    def begin(self, token: str) -> None:
        for target, fd in enumerate(self._streams, start=1):
            os.dup2(fd, target)
        self.token = token
        self._write(BEGIN + token.encode())

    def keep_children(self) -> None:
        self._own = template.children()

    def sendall(self, data: bytes) -> None:
        """What a call has started ends before it answers, and what it goes on writing is not heard: nobody else writes
        between the parts of an answer."""
        self.tidy = self._end_others()
        for target in (1, 2):
            os.dup2(self._nowhere, target)
        self._write(ANSWER + self.token.encode() + FRAME.pack(len(data)) + data)

    def say(self, failure: template.Failed | None) -> None:
        """Without an instance."""
        said = {"failure": failure and failure.said, "cpu_s": 0.0, "peak_bytes": 0, "keep": failure is None}
        head = template.msgspec.msgpack.encode(said)  # type: ignore[attr-defined]
        self.sendall(template.REPLY.pack(len(head), len(NONE)) + head + NONE)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._streams[0], left) :]

    def _end_others(self) -> bool:
        deadline = time.monotonic() + END_S_MAX
        while rest := [pid for pid in template.children() if pid not in self._own]:
            for pid in rest:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True


class Caller(template.Instance):
    """Makes calls in this process."""

    def answer(self, arguments: Callable[[], bytes]) -> None:
        try:
            self._answer(arguments())
        except MemoryError:
            self._raise_limit()
            self._reply(self._out_of_memory("").said, b"", 0.0, keep=False)

    def _reply(self, failure: template.Message | None, value: bytes, used_s: float, *, keep: bool) -> None:
        """What the call has started does not keep it from another one: it ends before the answer."""
        keep = failure is None or failure["kind"] != "memory"
        super()._reply(failure, value, used_s, keep=keep)

    def _call(self, data: bytes) -> bytes:
        process = os.getpid()
        try:
            return super()._call(data)
        except template.Failed as failed:
            raise advised(failed, self._spec) if failed.said["kind"] == "arguments" else failed from None
        finally:
            if os.getpid() != process:  # the function forked, and this is the other one
                os._exit(template.OUR_EXIT)


def load(spec: template.Message) -> Callable[..., Any]:
    """Raises Failed."""
    here = sys.version_info[:2]
    if spec["pickled"] and spec["python"] and tuple(spec["python"]) != here:
        theirs, ours = ".".join(map(str, spec["python"])), ".".join(map(str, here))
        said = f"{spec['name']} was pickled by Python {theirs}, and image {spec['image']} has Python {ours}"
        raise template.Failed("import", f"{said}; code goes by value between equal versions only: use one of them")
    try:
        return template.load({**spec, "paths": list(sys.path)})
    except template.Failed as failed:
        raise advised(failed, spec) from None


def advised(failed: template.Failed, spec: template.Message) -> template.Failed:
    """With what to do about a module that is not there."""
    cause = failed.__context__
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        said = f"there is no module {cause.name} in image {spec['image']}; put it into an image"
        failed.said["message"] += f"; {said}, or define what you use of it in your script"
    return failed


# ---- the held program ---------------------------------------------------------------------------------------------


class Held:
    def __init__(self, commands: int, statuses: int) -> None:
        self._commands = commands
        self._statuses = statuses
        self._channel = Channel()
        self._caller: Caller | None = None
        self._disk_bytes = 0

    def serve(self) -> None:
        heard = b""
        while data := os.read(self._commands, READ_BYTES):
            heard += data
            while b"\0" in heard:
                text, _, heard = heard.partition(b"\0")
                status = self._do(text)
                os.write(self._statuses, b"%d\n" % status)

    def _do(self, text: bytes) -> int:
        """Its status: 0 if another call may come."""
        found = COMMAND.search(text)
        if found is None:
            return 1
        what, token, place, content = found[1], found[2].decode(), found[3], found[4]
        self._channel.begin(token)
        if what == b"load":
            return self._load()
        assert self._caller is not None
        self._caller.answer(lambda: read_arguments(token, place, content))
        return 0 if self._channel.tidy and has_room(self._disk_bytes) else 1

    def _load(self) -> int:
        spec = read_spec()
        os.unlink(f"{DIRECTORY}/{SPEC}")  # nobody reads it again, and it may be large
        try:
            function = load(spec)
        except template.Failed as failed:
            template.flush()
            self._channel.say(failed)
            return 1
        template.flush()
        self._channel.keep_children()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(Exception):  # the module of the function may have replaced it
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._disk_bytes = spec["disk_bytes"]
        self._caller = Caller(function, spec, self._channel)  # type: ignore[arg-type]
        self._channel.say(None)
        return 0


def has_room(disk_bytes: int) -> bool:
    """Whether calls so far have left half of the disk. One that is larger is not that of the sandbox."""
    found = os.statvfs(".")
    total = found.f_blocks * found.f_frsize
    return total > 2 * disk_bytes or (2 * found.f_bavail >= found.f_blocks and 2 * found.f_favail >= found.f_files)


def read_arguments(token: str, place: bytes, content: bytes) -> bytes:
    if place == b"here":
        return base64.b64decode(content)
    name = arguments_file(token)
    with open(name, "rb") as file:
        os.unlink(name)
        return file.read()


def read_spec() -> template.Message:
    fd = os.open(f"{DIRECTORY}/{SPEC}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return template.read_spec(fd)
    finally:
        os.close(fd)


def run_once(token: str) -> NoReturn:
    channel = Channel()
    channel.begin(token)
    with open(0, "rb", closefd=False) as file:
        data = file.read()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    spec = read_spec()
    try:
        function = load(spec)
    except template.Failed as failed:
        template.flush()
        channel.say(failed)
        os._exit(1)
    Caller(function, spec, channel).answer(lambda: data)  # type: ignore[arg-type]
    os._exit(ANSWERED if channel.tidy and has_room(spec["disk_bytes"]) else 1)


def main() -> None:
    words = sys.argv[1:]
    sys.argv[1:] = []
    # The first entry is this directory: from here on modules come from the image, and the library that was brought.
    sys.path[:1] = [os.path.join(os.getcwd(), LIBRARY)]
    os.chdir("..")
    template._libc.prctl(template.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        if words[0] == "hold":
            commands, statuses = int(words[1]), int(words[2])
            for fd in (commands, statuses):
                os.set_inheritable(fd, False)
            Held(commands, statuses).serve()
        else:
            run_once(words[1])
    except BaseException:
        traceback.print_exc()
        template.flush()
        os._exit(template.OUR_EXIT)
    template.flush()
    os._exit(0)  # threads of the function's module do not keep it
