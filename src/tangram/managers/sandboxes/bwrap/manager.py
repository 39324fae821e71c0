"""The sandbox manager: sandboxes on this machine that hold cores only while they act.

Owns every sandbox that it opened, from its state directory to its control groups. Decides nothing: grants say who runs
with how much. Promises what `managers.base` asks, and that sandboxes die with their owner. Those of an owner with a
name that keeps them do not: they stand still until the next process of that name adopts them.
"""

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
from types import TracebackType
from typing import Any, Self

from tangram.core.action import Action, Usage
from tangram.core.demand import CORE
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig, ManagerError
from tangram.managers.base import FiledApart, Lease
from tangram.managers.sandboxes.bwrap.adoption import Adoption
from tangram.managers.sandboxes.bwrap.files import Filing
from tangram.managers.sandboxes.bwrap.images.store import SANDBOX_UID, Image, ImageStore
from tangram.managers.sandboxes.bwrap.leases import Placement, ProgramLease, SessionLease
from tangram.managers.sandboxes.bwrap.owner import CALLED, Owner, state_directory
from tangram.managers.sandboxes.bwrap.records import Record
from tangram.managers.sandboxes.bwrap.sandbox import Sandbox
from tangram.managers.sandboxes.bwrap.seccomp import filter_program
from tangram.managers.sandboxes.bwrap.spawner.client import Spawning
from tangram.managers.sandboxes.bwrap.spawner.lock import Keeping
from tangram.managers.sandboxes.bwrap.spawner.mounts import bubblewrap, steps
from tangram.managers.sandboxes.cpuset_allocator import Cores
from tangram.managers.sandboxes.machine import Machine, has_user_namespaces
from tangram.managers.work import GIB, HOST_IMAGE, Close, Commit, Ended, Exec, Open, Prepare, SandboxSpec, Work
from tangram.processes.streams import Output

CLOSE_S_MAX = 10.0
"""Until its first process has ended; then its control group is killed all the same."""

PROGRAMS = {"bwrap": "bubblewrap", "catatonit": "catatonit", "setpriv": "util-linux", "cp": "coreutils"}
"""What must be installed, and the package of Debian that has it."""
NO_RECORD = "it did not survive the end of the last owner: there is no record of it"


