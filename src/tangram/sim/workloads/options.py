"""Validation of workload options.

Raises InvalidConfig with the option, its value and the valid values, before anything is drawn.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable

from tangram.errors import InvalidConfig


def check_integer(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidConfig(name, value, f"a whole number, at least {least}")


def check_number(name: str, value: object, most: float = math.inf) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= most:
        upper = f"from 0 to {most:g}" if most < math.inf else "at least 0"
        raise InvalidConfig(name, value, f"a number {upper}")
    if math.isinf(value):
        raise InvalidConfig(name, value, "a finite number")


def check_positive(name: str, value: object) -> None:
    check_number(name, value)
    if value == 0:
        raise InvalidConfig(name, value, "a number above 0")


def check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InvalidConfig(name, value, "a printable name that is not empty")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidConfig(name, value, "True or False")


def check_degrees(value: Iterable[int]) -> tuple[int, ...]:
    """Return the device counts that a service can run on, sorted and without duplicates."""
    for degree in value:
        check_integer("degrees", degree)
    degrees = tuple(sorted(set(value)))
    if not degrees:
        raise InvalidConfig("degrees", value, "at least one number of devices, such as (1, 2, 4, 8)")
    return degrees


def check_choice(name: str, value: object, valid: Iterable[str]) -> None:
    """Check that `value` is one of the valid names; the error suggests the nearest one."""
    names = list(valid)
    if value in names:
        return
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.0)
    hint = f" (nearest: {near[0]!r})" if near else ""
    raise InvalidConfig(name, value, f"one of {', '.join(names) or 'no names at all'}{hint}")


def check_options(subject: str, function: Callable[..., object], chosen: Iterable[str]) -> None:
    """Check that every option is a keyword of the function that builds `subject`."""
    valid = [name for name, parameter in inspect.signature(function).parameters.items() if _is_option(name, parameter)]
    for option in chosen:
        check_choice(f"option of {subject}", option, valid)


def _is_option(name: str, parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("batch", "seed")
