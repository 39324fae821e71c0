"""The sandbox manager: sandboxes on this machine that hold cores only while they act.

Owns every sandbox that it opened, from its state directory to its control groups. Decides nothing: grants say who runs
with how much. Promises what `managers.base` asks, and that sandboxes die with their owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tangram.core.action import Action, Usage
from tangram.core.demand import CORE
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.errors import AdmissionRefused, InvalidAction, ManagerError
from tangram.managers.base import FiledApart, Lease, Output
from tangram.managers.cpu.cores import Cores
from tangram.managers.cpu.filing import Filing
from tangram.managers.cpu.images import SANDBOX_UID, Image, ImageStore
from tangram.managers.cpu.machine import Machine, has_user_namespaces
from tangram.managers.cpu.owner import Owner, state_directory
from tangram.managers.cpu.programs import Placement, ProgramLease, SessionLease
from tangram.managers.cpu.sandbox import Sandbox
from tangram.managers.cpu.seccomp import filter_program
from tangram.managers.cpu.spawner import FILTER, INFO, INIT
from tangram.managers.cpu.spawning import Spawning
from tangram.managers.cpu.warm import Warm
from tangram.managers.work import GIB, HOST_IMAGE, Close, Commit, Ended, Exec, Open, Prepare, SandboxSpec, Work

INODE_BYTES = 4096
"""Of a disk limit, per file that may exist: many small files use up memory as well as few large ones."""
SHM_SHARE = 4
"""Shared memory of a sandbox: this part of its memory limit."""
MS_NOSUID, MS_NODEV, MS_BIND = 2, 4, 4096
ROOT_AT = "/mnt"
"""Where, in its own mount namespace, the holder of a sandbox puts the root of it: every user may look there. The state
directory may lie where only root may."""
CLOSE_S_MAX = 10.0
"""Until its first process has ended; then its control group is killed all the same."""

PROGRAMS = {"bwrap": "bubblewrap", "catatonit": "catatonit", "setpriv": "util-linux", "cp": "coreutils"}
"""What must be installed, and the package of Debian that has it."""


class _Errand:
    """The lease of work that runs in the owner's name rather than as a program: stopping it waits for its end."""

    def __init__(self, doing: Coroutine[Any, Any, Ended]) -> None:
        self._doing = doing
        self._done = asyncio.Event()

    async def wait(self) -> Ended:
        try:
            return await self._doing
        finally:
            self._done.set()

    def resize(self, *, reserved: int, limit: int) -> None:
        """Its share is not limited."""

    def used(self) -> float | None:
        return None

    async def stop(self) -> None:
        await self._done.wait()


