"""The folder of a training run: who owns it, what its settings are, and what of it can be gone on with.

    RUN/owner                  locked by the process that trains
    RUN/settings.json          of the run
    RUN/modules.json           folders in which environments of one's own are looked for
    RUN/metrics.jsonl          a line of every step
    RUN/checkpoints/00000040/  see checkpoints.py
    RUN/samples/00000040.log   see sample_log.py
    RUN/report.html  RUN/tensorboard/

Owns these names. Never trains. Promises that one process at a time works in a folder, that no run is begun on top of
another, and that a run is gone on with only under settings that leave what is saved its meaning: all may be different
as long as nothing is.

    with open_run(path, settings, resume=True) as folder:
        found = folder.latest()
        back = recovered(found, folder.samples_after(found.step))
        with folder.go_on(found) as log: ...
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.files.atomic_directory import sweep, sync, whole_folder
from tangram.rl.config.resume_differences import allowed_changes, changes
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.runs import checkpoints
from tangram.rl.runs.checkpoints import (
    Checkpoint,
    DamagedCheckpoint,
    NoCheckpoint,
    folder_name,
    read_checkpoint,
    steps_in,
)
from tangram.rl.runs.sample_log import Logs, SampleLog, join_after, prune_logs, read_after
from tangram.runtime.orchestrator import undisturbed

OWNER, SETTINGS, METRICS, CHECKPOINTS, SAMPLES = "owner", "settings.json", "metrics.jsonl", "checkpoints", "samples"
MODULES, REPORT, TENSORBOARD = "modules.json", "report.html", "tensorboard"
ROOM = 2
"""Times the size of a checkpoint, with which a disk is not full: the next one has more samples and more of a log."""


def open_run(path: Path | str, settings: TrainSettings, *, resume: bool, modules: tuple[str, ...] = ()) -> RunFolder:
    """A folder for a new run, or with `resume` that of one to be gone on with. `modules`: see `read_modules`; those of
    before stay, if there are none. Raises InvalidConfig: it holds a run
    already, or none; somebody else trains in it; the settings do not fit what is saved. ManagerError, if it cannot be
    written."""
    path = Path(path).absolute()
    if resume and not _holds_run(path):
        raise InvalidConfig("folder", str(path), "the folder of a run, to resume it: there is none; start without it")
    _require_not_foreign(path)
    with ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            stack.callback(os.close, lock)
            if not resume and _holds_run(path):
                raise InvalidConfig(
                    "folder",
                    str(path),
                    "a new folder: this one holds a run; go on with it by --resume, or name another",
                )
            changed = _changes(path, settings) if resume else ()
            if changed or not resume:
                _write_whole(path / SETTINGS, msgspec.json.format(msgspec.json.encode(settings), indent=2))
            if modules:
                _write_whole(path / MODULES, msgspec.json.encode(modules))
            for folder in (path / CHECKPOINTS, path / SAMPLES):
                folder.mkdir(exist_ok=True)
            sweep(path / CHECKPOINTS)
        except OSError as error:
            raise ManagerError(f"the run cannot be written to {path}: {error.strerror}", retry=False) from error
        stack.pop_all()
    return RunFolder(path, settings, lock, changed)


def read_settings(path: Path | str) -> TrainSettings:
    """Of a run. Raises InvalidConfig."""
    file = Path(path) / SETTINGS
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrainSettings)
    except OSError as error:
        raise InvalidConfig("folder", str(path), f"the folder of a run, with {SETTINGS} ({error.strerror})") from error
    except (msgspec.MsgspecError, InvalidInput) as error:
        raise InvalidConfig(str(file), "", f"the settings of a run ({error})") from error


def read_modules(path: Path | str) -> tuple[str, ...]:
    """Folders in which the environments of a run are looked for, besides where Python looks; none, if nobody said.
    Raises InvalidConfig."""
    file = Path(path) / MODULES
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[str, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidConfig(str(file), "", f"a list of folders ({error})") from error


class RunFolder:
    """Made by `open_run`. Use it as `with`."""

    def __init__(self, path: Path, settings: TrainSettings, lock: int, changed: tuple[str, ...]) -> None:
        self.path = path
        self.settings = settings
        self.changed = changed
        """Settings that are different from those it was begun with, in words."""
        self.metrics = path / METRICS
        self.checkpoints = path / CHECKPOINTS
        self.samples = path / SAMPLES
        self.report = path / REPORT
        self.tensorboard = path / TENSORBOARD
        self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- writing ----

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step, which is not written again: what came after it is in its log."""
        return (self.checkpoints / folder_name(step)).exists()

    @asynccontextmanager
    async def checkpoint(self, step: int) -> AsyncIterator[Path]:
        """An unfinished folder, for the trainer to save into and for `write_state`. At the end it becomes the
        checkpoint, durable, and older ones go with their logs. Whatever is raised before leaves nothing of it. Raises
        ManagerError."""
        making = whole_folder(self.checkpoints / folder_name(step))
        unfinished = making.__enter__()

        def finish() -> None:
            try:
                checkpoints.seal(unfinished)
            except BaseException as error:
                making.__exit__(type(error), error, error.__traceback__)
                raise
            making.__exit__(None, None, None)
            self._prune(self.settings.checkpoints.keep)

        try:
            yield unfinished
        except BaseException as error:
            raised = error
            await undisturbed(asyncio.to_thread(making.__exit__, type(raised), raised, raised.__traceback__))
            raise
        # In a thread, so that the loop goes on; and to its end, as what is half written is nobody's.
        await undisturbed(asyncio.to_thread(finish))

    def make_room(self) -> bool:
        """Whether the oldest checkpoint was removed, as the disk has no room for another, and would have it without all
        that are older than the newest. The newest that is whole stays."""
        try:
            newest, steps = self.latest(), steps_in(self.checkpoints)
            if newest is None:
                return False
            older = [step for step in steps if step < newest.step]
            free, needed = shutil.disk_usage(self.checkpoints).free, self._bytes(newest.step)
            if not older or free >= ROOM * needed or free + sum(map(self._bytes, older)) < needed:
                return False
            self._prune(len(steps) - 1)
        except (ManagerError, OSError):
            return False
        return True

    def _bytes(self, step: int) -> int:
        """Of a checkpoint."""
        return sum(each.stat().st_size for each in (self.checkpoints / folder_name(step)).rglob("*"))

    def _prune(self, keep: int) -> None:
        oldest = checkpoints.prune(self.checkpoints, keep)
        assert oldest is not None, "the one that was just made"
        prune_logs(self.samples, oldest)

    # ---- going on ----

    def latest(self, before: int | None = None) -> Checkpoint | None:
        """The newest that is whole, or the newest before a step, with a warning of each that had to be passed over.
        It looks through all its files. Raises NoCheckpoint, if there are some and none of them is whole, and
        ManagerError."""
        warnings: list[str] = []
        for step in reversed(steps_in(self.checkpoints)):
            if before is not None and step >= before:
                continue
            try:
                found = read_checkpoint(self.checkpoints / folder_name(step))
                return msgspec.structs.replace(found, warnings=tuple(warnings))
            except DamagedCheckpoint as error:
                warnings.append(str(error))
        if warnings:
            raise NoCheckpoint(warnings)
        return None

    def samples_after(self, step: int) -> Logs:
        """What was put into the buffer, or lost, since the state of this checkpoint was taken."""
        return read_after(self.samples, step)

    def go_on(self, checkpoint: Checkpoint | None) -> SampleLog:
        """The run goes on from this checkpoint, or begins: the log to append to. Checkpoints after it are those of a
        lineage that is lost, and are set aside; what was logged since it was taken stays, under its step. Without a
        checkpoint nothing does. Raises ManagerError."""
        for later in steps_in(self.checkpoints):
            if checkpoint is None or later > checkpoint.step:
                checkpoints.set_aside(self.checkpoints / folder_name(later))
        if checkpoint is None:
            prune_logs(self.samples)
            return SampleLog(self.samples, 0)
        join_after(self.samples, checkpoint.step)
        return SampleLog(self.samples, checkpoint.step)


