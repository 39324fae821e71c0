"""The metrics of a training run: every line as it happens, in `metrics.jsonl` and for TensorBoard.

Owns both files, and which lines of a run count. Never computes a metric that a line does not say. Promises that a line
is in `metrics.jsonl` whole or not at all, as soon as `tell` returns, also when the disk is full; that what is read
equals what was told, numbers that are not finite included; and that whatever is wrong with TensorBoard never stops a
run: it is left out from then on, and `left_out` says why.

    with MetricsLog(folder, resume=False) as log:
        log.tell(Began(...))
    lines = read_metrics(folder / METRICS_FILE)

TensorBoard shows, by step:

    reward/TASK eval/TASK warm/TASK       mean rewards: of the batch, of held-out seeds, of the warm start
    loss/NAME                             what the trainer tells, see training_records.METRICS
    staleness/mean max                    of the trajectories of the batch
    time/NAME wait/STAGE                  seconds of the step, and of its waiting
    throughput/trajectories_per_s tokens_per_s trainer_tokens_per_s
    groups/buffered in_flight started short dropped
    act/POOL act_p99/POOL utilisation/POOL engine/NAME
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, InvalidTrace, ManagerError, TangramError
from tangram.reports.printable import plain
from tangram.rl.train.records import AnyLine, Began, Evaluated, Noticed, Over, Trained, Warmed

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
"""In the folder of a run."""
NUMBER = "$number"
"""JSON has no nan and no infinity: `{"$number": "nan"}` is."""
NOT_FINITE = ("nan", "inf", "-inf")
TAIL_BYTES = 64 << 10
COUNTED = {"trajectories", "tokens", "tokens_per_s"}
"""Of what a trainer tells, what is throughput."""
TIMES = ("step_s", "wait_s", "train_s", "push_s", "pull_s", "exposed_s", "evaluation_s")
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


# ---- writing --------------------------------------------------------------------------------------------------------


class MetricsLog:
    """Use it as a context manager. What it is told is written before `tell` returns."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        """`resume`: go on behind what is there; a last line without its end, as a killed process leaves it, is cut off.
        Otherwise there must be nothing yet. Raises InvalidConfig."""
        self.path = folder / METRICS_FILE
        self._file, self._size = _opened(self.path, resume)
        self._board = _Board(folder / TENSORBOARD)

    @property
    def left_out(self) -> str:
        """Why there is nothing, or nothing more, for TensorBoard; empty if there is."""
        return self._board.left_out

    def tell(self, line: AnyLine) -> None:
        """Raises ManagerError if it cannot be written; then it is not in the file, and all others are."""
        self._write(_encoded(line))
        if self._board.tell(line):
            self._show_warm_start()

    def _show_warm_start(self) -> None:
        """Once more: TensorBoard forgets it with the steps of the same numbers."""
        with contextlib.suppress(TangramError):
            for line in read_metrics(self.path):
                if isinstance(line, Warmed):
                    self._board.tell(line)

    def close(self) -> None:
        self._board.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        if self._file < 0:
            raise ManagerError(f"{self.path}: the log is closed", retry=False)
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except BaseException as error:
            self._take_back()
            if not isinstance(error, OSError):
                raise
            raise ManagerError(f"{self.path} cannot be written ({error.strerror}); what is in it is whole") from error
        self._size += len(line)

    def _take_back(self) -> None:
        """What of a line is written. If even that fails, there is a last line without its end."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            os.close(self._file)  # what followed would be part of that line
            self._file = -1


