"""What is valid in a config: one `Valid` for each kind of value.

Owns the checks of single values and the words that errors and the reference page say of them. Never knows keys or
files. Promises that `read` gives a value of the type that its field names, that reading it again changes nothing, and
that whatever it does not take raises ValueError: with other words than its own if it has better ones.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from tangram.core.action import ID_LENGTH_MAX
from tangram.core.demand import CPU, GPU, MEMORY
from tangram.core.ledger import CORE_KIND
from tangram.core.policies import POLICIES, policy
from tangram.core.sizes import in_bytes
from tangram.errors import InvalidConfig

COUNT_MAX = 1 << 53
"""The last whole number that every number with a point can tell from its neighbours. Larger ones are slips."""
PORT_MAX = 65535
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")


class Valid(NamedTuple):
    """What a field takes."""

    words: str
    """Behind "expected"."""
    read: Callable[[Any], Any]


# ---- numbers ----


def _count(least: int) -> Valid:
    def read(value: object) -> int:
        if type(value) is not int or value < least:
            raise ValueError
        if value > COUNT_MAX:
            raise ValueError(f"a whole number, at most {COUNT_MAX}")
        return value

    return Valid(f"a whole number, at least {least}", read)


def number(words: str, *, zero: bool = False, most: float = COUNT_MAX) -> Valid:
    def read(value: object) -> float:
        if type(value) not in (int, float):
            raise ValueError
        assert isinstance(value, int | float)
        if not (0 < value < math.inf or (zero and value == 0)) or value > most:
            raise ValueError
        return float(value)

    return Valid(words, read)


def _size(least: int) -> Valid:
    def read(value: Any) -> int:
        try:
            return in_bytes("", value, least=least, most=COUNT_MAX, error=InvalidConfig)
        except InvalidConfig:
            raise ValueError from None

    return Valid('a size such as "512MiB" or "2GB", or a number of bytes' + (", at least 1" if least else ""), read)


def _bool(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


# ---- words ----


def _text(value: object) -> str:
    if not isinstance(value, str) or not (value.isprintable() or not value):
        raise ValueError
    return value


def _path(value: object) -> str:
    if not _text(value):
        raise ValueError
    return _text(value)


def _name(value: object) -> str:
    name = _text(value)
    if not name or len(name) > ID_LENGTH_MAX:
        raise ValueError
    return name


def _node_name(value: object) -> str:
    name = _name(value)
    if set(name) & set("@/"):
        raise ValueError
    return name


def _quota_name(value: object) -> str:
    name = _node_name(value)
    if name in (CPU, GPU, MEMORY, CORE_KIND):
        raise ValueError("a name that is not a kind of resource of a machine")
    return name


def one_of(choices: Any) -> Valid:
    """Of a Literal."""
    words = get_args(choices)

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return Valid("one of " + ", ".join(f'"{word}"' for word in words), read)


def _policy(value: object) -> str:
    name = _text(value)
    try:
        policy(name)
    except InvalidConfig as error:
        raise ValueError(error.expected) from error
    return name


def _engine(value: object) -> str:
    engine = _text(value)
    module, _, attribute = engine.partition(":")
    if not module or not attribute:
        raise ValueError
    return engine


def _listen(value: object) -> str:
    address_of(_text(value))
    return _text(value)


def address_of(listen: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or len(port) > 5 or int(port) > PORT_MAX:
        raise ValueError
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.IPv6Address(host[1:-1])), int(port)
    # A name of which the last part is a number is an address that somebody has mistyped.
    if _HOST.fullmatch(host) is None or host.rpartition(".")[2].isdecimal():
        ipaddress.IPv4Address(host)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach it. A name could be anything, but for this one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


# ---- several values ----


def _addresses(value: object) -> tuple[str, ...]:
    """With the "/" nobody can go on with the name of another host."""
    found = tuple(value) if isinstance(value, list | tuple) else (None,)
    for each in found:
        if not isinstance(each, str) or not re.fullmatch(r"https?://[^/@\s]+/[^\s]*", each):
            raise ValueError
    return cast(tuple[str, ...], found)


def _degrees(value: object) -> tuple[int, ...]:
    degrees = tuple(value) if isinstance(value, list | tuple) else ()
    if not degrees or not all(type(degree) is int and 0 < degree <= COUNT_MAX for degree in degrees):
        raise ValueError
    if list(degrees) != sorted(set(degrees)) or any(degree & (degree - 1) for degree in degrees):
        raise ValueError
    return degrees


def _arguments(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError
    return value


def optional(valid: Valid) -> Valid:
    """Or None, which a file says by saying nothing."""
    return Valid(valid.words, lambda value: None if value is None else valid.read(value))


# ---- types of fields ----

COUNT, COUNT_OR_0 = _count(1), _count(0)
SECONDS = number("a positive, finite number of seconds")
PER_SECOND = number("a positive, finite number per second")
CORES = number("a number of cores above 0, such as 2 or 0.5")
SIZE, SIZE_OR_0 = _size(1), _size(0)
PATH = Valid("a path, not empty", _path)
PATH_OR_NONE = Valid('a path, or "" for none', _text)

Durability = Literal["process", "power"]
OnStop = Literal["keep", "close"]
Backend = Literal["sandbox", "process", "docker", "fake"]
DeviceKind = Literal["emulated", "cuda"]

Count = Annotated[int, COUNT]
CountOr0 = Annotated[int, COUNT_OR_0]
MaybeCount = Annotated[int | None, optional(COUNT)]
Seconds = Annotated[float, SECONDS]
SecondsOr0 = Annotated[float, number("a finite number of seconds, at least 0", zero=True)]
PerSecond = Annotated[float, PER_SECOND]
MaybeCores = Annotated[float | None, optional(CORES)]
Size = Annotated[int, SIZE]
SizeOr0 = Annotated[int, SIZE_OR_0]
MaybeSize = Annotated[int | None, optional(SIZE)]
Flag = Annotated[bool, Valid("true or false", _bool)]
PathText = Annotated[str, PATH]
PathOrNone = Annotated[str, PATH_OR_NONE]
Text = Annotated[str, Valid("text of printable characters", _text)]
Name = Annotated[str, Valid(f"1 to {ID_LENGTH_MAX} printable characters", _name)]
NodeName = Annotated[str, Valid(f"1 to {ID_LENGTH_MAX} printable characters without '@' and '/'", _node_name)]
QuotaName = Annotated[str, Valid(f"1 to {ID_LENGTH_MAX} printable characters without '@' and '/'", _quota_name)]
Listen = Annotated[str, Valid('an address such as "127.0.0.1:7433", "[::1]:7433" or "example.org:7433"', _listen)]
Policy = Annotated[str, Valid(f"one of {', '.join(POLICIES)}", _policy)]
EngineName = Annotated[str, Valid('"module:name" of an engine', _engine)]
Addresses = Annotated[
    tuple[str, ...],
    Valid('beginnings of addresses, each with a "/" after the host, such as ["https://judge.example/"]', _addresses),
]
Degrees = Annotated[tuple[int, ...], Valid("increasing powers of two, such as [1, 2, 4]", _degrees)]
Arguments = Annotated[dict[str, Any], Valid("a table of values by name", _arguments)]
