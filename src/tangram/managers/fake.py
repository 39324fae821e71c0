"""The fake manager: runs no programs. What becomes of an action is scripted; its files are a dict.

For tests and simulation: it keeps the contract of managers on whatever loop it is used, on virtual time too, since all
that it does with time is to ask the loop for a call later. Owns nothing outside itself. Remembers what was asked, the
last CALLS_MAX things of it.

    manager = FakeManager({"tests": Script(duration_s=lambda action, grant: 8.0 * CORE / grant.width)})

A Script is found by the key of an action; without one, the command itself says what happens. It is understood as far as
it is made of these, with `;`, a new line or `&&` between them:

    echo WORD...   cat [FILE...]   printenv NAME...   pwd   cd DIR   sleep SECONDS   true   false   exit N

each with `> FILE` or `>&2` after it if you like; `cat` without a file says its standard input. Any other command is not
found (127). All of it happens at the end of the action, so one that is stopped has done nothing.
"""

from __future__ import annotations

import asyncio
import collections
import posixpath
import shlex
import tarfile
from collections.abc import Callable, Mapping
from io import BytesIO
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import msgspec

from tangram.core.action import NO_USAGE, Action, Usage
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.errors import FileFailed, InvalidAction, ManagerError
from tangram.managers.base import Lease
from tangram.managers.work import (
    GIB,
    HOST_IMAGE,
    WORKSPACE,
    Close,
    Commit,
    Ended,
    Entry,
    Exec,
    Executed,
    Open,
    Prepare,
    SandboxSpec,
    Work,
    inside,
    require_below,
    require_forgettable,
)
from tangram.processes.capture import Capture
from tangram.processes.streams import STDERR, STDOUT, Output
from tangram.processes.width import filled_in, told, whole_cores

NOT_FOUND = 127
CALLS_MAX = 10_000
"""More than a test asks for; a service that runs for days on it must not remember all."""
DIRECTORY_MODE = 0o755
FILE_MODE = 0o644

