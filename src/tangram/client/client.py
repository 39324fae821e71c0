"""The client: a connection to the pools and to everything that is opened through it.

Owns the names of sandboxes and the images made by set-up commands. `connect()` without an address starts an
orchestrator in this process, with managers for this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tangram.cancellation import unwrap_first
from tangram.client.api import RETRIES, TIMEOUT_S, Api
from tangram.client.functions import CallResult, Function, FunctionCalls
from tangram.client.models import (
    Inference,
    demand_of,
    inference_of,
    payload_of,
)
from tangram.client.quota_use import QuotaUse
from tangram.client.sandbox import Image, Sandbox
from tangram.client.transport import LocalTransport, Transport
from tangram.client.validation import (
    Lifecycle,
    PathText,
    Quotas,
    commands_of,
    path_of,
    quota_counts,
    quota_demand,
    require_cores,
    require_limits,
    seconds_of,
    variables_of,
)
from tangram.core.action import Action, Status
from tangram.core.demand import CPU, Demand
from tangram.core.demand import cores as cores_of
from tangram.core.limits import Limits
from tangram.core.messages import Decider, Event
from tangram.core.policies import DEFAULT_POLICY, policy
from tangram.core.scheduler import Scheduler
from tangram.core.sizes import parse_size
from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig
from tangram.managers.backends import create_manager
from tangram.managers.base import Executor
from tangram.managers.functions.endpoint import EndpointManager
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call, EndpointSpec, Post
from tangram.managers.http import HttpClient
from tangram.managers.models import Infer, ModelManager, Service, discover
from tangram.managers.models.devices import Cuda, DeviceSpec, Emulated
from tangram.managers.models.service import require_all
from tangram.managers.quotas.manager import REQUESTS, TOKENS, Quota, QuotaManager
from tangram.managers.work import KIB, MAINTENANCE_CORES, MEMORY_BYTES_MIN, HoldGrant, Prepare, SandboxSpec, Work
from tangram.reports import live
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import Orchestrator

T = TypeVar("T")

BACKENDS = ("sandbox", "process", "docker")
REMOTE_OPTIONS = ("url", "token", "ca", "reconnect_s")
"""Options of `connect` that apply with an address."""
PREPARE_DEMAND = Demand({CPU: cores_of(MAINTENANCE_CORES[Prepare])})
SETUP_TIMEOUT_S = 1800.0
"""Time limit of one set-up command."""
DISK_BYTES_MIN = 64 * KIB
"""Memory of a sandbox that runs set-up commands: a few small files."""
TRIAL_MEMORY = "64MiB"
"""Memory of a sandbox that only checks that its image exists."""


class Client:
    """An open connection. Use it as `async with tangram.connect() as t:`."""

    def __init__(self, transport: Transport, *, warm: int = 0) -> None:
        """`warm`: how many sandboxes the backend creates in advance."""
        self._transport = transport
        self._lifecycle = Lifecycle("the connection")
        self._prefix = f"{os.getpid():x}{secrets.token_hex(4)}"
        self._action_numbers = count(1)
        self._build_locks: dict[str, asyncio.Lock] = {}
        self._http = HttpClient()
        self._functions = FunctionCalls(transport, self._lifecycle, self._prefix, transport.quota)
        self._warm = warm

    async def __aenter__(self) -> Self:
        self._lifecycle.begin(asyncio.get_running_loop())
        await self._transport.__aenter__()
        self._lifecycle.mark_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lifecycle.require_open()
        self._lifecycle.mark_closed()
        try:
            await self._transport.__aexit__(kind, error, trace)
        finally:
            await self._http.close()

    @property
    def transport(self) -> Transport:
        """Executes the actions of this client: a LocalTransport, or a RemoteTransport after `connect(url)`."""
        return self._transport

    # ---- sandboxes ----

    def sandbox(
        self,
        *,
        image: str | Image = "host",
        memory: int | str = "1GiB",
        disk: int | str = "512MiB",
        processes: int = 512,
        open_files: int = 4096,
        network: bool = False,
        user: str = "agent",
        env: Mapping[str, str] | None = None,
        run: str = "default",
        trajectory: str = "",
        task: str = "",
    ) -> Sandbox:
        """A sandbox to be opened: `async with t.sandbox(memory="2GiB") as box:`.

        `memory` is reserved as long as the sandbox exists, and the files that it writes count as memory, up to `disk`.
        `network`: use the network of the machine; otherwise it has none. `user="root"`: root inside the sandbox,
        unprivileged outside.
        """
        spec = SandboxSpec(
            image=_image_name("image", image),
            memory_bytes=parse_size("memory", memory, least=MEMORY_BYTES_MIN),
            disk_bytes=parse_size("disk", disk, least=DISK_BYTES_MIN),
            processes_max=processes,
            open_files_max=open_files,
            network=network,
            user=user,
            env=variables_of(env),
        )
        name = f"{self._prefix}-{next(self._action_numbers)}"
        prepare = self._prepare if self._warm else None
        return Sandbox(
            self._transport, self._lifecycle, name, spec, run=run, trajectory=trajectory, task=task, on_opened=prepare
        )

    def _prepare(self, spec: SandboxSpec) -> None:
        """Create a warm sandbox in the background, as a separate action."""
        action = Action(
            id=f"{self._prefix}-warm-{next(self._action_numbers)}", demand=PREPARE_DEMAND, run="warm", kind="prepare"
        )
        self._transport.submit(action, Prepare(spec=spec))

    # ---- images ----

    async def image(
        self,
        source: PathText = "",
        *,
        base: str | Image = "",
        setup: Sequence[str] = (),
        memory: int | str = "2GiB",
        disk: int | str = "1GiB",
        network: bool = False,
        user: str = "agent",
        env: Mapping[str, str] | None = None,
        run: str = "default",
    ) -> Image:
        """Create an image from `source` (a root directory, or a tar of `docker save` or OCI) or from `base`, an
        existing image, "host" by default. The set-up commands run on it once; the result is cached under a hash of all
        this, also for other processes."""
        self._lifecycle.require_open()
        commands, variables = commands_of(setup), variables_of(env)
        if source and base:
            raise InvalidAction("base", base, "either a source or a base: the set-up commands run on the source")
        if source:
            name = await self._transport.images.add_image(path_of("source", source))
        else:
            name = _image_name("base", base or "host")
        if not commands:
            if not source:
                await self._require_image(name, run)
            return Image(name)
        key = _setup_key(name, commands, network, user, variables)
        async with self._build_locks.setdefault(key, asyncio.Lock()):
            cached = await self._transport.images.find_image(key)
            if cached:
                return Image(cached)
            options = dict(memory=memory, disk=disk, network=network, user=user, env=env, run=run)
            async with self.sandbox(image=name, trajectory=f"setup-{key[:12]}", **options) as sandbox:  # type: ignore[arg-type]
                for command in commands:
                    (await sandbox.exec(command, key="setup", timeout_s=SETUP_TIMEOUT_S)).check()
                committed = await sandbox.commit(f"setup-{key[:24]}")
            await self._transport.images.tag_image(key, committed.name)
            return committed

    async def _require_image(self, name: str, run: str) -> None:
        """Raises the error that opening a sandbox from the image raises."""
        async with self.sandbox(image=name, memory=TRIAL_MEMORY, run=run):
            pass

    async def forget(self, image: str | Image) -> None:
        """Delete an image that `commit` created. Sandboxes that were opened from it keep working."""
        self._lifecycle.require_open()
        await self._transport.images.forget_image(_image_name("image", image))

    # ---- model services ----

    def require_service(self, name: str) -> None:
        """Raises InvalidAction if there is no such model service to call."""
        self._lifecycle.require_open()
        self._transport.service(name)

    async def infer(
        self,
        service: str,
        payload: Any,
        *,
        devices: int | None = None,
        run: str = "default",
        trajectory: str = "",
        task: str = "",
        key: str = "",
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        quotas: Quotas | None = None,
        idempotent: bool = True,
    ) -> Inference:
        """Call a model service, as one action on devices: `(await t.infer("judge", {"text": "..."})).json()`.

        A payload that is neither bytes nor text is sent as JSON that may contain NaN. `devices`: how many, for a
        service with several degrees; None: the number that ends soonest. `timeout_s`: limit of the call, without
        loading the model; None: `Service.call_s_max`. `quotas`: requests of APIs, granted together with the devices,
        such as {"search": 1}. `idempotent`: repeat the call if it is lost.

        Raises InvalidAction for invalid arguments, and for a payload that the engine rejects. Every other result is
        returned; see its `status`.
        """
        self._lifecycle.require_open()
        info = self._transport.service(service)
        action = Action(
            id=f"{self._prefix}-{next(self._action_numbers)}",
            demand=demand_of(info, devices, quota_demand(quotas, self._transport.quota)),
            run=run, trajectory=trajectory, task=task, kind="infer", key=key, service=service,
            timeout_s=info.call_s_max if timeout_s is None else timeout_s, deadline_s=deadline_s, priority=priority,
            idempotent=idempotent, at_once=not quotas,
        )  # fmt: skip
        try:
            settled = await self._transport.submit(action, Infer(payload=payload_of(payload))).settled()
        except AdmissionRefused as refusal:
            return Inference(service=service, status=Status.REFUSED, reason=refusal.reason)
        return inference_of(service, settled)

    # ---- functions ----

    async def call(self, target: Function[..., T] | EndpointSpec, /, *args: Any, **options: Any) -> T:
        """Call a function or an endpoint as one action. Returns its value, or raises as `CallResult.check()` does.

        `options` are those of `try_call`, and keyword arguments of the function.
        """
        return await self._functions.call(target, *args, **options)

    async def try_call(self, target: Function[..., Any] | EndpointSpec, /, *args: Any, **options: Any) -> CallResult:
        """Like `call`, but returns every result as a record; see its `kind`. Options other than the arguments of the
        function: `run`, `trajectory`, `task`, `priority`, `deadline_s`, `idempotency_key`, `quotas`."""
        return await self._functions.try_call(target, *args, **options)

    # ---- quotas ----

    async def add_quota(self, quota: Quota) -> None:
        """Declare or replace the quota of an API. Waiting requests keep their places, and limits that the API reported
        still apply."""
        self._lifecycle.require_open()
        if not isinstance(quota, Quota):
            raise InvalidConfig("quota", quota, "a tangram.Quota, such as Quota('search', concurrent=8)")
        await self._transport.add_quota(quota)

    def quota(
        self,
        quotas: Quotas,
        *,
        requests: int = 1,
        tokens: int = 0,
        at_once: bool | None = None,
        run: str = "default",
        trajectory: str = "",
        task: str = "",
        key: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> QuotaUse:
        """A part of a quota, for a client of your own: `async with t.quota("search"): ...`.

        Entering waits until the requests may be made, with the given number of tokens if the quota counts them (an
        estimate, which `spent` corrects). Several quotas are granted together: `t.quota({"search": 1, "judge":
        {"requests": 1, "tokens": 500}})`.

        `at_once`: True if all requests are sent within a second of entering; they count from then. False: they are sent
        at any time inside the block and count from its end. None: True for one request, False for more. `deadline_s`
        limits how long entering may take.
        """
        self._lifecycle.require_open()
        if isinstance(quotas, str):
            counts = {quotas: {REQUESTS: requests, TOKENS: tokens}}
        elif (requests, tokens) == (1, 0) and quotas:
            counts = quota_counts(quotas)
        else:
            raise InvalidAction("quotas", quotas, "a name; or numbers by name, without `requests` and `tokens` beside")
        quota_by_name = {name: self._transport.quota(name) for name in counts}
        pools = {
            kind: units for name, quota in quota_by_name.items() for kind, units in quota.demand(**counts[name]).items()
        }
        if at_once is None:
            at_once = sum(count[REQUESTS] for count in counts.values()) == 1
        action = Action(
            id=f"{self._prefix}-{next(self._action_numbers)}", demand=Demand(pools), run=run, trajectory=trajectory,
            task=task, kind="api", key=key or "+".join(quota_by_name), priority=priority, deadline_s=deadline_s,
            at_once=at_once,
        )  # fmt: skip
        return QuotaUse(self._transport, self._lifecycle, quota_by_name, action)

    def api(
        self,
        name: str,
        base_url: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        run: str = "default",
        trajectory: str = "",
        task: str = "",
        key: str = "",
        priority: int = 0,
    ) -> Api:
        """An HTTP API with the quota `name`: `await t.api("search", "https://...").get("v1/search")`.

        `timeout_s` limits one try. A request that is refused, fails or does not arrive is retried up to `retries`
        times.
        """
        self._lifecycle.require_open()
        self._transport.quota(name)

        def use(tokens: int) -> QuotaUse:
            return self.quota(
                name, tokens=tokens, at_once=True, run=run, trajectory=trajectory, task=task, key=key, priority=priority
            )

        return Api(self._http, use, base_url=base_url, headers=headers, timeout_s=timeout_s, retries=retries)

    async def weigh(self, run: str, weight: float) -> None:
        """The share of a run in contended pools: a run of weight 2.0 gets twice as much as one of 1.0, the default."""
        self._lifecycle.require_open()
        await self._transport.set_weight(run, weight)

    # ---- many at once ----

    async def gather(self, *doing: Awaitable[T], label: str = "") -> list[T]:
        """Run awaitables concurrently and return their results in the given order; with a progress bar if there is a
        label and a terminal.

        When one raises, the others are cancelled and its error is raised.
        """
        with live.progress(label, "done") if label else nullcontext() as report:
            numbers = count(1)

            async def one(each: Awaitable[T]) -> T:
                result = await each
                if report is not None:
                    report(next(numbers), len(doing))
                return result

            tasks = []
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(each)) for each in doing]
            except BaseExceptionGroup as errors:
                raise unwrap_first(errors) from None
        return [task.result() for task in tasks]


def _image_name(field: str, image: str | Image) -> str:
    name = image.name if isinstance(image, Image) else image
    if not isinstance(name, str):
        raise InvalidAction(field, image, "an Image, or the name of one; t.image() creates one of a directory or a tar")
    return name


def _setup_key(base: str, setup: tuple[str, ...], network: bool, user: str, env: dict[str, str]) -> str:
    identity = json.dumps([base, setup, network, user, sorted(env.items())])
    return hashlib.sha256(identity.encode()).hexdigest()


def connect(
    url: str = "",
    *,
    token: str = "",
    ca: PathText = "",
    reconnect_s: float = 300.0,
    backend: str = "sandbox",
    cores: float | None = None,
    memory: int | str | None = None,
    policy_name: str = DEFAULT_POLICY,
    limits: Limits | None = None,
    quotas: Iterable[Quota] = (),
    services: Iterable[Service] = (),
    devices: Iterable[DeviceSpec] = (),
    record: PathText = "",
    state: PathText = "",
    warm: int = 0,
    decider: Decider | None = None,
) -> Client:
    """A connection, to be entered: `async with tangram.connect() as t:`.

    With the address of a shared service, as `tangram serve` prints it, the service executes everything. `token`
    identifies the run (default: TANGRAM_TOKEN), and `ca` names a file with the certificate that signed the service's,
    if this machine does not trust it already. `reconnect_s`: how long to retry while the service does not respond. All
    other options belong to the config of the service.

    Without an address, an orchestrator starts in this process: it owns the sandboxes, and they end with it. `backend`:
    "sandbox" (isolated, needs root), "docker" (through an engine), or "process", which isolates nothing. `cores` and
    `memory`: what all sandboxes may use together; default: all of this machine. `quotas`: limits of APIs. `services`:
    models to call, on `devices`, or else on the CUDA devices of this machine. `record`: a file for the trace, which
    `tangram sim` and `tangram trace` read. `warm`: how many sandboxes to create in advance, each like the last one that
    was opened. `decider`: replaces the scheduler.
    """
    if url:
        _require_no_embedded_options(locals())
        return _remote_client(url, token, path_of("ca", ca, InvalidConfig), seconds_of("reconnect_s", reconnect_s))
    if token or ca:
        raise InvalidConfig("token" if token else "ca", "...", "nothing without the address of a service")
    require_cores(cores)
    require_limits(limits)
    memory_bytes = None if memory is None else _memory_bytes(memory)
    folder = path_of("state", state, InvalidConfig)
    _require_backend(backend, warm)
    state_directory = Path(folder) if folder else None
    manager = create_manager(backend, cores=cores, memory_bytes=memory_bytes, state=state_directory, warm=warm)
    sink = EventSink()
    quota_manager = QuotaManager(_require_quotas(quotas), sink.send)
    machine = manager.pools()
    node = machine[0].node
    models = _create_model_manager(services, devices, node, sink.send)
    pools = (*machine, *quota_manager.pools(), *(models.pools() if models is not None else ()))
    limits = limits or Limits()
    decider = decider or Scheduler(policy(policy_name), pools, limits=limits)
    recorder = None
    if record:
        from tangram.files.atomic_file import check_writable
        from tangram.runtime.trace_recorder import record_trace

        file = path_of("record", record, InvalidConfig)
        check_writable("record", Path(file))
        recorder = record_trace(file, policy=policy_name, pools=pools, limits=limits, note=backend)
    executors: dict[type[Work], Executor] = {HoldGrant: quota_manager, Call: FunctionManager(), Post: EndpointManager()}
    if models is not None:
        executors[Infer] = models
    orchestrator = Orchestrator(decider, {node: manager}, executors, sink=sink)
    return Client(LocalTransport(orchestrator, quota_manager, models, recorder), warm=warm)


def _require_no_embedded_options(options: Mapping[str, object]) -> None:
    """Rejects options that do not apply with an address."""
    for name, parameter in inspect.signature(connect).parameters.items():
        if name not in REMOTE_OPTIONS and options[name] != parameter.default:
            expected = "no such option with an address: it belongs to the config of the service"
            raise InvalidConfig(name, options[name], expected)


def _remote_client(url: str, token: str, ca: str, reconnect_s: float) -> Client:
    from tangram.client.remote_transport import RemoteTransport

    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidConfig("url", url, "the address of a service, such as http://127.0.0.1:7433")
    if not isinstance(token, str):
        raise InvalidConfig("token", "...", "text")
    return Client(RemoteTransport(url, token or os.environ.get("TANGRAM_TOKEN", ""), ca=ca, reconnect_s=reconnect_s))


def _create_model_manager(
    services: Iterable[Service], devices: Iterable[DeviceSpec], node: str, notify: Callable[[Event], None]
) -> ModelManager | None:
    models = require_all("services", services, Service, "tangram.Service, such as [Service(name='judge', engine=...)]")
    chosen = require_all("devices", devices, Emulated | Cuda, "devices, such as [Emulated(memory_bytes=1 << 30)]")
    if not models and not chosen:
        return None
    chosen = chosen or list(discover())
    if not chosen:
        raise InvalidConfig("devices", chosen, "devices such as tangram.Emulated(...): this machine has none of CUDA")
    return ModelManager(models, chosen, notify, node=node)


def _require_quotas(quotas: Iterable[Quota]) -> list[Quota]:
    declared = list(quotas) if isinstance(quotas, Iterable) else []
    alike = all(isinstance(quota, Quota) for quota in declared) and isinstance(quotas, Iterable)
    if not alike or len({quota.name for quota in declared}) < len(declared):
        raise InvalidConfig("quotas", quotas, "a list of tangram.Quota with different names")
    return declared


def _memory_bytes(memory: int | str) -> int:
    """Memory of all sandboxes together: enough for one, and no more than the machine has."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return parse_size("memory", memory, least=MEMORY_BYTES_MIN, most=machine, error=InvalidConfig)


def _require_backend(backend: str, warm: int) -> None:
    if type(warm) is not int or warm < 0 or (warm and backend != "sandbox"):
        raise InvalidConfig("warm", warm, "a number of sandboxes, at least 0; only the sandbox backend has warm ones")
    if backend not in BACKENDS:
        raise InvalidConfig("backend", backend, f"one of {', '.join(BACKENDS)}")
