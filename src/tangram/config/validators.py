"""Validators of config values: one `Validator` for each kind of value.

Owns the checks of single values and their descriptions in errors and on the reference page. Independent of keys and
files. Promises that `parse` returns a value of the type of its field, that reading that value again returns the same,
and that an invalid value raises ValueError, with a more precise text than the description if there is one.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from tangram.core.action import ID_LENGTH_MAX
from tangram.core.demand import CPU, EXCLUSIVE_CORE, GPU, MEMORY
from tangram.core.policies import POLICIES, policy
from tangram.core.sizes import parse_size
from tangram.errors import InvalidConfig

COUNT_MAX = 1 << 53
"""The largest integer that a float represents exactly. Larger numbers are mistakes."""
PORT_MAX = 65535
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")


class Validator(NamedTuple):
    """The valid values of a field."""

    expected: str
    """Follows "expected" in errors."""
    parse: Callable[[Any], Any]


# ---- numbers ----


def _count(least: int) -> Validator:
    def parse(value: object) -> int:
        if type(value) is not int or value < least:
            raise ValueError
        if value > COUNT_MAX:
            raise ValueError(f"a whole number, at most {COUNT_MAX}")
        return value

    return Validator(f"a whole number, at least {least}", parse)


def number(words: str, *, zero: bool = False, most: float = COUNT_MAX) -> Validator:
    def parse(value: object) -> float:
        if type(value) not in (int, float):
            raise ValueError
        assert isinstance(value, int | float)
        if not (0 < value < math.inf or (zero and value == 0)) or value > most:
            raise ValueError
        return float(value)

    return Validator(words, parse)


def _size(least: int) -> Validator:
    def parse(value: Any) -> int:
        try:
            return parse_size("", value, least=least, most=COUNT_MAX, error=InvalidConfig)
        except InvalidConfig:
            raise ValueError from None

    return Validator(
        'a size such as "512MiB" or "2GB", or a number of bytes' + (", at least 1" if least else ""), parse
    )


def _bool(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


# ---- text ----


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
    if name in (CPU, GPU, MEMORY, EXCLUSIVE_CORE):
        raise ValueError("a name that is not a kind of resource of a machine")
    return name


def one_of(choices: Any, renamed: Mapping[str, str] | None = None) -> Validator:
    """Accepts the values of a Literal. `renamed`: new names by former names, for the error."""
    words = get_args(choices)
    new_names = renamed or {}

    def parse(value: object) -> str:
        if isinstance(value, str) and value in new_names:
            raise ValueError(f'"{new_names[value]}", which is the new name of "{value}"')
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return Validator("one of " + ", ".join(f'"{word}"' for word in words), parse)


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
    """Splits `host:port` or `[v6]:port`. Raises ValueError."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or len(port) > 5 or int(port) > PORT_MAX:
        raise ValueError
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.IPv6Address(host[1:-1])), int(port)
    # A name whose last label is a number is a mistyped address.
    if _HOST.fullmatch(host) is None or host.rpartition(".")[2].isdecimal():
        ipaddress.IPv4Address(host)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach the host. Of names only `localhost` is known to be local."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


# ---- lists ----


def _addresses(value: object) -> tuple[str, ...]:
    """The "/" after the host is required: otherwise a prefix would also match longer host names."""
    values = tuple(value) if isinstance(value, list | tuple) else (None,)
    for each in values:
        if not isinstance(each, str) or not re.fullmatch(r"https?://[^/@\s]+/[^\s]*", each):
            raise ValueError
    return cast(tuple[str, ...], values)


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


def optional(valid: Validator) -> Validator:
    """Also allows None, the value of a missing key."""
    return Validator(valid.expected, lambda value: None if value is None else valid.parse(value))


# ---- types of fields ----

COUNT, COUNT_OR_0 = _count(1), _count(0)
SECONDS = number("a positive, finite number of seconds")
PER_SECOND = number("a positive, finite number per second")
CORES = number("a number of cores above 0, such as 2 or 0.5")
SIZE, SIZE_OR_0 = _size(1), _size(0)
PATH = Validator("a path, not empty", _path)
PATH_OR_NONE = Validator('a path, or "" for none', _text)

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
Flag = Annotated[bool, Validator("true or false", _bool)]
PathText = Annotated[str, PATH]
PathOrNone = Annotated[str, PATH_OR_NONE]
Text = Annotated[str, Validator("text of printable characters", _text)]
Name = Annotated[str, Validator(f"1 to {ID_LENGTH_MAX} printable characters", _name)]
NodeName = Annotated[str, Validator(f"1 to {ID_LENGTH_MAX} printable characters without '@' and '/'", _node_name)]
QuotaName = Annotated[str, Validator(f"1 to {ID_LENGTH_MAX} printable characters without '@' and '/'", _quota_name)]
Listen = Annotated[str, Validator('an address such as "127.0.0.1:7433", "[::1]:7433" or "example.org:7433"', _listen)]
Policy = Annotated[str, Validator(f"one of {', '.join(POLICIES)}", _policy)]
EngineName = Annotated[str, Validator('"module:name" of an engine', _engine)]
Addresses = Annotated[
    tuple[str, ...],
    Validator('URL prefixes, each with a "/" after the host, such as ["https://judge.example/"]', _addresses),
]
Degrees = Annotated[tuple[int, ...], Validator("increasing powers of two, such as [1, 2, 4]", _degrees)]
Arguments = Annotated[dict[str, Any], Validator("a table of values by name", _arguments)]
