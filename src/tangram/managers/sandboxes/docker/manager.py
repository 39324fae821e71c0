"""The docker manager: sandboxes that are containers of a Docker engine on this machine.

Needs only access to the engine, neither root nor its own control groups. It uses the engine's API: `update` sets the
CPU granted to the actions of a container, `exec` runs them, `pause` freezes it in between. Owns every container and
image with its label. Makes no decisions. Promises what `managers.base` requires, with the limitations of an engine:

- an engine limits containers, not programs: concurrent actions in one sandbox share the sum of their grants. With
  `taskset` in the image each gets its own CPUs; without it, an action sees its width in its environment, and as CPUs
  only while it is the only one. An action keeps the CPUs that it started on;
- usage is measured per container, not per program (see container.py); `stop` is in processes.py, files are
  in files.py;
- the disk limit holds where the engine can limit the disk of a container (overlay2 on xfs with pquota, btrfs, zfs);
  elsewhere it limits each file;
- `user='root'` needs an engine with user namespaces (userns-remap, or rootless);
- background processes should not hold the streams of their action, but write to a file: the engine closes the streams
  some seconds after the action; until then it responds slowly, and the next action may start up to two seconds late.

An image needs `sh` and `sleep`; `bash` for sessions; `stat`, `xargs` and `rm` to list and delete files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from typing import Self

from tangram.cancellation import run_to_completion
from tangram.core.action import Action
from tangram.core.demand import CORE
from tangram.core.messages import Grant, Pool
from tangram.errors import FileFailed, ManagerError
from tangram.managers.base import FilesMixin, Lease, sandbox_not_found
from tangram.managers.sandboxes.cpuset_allocator import CpusetAllocator
from tangram.managers.sandboxes.docker.container import (
    HOLDER_UID,
    HTTP_NOT_FOUND,
    Container,
    CpuSettings,
    cpu_settings,
)
from tangram.managers.sandboxes.docker.engine import (
    CONNECT_S,
    DockerEngine,
    EngineRefused,
    Json,
    gather_bounded,
)
from tangram.managers.sandboxes.docker.files import DockerFiles
from tangram.managers.sandboxes.docker.images import DockerImages
from tangram.managers.sandboxes.docker.leases import DockerProgramLease, DockerSessionLease
from tangram.managers.sandboxes.docker.owners import OWNER_LABEL, SANDBOX_LABEL, is_dead, new_owner_name
from tangram.managers.sandboxes.docker.programs import Programs
from tangram.managers.sandboxes.leases import CompletedLease
from tangram.managers.sandboxes.machine import Machine
from tangram.managers.work import MIB, Close, Commit, Exec, LeaseResult, Open, Prepare, SandboxSpec, Work
from tangram.processes.streams import Output

DEFAULT_IMAGE = "debian:stable-slim"
CONTAINER_MEMORY_BYTES_MIN = 6 * MIB
"""The smallest memory limit that an engine accepts; less is rounded up."""
OWN_PROCESSES = 2
"""Processes of every container itself: its init, and the program that keeps it alive."""
KEEPALIVE_COMMAND = ["sleep", "infinity"]
ROOT_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
"""Capabilities of root in a user namespace: those that installing packages requires. They have no effect outside."""
CONCURRENT_REMOVALS_MAX = 8
REMOVAL_TRIES, REMOVAL_PAUSE_S = 20, 0.1
"""Attempts, and pause between them, to remove a container whose files are still in use, or that another request is
removing."""
RECONNECT_S, RECONNECT_S_MAX = 0.1, 5.0
"""Pause between attempts to reconnect to an engine that has ended: at first, and at most."""
PROBE_SCRIPT = 'for p in bash taskset; do if command -v "$p" >/dev/null; then echo "$p"; fi; done'


class DockerManager(FilesMixin):
    backend = "docker"
    isolates = True

    def __init__(
        self,
        *,
        socket: str = "/var/run/docker.sock",
        image: str = DEFAULT_IMAGE,
        cores: float | None = None,
        memory_bytes: int | None = None,
        node: str = "local",
    ) -> None:
        self.node = node
        self._machine = Machine.detect(cores=cores, memory_bytes=memory_bytes)
        self._cpusets = CpusetAllocator(
            round(self._machine.cores * CORE), self._machine.cpus, self._machine.cpus_by_numa_node
        )
        self._owner = new_owner_name()
        self._engine = DockerEngine(socket)
        self._programs = Programs(self._engine)
        self._files: DockerFiles = DockerFiles(self._engine, self._programs, self._get_container)
        self._images = DockerImages(self._engine, self._owner, image)
        self._remaps_users = False
        self._limits_disk = True
        """Whether disk limits are requested: until the engine refuses one."""
        self._containers: dict[str, Container] = {}
        """Containers, by the name of their sandbox."""
        self._containers_by_id: dict[str, Container] = {}
        self._starting: set[asyncio.Future[None]] = set()
        self._leases: set[DockerProgramLease] = set()
        self._subscribed = asyncio.Event()
        """The stream of events is open."""
        self._listen_task: asyncio.Task[None] | None = None
        self._closing = False

    def pools(self) -> tuple[Pool, ...]:
        return self._machine.pools(self.node)

    def sandboxes(self) -> tuple[str, ...]:
        return tuple(self._containers)

    # ---- start and end of the owner

    async def __aenter__(self) -> Self:
        await self._engine.connect()
        try:
            info = await self._engine.request_json("GET", "/info", purpose="describe itself")
            options = info.get("SecurityOptions") or []
            self._remaps_users = any(option.split(",")[0] in ("name=userns", "name=rootless") for option in options)
            self._listen_task = asyncio.create_task(self._listen())
            subscribed = asyncio.ensure_future(self._subscribed.wait())
            await asyncio.wait([subscribed, self._listen_task], timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            subscribed.cancel()
            self._require_open()
            await self._remove_all(is_dead)
        except BaseException:
            await run_to_completion(self._shut_down())
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await run_to_completion(self._shut_down())

    async def _shut_down(self) -> None:
        self._closing = True
        for container in self._containers_by_id.values():
            container.mark_lost("the manager was closed")
        if self._starting:
            await asyncio.wait(self._starting)  # a container that is being created must exist to be removed
        await asyncio.gather(*(lease.wait() for lease in self._leases), return_exceptions=True)
        try:
            await self._remove_all(lambda owner: owner == self._owner)
        finally:
            for container in self._containers.values():
                await container.close()
            self._containers.clear()
            self._containers_by_id.clear()
            if self._listen_task is not None:
                self._listen_task.cancel()
                await asyncio.gather(self._listen_task, return_exceptions=True)
            await self._engine.close()

    async def _remove_all(self, matches_owner: Callable[[str], bool]) -> None:
        """Containers first: an image in use cannot be removed."""
        query = {"all": "true", "filters": json.dumps({"label": [OWNER_LABEL]})}
        listed = await self._engine.request_json("GET", "/containers/json", purpose="list containers", query=query)
        ids = [listing["Id"] for listing in listed if matches_owner(listing["Labels"].get(OWNER_LABEL, ""))]
        failures = await gather_bounded(CONCURRENT_REMOVALS_MAX, [self._remove(id) for id in ids])
        await self._images.remove_all(matches_owner)
        for failure in failures:
            if failure is not None:
                raise failure

    async def _remove(self, id_or_name: str) -> None:
        """Remove a container. It need not exist."""
        path, query = f"/containers/{id_or_name}", {"force": "true", "v": "true"}
        for tries_left in reversed(range(REMOVAL_TRIES)):
            try:
                await self._engine.request_json("DELETE", path, purpose="remove a container", query=query)
                return
            except EngineRefused as error:
                if error.status == HTTP_NOT_FOUND:
                    return
                if not tries_left:
                    raise
                await asyncio.sleep(REMOVAL_PAUSE_S)

    # ---- events of the engine ----

    async def _listen(self) -> None:
        """Handles the events of the engine and reconnects when it ends. Marks all containers as lost then: they end
        with it, or at least the streams to the programs in them."""
        filters = {
            "type": ["container"],
            "event": ["die", "exec_die", "oom"],
            "label": [f"{OWNER_LABEL}={self._owner}"],
        }
        pause_s = RECONNECT_S
        while True:
            with contextlib.suppress(ManagerError, ValueError):
                await self._engine.events(filters, self._subscribed.set, self._on_event)
            if self._subscribed.is_set():
                pause_s = RECONNECT_S
            self._subscribed.clear()
            for container in self._containers_by_id.values():
                container.mark_lost("the Docker engine ended")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    def _on_event(self, event: Json) -> None:
        actor = event["Actor"]
        container = self._containers_by_id.get(actor["ID"])
        if event["Action"] == "exec_die":
            self._programs.on_exec_die(actor["Attributes"]["execID"], int(actor["Attributes"]["exitCode"]))
        elif container is not None and event["Action"] == "oom":
            container.oom_events += 1
        elif container is not None and event["Action"] == "die":
            container.mark_lost(f"its container ended with exit code {actor['Attributes'].get('exitCode', '?')}")

    def _require_open(self) -> None:
        if self._closing:
            raise ManagerError("the docker manager is closed", retry=False)
        if not self._subscribed.is_set():
            raise ManagerError(f"the Docker engine at {self._engine.socket} ended; reconnecting")

    # ---- leases ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        self._require_open()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starting.add(done)
        try:
            return await self._start(action, grant, work, output)
        finally:
            self._starting.discard(done)
            done.set_result(None)

    async def _start(self, action: Action, grant: Grant, work: Work, output: Output | None) -> Lease:
        if isinstance(work, Exec):
            return await self._start_program(action, grant, work, output)
        if isinstance(work, Open):
            await self._open(action.sandbox, work.spec)
        elif isinstance(work, Close):
            await self._close(action.sandbox)
        elif isinstance(work, Prepare):
            raise ManagerError("the docker backend cannot prepare sandboxes; use the sandbox backend", retry=False)
        else:
            assert isinstance(work, Commit)
            await self._images.commit(self._get_container(action.sandbox), work.image)
        return CompletedLease(LeaseResult())

    def _get_container(self, sandbox: str) -> Container:
        container = self._containers.get(sandbox)
        if container is None or not container.ready:
            raise sandbox_not_found(sandbox)
        container.require_alive()
        return container

    async def _start_program(self, action: Action, grant: Grant, work: Exec, output: Output | None) -> Lease:
        lease = (DockerSessionLease if work.session else DockerProgramLease)(
            action.id,
            grant,
            work,
            output,
            container=self._get_container(action.sandbox),
            programs=self._programs,
            cpusets=self._cpusets,
        )
        await lease.begin()
        self._leases.add(lease)
        lease.add_done_callback(self._leases.discard)
        return lease

    # ---- sandboxes ----

    async def _open(self, sandbox: str, spec: SandboxSpec) -> None:
        if sandbox in self._containers:
            raise ManagerError(f"sandbox {sandbox} is open already", retry=False)
        if spec.user == "root" and not self._remaps_users:
            raise ManagerError(
                "root in a container is root of the machine, unless the Docker engine maps users: "
                "start it with --userns-remap=default, or use user='agent'",
                retry=False,
            )
        container = Container(self._engine, name=f"tangram-{secrets.token_hex(8)}", sandbox=sandbox, spec=spec)
        self._containers[sandbox] = container
        try:
            await self._create_sandbox(container)
        except BaseException as error:
            self._containers_by_id.pop(container.id, None)
            await run_to_completion(self._remove(container.name))
            del self._containers[sandbox]
            if isinstance(error, FileFailed):
                raise ManagerError(f"the image of {sandbox} cannot be used: {error}", retry=False) from error
            raise
        finally:
            container.opened.set()

    async def _create_sandbox(self, container: Container) -> None:
        """Create and start the container; from then on container.py pauses and resumes it."""
        container.image = image = await self._images.find(container.spec.image)
        cpu = cpu_settings(reserved=CORE, limit=CORE, cpuset=",".join(map(str, self._machine.cpus)))
        await run_to_completion(self._create_container(container, cpu))
        self._containers_by_id[container.id] = container
        await self._files.make_directories(container)
        await self._engine.request_json("POST", f"/containers/{container.id}/start", purpose="start a container")
        container.on_started(await self._first_pid(container), cpu)
        if image.programs is None:
            try:
                probe = await self._programs.run_script(container, PROBE_SCRIPT)
            except ManagerError:
                await self._first_pid(container)  # it may have ended meanwhile, which explains more
                raise
            container.image = self._images.record_programs(image, probe.stdout.decode(errors="replace").split())
        await container.apply_grants()
        self._require_open()
        container.require_alive()
        container.ready = True

    async def _first_pid(self, container: Container) -> int:
        """The pid of the container's first process. Raises ManagerError if it has ended."""
        description = await self._engine.request_json(
            "GET", f"/containers/{container.id}/json", purpose="describe a container"
        )
        state = description["State"]
        if not state["Running"]:
            raise ManagerError(
                f"the container of {container.sandbox} ended immediately with exit code {state['ExitCode']}; "
                f"expected that `{' '.join(KEEPALIVE_COMMAND)}` runs in its image {container.spec.image}",
                retry=False,
            )
        return int(state["Pid"])

    async def _create_container(self, container: Container, cpu: CpuSettings) -> None:
        """Create the container, with a disk limit unless the engine refuses it."""
        limits_disk = self._limits_disk
        try:
            created = await self._post_create(container, cpu, limits_disk)
        except EngineRefused as error:
            if not limits_disk or "storage-opt" not in error.reason:
                raise
            self._limits_disk = False
            created = await self._post_create(container, cpu, limits_disk=False)
        container.id = created["Id"]

    async def _post_create(self, container: Container, cpu: CpuSettings, limits_disk: bool) -> Json:
        body = create_body(container, cpu, self._owner, limits_disk=limits_disk)
        query = {"name": container.name}
        return await self._engine.request_json(
            "POST", "/containers/create", purpose="create a container", query=query, body=body
        )

    async def _close(self, sandbox: str) -> None:
        """End all programs in it and remove it. Can be repeated if it fails."""
        container = self._containers.get(sandbox)
        if container is None:
            return
        container.mark_lost("it was closed")
        await container.opened.wait()  # a container that is being created must exist to be removed
        if self._containers.get(sandbox) is not container:
            return  # it could not be opened, or another call has removed it
        await run_to_completion(self._remove(container.name))
        await run_to_completion(container.close())
        self._containers.pop(sandbox, None)
        self._containers_by_id.pop(container.id, None)
        await self._images.remove_forgotten()

    # ---- images ----

    async def add_image(self, path: str) -> str:
        return await self._images.add(path)

    async def find_image(self, key: str) -> str:
        return await self._images.find_by_key(key)

    async def tag_image(self, key: str, name: str) -> None:
        await self._images.tag(key, name)

    async def forget_image(self, name: str) -> None:
        await self._images.forget(name)


