"""What the folder of a run proves, after any kills."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rl.processes import DEADLINE_S, children

from tangram.rl.buffer.records import group_number
from tangram.rl.inference.weights_folder import PREFIX, SHARED_MEMORY
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Trained
from tangram.rl.runs.metrics_log import read_metrics
from tangram.rl.runs.sample_log import GroupPut, SampleLogs
from tangram.rl.trajectories.trajectory import Group


def lines_of(folder: Path, kind: type | None = None) -> list[Any]:
    """Those of the lineage that survived."""
    metrics_lines: list[AnyMetricsLine] = read_metrics(folder / "metrics.jsonl")
    return [line for line in metrics_lines if kind is None or isinstance(line, kind)]


def samples_of(folder: Path) -> dict[int, Group]:
    logged = [entry.group for entry in SampleLogs(folder / "samples", 0) if isinstance(entry, GroupPut)]
    by_number = {group_number(group.id): group for group in logged}
    for group in logged:
        assert by_number[group_number(group.id)].members == group.members, "a number stands for one group"
    return by_number


def assert_sound(folder: Path, *, steps: int, batch: int, age_max: int | None) -> None:
    """`age_max`: None, if there is no bound."""
    trained, samples = lines_of(folder, Trained), samples_of(folder)
    assert [line.step for line in trained] == list(range(1, steps + 1)), "one step after the other"
    numbers = [number for line in trained for number in line.groups]
    assert len(numbers) == len(set(numbers)) == steps * batch, "no group twice, and none left out"
    for line in trained:
        version = line.step - 1
        for number in line.groups:
            for member in samples[number].members:
                assert member.reward is not None
                assert max(member.versions) <= version, "of weights that the step came from"
                assert age_max is None or version - member.versions[0] <= age_max


def published() -> set[Path]:
    return set(SHARED_MEMORY.glob(f"{PREFIX}*"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process, descriptor or published weights more than before. Others may publish meanwhile: theirs are held."""
    before = published(), sorted(os.listdir("/proc/self/fd")), children()
    yield
    until = time.monotonic() + DEADLINE_S
    while owned := {each for each in published() - before[0] if _is_unlocked(each)}:
        assert time.monotonic() < until, f"left: {owned}"
        time.sleep(0.05)
    assert (sorted(os.listdir("/proc/self/fd")), children()) == before[1:]


def _is_unlocked(folder: Path) -> bool:
    """A run that goes on locks its folder."""
    import fcntl

    try:
        lock = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
