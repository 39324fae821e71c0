"""Translation of requests to actions of the orchestrator, without anything that a caller may not decide.

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
from tangram.server.tenants import IMAGE_SEPARATOR, TENANT_SEPARATOR, Principal, image_prefix

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
        self._image_prefix = image_prefix(tenant)
        self._images = images
        """Images of all runs in the store, by qualified name."""

    def qualify(self, field: str, name: str) -> str:
        """Qualifies the id of an action or the name of a sandbox."""
        return f"{self._tenant}{TENANT_SEPARATOR}{require_name(field, name)}"

    def unqualify(self, text: str) -> str:
        """Maps a name, or a sentence that contains names, to what its tenant may see: without the own prefix and
        without names of images of others, which a manager may list."""
        for qualified_name in self._images if IMAGE_SEPARATOR in text else ():
            if not qualified_name.startswith(self._image_prefix):
                text = text.replace(qualified_name, HIDDEN_NAME)
        return re.sub(rf"(?<![\w./:-]){re.escape(self._tenant)}[{TENANT_SEPARATOR}{IMAGE_SEPARATOR}]", "", text)

    def resolve_image(self, name: str) -> str:
        """Returns the image in the store, for opening a sandbox. Raises InvalidAction for an unknown one."""
        if name == HOST_IMAGE:
            return name
        prefix = self._image_prefix
        image = self._images.get(prefix + name)
        if image is None:
            own = [repr(image.removeprefix(prefix)) for image in sorted(self._images) if image.startswith(prefix)]
            raise InvalidAction("sandbox.image", name, f"one of {', '.join([repr(HOST_IMAGE), *own])}")
        return image

    def image_name(self, image: str) -> str:
        """The tenant's name for an image of the store; empty if it has none."""
        prefix = self._image_prefix
        return next((name.removeprefix(prefix) for name, content in self._images.items()
                     if content == image and name.startswith(prefix)), "")  # fmt: skip

    def qualify_image(self, name: str) -> str:
        """Qualifies the name of an image to create or forget."""
        return self._image_prefix + require_name("image", name)

    def qualify_image_key(self, key: str) -> str:
        return self._image_prefix + require_name("key", key)


def translate(
    submission: Submission, caller: Principal, namespace: TenantNamespace, policy: AdmissionPolicy
) -> tuple[Action, AnyWork]:
    """Raises InvalidAction for a malformed request and AdmissionRefused for one that is not allowed."""
    work = _translate_work(submission, caller, namespace, policy)
    needs_sandbox = isinstance(work, Open | Close | Commit | Exec)
    if needs_sandbox != bool(submission.sandbox):
        expected = "the name of a sandbox" if needs_sandbox else "none: such work runs outside of sandboxes"
        raise InvalidAction("sandbox", submission.sandbox, expected)
    kinds = KINDS_BY_WORK[type(work)]
    if submission.kind and submission.kind not in kinds:
        raise InvalidAction("kind", submission.kind, f"{' or '.join(kinds)}, or nothing")
    action = Action(
        id=namespace.qualify("id", submission.id),
        demand=_translate_demand(submission, work, caller, policy),
        run=_run_name(submission, caller),
        task=submission.task,
        trajectory=submission.trajectory or submission.sandbox,  # as the client names it
        sandbox=namespace.qualify("sandbox", submission.sandbox) if submission.sandbox else "",
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
        raise InvalidAction("run", submission.run, f"{caller.run!r}, the run of the token, or nothing")
    return caller.run


def _translate_work(
    submission: Submission, caller: Principal, namespace: TenantNamespace, policy: AdmissionPolicy
) -> AnyWork:
    work = submission.work
    if isinstance(work, Open):
        allowed = policy.network if caller.caps.network is None else caller.caps.network
        if work.spec.network and not (allowed or caller.is_admin):
            raise AdmissionRefused("network", "sandboxes of this run have no network; an admin can allow it")
        return Open(spec=msgspec.structs.replace(work.spec, image=namespace.resolve_image(work.spec.image)))
    if isinstance(work, Commit):
        return Commit(image=namespace.qualify_image(work.image))
    if isinstance(work, Exec) and work.capture_bytes_max > policy.capture_bytes_max:
        reason = f"at most {policy.capture_bytes_max} bytes of output are kept; write more to a file and fetch that"
        raise AdmissionRefused("capture_bytes_max", reason)
    if isinstance(work, Infer) and submission.service not in policy.services:
        known = ", ".join(sorted(policy.services)) or "none"
        raise InvalidAction("service", submission.service, f"one of the services: {known}")
    if isinstance(work, Call):
        if not policy.functions:
            raise AdmissionRefused("functions", "this service runs no functions: it has no sandboxes for them")
        for path in work.function.paths:
            if len(path) > PATH_LENGTH_MAX:
                raise InvalidAction("function.paths", path, f"paths of at most {PATH_LENGTH_MAX} characters")
        return work
    if isinstance(work, Post) and not work.endpoint.url.startswith(policy.endpoints or ("\0",)):
        known = ", ".join(policy.endpoints) or "none"
        raise AdmissionRefused("endpoints", f"the service calls only addresses that start with: {known}")
    return work


def _translate_demand(submission: Submission, work: AnyWork, caller: Principal, policy: AdmissionPolicy) -> Demand:
    declared = dict(submission.demand.pools) if submission.demand is not None else {}
    for kind, amounts in declared.items():
        _require_amounts(kind, amounts)
    speedup = submission.demand.speedup if submission.demand is not None else None
    work_pools = _work_pools(work, caller, declared)
    quotas = {kind: amounts for kind, amounts in declared.items() if kind in policy.quota_pools}
    pools: dict[str, Amounts] = work_pools | quotas
    for kind in declared:
        if kind not in pools and not kind.startswith(("function/", "endpoint/")):
            raise InvalidAction(
                "demand", kind, f"pools of such work: {', '.join([*work_pools, *sorted(policy.quota_pools)]) or 'none'}"
            )
    if not pools:
        raise InvalidAction(
            "demand", {}, f"a quota to hold: {', '.join(sorted(policy.quota_pools)) or 'there is none'}"
        )
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


def _work_pools(work: AnyWork, caller: Principal, declared: dict[str, Amounts]) -> dict[str, Amounts]:
    """Pools that such work uses in addition to quotas."""
    if isinstance(work, Exec):
        return {CPU: declared.get(CPU, learned())}
    if isinstance(work, Open | Close | Commit):
        return {CPU: cores(MAINTENANCE_CORES[type(work)])}
    if isinstance(work, Infer):
        return {GPU: declared.get(GPU, fixed(1))}
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
    """The pool whose units are calls that may each have a sandbox: the cap of the tenant less its open sandboxes."""
    return f"instances/{tenant}"


def running_pool(run: str) -> str:
    """The pool whose units are running actions of a run with a limit on them."""
    return f"running/{run}"
