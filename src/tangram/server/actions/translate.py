"""Translation of requests to actions of the orchestrator, stripped of everything that a caller may not decide.

Owns the prefix of every name that a caller chose, and the rules of what may be requested. Pure. Promises that two
callers can never name the same action, sandbox, image or function, and that an action demands only pools that its work
may use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tangram.core.action import Action
from tangram.core.demand import CPU, GPU, Amounts, Demand, cores, fixed, learned
from tangram.errors import AdmissionRefused, InvalidAction
from tangram.managers.functions.work import Call, Post
from tangram.managers.models.work import Infer
from tangram.managers.work import HOST_IMAGE, MAINTENANCE_CORES, Close, Commit, Exec, HoldGrant, Open, Work
from tangram.runtime.views import HIDDEN_NAME
from tangram.runtime.wire import AnyWork, Submission, require_name
from tangram.server.tenants import TENANT_SEPARATOR, Principal

KINDS_BY_WORK: dict[type[Work], tuple[str, ...]] = {
    Open: ("open",),
    Close: ("close",),
    Commit: ("commit",),
    Exec: ("exec", "server"),
    HoldGrant: ("api",),
    Infer: ("infer",),
    Call: ("function",),
    Post: ("endpoint",),
}
"""Kinds that a caller may give to each work; the first is the default. All runs share what is learned of a kind, so
callers cannot invent one."""

UNITS_MAX = 1 << 53
"""Largest units of a demand: beyond 2^53 a float cannot represent every integer."""
PATH_LENGTH_MAX = 4096
"""Length of a search path of modules, as kernels limit it."""
CHOICES_MAX = 64
"""Admissible amounts that may be listed."""


class AdmissionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the config of the server allows."""

    quota_pools: frozenset[str] = frozenset()
    """Kinds of pools that belong to quotas."""
    services: frozenset[str] = frozenset()
    """Names of model services."""
    endpoints: tuple[str, ...] = ()
    """URL prefixes that the server may call for its callers."""
    functions: bool = False
    """Whether functions of callers can be executed."""
    network: bool = False
    capture_bytes_max: int = 64 << 20


class TenantNamespace:
    """Maps the names of one tenant to qualified names and back."""

    def __init__(self, tenant: str, images: Mapping[str, str]) -> None:
        self._tenant = tenant
        self._images = images
        """By qualified name: the images of all runs in the store."""

    def qualify(self, field: str, name: str) -> str:
        """Qualifies the id of an action or the name of a sandbox."""
        return f"{self._tenant}{TENANT_SEPARATOR}{require_name(field, name)}"

    def unqualify(self, text: str) -> str:
        """Maps a name, or a sentence that contains names, to what its tenant may see: without the own prefix and
        without names of images of others, which a manager may list."""
        for inner in self._images if ":" in text else ():
            if not inner.startswith(f"{self._tenant}:"):
                text = text.replace(inner, HIDDEN_NAME)
        return re.sub(rf"(?<![\w./:-]){re.escape(self._tenant)}[/:]", "", text)

    def resolve_image(self, name: str) -> str:
        """For opening a sandbox."""
        if name == HOST_IMAGE:
            return name
        image = self._images.get(f"{self._tenant}:{name}")
        if image is None:
            start = f"{self._tenant}:"
            own = [repr(each.removeprefix(start)) for each in sorted(self._images) if each.startswith(start)]
            raise InvalidAction("sandbox.image", name, f"one of {', '.join([repr(HOST_IMAGE), *own])}")
        return image

    def image_name(self, image: str) -> str:
        """The tenant's name for an image of the store; empty if it has none."""
        start = f"{self._tenant}:"
        return next((name.removeprefix(start) for name, content in self._images.items()
                     if content == image and name.startswith(start)), "")  # fmt: skip

    def qualify_image(self, name: str) -> str:
        """For creating or forgetting an image."""
        return f"{self._tenant}:{require_name('image', name)}"

    def qualify_image_key(self, key: str) -> str:
        return f"{self._tenant}:{require_name('key', key)}"


def translate(
    submission: Submission, caller: Principal, names: TenantNamespace, rules: AdmissionPolicy
) -> tuple[Action, AnyWork]:
    """Raises InvalidAction for a malformed request and AdmissionRefused for one that is not allowed."""
    work = _translate_work(submission, caller, names, rules)
    needs_sandbox = isinstance(work, Open | Close | Commit | Exec)
    if needs_sandbox != bool(submission.sandbox):
        expected = "the name of a sandbox" if needs_sandbox else "none: such work runs outside of sandboxes"
        raise InvalidAction("sandbox", submission.sandbox, expected)
    kinds = KINDS_BY_WORK[type(work)]
    if submission.kind and submission.kind not in kinds:
        raise InvalidAction("kind", submission.kind, f"{' or '.join(kinds)}, or nothing")
    action = Action(
        id=names.qualify("id", submission.id),
        demand=_translate_demand(submission, work, caller, rules),
        run=_run_name(submission, caller),
        task=submission.task,
        trajectory=submission.trajectory or submission.sandbox,  # as the client names it
        sandbox=names.qualify("sandbox", submission.sandbox) if submission.sandbox else "",
        kind=submission.kind or kinds[0],
        key=submission.key,
        service=submission.service if isinstance(work, Infer) else "",
        duration_s=submission.duration_s,
        timeout_s=submission.timeout_s,
        deadline_s=submission.deadline_s,
        priority=submission.priority,
        idempotent=submission.idempotent,
        at_once=submission.at_once,
    )
    return action, work


