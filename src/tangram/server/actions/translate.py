"""Translation: what a caller asked for, as an action of the orchestrator, with nothing in it that it may not decide.

Owns the names that stand before every name which a caller chose, and the rules of what may be asked. Pure. Promises
that no two callers can name the same action, sandbox, image or function, and that an action asks only for pools that
its work is for.
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
from tangram.managers.work import HOST_IMAGE, Close, Commit, Exec, Hold, Open, Work
from tangram.runtime.views import HIDDEN
from tangram.runtime.wire import AnyWork, Submission, require_name
from tangram.server.actions.tenants import SEPARATOR
from tangram.server.http.auth import Caller

KINDS: dict[type[Work], tuple[str, ...]] = {
    Open: ("open",),
    Close: ("close",),
    Commit: ("commit",),
    Exec: ("exec", "server"),
    Hold: ("api",),
    Infer: ("infer",),
    Call: ("function",),
    Post: ("endpoint",),
}
"""The first is what it is unless the caller says otherwise. What is learned of a kind is shared by all runs, so nobody
makes up one."""

ERRAND: dict[type[Work], float] = {Open: 0.2, Close: 0.1, Commit: 0.5}
"""Cores of work of ours on a sandbox."""


UNITS_MAX = 1 << 53
"""Of a demand: the last whole number that every number with a point can tell from its neighbours."""
PATH_LENGTH_MAX = 4096
"""Of a place where modules are looked for: what kernels take."""
CHOICES_MAX = 64
"""Admissible amounts that are named one by one."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the config of the service allows."""

    quota_pools: frozenset[str] = frozenset()
    """Kinds of pools that belong to quotas."""
    services: frozenset[str] = frozenset()
    """Names of model services."""
    endpoints: tuple[str, ...] = ()
    """Beginnings of addresses that the service calls in the name of its callers."""
    functions: bool = False
    """Whether there is a place for functions of callers."""
    network: bool = False
    capture_bytes_max: int = 64 << 20


class Names:
    """The names of one caller, and what they are to the service."""

    def __init__(self, space: str, images: Mapping[str, str]) -> None:
        self._space = space
        self._images = images
        """What images of all runs are in the store, by their names with that of their run before it."""

    def inner(self, field: str, name: str) -> str:
        """Of an action or a sandbox."""
        return f"{self._space}{SEPARATOR}{require_name(field, name)}"

    def outer(self, text: str) -> str:
        """A name, or a sentence with names in it, as the caller knows them: without its own space before them, and
        without names of images of others, which a manager may list."""
        for inner in self._images if ":" in text else ():
            if not inner.startswith(f"{self._space}:"):
                text = text.replace(inner, HIDDEN)
        return re.sub(rf"(?<![\w./:-]){re.escape(self._space)}[/:]", "", text)

    def image(self, name: str) -> str:
        """To open a sandbox from."""
        if name == HOST_IMAGE:
            return name
        image = self._images.get(f"{self._space}:{name}")
        if image is None:
            start = f"{self._space}:"
            own = [repr(each.removeprefix(start)) for each in sorted(self._images) if each.startswith(start)]
            raise InvalidAction("sandbox.image", name, f"one of {', '.join([repr(HOST_IMAGE), *own])}")
        return image

    def known_as(self, image: str) -> str:
        """The name of an image of the store; empty: it is none of this caller."""
        start = f"{self._space}:"
        return next((name.removeprefix(start) for name, found in self._images.items()
                     if found == image and name.startswith(start)), "")  # fmt: skip

    def own_image(self, name: str) -> str:
        """To make, or to forget."""
        return f"{self._space}:{require_name('image', name)}"

    def image_key(self, key: str) -> str:
        return f"{self._space}:{require_name('key', key)}"


def translated(asked: Submission, caller: Caller, names: Names, rules: Rules) -> tuple[Action, AnyWork]:
    """Raises InvalidAction for what cannot be meant and AdmissionRefused for what may not be."""
    work = _work(asked, caller, names, rules)
    needs_sandbox = isinstance(work, Open | Close | Commit | Exec)
    if needs_sandbox != bool(asked.sandbox):
        expected = "the name of a sandbox" if needs_sandbox else "none: such work is done outside of sandboxes"
        raise InvalidAction("sandbox", asked.sandbox, expected)
    kinds = KINDS[type(work)]
    if asked.kind and asked.kind not in kinds:
        raise InvalidAction("kind", asked.kind, f"{' or '.join(kinds)}, or nothing")
    action = Action(
        id=names.inner("id", asked.id),
        demand=_demand(asked, work, caller, rules),
        run=_run(asked, caller),
        task=asked.task,
        trajectory=asked.trajectory or asked.sandbox,  # as the client names it
        sandbox=names.inner("sandbox", asked.sandbox) if asked.sandbox else "",
        kind=asked.kind or kinds[0],
        key=asked.key,
        service=asked.service if isinstance(work, Infer) else "",
        duration_s=asked.duration_s,
        timeout_s=asked.timeout_s,
        deadline_s=asked.deadline_s,
        priority=asked.priority,
        idempotent=asked.idempotent,
        at_once=asked.at_once,
    )
    return action, work


