"""The folder of a training run: its layout, its lock, its settings, and what a resumed run continues from.

    RUN/owner                  locked by the process that trains
    RUN/settings.json          settings of the run
    RUN/modules.json           folders that environments are imported from
    RUN/metrics.jsonl          a line of every step
    RUN/checkpoints/00000040/  see checkpoints.py
    RUN/samples/00000040.log   see sample_log.py
    RUN/report.html  RUN/tensorboard/

Owns these names. Never trains. Promises that one process at a time uses a folder, that a new run never overwrites
another, and that a run with checkpoints resumes only under settings that are compatible with them; without checkpoints
every setting may change.

    with open_run(path, settings, resume=True) as folder:
        checkpoint = folder.latest_checkpoint()
        recovered = recover_buffer(checkpoint, folder.samples_after(checkpoint.step))
        with folder.open_sample_log(checkpoint) as log: ...
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tangram.cancellation import run_to_completion
from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.files.atomic_directory import atomic_directory, remove_unfinished
from tangram.files.atomic_file import write_file
from tangram.files.lock import lock_file, read_holder
from tangram.rl.config.resume_differences import changes, require_allowed_changes
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
from tangram.rl.runs.sample_log import SampleLog, SampleLogs, merge_after, prune_logs

OWNER, SETTINGS, METRICS, CHECKPOINTS, SAMPLES = "owner", "settings.json", "metrics.jsonl", "checkpoints", "samples"
MODULES, REPORT, TENSORBOARD = "modules.json", "report.html", "tensorboard"
FREE_SPACE_FACTOR = 2
"""The disk has enough room if this many checkpoints fit: the next one has more samples and a longer log."""


def open_run(path: Path | str, settings: TrainSettings, *, resume: bool, modules: tuple[str, ...] = ()) -> RunFolder:
    """Opens the folder of a new run, or with `resume` that of an existing one. `modules`: see `read_modules`; if empty,
    an existing list stays. Raises InvalidConfig if the folder holds a run (or, with `resume`, none), if another process
    trains in it, or if the settings do not fit its checkpoints. Raises ManagerError if it cannot be written."""
    path = Path(path).absolute()
    if resume and not _has_run(path):
        raise InvalidConfig("folder", str(path), "the folder of a run, to resume it: there is none; start without it")
    _require_not_foreign(path)
    with ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            stack.callback(os.close, lock)
            if not resume and _has_run(path):
                raise InvalidConfig(
                    "folder",
                    str(path),
                    "a new folder: this one holds a run; resume it with --resume, or choose another folder",
                )
            changed = _setting_changes(path, settings) if resume else ()
            if changed or not resume:
                write_file(path / SETTINGS, msgspec.json.format(msgspec.json.encode(settings), indent=2), durable=True)
            if modules:
                write_file(path / MODULES, msgspec.json.encode(modules), durable=True)
            for folder in (path / CHECKPOINTS, path / SAMPLES):
                folder.mkdir(exist_ok=True)
            remove_unfinished(path / CHECKPOINTS)
        except OSError as error:
            raise ManagerError(f"the run cannot be written to {path}: {error.strerror}", retry=False) from error
        stack.pop_all()
    return RunFolder(path, settings, lock, changed)


def read_settings(path: Path | str) -> TrainSettings:
    """The settings of a run. Raises InvalidConfig."""
    file = Path(path) / SETTINGS
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrainSettings)
    except OSError as error:
        raise InvalidConfig("folder", str(path), f"the folder of a run, with {SETTINGS} ({error.strerror})") from error
    except (msgspec.MsgspecError, InvalidInput) as error:
        raise InvalidConfig(str(file), "", f"the settings of a run ({error})") from error


def read_modules(path: Path | str) -> tuple[str, ...]:
    """Folders that the environments of a run are imported from, in addition to Python's path. Raises InvalidConfig."""
    file = Path(path) / MODULES
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[str, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidConfig(str(file), "", f"a list of folders ({error})") from error


class RunFolder:
    """Created by `open_run`. Use it as a context manager."""

    def __init__(self, path: Path, settings: TrainSettings, lock: int, changed: tuple[str, ...]) -> None:
        self.settings = settings
        self.setting_changes = changed
        """Describes each setting that differs from the previous start of the run."""
        self.metrics = path / METRICS
        self.checkpoints = path / CHECKPOINTS
        self.samples = path / SAMPLES
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

    def has_checkpoint(self, step: int) -> bool:
        """Whether there is a checkpoint of this step. It is not written again: its log has what came after it."""
        return (self.checkpoints / folder_name(step)).exists()

    @asynccontextmanager
    async def checkpoint(self, step: int) -> AsyncIterator[Path]:
        """An unfinished folder for the files of the trainer and `write_state`. At the end of the block it becomes the
        checkpoint, durable, and older ones are deleted with their logs; an error in the block removes it. Raises
        ManagerError."""
        making = atomic_directory(self.checkpoints / folder_name(step))
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
            await run_to_completion(asyncio.to_thread(making.__exit__, type(raised), raised, raised.__traceback__))
            raise
        # A thread keeps the event loop running. Shielded from cancellation: it must not be left half done.
        await run_to_completion(asyncio.to_thread(finish))

    def make_room(self) -> bool:
        """Deletes the oldest checkpoint if the disk has no room for another one and would have it without those older
        than the newest. Returns whether it did. The newest complete checkpoint always stays."""
        try:
            newest, steps = self.latest_checkpoint(), steps_in(self.checkpoints)
            if newest is None:
                return False
            older = [step for step in steps if step < newest.step]
            free, needed = shutil.disk_usage(self.checkpoints).free, self._checkpoint_bytes(newest.step)
            if (
                not older
                or free >= FREE_SPACE_FACTOR * needed
                or free + sum(map(self._checkpoint_bytes, older)) < needed
            ):
                return False
            self._prune(len(steps) - 1)
        except (ManagerError, OSError):
            return False
        return True

    def _checkpoint_bytes(self, step: int) -> int:
        return sum(each.stat().st_size for each in (self.checkpoints / folder_name(step)).rglob("*"))

    def _prune(self, keep: int) -> None:
        oldest = checkpoints.prune(self.checkpoints, keep)
        assert oldest is not None, "the one that was just made"
        prune_logs(self.samples, oldest)

    # ---- resuming ----

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint, with a warning for each damaged one that was skipped. Reads and checks all
        its files. Raises NoCheckpoint if all are damaged, and ManagerError."""
        warnings: list[str] = []
        for step in reversed(steps_in(self.checkpoints)):
            try:
                checkpoint = read_checkpoint(self.checkpoints / folder_name(step))
                return msgspec.structs.replace(checkpoint, warnings=tuple(warnings))
            except DamagedCheckpoint as error:
                warnings.append(str(error))
        if warnings:
            raise NoCheckpoint(warnings)
        return None

    def samples_after(self, step: int) -> SampleLogs:
        """The groups that entered the buffer, or were lost, since the state of this checkpoint was taken."""
        return SampleLogs(self.samples, step)

    def open_sample_log(self, checkpoint: Checkpoint | None) -> SampleLog:
        """The log of a run that continues from this checkpoint, or starts. Later checkpoints belong to abandoned
        weights and are set aside; later logs are merged into the log of this step. Without a checkpoint, all logs are
        deleted. Raises ManagerError."""
        for later in steps_in(self.checkpoints):
            if checkpoint is None or later > checkpoint.step:
                checkpoints.set_aside(self.checkpoints / folder_name(later))
        if checkpoint is None:
            prune_logs(self.samples)
            return SampleLog(self.samples, 0)
        merge_after(self.samples, checkpoint.step)
        return SampleLog(self.samples, checkpoint.step)


def _setting_changes(path: Path, settings: TrainSettings) -> tuple[str, ...]:
    """Describes what differs from the settings of the run. Raises InvalidConfig for changes that its checkpoints do not
    allow."""
    before = read_settings(path)
    if steps_in(path / CHECKPOINTS):
        return require_allowed_changes(before, settings)
    return tuple(map(str, changes(before, settings)))


def _has_run(path: Path) -> bool:
    return any((path / name).exists() for name in (SETTINGS, METRICS))


def _require_not_foreign(path: Path) -> None:
    """Raises InvalidConfig if the folder has unrelated files under the names of a run, which would be pruned."""
    foreign = [name for name in (CHECKPOINTS, SAMPLES) if (path / name).exists()]
    if foreign and not _has_run(path):
        expected = (
            f"a folder without {' and '.join(foreign)} of others: there is no {SETTINGS} beside them, so they do "
            "not belong to a run; move them away, or choose another folder"
        )
        raise InvalidConfig("folder", str(path), expected)


def _lock(path: Path) -> int:
    """Raises InvalidConfig. The kernel releases the lock when the process ends."""
    try:
        return lock_file(path / OWNER, mode=0o644, holder=str(os.getpid()))
    except BlockingIOError:
        pid = read_holder(path / OWNER) or "unknown"
        raise InvalidConfig(
            "folder",
            str(path),
            f"a folder that no other process trains in: process {pid} does; stop it, or choose another folder",
        ) from None
