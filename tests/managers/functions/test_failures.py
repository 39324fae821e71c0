"""Functions that fail, hang, leak, flood or are killed: each is reported truly and leaves nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.managers.functions import rewards
from tests.managers.functions.conftest import DEADLINE_S, Bench, below, lines, living, parent, until, wait_for
from tests.passing_time import past_limit

import tangram
from tangram.client.functions import CallResult
from tangram.core.action import Action
from tangram.core.demand import CPU, Demand, fixed
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.functions import forked_instance, host, lease
from tangram.managers.functions.forked_instance import ForkedInstance
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call

Run = Callable[..., None]


# ---- what a function does ----


def test_an_exception_comes_with_its_traceback_and_the_output(run: Run) -> None:
    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.raises)
        assert result.kind == "error" and result.error is not None
        assert (result.error.kind, result.error.message) == ("raised", "LookupError: no such answer")
        assert "program.py" not in result.error.traceback and "in raises" in result.error.traceback
        assert (result.stdout, result.stderr) == ("on its way\n", "and to errors\n")
        odd = await bench.try_call(rewards.raises_unprintable)
        assert odd.error is not None and "Unprintable" in odd.error.message
        wrong = await bench.try_call(rewards.add)
        assert wrong.error is not None and "missing 1 required" in wrong.error.message

    run(test)


def test_raising_does_not_cost_the_instance(run: Run) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            assert (await bench.try_call(rewards.raises)).kind == "error"
        assert bench.manager.statistics().started == 1

    run(test)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("huge int", "ints"),
        ("half a character", "returned a str, which cannot be serialised"),
        ("deep", "RecursionError"),
        ("large", "the maximum is 16777216"),
    ],
)
def test_a_value_that_cannot_be_serialised_is_an_error(run: Run, what: str, said: str) -> None:
    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.returns, what)
        assert result.kind == "error" and result.error is not None
        assert result.error.kind == "unserialisable" and said in result.error.message

    run(test)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("object", "result: object"),
        ("function", "result: Function"),
        ("moment", 'result["when"]: datetime'),
        ("date", "result[1]: date"),
        ("decimal", 'result["a"][1][0]: Decimal'),
        ("uuid", "result: UUID"),
        ("set", 'result["of"]: set'),
        ("key", "result (a key): datetime"),
        ("enum", "result[0]: Colour"),
        ("level", "result: Level"),
        ("record", 'result["best"]: Score'),
        ("point", "result: Point"),
        ("array", "result: ndarray"),
        ("numpy moment", "result: datetime64"),
        ("numpy span", "result: timedelta64"),
        ("complex", "result[0]: complex"),
        ("generator", "result: generator"),
    ],
)
def test_a_value_that_would_come_back_as_another_is_an_error_that_names_its_place(
    run: Run, what: str, said: str
) -> None:
    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.returns_foreign, what)
        assert result.kind == "error" and result.error is not None
        assert result.error.kind == "unserialisable"
        assert f"a value that would reach the caller as another type: {said}; return" in result.error.message

    run(test)


def test_arguments_that_cannot_be_unpickled_are_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shape_of_yesterday.py").write_text("class Shape: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shape_of_yesterday  # type: ignore[import-not-found]

    (tmp_path / "shape_of_yesterday.py").write_text("")

    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.takes, shape_of_yesterday.Shape())
        assert result.error is not None and result.error.kind == "arguments"
        assert "its arguments cannot be read" in result.reason

    run(test)
    del sys.modules["shape_of_yesterday"]


def test_memory_beyond_the_limit_is_an_error_of_the_function(run: Run) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.sums, 100) == 100
        for call in (bench.try_call(rewards.exhausts), bench.try_call(rewards.sums, 192)):
            result = await call
            assert result.error is not None and result.error.kind == "memory"
            assert "out of memory: it has used up its limit of 192 MiB" in result.reason
        # An instance that was at its limit is not used again, and the next call has all of its memory.
        assert await bench.call(rewards.sums, 100) == 100

    run(test)


@pytest.mark.parametrize("value", [bytes(60 << 20), rewards.Swells()], ids=["large", "swelling"])
def test_arguments_beyond_the_memory_are_an_error_of_the_function(run: Run, value: object) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.takes_little, bytes(5 << 20)) == 5 << 20
        result = await bench.try_call(rewards.takes_little, value)
        assert result.error is not None and result.error.kind == "memory"
        assert "out of memory: it has used up its limit of 64 MiB" in result.reason
        assert await bench.call(rewards.takes_little, bytes(5 << 20)) == 5 << 20  # the next one has all of its memory

    run(test)


@pytest.mark.parametrize(
    ("how", "probable"), [("without memory", True), ("with words", True), ("for no reason", False)]
)
def test_a_crash_for_want_of_memory_is_reported_as_one(run: Run, how: str, probable: bool) -> None:
    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.aborts, how)
        assert result.error is not None and result.error.kind == "exited"
        assert "ended by SIGABRT" in result.reason and "64 MiB" in result.reason
        assert ("has probably run out of its 64 MiB" in result.reason) is probable

    run(test)


@pytest.mark.parametrize("how", ["children", "daemons", "threads"])
def test_an_instance_with_too_many_processes_is_killed_entirely(run: Run, tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"

    async def test(bench: Bench) -> None:
        before = below(os.getpid())
        result = await bench.try_call(rewards.multiplies, str(log), how)
        assert result.error is not None and result.error.kind == "processes", result.reason
        assert "processes and threads, and may have 20" in result.reason
        assert len(below(os.getpid()) - before) == 1  # the fork server
        assert not any(living(int(pid)) for pid in lines(log))

    run(test)


def test_an_instance_with_few_processes_is_left_alone(run: Run, tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.has_few, str(tmp_path / "log")) == 10
        assert not any(living(int(pid)) for pid in lines(tmp_path / "log"))

    run(test)


def test_an_instance_that_leaks_is_replaced_before_it_fails(run: Run) -> None:
    async def test(bench: Bench) -> None:
        pids = [await bench.call(rewards.leaks, 30) for _ in range(12)]
        assert len(set(pids)) > 2 and pids[0] == pids[1]
        await until(lambda: not any(living(pid) for pid in pids[:-6]))

    run(test)


def test_children_of_a_call_end_with_it(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(bench: Bench) -> None:
        before = below(os.getpid())
        await bench.call(rewards.forks, str(log))
        assert not living(int(lines(log)[0]))
        assert len(below(os.getpid()) - before) == 2  # the fork server and the instance

    run(test)


def test_a_process_that_keeps_changing_its_session_is_killed(run: Run, tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        before = below(os.getpid())
        await bench.call(rewards.runs_away, str(tmp_path / "log"))
        assert len(below(os.getpid()) - before) == 2  # the fork server and the instance

    run(test)


def test_a_function_that_exits_is_distinguished_from_one_that_is_killed(run: Run) -> None:
    async def test(bench: Bench) -> None:
        for call, said in (
            (bench.try_call(rewards.exits, 3), "ended its own process with exit code 3"),
            (bench.try_call(rewards.exits, 0), "ended its own process with exit code 0"),
            (bench.try_call(rewards.exits, 137), "ended its own process with exit code 137"),
            (bench.try_call(rewards.crashes), "ended by SIGSEGV"),
        ):
            result = await call
            assert result.error is not None and result.error.kind == "exited"
            assert said in result.reason and result.attempts == 1

    run(test)


def test_a_flood_of_output_is_read_and_cut(run: Run) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.floods, 100) == 100
        result = await bench.try_call(rewards.floods_and_raises, 20)
        assert result.reason == "ValueError: after all that"
        assert "are not shown" in result.stdout and len(result.stdout) < 300 * 1024

    run(test)


def test_a_malformed_status_is_our_failure(run: Run) -> None:
    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.says_garbage)
        assert result.kind == "lost" and "in place of an exit code" in result.reason

    run(test)


def test_an_instance_that_closed_its_socket_is_replaced(run: Run) -> None:
    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.closes_everything, False)
        assert result.kind == "lost" and "failed: " in result.reason
        pid = await bench.call(rewards.closes_everything, True)
        await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= 3)
        assert await bench.call(rewards.closes_everything, True) != pid
        await until(lambda: not living(pid))

    run(test)


# ---- time ----


async def timed_out(bench: Bench, target: Any, log: Path) -> CallResult:
    """The result of a call that reaches its time limit once it has written to its log."""
    task = asyncio.create_task(bench.try_call(target, str(log)))
    await until(lambda: task.done() or lines(log))
    return await past_limit(bench.orchestrator, task)


def test_a_timeout_ends_the_instance_and_returns_the_output(run: Run, tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        result = await timed_out(bench, rewards.slow, tmp_path / "log")
        assert (result.kind, result.stdout) == ("timed_out", "begun\n")
        await until(lambda: bench.manager.statistics().instances == 0)

    run(test)


def test_a_hang_in_c_with_signals_blocked_is_killed_with_its_children(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.managers.functions.forked_instance.STOP_GRACE_S", 0.1)

    async def test(bench: Bench) -> None:
        before = below(os.getpid())
        result = await timed_out(bench, rewards.hangs_in_c, tmp_path / "log")
        assert result.kind == "timed_out"
        assert not living(int(lines(tmp_path / "log")[0]))
        assert len(below(os.getpid()) - before) == 1  # the fork server

    run(test)


def test_cancelled_while_it_waits_for_an_instance_it_never_runs(run: Run, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def test(bench: Bench) -> None:
        first = asyncio.create_task(bench.call(rewards.alone, str(log), str(go)))
        await until(lambda: lines(log))
        second = asyncio.create_task(bench.call(rewards.alone, str(log), str(go)))
        await until(lambda: bench.orchestrator.decider.statistics().waiting)  # type: ignore[attr-defined]
        second.cancel()
        await asyncio.wait({second})
        go.touch()
        assert second.cancelled() and await first == int(lines(log)[0]) and len(lines(log)) == 1

    run(test)


def test_cancelling_a_running_call_ends_its_instance(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(bench: Bench) -> None:
        task = asyncio.create_task(bench.call(rewards.held, str(log), str(tmp_path / "never")))
        await until(lambda: lines(log))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() and not living(int(lines(log)[0]))

    run(test)


def test_leaving_ends_what_is_under_way(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    tasks: list[asyncio.Task[Any]] = []

    async def test(bench: Bench) -> None:
        tasks.append(asyncio.create_task(bench.try_call(rewards.held, str(log), str(tmp_path / "never"))))
        await until(lambda: lines(log))

    run(test)
    assert tasks[0].result().kind == "cancelled" and not living(int(lines(log)[0]))


# ---- kills ----


def test_a_call_whose_instance_is_killed_is_retried(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.dies_once, str(log))
        assert (result.kind, result.value, result.attempts) == ("value", "at last", 2)
        assert len(set(lines(log))) == 2

    run(test)


def test_a_call_whose_instance_is_always_killed_is_lost_after_its_retries(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(bench: Bench) -> None:
        result = await bench.try_call(rewards.dies, str(log))  # retries=1
        assert result.kind == "lost" and "killed by SIGKILL during the call" in result.reason
        assert len(lines(log)) == 2

    run(test)


def test_an_idle_instance_that_was_killed_is_not_given_a_call(run: Run) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            pid, _ = await bench.call(rewards.who)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not living(pid))  # noqa: B023 - it is called here
            result = await bench.try_call(rewards.who)
            assert result.value[0] != pid and result.attempts == 1

    run(test)


def test_an_instance_that_dies_while_it_is_idle_is_dropped_at_once(run: Run) -> None:
    async def test(bench: Bench) -> None:
        pid, _ = await bench.call(rewards.who)
        assert bench.manager.statistics().idle == 1
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(bench.manager.instance_views()) == 0)
        assert bench.manager.statistics().idle == 0
        assert (await bench.call(rewards.who))[0] != pid

    run(test)


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_process_group_is_not_signalled_if_its_id_may_be_reused(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_reused: bool
) -> None:
    read, killpg, signalled = forked_instance.read_process, os.killpg, list[int]()

    def read_another(pid: int) -> Any:
        process = read(pid)
        return process and process._replace(started=process.started + 1)

    def record(group: int, number: int) -> None:
        signalled.append(group)
        killpg(group, number)

    async def test(bench: Bench) -> None:
        pid, _ = await bench.call(rewards.who)
        monkeypatch.setattr(os, "killpg", record)
        if is_reused:
            monkeypatch.setattr(forked_instance, "read_process", read_another)
        await bench.manager.end("")
        assert set(signalled) == (set() if is_reused else {pid}) and not living(pid)

    run(test)


def test_an_instance_that_cannot_be_removed_is_counted_until_a_retry_removes_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "REMOVAL_RETRY_S", 0.05)
    close, attempts = ForkedInstance.close, list[str]()

    async def fails_twice(self: ForkedInstance) -> None:
        attempts.append(self.name)
        if len(attempts) <= 2:
            raise ManagerError("a process does not end")
        await close(self)

    async def test(bench: Bench) -> None:
        reported: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        monkeypatch.setattr(ForkedInstance, "close", fails_twice)
        await bench.call(rewards.who)
        with pytest.raises(ManagerError, match="could not be removed"):
            await bench.manager.end("")
        assert len(bench.manager.instance_views()) == 1 and bench.manager.statistics().idle == 0
        await until(lambda: len(bench.manager.instance_views()) == 0)
        assert len(attempts) == 3 and len(set(attempts)) == 1 and len(reported) == 2

    run(test)


def test_a_function_outlives_the_thread_that_has_connected() -> None:
    """The kernel ends a fork server with the thread that started it: that is the thread of the event loop."""
    client = tangram.connect_sync()
    pids: list[list[int]] = []
    before = below(os.getpid())

    def in_a_thread(action: Callable[[], object]) -> None:
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()

    in_a_thread(client.__enter__)
    try:
        for _ in range(2):
            in_a_thread(lambda: pids.append(client.call(rewards.who)))
        assert pids[0] == pids[1]
    finally:
        client.__exit__(None, None, None)
    assert below(os.getpid()) - before == set()


def test_when_the_fork_server_is_killed_calls_go_on_with_another_one(run: Run, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def test(bench: Bench) -> None:
        call = asyncio.create_task(bench.try_call(rewards.held, str(log), str(go)))
        await until(lambda: lines(log))
        pid = int(lines(log)[0])
        os.kill(parent(pid), signal.SIGKILL)
        await until(lambda: len(lines(log)) == 2)
        go.touch()
        result = await call
        assert (result.kind, result.attempts) == ("value", 2)
        await until(lambda: not living(pid))

    run(test)


def test_everything_dies_when_its_owner_is_killed(tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "script.py"
    script.write_text(
        "import asyncio, sys\n"
        "from tests.managers.functions import rewards\n"
        "from tests.managers.functions.conftest import functions\n"
        "async def main():\n"
        "    async with functions() as bench:\n"
        "        await bench.call(rewards.add, 1)\n"
        "        await asyncio.gather(bench.call(rewards.hangs_in_c, sys.argv[1]), bench.call(rewards.held,"
        " sys.argv[1], sys.argv[1] + '.never'))\n"
        "rewards.hangs_in_c.timeout_s = None\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, script, log], env=os.environ | {"PYTHONPATH": os.getcwd()})
    wait_for(lambda: len(lines(log)) == 2 or owner.poll() is not None)
    pids = below(owner.pid)
    assert len(pids) >= 5  # two fork servers, two instances, a child
    owner.kill()
    owner.wait()
    wait_for(lambda: not any(map(living, pids)))


# ---- importing ----


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module, imports it here, and then replaces its text for fork servers."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(name: str, above: str = "", idle_s: float = 0.3) -> Any:
        text = (
            "import os\nfrom tangram.client.functions import function\n"
            f"@function(cpus=0.1, idle_s={idle_s})\ndef score():\n    return os.getpid()\n"
        )
        (tmp_path / f"{name}.py").write_text(text)
        module = __import__(name)
        (tmp_path / f"{name}.py").write_text(above + text)
        names.append(name)
        return module

    yield write
    for name in names:
        del sys.modules[name]


def test_a_module_that_cannot_be_imported_is_an_error_of_the_function(run: Run, written: Any, tmp_path: Path) -> None:
    module = written("reward_broken", "print('so far')\nimport no_such_module\n")

    async def test(bench: Bench) -> None:
        results = await asyncio.gather(*(bench.try_call(module.score) for _ in range(3)))
        for result in results:
            assert result.error is not None and result.error.kind == "import"
            assert "No module named 'no_such_module'" in result.reason and result.stdout == "so far\n"
            assert "reward_broken.py" in result.error.traceback
        # The next call imports again: what was missing may be there by then.
        (tmp_path / "no_such_module.py").touch()
        assert (await bench.try_call(module.score)).kind == "value"

    run(test)


def test_a_module_that_ends_the_process_is_our_failure_with_its_output(run: Run, written: Any) -> None:
    module = written(
        "reward_exits", "import os, sys\nsys.stderr.write('no licence')\nsys.stderr.flush()\nos._exit(4)\n"
    )

    async def test(bench: Bench) -> None:
        result = await bench.try_call(module.score)
        assert result.kind == "lost" and "no licence" in result.reason

    run(test)


def test_a_module_that_ignores_the_ends_of_children_changes_nothing(run: Run, written: Any) -> None:
    ignored = "".join(f"signal.signal(signal.{name}, signal.SIG_IGN)\n" for name in ("SIGCHLD", "SIGTERM", "SIGINT"))
    module = written("reward_signals", f"import signal\n{ignored}")

    async def test(bench: Bench) -> None:
        pid = await bench.call(module.score)
        await until(lambda: bench.manager.statistics().fork_servers == 0)
        await until(lambda: not living(pid))

    run(test)


def test_a_module_that_takes_more_than_its_memory_is_an_error(run: Run, written: Any) -> None:
    module = written("reward_large", "x = bytearray(600 << 20)\n")

    async def test(bench: Bench) -> None:
        result = await bench.try_call(module.score)
        assert result.error is not None and result.error.kind == "memory"
        assert "give it more memory" in result.reason

    run(test)


def test_a_module_with_threads_is_imported_by_each_instance_and_logged_once(
    run: Run, written: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = written(
        "reward_threads",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        idle_s=3.0,
    )

    async def test(bench: Bench) -> None:
        with caplog.at_level(logging.WARNING, logger="tangram.functions"):
            pids = await asyncio.gather(*(bench.call(module.score) for _ in range(3)))
            assert len(set(pids)) == 3
            assert await bench.call(module.score) in pids
        assert [record.message for record in caplog.records if "starts threads" in record.message][1:] == []
        assert "starts threads" in caplog.text
        await until(lambda: bench.manager.statistics().fork_servers == 0)

    run(test)


def test_an_import_that_hangs_can_be_cancelled_and_times_out(
    run: Run, written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "START_WAIT_S", 0.05)
    monkeypatch.setattr(lease, "IMPORT_S_MAX", 1.5)
    module = written("reward_hangs", f"import time\nopen({str(tmp_path / 'log')!r}, 'w').close()\ntime.sleep(600)\n")

    async def test(bench: Bench) -> None:
        task = asyncio.create_task(bench.try_call(module.score))
        await until((tmp_path / "log").exists)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        result = await bench.try_call(module.score)
        assert result.error is not None and result.error.kind == "import"
        assert "was not imported within 1.5 s" in result.reason
        await until(lambda: bench.manager.statistics().fork_servers == 0)

    run(test)


# ---- the contract of leases ----


def test_a_lease_ends_once_also_when_its_manager_is_left(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        work = Call(function=rewards.held.spec(), arguments=_arguments(str(tmp_path / "log"), str(tmp_path / "never")))
        action = Action(id="a", demand=Demand({CPU: fixed(1)}))
        async with asyncio.timeout(DEADLINE_S):
            async with FunctionManager() as manager:
                lease = await manager.start(action, Grant("a", "local", (), 1000), work)
                await until(lambda: lines(tmp_path / "log"))
                assert lease.cpu_seconds() is not None
                lease.resize(reserved=1, limit=1)
                assert [view.function for view in manager.instance_views()] == [work.function.name]
            ended = await lease.wait()
            await lease.stop()
            assert ended.lost and await lease.wait() == ended

    asyncio.run(main())


def _arguments(*args: object) -> bytes:
    import pickle

    return pickle.dumps((args, {}))
