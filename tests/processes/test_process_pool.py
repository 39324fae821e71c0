"""The process pool: results in order, errors as they were raised, and no process that outlives its block."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from tests.processes.process_pool_tasks import ERRORS, die, oversell, raise_error, square

from tangram.errors import InvariantError, ManagerError
from tangram.processes.process_pool import ProcessPool


def test_results_come_in_the_order_of_the_tasks_and_workers_serve_again() -> None:
    before = set(multiprocessing.active_children())
    with ProcessPool(2) as workers:
        assert workers.map(square, list(range(20))) == [k * k for k in range(20)]
        assert len(set(multiprocessing.active_children()) - before) == 2
        assert workers.map(square, [7, 8, 9]) == [49, 64, 81]
    assert set(multiprocessing.active_children()) <= before, "no worker outlives the block"


def test_an_error_in_a_worker_is_raised_here_as_what_it_was() -> None:
    with ProcessPool(2) as workers, pytest.raises(InvariantError, match="oversold") as caught:
        workers.map(oversell, [1, 2])
    assert caught.value.story == ["submitted", "started"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_survives_the_way_from_a_worker(error: Exception) -> None:
    with ProcessPool(2) as workers, pytest.raises(type(error)) as caught:
        workers.map(raise_error, [ERRORS.index(error)] * 2)
    arrived = caught.value
    assert (type(arrived), str(arrived), arrived.__dict__.keys() - {"__notes__"}) == (
        type(error),
        str(error),
        error.__dict__.keys(),
    )


def test_a_worker_that_dies_is_an_error_and_no_hang() -> None:
    with ProcessPool(2) as workers, pytest.raises(ManagerError, match="worker process was killed"):
        workers.map(die, [1, 2, 3])


def test_a_single_task_can_have_a_process_of_its_own() -> None:
    with ProcessPool(1) as worker:
        assert worker.run(process_id, None) != os.getpid()
        assert worker.map(process_id, [None]) == [os.getpid()]


def process_id(task: None, report: object) -> int:
    return os.getpid()
