"""Tasks of the tests of the process pool. Its workers import this module, so it imports little."""

from __future__ import annotations

import os

from tangram.errors import InvalidConfig, InvalidTrace, InvariantError, ManagerError
from tangram.processes.process_pool import Progress

ERRORS = [
    InvalidConfig("cores", 0, "at least 1"),
    InvalidTrace("x.csv:2", "?", "a number"),
    ManagerError("gone"),
    KeyError("x"),
]


def square(task: int, report: Progress) -> int:
    report(1, 1)
    return task * task


def oversell(task: int, report: Progress) -> None:
    raise InvariantError("oversold", ["submitted", "started"])


def die(task: int, report: Progress) -> None:
    os._exit(9)


def raise_error(number: int, report: Progress) -> None:
    raise ERRORS[number]
