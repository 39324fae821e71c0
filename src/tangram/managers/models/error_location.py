"""Error locations: where in an engine an exception was raised.

Chooses one frame of the traceback: the last one of the user's code, because the last of all is usually in a library.
"""

from __future__ import annotations

import os
import sysconfig
import traceback

from tangram import errors

PACKAGE_DIRECTORY = os.path.join(os.path.realpath(os.path.dirname(errors.__file__)), "")
INSTALLED_DIRECTORIES = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Directories of the standard library and of installed packages."""


def location_of(error: BaseException) -> str:
    """Returns the place in the code, such as `my_engine.py, line 12, in call`: the last frame of code that is not
    installed, else the last one outside this package. Empty if there is none: messages of engines of this package need
    no location."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not _is_in(frame.filename, PACKAGE_DIRECTORY)
    ]
    own = [frame for frame in frames if not _is_in(frame.filename, INSTALLED_DIRECTORIES)] or frames
    return f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}, in {own[-1].name}" if own else ""


def _is_in(file: str, directories: str | tuple[str, ...]) -> bool:
    return file.startswith("<") or os.path.realpath(file).startswith(directories)


def describe_error(error: BaseException, characters_max: int) -> str:
    """The type, message and location of an exception."""
    location = location_of(error)
    return f"{type(error).__name__}: {error}"[:characters_max] + (f" ({location})" if location else "")