Duration = float | Callable[[Action, Grant], float]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the actions of one key."""

    duration_s: Duration | None = None
    """None: as long as its command sleeps."""
    executed: Executed | None = None
    """None: what its command says."""
    usage: Usage = NO_USAGE
    start_failures: int = 0
    """So many times the start of an action fails, each time in a way that may be tried again."""
    lost_after_s: float | None = None
    """Our side fails after that time, unless the action has ended before."""
    ends: bool = True
    """False: it runs until it is stopped."""
    stop_s: float = 0.0
    """How long it takes to stop it."""


class Call(NamedTuple):
    """One thing that was asked of the manager, or that it told."""

    at_s: float
    """By the clock of the loop."""
    what: str
    """The method: `start`, `resize`, `stop`, `read` …; or `ended`."""
    subject: str
    """The id of an action, the name of a sandbox, or that of an image."""
    detail: object = None


class File(NamedTuple):
    content: bytes
    mode: int = FILE_MODE


class FakeSandbox:
    def __init__(self, spec: SandboxSpec, files: Mapping[str, File], directories: set[str]) -> None:
        self.spec = spec
        self.files = dict(files)
        """By absolute path."""
        self.directories = {"/", WORKSPACE, *directories}
        self.cwd_by_session: dict[str, str] = {}
        self.leases: dict[FakeLease, None] = {}

    # ---- files ----

    def content(self, path: str) -> bytes:
        found = self.files.get(path)
        if found is None:
            raise FileFailed(path, "Is a directory" if path in self.directories else "No such file or directory")
        return found.content

    def put(self, path: str, file: File) -> None:
        if path in self.directories:
            raise FileFailed(path, "Is a directory")
        self.make_directory(posixpath.dirname(path))
        self.files[path] = file

    def make_directory(self, path: str) -> None:
        while path not in self.directories:
            if path in self.files:
                raise FileFailed(path, "Not a directory")
            self.directories.add(path)
            path = posixpath.dirname(path)

    def below(self, path: str) -> list[str]:
        """All paths in a directory, in order."""
        start = path.rstrip("/") + "/"
        return sorted(each for each in (*self.files, *self.directories) if each.startswith(start) and each != "/")

    def require(self, path: str) -> None:
        if path not in self.files and path not in self.directories:
            raise FileFailed(path, "No such file or directory")


# ---- commands -----------------------------------------------------------------------------------------------------


class Interpreter:
    """What a command line says and does, in the little language of the fake."""

    def __init__(self, box: FakeSandbox, work: Exec, width: int) -> None:
        self._box = box
        self._work = work
        self._env = told(width, box.spec.env | work.env)
        command = filled_in(work.command, width)
        self._steps = _parsed(command) if isinstance(command, str) else [("", list(command))]
        start = box.cwd_by_session.get(work.session, WORKSPACE)
        self.cwd = posixpath.normpath(posixpath.join(start, work.cwd))
        self.out = {STDOUT: bytearray(), STDERR: bytearray()}
        self.exited = False
        """By `exit`."""

    @property
    def duration_s(self) -> float:
        return sum(float(words[1]) for _, words in self._steps if words[0] == "sleep" and len(words) == 2)

    def run(self) -> int:
        """Its exit code."""
        if self.cwd not in self._box.directories:
            return self._fail(NOT_FOUND, f"{self.cwd}: No such file or directory")
        code = 0
        for joint, words in self._steps:
            if self.exited or (joint == "&&" and code != 0):
                break
            code = self._one(words)
        return code

    def _one(self, words: list[str]) -> int:
        target: str | int = STDOUT
        if isinstance(self._work.command, str):
            words, target = _redirected(words)
        name, *arguments = words
        do = _COMMANDS.get(name)
        if do is None:
            return self._fail(NOT_FOUND, f"{name}: command not found")
        try:
            code, said = do(self, arguments)
            if isinstance(target, int):
                self.out[target] += said
            else:
                self._box.put(self._path(target), File(said))
            return code
        except FileFailed as error:
            return self._fail(1, f"{name}: {error}")

    def _fail(self, code: int, text: str) -> int:
        self.out[STDERR] += f"{text}\n".encode()
        return code

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, path))

    def _echo(self, arguments: list[str]) -> tuple[int, bytes]:
        return 0, " ".join(arguments).encode() + b"\n"

    def _cat(self, arguments: list[str]) -> tuple[int, bytes]:
        if not arguments:
            return 0, self._work.stdin
        return 0, b"".join(self._box.content(self._path(path)) for path in arguments)

    def _printenv(self, arguments: list[str]) -> tuple[int, bytes]:
        known = [name for name in arguments if name in self._env]
        return int(known != arguments), "".join(f"{self._env[name]}\n" for name in known).encode()

    def _pwd(self, arguments: list[str]) -> tuple[int, bytes]:
        return 0, f"{self.cwd}\n".encode()

    def _cd(self, arguments: list[str]) -> tuple[int, bytes]:
        path = self._path(arguments[0] if arguments else WORKSPACE)
        if path not in self._box.directories:
            raise FileFailed(path, "No such file or directory")
        self.cwd = path
        return 0, b""

    def _exit(self, arguments: list[str]) -> tuple[int, bytes]:
        self.exited = True
        return int(arguments[0]) if arguments else 0, b""


_COMMANDS: dict[str, Callable[[Interpreter, list[str]], tuple[int, bytes]]] = {
    "echo": Interpreter._echo,
    "cat": Interpreter._cat,
    "printenv": Interpreter._printenv,
    "pwd": Interpreter._pwd,
    "cd": Interpreter._cd,
    "exit": Interpreter._exit,
    "sleep": lambda interpreter, arguments: (0, b""),
    "true": lambda interpreter, arguments: (0, b""),
    "false": lambda interpreter, arguments: (1, b""),
}


def _parsed(command: str) -> list[tuple[str, list[str]]]:
    """Commands, each with what stands before it: `;` or `&&`."""
    lexer = shlex.shlex(command.replace("\n", ";"), posix=True, punctuation_chars=";&>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    steps: list[tuple[str, list[str]]] = [(";", [])]
    try:
        for word in lexer:
            if word in (";", "&&"):
                steps.append((word, []))
            else:
                steps[-1][1].append(word)
    except ValueError as error:
        raise ManagerError(f"the fake manager cannot read {command!r}: {error}", retry=False) from error
    return [(joint, words) for joint, words in steps if words]


def _redirected(words: list[str]) -> tuple[list[str], str | int]:
    if len(words) > 2 and words[-2] == ">":
        return words[:-2], words[-1]
    if len(words) > 2 and words[-2:] == [">&", "2"]:
        return words[:-2], STDERR
    return words, STDOUT


# ---- leases -------------------------------------------------------------------------------------------------------


class FakeLease:
    """Ends by a call of the loop; nothing waits for it in between."""

    def __init__(self, manager: FakeManager, action: str, script: Script, duration_s: float) -> None:
        self._manager = manager
        self._action = action
        self._script = script
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._stopping = False
        self._began_s = self._loop.time()
        self._duration_s = duration_s
        if script.ends:
            self._timers.append(self._loop.call_later(duration_s, self._come_to_the_end))
        if script.lost_after_s is not None:
            self._timers.append(self._loop.call_later(script.lost_after_s, self.lose, "the script says so"))

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    def resize(self, *, reserved: int, limit: int) -> None:
        self._manager.note("resize", self._action, (reserved, limit))

    def used(self) -> float | None:
        """Its part of what the script says of the whole."""
        if self._ended.done() or not self._script.ends:
            return None
        passed_s = self._loop.time() - self._began_s
        return self._script.usage.cpu_s * min(1.0, passed_s / self._duration_s if self._duration_s else 1.0)

    async def stop(self) -> None:
        self._manager.note("stop", self._action)
        if not self._ended.done() and not self._stopping:
            self._stopping = True
            self._cancel_timers()
            self._timers.append(self._loop.call_later(self._script.stop_s, self.finish, self._stopped()))
        await asyncio.wait({self._ended})

    def lose(self, why: str) -> None:
        self.finish(Ended(usage=self._script.usage, lost=why))

    def finish(self, ended: Ended) -> None:
        if self._ended.done():
            return
        self._cancel_timers()
        self._ended.set_result(ended)
        self._manager.note("ended", self._action, ended)

    def _come_to_the_end(self) -> None:
        self.finish(Ended(usage=self._script.usage))

    def _stopped(self) -> Ended:
        return Ended(usage=self._script.usage)

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []


class FakeExecLease(FakeLease):
    def __init__(
        self, manager: FakeManager, action: Action, grant: Grant, script: Script, box: FakeSandbox, work: Exec,
        output: Output | None,
    ) -> None:  # fmt: skip
        self._box = box
        self._work = work
        self._output = output
        self._cpus = whole_cores(grant.width)
        self._interpreter = Interpreter(box, work, grant.width)
        duration = script.duration_s
        if duration is None:
            duration = self._interpreter.duration_s
        super().__init__(manager, action.id, script, duration(action, grant) if callable(duration) else duration)
        box.leases[self] = None
        if work.session:
            box.cwd_by_session.setdefault(work.session, WORKSPACE)

    def finish(self, ended: Ended) -> None:
        self._box.leases.pop(self, None)
        super().finish(ended)

    def _come_to_the_end(self) -> None:
        executed = self._script.executed
        self.finish(Ended(usage=self._script.usage, executed=self._interpreted() if executed is None else executed))

    def _interpreted(self) -> Executed:
        interpreter, session = self._interpreter, self._work.session
        code = interpreter.run()
        if session and interpreter.exited:
            self._box.cwd_by_session.pop(session, None)
        elif session:
            self._box.cwd_by_session[session] = interpreter.cwd
        captures = {}
        for stream, said in interpreter.out.items():
            captures[stream] = Capture(self._work.capture_bytes_max)
            captures[stream].feed(bytes(said))
            if said:
                self._hand_on(stream, bytes(said))
        return Executed(
            exit_code=code,
            stdout=captures[STDOUT].content(),
            stderr=captures[STDERR].content(),
            stdout_bytes=captures[STDOUT].total_bytes,
            stderr_bytes=captures[STDERR].total_bytes,
            cpus=self._cpus,
            session_ended=bool(session) and interpreter.exited,
        )

    def _hand_on(self, stream: int, said: bytes) -> None:
        """A listener that fails is told no more: the program and its result have nothing to do with that."""
        try:
            if self._output is not None:
                self._output(stream, said)
        except Exception as error:
            self._output = None
            context = {"message": "the output callback of an action failed", "exception": error}
            self._loop.call_exception_handler(context)

    def _stopped(self) -> Ended:
        ended = self._box.cwd_by_session.pop(self._work.session, None) is not None
        return Ended(usage=self._script.usage, executed=Executed(session_ended=ended))


# ---- the manager --------------------------------------------------------------------------------------------------


class FakeManager:
    """Keeps the contract of managers without a program."""

    backend = "fake"
    isolates = True

    def __init__(
        self,
        scripts: Mapping[str, Script] | None = None,
        *,
        cores: float = 8.0,
        memory_bytes: int = 16 * GIB,
        node: str = "fake",
    ) -> None:
        """`scripts`: by the key of actions; that of the empty key is for all that have no other."""
        self._scripts = dict(scripts or {})
        self._pools = cpu_node(node, cores, memory_bytes / GIB)
        self._boxes: dict[str, FakeSandbox] = {}
        self._images: dict[str, FakeSandbox] = {}
        self._remembered: dict[str, str] = {}
        self._starts_by_action: dict[str, int] = {}
        """Of those alone whose start is scripted to fail."""
        self.calls: collections.deque[Call] = collections.deque(maxlen=CALLS_MAX)
        """What was asked, in order."""

    def pools(self) -> tuple[Pool, ...]:
        return self._pools

    def sandboxes(self) -> tuple[str, ...]:
        return tuple(self._boxes)

    def note(self, what: str, subject: str, detail: object = None) -> None:
        self.calls.append(Call(asyncio.get_running_loop().time(), what, subject, detail))

    async def __aenter__(self) -> Self:
        self.note("enter", "")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.note("exit", "")
        for name in list(self._boxes):
            self._close(name, "the manager of its sandbox ended")
        self._images, self._remembered = {}, {}

    # ---- work ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        self.note("start", action.id, work)
        script = self._scripts.get(action.key) or self._scripts.get("", Script())
        if script.start_failures:
            starts = self._starts_by_action[action.id] = self._starts_by_action.get(action.id, 0) + 1
            if starts <= script.start_failures:
                raise ManagerError(f"start {starts} of action {action.id} fails: the script says so")
        name = action.sandbox
        if isinstance(work, Exec):
            return FakeExecLease(self, action, grant, script, self._box(name), work, output)
        if isinstance(work, Open):
            self._open(name, work.spec)
        elif isinstance(work, Commit):
            box = self._box(name)
            self._images[work.image] = FakeSandbox(box.spec, box.files, box.directories)
        elif isinstance(work, Close):
            self._close(name, f"sandbox {name} was closed while the action ran")
        elif isinstance(work, Prepare):
            self._require_image(work.spec.image)
        else:
            raise ManagerError(f"the fake manager knows no {type(work).__name__}", retry=False)
        return FakeLease(self, action.id, Script(), 0.0)

    def _open(self, name: str, spec: SandboxSpec) -> None:
        if name in self._boxes:
            raise ManagerError(f"sandbox {name} is open already", retry=False)
        self._require_image(spec.image)
        image = self._images.get(spec.image)
        self._boxes[name] = FakeSandbox(spec, image.files if image else {}, image.directories if image else set())

    def _close(self, name: str, why: str) -> None:
        box = self._boxes.pop(name, None)
        if box is not None:
            for lease in list(box.leases):
                lease.lose(why)

    def _box(self, name: str) -> FakeSandbox:
        box = self._boxes.get(name)
        if box is None:
            raise ManagerError(f"there is no sandbox {name}: it was closed, or never opened", retry=False)
        return box

    # ---- files ----

    def _looked_up(self, what: str, sandbox: str, path: str) -> tuple[FakeSandbox, str]:
        self.note(what, sandbox, path)
        return self._box(sandbox), posixpath.normpath(inside(path))

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes:
        box, at = self._looked_up("read", sandbox, path)
        content = box.content(at)
        if len(content) > bytes_max:
            raise FileFailed(path, f"has {len(content)} bytes, more than the {bytes_max} that may be read")
        return content

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        box, at = self._looked_up("write", sandbox, path)
        box.put(at, File(content, mode))

    async def delete(self, sandbox: str, path: str) -> None:
        box, at = self._looked_up("delete", sandbox, path)
        box.require(at)
        if at in ("/", WORKSPACE):
            raise FileFailed(path, "cannot be deleted: it is the workspace, or holds it")
        for each in [at, *box.below(at)]:
            box.files.pop(each, None)
            box.directories.discard(each)

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        box, at = self._looked_up("pack", sandbox, path)
        box.require(at)
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for each in [at, *box.below(at)]:
                member = tarfile.TarInfo(each[len(posixpath.dirname(at).rstrip("/")) + 1 :] or ".")
                file = box.files.get(each)
                if file is None:
                    member.type, member.mode = tarfile.DIRTYPE, DIRECTORY_MODE
                    tar.addfile(member)
                else:
                    member.size, member.mode = len(file.content), file.mode
                    tar.addfile(member, BytesIO(file.content))
        if packed.tell() > bytes_max:
            raise FileFailed(path, f"is larger than {bytes_max} bytes as a tar")
        into.write(packed.getvalue())

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        box, at = self._looked_up("unpack", sandbox, path)
        box.make_directory(at)
        try:
            with tarfile.open(fileobj=tar, mode="r|") as members:
                for member in members:
                    require_below(path, member.name)
                    target = posixpath.normpath(posixpath.join(at, member.name))
                    if member.isdir():
                        box.make_directory(target)
                    elif member.islnk():
                        original = box.files.get(posixpath.normpath(posixpath.join(at, member.linkname)))
                        if original is None:
                            raise FileFailed(path, f"the tar has a link to {member.linkname!r}, which is not there")
                        box.put(target, original)
                    elif (content := members.extractfile(member)) is not None:
                        box.put(target, File(content.read(), member.mode))
        except tarfile.TarError as error:
            raise FileFailed(path, f"is not a tar that can be read: {error}") from error

    # ---- images ----

    async def add_image(self, path: str) -> str:
        """An image without files, under that path as its name."""
        self.note("add_image", path)
        self._images[path] = FakeSandbox(SandboxSpec(), {}, set())
        return path

    async def recall_image(self, key: str) -> str:
        self.note("recall_image", key)
        return self._remembered.get(key, "")

    async def remember_image(self, key: str, name: str) -> None:
        self.note("remember_image", key, name)
        self._require_image(name)
        self._remembered[key] = name

    async def forget_image(self, name: str) -> None:
        self.note("forget_image", name)
        require_forgettable(name)
        self._require_image(name)
        self._remembered = {key: image for key, image in self._remembered.items() if image != name}
        self._images.pop(name, None)

    def _require_image(self, name: str) -> None:
        if name != HOST_IMAGE and name not in self._images:
            raise InvalidAction("sandbox.image", name, f"one of {', '.join([HOST_IMAGE, *self._images])}")

    async def list(self, sandbox: str, path: str) -> list[Entry]:
        box, at = self._looked_up("list", sandbox, path)
        box.require(at)
        if at in box.files:
            raise FileFailed(path, "Not a directory")
        found = []
        for each in box.below(at):
            if posixpath.dirname(each) == at:
                file = box.files.get(each)
                kind, size, mode = ("file", len(file.content), file.mode) if file else ("dir", 0, DIRECTORY_MODE)
                found.append(Entry(name=posixpath.basename(each), kind=kind, bytes=size, mode=mode))
        return found
