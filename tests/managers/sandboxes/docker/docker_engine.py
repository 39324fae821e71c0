"""A private Docker engine for tests: own socket, own files, own control groups, no network of its own.

Owns one dockerd and all that it starts. Never touches an engine of the machine, and no registry is asked: the image is
made of programs of this machine. Promises that after `stop` nothing is left: no process, no mount, no control group
and no file. `make test-docker` also cleans up after a test process that was killed before it could call `stop`.

    python tests/managers/sandboxes/docker/docker_engine.py

starts one, says where, and stops it at Ctrl-C or the end of its input
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tangram.managers.sandboxes.docker import DockerManager

START_S = 120.0
STOP_S = 120.0
"""Each takes a fraction of a second on a machine that has nothing else to do."""

PREFIX = "tangram-docker-"
"""Prefix of the directory of an engine; also the name of its control group."""

IMAGE = "tangram-test:host"
"""Bash and the usual small programs of this machine."""
BARE_IMAGE = "tangram-test:bare"
"""No more than an `sh`, a `sleep` and a `cat`: no bash, no taskset."""

PROGRAMS = (
    *("bash", "sh", "cat", "chmod", "cp", "cut", "date", "dd", "df", "dirname", "echo", "env", "expr", "false", "find"),
    *("grep", "head", "hostname", "id", "kill", "ln", "ls", "mkdir", "mkfifo", "mktemp", "mv", "nohup", "nproc"),
    *(
        "od",
        "pkill",
        "printf",
        "ps",
        "pwd",
        "readlink",
        "rm",
        "rmdir",
        "sed",
        "seq",
        "setsid",
        "sha256sum",
        "sleep",
        "sort",
        "stat",
    ),
    *("stty", "sync", "tail", "tar", "taskset", "tee", "test", "timeout", "touch", "tr", "true", "truncate", "uname"),
    *("uniq", "wc", "whoami", "xargs", "yes", "prlimit", "printenv"),
)
BARE_PROGRAMS = ("sh", "sleep", "cat")
DIRECTORIES = ("bin", "dev", "etc", "proc", "sys", "tmp", "usr")

PRIVATE_MOUNTS = """
for d in run opt; do
  mkdir -p "$0/$d" "$0/$d.work"
  mount -t overlay -o "lowerdir=/$d,upperdir=$0/$d,workdir=$0/$d.work" overlay "/$d"
