"""Functions, as their user sees them: declared by a decorator, called as actions, answered with a value or a record.

Owns the declaration of a function, how it is shipped, and which answers are kept. The function itself stays what it
was: calling it directly runs it here. Promises that a caller can tell apart what the function did from what our side
did, and that no caller shares the deadline or the cancellation of another.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Generic, Literal, NoReturn, ParamSpec, Protocol, SupportsIndex, TypeVar
from urllib.parse import urlsplit

import msgspec

from tangram.client.result import Timing, raise_for
from tangram.client.single_flight import Sharing
from tangram.client.transport import Pending
from tangram.client.validation import Life, Quotas, quota_demand
from tangram.core.action import ID_LENGTH_MAX, NO_USAGE, Action, Outcome, Status, Usage
from tangram.core.demand import CPU, Amounts, Demand, fixed
from tangram.core.messages import Pool
from tangram.core.sizes import amounts, in_bytes
from tangram.errors import (
    AdmissionRefused,
    FunctionFailed,
    InvalidAction,
    ManagerError,
)
from tangram.managers.functions.result_cache import Recall
from tangram.managers.functions.serialization import arguments_of, bare, by_value, code_of, is_importable, title_of
from tangram.managers.functions.work import (
    INSTANCES_MAX,
    MEMORY_BYTES_MIN,
    NAME_CHARACTERS_MAX,
    PROCESSES_MAX,
    RETRIES_MAX,
    Call,
    EndpointSpec,
    Failure,
    FunctionSpec,
    Post,
    answer_of,
    require_headers,
    require_seconds,
    require_url,
    require_whole,
)
from tangram.managers.quotas.manager import Quota
from tangram.managers.work import MIB, Executed, Work
from tangram.runtime.orchestrator import Settled

P = ParamSpec("P")
R = TypeVar("R")

RECALL_BYTES_MAX = 64 * MIB
"""Of answers that are kept for pure functions, and as much for those called with a key."""
FUNCTIONS_MAX = 1000
"""Functions and endpoints of one connection. Each has a pool for as long as that lasts, so one that is made anew for
every call is a mistake."""
SHOWN_CHARACTERS = 2000
"""Of what the function wrote, in an error message."""

Kind = Literal["value", "error", "timed_out", "cancelled", "refused", "lost"]


# ---- what is called ---------------------------------------------------------------------------------------------


class Function(Generic[P, R]):
    """A function that can be called directly, as ever, and as an action: `await t.call(score, ...)`."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        cpus: float,
        memory: int | str,
        max_instances: int,
        idle_s: float,
        timeout_s: float | None,
        retries: int,
        pure: bool,
        processes: int,
    ) -> None:
        if isinstance(function, staticmethod):
            function = function.__func__
        if not callable(function):
            raise InvalidAction("function", function, "something that can be called")
        _require_no_method(function)
        functools.update_wrapper(self, function)
        self.__tangram_function__ = function
        self.cpu = amounts(cpus)
        if self.cpu.elastic or not self.cpu.declared:
            raise InvalidAction("cpus", cpus, "one number of cores: an instance has the same width for its whole life")
        self.memory_bytes = in_bytes("memory", memory, least=MEMORY_BYTES_MIN)
        self.max_instances = max_instances
        self.idle_s = idle_s
        self.timeout_s = timeout_s
        self.retries = retries
        self.pure = pure
        self.processes = processes
        require_whole("processes", processes, 1, PROCESSES_MAX)
        require_whole("max_instances", max_instances, 1, INSTANCES_MAX)
        require_whole("retries", retries, 0, RETRIES_MAX)
        require_seconds("idle_s", idle_s)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s)
        if type(pure) is not bool:
            raise InvalidAction("pure", pure, "True or False")
        self._specs: dict[bool, FunctionSpec] = {}
        """By whether its module goes along."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__tangram_function__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tangram.function {self.title}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """To where Tangram is not, the plain function goes: a copy of a function is the function."""
        return (copy.copy, (self.__tangram_function__,)) if bare.get() else super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_specs": {}}

    @property
    def title(self) -> str:
        return title_of(self.__tangram_function__)

    def spec(self, *, by_value: bool = False) -> FunctionSpec:
        """How it is shipped. Made once: what a closure holds later is not seen by its instances. `by_value`: to where
        its module is not."""
        spec = self._specs.get(by_value)
        if spec is None:
            spec = self._specs[by_value] = self._made_spec(whole=by_value)
        return spec

    def _made_spec(self, *, whole: bool) -> FunctionSpec:
        function = self.__tangram_function__
        options: dict[str, Any] = dict(
            cpu_units=self.cpu.max, memory_bytes=self.memory_bytes, max_instances=self.max_instances,
            idle_s=float(self.idle_s), retries=self.retries, paths=tuple(sys.path),
            processes_max=self.processes,
        )  # fmt: skip
        if is_importable(function) and not whole:
            place: dict[str, Any] = dict(module=function.__module__, qualname=function.__qualname__)
            content = code_of(function)
        else:
            content = by_value(function, whole=whole)
            place = dict(pickled=content)
        return FunctionSpec(name=_name(self.title, content + repr(options).encode()), **place, **options)


def function(
    *bare: Any,
    cpus: float = 1,
    memory: int | str = "512MiB",
    max_instances: int = 8,
    idle_s: float = 30.0,
    timeout_s: float | None = 60.0,
    retries: int = 2,
    pure: bool = False,
    processes: int = 512,
) -> Callable[[Callable[P, R]], Function[P, R]]:
    """Declare a stateless function, such as a reward: `@tangram.function(cpus=1, max_instances=8)`.

    It can be called directly as before. `await t.call(score, ...)` runs it in an instance of its own: up to
    `max_instances` of them run at once, and one that was not called for `idle_s` ends. `memory` is the limit of each of
    its processes, `timeout_s` of each call. `retries`: how often a call is repeated that our side lost. `pure`: the
    same arguments always give the same value, so it is kept. `processes`: how many an instance may have, itself
    included; threads count as well.

    A function is called as it is written, never bound to an object: a method is refused, a static one is not.
    """
    if bare:
        raise InvalidAction("@tangram.function", bare[0], "options by name in parentheses: @tangram.function()")

    def declare(function: Callable[P, R]) -> Function[P, R]:
        return Function(
            function, cpus=cpus, memory=memory, max_instances=max_instances, idle_s=idle_s, timeout_s=timeout_s,
            retries=retries, pure=pure, processes=processes,
        )  # fmt: skip

    return declare


def _require_no_method(function: Callable[..., Any]) -> None:
    """In the body of a class the first part of its name is that of the class."""
    above = getattr(function, "__qualname__", "").rpartition(".")[0]
    if not above or above.endswith("<locals>"):
        return
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return  # something of C, which has no signature
    if first in ("self", "cls"):
        said = "a function, which is never bound to an object: put it outside of the class, or make it a @staticmethod"
        raise InvalidAction("@tangram.function", f"the method {title_of(function)}", said)


def endpoint(
    url: str,
    *,
    max_concurrency: int = 16,
    timeout_s: float = 30.0,
    retries: int = 3,
    headers: dict[str, str] | None = None,
) -> EndpointSpec:
    """A function that somebody else runs: it takes JSON by POST and answers with JSON. `timeout_s` is that of one
    attempt; `retries` are made when the endpoint cannot be reached, says that it is too busy, or something before it
    fails."""
    headers = {} if headers is None else headers
    require_url(url)
    require_headers(headers)
    parts = urlsplit(url)
    shown = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}".replace("@", "-")
    said = msgspec.json.encode([url, max_concurrency, timeout_s, retries, sorted(headers.items())])
    return EndpointSpec(
        name=_name(shown, said),
        url=url,
        max_concurrency=max_concurrency,
        timeout_s=timeout_s,
        retries=retries,
        headers=headers,
    )


def _name(title: str, content: bytes) -> str:
    """The same for the same content, and no other."""
    return f"{title[-(NAME_CHARACTERS_MAX - 9) :]}-{hashlib.sha256(content).hexdigest()[:8]}"


# ---- what comes of it -------------------------------------------------------------------------------------------


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """One call that has settled. `kind` says what it brought, and whose doing it was."""

    function: str
    kind: Kind
    """`value`; `error`: the function failed, see `error`; `timed_out`; `cancelled`; `refused`: it never got in;
    `lost`: our side failed, which says nothing of the function."""
    value: Any = None
    """Of kind `value` only."""
    error: Failure | None = None
    """Of kind `error` only: its kind, its message and its traceback."""
    reason: str = ""
    """Why there is no value, in one line."""
    stdout: str = ""
    stderr: str = ""
    """What the call wrote, cut in the middle."""
    action: str = ""
    timing: Timing = Timing(waiting_s=0.0, execution_s=0.0, overhead_s=0.0)
    usage: Usage = NO_USAGE
    attempts: int = 0
    recalled: bool = False
    """Nothing ran: the value was kept from an earlier call."""

    @property
    def ok(self) -> bool:
        return self.kind == "value"

    def check(self) -> Any:
        """The value, or the exception that says why there is none."""
        if self.kind != "value":
            self._raise()
        return self.value

    def _raise(self) -> NoReturn:
        said = f"{self.function}: {self.reason}"
        if self.error is not None:
            more = [self.error.traceback.strip(), self.stderr.strip()[-SHOWN_CHARACTERS:]]
            raise FunctionFailed("\n".join([said, *filter(None, more)]), self)
        raise_for(Status(self.kind), said, self)


_KINDS: dict[Status, Kind] = {
    Status.TIMED_OUT: "timed_out",
    Status.CANCELLED: "cancelled",
    Status.REFUSED: "refused",
    Status.LOST: "lost",
}


def _result(name: str, settled: Settled) -> CallResult:
    outcome, executed = settled.outcome, settled.executed or Executed()
    common: dict[str, Any] = dict(
        function=name,
        stdout=executed.stdout.decode(errors="replace"),
        stderr=executed.stderr.decode(errors="replace"),
        action=outcome.action,
        timing=Timing(waiting_s=outcome.waiting_s, execution_s=outcome.execution_s, overhead_s=outcome.overhead_s),
        usage=outcome.usage,
        attempts=outcome.attempts,
    )
    if outcome.status is not Status.SUCCEEDED:
        return CallResult(kind=_KINDS[outcome.status], reason=outcome.reason, **common)
    return _answered(settled.answer, common)


def _answered(answer: bytes, common: dict[str, Any]) -> CallResult:
    try:
        failure, value = answer_of(answer)
    except ManagerError as error:
        return CallResult(kind="lost", reason=str(error), **common)
    if failure is not None:
        return CallResult(kind="error", error=failure, reason=failure.message, **common)
    return CallResult(kind="value", value=value, **common)


# ---- calling ----------------------------------------------------------------------------------------------------


class Calls(Protocol):
    """What calling needs of a transport."""

    def submit(self, action: Action, work: Work) -> Pending: ...

    by_value: bool

    def announce(self, pool: Pool) -> None: ...


def _no_quota(name: str) -> NoReturn:
    raise InvalidAction("quotas", name, "none: this connection has no quotas")


class Functions:
    """The calls of one connection."""

    def __init__(
        self, transport: Calls, life: Life, prefix: str, find_quota: Callable[[str], Quota] = _no_quota
    ) -> None:
        self._transport = transport
        self._find_quota = find_quota
        """By its name. Raises InvalidAction if there is none."""
        self._life = life
        self._prefix = prefix
        self._numbers = count(1)
        self._pools: set[str] = set()
        """Kinds that the scheduler knows."""
        self._sharing = Sharing()
        self._pure, self._keyed = Recall(RECALL_BYTES_MAX), Recall(RECALL_BYTES_MAX)

    async def call(self, target: Function[..., R] | EndpointSpec, /, *args: Any, **options: Any) -> R:
        """Its value. Raises FunctionFailed if it failed, and what `CallResult.check` says for all else."""
        value: R = (await self.try_call(target, *args, **options)).check()
        return value

    async def try_call(
        self,
        target: Function[..., Any] | EndpointSpec,
        /,
        *args: Any,
        run: str = "default",
        trajectory: str = "",
        task: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        idempotency_key: str = "",
        quotas: Quotas | None = None,
        **kwargs: Any,
    ) -> CallResult:
        """What came of it, whatever that is. Arguments of the function whose names are taken here are given by
        position; an endpoint takes its JSON as one argument as well. Two calls with one `idempotency_key` share one
        answer, and each keeps its own deadline. `quotas`: what it asks of which API, granted together with its instance
        and its cores."""
        self._life.require()
        if not isinstance(idempotency_key, str):
            raise InvalidAction("idempotency_key", idempotency_key, "text")
        number = f"{self._prefix}-call-{next(self._numbers)}"
        asked = quota_demand("quotas", quotas, self._find_quota)
        about: dict[str, Any] = dict(
            run=run, trajectory=trajectory, task=task, priority=priority, deadline_s=deadline_s, at_once=not asked
        )  # a function asks an API whenever it likes
        if isinstance(target, EndpointSpec):
            body = _json(target, args, kwargs)
            work: Work = Post(endpoint=target, body=body, key=idempotency_key or number)
            action = Action(
                id=number, demand=Demand({target.pool: fixed(1)} | asked), kind="endpoint", key=target.name, **about
            )  # fmt: skip
            pool, key, keep = Pool(kind=target.pool, total=target.max_concurrency), b"", self._keyed
        elif isinstance(target, Function):
            spec, arguments = (
                target.spec(by_value=self._transport.by_value),
                arguments_of(target.__tangram_function__, args, kwargs),
            )
            work = Call(function=spec, arguments=arguments)
            action = _action(number, target, spec, asked, about)
            pool, keep = (
                Pool(kind=spec.pool, total=spec.max_instances, private=True),
                self._pure if target.pure else self._keyed,
            )
            # Who has another time limit would have to share that as well.
            key = _digest(f"{spec.name} {target.timeout_s}", arguments) if target.pure else b""
        else:
            raise InvalidAction("function", target, "what @tangram.function() or tangram.endpoint() made")
        if idempotency_key:
            key, keep = _digest(pool.kind, idempotency_key.encode(errors="surrogatepass")), self._keyed
        return await self._share(action, work, pool, key, keep)

    async def _share(self, action: Action, work: Work, pool: Pool, key: bytes, keep: Recall) -> CallResult:
        name = action.key
        kept = keep.get(key) if key else None
        if kept is not None:
            return _answered(kept, dict(function=name, recalled=True))
        try:
            self._announce(pool)
            if not key:
                return _result(name, await self._transport.submit(action, work).settled())
            # The deadline is that of this caller, not of the run.
            shared = msgspec.structs.replace(action, deadline_s=None)
            settled = await self._sharing.share(
                key, lambda: self._transport.submit(shared, work), action.id, action.deadline_s
            )
        except AdmissionRefused as refused:
            outcome = Outcome(action=action.id, status=Status.REFUSED, reason=refused.reason)
            return _result(name, Settled(outcome=outcome))
        result = _result(name, settled)
        if result.kind == "value" or (result.kind == "error" and keep is self._keyed):
            keep.keep(key, settled.answer)
        return result

    def _announce(self, pool: Pool) -> None:
        """The scheduler knows the pool before an action asks for it."""
        if pool.kind not in self._pools:
            if len(self._pools) >= FUNCTIONS_MAX:
                said = f"this connection has called {FUNCTIONS_MAX} functions; make one and give it arguments"
                raise AdmissionRefused("functions_max", said)
            self._transport.announce(pool)
            self._pools.add(pool.kind)


def _action(
    number: str, target: Function[..., Any], spec: FunctionSpec, asked: dict[str, Amounts], about: dict[str, Any]
) -> Action:
    pools: dict[str, Amounts] = {CPU: target.cpu, spec.pool: fixed(1), **asked}
    return Action(
        id=number, demand=Demand(pools), kind="function", key=target.title[-ID_LENGTH_MAX:], timeout_s=target.timeout_s,
        idempotent=target.retries > 0, **about,
    )  # fmt: skip


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _json(target: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if len(args) > 1 or (args and kwargs):
        raise InvalidAction(f"arguments of {target.name}", args, "arguments by name, or one JSON value")
    said = args[0] if args else kwargs
    try:
        data = msgspec.json.encode(said)
        # What is no number is written as null, and would be another value there.
        if b"null" in data and (where := _not_finite(msgspec.to_builtins(said, str_keys=True))):
            raise InvalidAction(
                f"arguments of {target.name}", f"arguments{where}", "finite numbers: JSON has no others"
            )
        return data
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidAction(f"arguments of {target.name}", str(error), "what can be written as JSON") from error


def _not_finite(value: Any) -> str:
    """Which number in it is none, such as `["score"][0]: nan`; empty: all are."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f": {value}"
    found: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        found = value.items()
    elif isinstance(value, list | tuple):
        found = enumerate(value)
    return next((f"[{step!r}]{where}" for step, part in found if (where := _not_finite(part))), "")
