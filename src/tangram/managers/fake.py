"""The fake manager: runs no programs. The course of an action is scripted; files are a dict.

For tests and simulation: implements the contract of managers on any event loop, also in virtual time, because it only
uses timers of the loop. Owns nothing outside itself. Records the last CALLS_MAX calls.

    manager = FakeManager({"tests": Script(duration_s=lambda action, grant: 8.0 * CORE / grant.width)})

The key of an action selects its Script; without one, the command itself determines the result. It may consist of these,
with `;`, a new line or `&&` between them:

    echo WORD...   cat [FILE...]   printenv NAME...   pwd   cd DIR   sleep SECONDS   true   false   exit N

each optionally followed by `> FILE` or `>&2`; `cat` without a file prints its standard input. Any other command is not
found (127). All effects happen at the end of the action, so a stopped one has none.
"""

from __future__ import annotations

import asyncio
import collections
import posixpath
import shlex
import tarfile
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import BinaryIO, NamedTuple, Self

import msgspec

from tangram.core.action import NO_USAGE, Action, Usage
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.errors import FileFailed, InvalidAction, ManagerError
from tangram.managers.base import Lease, sandbox_not_found
from tangram.managers.work import (
    GIB,
    HOST_IMAGE,
    WORKSPACE,
    Close,
    Commit,
    Exec,
    ExecResult,
    FileEntry,
    LeaseResult,
    Open,
    Prepare,
    SandboxSpec,
    Work,
    require_forgettable,
    require_safe_member,
    sandbox_path,
)
from tangram.processes.capture import Capture
from tangram.processes.exit_codes import NOT_FOUND
from tangram.processes.streams import STDERR, STDOUT, GuardedOutput, Output
from tangram.processes.width import substitute_width, whole_cores, with_width

CALLS_MAX = 10_000
"""Maximum recorded calls: more than a test needs, and bounded for a service that runs on it for days."""
DIRECTORY_MODE = 0o755
FILE_MODE = 0o644

Duration = float | Callable[[Action, Grant], float]


class FakeScript(msgspec.Struct, frozen=True, kw_only=True):
    """The course of the actions of one key."""

    duration_s: Duration | None = None
    """None: as long as its command sleeps."""
    executed: ExecResult | None = None
    """None: the result of its command."""
    usage: Usage = NO_USAGE
    start_failures: int = 0
    """Number of times that the start of an action fails, each time retryable."""
    lost_after_s: float | None = None
    """The infrastructure fails after that time, unless the action has ended before."""
    ends: bool = True
    """False: it runs until it is stopped."""
    stop_s: float = 0.0
    """How long it takes to stop it."""


class RecordedCall(NamedTuple):
    """One call of the manager, or one end that it reported."""

    at_s: float
    """The time of the clock of the loop."""
    method: str
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
        """Files by absolute path."""
        self.directories = {"/", WORKSPACE, *directories}
        self.cwd_by_session: dict[str, str] = {}
        self.leases: dict[FakeLease, None] = {}

    # ---- files ----

    def content(self, path: str) -> bytes:
        data = self.files.get(path)
        if data is None:
            raise FileFailed(path, "Is a directory" if path in self.directories else "No such file or directory")
        return data.content

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

    def paths_below(self, path: str) -> list[str]:
        """All paths in a directory, in order."""
        start = path.rstrip("/") + "/"
        return sorted(path for path in (*self.files, *self.directories) if path.startswith(start) and path != "/")

    def require_exists(self, path: str) -> None:
        if path not in self.files and path not in self.directories:
            raise FileFailed(path, "No such file or directory")


# ---- commands -----------------------------------------------------------------------------------------------------


