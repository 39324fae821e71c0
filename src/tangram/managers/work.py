"""Work: what an action does, and its result.

Owns the records that accompany an Action, from a client to a manager and back. All are serializable and travel over the
wire. Promises that an existing record is well formed; constructing an invalid one raises InvalidAction.
"""

from __future__ import annotations

import posixpath
import stat

import msgspec

from tangram.core.action import NO_USAGE, Usage
from tangram.errors import FileFailed, InvalidAction

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

COMMAND_BYTES_MAX = 128 * KIB - 1
"""The longest word of a command line: the limit of the kernel. Write longer programs to a file."""
ENVIRONMENT_BYTES_MAX = 64 * KIB
CAPTURE_BYTES_DEFAULT = 1 * MIB
"""The default limit of the captured output, for each stream."""
CAPTURE_BYTES_MAX = 1 * GIB
"""The largest limit that a caller may request."""
MEMORY_BYTES_MIN = 4 * MIB
"""The least memory of a sandbox: with less, not even a shell starts."""

BYTES_MAX = 1 << 53
PROCESSES_MAX = 1 << 22
OPEN_FILES_MAX = 1 << 20
"""The largest limits of a sandbox: what kernels accept, and the default hard limit of a process."""

HOST_IMAGE = "host"
"""The image that every manager has."""
WORKSPACE = "/work"
"""Where commands start and relative paths begin by default."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The specification of a sandbox, for its whole life."""

    image: str = HOST_IMAGE
    """The name of an image that the manager has. `host`: the machine's own /usr, read-only."""
    memory_bytes: int = 1 * GIB
    """Reserved while the sandbox lives; beyond it the kernel kills a process in it. Includes files that it writes."""
    disk_bytes: int = 512 * MIB
    """Limit of the files that it writes or changes."""
    processes_max: int = 512
    open_files_max: int = 4096
    """Limit of each process."""
    network: bool = False
    """True: the network of the machine. False: none, not even loopback of the machine."""
    user: str = "agent"
    """`agent`: an unprivileged user. `root`: user 0 of a user namespace, without privileges outside."""
    env: dict[str, str] = {}
    """The environment of every program in it."""

    def __post_init__(self) -> None:
        for field, least, most in (
            ("memory_bytes", MEMORY_BYTES_MIN, BYTES_MAX),
            ("disk_bytes", 64 * KIB, BYTES_MAX),
            ("processes_max", 4, PROCESSES_MAX),
            ("open_files_max", 16, OPEN_FILES_MAX),
        ):
            value = getattr(self, field)
            if type(value) is not int or not least <= value <= most:
                raise InvalidAction(f"sandbox.{field}", value, f"a whole number from {least} to {most}")
        if not isinstance(self.image, str) or not self.image:
            raise InvalidAction("sandbox.image", self.image, "the name of an image, such as 'host'")
        if self.user not in ("agent", "root"):
            raise InvalidAction("sandbox.user", self.user, "'agent' or 'root'")
        if type(self.network) is not bool:
            raise InvalidAction("sandbox.network", self.network, "True or False")
        require_environment("sandbox.env", self.env)


# ---- work -------------------------------------------------------------------------------------------------------