def _changes(path: Path, settings: TrainSettings) -> tuple[str, ...]:
    """What is different from the settings of the run, in words. Raises InvalidConfig for what may not be, now that
    there is a checkpoint."""
    before = read_settings(path)
    if steps_in(path / CHECKPOINTS):
        return allowed_changes(before, settings)
    return tuple(map(str, changes(before, settings)))


def _holds_run(path: Path) -> bool:
    return any((path / name).exists() for name in (SETTINGS, METRICS))


def _require_not_foreign(path: Path) -> None:
    """Raises InvalidConfig for folders of somebody else that bear the names of ours: runs sweep and prune theirs."""
    foreign = [name for name in (CHECKPOINTS, SAMPLES) if (path / name).exists()]
    if foreign and not _holds_run(path):
        expected = (
            f"a folder without {' and '.join(foreign)} of others: there is no {SETTINGS} beside them, so they are of "
            "no run; move them away, or name another folder"
        )
        raise InvalidConfig("folder", str(path), expected)


def _lock(path: Path) -> int:
    """Raises InvalidConfig. Whoever dies gives it up."""
    lock = os.open(path / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        pid = os.pread(lock, 32, 0).decode(errors="replace") or "unknown"
        os.close(lock)
        raise InvalidConfig(
            "folder", str(path), f"a folder that nobody trains in: process {pid} does; stop it, or name another"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _write_whole(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(content)
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)
