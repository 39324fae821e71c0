"""Calls of functions through an orchestrator: their results, scaling, shared results and errors of callers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.managers.functions import rewards
from tests.managers.functions.conftest import DEADLINE_S, Bench, below, lines, living, until

import tangram
from tangram import Quota, Rate
from tangram.client import functions as module
from tangram.client.functions import ENTRY_BYTES, FunctionCalls, ResultCache, function
from tangram.client.transport import Pending
from tangram.client.validation import Lifecycle
from tangram.core.action import Action
from tangram.core.messages import Pool
from tangram.errors import ActionTimedOut, AdmissionRefused, FunctionFailed, InvalidAction, TangramError
from tangram.managers.functions import lease
from tangram.managers.work import Work

Run = Callable[..., None]


def test_a_function_can_still_be_called_directly() -> None:
    assert rewards.add(1, right=2) == 3
    assert rewards.add.__name__ == "add"


def test_a_call_returns_the_value_and_a_warm_instance_serves_the_next_one(run: Run) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.add, 1, right=2) == 3
        first, second = [await bench.call(rewards.who) for _ in range(2)]
        assert first == second and first[0] != os.getpid() and first[1] != os.getpid()
        result = await bench.try_call(rewards.add, 0.5)
        assert (result.kind, result.value, result.ok, result.error) == ("value", 1.5, True, None)
        assert result.attempts == 1 and result.usage.memory_peak_bytes > 0

    run(test)


def test_a_coroutine_function_is_run_to_its_end(run: Run) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.later, 7) == 7

    run(test)


def test_a_closure_is_sent_by_value(run: Run) -> None:
    offset = 40

    @function(cpus=0.1)
    def shifted(value: int) -> int:
        return value + offset

    async def test(bench: Bench) -> None:
        assert await bench.call(shifted, 2) == 42
        assert await bench.call(function(cpus=0.1)(lambda: "a lambda")) == "a lambda"

    run(test)


def test_a_function_of_a_script_is_sent_by_value_with_what_it_uses(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from tangram.client.functions import function\n"
        "from tests.managers.functions.conftest import functions\n"
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "@function()\ndef twice(x): return 2 * x\n"
        "@function(cpus=0.1)\ndef score(point): return twice(point.x)\n"
        "async def main():\n"
        "    async with functions() as bench:\n        print(await bench.call(score, Point(21)))\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_the_width_of_a_function_is_set_before_it_is_imported(run: Run) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.environment, "OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS", "1")
        assert await bench.call(rewards.environment, "TANGRAM_CPUS") == "1"

    run(test)


def test_plain_values_and_what_is_equal_to_them_come_back(run: Run) -> None:
    expected: dict[str, object] = {
        "float32": 0.5, "int64": [3], "bool": {"x": True}, "tuple": [1, {"a": b"b"}], "counter": {"a": 2, "b": 1},
        "bytearray": [b"x"], "text": ["x"], "keys": {(1, 2): 3, None: 4, 5: 6.0, True: [[7]]},
        "infinite": [float("inf")], "nothing": None,
    }  # fmt: skip

    async def test(bench: Bench) -> None:
        for what, value in expected.items():
            found = await bench.call(rewards.returns, what)
            assert (found, type(found)) == (value, type(value))

    run(test)


def test_a_call_that_is_larger_than_a_socket_holds_arrives_whole(run: Run) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.add, "x" * (8 << 20), "y") == "x" * (8 << 20) + "y"

    run(test)


# ---- scaling ----


def test_instances_go_from_none_to_the_limit_and_back_to_no_process(run: Run, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def test(bench: Bench) -> None:
        before = below(os.getpid())
        calls = asyncio.gather(*(bench.call(rewards.held, str(log), str(go)) for _ in range(20)))
        await until(lambda: len(lines(log)) == 8)
        assert bench.manager.statistics().instances == 8
        assert len(set(lines(log))) == 8
        go.touch()
        pids = await calls
        assert len(pids) == 20 and len(set(pids)) == 8  # the others were served by the same ones
        await until(lambda: bench.manager.statistics().fork_servers == 0)
        statistics = bench.manager.statistics()
        assert (statistics.instances, statistics.idle, statistics.started, statistics.calls) == (0, 0, 8, 20)
        await until(lambda: below(os.getpid()) == before)
        assert await bench.call(rewards.add, 1) == 2  # and from none again

    run(test)


def test_an_instance_ends_after_its_limit_of_calls(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "CALLS_MAX", 3)

    async def test(bench: Bench) -> None:
        pids = [(await bench.call(rewards.who))[0] for _ in range(6)]
        assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4] == pids[5]
        await until(lambda: not living(pids[0]))

    run(test)


# ---- shared results ----


def test_a_pure_function_runs_once_for_the_same_arguments(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(bench: Bench) -> None:
        at_once = await asyncio.gather(*(bench.call(rewards.counted, str(log), 1) for _ in range(5)))
        again = await bench.try_call(rewards.counted, str(log), 1)
        assert at_once == [1] * 5 and again.value == 1 and again.cached
        assert len(lines(log)) == 1
        assert await bench.call(rewards.counted, str(log), 2) == 2
        assert len(lines(log)) == 2

    run(test)


def test_two_calls_with_one_key_share_one_run_also_afterwards(run: Run, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def test(bench: Bench) -> None:
        def call(key: str) -> asyncio.Task[int]:
            return asyncio.create_task(bench.call(rewards.noted, str(log), str(go), idempotency_key=key))

        first, second = call("a"), call("a")
        await until(lambda: lines(log))
        first.cancel()  # the other one still waits for it
        await asyncio.wait({first})
        go.touch()
        pid = await second
        assert first.cancelled() and lines(log) == [str(pid)]
        assert await call("a") == pid and len(lines(log)) == 1
        await call("b")
        assert len(lines(log)) == 2

    run(test)


def test_a_shared_call_is_cancelled_with_its_last_waiter(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(bench: Bench) -> None:
        never = str(tmp_path / "never")
        tasks = [asyncio.create_task(bench.call(rewards.noted, str(log), never, idempotency_key="a")) for _ in range(2)]
        await until(lambda: lines(log))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert not living(int(lines(log)[0]))
        (tmp_path / "never").touch()
        await bench.call(rewards.noted, str(log), never, idempotency_key="a")  # what was cancelled is not remembered
        assert len(lines(log)) == 2

    run(test)


def test_the_result_cache_evicts_the_least_recently_used_first_and_keeps_its_bound() -> None:
    cache = ResultCache(3 * (ENTRY_BYTES + 11))
    for key in (b"a", b"b", b"c"):
        cache.put(key, b"0123456789")
    assert cache.get(b"a") == b"0123456789"
    cache.put(b"d", b"0123456789")
    assert cache.get(b"b") is None and cache.get(b"a") is not None and len(cache) == 3
    cache.put(b"e", bytes(10_000))
    assert cache.get(b"e") is None and cache.size_bytes <= 3 * (ENTRY_BYTES + 11)
    cache.put(b"a", b"")
    assert cache.size_bytes == 2 * (ENTRY_BYTES + 11) + ENTRY_BYTES + 1


# ---- errors of callers ----


def test_invalid_options_are_rejected_where_they_are_declared(run: Run) -> None:
    for options in (
        {"cpus": (1, 2)}, {"cpus": 0}, {"memory": "1MiB"}, {"max_instances": 0}, {"idle_s": 0}, {"timeout_s": -1},
        {"retries": -1}, {"pure": 1}, {"processes": 0},
    ):  # fmt: skip
        with pytest.raises(InvalidAction, match=next(iter(options))):
            function(**options)(len)  # type: ignore[arg-type]
    with pytest.raises(InvalidAction, match="parentheses"):
        function(len)

    async def test(bench: Bench) -> None:
        with pytest.raises(InvalidAction, match=r"the result of @tangram\.function"):
            await bench.call(len, [])
        with pytest.raises(InvalidAction, match=r"arguments of .*takes"):
            await bench.call(rewards.takes, (number for number in ()))
        held = (number for number in ())
        with pytest.raises(InvalidAction, match="put it into a module"):
            await bench.call(function()(lambda: held))
        large = bytes(65 << 20)
        with pytest.raises(InvalidAction, match="load what is large in a module"):
            await bench.call(function()(lambda: large))
        with pytest.raises(InvalidAction, match="pass the name of a file"):
            await bench.call(rewards.takes, large)

    run(test)


def test_a_method_is_refused_where_it_is_declared() -> None:
    with pytest.raises(InvalidAction, match=r"a function that needs no object.*Grader\.score"):

        class Grader:
            @function()
            def score(self, value: int) -> int:
                return value

    with pytest.raises(InvalidAction, match="a function that needs no object"):

        class Other:
            @classmethod
            @function()
            def score(cls, value: int) -> int:
                return value

    with pytest.raises(InvalidAction, match="something that can be called"):
        function()(classmethod(len))  # type: ignore[arg-type]

    def score(self: int) -> int:  # no method, whatever its argument is called
        return self

    assert function()(score)(1) == 1
    assert function()("a b".split)() == ["a", "b"]


def test_a_static_method_is_a_function(run: Run) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.Grader.above, 1) == rewards.Grader().above(1) == 2
        assert await bench.call(rewards.Grader.below, 1) == rewards.Grader().below(1) == 0
        assert rewards.Grader.below.spec().qualname == "Grader.below"  # it goes by its name

    run(test)


def test_a_call_needs_its_quotas_together_with_its_instance(tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def main() -> None:
        limits = [Quota("search", concurrent=1), Quota("judge", tokens=Rate(100, 3600.0))]
        asked = {"search": 1, "judge": {"tokens": 40}}
        async with asyncio.timeout(DEADLINE_S), tangram.connect(backend="process", cores=2, quotas=limits) as t:
            first, second = [
                asyncio.create_task(t.call(rewards.noted, str(log), str(go), quotas=asked)) for _ in range(2)
            ]
            await until(lambda: lines(log))
            with pytest.raises(ActionTimedOut, match="while it waited"):  # it has an instance, and no quota
                await t.call(rewards.noted, str(log), quotas="search", deadline_s=0.1)
            go.touch()
            assert [str(await first), str(await second)] == lines(log)
            with pytest.raises(ActionTimedOut, match="while it waited"):  # 20 tokens are left for this hour
                await t.call(rewards.noted, str(log), quotas={"judge": {"tokens": 40}}, deadline_s=0.1)
            with pytest.raises(InvalidAction, match="missing"):
                await t.call(rewards.noted, str(log), quotas="missing")
            assert len(lines(log)) == 2

    asyncio.run(main())


class Refusing:
    """Records what was submitted, and refuses all of it."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def submit(self, action: Action, work: Work) -> Pending:
        self.actions.append(action)
        raise AdmissionRefused("test", "not now")

    by_value = False

    def ensure_pool(self, pool: Pool) -> None:
        pass


