"""Shipping: how a function and its arguments get into another process.

Owns the choice between by name and by value. What another process can import goes by its name; what lives in a script,
in a notebook or in another function goes by value, as cloudpickle writes it, which is imported when it is needed.
"""

from __future__ import annotations

import importlib.util
import marshal
import pickle
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from tangram.errors import InvalidAction, TangramError

MAIN = "__main__"
"""The module that is another one in every process."""
DECLARED = "__tangram_function__"
"""The attribute under which what a decorator made has the function."""


def title_of(function: Callable[..., Any]) -> str:
    """Its module and its name in there."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '?')}.{name}"


bare: ContextVar[bool] = ContextVar("bare", default=False)
"""What is being pickled goes to where Tangram is not: a declared function goes as the plain one that it declares."""


def is_importable(function: Callable[..., Any]) -> bool:
    """Whether another process finds this very function under its name."""
    module = getattr(function, "__module__", None)
    if not module or module == MAIN:
        return False
    found: Any = sys.modules.get(module)
    for part in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    if getattr(found, DECLARED, found) is not function:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def code_of(function: Callable[..., Any]) -> bytes:
    """What tells it from itself before its module was loaded anew."""
    code = getattr(function, "__code__", None)
    return marshal.dumps(code) if code is not None else b""


def by_value(function: Callable[..., Any], *, whole: bool = False) -> bytes:
    """`whole`: what its module defines goes along, because the module is not where it goes to."""
    module = sys.modules.get(getattr(function, "__module__", None) or "") if whole else None
    going_away = bare.set(whole)
    try:
        return _dumped(function, module)
    except TangramError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise InvalidAction(title_of(function), said, "a function that can be pickled; put it into a module") from error
    finally:
        bare.reset(going_away)


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """What lives in a script is not there in an instance, and what pickle does not take cloudpickle may: both by
    value."""
    try:
        data = pickle.dumps((args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        if MAIN.encode() not in data:
            return data
    except Exception:
        pass
    try:
        return _dumped((args, kwargs))
    except TangramError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise InvalidAction(f"arguments of {title_of(function)}", said, "arguments that can be pickled") from error


def _dumped(value: object, module: ModuleType | None = None) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise TangramError(
            "a function that cannot be imported, and arguments that pickle does not take, need cloudpickle:"
            " pip install cloudpickle, or put them into a module"
        ) from error
    if module is None or module.__name__ == MAIN:
        data: bytes = cloudpickle.dumps(value)
        return data
    cloudpickle.register_pickle_by_value(module)
    try:
        data = cloudpickle.dumps(value)
        return data
    finally:
        cloudpickle.unregister_pickle_by_value(module)