class Interpreter:
    """The output and the effects of a command line in the small language of the fake."""

    def __init__(self, sandbox: FakeSandbox, work: Exec, width: int) -> None:
        self._sandbox = sandbox
        self._work = work
        self._env = with_width(width, sandbox.spec.env | work.env)
        command = substitute_width(work.command, width)
        self._steps = _parse(command) if isinstance(command, str) else [("", list(command))]
        start = sandbox.cwd_by_session.get(work.session, WORKSPACE)
        self.cwd = posixpath.normpath(posixpath.join(start, work.cwd))
        self.out = {STDOUT: bytearray(), STDERR: bytearray()}
        self.exited = False
        """Set by `exit`."""

    @property
    def duration_s(self) -> float:
        return sum(float(words[1]) for _, words in self._steps if words[0] == "sleep" and len(words) == 2)

    def run(self) -> int:
        """Runs the command. Returns its exit code."""
        if self.cwd not in self._sandbox.directories:
            return self._fail(NOT_FOUND, f"{self.cwd}: No such file or directory")
        code = 0
        for joint, words in self._steps:
            if self.exited or (joint == "&&" and code != 0):
                break
            code = self._run_step(words)
        return code

    def _run_step(self, words: list[str]) -> int:
        target: str | int = STDOUT
        if isinstance(self._work.command, str):
            words, target = _split_redirect(words)
        name, *arguments = words
        do = _COMMANDS.get(name)
        if do is None:
            return self._fail(NOT_FOUND, f"{name}: command not found")
        try:
            code, content = do(self, arguments)
            if isinstance(target, int):
                self.out[target] += content
            else:
                self._sandbox.put(self._path(target), File(content))
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
        return 0, b"".join(self._sandbox.content(self._path(path)) for path in arguments)

    def _printenv(self, arguments: list[str]) -> tuple[int, bytes]:
        known = [name for name in arguments if name in self._env]
        return int(known != arguments), "".join(f"{self._env[name]}\n" for name in known).encode()

    def _pwd(self, arguments: list[str]) -> tuple[int, bytes]:
        return 0, f"{self.cwd}\n".encode()

    def _cd(self, arguments: list[str]) -> tuple[int, bytes]:
        path = self._path(arguments[0] if arguments else WORKSPACE)
        if path not in self._sandbox.directories:
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


def _parse(command: str) -> list[tuple[str, list[str]]]:
    """Commands, each with the operator before it: `;` or `&&`."""
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


def _split_redirect(words: list[str]) -> tuple[list[str], str | int]:
    if len(words) > 2 and words[-2] == ">":
        return words[:-2], words[-1]
    if len(words) > 2 and words[-2:] == [">&", "2"]:
        return words[:-2], STDERR
    return words, STDOUT


# ---- leases -------------------------------------------------------------------------------------------------------


class FakeLease:
    """Ends by a timer of the loop; no task waits for it."""

    def __init__(self, manager: FakeManager, action: str, script: FakeScript, duration_s: float) -> None:
        self._manager = manager
        self._action = action
        self._script = script
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[LeaseResult] = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._stopping = False
        self._started_s = self._loop.time()
        self._duration_s = duration_s
        if script.ends:
            self._timers.append(self._loop.call_later(duration_s, self._complete))
        if script.lost_after_s is not None:
            self._timers.append(self._loop.call_later(script.lost_after_s, self.mark_lost, "lost as scripted"))

    async def wait(self) -> LeaseResult:
        return await asyncio.shield(self._result)

    def resize(self, *, reserved: int, limit: int) -> None:
        self._manager.record_call("resize", self._action, (reserved, limit))

    def cpu_seconds(self) -> float | None:
        """The share of this lease in the scripted total."""
        if self._result.done() or not self._script.ends:
            return None
        passed_s = self._loop.time() - self._started_s
        return self._script.usage.cpu_s * min(1.0, passed_s / self._duration_s if self._duration_s else 1.0)

    async def stop(self) -> None:
        self._manager.record_call("stop", self._action)
        if not self._result.done() and not self._stopping:
            self._stopping = True
            self._cancel_timers()
            self._timers.append(self._loop.call_later(self._script.stop_s, self.finish, self._stop_result()))
        await asyncio.wait({self._result})

    def mark_lost(self, why: str) -> None:
        self.finish(LeaseResult(usage=self._script.usage, lost=why))

    def finish(self, ended: LeaseResult) -> None:
        if self._result.done():
            return
        self._cancel_timers()
        self._result.set_result(ended)
        self._manager.record_call("ended", self._action, ended)

    def _complete(self) -> None:
        self.finish(LeaseResult(usage=self._script.usage))

    def _stop_result(self) -> LeaseResult:
        return LeaseResult(usage=self._script.usage)

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []


