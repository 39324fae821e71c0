"""A checkpoint that is held: it stays while somebody plays with it, though the run that made it deletes it meanwhile.

Owns how it is held: by links to its files, or by copies where there can be none. Never changes a checkpoint. Promises
that what is held is whole, by its checksums, and that nothing of it is left at the end; after a kill, when somebody
holds the next one there.

    with held_newest(run / CHECKPOINTS, warn=print) as held:
        play(held.folder)       # with the weights of held.path, which may be gone by now
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tangram.errors import InvalidConfig, ManagerError
from tangram.rl.runs.checkpoints import DamagedCheckpoint, folder_name, read_checkpoint, steps_in
from tangram.rl.train.weights_folder import published_folder

VANISHED_MAX = 100
"""Checkpoints in a row that are deleted before they are held. Links take milliseconds; whoever meets this copies to
another disk from a run that saves faster than it can be read."""


class Held(NamedTuple):
    path: Path
    """What it is called."""
    folder: Path
    """Where its files are."""


class Vanished(Exception):
    """It was deleted before it was held."""


@contextmanager
def held(path: Path) -> Iterator[Held]:
    """This one. Raises DamagedCheckpoint, InvalidConfig if it is gone, and ManagerError."""
    with _place(path.parent) as place:
        try:
            found = _hold(path, place)
        except Vanished:
            raise InvalidConfig("checkpoint", str(path), "one that is there: its run has just deleted it") from None
        yield found


@contextmanager
def held_newest(checkpoints: Path, warn: Callable[[str], None]) -> Iterator[Held]:
    """The newest in this folder that is whole; `warn` is told of those that are not. Raises InvalidConfig if there is
    none, and ManagerError."""
    with _place(checkpoints) as place:
        yield _newest(checkpoints, place, warn)


def _newest(checkpoints: Path, place: Path, warn: Callable[[str], None]) -> Held:
    damaged: set[int] = set()
    vanished = 0
    while vanished < VANISHED_MAX:
        left = [step for step in steps_in(checkpoints) if step not in damaged]
        if not left:
            break
        try:
            return _hold(checkpoints / folder_name(left[-1]), place)
        except Vanished:
            vanished += 1
        except DamagedCheckpoint as error:
            warn(str(error))
            damaged.add(left[-1])
    if vanished:
        raise ManagerError(f"{checkpoints}: {vanished} checkpoints in a row were deleted before they could be held")
    if damaged:
        raise ManagerError(f"{checkpoints}: no checkpoint in it is whole", retry=False)
    raise InvalidConfig("checkpoint", str(checkpoints), "a run that has a checkpoint: this one has none yet")


@contextmanager
def _place(checkpoints: Path) -> Iterator[Path]:
    """In the folder of the run, where there can be links; or else where everybody may write."""
    run = checkpoints.resolve().parent
    below = run if os.access(run, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        try:
            place = stack.enter_context(published_folder(below))
        except OSError as error:
            raise ManagerError(f"no checkpoint can be held in {below}: {error.strerror}") from error
        yield place


def _hold(path: Path, place: Path) -> Held:
    """Raises Vanished, DamagedCheckpoint and ManagerError."""
    folder = place / path.name
    try:
        for each in path.rglob("*"):
            if each.is_file():
                _link(each, folder / each.relative_to(path))
        read_checkpoint(folder)
        return Held(path, folder)
    except (OSError, ManagerError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not path.is_dir():
            raise Vanished from None
        if isinstance(error, OSError):
            raise ManagerError(f"checkpoint {path} cannot be held: {error.strerror}") from error
        if isinstance(error, DamagedCheckpoint):
            error.args = (str(error).replace(str(folder), str(path)),)
        raise


def _link(file: Path, to: Path) -> None:
    """Raises OSError."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        to.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:  # on another disk, or somebody else's
        shutil.copyfile(file, to)
