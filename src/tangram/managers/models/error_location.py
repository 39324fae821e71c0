"""Frames: where in an engine something was raised.

Owns the choice of one frame. The last frame of a traceback mostly lies in a library; who looks for a mistake wants the
last one that is their own.
"""

from __future__ import annotations

import os
import sysconfig
import traceback

from tangram import errors

OURS = os.path.join(os.path.realpath(os.path.dirname(errors.__file__)), "")
OTHERS = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Directories of what came with Python or was installed."""


def where(error: BaseException) -> str:
    """Such as `my_engine.py, line 12, in call`: the last frame of code that was not installed, else of any that is not
    ours. Empty if all of it is: what our engines raise on purpose says itself what is wrong."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_in(frame.filename, OURS)]
    own = [frame for frame in frames if not _is_in(frame.filename, OTHERS)] or frames
    return f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}, in {own[-1].name}" if own else ""


def _is_in(file: str, directories: str | tuple[str, ...]) -> bool:
    return file.startswith("<") or os.path.realpath(file).startswith(directories)


def in_words(error: BaseException, characters_max: int) -> str:
    """What was raised, and where."""
    place = where(error)
    return f"{type(error).__name__}: {error}"[:characters_max] + (f" ({place})" if place else "")
