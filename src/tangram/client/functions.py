"""The API of functions: declared by a decorator, called as actions, with a value or a record as result.

Owns the declaration and the result cache of functions. A declared function can still be called
directly, in this process. Promises that a caller can distinguish errors of the function from failures of the platform,
and that no caller shares the deadline or the cancellation of another.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Generic, Literal, NoReturn, ParamSpec, Protocol, SupportsIndex, TypeVar
from urllib.parse import urlsplit

import msgspec

from tangram.client.result import Timing, raise_for
from tangram.client.serialization import (
    code_bytes,
    is_importable,
    pickle_arguments,
    pickle_by_value,
    qualified_name,
    unwrap_declared,
)
from tangram.client.single_flight import SingleFlight
from tangram.client.transport import Pending
from tangram.client.validation import Lifecycle, Quotas, quota_demand
from tangram.core.action import ID_LENGTH_MAX, NO_USAGE, Action, Outcome, Status, Usage
from tangram.core.demand import CPU, Amounts, Demand, fixed
from tangram.core.messages import Pool
from tangram.core.sizes import amounts, parse_size
from tangram.errors import (
    AdmissionRefused,
    FunctionFailed,
    InvalidAction,
    ManagerError,
)
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
    decode_result,
    require_headers,
    require_seconds,
    require_url,
    require_whole,
)
from tangram.managers.quotas.manager import Quota
from tangram.managers.work import MIB, ExecResult, Work
from tangram.runtime.orchestrator import SettledAction

P = ParamSpec("P")
R = TypeVar("R")

RESULT_CACHE_BYTES_MAX = 64 * MIB
"""Size of the result cache of pure functions, and of that of calls with an idempotency key."""
ENTRY_BYTES = 400
"""Overhead of an entry of a result cache in addition to its key and answer."""
FUNCTIONS_MAX = 1000
"""Maximum number of functions and endpoints of one connection. Each has a pool until the connection ends, so do not
create one per call."""
SHOWN_CHARACTERS = 2000
"""Maximum output of the function in an error message."""

Kind = Literal["value", "error", "timed_out", "cancelled", "refused", "lost"]


# ---- functions and endpoints ------------------------------------------------------------------------------------


class Function(Generic[P, R]):
    """A function that can be called directly, and as an action: `await t.call(score, ...)`."""

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
        _require_plain_function(function)
        functools.update_wrapper(self, function)
        self.__tangram_function__ = function
        self.cpu = amounts(cpus)
        if self.cpu.elastic or not self.cpu.declared:
            raise InvalidAction("cpus", cpus, "one number of cores: an instance has the same width for its whole life")
        self.memory_bytes = parse_size("memory", memory, least=MEMORY_BYTES_MIN)
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
        """Serialized forms, by whether they include the module."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__tangram_function__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tangram.function {self.title}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickles as the plain function, so that it works where Tangram is not installed."""
        return (copy.copy, (self.__tangram_function__,)) if unwrap_declared.get() else super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_specs": {}}

    @property
    def title(self) -> str:
        return qualified_name(self.__tangram_function__)

    def spec(self, *, by_value: bool = False) -> FunctionSpec:
        """The serialized function. Created once: later changes of its closure do not reach its instances. `by_value`:
        include the module, for processes that cannot import it."""
        spec = self._specs.get(by_value)
        if spec is None:
            spec = self._specs[by_value] = self._build_spec(with_module=by_value)
        return spec

    def _build_spec(self, *, with_module: bool) -> FunctionSpec:
        function = self.__tangram_function__
        options: dict[str, Any] = dict(
            cpu_units=self.cpu.max, memory_bytes=self.memory_bytes, max_instances=self.max_instances,
            idle_s=float(self.idle_s), retries=self.retries, paths=tuple(sys.path),
            processes_max=self.processes,
        )  # fmt: skip
        if is_importable(function) and not with_module:
            source: dict[str, Any] = dict(module=function.__module__, qualname=function.__qualname__)
            content = code_bytes(function)
        else:
            content = pickle_by_value(function, include_module=with_module)
            source = dict(pickled=content)
        return FunctionSpec(name=_content_name(self.title, content + repr(options).encode()), **source, **options)


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

    It can still be called directly. `await t.call(score, ...)` runs it in an instance: up to `max_instances` run at the
    same time, and an instance that is idle for `idle_s` ends. `memory` is the limit of each process,
    `timeout_s` of each call. `retries`: how often a lost call is repeated. `pure`: equal arguments always give equal
    values, so results are cached. `processes`: how many processes and threads an instance may have, itself included.

    Only plain functions and static methods are accepted, because no object is passed; methods are rejected.
    """
    if bare:
        raise InvalidAction("@tangram.function", bare[0], "options by name in parentheses: @tangram.function()")

    def declare(function: Callable[P, R]) -> Function[P, R]:
        return Function(
            function, cpus=cpus, memory=memory, max_instances=max_instances, idle_s=idle_s, timeout_s=timeout_s,
            retries=retries, pure=pure, processes=processes,
        )  # fmt: skip

    return declare


def _require_plain_function(function: Callable[..., Any]) -> None:
    """In the body of a class, the qualified name begins with the name of the class."""
    above = getattr(function, "__qualname__", "").rpartition(".")[0]
    if not above or above.endswith("<locals>"):
        return
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return  # a C function without a signature
    if first in ("self", "cls"):
        expected = "a function that needs no object: define it outside of the class, or as a @staticmethod"
        raise InvalidAction("@tangram.function", f"the method {qualified_name(function)}", expected)


def endpoint(
    url: str,
    *,
    max_concurrency: int = 16,
    timeout_s: float = 30.0,
    retries: int = 3,
    headers: dict[str, str] | None = None,
) -> EndpointSpec:
    """An HTTP endpoint that accepts JSON by POST and returns JSON. `timeout_s` limits one attempt. A call is retried up
    to `retries` times if the endpoint cannot be reached, is overloaded, or a gateway fails."""
    headers = {} if headers is None else headers
    require_url(url)
    require_headers(headers)
    parts = urlsplit(url)
    shown = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}".replace("@", "-")
    identity = msgspec.json.encode([url, max_concurrency, timeout_s, retries, sorted(headers.items())])
    return EndpointSpec(
        name=_content_name(shown, identity),
        url=url,
        max_concurrency=max_concurrency,
        timeout_s=timeout_s,
        retries=retries,
        headers=headers,
    )


def _content_name(title: str, content: bytes) -> str:
    """Equal if and only if the content is equal."""
    return f"{title[-(NAME_CHARACTERS_MAX - 9) :]}-{hashlib.sha256(content).hexdigest()[:8]}"


# ---- results ----------------------------------------------------------------------------------------------------


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """A call that has settled. `kind` distinguishes results and causes of failures."""

    function: str
    kind: Kind
    """`value`; `error`: the function failed, see `error`; `timed_out`; `cancelled`; `refused`: not admitted; `lost`:
    the platform failed, independent of the function."""
    value: Any = None
    """Set only for kind `value`."""
    error: Failure | None = None
    """Only for kind `error`: its type, message and traceback."""
    reason: str = ""
    """The reason of a missing value, in one line."""
    stdout: str = ""
    stderr: str = ""
    """Output of the call; the middle is cut if it is long."""
    action: str = ""
    timing: Timing = Timing(waiting_s=0.0, execution_s=0.0, overhead_s=0.0)
    usage: Usage = NO_USAGE
    attempts: int = 0
    cached: bool = False
    """Nothing ran: the value is that of an earlier call."""

    @property
    def ok(self) -> bool:
        return self.kind == "value"

    def check(self) -> Any:
        """Returns the value, or raises the exception that explains its absence."""
        if self.kind != "value":
            self._raise()
        return self.value

    def _raise(self) -> NoReturn:
        message = f"{self.function}: {self.reason}"
        if self.error is not None:
            more = [self.error.traceback.strip(), self.stderr.strip()[-SHOWN_CHARACTERS:]]
            raise FunctionFailed("\n".join([message, *filter(None, more)]), self)
        raise_for(Status(self.kind), message, self)


_KIND_BY_STATUS: dict[Status, Kind] = {
    Status.TIMED_OUT: "timed_out",
    Status.CANCELLED: "cancelled",
    Status.REFUSED: "refused",
    Status.LOST: "lost",
}


def _to_result(name: str, settled: SettledAction) -> CallResult:
    outcome, executed = settled.outcome, settled.executed or ExecResult()
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
        return CallResult(kind=_KIND_BY_STATUS[outcome.status], reason=outcome.reason, **common)
    return _result_of_answer(settled.answer, common)


def _result_of_answer(content: bytes, common: dict[str, Any]) -> CallResult:
    try:
        failure, value = decode_result(content)
    except ManagerError as error:
        return CallResult(kind="lost", reason=str(error), **common)
    if failure is not None:
        return CallResult(kind="error", error=failure, reason=failure.message, **common)
    return CallResult(kind="value", value=value, **common)


class ResultCache:
    """Answers of calls by key, least recently used evicted first (LRU)."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> bytes | None:
        content = self._answers.get(key)
        if content is not None:
            self._answers.move_to_end(key)
        return content

    def put(self, key: bytes, content: bytes) -> None:
        self._evict(key)
        size = _entry_bytes(key, content)
        if size > self._bytes_max:
            return
        self._answers[key] = content
        self.size_bytes += size
        while self.size_bytes > self._bytes_max:
            self._evict(next(iter(self._answers)))

    def _evict(self, key: bytes) -> None:
        content = self._answers.pop(key, None)
        if content is not None:
            self.size_bytes -= _entry_bytes(key, content)


