"""Validation of arguments, and of the life cycle of connections and sandboxes.

Owns the errors for invalid arguments and for use before opening, after closing, or on another event loop. Does no work.
Promises errors of `tangram.errors` that name the argument.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence

from tangram.core.demand import Amounts
from tangram.core.limits import Limits
from tangram.errors import InvalidAction, InvalidConfig, InvalidInput, TangramError
from tangram.managers.quotas.manager import REQUESTS, TOKENS, Quota

Command = str | Sequence[str]
Content = str | bytes | bytearray | memoryview
OnOutput = Callable[[str, bytes], None]
"""Called with the output of a program as it arrives: "stdout" or "stderr", and the bytes."""
PathText = str | os.PathLike[str]
Quotas = str | Mapping[str, int | Mapping[str, int]]
"""Requests of APIs that an action makes: the name of one quota, for one request; or a mapping from names to the number
of requests, or to {"requests": 1, "tokens": 500} for a quota that counts tokens."""

Param = str | int | float
Params = Mapping[str, Param | Sequence[Param]]
"""Parameters of the query of an address."""

MODE_MAX = 0o7777
STATUS_MIN, STATUS_MAX = 100, 999
_NOT_IN_HEADERS = frozenset("\r\n\0")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_QUOTAS = "a name such as 'search', or numbers by name such as {'search': 1, 'judge': {'requests': 1, 'tokens': 500}}"


class Lifecycle:
    """The life cycle of an object that is opened once, used on the same event loop, and closed."""

    def __init__(self, what: str) -> None:
        self._subject = what
        self._unusable_reason = "is not open: use `async with`, or `with` after connect_sync()"
        """Empty while it is open."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.has_begun = False

    @property
    def is_open(self) -> bool:
        return not self._unusable_reason

    def begin(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Marks it as being opened. With a loop: it belongs to that loop."""
        if self.has_begun:
            raise TangramError(f"{self._subject} was opened before and can be opened only once; create another one")
        self.has_begun = True
        self._loop = loop

    def mark_open(self) -> None:
        self._unusable_reason = ""

    def mark_closed(self) -> None:
        self._unusable_reason = "is closed"

    def require_open(self) -> None:
        if self._unusable_reason:
            raise TangramError(f"{self._subject} {self._unusable_reason}")
        self.require_loop()

    def require_loop(self) -> None:
        """A task on another event loop would wait forever."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise TangramError(
                f"{self._subject} belongs to another event loop: use it where it was opened, or open another one here"
            )


# ---- arguments of actions and files -----------------------------------------------------------------------------


def words_of(command: Command) -> str | tuple[str, ...]:
    """The content of a list of words is validated by the work."""
    if isinstance(command, str):
        return command
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise InvalidAction("command", command, "a string, which goes through a shell, or a list of words")
    return tuple(command)


def commands_of(commands: Sequence[str]) -> tuple[str, ...]:
    """A string is a sequence too, but of characters."""
    if not isinstance(commands, list | tuple) or not all(isinstance(command, str) for command in commands):
        raise InvalidAction("setup", commands, "a list of commands, such as ['make']")
    return tuple(commands)


def variables_of(env: Mapping[str, str] | None) -> dict[str, str]:
    if env is not None and not isinstance(env, Mapping):
        raise InvalidAction("env", env, "variables by name, such as {'COLOUR': 'blue'}")
    return dict(env or {})


def quota_counts(quotas: Quotas | None) -> dict[str, dict[str, int]]:
    """Requests and tokens by name. The quota validates the amounts."""
    if isinstance(quotas, str):
        quotas = {quotas: 1}
    if quotas is not None and not isinstance(quotas, Mapping):
        raise InvalidAction("quotas", quotas, _QUOTAS)
    result = {}
    for name, amount in (quotas or {}).items():
        counts = {REQUESTS: 1, TOKENS: 0, **amount} if isinstance(amount, Mapping) else {REQUESTS: amount, TOKENS: 0}
        if not isinstance(name, str) or len(counts) > 2 or any(type(count) is not int for count in counts.values()):
            raise InvalidAction("quotas", {name: amount}, _QUOTAS)
        result[name] = counts
    return result


