"""The registry: actions that have not settled and open sandboxes, with counts per tenant.

Makes no decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tangram.core.action import Action, Outcome, Status
from tangram.errors import AdmissionRefused, InvalidInput
from tangram.managers.functions.work import Call
from tangram.managers.work import Close, Open, SandboxSpec
from tangram.runtime.error_records import error_record_of
from tangram.runtime.orchestrator import ActionTicket, SettledAction
from tangram.runtime.wire import AnyWork
from tangram.server.actions.output_buffer import OutputBuffer
from tangram.server.actions.translate import with_running_cap
from tangram.server.tenants import tenant_of


class RegisteredAction(ActionTicket):
    """An action that has not settled, as the runtime and the action service see it. Exists from the moment the action
    service accepts the action; the orchestrator gets it once it is in the journal."""

    __slots__ = ("cancel_reason", "cancel_requested", "last_polled_at", "opens_sandbox", "work_bytes")

    work: AnyWork
    output: OutputBuffer | None

    def __init__(
        self,
        action: Action,
        work: AnyWork,
        work_bytes: int,
        output: OutputBuffer | None,
        now: float,
        *,
        opens_sandbox: bool,
    ) -> None:
        super().__init__(action, work, output)
        self.work_bytes = work_bytes
        """Encoded size of action and work in the journal."""
        self.cancel_requested = False
        """May be set before the orchestrator has the action."""
        self.cancel_reason = ""
        """Empty if the caller cancelled."""
        self.opens_sandbox = opens_sandbox
        """The action creates its sandbox: unless it succeeds, there is none."""
        self.last_polled_at = now

    @property
    def state(self) -> str:
        if self.settled.done():
            return "settled"
        if not self.attempt:
            return "queued"
        return "starting" if self.lease is None else "running"

    def limit_running(self) -> None:
        """Adds the run's limit on running actions to the demand. The journal has the action without it."""
        self.action = with_running_cap(self.action)

    def request_cancel(self, reason: str) -> bool:
        """Returns False if it was requested before."""
        if self.cancel_requested:
            return False
        self.cancel_requested, self.cancel_reason = True, reason
        return True

    def on_polled(self, now: float) -> None:
        self.last_polled_at = now

    def resolve(self, settled: SettledAction) -> None:
        """Completes `settled`. A rejected request is a result here, since it reaches the caller over HTTP."""
        if not self.settled.done():
            self.settled.set_result(settled if self.error is None else refused_action(self.action.id, self.error))


def refused_action(action: str, error: AdmissionRefused | InvalidInput) -> SettledAction:
    error_record = error_record_of(error)
    return SettledAction(
        outcome=Outcome(action=action, status=Status.REFUSED, reason=error_record.message), fault=error_record
    )


class RegisteredSandbox:
    __slots__ = ("active_actions", "run", "tenant", "spec", "last_used_at")

    def __init__(self, tenant: str, run: str, spec: SandboxSpec, now: float) -> None:
        self.tenant = tenant
        self.run = run
        self.spec = spec
        self.active_actions = 0
        self.last_used_at = now

    def begin_use(self) -> None:
        self.active_actions += 1

    def end_use(self, now: float) -> None:
        self.active_actions -= 1
        self.last_used_at = now

    def on_used(self, now: float) -> None:
        self.last_used_at = now


class ActionRegistry:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.actions: dict[str, RegisteredAction] = {}
        """Live actions by id."""
        self.sandboxes: dict[str, RegisteredSandbox] = {}
        """Open or opening sandboxes by name."""
        self.actions_by_tenant: Counter[str] = Counter()
        self.calls_by_tenant: Counter[str] = Counter()
        """Live calls of functions."""
        self.bytes_by_tenant: Counter[str] = Counter()
        """Encoded size of live actions."""
        self.sandboxes_by_tenant: Counter[str] = Counter()

    def register(self, action: Action, work: AnyWork, work_bytes: int, output: OutputBuffer | None) -> RegisteredAction:
        opens_sandbox = False
        if isinstance(work, Open) and action.sandbox not in self.sandboxes:
            self.register_sandbox(action.sandbox, action.run, work.spec)
            opens_sandbox = True
        live = self.actions[action.id] = RegisteredAction(
            action, work, work_bytes, output, self._now(), opens_sandbox=opens_sandbox
        )
        tenant = tenant_of(action.id)
        self.actions_by_tenant[tenant] += 1
        self.calls_by_tenant[tenant] += isinstance(work, Call)
        self.bytes_by_tenant[tenant] += work_bytes
        sandbox = self.sandboxes.get(action.sandbox)
        if sandbox is not None:
            sandbox.begin_use()
        return live

    def unregister(self, live: RegisteredAction) -> bool:
        """Returns whether it was registered."""
        action = live.action
        if self.actions.pop(action.id, None) is None:
            return False
        tenant = tenant_of(action.id)
        self.actions_by_tenant[tenant] -= 1
        self.calls_by_tenant[tenant] -= isinstance(live.work, Call)
        self.bytes_by_tenant[tenant] -= live.work_bytes
        sandbox = self.sandboxes.get(action.sandbox)
        if sandbox is not None:
            sandbox.end_use(self._now())
            if _ends_sandbox(live):
                self.unregister_sandbox(action.sandbox)
        return True

    def register_sandbox(self, name: str, run: str, spec: SandboxSpec) -> None:
        tenant = tenant_of(name)
        self.sandboxes[name] = RegisteredSandbox(tenant, run, spec, self._now())
        self.sandboxes_by_tenant[tenant] += 1

    def unregister_sandbox(self, name: str) -> None:
        sandbox = self.sandboxes.pop(name, None)
        if sandbox is not None:
            self.sandboxes_by_tenant[sandbox.tenant] -= 1

    def actions_of_sandbox(self, sandbox: str) -> list[RegisteredAction]:
        return [live for live in self.actions.values() if live.action.sandbox == sandbox]

    def actions_of_tenant(self, tenant: str) -> list[RegisteredAction]:
        return [live for live in self.actions.values() if tenant_of(live.action.id) == tenant]


def _ends_sandbox(live: RegisteredAction) -> bool:
    """Whether the sandbox ends with this action. An action that never started ends none."""
    status = live.settled.result().outcome.status if live.settled.done() else Status.REFUSED
    if isinstance(live.work, Close):
        return status not in (Status.LOST, Status.REFUSED)
    return live.opens_sandbox and status is not Status.SUCCEEDED
