"""Records of function calls: what to call, and its result.

Owns the records that clients and the managers of this package exchange. All are serialisable and checked at
construction. `decode_result` rejects malformed results.
"""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tangram.core.demand import CORE
from tangram.errors import InvalidAction, ManagerError
from tangram.managers.work import BYTES_MAX, MIB, Work

FUNCTION_BYTES_MAX = 64 * MIB
"""The largest function by value, with the values that it refers to."""
ARGUMENTS_BYTES_MAX = 64 * MIB
"""The largest encoded arguments of one call. Larger values belong in a file or a service that the function reads."""
ANSWER_BYTES_MAX = 16 * MIB
"""The largest encoded value that a function returns."""
MEMORY_BYTES_MIN = 32 * MIB
"""The minimum memory of an instance: less does not suffice for an interpreter with a few modules."""
INSTANCES_MAX = 4096
RETRIES_MAX = 100
PROCESSES_MAX = 1 << 22
"""The maximum processes of an instance: the limit of the kernel."""
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Not allowed in a header value, where a line break would begin another header."""
FRAMING = ("content-length", "transfer-encoding")
NAME_CHARACTERS_MAX = 150
"""The longest name of a function: it is part of the name of its pool, which is in every log line."""


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A function and the options of its instances. It is either imported by its name, or sent by value."""

    name: str
    """A name that is unique among the functions of one manager."""
    module: str = ""
    qualname: str = ""
    pickled: bytes = b""
    """The function by value, pickled by cloudpickle; empty: `qualname` of `module`."""
    paths: tuple[str, ...] = ()
    """The import path (`sys.path`) of its instances."""
    cpu_units: int = CORE
    """Milli-cores of a call; the width of its instances."""
    memory_bytes: int = 512 * MIB
    """Memory limit of each process of an instance."""
    max_instances: int = 8
    idle_s: float = 30.0
    """Time without a call after which an instance ends."""
    retries: int = 2
    """Maximum retries of a lost call."""
    processes_max: int = 512
    """Limit of the processes of an instance, itself included. Threads count as well."""

    def __post_init__(self) -> None:
        require_name("function.name", self.name)
        if bool(self.pickled) == bool(self.module and self.qualname):
            raise InvalidAction("function", self.name, "a module and a name in it, or the pickled function")
        if len(self.pickled) > FUNCTION_BYTES_MAX:
            expected = f"at most {FUNCTION_BYTES_MAX} bytes when pickled; load what is large in a module"
            raise InvalidAction(f"function {self.name}", f"{len(self.pickled)} bytes", expected)
        require_whole("cpu_units", self.cpu_units, 1, BYTES_MAX)
        require_whole("memory", self.memory_bytes, MEMORY_BYTES_MIN, BYTES_MAX)
        require_whole("max_instances", self.max_instances, 1, INSTANCES_MAX)
        require_whole("retries", self.retries, 0, RETRIES_MAX)
        require_whole("processes", self.processes_max, 1, PROCESSES_MAX)
        require_seconds("idle_s", self.idle_s)

    @property
    def pool(self) -> str:
        """The kind of the pool of its instances."""
        return f"function/{self.name}"


def loaded_spec(spec: FunctionSpec) -> dict[str, Any]:
    """The record that the program in an instance needs to load the function; see `program`."""
    return {
        "name": spec.name,
        "module": spec.module,
        "qualname": spec.qualname,
        "pickled": spec.pickled,
        "memory_bytes": spec.memory_bytes,
        "answer_bytes_max": ANSWER_BYTES_MAX,
        "paths": None,
        "python": None,
        "image": "",
        "disk_bytes": 0,
        "umask": None,
    }


class Call(Work, frozen=True, kw_only=True, tag="Call"):
    """Call a function in one of its instances."""

    function: FunctionSpec
    arguments: bytes
    """A pickled pair: positional arguments, and arguments by name."""

    def __post_init__(self) -> None:
        if len(self.arguments) > ARGUMENTS_BYTES_MAX:
            raise InvalidAction(
                f"arguments of {self.function.name}",
                f"{len(self.arguments)} bytes",
                f"at most {ARGUMENTS_BYTES_MAX} bytes when pickled; pass the name of a file instead",
            )


class EndpointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A function that is called over HTTP."""

    name: str
    url: str
    max_concurrency: int = 16
    timeout_s: float = 30.0
    """Time limit of one attempt."""
    retries: int = 3
    headers: dict[str, str] = {}

    def __post_init__(self) -> None:
        require_name("endpoint.name", self.name)
        require_url(self.url)
        require_whole("max_concurrency", self.max_concurrency, 1, INSTANCES_MAX)
        require_whole("retries", self.retries, 0, RETRIES_MAX)
        require_seconds("timeout_s", self.timeout_s)
        require_headers(self.headers)

    @property
    def pool(self) -> str:
        """The kind of the pool of its concurrent calls."""
        return f"endpoint/{self.name}"


class Post(Work, frozen=True, kw_only=True, tag="Post"):
    """Call an HTTP function endpoint."""

    endpoint: EndpointSpec
    body: bytes
    """JSON."""
    key: str
    """The idempotency key, the same for every attempt."""

    def __post_init__(self) -> None:
        require_header_value("idempotency_key", self.key)
        if len(self.body) > ARGUMENTS_BYTES_MAX:
            raise InvalidAction(
                f"arguments of {self.endpoint.name}", f"{len(self.body)} bytes", f"at most {ARGUMENTS_BYTES_MAX} bytes"
            )


def require_name(field: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS_MAX or not value.isprintable():
        raise InvalidAction(field, value, f"1 to {NAME_CHARACTERS_MAX} printable characters")
    if "@" in value:
        raise InvalidAction(field, value, "a name without '@'")


def require_whole(field: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidAction(field, value, f"a whole number from {least} to {most}")


def require_url(url: object) -> None:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidAction("url", url, "an address that begins with http:// or https://")
    if not all(character.isprintable() and character != " " for character in url):
        raise InvalidAction("url", url, "an address without blanks and control characters")
    try:
        parts = urlsplit(url)
        valid = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # UnicodeError is one
        valid = False
    if not valid:
        raise InvalidAction("url", url, "a host, and a port from 1 to 65535 or none, such as http://host:8000/score")


def require_headers(headers: object) -> None:
    """Headers that frame the body are set with it and not allowed here."""
    if not isinstance(headers, dict):
        raise InvalidAction("headers", headers, "texts by name, such as {'Authorization': 'Bearer ...'}")
    for name, value in headers.items():
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            raise InvalidAction("headers", name, "names of letters, digits and '-'")
        if name.lower() in FRAMING:
            raise InvalidAction("headers", name, "other headers: this one is set for each request")
        require_header_value(f"headers[{name!r}]", value)


def require_header_value(field: str, value: object) -> None:
    if not isinstance(value, str) or CONTROL.search(value):
        raise InvalidAction(field, value, "text of one line without control characters: it is sent as a header")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidAction(field, value, "text that is UTF-8: it is sent as a header") from None


def require_seconds(field: str, value: object) -> None:
    if not (type(value) is int or type(value) is float) or not 0.0 < value < math.inf:
        raise InvalidAction(field, value, "a positive, finite number of seconds")


# ---- results ----------------------------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that the function itself caused."""

    kind: str
    """`raised`, `import` (its module cannot be imported), `arguments` (they cannot be unpickled), `unserialisable` (the
    returned value), `memory` (its limit was reached), `processes` (it had more than its limit), `exited` (it ended its
    process), or `answer` (an endpoint responded with an error or a malformed body)."""
    message: str
    """One line."""
    traceback: str = ""
    """The traceback as Python prints it; of an endpoint, the response."""


class FunctionResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The result of a call: a value or a failure."""

    failure: Failure | None = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    """msgpack."""


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(FunctionResult).decode
_value = msgspec.msgpack.Decoder().decode


def encode_failure(kind: str, message: str, traceback: str = "") -> bytes:
    """The encoded result of a function that failed."""
    return _encode(FunctionResult(failure=Failure(kind=kind, message=message, traceback=traceback)))


def encode_value(value: bytes) -> bytes:
    """Encodes the result with this value, which is msgpack."""
    return _encode(FunctionResult(value=msgspec.Raw(value)))


def decode_result(data: bytes) -> tuple[Failure | None, Any]:
    """Decodes the failure or the value. Raises ManagerError for a malformed result."""
    try:
        answer = _decode(data)
        return answer.failure, (None if answer.failure is not None else _value(answer.value))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManagerError(f"the answer cannot be read: {error}") from error