class Work(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all work. Each kind has its own tag, the value of `type` in journals and requests. The Action names the
    sandbox."""


class Open(Work, frozen=True, kw_only=True, tag="Open"):
    """Open the sandbox. Ends when programs can be started in it."""

    spec: SandboxSpec


class Prepare(Work, frozen=True, kw_only=True, tag="Prepare"):
    """Create a sandbox ahead of the caller that opens one like it."""

    spec: SandboxSpec


class Close(Work, frozen=True, kw_only=True, tag="Close"):
    """End everything in the sandbox and delete its files."""


class Exec(Work, frozen=True, kw_only=True, tag="Exec"):
    """Run a program to its end."""

    command: str | tuple[str, ...]
    """A string runs in a shell; a list of words runs without one. `{cpus}` is replaced with the number of cores."""
    cwd: str = ""
    """The working directory, relative to the workspace."""
    env: dict[str, str] = {}
    stdin: bytes = b""
    capture_bytes_max: int = CAPTURE_BYTES_DEFAULT
    session: str = ""
    """The session whose shell runs it; a missing session is started. Empty: a process of its own."""

    def __post_init__(self) -> None:
        words = (self.command,) if isinstance(self.command, str) else self.command
        if (
            not isinstance(words, tuple)
            or not words
            or not words[0]
            or not all(isinstance(word, str) for word in words)
        ):
            raise InvalidAction(
                "command", self.command, "a command line, or a tuple of words with a first word that is not empty"
            )
        for word in words:
            require_text("command", word)
            if len(word.encode(errors="surrogatepass")) > COMMAND_BYTES_MAX:
                raise InvalidAction(
                    "command",
                    f"{len(word)} characters",
                    f"at most {COMMAND_BYTES_MAX} bytes; write a file and run that",
                )
        if self.session and not isinstance(self.command, str):
            raise InvalidAction("command", self.command, "a string: a session hands it to its shell")
        if self.session and self.stdin:
            raise InvalidAction("stdin", f"{len(self.stdin)} bytes", "none in a session; write a file and read that")
        require_text("cwd", self.cwd)
        require_environment("env", self.env)
        if not isinstance(self.stdin, bytes):
            raise InvalidAction("stdin", type(self.stdin).__name__, "bytes")
        if type(self.capture_bytes_max) is not int or not 0 <= self.capture_bytes_max <= CAPTURE_BYTES_MAX:
            raise InvalidAction("capture_bytes_max", self.capture_bytes_max, f"0 to {CAPTURE_BYTES_MAX} bytes")

    @property
    def command_line(self) -> str:
        return self.command if isinstance(self.command, str) else " ".join(self.command)


class HoldGrant(Work, frozen=True, kw_only=True, tag="Hold"):
    """Hold what was granted, such as a quota, until the caller releases it."""


class Commit(Work, frozen=True, kw_only=True, tag="Commit"):
    """Seal the files of the sandbox as a layer on top of its image. Programs in it are frozen meanwhile."""

    image: str
    """The name of the new image."""

    def __post_init__(self) -> None:
        if self.image == HOST_IMAGE:
            raise InvalidAction("image", self.image, f"another name: {HOST_IMAGE!r} always means this machine")


MAINTENANCE_CORES: dict[type[Work], float] = {Open: 0.2, Prepare: 0.2, Close: 0.1, Commit: 0.5}
"""Cores of maintenance work on a sandbox: a few milliseconds of work each."""


def require_text(field: str, value: object) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidAction(field, value, "text without NUL")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidAction(field, value, "text that is UTF-8") from None


def require_environment(field: str, env: object) -> None:
    if not isinstance(env, dict):
        raise InvalidAction(field, env, "texts by name")
    size = 0
    for name, value in env.items():
        require_text(f"{field} name", name)
        require_text(f"{field}[{name!r}]", value)
        if not name or "=" in name:
            raise InvalidAction(f"{field} name", name, "a name without '='")
        size += len(name) + len(value)
    if size > ENVIRONMENT_BYTES_MAX:
        raise InvalidAction(field, f"{size} characters", f"at most {ENVIRONMENT_BYTES_MAX} in all")


def require_forgettable(image: str) -> None:
    if image == HOST_IMAGE:
        raise InvalidAction("image", image, f"an image that was added or committed; {HOST_IMAGE!r} is always there")


def sandbox_path(path: str) -> str:
    """A path of the caller as an absolute one of the sandbox. Links are resolved inside the sandbox, which no path
    leads out of."""
    require_text("path", path)
    if not path:
        raise InvalidAction("path", path, "a path inside the sandbox")
    return posixpath.join(WORKSPACE, path)


def require_safe_member(path: str, member: str) -> None:
    """Check a member of a tar that is unpacked below a path: no name may lead out of it. Raises FileFailed."""
    if member.startswith("/") or ".." in member.split("/"):
        raise FileFailed(path, f"the tar has {member!r}, which leads out of the directory")


# ---- results --------------------------------------------------------------------------------------------------------


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int | None = None
    """128 + the number of the signal that killed it, as in a shell. None: it did not run to its end."""
    stdout: bytes = b""
    stderr: bytes = b""
    """The captured output; a line in the middle states how many bytes are missing."""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    """Bytes written to each stream, captured or not."""
    out_of_memory: bool = False
    """The kernel killed a process in the sandbox during the command, because its memory was exhausted."""
    cpus: int = 0
    """Whole cores that the command could use: the value of `{cpus}`."""
    session_ended: bool = False
    """The shell of the session has ended: its variables, functions and directory are lost."""


class LeaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a lease: the usage, and the result."""

    usage: Usage = NO_USAGE
    executed: ExecResult | None = None
    answer: bytes = b""
    """The response of a function or a service, as its caller decodes it."""
    lost: str = ""
    """Why the infrastructure failed; empty when the work ran to its end or was stopped."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a listing."""

    name: str
    kind: str
    """`file`, `dir`, `link` or `other`."""
    bytes: int
    mode: int


def file_entry(name: str, mode: int, size: int) -> FileEntry:
    """`mode`: with the type of the file, as `stat` returns it."""
    kind = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}.get(stat.S_IFMT(mode), "other")
    return FileEntry(name=name, kind=kind, bytes=size, mode=stat.S_IMODE(mode))