class Warm:
    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._kept: list[Sandbox] = []
        """The oldest first."""

    def take(self, spec: SandboxSpec, image: Image) -> Sandbox | None:
        """One that was made to this very specification, of this very image; it is the caller's then."""
        for sandbox in self._kept:
            if sandbox.spec == spec and sandbox.image == image and not sandbox.gone.done():
                self._kept.remove(sandbox)
                return sandbox
        return None

    def put(self, sandbox: Sandbox) -> Sandbox | None:
        """Keep one. Returns the one that has to go for it, which may be itself."""
        self._kept.append(sandbox)
        return self._kept.pop(0) if len(self._kept) > self._count_max else None

    def take_all(self) -> list[Sandbox]:
        """Nobody will ask for one any more."""
        found, self._kept = self._kept, []
        return found


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
        owner: str = "",
        keeps: bool = True,
        expected: Iterable[str] = (),
    ) -> None:
        """`warm`: how many sandboxes that wait for a caller are kept at most. `owner`: the name under which those of
        the last process of that name are adopted, and sandboxes kept beyond the life of this one; not `keeps`: they
        end with it, however it ends. `expected`: the sandboxes that the caller believes to be there."""
        if owner and not CALLED.fullmatch(owner):
            raise InvalidConfig("owner", owner, "up to 41 small letters, digits and '-', not '-' first")
        self.node = node
        self.adopted: dict[str, SandboxSpec] = {}
        """Sandboxes that were there before this process, by the name that the caller knows."""
        self.missing: dict[str, str] = {}
        """Those that were on record or expected and are not there, and why. A record that cannot be read says not of
        whom it is: it stands under the name of its file."""
        self._called = owner
        self._keeps = bool(owner) and keeps
        self._expected = tuple(expected)
        self._state = state or state_directory()
        self._machine = Machine.of_this(cores=cores, memory_bytes=memory_bytes)
        self._total = round(self._machine.cores * CORE)
        self._cores = Cores(self._total, self._machine.cpus, self._machine.cpus_by_cell)
        self._numbers = count(1)
        self._sandboxes: dict[str, Sandbox] = {}
        """By the name that the caller knows."""
        self._opening: dict[str, asyncio.Future[None]] = {}
        """By the name that the caller knows; done when it is open, or could not be opened."""
        self._by_box: dict[str, Sandbox] = {}
        """All, those that wait for a caller included."""
        self._warm = Warm(warm)
        self._forgotten: dict[str, str] = {}
        """Images that go as soon as no sandbox stands on them."""
        self._user_namespaces: bool | None = None
        self._place = Placement(self._cores)
        self._owner: Owner | None = None
        self._spawning: Spawning | None = None
        self._renewing = asyncio.Lock()
        """Held while a spawner is started."""
        self._filing: Filing = Filing(self._found, self._running_spawner)

    @functools.cached_property
    def images(self) -> ImageStore:
        """Whoever only makes a manager, and never enters it, makes no folders."""
        return ImageStore(self._state / "images")

    def pools(self) -> tuple[Pool, ...]:
        machine = self._machine
        return cpu_node(self.node, machine.cores, machine.memory_bytes / GIB, numa_nodes=len(machine.cpus_by_cell) or 1)

    def sandboxes(self) -> tuple[str, ...]:
        return tuple(self._sandboxes)

    # ---- the owner's life ----

    async def __aenter__(self) -> Self:
        missing = [
            f"{name} (apt-get install {package})" for name, package in PROGRAMS.items() if not shutil.which(name)
        ]
        if os.geteuid() != 0:
            raise ManagerError("sandboxes need root; use backend='process', which isolates nothing", retry=False)
        if missing:
            raise ManagerError(f"missing: {', '.join(missing)}; `tangram doctor` says more", retry=False)
        self._owner = owner = await asyncio.to_thread(Owner, self._state, self._called)
        try:
            await self._take_over()
            await asyncio.to_thread(owner.group.set_bounds, limit=self._total, cpus=self._machine.cpus)
            owner.group.delegate()
            await asyncio.to_thread(self._tidy_images, owner.orphans)
            await self._running_spawner()
            if owner.returns:
                await self._forget_as_noted()
        except BaseException as error:
            if owner.returns:
                await self._leave_behind()
            else:
                await asyncio.to_thread(owner.leave)
            if isinstance(error, OSError):
                raise ManagerError(f"the state directory {self._state} cannot be used: {error}", retry=False) from error
            raise
        return self

    async def _take_over(self) -> None:
        """What the last owner of this name left, if there is one."""
        assert self._owner is not None
        owner = self._owner
        self.missing |= owner.missing
        if owner.returns:
            spawning, left, why_none = self._new_spawning(), {}, ""
            try:
                left = await spawning.attach(filter_program(), self._groups())
                self._spawning = spawning
            except ManagerError as error:
                why_none = str(error)
            adoption = Adoption(owner, left, why_none)
            self._numbers = count(adoption.number_max + 1)
            self._by_box = {sandbox.box: sandbox for sandbox in adoption.sandboxes()}
            back = await asyncio.to_thread(adoption.take_over, list(self._by_box.values()))
            self._by_box = {sandbox.box: sandbox for sandbox in back}
            self._sandboxes = {sandbox.name: sandbox for sandbox in back}
            self.missing |= adoption.missing
            for box in [box for box in left if box not in self._by_box]:
                with contextlib.suppress(ManagerError):  # it ends with its groups, if they were found
                    await spawning.request("close", box=box)
        self.adopted = {name: sandbox.spec for name, sandbox in self._sandboxes.items()}
        for name in self._expected:
            if name not in self.adopted:
                self.missing.setdefault(name, NO_RECORD)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        assert self._owner is not None
        if self._keeps:
            await self._end_warm()
            if any(not sandbox.gone.done() for sandbox in self._sandboxes.values()):
                await self._leave_behind()
                return
        if self._spawning is not None:
            await self._spawning.stop()  # every sandbox dies with it
        self._let_go()
        await asyncio.to_thread(self._tidy_images, self._owner.images())
        await asyncio.to_thread(self._owner.leave)

    async def _leave_behind(self) -> None:
        """The sandboxes, for the next process of this name."""
        assert self._owner is not None
        for sandbox in self._by_box.values():
            sandbox.abandon()
        if self._spawning is not None:
            await self._spawning.leave()
        self._let_go()
        self._owner.let_go()

    def _let_go(self) -> None:
        for sandbox in self._by_box.values():
            sandbox.close_descriptors()
        self._sandboxes.clear()
        self._by_box.clear()
        self._filing.close()

    async def _end_warm(self) -> None:
        for sandbox in self._warm.take_all():
            with contextlib.suppress(ManagerError, OSError):  # it goes with its owner, or at the next start
                await self._end_sandbox(sandbox)

    async def close_all(self) -> None:
        """End every sandbox."""
        await self._end_warm()
        ended = await asyncio.gather(*[self._close(name) for name in list(self._sandboxes)])
        lost = [each.lost for each in ended if each.lost]
        if lost:
            raise ManagerError("; ".join(lost))

    def _tidy_images(self, names: list[str]) -> None:
        """Forget these, and what was never finished. Blocks."""
        for name in names:
            with contextlib.suppress(InvalidAction):
                self.images.forget(name)
        self.images.sweep()
        self.images.get(HOST_IMAGE)  # made here rather than by the first sandbox

    async def _running_spawner(self) -> Spawning:
        """A spawner that died took its sandboxes along; new ones get a new one."""
        while self._spawning is None:
            async with self._renewing:
                if self._spawning is None:
                    await self._start_spawner()
        return self._spawning

    async def _start_spawner(self) -> None:
        assert self._owner is not None
        if self._owner.kept is not None:
            await Keeping(self._owner.kept).end()  # the last one may not quite have ended
        self._spawning = spawning = self._new_spawning()
        try:
            await spawning.start(filter_program(), self._groups())
        except (ManagerError, OSError):
            if self._spawning is spawning:
                self._spawning = None
            raise

    def _new_spawning(self) -> Spawning:
        assert self._owner is not None
        return Spawning(self._on_gone, self._on_spawner_end, self._owner.kept, outlives=self._keeps)

    def _groups(self) -> list[str]:
        """The control groups of the owner, one in each hierarchy."""
        assert self._owner is not None
        return [os.path.dirname(path) for path in self._owner.group.join_files]

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
            return await self._start_opening(name, work.spec)
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
        sandbox.require_alive()
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
                raise sandbox.gone_error() from error
            raise
        return lease

    # ---- sandboxes ----

    async def _start_opening(self, name: str, spec: SandboxSpec) -> Lease:
        if name in self._sandboxes or name in self._opening:
            raise ManagerError(f"sandbox {name} is open already", retry=False)
        self._opening[name] = asyncio.get_running_loop().create_future()
        try:
            await self._require_possible(spec)
            image = self.images.get(spec.image)
        except BaseException:
            self._opening.pop(name).set_result(None)
            raise
        return _Errand(self._open(name, spec, image))

    async def _open(self, name: str, spec: SandboxSpec, image: Image) -> Ended:
        try:
            return await self._opened(name, spec, image)
        finally:
            self._opening.pop(name).set_result(None)

    async def _opened(self, name: str, spec: SandboxSpec, image: Image) -> Ended:
        warm = self._warm.take(spec, image)
        try:
            sandbox = warm or await self._make(name, spec, image)
            await self._record(name, sandbox)
        except ManagerError as error:
            return Ended(lost=f"sandbox {name} could not be made: {error}")
        sandbox.name = name
        self._sandboxes[name] = sandbox
        return Ended() if warm else Ended(usage=Usage(cpu_s=sandbox.group.cpu_s()))

    async def _record(self, name: str, sandbox: Sandbox) -> None:
        """From now on it is the caller's, also after this process."""
        assert self._owner is not None
        if self._owner.records is None:
            return
        record = Record(name=name, box=sandbox.box, init=sandbox.init, spec=sandbox.spec, image=sandbox.image)
        try:
            self._owner.records.write(record)
        except OSError as error:
            await self._end_sandbox(sandbox)
            raise ManagerError(f"its record cannot be written: {error}") from error

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
                prepare=steps(sandbox),
                init=shutil.which("catatonit"),
                argv=bubblewrap(sandbox),
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
        """Of one that is being opened, when it is open. One that could not be removed can be closed again."""
        opening = self._opening.get(name)
        if opening is not None:
            await asyncio.wait({opening})
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            return Ended()
        async with sandbox.closing:
            if self._sandboxes.get(name) is not sandbox:
                return Ended()  # another one was faster
            try:
                await self._end_sandbox(sandbox)
            except (ManagerError, OSError) as error:
                return Ended(lost=f"sandbox {name} could not be removed: {error}")
            del self._sandboxes[name]
        return Ended()

    async def _end_sandbox(self, sandbox: Sandbox) -> None:
        assert self._owner is not None
        if self._owner.records is not None:
            self._owner.records.remove(sandbox.box)
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
                # The mounts outlive the first process. One that is alive after the copy was alive throughout: nothing
                # was killed in the middle of a write.
                sandbox.require_alive()
            finally:
                sandbox.go_on()
            if not self._called:  # an image of an owner with a name stays until it is forgotten
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
        assert self._owner is not None
        self._forgotten[name] = self.images.forgettable(name).layers[0]
        if self._called:
            self._owner.keep_with(name)  # also if this process ends before that
        await self._forget_unused()

    async def _forget_as_noted(self) -> None:
        """What the last owner of this name was asked to forget, while a sandbox stood on it."""
        assert self._owner is not None
        for name in self._owner.images():
            try:
                self._forgotten[name] = self.images.forgettable(name).layers[0]
            except InvalidAction:
                self._owner.let_stay(name)  # it has gone
        await self._forget_unused()

    async def _forget_unused(self) -> None:
        assert self._owner is not None
        in_use = {layer for sandbox in self._by_box.values() for layer in sandbox.image.layers}
        for name in [name for name, layer in self._forgotten.items() if layer not in in_use]:
            self._forgotten.pop(name, None)
            with contextlib.suppress(InvalidAction):  # another process that shares the store was faster
                await asyncio.to_thread(self.images.forget, name)
            self._owner.let_stay(name)


def _is_root(path: str) -> bool:
    """A directory that is a root file system, not the layout of an OCI image."""
    return os.path.isdir(path) and not os.path.exists(f"{path}/index.json")