def test_what_a_call_spends_of_a_quota_counts_from_its_end() -> None:
    async def main() -> None:
        transport, life = Refusing(), Lifecycle("the connection")
        life.begin(asyncio.get_running_loop())
        life.mark_open()
        calls = FunctionCalls(transport, life, "test", lambda name: Quota(name, requests=Rate(5, 60.0)))
        for target in (rewards.add, tangram.endpoint("http://x")):
            for quotas in (None, {"search": 2}):
                assert (await calls.try_call(target, 1, quotas=quotas)).kind == "refused"
        assert [action.at_once for action in transport.actions] == [True, False] * 2
        for action in transport.actions[1::2]:
            assert action.demand.pools["search/requests"].max == 2

    asyncio.run(main())


def test_more_cores_than_the_node_has_are_refused(run: Run) -> None:
    async def test(bench: Bench) -> None:
        large = function(cpus=64)(rewards.add.__tangram_function__)
        result = await bench.try_call(large, 1)
        assert result.kind == "refused" and "64 cores" in result.reason
        with pytest.raises(AdmissionRefused, match="64 cores"):
            await bench.call(large, 1)

    run(test)


def test_a_new_function_for_each_call_is_refused_at_the_limit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FUNCTIONS_MAX", 1)

    async def test(bench: Bench) -> None:
        assert await bench.call(rewards.add, 1) == 2
        result = await bench.try_call(rewards.later, 1)
        assert result.kind == "refused" and "the maximum; reuse them" in result.reason

    run(test)


def test_without_cloudpickle_the_error_names_the_remedy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    async def test(bench: Bench) -> None:
        with pytest.raises(TangramError, match="pip install cloudpickle"):
            await bench.call(function()(lambda: 1))
        assert await bench.call(rewards.add, 1) == 2  # what can be imported does not need it

    run(test)


def test_a_failure_is_raised_with_its_traceback(run: Run) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(FunctionFailed, match="LookupError: no such answer") as caught:
            await bench.call(rewards.raises)
        assert 'raise LookupError("no such answer")' in str(caught.value)
        assert "and to errors" in str(caught.value)
        assert caught.value.result.kind == "error"  # type: ignore[attr-defined]

    run(test)
