"""An instance in a sandbox: the sandbox with its files, and the commands to the program inside.

Owns which files are put into the sandbox and how a command reaches the program: the program replaces a held shell, or,
if the manager has no such shells, is started for each call. The function is bytes that are only unpickled inside. If
the program ends, the function has caused it.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import pickle
import py_compile
import re
import shlex
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant
from tangram.errors import FileFailed, InvalidInput, ManagerError
from tangram.managers.base import Lease, Manager, close_sandbox
from tangram.managers.functions.instance import (
    SHOWN_CHARACTERS,
    AwaitLease,
    Command,
    FunctionLoadFailed,
    Instance,
    exit_message,
)
from tangram.managers.functions.program import DIRECTORY, LIBRARY, PACKAGE, SPEC_FILE, STARTER
from tangram.managers.functions.work import Failure, FunctionSpec, loaded_spec
from tangram.managers.work import WORKSPACE, Exec, LeaseResult, Open, SandboxSpec
from tangram.processes import libc, orphans
from tangram.processes.exit_codes import NOT_FOUND, signal_of
from tangram.processes.streams import COMMANDS_FD, STATUSES_FD

SESSION = "function"
"""The held shell that the program replaces."""
HOLDING_BACKENDS = ("sandbox", "process")
"""Managers whose held shells read commands and write statuses as `processes.streams` describes. With others, each
call is a program."""
MODULES = ("program", "plain_values", "msgpack_encoder")
"""Modules of this package that run inside the sandbox."""
LIBRARIES = ("cloudpickle",)
"""Libraries that load functions sent by value, in the version of the service."""
ZIP = re.compile(r"/python(\d)(\d{1,3})\.zip$")
"""The part of every module search path that contains the Python version."""


class SandboxInstance(Instance):
    def __init__(self, name: str, manager: Manager, function: FunctionSpec, sandbox: SandboxSpec) -> None:
        super().__init__(name)
        self._manager = manager
        self._function = function
        self._sandbox = sandbox

    async def open(self, action: Action, grant: Grant) -> None:
        lease = await self._manager.start(self._inside(action), grant, Open(spec=self._sandbox))
        ended = await lease.wait()
        if ended.lost:
            raise ManagerError(ended.lost)
        files = bundle(self._function, image=self._sandbox.image, disk_bytes=self._sandbox.disk_bytes)
        try:
            await self._manager.unpack(self.name, DIRECTORY, files)
        except FileFailed as error:
            raise ManagerError(f"function {self._function.name} does not fit into its sandbox: {error}") from error
        except ManagerError as error:
            raise ManagerError(str(error)) from error  # a retry opens another sandbox

    async def close(self) -> None:
        await close_sandbox(self._manager, self.name)

    def _inside(self, action: Action) -> Action:
        return msgspec.structs.replace(action, sandbox=self.name)

    # ---- commands ----

    async def prepare(self, action: Action, grant: Grant, await_lease: AwaitLease) -> None:
        """Replace a held shell by the program, if the manager has shells that it can replace."""
        self.loads_once = False
        if self._manager.backend not in HOLDING_BACKENDS:
            return
        # The shell reads its next command with `read`, at a point where its descriptors are those of a held shell.
        program = f"exec python3 -c {shlex.quote(STARTER)} serve {COMMANDS_FD} {STATUSES_FD}"
        # Checked first: a shell that cannot execute the program ends, possibly after the next command was sent.
        shell_command = f"type -P python3 >/dev/null && read() {{ {program}; }}"
        work = Exec(command=shell_command, cwd=DIRECTORY, session=SESSION, capture_bytes_max=0)
        try:
            ended = await await_lease(self._manager.start(self._inside(action), grant, work))
        except InvalidInput:
            return  # the image has no bash
        if ended.lost or ended.executed is None or ended.executed.exit_code is None:
            raise ManagerError(ended.lost or f"the shell of {self.name} cannot be replaced")
        if ended.executed.exit_code != 0:
            raise FunctionLoadFailed(self._no_python(""))
        self.loads_once = True

    async def execute(self, command: Command, action: Action, grant: Grant) -> Lease:
        work = await self._request(command)
        return await self._manager.start(self._inside(action), grant, work, command.output)

    async def _request(self, command: Command) -> Exec:
        path, arguments = SPEC_FILE, command.arguments
        if not self.loads_once:
            words = ("python3", "-c", STARTER, "once", command.token)
            return Exec(command=words, cwd=DIRECTORY, stdin=arguments or b"", capture_bytes_max=0)
        if arguments is not None and not command.is_inline:
            path = f"{DIRECTORY}/arguments-{command.token}"
            await self._manager.write(self.name, path, arguments, mode=0o600)
        return Exec(command=command.text(path), session=SESSION, capture_bytes_max=0)

    # ---- the cause of the program's end

    def import_failure(self, ended: LeaseResult, reason: str, stderr: str) -> Failure:
        shown = stderr.strip()[-SHOWN_CHARACTERS:]
        if ended.executed is not None and ended.executed.exit_code == NOT_FOUND:
            return self._no_python(shown)
        message = f"{self._function.name} cannot be imported in image {self._sandbox.image}: {reason}"
        return Failure(kind="import", message=message, traceback=shown)

    def _no_python(self, shown: str) -> Failure:
        message = f"image {self._sandbox.image} has no python3, which functions need; use an image that has it"
        return Failure(kind="import", message=message, traceback=shown)

    def exit_failure(self, ended: LeaseResult, stderr: str) -> Failure:
        code = ended.executed.exit_code if ended.executed is not None else None
        return Failure(kind="exited", message=exit_message(code, signal_of(code)))


# ---- the files of an instance -------------------------------------------------------------------------------------


def bundle(spec: FunctionSpec, *, image: str, disk_bytes: int) -> io.BytesIO:
    """The program, a library and the function as a tar, for DIRECTORY."""
    loaded = loaded_spec(spec) | {"disk_bytes": disk_bytes, "image": image, "python": pickled_by(spec)}
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, content in _programs():
            _add(archive, name, content)
        _add(archive, SPEC_FILE.removeprefix(f"{DIRECTORY}/"), pickle.dumps(loaded, protocol=4))
    tar.seek(0)
    return tar


def pickled_by(spec: FunctionSpec) -> tuple[int, int] | None:
    """The version of the Python that pickled the function, if its module search path contains it."""
    for path in spec.paths:
        if (match := ZIP.search(path)) is not None:
            return int(match[1]), int(match[2])
    return None


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


@functools.cache
def _programs() -> tuple[tuple[str, bytes], ...]:
    own_path = Path(__file__)
    sources: dict[str, bytes] = {f"{PACKAGE}/__init__.py": b""}
    modules = [*(own_path.with_name(f"{name}.py") for name in MODULES), Path(libc.__file__), Path(orphans.__file__)]
    for path in modules:
        sources[f"{PACKAGE}/{path.name}"] = path.read_bytes()
    for library in LIBRARIES:
        installed = importlib.util.find_spec(library)
        for folder in (installed.submodule_search_locations or ()) if installed is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                sources[f"{LIBRARY}/{library}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return (*sources.items(), *_compiled(sources).items())


def _compiled(sources: dict[str, bytes]) -> dict[str, bytes]:
    """Byte code for the Python version of this process. Other versions compile the sources."""
    compiled = {}
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source.py"), Path(directory, "target.pyc")
        for name, content in sources.items():
            source.write_bytes(content)
            shown = f"{WORKSPACE}/{DIRECTORY}/{name}"
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(source), str(target), shown, doraise=True, invalidation_mode=mode)
            folder, _, file = name.rpartition("/")
            cached = f"{folder}/__pycache__/{file[: -len('.py')]}.{sys.implementation.cache_tag}.pyc"
            compiled[cached] = target.read_bytes()
    return compiled
