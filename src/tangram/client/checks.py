"""Checks: what callers may give and when, in their own words.

Owns what is said of an argument that cannot be meant, and of something that is used before it is open, after it was
closed, or on another event loop. Does no work. Promises errors of `tangram.errors` that name the argument.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence

from tangram.core.limits import Limits
from tangram.errors import InvalidAction, InvalidConfig, InvalidInput, TangramError

Command = str | Sequence[str]
Content = str | bytes | bytearray | memoryview
OnOutput = Callable[[str, bytes], None]
"""Is told what a program writes as it comes: "stdout" or "stderr", and the bytes."""
PathText = str | os.PathLike[str]

MODE_MAX = 0o7777


class Life:
    """Of something that is opened once, used where it was opened, and closed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._why_not = "is not open: use `async with`, or `with` after connect_sync()"
        """Empty while it is open."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.begun = False

    @property
    def is_open(self) -> bool:
        return not self._why_not

    def begin(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """It is about to be opened. With a loop: it belongs there."""
        if self.begun:
            raise TangramError(f"{self._what} was opened before, which can be done once; make another one")
        self.begun = True
        self._loop = loop

    def opened(self) -> None:
        self._why_not = ""

    def closed(self) -> None:
        self._why_not = "is closed"

    def require(self) -> None:
        if self._why_not:
            raise TangramError(f"{self._what} {self._why_not}")
        self.require_loop()

    def require_loop(self) -> None:
        """Whoever waits on another loop would wait for ever."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise TangramError(
                f"{self._what} belongs to another event loop: use it where it was opened, or open another one here"
            )


# ---- arguments of actions and files -----------------------------------------------------------------------------


def words_of(command: Command) -> str | tuple[str, ...]:
    """What is inside a list of words is for the work to check."""
    if isinstance(command, str):
        return command
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise InvalidAction("command", command, "a string, which goes through a shell, or a list of words")
    return tuple(command)


def commands_of(field: str, commands: Sequence[str]) -> tuple[str, ...]:
    """A string is a sequence as well, but of letters."""
    if not isinstance(commands, list | tuple) or not all(isinstance(command, str) for command in commands):
        raise InvalidAction(field, commands, "a list of commands, such as ['make']")
    return tuple(commands)


def variables_of(field: str, env: Mapping[str, str] | None) -> dict[str, str]:
    if env is not None and not isinstance(env, Mapping):
        raise InvalidAction(field, env, "variables by name, such as {'COLOUR': 'blue'}")
    return dict(env or {})


def require_counts(field: str, counts: Mapping[str, int] | None) -> Mapping[str, int]:
    """How much each is, is for the quota to check."""
    if counts is not None and not isinstance(counts, Mapping):
        raise InvalidAction(field, counts, "numbers of requests by name, such as {'search': 1}")
    return counts or {}


def bytes_of(field: str, content: Content) -> bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if not isinstance(content, str):
        raise InvalidAction(field, type(content).__name__, "text or bytes")
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise InvalidAction(field, "text with halves of characters", "text that is UTF-8, or bytes") from None


def path_of(field: str, path: PathText, error: type[InvalidInput] = InvalidAction) -> str:
    found = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(found, str):
        raise error(field, path, "a path: text, or a Path")
    return found


def require_mode(mode: int) -> None:
    if type(mode) is not int or not 0 <= mode <= MODE_MAX:
        raise InvalidAction("mode", mode, "permissions as a number, such as 0o644 or 0o755")


def require_listener(on_output: OnOutput | None) -> None:
    """It is called, not awaited."""
    if on_output is None:
        return
    called = on_output if inspect.isroutine(on_output) else getattr(on_output, "__call__", None)  # noqa: B004
    if not callable(on_output) or inspect.iscoroutinefunction(on_output) or inspect.iscoroutinefunction(called):
        raise InvalidAction("on_output", on_output, "a plain function of (stream, data), not `async def`")


# ---- arguments of a connection ----------------------------------------------------------------------------------


def require_cores(cores: float | None) -> None:
    """How many there are is for the manager to say."""
    if cores is not None and (type(cores) not in (int, float) or not 0.0 < cores < math.inf):
        raise InvalidConfig("cores", cores, "a number of cores above 0, such as 2 or 0.5")


def require_limits(limits: Limits | None) -> None:
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidConfig("limits", limits, "tangram.Limits, such as Limits(queue_max=1000)")