def _run_name(submission: Submission, caller: Principal) -> str:
    if not caller.run:
        return submission.run or "default"
    if submission.run not in ("", caller.run):
        raise InvalidAction("run", submission.run, f"{caller.run!r}, which the token stands for, or nothing")
    return caller.run


def _translate_work(
    submission: Submission, caller: Principal, names: TenantNamespace, rules: AdmissionPolicy
) -> AnyWork:
    work = submission.work
    if isinstance(work, Open):
        allowed = rules.network if caller.caps.network is None else caller.caps.network
        if work.spec.network and not (allowed or caller.is_admin):
            raise AdmissionRefused("network", "sandboxes of this run have no network; an admin can allow it")
        return Open(spec=msgspec.structs.replace(work.spec, image=names.resolve_image(work.spec.image)))
    if isinstance(work, Commit):
        return Commit(image=names.qualify_image(work.image))
    if isinstance(work, Exec) and work.capture_bytes_max > rules.capture_bytes_max:
        reason = f"at most {rules.capture_bytes_max} bytes of output are kept; write more to a file and fetch that"
        raise AdmissionRefused("capture_bytes_max", reason)
    if isinstance(work, Infer) and submission.service not in rules.services:
        known = ", ".join(sorted(rules.services)) or "none"
        raise InvalidAction("service", submission.service, f"one of the services: {known}")
    if isinstance(work, Call):
        if not rules.functions:
            raise AdmissionRefused("functions", "this service runs no functions: it has no sandboxes for them")
        for path in work.function.paths:
            if len(path) > PATH_LENGTH_MAX:
                raise InvalidAction("function.paths", path, f"paths of at most {PATH_LENGTH_MAX} characters")
        return work
    if isinstance(work, Post) and not work.endpoint.url.startswith(rules.endpoints or ("\0",)):
        known = ", ".join(rules.endpoints) or "none"
        raise AdmissionRefused("endpoints", f"the service calls only addresses that start with: {known}")
    return work


def _translate_demand(submission: Submission, work: AnyWork, caller: Principal, rules: AdmissionPolicy) -> Demand:
    given = dict(submission.demand.pools) if submission.demand is not None else {}
    for kind, amounts in given.items():
        _require_amounts(kind, amounts)
    speedup = submission.demand.speedup if submission.demand is not None else None
    own = _work_pools(submission, work, caller, given)
    quotas = {kind: amounts for kind, amounts in given.items() if kind in rules.quota_pools}
    pools: dict[str, Amounts] = own | quotas
    for kind in given:
        if kind not in pools and not kind.startswith(("function/", "endpoint/")):
            raise InvalidAction(
                "demand", kind, f"pools of such work: {', '.join([*own, *sorted(rules.quota_pools)]) or 'none'}"
            )
    if not pools:
        raise InvalidAction("demand", {}, f"a quota to hold: {', '.join(sorted(rules.quota_pools)) or 'there is none'}")
    return Demand(pools, speedup)


def with_running_cap(action: Action) -> Action:
    """Adds one unit of the run's limit on running actions."""
    pools = action.demand.pools | {running_pool(action.run): fixed(1)}
    return msgspec.structs.replace(action, demand=Demand(pools, action.demand.speedup))


def _require_amounts(kind: str, amounts: Amounts) -> None:
    """Checks that amounts can be stored, and are few enough for the scheduler to evaluate per waiting action."""
    if max(amounts.max, amounts.step) > UNITS_MAX:
        raise InvalidAction("demand", {kind: max(amounts.max, amounts.step)}, f"at most {UNITS_MAX} units")
    if len(amounts.choices) > CHOICES_MAX:
        raise InvalidAction("demand", {kind: f"{len(amounts.choices)} choices"}, f"at most {CHOICES_MAX}")


def _work_pools(
    submission: Submission, work: AnyWork, caller: Principal, given: dict[str, Amounts]
) -> dict[str, Amounts]:
    """What such work holds beside quotas."""
    if isinstance(work, Exec):
        return {CPU: given.get(CPU, learned())}
    if isinstance(work, Open | Close | Commit):
        return {CPU: cores(MAINTENANCE_CORES[type(work)])}
    if isinstance(work, Infer):
        return {GPU: given.get(GPU, fixed(1))}
    if isinstance(work, Call):
        return {
            CPU: fixed(work.function.cpu_units),
            function_pool(caller.tenant, work): fixed(1),
            instances_pool(caller.tenant): fixed(1),
        }
    if isinstance(work, Post):
        return {endpoint_pool(caller.tenant, work): fixed(1)}
    return {}


def function_pool(tenant: str, work: Call) -> str:
    return f"function/{tenant}/{work.function.name}".replace("@", "-")


def endpoint_pool(tenant: str, work: Post) -> str:
    return f"endpoint/{tenant}/{work.endpoint.name}".replace("@", "-")


def instances_pool(tenant: str) -> str:
    """Counts calls of functions that may each have a sandbox: the cap of the tenant less its open sandboxes."""
    return f"instances/{tenant}"


def running_pool(run: str) -> str:
    """Counts running actions of a run with a limit on them."""
    return f"running/{run}"