class SandboxManager(FiledApart):
    backend = "sandbox"
    isolates = True

    def __init__(
        self,
        *,
        state: Path | None = None,
        cores: float | None = None,
        memory_bytes: int | None = None,
        node: str = "local",
        warm: int = 0,
    ) -> None:
        """`warm`: how many sandboxes that wait for a caller are kept at most."""
        self.node = node
        self._state = state or state_directory()
        self._machine = Machine.of_this(cores=cores, memory_bytes=memory_bytes)
        self._total = round(self._machine.cores * CORE)
        self._cores = Cores(self._total, self._machine.cpus, self._machine.cpus_by_cell)
        self.images = ImageStore(self._state / "images")
        self._numbers = count(1)
        self._sandboxes: dict[str, Sandbox] = {}
        """By the name that the caller knows."""
        self._by_box: dict[str, Sandbox] = {}
        """All, those that wait for a caller included."""
        self._warm = Warm(warm)
        self._forgotten: dict[str, str] = {}
        """Images that go as soon as no sandbox stands on them."""
        self._user_namespaces: bool | None = None
        self._place = Placement(self._cores)
        self._owner: Owner | None = None
        self._spawning: Spawning | None = None
        self._filing: Filing = Filing(self._found, self._running_spawner)

    def pools(self) -> tuple[Pool, ...]:
        machine = self._machine
        return cpu_node(self.node, machine.cores, machine.memory_bytes / GIB, numa_nodes=len(machine.cpus_by_cell) or 1)

    # ---- the owner's life ----

    async def __aenter__(self) -> Self:
        missing = [
            f"{name} (apt-get install {package})" for name, package in PROGRAMS.items() if not shutil.which(name)
        ]
        if os.geteuid() != 0:
            raise ManagerError("sandboxes need root; use backend='process', which isolates nothing", retry=False)
        if missing:
            raise ManagerError(f"missing: {', '.join(missing)}; `tangram doctor` says more", retry=False)
        self._owner = await asyncio.to_thread(Owner, self._state)
        try:
            self._owner.group.set_cpu(reserved=CORE, limit=self._total)
            self._owner.group.set_cpus(self._machine.cpus)
            self._owner.group.delegate()
            await asyncio.to_thread(self._tidy_images, self._owner.orphans)
            await self._running_spawner()
        except BaseException as error:
            await asyncio.to_thread(self._owner.leave)
            if isinstance(error, OSError):
                raise ManagerError(f"the state directory {self._state} cannot be used: {error}", retry=False) from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        assert self._owner is not None
        if self._spawning is not None:
            await self._spawning.stop()  # every sandbox dies with it
        for sandbox in self._by_box.values():
            sandbox.close_descriptors()
        self._sandboxes.clear()
        self._by_box.clear()
        self._filing.close()
        await asyncio.to_thread(self._tidy_images, self._owner.images())
        await asyncio.to_thread(self._owner.leave)

    def _tidy_images(self, names: list[str]) -> None:
        """Forget these, and what was never finished. Blocks."""
        for name in names:
            with contextlib.suppress(InvalidAction):
                self.images.forget(name)
        self.images.sweep()
        self.images.get(HOST_IMAGE)  # made here rather than by the first sandbox

    async def _running_spawner(self) -> Spawning:
        """A spawner that died took its sandboxes along; new ones get a new one."""
        if self._spawning is None:
            self._spawning = Spawning(self._on_gone, self._on_spawner_end)
            assert self._owner is not None
            groups = [os.path.dirname(path) for path in self._owner.group.join_files]
            await self._spawning.start(filter_program(), groups)
        return self._spawning

    def _on_gone(self, box: str, code: int) -> None:
        sandbox = self._by_box.get(box)
        if sandbox is not None and not sandbox.gone.done():
            sandbox.gone.set_result(f"its first process ended with {code}")

    def _on_spawner_end(self, why: str) -> None:
        self._spawning = None
        for sandbox in self._by_box.values():
            if not sandbox.gone.done():
                sandbox.gone.set_result(why)

    # ---- leases ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if isinstance(work, Exec):
            return await self._start_program(action, grant, work, output)
        name = action.sandbox
        if isinstance(work, Open):
            if name in self._sandboxes:
                raise ManagerError(f"sandbox {name} is open already", retry=False)
            await self._require_possible(work.spec)
            return _Errand(self._open(name, work.spec, self.images.get(work.spec.image)))
        if isinstance(work, Close):
            return _Errand(self._close(name))
        if isinstance(work, Prepare):
            return _Errand(self._prepare(work.spec, self.images.get(work.spec.image)))
        assert isinstance(work, Commit)
        sandbox = self._found(name)
        try:
            self.images.require_sealable(work.image, sandbox.image)
        except AdmissionRefused as error:
            raise ManagerError(str(error), retry=False) from error
        return _Errand(self._commit(sandbox, work.image))

    def _found(self, name: str) -> Sandbox:
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            raise ManagerError(f"there is no sandbox {name}: it was closed, or never opened", retry=False)
        if sandbox.gone.done():
            raise ManagerError(f"sandbox {name} is gone: {sandbox.gone.result()}", retry=False)
        return sandbox

    async def _start_program(self, action: Action, grant: Grant, work: Exec, output: Output | None) -> Lease:
        sandbox = self._found(action.sandbox)
        if work.session and not sandbox.image.shell.endswith("bash"):
            raise InvalidAction("session", work.session, f"an image with bash; {sandbox.image.name} has none")
        kind = SessionLease if work.session else ProgramLease
        spawning = await self._running_spawner()
        lease = kind(action.id, grant, work, output, sandbox=sandbox, spawning=spawning, place=self._place)
        try:
            await lease.begin()
        except ManagerError as error:
            if sandbox.is_ending():
                raise ManagerError(
                    f"sandbox {sandbox.name} is gone: its first process has ended", retry=False
                ) from error
            raise
        return lease

    # ---- sandboxes ----

    async def _open(self, name: str, spec: SandboxSpec, image: Image) -> Ended:
        warm = self._warm.take(spec, image)
        if warm is not None:
            warm.name = name
            self._sandboxes[name] = warm
            return Ended()
        try:
            self._sandboxes[name] = sandbox = await self._make(name, spec, image)
        except ManagerError as error:
            return Ended(lost=f"sandbox {name} could not be made: {error}")
        return Ended(usage=Usage(cpu_s=sandbox.group.cpu_s()))

    async def _prepare(self, spec: SandboxSpec, image: Image) -> Ended:
        try:
            sandbox = await self._make("warm", spec, image)
        except ManagerError as error:
            return Ended(lost=f"a sandbox could not be made: {error}")
        surplus = self._warm.put(sandbox)
        if surplus is not None:
            await self._end_sandbox(surplus)
        return Ended(usage=Usage(cpu_s=sandbox.group.cpu_s()))

    async def _make(self, name: str, spec: SandboxSpec, image: Image) -> Sandbox:
        assert self._owner is not None
        spawning = await self._running_spawner()
        # Numbered: a name that a caller chose is never part of a path.
        box = str(next(self._numbers))
        sandbox = Sandbox(name, box, spec, image, self._owner.group.child(box), self._owner.boxes / box)
        self._by_box[box] = sandbox
        try:
            sandbox.directory.mkdir(mode=0o711)
            reply = await spawning.open(
                box,
                groups=sandbox.prepare(),
                prepare=_prepare(sandbox),
                init=shutil.which("catatonit"),
                argv=_bubblewrap(sandbox),
                env={"PATH": os.defpath},
                uid=0 if spec.user == "root" else SANDBOX_UID,
                rlimits={"nofile": spec.open_files_max, "core": 0},
            )
        except BaseException:
            del self._by_box[box]
            await asyncio.to_thread(sandbox.remove)
            raise
        sandbox.init = int(reply["init"])
        return sandbox

    async def _require_possible(self, spec: SandboxSpec) -> None:
        """Root inside is a user namespace, or it is refused."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if spec.open_files_max > most:
            raise InvalidAction(
                "sandbox.open_files_max", spec.open_files_max, f"at most {most}, which is what `ulimit -Hn` says here"
            )
        if spec.user != "root":
            return
        if self._user_namespaces is None:
            self._user_namespaces = await asyncio.to_thread(has_user_namespaces, SANDBOX_UID)
        if not self._user_namespaces:
            raise InvalidAction("sandbox.user", "root", "'agent': this machine allows no user namespaces")

    async def _close(self, name: str) -> Ended:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is None:
            return Ended()
        try:
            await self._end_sandbox(sandbox)
        except (ManagerError, OSError) as error:
            return Ended(lost=f"sandbox {name} could not be removed: {error}")
        return Ended()

    async def _end_sandbox(self, sandbox: Sandbox) -> None:
        sandbox.let_end()
        if not sandbox.gone.done() and self._spawning is not None:
            try:
                await self._spawning.request("close", box=sandbox.box)
                await asyncio.wait_for(asyncio.shield(sandbox.gone), CLOSE_S_MAX)
            except (ManagerError, TimeoutError):
                pass  # what is left is killed with its group
        self._by_box.pop(sandbox.box, None)
        sandbox.close_descriptors()
        await asyncio.to_thread(sandbox.remove)
        if self._forgotten:
            await self._forget_unused()

    async def _commit(self, sandbox: Sandbox, image: str) -> Ended:
        assert self._owner is not None
        spawning = await self._running_spawner()
        layer = self.images.new_layer()
        try:
            try:
                sandbox.hold_still()
                await spawning.request("copy", box=sandbox.box, source=f"{sandbox.directory}/upper", target=str(layer))
            finally:
                sandbox.go_on()
            aside = self.images.aside(image)
            if aside and image in self._owner.images():
                self._owner.keep_with(aside)
            self._owner.keep_with(image)
            await asyncio.to_thread(self.images.seal, layer, name=image, base=sandbox.image)
        except BaseException as error:
            await asyncio.to_thread(self.images.discard, layer)
            if isinstance(error, (ManagerError, AdmissionRefused)):
                return Ended(lost=f"sandbox {sandbox.name} could not be copied: {error}")
            raise
        return Ended()

    # ---- images ----

    async def add_image(self, path: str) -> str:
        add = self.images.add_directory if await asyncio.to_thread(_is_root, path) else self.images.add_tar
        return (await add(Path(path))).name

    async def recall_image(self, key: str) -> str:
        image = self.images.recall(key)
        return image.name if image is not None else ""

    async def remember_image(self, key: str, name: str) -> None:
        assert self._owner is not None
        self.images.remember(key, self.images.get(name))
        self._owner.let_stay(name)

    async def forget_image(self, name: str) -> None:
        """Once nothing stands on it any more."""
        self._forgotten[name] = self.images.forgettable(name).layers[0]
        await self._forget_unused()

    async def _forget_unused(self) -> None:
        assert self._owner is not None
        in_use = {layer for sandbox in self._by_box.values() for layer in sandbox.image.layers}
        for name in [name for name, layer in self._forgotten.items() if layer not in in_use]:
            self._forgotten.pop(name, None)
            with contextlib.suppress(InvalidAction):  # another process that shares the store was faster
                await asyncio.to_thread(self.images.forget, name)
            self._owner.let_stay(name)


# ---- how a sandbox is made ----------------------------------------------------------------------------------------


def _prepare(sandbox: Sandbox) -> list[list[Any]]:
    """Mounts below the sandbox's directory, in a namespace that vanishes with it. What it writes stays in memory, where
    a limit is exact and costs nothing."""
    at = str(sandbox.directory)
    spec = sandbox.spec
    flags = MS_NOSUID | MS_NODEV
    size = f"size={spec.disk_bytes},nr_inodes={max(64, spec.disk_bytes // INODE_BYTES)},mode=0755"
    layers = f"lowerdir={':'.join(sandbox.image.layers)},upperdir={at}/upper,workdir={at}/work"
    return [
        ["mount", "tmpfs", at, "tmpfs", flags, size],
        ["mkdir", f"{at}/upper", SANDBOX_UID, 0o755],
        ["mkdir", f"{at}/work", 0, 0o755],
        ["mkdir", f"{at}/root", 0, 0o755],
        ["mount", "overlay", f"{at}/root", "overlay", flags, layers],
        ["mount", f"{at}/root", ROOT_AT, "none", MS_BIND, ""],
    ]


def _bubblewrap(sandbox: Sandbox) -> list[str]:
    spec = sandbox.spec
    as_root = ["--unshare-user", "--uid", "0", "--gid", "0"] if spec.user == "root" else ["--cap-drop", "ALL"]
    become = ["setpriv", f"--reuid={SANDBOX_UID}", f"--regid={SANDBOX_UID}", "--clear-groups", "--"]
    words = [
        *([_which(become[0]), *become[1:]] if spec.user == "root" else []),
        *(
            _which("bwrap"),
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup",
            "--hostname",
            "sandbox",
        ),
        *([] if spec.network else ["--unshare-net"]),
        *("--die-with-parent", "--as-pid-1", "--info-fd", str(INFO), "--seccomp", str(FILTER)),
        *as_root,
        *("--bind", ROOT_AT, "/"),
        *(["--ro-bind", "/usr", "/usr"] if sandbox.image.binds_usr else []),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(spec.memory_bytes // SHM_SHARE), "--perms", "01777", "--tmpfs", "/dev/shm"),
        *("--chdir", "/", "--", f"/proc/self/fd/{INIT}", "-P"),
    ]
    return words


def _is_root(path: str) -> bool:
    """A directory that is a root file system, not the layout of an OCI image."""
    return os.path.isdir(path) and not os.path.exists(f"{path}/index.json")


def _which(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, f"{name} was there when the manager started"
    return found