def _opened(path: Path, resume: bool) -> tuple[int, int]:
    """The file to append to, and its size."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidConfig("metrics", str(path), f"a file that can be written ({error.strerror})") from error
    try:
        size = os.fstat(file).st_size
        if size and not resume:
            raise InvalidConfig("metrics", str(path), "a new file: this one holds a run; resume it, or choose another")
        whole = _whole_bytes(file, size)
        if whole < size:
            os.ftruncate(file, whole)
        return file, whole
    except BaseException:
        os.close(file)
        raise


def _whole_bytes(file: int, size: int) -> int:
    """Up to the end of the last whole line."""
    end = size
    while end:
        start = max(0, end - TAIL_BYTES)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _encoded(line: AnyLine) -> bytes:
    return _encoder.encode(_marked(msgspec.to_builtins(line))) + b"\n"


def _marked(value: Any) -> Any:
    """As JSON can say it. Text is for readers: half a character in it is shown, not kept."""
    match value:
        case dict():
            return {_marked(key): _marked(each) for key, each in value.items()}
        case list() | tuple():
            return [_marked(each) for each in value]
        case float() if not math.isfinite(value):
            return {NUMBER: repr(value)}
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
    return value


# ---- reading --------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[AnyLine]:
    """The lines of a run that count, in their order; it may still be going on. What was trained, looked at or warmed up
    in a lineage of weights that was given up does not count: a run that went on from step s forgets what came after it.
    Raises InvalidConfig if the file cannot be read, InvalidTrace with the line for what is malformed."""
    found: list[AnyLine] = []
    for line in _lines(path):
        if isinstance(line, Began):
            found = _surviving(found, line.step, warm=bool(line.resumed_from))
        elif isinstance(line, Noticed) and line.step is not None:
            found = _surviving(found, line.step)
        elif isinstance(line, Trained):  # also where a killed process could not say any more that it went back
            found = _surviving(found, line.step - 1) if _last_step(found) >= line.step else found
        found.append(line)
    return found


class Left(NamedTuple):
    """How the log of a run was left, as far as the weights of a checkpoint go."""

    at_s: float
    """Of the last line that counts; 0 if there is none."""
    looked: int
    """The last version that was evaluated; -1: none was."""


def left_at(path: Path, step: int) -> Left:
    """Of a run that goes on from this step. A log that cannot be read tells nothing: whoever wants it is told so."""
    try:
        lines = [line for line in read_metrics(path) if isinstance(line, Trained | Evaluated | Over)]
    except InvalidInput:
        lines = []
    lines = [line for line in lines if line.step <= step]
    return Left(
        at_s=max((line.at_s for line in lines), default=0.0),
        looked=max((line.step for line in lines if isinstance(line, Evaluated)), default=-1),
    )


def _surviving(lines: list[AnyLine], step: int, *, warm: bool = True) -> list[AnyLine]:
    """Of those before, what belongs to weights of this step. `warm`: whether these went through the warm start."""
    return [
        line
        for line in lines
        if not (isinstance(line, Trained | Evaluated) and line.step > step) and (warm or not isinstance(line, Warmed))
    ]


def _last_step(lines: list[AnyLine]) -> int:
    return next((line.step for line in reversed(lines) if isinstance(line, Trained)), 0)


def _lines(path: Path) -> Iterator[AnyLine]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return  # is being written, or was when its process was killed
                if text.strip():
                    yield _decoded(text, path, number)
    except OSError as error:
        raise InvalidConfig("metrics", str(path), f"a file that can be read ({error.strerror})") from error


def _decoded(text: bytes, path: Path, number: int) -> AnyLine:
    try:
        if NUMBER.encode() not in text:
            return _decoder.decode(text)
        found: AnyLine = msgspec.convert(_unmarked(msgspec.json.decode(text)), AnyLine)
        return found
    except MALFORMED as error:
        raise InvalidTrace(f"{path}:{number}", plain(repr(text[:80])), f"a line of metrics ({error})") from None


def _unmarked(value: Any) -> Any:
    match value:
        case {"$number": str(number)} if len(value) == 1 and number in NOT_FINITE:
            return float(number)
        case dict():
            return {key: _unmarked(each) for key, each in value.items()}
        case list():
            return [_unmarked(each) for each in value]
    return value


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


def scalars(line: AnyLine) -> dict[str, float]:
    """What TensorBoard shows of a line, by tag; numbers that are not finite among them."""
    match line:
        case Trained():
            return _of_step(line)
        case Evaluated():
            return {f"eval/{task}": score for task, score in line.scores.items()}
        case Warmed():
            return {"warm/loss": line.loss, **{f"warm/{task}": score for task, score in line.scores.items()}}
    return {}


def _of_step(line: Trained) -> dict[str, float]:
    counts, step_s = line.staleness, line.step_s
    total = sum(counts)
    found = {f"reward/{task}": step.reward for task, step in line.tasks.items()}
    found |= {f"loss/{name}": value for name, value in line.metrics.items() if name not in COUNTED}
    if total:
        found["staleness/mean"] = sum(age * count for age, count in enumerate(counts)) / total
        found["staleness/max"] = max(age for age, count in enumerate(counts) if count)
    found |= {f"time/{name}": getattr(line, name) for name in TIMES}
    found |= {f"wait/{stage}": seconds for stage, seconds in line.waited_for.items()}
    if step_s > 0:
        found["throughput/trajectories_per_s"] = line.metrics.get("trajectories", total) / step_s
        found["throughput/tokens_per_s"] = line.metrics.get("tokens", 0.0) / step_s
    if "tokens_per_s" in line.metrics:
        found["throughput/trainer_tokens_per_s"] = line.metrics["tokens_per_s"]
    found |= {f"groups/{name}": getattr(line, name) for name in ("buffered", "in_flight", "started", "short")}
    found["groups/dropped"] = sum(line.dropped.values())
    for pool in line.pools:
        if pool.actions:
            found |= {f"act/{pool.name}": pool.act_mean_s, f"act_p99/{pool.name}": pool.act_p99_s}
        if pool.total > 0 and step_s > 0:
            found[f"utilisation/{pool.name}"] = pool.held_unit_s / (pool.total * step_s)
    return found | {f"engine/{engine.name}": engine.busy_share for engine in line.engines}


def _record(event: bytes, checksum: Callable[[bytes], int]) -> bytes:
    """As a file of TensorBoard has it: its length and itself, each with its checksum behind it."""
    length = struct.pack("<Q", len(event))
    return b"".join(part + struct.pack("<I", checksum(part)) for part in (length, event))


class _Board:
    """The events of TensorBoard, each handed to the system at once: a process that is killed leaves no hole. What goes
    wrong is kept in words and ends it.

    tensorboardX's SummaryWriter is not used: its thread dies of a full disk, and then whoever tells it something waits
    for ever. Nor is its RecordWriter, which gives nothing away without waiting for the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.left_out = ""
        self._events: BinaryIO | None = None
        self._step = 0
        """The last one."""
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import masked_crc32c

            self._checksum: Callable[[bytes], int] = masked_crc32c
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads all files of a folder whose names hold `tfevents`, in the order of their names.
            name = f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
            self._events = (folder / name).open("wb")
        except ImportError as error:
            self.left_out = (
                f"no log for TensorBoard: {error.name} is not installed (pip install 'arl-tangram[rl]' does it)"
            )
        except OSError as error:
            self.left_out = f"no log for TensorBoard: {folder} cannot be written ({error.strerror})"
        else:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def tell(self, line: AnyLine) -> bool:
        """Whether training goes back by this line, so that TensorBoard forgets what comes after that step."""
        if self._events is None:
            return False
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        found = scalars(line)
        event = None
        if found:
            assert isinstance(line, Trained | Evaluated | Warmed)
            values = [Summary.Value(tag=plain(tag), simple_value=value) for tag, value in found.items()]
            event = Event(wall_time=time.time(), step=line.step, summary=Summary(value=values))
        back = self._goes_back(line)
        if back is not None:
            self._write(Event(wall_time=time.time(), step=back + 1, session_log=SessionLog(status=SessionLog.START)))
        if event is not None:
            self._write(event)
        return back is not None

    def _goes_back(self, line: AnyLine) -> int | None:
        """The step from which training goes on: what TensorBoard has of later ones is of a lost lineage then."""
        back = None
        if isinstance(line, Began | Noticed):
            back = line.step
        elif isinstance(line, Trained) and line.step <= self._step:
            back = line.step - 1
        if back is not None:
            self._step = back
        if isinstance(line, Trained):
            self._step = line.step
        return back

    def _write(self, event: Any) -> None:
        if self._events is None:  # given up
            return
        try:
            self._events.write(_record(event.SerializeToString(), self._checksum))
            self._events.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._events is not None:
            events, self._events = self._events, None
            try:
                events.close()
            except OSError as error:
                self.left_out = f"the log for TensorBoard ends early: it cannot be written ({error.strerror})"

    def _give_up(self, error: OSError) -> None:
        self.close()
        self.left_out = f"the log for TensorBoard ends early: it cannot be written ({error.strerror})"