def quota_demand(quotas: Quotas | None, find: Callable[[str], Quota]) -> dict[str, Amounts]:
    """The demand of an action for the pools of all its quotas, to be granted together. `find` returns the quota of a
    name, or raises."""
    demand: dict[str, Amounts] = {}
    for name, counts in quota_counts(quotas).items():
        demand |= find(name).demand(**counts)
    return demand


def headers_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Accepts any object with `items()`, such as headers."""
    items = getattr(headers, "items", None)
    if not callable(items) or isinstance(headers, type):
        raise InvalidAction("headers", headers, "texts by name, such as {'Accept': 'text/plain'}")
    result = dict(items())
    for name, value in result.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidAction("headers", {name: value}, "texts by name, such as {'Accept': 'text/plain'}")
    return result


def sendable_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    result = {} if headers is None else headers_of(headers)
    for name, value in result.items():
        if not _TOKEN.fullmatch(name):
            raise InvalidAction("headers", name, "the name of a header, such as 'Accept'")
        if set(value) & _NOT_IN_HEADERS:
            raise InvalidAction(f"headers[{name!r}]", value, "text on one line")
        bytes_of(f"headers[{name!r}]", value)
    return result


def status_of(status: int) -> int:
    if not isinstance(status, int) or not STATUS_MIN <= status <= STATUS_MAX:
        raise InvalidAction("status", status, "the status of an HTTP response, such as 200")
    return status


def method_of(method: str) -> str:
    if not isinstance(method, str) or not _TOKEN.fullmatch(method):
        raise InvalidAction("method", method, "an HTTP method, such as 'GET'")
    return method.upper()


def params_of(params: Params | None) -> dict[str, str | list[str]]:
    """As text. APIs differ in how they write None and True, so the caller must convert them."""
    if params is not None and not isinstance(params, Mapping):
        raise InvalidAction("params", params, "texts or numbers by name, such as {'q': 'weather', 'page': 2}")
    result: dict[str, str | list[str]] = {}
    for name, value in (params or {}).items():
        each = value if isinstance(value, list | tuple) else [value]
        if not isinstance(name, str) or not all(_is_param(one) for one in each):
            raise InvalidAction(f"params[{name!r}]", value, "text or a number, or a list of them")
        result[name] = [str(one) for one in each]
    return result


def _is_param(value: object) -> bool:
    return isinstance(value, str) or type(value) is int or (type(value) is float and math.isfinite(value))


def seconds_of(field: str, seconds: float) -> float:
    if type(seconds) not in (int, float) or not 0.0 < seconds < math.inf:
        raise InvalidAction(field, seconds, "a positive, finite number of seconds")
    return seconds


def bytes_of(field: str, content: Content) -> bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if not isinstance(content, str):
        raise InvalidAction(field, type(content).__name__, "text or bytes")
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise InvalidAction(field, "text with lone surrogates", "text that is UTF-8, or bytes") from None


def path_of(field: str, path: PathText, error: type[InvalidInput] = InvalidAction) -> str:
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise error(field, path, "a path: text, or a Path")
    return text


def require_mode(mode: int) -> None:
    if type(mode) is not int or not 0 <= mode <= MODE_MAX:
        raise InvalidAction("mode", mode, "permissions as a number, such as 0o644 or 0o755")


def require_output_callback(on_output: OnOutput | None) -> None:
    """It is called, not awaited."""
    if on_output is None:
        return
    called = on_output if inspect.isroutine(on_output) else getattr(on_output, "__call__", None)  # noqa: B004
    if not callable(on_output) or inspect.iscoroutinefunction(on_output) or inspect.iscoroutinefunction(called):
        raise InvalidAction("on_output", on_output, "a plain function of (stream, data), not `async def`")


# ---- arguments of a connection ----------------------------------------------------------------------------------


def require_cores(cores: float | None) -> None:
    """The manager validates how many there are."""
    if cores is not None and (type(cores) not in (int, float) or not 0.0 < cores < math.inf):
        raise InvalidConfig("cores", cores, "a number of cores above 0, such as 2 or 0.5")


def require_limits(limits: Limits | None) -> None:
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidConfig("limits", limits, "tangram.Limits, such as Limits(queue_max=1000)")
