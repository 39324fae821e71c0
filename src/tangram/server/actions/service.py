"""The action service: tenants submit actions, wait for them, follow their output and cancel them.

Owns the objects of tenants: live actions by id, open sandboxes, followed outputs. Promises:

- A tenant never sees or touches the objects of another.
- An acknowledged action is in the journal, and repeated submissions are one action.
- A result is kept until its caller acknowledges it or it expires.
- An abandoned sandbox or held quota is released after a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import count

import msgspec

from tangram.config import RunLimits
from tangram.core.action import Action, Outcome, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.core.messages import Concluded, Pool, PoolChanged, RunChanged
from tangram.errors import AdmissionRefused, InvalidInput, ManagerError, TangramError
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call, Post
from tangram.managers.quotas.adaptive_rate import parse_rate_limit
from tangram.managers.quotas.manager import Quota, QuotaManager
from tangram.managers.work import MAINTENANCE_CORES, MIB, Close, Commit, Exec, HoldGrant, Open, Prepare, SandboxSpec
from tangram.runtime.error_records import Draining, NotFound
from tangram.runtime.orchestrator import Orchestrator, SettledAction
from tangram.runtime.wire import ActionReply, AnyWork, Caps, OutputChunk, SandboxReply, SettledReply, Submission
from tangram.server.actions.instance_limits import InstanceLimits
from tangram.server.actions.output_buffer import EndedOutputs, OutputBuffer
from tangram.server.actions.registry import ActionRegistry, RegisteredAction, refused_action
from tangram.server.actions.tenant_images import TenantImages
from tangram.server.actions.translate import (
    AdmissionPolicy,
    TenantNamespace,
    endpoint_pool,
    function_pool,
    running_pool,
    translate,
)
from tangram.server.drain_gate import DrainGate
from tangram.server.journal.adapter import decode_settled, encode
from tangram.server.journal.journal import Journal, JournalFailed
from tangram.server.journal.store import JournalPhase
from tangram.server.tenants import Principal, tenant_of

SWEEP_INTERVAL_S = 5.0
"""Interval of the search for abandoned sandboxes and quotas."""
FUNCTION_POOLS_PER_TENANT_MAX = 200
"""Functions and endpoints of one run that have a pool; the least recently called lose theirs."""
INLINE_RESULT_BYTES_MAX = 192 << 10
"""Larger results are fetched by a separate request: base64 in JSON adds a third."""
LOST_SANDBOXES_MAX = 10_000
"""Lost sandboxes whose reason is kept."""

log = logging.getLogger("tangram.server")


class ActionService:
    def __init__(
        self,
        orchestrator: Orchestrator,
        journal: Journal,
        quotas: QuotaManager,
        images: TenantImages,
        functions: FunctionManager,
        registry: ActionRegistry,
        instance_limits: InstanceLimits,
        drain_gate: DrainGate,
        *,
        admission_policy: AdmissionPolicy,
        limits: RunLimits,
        node: str,
        warm: bool,
        now: Callable[[], float],
    ) -> None:
        """`warm`: after a sandbox was opened, another one like it is prepared."""
        self.orchestrator = orchestrator
        self.journal = journal
        self.limits = limits
        self.drain_gate = drain_gate
        self._lost_sandboxes: dict[str, str] = {}
        """Sandboxes that did not survive a restart, with the reason."""
        self._quotas = quotas
        self._images = images
        self.admission_policy = admission_policy
        self._node = node
        self._now = now
        self._functions = functions
        self._registry = registry
        self._instance_limits = instance_limits
        self._ended_outputs = EndedOutputs(now)
        self._function_pools_by_tenant: dict[str, dict[str, None]] = {}
        """Pools of functions and endpoints, least recently called first."""
        self._capped_runs: set[str] = set()
        """Runs with a limit on running actions."""
        self._keeps_warm = warm
        self._warm_numbers = count(1)

    def namespace(self, caller: Principal) -> TenantNamespace:
        return TenantNamespace(caller.tenant, self._images.by_name)

    # ---- actions ----

    async def submit(self, caller: Principal, submission: Submission) -> RegisteredAction | SettledAction:
        """Returns when the action is in the journal. Raises InvalidInput, AdmissionRefused or Unauthorized for a
        rejected one; nothing of it is stored."""
        if self.journal.unfetched_bytes[caller.tenant] >= self.limits.results_bytes_max:
            await self.journal.flush()  # acknowledgements may be pending
        caller.require_not_revoked()
        action, work = translate(submission, caller, self.namespace(caller), self.admission_policy)
        live, is_mine = self._registry.actions.get(action.id), False
        records = encode(action), encode(work)
        size = sum(map(len, records))
        if live is None:
            try:
                self._require_capacity(caller, action, work, size)
            except (AdmissionRefused, ManagerError):
                known_result = await self.journal.result(action.id)
                if known_result is None:
                    raise
                return decode_settled(known_result)  # a repeated submission needs no capacity
            live, is_mine = self._register(action, work, size, follow=submission.follow), True
        try:
            known = await self.journal.record_submission(action.id, action.run, *records)
        except BaseException as error:
            if is_mine:
                self._abandon(live)
            if isinstance(error, JournalFailed):
                self.orchestrator.fail(error)
            raise
        if known is not None and known.phase is JournalPhase.SETTLED:
            if is_mine:
                self._abandon(live)
            assert known.result is not None
            return decode_settled(known.result)
        if is_mine:
            await self._submit_to_orchestrator(live)
        return live

    def _require_capacity(self, caller: Principal, action: Action, work: AnyWork, size: int) -> None:
        """`size`: bytes of the encoded action. Raises AdmissionRefused, NotFound or Draining."""
        if self.drain_gate.is_draining:
            raise Draining
        if (
            isinstance(work, Exec | Commit)
            and action.sandbox not in self._registry.sandboxes
            and action.sandbox not in self._lost_sandboxes
        ):
            raise NotFound("sandbox", self.namespace(caller).unqualify(action.sandbox))
        most = caller.caps.waiting_max or self.limits.waiting_max
        if self._registry.actions_by_tenant[caller.tenant] >= most:
            reason = f"this run has {most} live actions, the maximum; wait until some have settled"
            raise AdmissionRefused("waiting_max", reason)
        self._require_byte_capacity(caller.tenant, size)
        if isinstance(work, Open):
            self._instance_limits.require_sandbox_capacity(caller.tenant)
        if isinstance(work, Call):
            self._instance_limits.require_call_capacity(caller.tenant)
        if isinstance(work, Commit):
            self._images.require_capacity(caller.tenant, self.limits.images_max, work.image)

    def _require_byte_capacity(self, tenant: str, size: int) -> None:
        most, waiting = self.limits.waiting_bytes_max, self._registry.bytes_by_tenant[tenant]
        if waiting + size > most:
            reason = (
                f"this action has {size} bytes, live actions of this run have {waiting}, and the maximum is {most};"
                " wait until some have settled, or write large input to a file of the sandbox"
            )
            raise AdmissionRefused("waiting_bytes_max", reason)
        most, kept = self.limits.results_bytes_max, self.journal.unfetched_bytes[tenant]
        if kept >= most:
            reason = (
                f"unacknowledged results of this run have {kept} bytes, and the maximum is {most}; fetch them"
                " and acknowledge them (POST /v1/acknowledge)"
            )
            raise AdmissionRefused("results_bytes_max", reason)

    def _register(self, action: Action, work: AnyWork, size: int, *, follow: bool) -> RegisteredAction:
        output = OutputBuffer(self.limits.output_bytes_max) if follow else None
        live = self._registry.register(action, work, size, output)
        self._refresh_instance_limits(tenant_of(action.id))
        return live

    def _unregister(self, live: RegisteredAction) -> None:
        """Removes an action that has settled; only the journal knows it from now on."""
        if self._registry.unregister(live) and live.output is not None:
            self._ended_outputs.add(live.action.id, live.output)
        self._refresh_instance_limits(tenant_of(live.action.id))

    def _refresh_instance_limits(self, tenant: str) -> None:
        """Ends idle instances of functions that are over the limit since a sandbox was opened or a cap lowered."""
        if self._instance_limits.refresh(tenant):
            self._functions.trim(tenant)

    def _abandon(self, live: RegisteredAction) -> None:
        """Drops an action that has not started; its waiters get NotFound."""
        self._unregister(live)
        live.settled.set_exception(NotFound("action", live.action.id))
        live.settled.exception()

    async def _submit_to_orchestrator(self, live: RegisteredAction) -> bool:
        """Returns False if the action settled immediately. It is in the journal, so a refusal is its outcome."""
        action = live.action
        if isinstance(live.work, Exec | Commit) and action.sandbox not in self._registry.sandboxes:
            reason = self._lost_sandboxes.get(action.sandbox, "it did not survive a restart of the service")
            self._resolve(live, await self.conclude(action, Status.LOST, f"its sandbox is gone: {reason}"))
            return False
        try:
            self._ensure_pool(tenant_of(action.id), live.work)
            if action.run in self._capped_runs:
                live.limit_running()
            self.orchestrator.submit_ticket(live)
        except (AdmissionRefused, InvalidInput) as error:
            refused = refused_action(action.id, error)
            await self.journal.record_settled(action.id, encode(refused))
            self._resolve(live, refused)
            return False
        live.settled.add_done_callback(lambda _: self._on_settled(live))
        if live.cancel_requested:
            self.orchestrator.cancel(action.id, live.cancel_reason)
        return True

    def _resolve(self, live: RegisteredAction, settled: SettledAction) -> None:
        """Settles an action that the orchestrator does not have."""
        live.resolve(settled)
        if not live.started.done():
            live.started.set_result(None)
        self._unregister(live)

    def _on_settled(self, live: RegisteredAction) -> None:
        if live.settled.exception() is not None:
            return  # the orchestrator has ended; the action stays in the journal
        succeeded = live.settled.result().outcome.status is Status.SUCCEEDED
        if self._keeps_warm and isinstance(live.work, Open) and succeeded:
            self._submit_warm_sandbox(live.work)
        self._unregister(live)

    def _submit_warm_sandbox(self, work: Open) -> None:
        """Prepares a sandbox like this one for a later opening."""
        action = Action(
            id=f"warm-{next(self._warm_numbers)}",
            demand=Demand({CPU: cores(MAINTENANCE_CORES[Prepare])}),
            run="warm",
            kind="prepare",
        )
        with contextlib.suppress(AdmissionRefused):
            self.orchestrator.submit(action, Prepare(spec=work.spec))

    def _ensure_pool(self, tenant: str, work: AnyWork) -> None:
        """Creates the pool of a function or endpoint before its first call."""
        if isinstance(work, Call):
            self._instance_limits.ensure_pool(tenant)
            pool = Pool(kind=function_pool(tenant, work), total=work.function.max_instances, private=True)
        elif isinstance(work, Post):
            pool = Pool(kind=endpoint_pool(tenant, work), total=work.endpoint.max_concurrency, private=True)
        else:
            return
        known = self._function_pools_by_tenant.setdefault(tenant, {})
        if pool.kind not in known:
            if len(known) >= FUNCTION_POOLS_PER_TENANT_MAX:
                self._evict_function_pool(tenant, known)
            self.orchestrator.send(PoolChanged(pool=pool))
        known.pop(pool.kind, None)
        known[pool.kind] = None

    def _evict_function_pool(self, tenant: str, known: dict[str, None]) -> None:
        """Removes the pool of the least recently called function without a live call."""
        called = {kind for live in self._registry.actions_of_tenant(tenant) for kind in live.action.demand.pools}
        kind = next((kind for kind in known if kind not in called), None)
        if kind is None:
            most = FUNCTION_POOLS_PER_TENANT_MAX
            reason = f"{most} functions of this run are being called, the maximum; wait for some"
            raise AdmissionRefused("functions_max", reason)
        del known[kind]
        self.orchestrator.send(PoolChanged(pool=Pool(kind=kind, total=0, private=True)))

    async def status(self, caller: Principal, id: str, *, wait_s: float, until_started: bool = False) -> ActionReply:
        """Returns the state of an action after waiting up to `wait_s` until it settles, or starts."""
        qualified_id = self.namespace(caller).qualify("id", id)
        live = self._registry.actions.get(qualified_id)
        if live is not None:
            return await self.wait(caller, live, id, wait_s=wait_s, until_started=until_started)
        size = await self.journal.result_bytes(qualified_id)
        if size is not None and size > INLINE_RESULT_BYTES_MAX:
            return ActionReply(id=id, state="settled")
        return await self.fetch_reply(caller, id)

    async def fetch_reply(self, caller: Principal, id: str) -> ActionReply:
        """Returns a settled action with its result, however large."""
        result = await self.journal.result(self.namespace(caller).qualify("id", id))
        if result is None:
            raise NotFound("action", id)
        return self._reply_with_result(caller, id, decode_settled(result))

    async def wait(
        self, caller: Principal, live: RegisteredAction, id: str, *, wait_s: float, until_started: bool = False
    ) -> ActionReply:
        live.on_polled(self._now())
        if isinstance(live.work, HoldGrant):  # a holder must poll often, or its quota is released
            wait_s = min(wait_s, self.limits.hold_idle_s / 3)
        try:
            awaited = live.started if until_started else live.settled
            if wait_s > 0.0 and not awaited.done():
                await asyncio.wait((awaited,), timeout=wait_s)
        finally:
            live.on_polled(self._now())
        if live.settled.done():
            if self.drain_gate.is_draining and live.settled.exception() is not None:
                raise Draining  # the next server will finish it; the client retries
            return self.reply(caller, id, live.settled.result())
        return ActionReply(id=id, state=live.state)

    def reply(self, caller: Principal, id: str, settled: SettledAction) -> ActionReply:
        """Includes the result unless it is large; a client fetches a large one with `fetch_reply`."""
        executed = settled.executed
        size = len(settled.answer) + (0 if executed is None else len(executed.stdout) + len(executed.stderr))
        return (
            ActionReply(id=id, state="settled")
            if size > INLINE_RESULT_BYTES_MAX
            else self._reply_with_result(caller, id, settled)
        )

    def _reply_with_result(self, caller: Principal, id: str, settled: SettledAction) -> ActionReply:
        """Names objects as their tenant does, without the prefix."""
        unqualify = self.namespace(caller).unqualify
        outcome = msgspec.structs.replace(settled.outcome, action=id, reason=unqualify(settled.outcome.reason))
        error_record = settled.fault
        if error_record is not None:
            texts = {field: unqualify(getattr(error_record, field)) for field in ("message", "value", "expected")}
            error_record = msgspec.structs.replace(error_record, **texts)
        ended = SettledReply(outcome=outcome, executed=settled.executed, answer=settled.answer, fault=error_record)
        return ActionReply(id=id, state="settled", settled=ended)

    async def cancel(self, caller: Principal, id: str) -> None:
        """Requests cancellation; the action settles when none of its processes is left. No effect on a settled
        action."""
        qualified_id = self.namespace(caller).qualify("id", id)
        live = self._registry.actions.get(qualified_id)
        if live is not None:
            self._cancel(live)
        elif await self.journal.result(qualified_id) is None:
            raise NotFound("action", id)

    def _cancel(self, live: RegisteredAction, why: str = "") -> None:
        if live.request_cancel(why):
            self.orchestrator.cancel(live.action.id, why)

    def acknowledge(self, caller: Principal, ids: Iterable[str]) -> None:
        namespace = self.namespace(caller)
        for id in ids:
            qualified_id = namespace.qualify("id", id)
            if qualified_id not in self._registry.actions:
                self.journal.record_fetched(qualified_id)
                self._ended_outputs.drop(qualified_id)

    def follow(self, caller: Principal, id: str, after: int) -> AsyncIterator[OutputChunk]:
        qualified_id = self.namespace(caller).qualify("id", id)
        live = self._registry.actions.get(qualified_id)
        output = live.output if live is not None else self._ended_outputs.get(qualified_id)
        if output is None:
            raise NotFound("followable output of action", id)
        return output.follow(after)

    # ---- quotas ----

    def release_quota(self, caller: Principal, id: str, spent: dict[str, int] | None) -> None:
        self._quotas.release(self.namespace(caller).qualify("id", id), spent)

    def report_upstream_response(
        self, caller: Principal, quota: str, status: int, headers: Mapping[str, str], id: str, at: float
    ) -> None:
        qualified_id = self.namespace(caller).qualify("action", id)
        granted_at = self._quotas.granted_at(qualified_id)
        if granted_at is not None:  # only a holder of the quota can report about it
            self._quotas.advise(quota, parse_rate_limit(status, headers, at), granted_at)

    def quotas(self) -> list[Quota]:
        return self._quotas.all()

    def set_quota(self, quota: Quota) -> None:
        """Adds or changes a quota until the next restart; lasting quotas are in the config."""
        self._quotas.add(quota)
        self.admission_policy = msgspec.structs.replace(
            self.admission_policy, quota_pools=quota_pools(self._quotas.all())
        )

    # ---- sandboxes ----

    def sandboxes(self, caller: Principal) -> list[SandboxReply]:
        """Open sandboxes and instances of functions: those of the caller, or all for an admin that names no run."""
        sees_all = caller.is_admin and not caller.run
        names = [
            name for name, sandbox in self._registry.sandboxes.items() if sees_all or sandbox.tenant == caller.tenant
        ]
        instances = [
            instance for instance in self._functions.instance_views() if sees_all or instance.tenant == caller.tenant
        ]
        return [self.sandbox_reply(caller, name) for name in names] + [
            SandboxReply(
                name=instance.sandbox, run=instance.run, node=self._node, spec=instance.spec, function=instance.function
            )
            for instance in instances
        ]

    def sandbox_reply(self, caller: Principal, qualified_name: str) -> SandboxReply:
        sandbox = self._registry.sandboxes[qualified_name]
        return SandboxReply(
            name=self.namespace(caller).unqualify(qualified_name), run=sandbox.run, node=self._node, spec=sandbox.spec
        )

    def require_sandbox(self, caller: Principal, name: str) -> str:
        """Returns the qualified name of an open sandbox of the caller."""
        qualified_name = self.namespace(caller).qualify("sandbox", name)
        sandbox = self._registry.sandboxes.get(qualified_name)
        if sandbox is None:
            if qualified_name in self._lost_sandboxes:
                raise ManagerError(f"sandbox {name} is gone: {self._lost_sandboxes[qualified_name]}", retry=False)
            raise NotFound("sandbox", name)
        sandbox.on_used(self._now())
        return qualified_name

    @contextlib.contextmanager
    def sandbox_in_use(self, caller: Principal, name: str) -> Iterator[str]:
        """As `require_sandbox`, for file operations of any length. Errors of the manager name the sandbox as its caller
        does."""
        qualified_name = self.require_sandbox(caller, name)
        sandbox = self._registry.sandboxes[qualified_name]
        sandbox.begin_use()
        try:
            yield qualified_name
        except ManagerError as error:
            if type(error) is not ManagerError:
                raise  # an error of the server, without names of a manager
            raise ManagerError(self.namespace(caller).unqualify(str(error)), retry=error.retry) from error
        finally:
            sandbox.end_use(self._now())

    async def remove_sandbox(self, caller: Principal, name: str) -> None:
        """Removes a sandbox or an instance of a function immediately, with all its processes."""
        is_sandbox = self.namespace(caller).qualify("sandbox", name) in self._registry.sandboxes
        if not is_sandbox and await self._functions.end(caller.tenant, name):
            return
        await self._remove_sandbox(self.require_sandbox(caller, name))

    async def _remove_sandbox(self, sandbox: str) -> None:
        """Waits for actions that open or close the sandbox before ending it: a late opening would leave an unknown
        sandbox behind."""
        for action in self._registry.actions_of_sandbox(sandbox):
            self._cancel(action)
        while unsettled := [
            action.settled for action in self._registry.actions_of_sandbox(sandbox) if _opens_or_closes_sandbox(action)
        ]:
            await asyncio.wait(unsettled)
        await self.orchestrator.remove_sandbox(sandbox)
        # No await since its memory was freed: a new sandbox of this name cannot be unregistered by mistake.
        self._registry.unregister_sandbox(sandbox)
        self._refresh_instance_limits(tenant_of(sandbox))
        await self.journal.record_sandbox_closed(sandbox)

    # ---- runs ----

    def set_weight(self, run: str, weight: float) -> None:
        self.orchestrator.send(RunChanged(run=run, weight=weight))

    def set_caps(self, run: str, caps: Caps) -> None:
        """Sets how many sandboxes a run may have, and how many of its later actions may run at once. None: no limit but
        capacity."""
        self._instance_limits.set_cap(run, caps.sandboxes_max)
        self._refresh_instance_limits(run)
        if caps.running_max is None:
            self._capped_runs.discard(run)
            return
        self._capped_runs.add(run)
        self.orchestrator.send(PoolChanged(pool=Pool(kind=running_pool(run), total=caps.running_max, private=True)))

    async def end_run(self, tenant: str) -> None:
        """Cancels the run's actions, deletes its results, closes its sandboxes, ends its function instances and forgets
        its images. Can be repeated: a failure does not stop the rest; it is logged, and all are raised as one
        ManagerError at the end."""
        actions = self._registry.actions_of_tenant(tenant)
        for live in actions:
            self._cancel(live, f"its run {live.action.run} was revoked")
            self._quotas.release(live.action.id)
        if actions:
            await asyncio.wait({live.settled for live in actions})
        self._ended_outputs.drop_matching(lambda id: tenant_of(id) == tenant)
        self._lost_sandboxes = {name: why for name, why in self._lost_sandboxes.items() if tenant_of(name) != tenant}
        await self.journal.delete_results((tenant,))
        sandboxes = [name for name, sandbox in self._registry.sandboxes.items() if sandbox.tenant == tenant]
        failures = [await self._try_end(f"sandbox {name}", self._remove_sandbox(name)) for name in sandboxes]
        failures.append(await self._try_end(f"functions of {tenant}", self._functions.end(tenant)))
        self._instance_limits.remove_tenant(tenant)
        for kind in self._function_pools_by_tenant.pop(tenant, ()):
            self.orchestrator.send(PoolChanged(pool=Pool(kind=kind, total=0, private=True)))
        for image in self._images.names_of_tenant(tenant):
            failures.append(await self._try_end(f"image {image}", self._images.forget_of_ended_run(image)))
        reasons = [failure for failure in failures if failure]
        if reasons:
            raise ManagerError(f"run {tenant} was not removed completely; revoke it again: {'; '.join(reasons)}")

    async def _try_end(self, what: str, ending: Awaitable[object]) -> str:
        """Returns the reason of a failure, which is also logged, or an empty string. Raises JournalFailed."""
        try:
            await ending
        except JournalFailed:
            raise
        except (TangramError, OSError) as error:
            log.error("not ended %s: %s", what, error)
            return f"{what}: {error}"
        return ""

    # ---- expiry ----

    async def sweep(self) -> None:
        now = self._now()
        for live in list(self._registry.actions.values()):
            if isinstance(live.work, HoldGrant) and now - live.last_polled_at > self.limits.hold_idle_s:
                log.warning("hold expired action=%s: its holder did not poll", live.action.id)
                self._cancel(live, f"its holder did not poll for {self.limits.hold_idle_s:g} s (hold_idle_s)")
                self._quotas.release(live.action.id)
        self._ended_outputs.sweep()
        for name, sandbox in list(self._registry.sandboxes.items()):
            if (
                not sandbox.active_actions
                and now - sandbox.last_used_at > self.limits.sandbox_idle_s
                and not self.drain_gate.is_draining
            ):
                log.warning("sandbox closed sandbox=%s: unused for %.0f s", name, self.limits.sandbox_idle_s)
                try:
                    await self._remove_sandbox(name)
                    self.record_lost_sandbox(name, f"unused for {self.limits.sandbox_idle_s:.0f} s (sandbox_idle_s)")
                except JournalFailed:
                    raise
                except ManagerError as error:
                    log.error("sandbox not closed sandbox=%s: %s", name, error)

    # ---- recovery ----

    def record_lost_sandbox(self, sandbox: str, why: str) -> None:
        """Keeps the reason why a sandbox was lost; beyond LOST_SANDBOXES_MAX, forgets the oldest."""
        self._lost_sandboxes[sandbox] = why
        if len(self._lost_sandboxes) > LOST_SANDBOXES_MAX:
            del self._lost_sandboxes[next(iter(self._lost_sandboxes))]

    def adopt(self, sandbox: str, run: str, spec: SandboxSpec, node: str) -> None:
        """Registers a sandbox that outlived the previous server. Raises AdmissionRefused if there is no room for
        it."""
        self.orchestrator.adopt(sandbox, -(-spec.memory_bytes // MIB), run, node)
        self._registry.register_sandbox(sandbox, run, spec)
        self._refresh_instance_limits(tenant_of(sandbox))

    async def resume(self, action: Action, work: AnyWork, size: int) -> bool:
        """Queues an action of the journal again, where it has `size` bytes. Returns False if it settled instead."""
        live = self._register(action, work, size, follow=False)
        return await self._submit_to_orchestrator(live)

    async def conclude(self, action: Action, status: Status, reason: str) -> SettledAction:
        """Settles an action that the orchestrator never had, because it or its sandbox ended with the previous server.
        Notifies observers."""
        settled = SettledAction(outcome=Outcome(action=action.id, status=status, reason=reason))
        await self.journal.record_settled(action.id, encode(settled))
        self.orchestrator.send(Concluded(action=action, outcome=settled.outcome))
        return settled


def quota_pools(quotas: Iterable[Quota]) -> frozenset[str]:
    return frozenset(pool.kind for quota in quotas for pool in quota.pools())


def _opens_or_closes_sandbox(live: RegisteredAction) -> bool:
    return isinstance(live.work, Open | Close) and not live.settled.done()