def create_body(container: Container, cpu: CpuSettings, owner: str, *, limits_disk: bool) -> Json:
    spec = container.spec
    user = 0 if spec.user == "root" else HOLDER_UID
    ulimits = {"nofile": spec.open_files_max, "core": 0}
    if not limits_disk:
        ulimits["fsize"] = spec.disk_bytes
    return {
        "Image": container.image.id,
        "Entrypoint": KEEPALIVE_COMMAND,
        "Cmd": [],
        "User": f"{user}:{user}",
        "Hostname": "sandbox",
        "Labels": {OWNER_LABEL: owner, SANDBOX_LABEL: container.sandbox},
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            **cpu,
            "Memory": max(spec.memory_bytes, CONTAINER_MEMORY_BYTES_MIN),
            "MemorySwap": max(spec.memory_bytes, CONTAINER_MEMORY_BYTES_MIN),
            "PidsLimit": spec.processes_max + OWN_PROCESSES,
            "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits.items()],
            "StorageOpt": {"size": str(spec.disk_bytes)} if limits_disk else {},
            "NetworkMode": "host" if spec.network else "none",
            "CapDrop": ["ALL"],
            "CapAdd": ROOT_CAPABILITIES if user == 0 else [],
            "SecurityOpt": ["no-new-privileges"],
            "Init": True,
            "LogConfig": {"Type": "none"},
            "IpcMode": "private",
        },
    }