def _run(asked: Submission, caller: Caller) -> str:
    if not caller.run:
        return asked.run or "default"
    if asked.run not in ("", caller.run):
        raise InvalidAction("run", asked.run, f"{caller.run!r}, which the token stands for, or nothing")
    return caller.run


def _work(asked: Submission, caller: Caller, names: Names, rules: Rules) -> AnyWork:
    work = asked.work
    if isinstance(work, Open):
        allowed = rules.network if caller.caps.network is None else caller.caps.network
        if work.spec.network and not (allowed or caller.admin):
            raise AdmissionRefused("network", "sandboxes of this run have no network; an admin can allow it")
        return Open(spec=msgspec.structs.replace(work.spec, image=names.image(work.spec.image)))
    if isinstance(work, Commit):
        return Commit(image=names.own_image(work.image))
    if isinstance(work, Exec) and work.capture_bytes_max > rules.capture_bytes_max:
        said = f"at most {rules.capture_bytes_max} bytes of output are kept here; write more to a file and fetch that"
        raise AdmissionRefused("capture_bytes_max", said)
    if isinstance(work, Infer) and asked.service not in rules.services:
        known = ", ".join(sorted(rules.services)) or "none"
        raise InvalidAction("service", asked.service, f"one of the services here: {known}")
    if isinstance(work, Call):
        if not rules.functions:
            raise AdmissionRefused("functions", "this service runs no functions: it has no sandboxes for them")
        for path in work.function.paths:
            if len(path) > PATH_LENGTH_MAX:
                raise InvalidAction("function.paths", path, f"paths of at most {PATH_LENGTH_MAX} characters")
        return work
    if isinstance(work, Post) and not work.endpoint.url.startswith(rules.endpoints or ("\0",)):
        known = ", ".join(rules.endpoints) or "none"
        raise AdmissionRefused("endpoints", f"the service calls no address but those that begin with: {known}")
    return work


def _demand(asked: Submission, work: AnyWork, caller: Caller, rules: Rules) -> Demand:
    given = dict(asked.demand.pools) if asked.demand is not None else {}
    for kind, amounts in given.items():
        _require_amounts(kind, amounts)
    speedup = asked.demand.speedup if asked.demand is not None else None
    own = _own_pools(asked, work, caller, given)
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


def capped(action: Action) -> Action:
    """With one of what its run may have running."""
    pools = action.demand.pools | {running_pool(action.run): fixed(1)}
    return msgspec.structs.replace(action, demand=Demand(pools, action.demand.speedup))


def _require_amounts(kind: str, amounts: Amounts) -> None:
    """Within what can be kept, and what a scheduler can go through for every action that waits."""
    if max(amounts.max, amounts.step) > UNITS_MAX:
        raise InvalidAction("demand", {kind: max(amounts.max, amounts.step)}, f"at most {UNITS_MAX} units")
    if len(amounts.choices) > CHOICES_MAX:
        raise InvalidAction("demand", {kind: f"{len(amounts.choices)} choices"}, f"at most {CHOICES_MAX}")


def _own_pools(asked: Submission, work: AnyWork, caller: Caller, given: dict[str, Amounts]) -> dict[str, Amounts]:
    """What such work holds besides quotas."""
    if isinstance(work, Exec):
        return {CPU: given.get(CPU, learned())}
    if isinstance(work, Open | Close | Commit):
        return {CPU: cores(ERRAND[type(work)])}
    if isinstance(work, Infer):
        return {GPU: given.get(GPU, fixed(1))}
    if isinstance(work, Call):
        return {
            CPU: fixed(work.function.cpu_units),
            function_pool(caller.space, work): fixed(1),
            instances_pool(caller.space): fixed(1),
        }
    if isinstance(work, Post):
        return {endpoint_pool(caller.space, work): fixed(1)}
    return {}


def function_pool(space: str, work: Call) -> str:
    return f"function/{space}/{work.function.name}".replace("@", "-")


def endpoint_pool(space: str, work: Post) -> str:
    return f"endpoint/{space}/{work.endpoint.name}".replace("@", "-")


def instances_pool(space: str) -> str:
    """Counts the calls of functions that may each have a sandbox: what its caps leave a caller beside those that it has
    open."""
    return f"instances/{space}"


def running_pool(run: str) -> str:
    """Counts what a run has running, where that is capped."""
    return f"running/{run}"