done
if [ -d /etc/docker ]; then mount -t tmpfs none /etc/docker; fi
for n in subuid subgid; do if [ -e "$0/$n" ]; then mount --bind "$0/$n" /etc/$n; fi; done
exec "$@"
"""
"""No option of dockerd moves what it and containerd write to /run, /opt and /etc/docker."""


def why_not() -> str:
    """Why no engine can be started here; empty when it can."""
    if os.geteuid() != 0:
        return "a private Docker engine needs root"
    for program in ("dockerd", "containerd", "runc", "unshare", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} is not installed; on Debian and Ubuntu: apt install docker.io"
    return ""


class PrivateEngine:
    """Started by `start`; `socket` is where it listens."""

    def __init__(self, *, hides_processes: bool = False, maps_users: bool = False) -> None:
        self._hides_processes = hides_processes
        """Own process ids too, as of an engine on another machine."""
        self._maps_users = maps_users
        """Root in a container has no rights outside."""
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.socket = str(self.directory / "docker.sock")
        self._cgroup = self.directory.name
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of dockerd, unless its processes are hidden."""
        assert self._process is not None and not self._hides_processes
        return self._process.pid

    def start(self) -> None:
        (self.directory / "daemon.json").write_text("{}")  # not the one of the machine
        if self._maps_users:
            self.directory.chmod(0o711)
            for name in ("subuid", "subgid"):
                (self.directory / name).write_text("daemon:200000:65536\n")
        # It ends with this process. Mounts of its own: they vanish with its last process, however that ends.
        unshare = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount"]
        if self._hides_processes:
            unshare[2] = "KILL"
            unshare += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.directory / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*unshare, "sh", "-ec", PRIVATE_MOUNTS, str(self.directory), "dockerd", *self._options()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                tail = (self.directory / "log").read_text(errors="replace")[-2000:]
                self.stop()
                raise RuntimeError(f"dockerd did not start:\n{tail}")
            time.sleep(0.02)

    def _options(self) -> list[str]:
        return [
            f"--host=unix://{self.socket}",
            f"--data-root={self.directory}/data",
            f"--exec-root={self.directory}/exec",
            f"--pidfile={self.directory}/pid",
            f"--cgroup-parent=/{self._cgroup}",
            f"--config-file={self.directory}/daemon.json",
            "--log-level=warn",
            *("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
            *("--storage-driver=overlay2", "--exec-opt=native.cgroupdriver=cgroupfs"),
            *(["--userns-remap=daemon:daemon"] if self._maps_users else []),
        ]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("GET", "/_ping")[0] == 200
        return False

    def request(self, method: str, path: str, body: bytes = b"", kind: str = "application/x-tar") -> tuple[int, bytes]:
        """One request, apart from the manager under test."""
        connection = HTTPConnection("engine", timeout=START_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(self.socket)
            connection.request(method, path, body, {"Content-Type": kind})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def containers(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self.request("GET", "/containers/json?all=1")[1])
        return listed

    def images(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self.request("GET", "/images/json?all=1")[1])
        return listed

    def load(self, name: str, programs: tuple[str, ...]) -> None:
        """An image of these programs of this machine and the libraries that they need."""
        repository, _, tag = name.partition(":")
        status, answer = self.request("POST", f"/images/create?fromSrc=-&repo={repository}&tag={tag}", packed(programs))
        if status != 200 or b'"error"' in answer:
            raise RuntimeError(f"the engine did not take the image {name}: {status} {answer!r}")

    def stop(self) -> None:
        self.end()
        shutil.rmtree(self.directory)

    def end(self) -> None:
        """By its id; then all that it started, if it could not clean up itself. Its files stay."""
        process, self._process = self._process, None
        if process is not None:
            for pid in children(process.pid) if self._hides_processes else [process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # The command lines of containerd and its shims contain the path of the directory.
        path = f"{self.directory}/".encode()
        kill_all(lambda pid: path in read_proc(pid, "cmdline"), {self._cgroup})


def kill_all(owns: Callable[[int], bool], cgroups: Collection[str]) -> None:
    """Kills the processes that `owns` selects and those of the control groups, which it removes."""
    names = [f"/{name}/".encode() for name in cgroups]
    give_up = time.monotonic() + STOP_S
    while left := [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if pid != os.getpid() and (owns(pid) or any(name in read_proc(pid, "cgroup") for name in names))
    ]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in cgroups:
            thaw(name)
        if time.monotonic() > give_up:
            raise RuntimeError(f"processes {left} of the engine could not be killed")
        time.sleep(0.01)
    for name in cgroups:
        remove_cgroup(name)


def read_proc(pid: int, name: str) -> bytes:
    """Empty: there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def thaw(cgroup: str) -> None:
    """Frozen processes die only once they run."""
    for name, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        for file in Path("/sys/fs/cgroup").glob(f"*/{cgroup}/*/{name}"):
            with contextlib.suppress(OSError):
                file.write_text(word)


def remove_cgroup(cgroup: str) -> None:
    for root in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
        for below, _, _ in os.walk(root / cgroup, topdown=False):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(below)


def children(pid: int) -> list[int]:
    """Of all its threads: the kernel lists a child below the thread that forked it."""
    pids = b" ".join(read_proc(pid, f"task/{thread.name}/children") for thread in Path(f"/proc/{pid}/task").glob("*"))
    return [int(child) for child in pids.split()]


def packed(programs: tuple[str, ...]) -> bytes:
    """A tar of a root file system with these programs. Those that the machine lacks are left out."""
    paths: dict[str, str] = {}
    for name in programs:
        path = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if path:
            paths[f"bin/{name}"] = path
    for library in libraries(list(paths.values())):
        paths[library.lstrip("/")] = library
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", dereference=True) as tar:
        for name in DIRECTORIES:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name, source in paths.items():
            with open(source, "rb") as file:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = os.fstat(file.fileno()).st_size, 0o755
                tar.addfile(entry, file)
    return content.getvalue()


def libraries(programs: list[str]) -> list[str]:
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    words = (word for line in listing.splitlines() if not line.endswith(":") for word in line.split())
    return sorted({word for word in words if word.startswith("/")})


@contextlib.contextmanager
def private_engine(*, hides_processes: bool = False, maps_users: bool = False) -> Iterator[PrivateEngine]:
    """With both images in it."""
    if reason := why_not():
        raise RuntimeError(reason)
    engine = PrivateEngine(hides_processes=hides_processes, maps_users=maps_users)
    engine.start()
    try:
        engine.load(IMAGE, PROGRAMS)
        engine.load(BARE_IMAGE, BARE_PROGRAMS)
        yield engine
    finally:
        engine.stop()


@functools.cache
def shared_engine() -> str:
    """The socket of an engine for as long as this process lives, kept by a process of its own: whatever becomes of this
    one, that one sees the end of its input and cleans up."""
    keeper = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    atexit.register(keeper.communicate)
    assert keeper.stdout is not None
    word, _, where = keeper.stdout.readline().decode().strip().partition("unix://")
    if word != "DOCKER_HOST=":
        raise RuntimeError("the keeper of the engine failed; what it said stands above")
    return where


async def docker_manager(root: Path) -> DockerManager:
    """For the contract suite. It keeps nothing below the directory."""
    return DockerManager(socket=shared_engine(), image=IMAGE)


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    with private_engine() as running, contextlib.suppress(KeyboardInterrupt):
        print(f"DOCKER_HOST=unix://{running.socket}", flush=True)
        sys.stdin.read()
