"""Serialization: how a function and its arguments are sent to another process.

A function that another process can import is sent by name. One of a script, a notebook or another function is sent by
value with cloudpickle, which is imported only then.
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
"""This module differs between processes, so nothing in it can be sent by name."""
DECLARED = "__tangram_function__"
"""The attribute of a declared function that holds the plain one."""


def qualified_name(function: Callable[..., Any]) -> str:
    """The module and the qualified name, joined by a dot."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '?')}.{name}"


unwrap_declared: ContextVar[bool] = ContextVar("unwrap_declared", default=False)
"""Set while pickling for an image without Tangram: a declared function is sent as the plain one that it declares."""


def is_importable(function: Callable[..., Any]) -> bool:
    """Whether importing its name in another process gives this function."""
    module = getattr(function, "__module__", None)
    if not module or module == MAIN:
        return False
    value: Any = sys.modules.get(module)
    for part in getattr(function, "__qualname__", "").split("."):
        value = getattr(value, part, None)
    if getattr(value, DECLARED, value) is not function:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def code_bytes(function: Callable[..., Any]) -> bytes:
    """Distinguishes versions of a function whose module was reloaded."""
    code = getattr(function, "__code__", None)
    return marshal.dumps(code) if code is not None else b""


def pickle_by_value(function: Callable[..., Any], *, include_module: bool = False) -> bytes:
    """`include_module`: includes the definitions of its module, for an image that does not contain the module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "") if include_module else None
    token = unwrap_declared.set(include_module)
    try:
        return _dumped(function, module)
    except TangramError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        expected = "a function that can be pickled; put it into a module"
        raise InvalidAction(qualified_name(function), message, expected) from error
    finally:
        unwrap_declared.reset(token)


def pickle_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The pickled arguments: by value with cloudpickle if they refer to a script, which instances cannot import, or if
    pickle fails."""
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
        message = f"{type(error).__name__}: {error}"
        field = f"arguments of {qualified_name(function)}"
        raise InvalidAction(field, message, "arguments that can be pickled") from error


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