class FakeExecLease(FakeLease):
    def __init__(
        self, manager: FakeManager, action: Action, grant: Grant, script: FakeScript, sandbox: FakeSandbox, work: Exec,
        output: Output | None,
    ) -> None:  # fmt: skip
        self._sandbox = sandbox
        self._work = work
        self._output = GuardedOutput(output)
        self._cpus = whole_cores(grant.width)
        self._interpreter = Interpreter(sandbox, work, grant.width)
        duration = script.duration_s
        if duration is None:
            duration = self._interpreter.duration_s
        super().__init__(manager, action.id, script, duration(action, grant) if callable(duration) else duration)
        sandbox.leases[self] = None
        if work.session:
            sandbox.cwd_by_session.setdefault(work.session, WORKSPACE)

    def finish(self, ended: LeaseResult) -> None:
        self._sandbox.leases.pop(self, None)
        super().finish(ended)

    def _complete(self) -> None:
        executed = self._script.executed
        self.finish(
            LeaseResult(usage=self._script.usage, executed=self._run_command() if executed is None else executed)
        )

    def _run_command(self) -> ExecResult:
        interpreter, session = self._interpreter, self._work.session
        code = interpreter.run()
        if session and interpreter.exited:
            self._sandbox.cwd_by_session.pop(session, None)
        elif session:
            self._sandbox.cwd_by_session[session] = interpreter.cwd
        captures = {}
        for stream, content in interpreter.out.items():
            captures[stream] = Capture(self._work.capture_bytes_max)
            captures[stream].feed(bytes(content))
            if content:
                self._output(stream, bytes(content))
        return ExecResult(
            exit_code=code,
            stdout=captures[STDOUT].content(),
            stderr=captures[STDERR].content(),
            stdout_bytes=captures[STDOUT].total_bytes,
            stderr_bytes=captures[STDERR].total_bytes,
            cpus=self._cpus,
            session_ended=bool(session) and interpreter.exited,
        )

    def _stop_result(self) -> LeaseResult:
        ended = self._sandbox.cwd_by_session.pop(self._work.session, None) is not None
        return LeaseResult(usage=self._script.usage, executed=ExecResult(session_ended=ended))


# ---- the manager --------------------------------------------------------------------------------------------------


