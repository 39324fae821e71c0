"""Services: the name of a model service, its engine, its numbers of devices and the memory it needs there.

Owns the record and its checks against devices. Never loads anything.
"""

from __future__ import annotations

import importlib
import math
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tangram.core.action import ID_LENGTH_MAX
from tangram.errors import InvalidConfig
from tangram.managers.models.engine import Engine

T = TypeVar("T")

LOAD_S_MAX = 600.0
"""Time limit for loading a service. A copy takes seconds; a server that is started for the first time takes minutes."""
CALL_S_MAX = 600.0
"""Time limit of one call: more than a judge needs, and short enough to recover a hanging device soon."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A model that actions call by name."""

    name: str
    engine: Any
    """An Engine that can be pickled; or `module:name`, an Engine or a callable that creates one from `arguments`. Only
    the processes of devices import it."""
    arguments: dict[str, Any] = {}
    degrees: tuple[int, ...] = (1,)
    """Numbers of devices it can run on. It is loaded separately for each."""
    memory_bytes: int = 0
    """On all of its devices together: weights and working memory. 0: the size of its weights; not allowed for an engine
    whose weights are elsewhere, such as in a server."""
    load_s_max: float = LOAD_S_MAX
    """Time limit of a load."""
    call_s_max: float = CALL_S_MAX
    """Time limit of a call, unless its caller sets another one."""

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name or len(name) > ID_LENGTH_MAX or not name.isprintable():
            raise InvalidConfig("service.name", name, f"1 to {ID_LENGTH_MAX} printable characters")
        where = f"service {name}"
        if not isinstance(self.arguments, dict):
            raise InvalidConfig(f"{where} arguments", self.arguments, "values by name")
        if isinstance(self.engine, str):
            module, _, attribute = self.engine.partition(":")
            if not module or not attribute:
                raise InvalidConfig(f"{where} engine", self.engine, "an engine, or 'module:name' of one")
        elif isinstance(self.engine, type) or not isinstance(self.engine, Engine):
            raise InvalidConfig(
                f"{where} engine", self.engine, "an instance of an engine class, or 'module:name' of one"
            )
        elif self.arguments:
            raise InvalidConfig(f"{where} arguments", self.arguments, "none: the engine is already made")
        degrees = self.degrees
        numbers = isinstance(degrees, tuple) and degrees and all(type(degree) is int for degree in degrees)
        if not numbers or list(degrees) != sorted(set(degrees)):
            raise InvalidConfig(f"{where} degrees", degrees, "increasing numbers of devices, such as (1, 2, 4)")
        for degree in degrees:
            if degree < 1 or degree & (degree - 1):
                raise InvalidConfig(f"{where} degrees", degrees, "powers of two: devices are allocated in such chunks")
        if type(self.memory_bytes) is not int or self.memory_bytes < 0:
            raise InvalidConfig(f"{where} memory_bytes", self.memory_bytes, "a whole number of bytes, at least 0")
        for field in ("load_s_max", "call_s_max"):
            seconds = getattr(self, field)
            if type(seconds) not in (float, int) or not 0.0 < seconds < math.inf:
                raise InvalidConfig(f"{where} {field}", seconds, "a positive, finite number of seconds")
        self.require_memory(external_weights=has_external_weights(self.engine))

    def pickled(self) -> bytes:
        """The bytes from which the processes of devices create the engine."""
        source = (self.engine, self.arguments) if isinstance(self.engine, str) else (self.engine, None)
        try:
            return pickle.dumps(source)
        except Exception as error:
            raise InvalidConfig(
                f"service {self.name} engine", self.engine, f"an engine that can be pickled ({error}), or 'module:name'"
            ) from error

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of its engine, imported by the fork server so that children need not."""
        if isinstance(self.engine, str):
            return (self.engine.partition(":")[0],)
        return (type(self.engine).__module__, *getattr(self.engine, "imports", ()))

    def require_memory(self, *, external_weights: bool) -> None:
        """Raises InvalidConfig if the memory of the service is neither declared nor known from its weights."""
        if external_weights and not self.memory_bytes:
            raise InvalidConfig(
                f"service {self.name} memory_bytes",
                self.memory_bytes,
                "its size on devices in bytes, such as 60 << 30: its weights are not in Tangram's memory",
            )

    def require_fit(self, need_by_degree: dict[int, int], memory_bytes: Sequence[int]) -> None:
        """Raises InvalidConfig unless the service fits at each of its degrees. `need_by_degree`: bytes per device."""
        for degree, need in need_by_degree.items():
            if degree > len(memory_bytes):
                raise InvalidConfig(
                    f"service {self.name} degrees", degree, f"at most {len(memory_bytes)}, the number of devices"
                )
            starts = range(0, len(memory_bytes) - degree + 1, degree)
            smallest = min(min(memory_bytes[start : start + degree]) for start in starts)
            if need > smallest:
                raise InvalidConfig(
                    f"service {self.name} at degree {degree}",
                    f"{need} bytes on each device",
                    f"at most {smallest} bytes, the memory of the smallest device it may be given; "
                    "remove that degree, or declare less memory",
                )


def has_external_weights(engine: object) -> bool:
    """Whether the engine declares `external_weights`: weights outside of Tangram."""
    return getattr(engine, "external_weights", False) is True


def require_all(field: str, values: Iterable[T], kind: Any, expected: str) -> list[T]:
    """The values as a list. Raises InvalidConfig unless all are of this kind."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if listed is None or not all(isinstance(item, kind) for item in listed):
        raise InvalidConfig(field, values if listed is None else listed, f"a list of {expected}")
    return listed


def engine_of(pickled: bytes) -> Engine:
    """The engine itself, in the process of a device."""
    engine, arguments = pickle.loads(pickled)
    if isinstance(engine, str):
        value = imported(engine)
        engine = value if not isinstance(value, type) and isinstance(value, Engine) else value(**arguments)
    if not isinstance(engine, Engine):
        raise TypeError(f"expected an Engine, got {type(engine).__name__}")
    return engine


def imported(engine: str) -> Any:
    """Returns the value named by `module:name`."""
    module, _, attribute = engine.partition(":")
    value: Any = importlib.import_module(module)
    for name in attribute.split("."):
        value = getattr(value, name)
    return value
