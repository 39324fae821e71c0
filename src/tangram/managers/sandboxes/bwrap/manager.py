"""The bwrap manager: sandboxes on this machine that hold cores only while an action runs in them.

Creates, freezes and removes sandboxes. Owns every sandbox that it opened, from its state directory to its control
groups. Makes no decisions: grants state the amounts. Promises what `managers.base` requires, and that sandboxes end
with their owner. Sandboxes of a named owner that keeps them stay frozen instead, until the next process of that name
adopts them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import shutil
from collections.abc import Coroutine, Iterable
from itertools import count
from pathlib import Path
from typing import Any, Self

from tangram.cancellation import run_to_completion
from tangram.core.action import Action, Usage
from tangram.core.demand import CORE
from tangram.core.messages import Grant, Pool
from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig, ManagerError
from tangram.managers.base import FilesMixin, Lease, UnmeteredLease, sandbox_not_found
from tangram.managers.sandboxes.bwrap.adoption import Adoption
from tangram.managers.sandboxes.bwrap.files import BwrapFiles
from tangram.managers.sandboxes.bwrap.images.store import SANDBOX_UID, ImageStore, StoredImage
from tangram.managers.sandboxes.bwrap.leases import BwrapProgramLease, BwrapSessionLease, CpuSlots
from tangram.managers.sandboxes.bwrap.owner import GIVEN_OWNER_NAME, SandboxOwner, SandboxRecord, state_directory
from tangram.managers.sandboxes.bwrap.sandbox import BwrapSandbox
from tangram.managers.sandboxes.bwrap.seccomp import filter_program
from tangram.managers.sandboxes.bwrap.spawner.client import SpawnerClient
from tangram.managers.sandboxes.bwrap.spawner.lock import SpawnerLock
from tangram.managers.sandboxes.bwrap.spawner.mounts import bwrap_argv, mount_steps
from tangram.managers.sandboxes.cpuset_allocator import CpusetAllocator
from tangram.managers.sandboxes.machine import Machine, has_user_namespaces
from tangram.managers.work import HOST_IMAGE, Close, Commit, Exec, LeaseResult, Open, Prepare, SandboxSpec, Work
from tangram.processes.streams import Output

CLOSE_S_MAX = 10.0
"""Time limit for the end of the first process of a sandbox; then its control group is killed in any case."""

PROGRAMS = {"bwrap": "bubblewrap", "catatonit": "catatonit", "setpriv": "util-linux", "cp": "coreutils"}
"""Required programs, and the Debian package of each."""
WORK_ERRORS = (ManagerError, InvalidAction, OSError)
"""Errors that the result of a lease reports."""
NO_RECORD = "it did not survive the end of the last owner: there is no record of it"


class WarmPool:
    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._sandboxes: list[BwrapSandbox] = []
        """The oldest first."""

    def take(self, spec: SandboxSpec, image: StoredImage) -> BwrapSandbox | None:
        """Returns a sandbox with exactly this specification and image, which the caller owns then; None if there is
        none."""
        for sandbox in self._sandboxes:
            if sandbox.spec == spec and sandbox.image == image and not sandbox.gone.done():
                self._sandboxes.remove(sandbox)
                return sandbox
        return None

    def put(self, sandbox: BwrapSandbox) -> BwrapSandbox | None:
        """Keep a sandbox. Returns the evicted one, which may be the same; None if there is room."""
        self._sandboxes.append(sandbox)
        return self._sandboxes.pop(0) if len(self._sandboxes) > self._count_max else None

    def take_all(self) -> list[BwrapSandbox]:
        """Empty the pool."""
        sandboxes, self._sandboxes = self._sandboxes, []
        return sandboxes


class _ManagerTaskLease(UnmeteredLease):
    """The lease of work of the manager itself rather than of a program: stopping it waits for its end."""

    def __init__(self, work: Coroutine[Any, Any, LeaseResult], tasks: set[asyncio.Task[LeaseResult]]) -> None:
        """`tasks`: holds the task until it has ended; the manager cancels what is left there when it shuts down."""
        self._task = asyncio.get_running_loop().create_task(_run_to_result(work))
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)

    async def wait(self) -> LeaseResult:
        return await asyncio.shield(self._task)

    async def stop(self) -> None:
        await self.wait()


async def _run_to_result(work: Coroutine[Any, Any, LeaseResult]) -> LeaseResult:
    try:
        return await work
    except asyncio.CancelledError:
        return LeaseResult(lost="the manager was closed")
    except Exception as error:  # a waiter must get a result
        return LeaseResult(lost=f"the manager failed: {error!r}")


class BwrapManager(FilesMixin):
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
        owner: str = "",
        keeps: bool = True,
        expected: Iterable[str] = (),
    ) -> None:
        """`warm`: maximum number of sandboxes that are prepared in advance. `owner`: the name under which the sandboxes
        of the previous process are adopted, and those of this one outlive it; without `keeps` they end with it.
        `expected`: the sandboxes that should exist."""
        if owner and not GIVEN_OWNER_NAME.fullmatch(owner):
            raise InvalidConfig("owner", owner, "up to 41 small letters, digits and '-', not '-' first")
        self.node = node
        self.adopted: dict[str, SandboxSpec] = {}
        """Sandboxes taken over from the previous process, by the caller's name."""
        self.missing: dict[str, str] = {}
        """Sandboxes that were recorded or expected and do not exist, with the reason. An unreadable record is listed
        by its file name."""
        self._owner_name = owner
        self._keeps = bool(owner) and keeps
        self._expected = tuple(expected)
        self._state = state or state_directory()
        self._machine = Machine.detect(cores=cores, memory_bytes=memory_bytes)
        self._total = round(self._machine.cores * CORE)
        self._cpusets = CpusetAllocator(self._total, self._machine.cpus, self._machine.cpus_by_numa_node)
        self._ids = count(1)
        self._sandboxes: dict[str, BwrapSandbox] = {}
        """Open sandboxes, by the caller's name."""
        self._opening: dict[str, asyncio.Future[None]] = {}
        """Sandboxes that are being opened, by the caller's name; done when one is open or could not be opened."""
        self._by_id: dict[str, BwrapSandbox] = {}
        """All sandboxes, warm ones included, by number."""
        self._warm = WarmPool(warm)
        self._forgotten: dict[str, str] = {}
        """Images that are deleted as soon as no sandbox uses them."""
        self._user_namespaces: bool | None = None
        self._cpu_slots = CpuSlots(self._cpusets)
        self._entered_owner: SandboxOwner | None = None
        """None before the manager is entered."""
        self._spawner: SpawnerClient | None = None
        self._spawner_lock = asyncio.Lock()
        """Held while a spawner is started."""
        self._tasks: set[asyncio.Task[LeaseResult]] = set()
        """The tasks of the leases of work that is not a program."""
        self._files: BwrapFiles = BwrapFiles(self._get_sandbox, self._get_spawner)

    @functools.cached_property
    def images(self) -> ImageStore:
        """Created on first use: a manager that is never entered creates no directories."""
        return ImageStore(self._state / "images")

    def pools(self) -> tuple[Pool, ...]:
        return self._machine.pools(self.node)

    def sandboxes(self) -> tuple[str, ...]:
        return tuple(self._sandboxes)

    # ---- start and end of the owner

    @property
    def _owner(self) -> SandboxOwner:
        assert self._entered_owner is not None, "the manager was not entered"
        return self._entered_owner

    async def __aenter__(self) -> Self:
        missing = [
            f"{name} (apt-get install {package})" for name, package in PROGRAMS.items() if not shutil.which(name)
        ]
        if os.geteuid() != 0:
            raise ManagerError("sandboxes need root; use backend='process', which isolates nothing", retry=False)
        if missing:
            raise ManagerError(f"missing: {', '.join(missing)}; run `tangram doctor` for details", retry=False)
        try:
            await run_to_completion(self._create_owner())
            await self._adopt()
            await self._prepare_owner()
        except BaseException as error:
            await run_to_completion(self._abandon_owner())
            if isinstance(error, OSError):
                raise ManagerError(f"the state directory {self._state} cannot be used: {error}", retry=False) from error
            raise
        return self

    async def _create_owner(self) -> None:
        self._entered_owner = await asyncio.to_thread(SandboxOwner, self._state, self._owner_name)

    async def _prepare_owner(self) -> None:
        owner = self._owner
        await asyncio.to_thread(owner.group.set_owner_limits, limit=self._total, cpus=self._machine.cpus)
        owner.group.delegate()
        await asyncio.to_thread(self._tidy_images, owner.orphaned_images)
        await self._get_spawner()
        if owner.has_spawner:
            await self._forget_tied_images()

    async def _abandon_owner(self) -> None:
        """Removes the owner after a failed start, or leaves it with its sandboxes to the next process of this name."""
        owner = self._entered_owner
        if owner is None:
            return
        if owner.has_spawner:
            await self._detach()
        else:
            await self._stop_spawner()
            await asyncio.to_thread(owner.remove)

    async def _adopt(self) -> None:
        """Adopt the sandboxes of the previous owner of this name."""
        owner = self._owner
        self.missing |= owner.missing
        if owner.has_spawner:
            spawner, orphans, attach_error = self._new_spawner(), {}, ""
            try:
                orphans = await spawner.attach(filter_program(), self._cgroup_directories())
                self._spawner = spawner
            except ManagerError as error:
                attach_error = str(error)
            adoption = Adoption(owner, orphans, attach_error)
            self._ids = count(adoption.number_max + 1)
            self._by_id = {sandbox.sandbox_id: sandbox for sandbox in adoption.sandboxes()}
            adopted = await asyncio.to_thread(adoption.adopt, list(self._by_id.values()))
            self._by_id = {sandbox.sandbox_id: sandbox for sandbox in adopted}
            self._sandboxes = {sandbox.name: sandbox for sandbox in adopted}
            self.missing |= adoption.missing
            for sandbox_id in [sandbox_id for sandbox_id in orphans if sandbox_id not in self._by_id]:
                with contextlib.suppress(ManagerError):  # it ends with its groups, if they were found
                    await spawner.request("close", box=sandbox_id)
        self.adopted = {name: sandbox.spec for name, sandbox in self._sandboxes.items()}
        for name in self._expected:
            if name not in self.adopted:
                self.missing.setdefault(name, NO_RECORD)

    async def __aexit__(self, *error: object) -> None:
        await run_to_completion(self._shut_down())

    async def _shut_down(self) -> None:
        await self._cancel_tasks()
        if self._keeps:
            await self._close_warm()
            if any(not sandbox.gone.done() for sandbox in self._sandboxes.values()):
                await self._detach()
                return
        await self._stop_spawner()
        self._release()
        await asyncio.to_thread(self._tidy_images, self._owner.tied_images())
        await asyncio.to_thread(self._owner.remove)

    async def _cancel_tasks(self) -> None:
        await asyncio.sleep(0)  # a task that is cancelled before its first step never runs its cleanup
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _detach(self) -> None:
        """Leave the sandboxes to the next process of this name."""
        for sandbox in self._by_id.values():
            sandbox.abandon()
        if self._spawner is not None:
            await self._spawner.detach()
        self._release()
        self._owner.release()

    def _release(self) -> None:
        for sandbox in self._by_id.values():
            sandbox.close_descriptors()
        self._sandboxes.clear()
        self._by_id.clear()
        self._files.close()

    async def _close_warm(self) -> None:
        for sandbox in self._warm.take_all():
            with contextlib.suppress(ManagerError, OSError):  # it is removed with its owner, or at the next start
                await self._end_sandbox(sandbox)

    def _tidy_images(self, names: list[str]) -> None:
        """Delete these images and unsealed layers. Blocks."""
        for name in names:
            with contextlib.suppress(InvalidAction):
                self.images.forget(name)
        self.images.sweep()
        self.images.get(HOST_IMAGE)  # made here rather than by the first sandbox

    async def _get_spawner(self) -> SpawnerClient:
        """The current spawner. If it died, its sandboxes ended with it; new sandboxes get a new one."""
        while self._spawner is None:
            async with self._spawner_lock:
                if self._spawner is None:
                    await self._start_spawner()
        return self._spawner

    async def _start_spawner(self) -> None:
        if self._owner.kept_directory is not None:
            await SpawnerLock(self._owner.kept_directory).kill_spawner()  # the previous one may still be ending
        spawner = self._new_spawner()
        try:
            await spawner.start(filter_program(), self._cgroup_directories())
            if not spawner.is_connected:
                raise ManagerError("the spawner ended while it started")
        except BaseException:
            await run_to_completion(self._abort_start(spawner))
            raise
        self._spawner = spawner

    async def _abort_start(self, spawner: SpawnerClient) -> None:
        await spawner.stop()
        if self._owner.kept_directory is not None:
            await SpawnerLock(self._owner.kept_directory).kill_spawner()

    async def _stop_spawner(self) -> None:
        """Stop the spawner; all sandboxes end with it."""
        if self._spawner is not None:
            await self._spawner.stop()

    def _new_spawner(self) -> SpawnerClient:
        return SpawnerClient(self._on_gone, self._on_spawner_end, self._owner.kept_directory, outlives=self._keeps)

    def _cgroup_directories(self) -> list[str]:
        """The control groups of the owner, one in each hierarchy."""
        return [os.path.dirname(path) for path in self._owner.group.join_files]

    def _on_gone(self, sandbox_id: str, code: int) -> None:
        sandbox = self._by_id.get(sandbox_id)
        if sandbox is not None and not sandbox.gone.done():
            sandbox.gone.set_result(f"its first process ended with {code}")

    def _on_spawner_end(self, why: str) -> None:
        self._spawner = None
        for sandbox in self._by_id.values():
            if not sandbox.gone.done():
                sandbox.gone.set_result(why)

    # ---- leases ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if isinstance(work, Exec):
            return await self._start_program(action, grant, work, output)
        name = action.sandbox
        if isinstance(work, Open):
            return await self._start_opening(name, work.spec)
        if isinstance(work, Close):
            return _ManagerTaskLease(self._close(name), self._tasks)
        if isinstance(work, Prepare):
            return _ManagerTaskLease(self._prepare(work.spec, self.images.get(work.spec.image)), self._tasks)
        assert isinstance(work, Commit)
        sandbox = self._get_sandbox(name)
        try:
            self.images.require_sealable(work.image, sandbox.image)
        except AdmissionRefused as error:
            raise ManagerError(str(error), retry=False) from error
        return _ManagerTaskLease(self._commit(sandbox, work.image), self._tasks)

    def _get_sandbox(self, name: str) -> BwrapSandbox:
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            raise sandbox_not_found(name)
        sandbox.require_alive()
        return sandbox

    async def _start_program(self, action: Action, grant: Grant, work: Exec, output: Output | None) -> Lease:
        sandbox = self._get_sandbox(action.sandbox)
        if work.session and not sandbox.image.shell.endswith("bash"):
            raise InvalidAction("session", work.session, f"an image with bash; {sandbox.image.name} has none")
        kind = BwrapSessionLease if work.session else BwrapProgramLease
        spawner = await self._get_spawner()
        lease = kind(action.id, grant, work, output, sandbox=sandbox, spawner=spawner, cpu_slots=self._cpu_slots)
        try:
            await lease.begin()
        except ManagerError as error:
            if sandbox.is_ending():
                raise sandbox.gone_error() from error
            raise
        return lease

    # ---- sandboxes ----

    async def _start_opening(self, name: str, spec: SandboxSpec) -> Lease:
        if name in self._sandboxes or name in self._opening:
            raise ManagerError(f"sandbox {name} is open already", retry=False)
        self._opening[name] = asyncio.get_running_loop().create_future()
        try:
            await self._require_supported(spec)
            image = self.images.get(spec.image)
        except BaseException:
            self._opening.pop(name).set_result(None)
            raise
        return _ManagerTaskLease(self._open(name, spec, image), self._tasks)

    async def _open(self, name: str, spec: SandboxSpec, image: StoredImage) -> LeaseResult:
        try:
            return await self._open_sandbox(name, spec, image)
        finally:
            self._opening.pop(name).set_result(None)

    async def _open_sandbox(self, name: str, spec: SandboxSpec, image: StoredImage) -> LeaseResult:
        warm = self._warm.take(spec, image)
        try:
            sandbox = warm or await self._create_sandbox(name, spec, image)
            await self._write_record(name, sandbox)
        except WORK_ERRORS as error:
            return LeaseResult(lost=f"sandbox {name} could not be created: {error}")
        sandbox.name = name
        self._sandboxes[name] = sandbox
        return LeaseResult() if warm else LeaseResult(usage=Usage(cpu_s=sandbox.group.cpu_s()))

    async def _write_record(self, name: str, sandbox: BwrapSandbox) -> None:
        """Write the record of the sandbox, by which the next process adopts it."""
        if self._owner.records is None:
            return
        record = SandboxRecord(
            name=name, box=sandbox.sandbox_id, init=sandbox.init, spec=sandbox.spec, image=sandbox.image
        )
        try:
            self._owner.records.write(record)
        except OSError as error:
            await self._end_sandbox(sandbox)
            raise ManagerError(f"its record cannot be written: {error}") from error

    async def _prepare(self, spec: SandboxSpec, image: StoredImage) -> LeaseResult:
        try:
            sandbox = await self._create_sandbox("warm", spec, image)
        except WORK_ERRORS as error:
            return LeaseResult(lost=f"a sandbox could not be created: {error}")
        surplus = self._warm.put(sandbox)
        if surplus is not None:
            await self._end_sandbox(surplus)
        return LeaseResult(usage=Usage(cpu_s=sandbox.group.cpu_s()))

    async def _create_sandbox(self, name: str, spec: SandboxSpec, image: StoredImage) -> BwrapSandbox:
        """Create the control groups and ask the spawner to start the first process, for which `become_holder` in
        spawner/child.py mounts the file systems."""
        spawner = await self._get_spawner()
        # A number, because names of callers are never part of a path.
        sandbox_id = str(next(self._ids))
        sandbox = BwrapSandbox(
            name,
            sandbox_id,
            spec,
            image,
            self._owner.group.child(sandbox_id),
            self._owner.sandboxes_directory / sandbox_id,
        )
        self._by_id[sandbox_id] = sandbox
        try:
            sandbox.directory.mkdir(mode=0o711)
            reply = await spawner.open(
                sandbox_id,
                groups=sandbox.apply_limits(),
                prepare=mount_steps(sandbox),
                init=shutil.which("catatonit"),
                argv=bwrap_argv(sandbox),
                env={"PATH": os.defpath},
                uid=0 if spec.user == "root" else SANDBOX_UID,
                rlimits={"nofile": spec.open_files_max, "core": 0},
            )
        except BaseException:
            del self._by_id[sandbox_id]
            await asyncio.to_thread(sandbox.remove)
            raise
        sandbox.init = int(reply["init"])
        return sandbox

    async def _require_supported(self, spec: SandboxSpec) -> None:
        """Root in a sandbox requires a user namespace."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if spec.open_files_max > most:
            raise InvalidAction(
                "sandbox.open_files_max", spec.open_files_max, f"at most {most}, the limit of `ulimit -Hn` here"
            )
        if spec.user != "root":
            return
        if self._user_namespaces is None:
            self._user_namespaces = await asyncio.to_thread(has_user_namespaces, SANDBOX_UID)
        if not self._user_namespaces:
            raise InvalidAction("sandbox.user", "root", "'agent': this machine allows no user namespaces")

    async def _close(self, name: str) -> LeaseResult:
        """Close a sandbox; waits if it is being opened. A failed removal can be repeated."""
        opening = self._opening.get(name)
        if opening is not None:
            await asyncio.wait({opening})
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            return LeaseResult()
        async with sandbox.closing:
            if self._sandboxes.get(name) is not sandbox:
                return LeaseResult()  # another call was faster
            try:
                await self._end_sandbox(sandbox)
            except (ManagerError, OSError) as error:
                return LeaseResult(lost=f"sandbox {name} could not be removed: {error}")
            del self._sandboxes[name]
        return LeaseResult()

    async def _end_sandbox(self, sandbox: BwrapSandbox) -> None:
        if self._owner.records is not None:
            self._owner.records.remove(sandbox.sandbox_id)
        sandbox.prepare_kill()
        if not sandbox.gone.done() and self._spawner is not None:
            try:
                await self._spawner.request("close", box=sandbox.sandbox_id)
                await asyncio.wait_for(asyncio.shield(sandbox.gone), CLOSE_S_MAX)
            except (ManagerError, TimeoutError):
                pass  # what is left is killed with its group
        self._by_id.pop(sandbox.sandbox_id, None)
        sandbox.close_descriptors()
        await asyncio.to_thread(sandbox.remove)
        if self._forgotten:
            await self._forget_unused()

    async def _commit(self, sandbox: BwrapSandbox, image: str) -> LeaseResult:
        spawner = await self._get_spawner()
        layer = self.images.new_layer()
        try:
            try:
                sandbox.freeze()
                await spawner.request(
                    "copy", box=sandbox.sandbox_id, source=f"{sandbox.directory}/upper", target=str(layer)
                )
                # The mounts outlive the first process. If that is alive after the copy it was alive throughout: no
                # write was interrupted by a kill.
                sandbox.require_alive()
            finally:
                sandbox.thaw()
            if not self._owner_name:  # an image of a named owner stays until it is deleted
                aside = self.images.replaced_name(image)
                if aside and image in self._owner.tied_images():
                    self._owner.tie_image(aside)
                self._owner.tie_image(image)
            await asyncio.to_thread(self.images.seal, layer, name=image, base=sandbox.image)
        except BaseException as error:
            await asyncio.to_thread(self.images.discard, layer)
            if isinstance(error, (*WORK_ERRORS, AdmissionRefused)):
                return LeaseResult(lost=f"sandbox {sandbox.name} could not be copied: {error}")
            raise
        return LeaseResult()

    # ---- images ----

    async def add_image(self, path: str) -> str:
        add = self.images.add_directory if await asyncio.to_thread(_is_root_file_system, path) else self.images.add_tar
        return (await add(Path(path))).name

    async def find_image(self, key: str) -> str:
        image = self.images.find_by_key(key)
        return image.name if image is not None else ""

    async def tag_image(self, key: str, name: str) -> None:
        self.images.tag(key, self.images.get(name))
        self._owner.untie_image(name)

    async def forget_image(self, name: str) -> None:
        """The image is deleted once no sandbox uses it."""
        self._forgotten[name] = self.images.forgettable(name).layers[0]
        if self._owner_name:
            self._owner.tie_image(name)  # also if this process ends before that
        await self._forget_unused()

    async def _forget_tied_images(self) -> None:
        """Images that the previous owner of this name had to delete once they are no longer used."""
        for name in self._owner.tied_images():
            try:
                self._forgotten[name] = self.images.forgettable(name).layers[0]
            except InvalidAction:
                self._owner.untie_image(name)  # it has been deleted
        await self._forget_unused()

    async def _forget_unused(self) -> None:
        in_use = {layer for sandbox in self._by_id.values() for layer in sandbox.image.layers}
        for name in [name for name, layer in self._forgotten.items() if layer not in in_use]:
            self._forgotten.pop(name, None)
            with contextlib.suppress(InvalidAction):  # another process that shares the store was faster
                await asyncio.to_thread(self.images.forget, name)
            self._owner.untie_image(name)


def _is_root_file_system(path: str) -> bool:
    """A directory that is a root file system, not an OCI layout."""
    return os.path.isdir(path) and not os.path.exists(f"{path}/index.json")
