"""A process pool with progress reports: many calls in worker processes, which always end with the block.

Owns the worker processes. Promises results in the order of the tasks, however many workers there are; that the error of
a task is raised here with its own type; and that no worker outlives the block, whether it ends normally, by an error or
by Ctrl-C.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from tangram.errors import ManagerError

Progress = Callable[[float, int], None]
"""Called with the work done, in tasks and fractions of running ones, and the number of tasks."""

PROGRESS_EVERY_S = 0.1
"""Pause between two progress reports of a worker: ten a second look smooth."""
TERMINATE_S_MAX = 5.0
"""Time limit for the end of a terminated worker; then it is killed."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessPool:
    """A context of `count` processes (None: one per core). With one, everything runs in this process."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or available_cores()
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._workers:
            process.terminate()
            connection.close()
        for process, _connection in self._workers:
            process.join(TERMINATE_S_MAX)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []

    def map(
        self, call: Callable[[Any, Progress], Any], tasks: list[Any], progress: Progress | None = None
    ) -> list[Any]:
        """`call(task, report)` for every task; `report(done, total)` reports its progress."""
        report_progress = progress or (lambda done, total: None)
        if min(self.count, len(tasks)) <= 1:
            return _run_serial(call, tasks, report_progress)
        self._start(min(self.count, len(tasks)))
        return self._run_parallel(call, tasks, report_progress)

    def run(self, call: Callable[[Any, Progress], Any], task: Any) -> Any:
        """`call(task, report)` in a worker process, even if there is only one."""
        self._start(1)
        return self._run_parallel(call, [task], lambda done, total: None)[0]

    def _start(self, count: int) -> None:
        # Spawned, not forked, because the caller may have threads, such as that of a progress bar. With SIGINT blocked,
        # because Ctrl-C reaches the whole group, and the parent ends the workers.
        context = multiprocessing.get_context("spawn")
        # Python's own helper process comes first: starting it unblocks SIGINT.
        resource_tracker.ensure_running()
        with _interrupt_blocked():
            while len(self._workers) < count:
                parent_end, worker_end = context.Pipe()
                process = context.Process(target=_worker_loop, args=(worker_end,), daemon=True)
                process.start()
                worker_end.close()
                self._workers.append((process, parent_end))

    def _run_parallel(
        self, call: Callable[[Any, Progress], Any], tasks: list[Any], report_progress: Progress
    ) -> list[Any]:
        results: list[Any] = [None] * len(tasks)
        shares = [0.0] * len(tasks)
        waiting = iter(range(len(tasks)))
        task_by_connection: dict[Connection, int] = {}
        idle = [connection for _, connection in self._workers]
        while True:
            for connection, task in zip(idle, waiting, strict=False):
                connection.send((call, tasks[task]))
                task_by_connection[connection] = task
            idle = []
            if not task_by_connection:
                return results
            for ready in wait(list(task_by_connection)):
                assert isinstance(ready, Connection)
                task = task_by_connection[ready]
                kind, value = _receive_reply(ready)
                if kind == "progress":
                    shares[task] = value
                elif kind == "failed":
                    raise _deserialize_error(*value)
                else:
                    results[task], shares[task] = value, 1.0
                    del task_by_connection[ready]
                    idle.append(ready)
            report_progress(sum(shares), len(tasks))


def _run_serial(call: Callable[[Any, Progress], Any], tasks: list[Any], report_progress: Progress) -> list[Any]:
    results: list[Any] = []

    def report(done: float, total: int) -> None:
        report_progress(len(results) + done / max(total, 1), len(tasks))

    for task in tasks:
        results.append(call(task, report))
        report_progress(len(results), len(tasks))
    return results


def _receive_reply(connection: Connection) -> tuple[str, Any]:
    try:
        reply: tuple[str, Any] = connection.recv()
        return reply
    except (EOFError, ConnectionResetError):
        raise ManagerError(
            "a worker process was killed, possibly because memory ran out; try again with fewer --workers"
        ) from None


@contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Defer SIGINT to the end of the block.

    Workers inherit the mask. For this process the mask is not enough: another thread, such as one of a numerics
    library, may take the signal, and Python then raises it in the main thread. So the handler is replaced as well.
    """
    received: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number)) if in_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


# ---- inside a worker ------------------------------------------------------------------------------------------------


def _worker_loop(connection: Connection) -> None:
    """Runs until the parent closes its end, or has ended."""
    try:
        while True:
            call, task = connection.recv()
            connection.send(_run_task(connection, call, task))
    except (EOFError, OSError):
        return


def _run_task(connection: Connection, call: Callable[[Any, Progress], Any], task: Any) -> tuple[str, Any]:
    last = time.monotonic()

    def report(done: float, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_EVERY_S:
            last = now
            connection.send(("progress", done / max(total, 1)))

    try:
        return "done", call(task, report)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        return "failed", _serialize_error(error)
    except Exception as error:
        return "failed", _serialize_error(error)


def _serialize_error(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any], str]:
    """Pickle does not preserve errors with constructors of their own."""
    return type(error), error.args, dict(error.__dict__), traceback.format_exc()


def _deserialize_error(
    kind: type[Exception], arguments: tuple[Any, ...], fields: dict[str, Any], where: str
) -> Exception:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    error.add_note(where)
    return error