def _entry_bytes(key: bytes, content: bytes) -> int:
    return len(key) + len(content) + ENTRY_BYTES


# ---- calling ----------------------------------------------------------------------------------------------------


class CallTransport(Protocol):
    """The part of a transport that calls use."""

    def submit(self, action: Action, work: Work) -> Pending: ...

    by_value: bool

    def ensure_pool(self, pool: Pool) -> None: ...


def _no_quota(name: str) -> NoReturn:
    raise InvalidAction("quotas", name, "none: this connection has no quotas")


class FunctionCalls:
    """The calls of one connection."""

    def __init__(
        self,
        transport: CallTransport,
        lifecycle: Lifecycle,
        prefix: str,
        find_quota: Callable[[str], Quota] = _no_quota,
    ) -> None:
        self._transport = transport
        self._find_quota = find_quota
        """Returns the quota of a name. Raises InvalidAction."""
        self._lifecycle = lifecycle
        self._prefix = prefix
        self._numbers = count(1)
        self._pools: set[str] = set()
        """Kinds of the scheduler's pools."""
        self._single_flight = SingleFlight()
        self._pure_results, self._keyed_results = (
            ResultCache(RESULT_CACHE_BYTES_MAX),
            ResultCache(RESULT_CACHE_BYTES_MAX),
        )

    async def call(self, target: Function[..., R] | EndpointSpec, /, *args: Any, **options: Any) -> R:
        """Returns its value. Raises FunctionFailed if the function failed, and otherwise what `CallResult.check`
        raises."""
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
        """Returns every result, failures included. Arguments of the function whose names equal options of this method
        are passed by position; an endpoint takes its JSON as one argument. Calls with equal `idempotency_key` share one
        result, and each keeps its own deadline. `quotas`: requests of APIs, granted together with the instance and its
        cores."""
        self._lifecycle.require_open()
        if not isinstance(idempotency_key, str):
            raise InvalidAction("idempotency_key", idempotency_key, "text")
        action_id = f"{self._prefix}-call-{next(self._numbers)}"
        demand = quota_demand(quotas, self._find_quota)
        fields: dict[str, Any] = dict(
            run=run, trajectory=trajectory, task=task, priority=priority, deadline_s=deadline_s, at_once=not demand
        )  # a function calls an API at any time
        if isinstance(target, EndpointSpec):
            body = _encode_json(target, args, kwargs)
            work: Work = Post(endpoint=target, body=body, key=idempotency_key or action_id)
            action = Action(
                id=action_id, demand=Demand({target.pool: fixed(1)} | demand), kind="endpoint", key=target.name,
                **fields,
            )  # fmt: skip
            pool, key, cache = Pool(kind=target.pool, total=target.max_concurrency), b"", self._keyed_results
        elif isinstance(target, Function):
            spec, arguments = (
                target.spec(by_value=self._transport.by_value),
                pickle_arguments(target.__tangram_function__, args, kwargs),
            )
            work = Call(function=spec, arguments=arguments)
            action = _build_action(action_id, target, spec, demand, fields)
            pool, cache = (
                Pool(kind=spec.pool, total=spec.max_instances, private=True),
                self._pure_results if target.pure else self._keyed_results,
            )
            # Calls with different time limits do not share a run.
            key = _digest(f"{spec.name} {target.timeout_s}", arguments) if target.pure else b""
        else:
            raise InvalidAction("function", target, "the result of @tangram.function() or tangram.endpoint()")
        if idempotency_key:
            key, cache = _digest(pool.kind, idempotency_key.encode(errors="surrogatepass")), self._keyed_results
        return await self._call_once(action, work, pool, key, cache)

    async def _call_once(self, action: Action, work: Work, pool: Pool, key: bytes, cache: ResultCache) -> CallResult:
        name = action.key
        cached_content = cache.get(key) if key else None
        if cached_content is not None:
            return _result_of_answer(cached_content, dict(function=name, cached=True))
        try:
            self._ensure_pool(pool)
            if not key:
                return _to_result(name, await self._transport.submit(action, work).settled())
            # The deadline belongs to this caller, not to the run.
            shared = msgspec.structs.replace(action, deadline_s=None)
            settled = await self._single_flight.run(
                key, lambda: self._transport.submit(shared, work), action.id, action.deadline_s
            )
        except AdmissionRefused as refused:
            outcome = Outcome(action=action.id, status=Status.REFUSED, reason=refused.reason)
            return _to_result(name, SettledAction(outcome=outcome))
        result = _to_result(name, settled)
        if result.kind == "value" or (result.kind == "error" and cache is self._keyed_results):
            cache.put(key, settled.answer)
        return result

    def _ensure_pool(self, pool: Pool) -> None:
        """Registers the pool before an action demands it."""
        if pool.kind not in self._pools:
            if len(self._pools) >= FUNCTIONS_MAX:
                reason = f"this connection has called {FUNCTIONS_MAX} functions, the maximum; reuse them"
                raise AdmissionRefused("functions_max", reason)
            self._transport.ensure_pool(pool)
            self._pools.add(pool.kind)