class FakeManager:
    """Implements the contract of managers without programs."""

    backend = "fake"
    isolates = True

    def __init__(
        self,
        scripts: Mapping[str, FakeScript] | None = None,
        *,
        cores: float = 8.0,
        memory_bytes: int = 16 * GIB,
        node: str = "fake",
    ) -> None:
        """`scripts`: by the key of actions; that of the empty key applies to all others."""
        self._scripts = dict(scripts or {})
        self._pools = cpu_node(node, cores, memory_bytes / GIB)
        self._sandboxes: dict[str, FakeSandbox] = {}
        self._images: dict[str, FakeSandbox] = {}
        self._image_by_key: dict[str, str] = {}
        self._starts_by_action: dict[str, int] = {}
        """Starts so far, only of actions whose start is scripted to fail."""
        self.calls: collections.deque[RecordedCall] = collections.deque(maxlen=CALLS_MAX)
        """The calls, in order."""

    def pools(self) -> tuple[Pool, ...]:
        return self._pools

    def sandboxes(self) -> tuple[str, ...]:
        return tuple(self._sandboxes)

    def record_call(self, what: str, subject: str, detail: object = None) -> None:
        self.calls.append(RecordedCall(asyncio.get_running_loop().time(), what, subject, detail))

    async def __aenter__(self) -> Self:
        self.record_call("enter", "")
        return self

    async def __aexit__(self, *error: object) -> None:
        self.record_call("exit", "")
        for name in list(self._sandboxes):
            self._close(name, "the manager of its sandbox ended")
        self._images, self._image_by_key = {}, {}

    # ---- work ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        self.record_call("start", action.id, work)
        script = self._scripts.get(action.key) or self._scripts.get("", FakeScript())
        if script.start_failures:
            starts = self._starts_by_action[action.id] = self._starts_by_action.get(action.id, 0) + 1
            if starts <= script.start_failures:
                raise ManagerError(f"start {starts} of action {action.id} fails as scripted")
        name = action.sandbox
        if isinstance(work, Exec):
            return FakeExecLease(self, action, grant, script, self._get_sandbox(name), work, output)
        if isinstance(work, Open):
            self._open(name, work.spec)
        elif isinstance(work, Commit):
            sandbox = self._get_sandbox(name)
            self._images[work.image] = FakeSandbox(sandbox.spec, sandbox.files, sandbox.directories)
        elif isinstance(work, Close):
            self._close(name, f"sandbox {name} was closed while the action ran")
        elif isinstance(work, Prepare):
            self._require_image(work.spec.image)
        else:
            raise ManagerError(f"the fake manager does not support {type(work).__name__}", retry=False)
        return FakeLease(self, action.id, FakeScript(), 0.0)

    def _open(self, name: str, spec: SandboxSpec) -> None:
        if name in self._sandboxes:
            raise ManagerError(f"sandbox {name} is open already", retry=False)
        self._require_image(spec.image)
        image = self._images.get(spec.image)
        self._sandboxes[name] = FakeSandbox(spec, image.files if image else {}, image.directories if image else set())

    def _close(self, name: str, why: str) -> None:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None:
            for lease in list(sandbox.leases):
                lease.mark_lost(why)

    def _get_sandbox(self, name: str) -> FakeSandbox:
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            raise sandbox_not_found(name)
        return sandbox

    # ---- files ----

    def _resolve(self, what: str, sandbox: str, path: str) -> tuple[FakeSandbox, str]:
        self.record_call(what, sandbox, path)
        return self._get_sandbox(sandbox), posixpath.normpath(sandbox_path(path))

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes:
        fake_sandbox, at = self._resolve("read", sandbox, path)
        content = fake_sandbox.content(at)
        if len(content) > bytes_max:
            raise FileFailed(path, f"has {len(content)} bytes, more than the {bytes_max} that may be read")
        return content

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        fake_sandbox, at = self._resolve("write", sandbox, path)
        fake_sandbox.put(at, File(content, mode))

    async def delete(self, sandbox: str, path: str) -> None:
        fake_sandbox, at = self._resolve("delete", sandbox, path)
        fake_sandbox.require_exists(at)
        if at in ("/", WORKSPACE):
            raise FileFailed(path, "cannot be deleted: it is the workspace, or holds it")
        for entry_path in [at, *fake_sandbox.paths_below(at)]:
            fake_sandbox.files.pop(entry_path, None)
            fake_sandbox.directories.discard(entry_path)

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        fake_sandbox, at = self._resolve("pack", sandbox, path)
        fake_sandbox.require_exists(at)
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for entry_path in [at, *fake_sandbox.paths_below(at)]:
                member = tarfile.TarInfo(entry_path[len(posixpath.dirname(at).rstrip("/")) + 1 :] or ".")
                file = fake_sandbox.files.get(entry_path)
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
        fake_sandbox, at = self._resolve("unpack", sandbox, path)
        fake_sandbox.make_directory(at)
        try:
            with tarfile.open(fileobj=tar, mode="r|") as members:
                for member in members:
                    require_safe_member(path, member.name)
                    target = posixpath.normpath(posixpath.join(at, member.name))
                    if member.isdir():
                        fake_sandbox.make_directory(target)
                    elif member.islnk():
                        original = fake_sandbox.files.get(posixpath.normpath(posixpath.join(at, member.linkname)))
                        if original is None:
                            raise FileFailed(path, f"the tar has a link to {member.linkname!r}, which is not there")
                        fake_sandbox.put(target, original)
                    elif (content := members.extractfile(member)) is not None:
                        fake_sandbox.put(target, File(content.read(), member.mode))
        except tarfile.TarError as error:
            raise FileFailed(path, f"is not a tar that can be read: {error}") from error

    # ---- images ----

    async def add_image(self, path: str) -> str:
        """An image without files, with that path as its name."""
        self.record_call("add_image", path)
        self._images[path] = FakeSandbox(SandboxSpec(), {}, set())
        return path

    async def find_image(self, key: str) -> str:
        self.record_call("find_image", key)
        return self._image_by_key.get(key, "")

    async def tag_image(self, key: str, name: str) -> None:
        self.record_call("tag_image", key, name)
        self._require_image(name)
        self._image_by_key[key] = name

    async def forget_image(self, name: str) -> None:
        self.record_call("forget_image", name)
        require_forgettable(name)
        self._require_image(name)
        self._image_by_key = {key: image for key, image in self._image_by_key.items() if image != name}
        self._images.pop(name, None)

    def _require_image(self, name: str) -> None:
        if name != HOST_IMAGE and name not in self._images:
            raise InvalidAction("sandbox.image", name, f"one of {', '.join([HOST_IMAGE, *self._images])}")

    async def list(self, sandbox: str, path: str) -> list[FileEntry]:
        fake_sandbox, at = self._resolve("list", sandbox, path)
        fake_sandbox.require_exists(at)
        if at in fake_sandbox.files:
            raise FileFailed(path, "Not a directory")
        entries = []
        for entry_path in fake_sandbox.paths_below(at):
            if posixpath.dirname(entry_path) == at:
                file = fake_sandbox.files.get(entry_path)
                kind, size, mode = ("file", len(file.content), file.mode) if file else ("dir", 0, DIRECTORY_MODE)
                entries.append(FileEntry(name=posixpath.basename(entry_path), kind=kind, bytes=size, mode=mode))
        return entries
