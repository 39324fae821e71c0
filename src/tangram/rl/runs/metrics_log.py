"""The metrics log of a training run: an append-only log, `metrics.jsonl`, and event files for TensorBoard.

Owns both, and decides which lines of a resumed run count. Never computes a metric that is not in a line. Promises that
a line is in `metrics.jsonl` when `append` returns, that it is read back as it was, NaN and infinity included, and that
a failure of TensorBoard never stops a run: its files end, and `tensorboard_error` has the reason.

    with MetricsLog(folder, resume=False) as log:
        log.append(RunBegan(...))
    lines = read_metrics(folder / METRICS)

TensorBoard shows, by step:

    reward/TASK eval/TASK warm/TASK       mean rewards: of the batch, of held-out seeds, of the warm start
    loss/NAME                             metrics of the trainer, see METRIC_DESCRIPTIONS in rl/train/trainer.py
    staleness/mean max                    of the trajectories of the batch
    time/NAME wait/STAGE                  seconds of the step, and of its waiting
    throughput/trajectories_per_s tokens_per_s trainer_tokens_per_s
    groups/buffered in_flight started short dropped
    act/POOL act_p99/POOL utilisation/POOL engine/NAME
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, InvalidTrace, ManagerError, TangramError
from tangram.files.append_log import AppendLog, LineReader, complete_lines_bytes
from tangram.reports.printable import escape_unprintable
from tangram.rl.runs.json_values import NUMBER_KEY, from_json_values, to_json_values
from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    Evaluated,
    Noticed,
    RunBegan,
    RunEnded,
    Trained,
    WarmStartChecked,
)
from tangram.rl.runs.run_folder import METRICS, TENSORBOARD

THROUGHPUT_METRICS = {"trajectories", "tokens", "tokens_per_s"}
"""Metrics of the trainer that are shown as throughput, not as loss."""
TIMES = ("step_s", "wait_s", "train_s", "push_s", "pull_s", "exposed_s", "evaluation_s")
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyMetricsLine] = msgspec.json.Decoder(AnyMetricsLine)


# ---- writing --------------------------------------------------------------------------------------------------------


class MetricsLog:
    """The writer. Use it as a context manager."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        """`resume` appends to the existing log and cuts off an incomplete last line; otherwise the log must be new.
        Raises InvalidConfig."""
        self.path = folder / METRICS
        self._log = _open(self.path, resume=resume)
        self._tensorboard = _TensorBoardWriter(folder / TENSORBOARD)

    @property
    def tensorboard_error(self) -> str:
        """Why TensorBoard has no events, or no more; empty if it works."""
        return self._tensorboard.error

    def append(self, line: AnyMetricsLine) -> None:
        """Raises ManagerError if the line cannot be written; all lines before it are complete."""
        self._log.append(_encode(line))
        if self._tensorboard.append(line):
            self._show_warm_start()

    def _show_warm_start(self) -> None:
        """Write the warm start again: TensorBoard drops it together with the steps of the same numbers."""
        with contextlib.suppress(TangramError):
            for line in read_metrics(self.path):
                if isinstance(line, WarmStartChecked):
                    self._tensorboard.append(line)

    def close(self) -> None:
        self._tensorboard.close()
        self._log.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _open(path: Path, *, resume: bool) -> AppendLog:
    try:
        log = AppendLog(path, recover=complete_lines_bytes if resume else None)
    except OSError as error:
        raise InvalidConfig("metrics", str(path), f"a file that can be written ({error.strerror})") from error
    if log.size and not resume:
        log.close()
        raise InvalidConfig("metrics", str(path), "a new file: this one holds a run; resume it, or choose another")
    return log


def _encode(line: AnyMetricsLine) -> bytes:
    return _encoder.encode(to_json_values(msgspec.to_builtins(line), escape_surrogates=True)) + b"\n"


# ---- reading --------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[AnyMetricsLine]:
    """The lines that count, in their order; the run may still be going on. Steps, evaluations and warm starts of
    abandoned weights do not count: a run that resumed from step s drops what came after it. Raises InvalidConfig if the
    file cannot be read, InvalidTrace with the line for malformed content."""
    surviving: list[AnyMetricsLine] = []
    for line in _lines(path):
        if isinstance(line, RunBegan):
            surviving = _surviving_lines(surviving, line.step, warm=bool(line.resumed_from))
        elif isinstance(line, Noticed) and line.step is not None:
            surviving = _surviving_lines(surviving, line.step)
        elif isinstance(line, Trained):  # also if a killed process did not log that it went back
            surviving = _surviving_lines(surviving, line.step - 1) if _last_step(surviving) >= line.step else surviving
        surviving.append(line)
    return surviving


class LastLogged(NamedTuple):
    """The end of the log up to the weights of a checkpoint."""

    at_s: float
    """Time of the last line that counts; 0 if there is none."""
    last_evaluated: int
    """The last version that was evaluated; -1 if none was."""


def last_logged(path: Path, step: int) -> LastLogged:
    """For a run that resumes from this step. An unreadable log counts as empty; `read_metrics` raises its error."""
    try:
        lines = [line for line in read_metrics(path) if isinstance(line, Trained | Evaluated | RunEnded)]
    except InvalidInput:
        lines = []
    lines = [line for line in lines if line.step <= step]
    return LastLogged(
        at_s=max((line.at_s for line in lines), default=0.0),
        last_evaluated=max((line.step for line in lines if isinstance(line, Evaluated)), default=-1),
    )


def _surviving_lines(lines: list[AnyMetricsLine], step: int, *, warm: bool = True) -> list[AnyMetricsLine]:
    """The lines that belong to weights of this step. `warm`: whether these weights went through the warm start."""
    return [
        line
        for line in lines
        if not (isinstance(line, Trained | Evaluated) and line.step > step)
        and (warm or not isinstance(line, WarmStartChecked))
    ]


def _last_step(lines: list[AnyMetricsLine]) -> int:
    return next((line.step for line in reversed(lines) if isinstance(line, Trained)), 0)


def _lines(path: Path) -> Iterator[AnyMetricsLine]:
    try:
        with path.open("rb") as file:
            lines = LineReader(file, path)
            for text in lines:
                if text.strip():
                    yield _decode(text, path, lines.number)
    except OSError as error:
        raise InvalidConfig("metrics", str(path), f"a file that can be read ({error.strerror})") from error


def _decode(text: bytes, path: Path, number: int) -> AnyMetricsLine:
    try:
        if NUMBER_KEY.encode() not in text:
            return _decoder.decode(text)
        line: AnyMetricsLine = msgspec.convert(from_json_values(msgspec.json.decode(text)), AnyMetricsLine)
        return line
    except DECODE_ERRORS as error:
        raise InvalidTrace(
            f"{path}:{number}", escape_unprintable(repr(text[:80])), f"a line of metrics ({error})"
        ) from None


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


def scalars(line: AnyMetricsLine) -> dict[str, float]:
    """The TensorBoard values of a line, by tag; NaN and infinity included."""
    match line:
        case Trained():
            return _step_scalars(line)
        case Evaluated():
            return {f"eval/{task}": score for task, score in line.scores.items()}
        case WarmStartChecked():
            return {"warm/loss": line.loss, **{f"warm/{task}": score for task, score in line.scores.items()}}
    return {}


def _step_scalars(line: Trained) -> dict[str, float]:
    counts, step_s = line.staleness, line.step_s
    total = sum(counts)
    values = {f"reward/{task}": step.reward for task, step in line.tasks.items()}
    values |= {f"loss/{name}": value for name, value in line.metrics.items() if name not in THROUGHPUT_METRICS}
    if total:
        values["staleness/mean"] = sum(age * count for age, count in enumerate(counts)) / total
        values["staleness/max"] = max(age for age, count in enumerate(counts) if count)
    values |= {f"time/{name}": getattr(line, name) for name in TIMES}
    values |= {f"wait/{stage}": seconds for stage, seconds in line.waited_for.items()}
    if step_s > 0:
        values["throughput/trajectories_per_s"] = line.metrics.get("trajectories", total) / step_s
        values["throughput/tokens_per_s"] = line.metrics.get("tokens", 0.0) / step_s
    if "tokens_per_s" in line.metrics:
        values["throughput/trainer_tokens_per_s"] = line.metrics["tokens_per_s"]
    values |= {f"groups/{name}": getattr(line, name) for name in ("buffered", "in_flight", "started", "short")}
    values["groups/dropped"] = sum(line.dropped.values())
    for pool in line.pools:
        if pool.actions:
            values |= {f"act/{pool.name}": pool.act_mean_s, f"act_p99/{pool.name}": pool.act_p99_s}
        if pool.total > 0 and step_s > 0:
            values[f"utilisation/{pool.name}"] = pool.held_unit_s / (pool.total * step_s)
    return values | {f"engine/{engine.name}": engine.busy_share for engine in line.engines}


def _record(event: bytes, checksum: Callable[[bytes], int]) -> bytes:
    """A record of a TensorBoard file: length and content, each followed by its checksum."""
    length = struct.pack("<Q", len(event))
    return b"".join(part + struct.pack("<I", checksum(part)) for part in (length, event))


@contextmanager
def _without_package_init(package: str) -> Iterator[None]:
    """Imports of modules of the package do not execute its `__init__`, which for tensorboardX imports PyTorch: more
    than a second, and 200 MB in a process that has no other use for it. Raises ImportError."""
    if package in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"No module named {package!r}", name=package)
    sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[package]  # a later import executes it


class _TensorBoardWriter:
    """Writes event files for TensorBoard, each event at once, so a killed process leaves no gap. An error ends the file
    and is kept as text.

    Does not use tensorboardX's SummaryWriter: its thread dies on a full disk, and then every caller blocks forever. Nor
    its RecordWriter, which buffers until it can wait for the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.error = ""
        self._events: AppendLog | None = None
        self._step = 0
        """The last step."""
        try:
            with _without_package_init("tensorboardX"):
                from tensorboardX.proto.event_pb2 import Event, SessionLog
                from tensorboardX.proto.summary_pb2 import Summary
                from tensorboardX.record_writer import masked_crc32c

            self._event, self._session_log, self._summary = Event, SessionLog, Summary
            self._checksum: Callable[[bytes], int] = masked_crc32c
            # TensorBoard reads all files whose names contain `tfevents`, in the order of their names.
            name = f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
            self._events = AppendLog(folder / name)
        except ImportError as error:
            self.error = (
                f"no log for TensorBoard: {error.name} is not installed (pip install 'arl-tangram[rl]' does it)"
            )
        except OSError as error:
            self.error = f"no log for TensorBoard: {folder} cannot be written ({error.strerror})"
        else:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def append(self, line: AnyMetricsLine) -> bool:
        """Returns whether the line makes training go back, so that TensorBoard drops what comes after that step."""
        if self._events is None:
            return False
        Event, SessionLog, Summary = self._event, self._session_log, self._summary
        shown = scalars(line)
        event = None
        if shown:
            assert isinstance(line, Trained | Evaluated | WarmStartChecked)
            values = [Summary.Value(tag=escape_unprintable(tag), simple_value=value) for tag, value in shown.items()]
            event = Event(wall_time=time.time(), step=line.step, summary=Summary(value=values))
        back = self._rollback_step(line)
        if back is not None:
            self._write(Event(wall_time=time.time(), step=back + 1, session_log=SessionLog(status=SessionLog.START)))
        if event is not None:
            self._write(event)
        return back is not None

    def _rollback_step(self, line: AnyMetricsLine) -> int | None:
        """The step that training continues from, if the line abandons later ones."""
        back = None
        if isinstance(line, RunBegan | Noticed):
            back = line.step
        elif isinstance(line, Trained) and line.step <= self._step:
            back = line.step - 1
        if back is not None:
            self._step = back
        if isinstance(line, Trained):
            self._step = line.step
        return back

    def _write(self, event: Any) -> None:
        if self._events is None:  # disabled after an error
            return
        try:
            self._events.append(_record(event.SerializeToString(), self._checksum))
        except ManagerError as error:
            self.error = f"the log for TensorBoard ends early: {error}"
            self.close()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