def _build_action(
    action_id: str, target: Function[..., Any], spec: FunctionSpec, demand: dict[str, Amounts], fields: dict[str, Any]
) -> Action:
    pools: dict[str, Amounts] = {CPU: target.cpu, spec.pool: fixed(1), **demand}
    return Action(
        id=action_id, demand=Demand(pools), kind="function", key=target.title[-ID_LENGTH_MAX:],
        timeout_s=target.timeout_s, idempotent=target.retries > 0, **fields,
    )  # fmt: skip


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _encode_json(target: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if len(args) > 1 or (args and kwargs):
        raise InvalidAction(f"arguments of {target.name}", args, "arguments by name, or one JSON value")
    argument = args[0] if args else kwargs
    try:
        data = msgspec.json.encode(argument)
        # NaN would be written as null, which is a different value.
        if b"null" in data and (where := _find_not_finite(msgspec.to_builtins(argument, str_keys=True))):
            raise InvalidAction(
                f"arguments of {target.name}", f"arguments{where}", "finite numbers: JSON has no others"
            )
        return data
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidAction(f"arguments of {target.name}", str(error), "what can be written as JSON") from error


def _find_not_finite(value: Any) -> str:
    """The path of the first NaN or infinity, such as `["score"][0]: nan`; empty if there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f": {value}"
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return next((f"[{step!r}]{where}" for step, part in items if (where := _find_not_finite(part))), "")
