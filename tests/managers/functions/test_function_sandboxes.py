"""Functions of tenants in separate sandboxes: what they do there is reported truly and harms no other call."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chaos.conftest import first_processes, is_exiting, read_proc_file
from tests.managers.functions.conftest import DEADLINE_S, below, until
from tests.passing_time import LONG_S, past_limit

import tangram
from tangram.client.functions import CallResult, FunctionCalls
from tangram.client.transport import LocalPending, Pending
from tangram.client.validation import Lifecycle
from tangram.core.action import Action
from tangram.core.limits import Limits
from tangram.core.messages import Grant, Pool, PoolChanged
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import AdmissionRefused, InvalidAction
from tangram.managers.base import CLOSE_DEMAND, Manager
from tangram.managers.functions import lease as lease_module
from tangram.managers.functions import sandbox_instance
from tangram.managers.functions.host import ALLOWANCE_BYTES, PREFIX
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.msgpack_encoder import encode
from tangram.managers.functions.program import ANSWER, BEGIN, FRAME, REPLY
from tangram.managers.functions.reply import REPLY_BYTES_MAX, MalformedReply, ReplyParser, decode_reply
from tangram.managers.functions.sandbox_instance import pickled_by
from tangram.managers.functions.work import Call, FunctionSpec
from tangram.managers.sandboxes.bwrap.manager import BwrapManager
from tangram.managers.sandboxes.process.manager import ProcessManager
from tangram.managers.work import MIB, Open, SandboxSpec, Work
from tangram.processes.streams import STDERR, STDOUT
from tangram.runtime.orchestrator import Orchestrator

NODE = "local"
SMALL: dict[str, Any] = dict(cpus=0.5, memory="64MiB", timeout_s=30.0)
"""Options of most functions here."""


class Direct:
    """The transport of calls to an orchestrator."""

    by_value = False
    """What cannot be imported is sent by value all the same."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def submit(self, action: Action, work: Work) -> Pending:
        return LocalPending(self._orchestrator, self._orchestrator.submit(action, work))

    def ensure_pool(self, pool: Pool) -> None:
        self._orchestrator.send(PoolChanged(pool=pool))


class Memory:
    """The memory reserved for each sandbox."""

    def __init__(self, mib: int) -> None:
        self._mib = mib
        self.mib_by_sandbox: dict[str, int] = {}
        self.runs: dict[str, str] = {}
        """Of all sandboxes so far."""
        self.most = 0
        self.limit = "capacity"

    def reserve(self, sandbox: str, memory_mib: int, run: str) -> None:
        assert sandbox not in self.runs and sandbox.startswith(PREFIX) and "/" not in sandbox
        if sum(self.mib_by_sandbox.values()) + memory_mib > self._mib:
            raise AdmissionRefused(self.limit, f"{memory_mib} MiB are asked for, and {self._mib} is all there is")
        self.mib_by_sandbox[sandbox] = memory_mib
        self.runs[sandbox] = run
        self.most = max(self.most, len(self.mib_by_sandbox))

    def release(self, sandbox: str) -> None:
        del self.mib_by_sandbox[sandbox]


class Bench:
    def __init__(
        self,
        functions: FunctionCalls,
        instances: FunctionManager,
        manager: Manager,
        memory: Memory,
        orchestrator: Orchestrator,
    ) -> None:
        self.orchestrator = orchestrator
        self.instances = instances
        self.manager = manager
        self.memory = memory
        self.call = functions.call
        self.try_call = functions.try_call

    @property
    def opened(self) -> int:
        """Sandboxes so far."""
        return len(self.memory.runs)


Test = Callable[[Bench], Awaitable[None]]
Run = Callable[..., None]


@asynccontextmanager
async def benched(manager: Manager, *, memory_mib: int = 4096, image: str = "host") -> AsyncIterator[Bench]:
    memory = Memory(memory_mib)
    instances = FunctionManager(manager, memory.reserve, memory.release, image=image)
    scheduler = Scheduler(policy("adaptive"), manager.pools(), limits=Limits())
    orchestrator = Orchestrator(scheduler, {NODE: manager}, {Call: instances})
    life = Lifecycle("the connection")
    async with orchestrator:
        life.begin(asyncio.get_running_loop())
        life.mark_open()
        yield Bench(FunctionCalls(Direct(orchestrator), life, "test"), instances, manager, memory, orchestrator)
        life.mark_closed()
    scheduler.check()
    assert memory.mib_by_sandbox == {}
    assert len(instances.instance_views()) == 0


def why_not() -> str:
    missing = [name for name in ("bwrap", "catatonit", "setpriv") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "sandboxes need root"
    return f"missing: {', '.join(missing)}" if missing else ""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `test(bench)` on real sandboxes and checks that nothing is left of them."""
    reason = why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)

    def main(test: Test, *, cores: float | None = None, **options: Any) -> None:
        before, fds = below(os.getpid()), len(os.listdir("/proc/self/fd"))

        async def inside() -> None:
            manager = BwrapManager(state=tmp_path / "state", node=NODE, cores=cores)
            async with asyncio.timeout(DEADLINE_S), benched(manager, **options) as bench:
                await test(bench)

        asyncio.run(inside())
        assert list((tmp_path / "state" / "owners").iterdir()) == []
        assert below(os.getpid()) - before == set()
        assert len(os.listdir("/proc/self/fd")) == fds

    return main


def held_programs() -> list[int]:
    """Of the sandboxes of this process, as they are numbered outside of them."""
    found = []
    for pid in below(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and words[0] == b"python3":
            found.append(pid)
    return found


def is_called() -> bool:
    """Whether a function runs that has renamed its process to `called`."""
    return any(read_proc_file(pid, "comm") == "called\n" for pid in below(os.getpid()))


async def timed_out(bench: Bench, target: Any, *args: Any, begun: Callable[[], bool] = is_called) -> CallResult:
    """The result of a call that reaches its time limit LONG_S once it has begun."""
    task = asyncio.create_task(bench.try_call(target, *args))
    await until(lambda: task.done() or begun())
    return await past_limit(bench.orchestrator, task)


def failure(result: CallResult, kind: str) -> str:
    """Its message."""
    assert result.kind == "error" and result.error is not None, result
    assert result.error.kind == kind, result
    return result.error.message


# ---- what a function does ----


def test_a_function_returns_its_value_and_what_it_printed(run: Run) -> None:
    @tangram.function(**SMALL)
    def add(a: int, *, b: int) -> dict[str, Any]:
        import sys

        print("on its way")
        print("and to errors", file=sys.stderr)
        return {"sum": a + b, "parts": (a, b)}

    async def test(bench: Bench) -> None:
        for a in range(3):
            result = await bench.try_call(add, a, b=1)
            assert result.value == {"sum": a + 1, "parts": [a, 1]}
            assert (result.stdout, result.stderr) == ("on its way\n", "and to errors\n")
            assert result.usage.cpu_s > 0.0 and result.usage.memory_peak_bytes > MIB
        assert bench.opened == 1

    run(test)


def test_a_coroutine_function_is_awaited(run: Run) -> None:
    @tangram.function(**SMALL)
    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value + 1

    async def test(bench: Bench) -> None:
        assert await bench.call(later, 1) == 2

    run(test)


def test_what_it_raises_comes_with_the_traceback_and_does_not_cost_the_instance(run: Run) -> None:
    @tangram.function(**SMALL)
    def raises(depth: int) -> None:
        def deeper(depth: int) -> None:
            if depth % 2:
                deeper(depth - 1)
            elif depth:
                (lambda: deeper(depth - 1))()
            raise LookupError("no such answer")

        deeper(depth)

    async def test(bench: Bench) -> None:
        for _ in range(2):
            result = await bench.try_call(raises, 0)
            assert failure(result, "raised") == "LookupError: no such answer"
            assert result.error is not None and result.error.traceback.startswith("Traceback (most recent call last)")
            assert "in raises" in result.error.traceback and "program.py" not in result.error.traceback
        deep = await bench.try_call(raises, 60)
        assert deep.error is not None and len(deep.error.traceback) > 4096  # more than a pipe takes at once
        assert bench.opened == 1

    run(test)


def test_a_closure_and_a_class_of_the_script_go_by_value(run: Run) -> None:
    class Shape:
        def __init__(self, width: float) -> None:
            self.width = width

        def area(self) -> float:
            return self.width**2

    factor = 3.0

    @tangram.function(**SMALL)
    def area(shape: Shape) -> float:
        return factor * shape.area() + Shape(1.0).area()

    async def test(bench: Bench) -> None:
        assert await bench.call(area, Shape(2.0)) == 13.0

    run(test)


def test_large_arguments_and_answers_come_through(run: Run) -> None:
    @tangram.function(cpus=1, memory="256MiB", timeout_s=30.0)
    def turned(data: bytes, also: list[float]) -> list[Any]:
        return [data[::-1], also]

    async def test(bench: Bench) -> None:
        data = os.urandom(10 * MIB)
        for _ in range(2):
            assert await bench.call(turned, data, [0.5]) == [data[::-1], [0.5]]
        assert bench.opened == 1
        name = next(iter(bench.memory.mib_by_sandbox))
        left = {entry.name for entry in await bench.manager.list(name, ".tangram")}
        assert left == {"tangram_inside", "library"}  # nothing of any call

    run(test)


def test_an_answer_that_is_too_large_or_foreign_is_an_error(run: Run) -> None:
    @tangram.function(cpus=1, memory="256MiB", timeout_s=30.0)
    def returns(what: str) -> Any:
        import datetime

        return {"large": b"x" * (17 << 20), "moment": {"when": datetime.date(2020, 1, 1)}, "huge": 1 << 70}[what]

    async def test(bench: Bench) -> None:
        assert "maximum is 16777216" in failure(await bench.try_call(returns, "large"), "unserialisable")
        assert 'result["when"]: date' in failure(await bench.try_call(returns, "moment"), "unserialisable")
        assert "ints" in failure(await bench.try_call(returns, "huge"), "unserialisable")

    run(test)


def test_a_module_that_is_not_in_the_image_is_named_with_what_to_do(run: Run) -> None:
    from tests.managers.functions import rewards

    async def test(bench: Bench) -> None:
        message = failure(await bench.try_call(rewards.add, 1, 2), "import")
        assert "there is no module tests in image host" in message and "put it into an image" in message

        @tangram.function(**SMALL)
        def takes(value: object) -> str:
            return type(value).__name__

        message = failure(await bench.try_call(takes, rewards.Score(value=1.0)), "arguments")
        assert "there is no module tests" in message

    run(test)


def test_the_python_that_pickled_it_is_compared_with_that_inside(run: Run) -> None:
    @tangram.function(**SMALL)
    def one() -> int:
        return 1

    spec = one.spec()
    assert pickled_by(spec) is not None
    one.spec = lambda **options: msgspec.structs.replace(spec, paths=("/usr/lib/python38.zip",))  # type: ignore[assignment]

    async def test(bench: Bench) -> None:
        message = failure(await bench.try_call(one), "import")
        assert "pickled by Python 3.8" in message and "image host has Python 3." in message

    run(test)
    assert pickled_by(FunctionSpec(name="x", module="m", qualname="q", paths=("/home/me",))) is None


def test_a_function_whose_import_starts_threads_is_called_like_any_other(run: Run) -> None:
    class Threaded:
        """Starts a thread where it is read."""

        def __reduce__(self) -> Any:
            def make() -> Any:
                import threading

                threading.Thread(target=threading.Event().wait, daemon=True).start()
                return lambda value: value + 1

            return make, ()

        def __call__(self, value: float) -> float:
            return value

    function = tangram.function(**SMALL)(Threaded())

    async def test(bench: Bench) -> None:
        for value in range(2):
            assert await bench.call(function, value) == value + 1
        assert await bench.call(function, 1.5) == 2.5
        assert bench.opened == 1

    run(test)


# ---- faults of the function ----


def test_out_of_memory_is_an_error_and_the_next_call_works(run: Run) -> None:
    @tangram.function(**SMALL)
    def takes(mib: int, how: str) -> int:
        import mmap

        if how == "own":
            return len(bytearray(mib << 20))
        with mmap.mmap(
            -1, mib << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        ) as shared:  # no limit of a process counts it
            for at in range(0, mib << 20, 4096):
                shared[at] = 1
        return mib

    async def test(bench: Bench) -> None:
        message = failure(await bench.try_call(takes, 200, "own"), "memory")
        assert message == "out of memory: it has used up its limit of 64 MiB"
        assert await bench.call(takes, 1, "own") == MIB
        message = failure(await bench.try_call(takes, 400, "shared"), "memory")
        assert "64 MiB" in message
        assert await bench.call(takes, 1, "own") == MIB

    run(test)


@pytest.mark.parametrize("code", [0, 7, 114])
def test_a_function_that_ends_its_process_is_an_error(run: Run, code: int) -> None:
    @tangram.function(**SMALL)
    def ends(code: int) -> int:
        if code >= 0:
            os._exit(code)
        return code

    async def test(bench: Bench) -> None:
        failure(await bench.try_call(ends, code), "exited")
        assert await bench.call(ends, -1) == -1
        assert bench.opened == 2

    run(test)


def test_a_crash_names_its_signal(run: Run) -> None:
    @tangram.function(**SMALL)
    def crashes() -> None:
        os.abort()

    async def test(bench: Bench) -> None:
        assert "SIGABRT" in failure(await bench.try_call(crashes), "exited")

    run(test)


def test_a_function_that_does_not_return_is_timed_out_and_the_next_call_works(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.managers.sandboxes.bwrap.leases.STOP_GRACE_S", 0.1)

    @tangram.function(cpus=0.5, memory="64MiB", timeout_s=LONG_S)
    def loops(forever: bool) -> int:
        import signal
        import time

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("looping")
        if forever:
            with open("/proc/self/comm", "w") as name:
                name.write("called")
        while forever:
            time.sleep(1.0)  # what has no pauses may starve on a busy machine, and is lost then
        return 1

    async def test(bench: Bench) -> None:
        result = await timed_out(bench, loops, True)
        assert (result.kind, result.stdout) == ("timed_out", "looping\n")
        assert len(bench.instances.instance_views()) == 0  # it settles when its sandbox is gone
        assert await bench.call(loops, False) == 1

    run(test)


def test_a_call_can_be_cancelled_while_it_runs_and_while_it_is_imported(run: Run, tmp_path: Path) -> None:
    @tangram.function(**SMALL)
    def sleeps(seconds: float) -> float:
        import time

        with open("/proc/self/comm", "w") as name:
            name.write("called")
        time.sleep(seconds)
        return seconds

    class Slow:
        def __reduce__(self) -> Any:
            import time

            return time.sleep, (100.0,)

        def __call__(self) -> None: ...

    slow = tangram.function(**SMALL)(Slow())

    async def test(bench: Bench) -> None:
        for target, arguments in ((sleeps, (100.0,)), (slow, ())):
            task = asyncio.ensure_future(bench.try_call(target, *arguments))
            await until(held_programs if target is slow else is_called)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() and len(bench.instances.instance_views()) == 0
        assert await bench.call(sleeps, 0.0) == 0.0

    run(test)


def test_a_call_can_be_cancelled_at_any_moment(run: Run) -> None:
    @tangram.function(cpus=0.5, memory="64MiB", max_instances=1)
    def answers() -> int:
        return 1

    async def test(bench: Bench) -> None:
        for step in range(12):
            task = asyncio.ensure_future(bench.try_call(answers))
            await asyncio.sleep(0.02 * step)
            task.cancel()
            await asyncio.wait({task})
            assert len(bench.instances.instance_views()) <= 1
        assert await bench.call(answers) == 1

    run(test)


# ---- hostile ones ----


def test_a_fork_bomb_stays_in_its_sandbox(run: Run) -> None:
    @tangram.function(cpus=0.5, memory="64MiB", timeout_s=20.0, processes=50)
    def bombs(armed: bool) -> int:
        import time

        count = 0
        while armed:
            try:
                if os.fork() == 0:
                    os.setsid()
                    while True:
                        try:
                            os.fork()
                        except OSError:
                            time.sleep(0.01)
                count += 1
            except OSError:
                return count
        return count

    async def test(bench: Bench) -> None:
        result = await bench.try_call(bombs, True)
        assert result.kind in ("value", "error", "timed_out", "lost"), result  # it may starve
        assert result.kind != "value" or result.value < 50
        assert await bench.call(bombs, False) == 0

    run(test)


def test_what_a_call_has_left_running_ends_with_it(run: Run) -> None:
    @tangram.function(**SMALL)
    def leaves() -> int:
        import subprocess

        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        found = 0
        for name in os.listdir("/proc"):
            try:
                with open(f"/proc/{name}/comm") as file:
                    found += file.read() == "sleep\n"
            except OSError:
                pass
        return found

    async def test(bench: Bench) -> None:
        assert await bench.call(leaves) <= 1
        assert await bench.call(leaves) <= 1
        assert bench.opened == 1

    run(test)


def test_a_full_disk_fails_the_call_that_filled_it_and_no_other(run: Run) -> None:
    @tangram.function(cpus=0.5, memory="512MiB", timeout_s=30.0)
    def fills(full: bool) -> Any:
        with open("/work/large", "wb") as file:
            while full:
                file.write(b"x" * (1 << 20))
        return b"y" * 100_000

    async def test(bench: Bench) -> None:
        assert "No space left" in failure(await bench.try_call(fills, True), "raised")
        assert await bench.call(fills, False) == b"y" * 100_000
        assert bench.opened == 2

    run(test)


def test_a_full_disk_does_not_keep_an_answer_from_its_caller(run: Run) -> None:
    @tangram.function(cpus=0.5, memory="512MiB", timeout_s=30.0)
    def fills(large: bytes) -> bytes:
        with open("/work/large", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                return large

    async def test(bench: Bench) -> None:
        for _ in range(2):
            assert await bench.call(fills, b"y" * 100_000) == b"y" * 100_000

    run(test)


def test_a_function_that_kills_all_that_it_can_has_ended_its_own_call(run: Run) -> None:
    @tangram.function(**SMALL)
    def kills(number: int) -> int:
        import signal

        if number:
            os.kill(-1, signal.SIGKILL)
            os.kill(os.getpid(), number)
        return number

    async def test(bench: Bench) -> None:
        for number, name in ((9, "SIGKILL"), (15, "SIGTERM")):
            assert name in failure(await bench.try_call(kills, number), "exited")
            assert await bench.call(kills, 0) == 0

    run(test)


def test_a_call_is_not_harmed_by_an_instance_that_died_while_it_was_idle(run: Run) -> None:
    @tangram.function(**SMALL)
    def one() -> int:
        return 1

    async def test(bench: Bench) -> None:
        assert await bench.call(one) == 1
        (held,) = held_programs()
        os.kill(held, 9)  # it stands still, and dies when the next call wakes it
        assert await bench.call(one) == 1
        assert bench.opened == 2

    run(test)


def test_a_fork_that_returns_does_not_answer_twice(run: Run) -> None:
    @tangram.function(**SMALL)
    def forks() -> bool:
        import time

        if os.fork():
            time.sleep(0.05)
            return True
        return False

    async def test(bench: Bench) -> None:
        for _ in range(3):
            assert await bench.call(forks) is True
        assert bench.opened == 1

    run(test)


def test_a_function_may_close_and_redirect_its_streams(run: Run) -> None:
    @tangram.function(**SMALL)
    def closes() -> int:
        import threading

        def writes() -> None:
            while True:
                os.write(2, b"y")
                os.write(1, b"x" * 100)

        threading.Thread(target=writes, daemon=True).start()  # while it answers
        os.close(0)
        os.dup2(os.open("/dev/null", os.O_RDWR), 2)
        return 1

    async def test(bench: Bench) -> None:
        for _ in range(3):
            assert await bench.call(closes) == 1

    run(test)


@pytest.mark.parametrize("what", ["noise", "mark", "frame", "endless", "reply", "head", "value"])
def test_garbage_instead_of_an_answer_is_the_failure_of_the_function(run: Run, what: str) -> None:
    @tangram.function(**SMALL)
    def forges(what: str) -> Any:
        import gc
        import struct

        if not what:
            return "fine"
        channel = next(found for found in gc.get_objects() if type(found).__name__ == "ReplyChannel")
        mark = b"\0tangram answer " + channel.token.encode()

        def framed(content: bytes) -> bytes:
            return mark + struct.pack("!I", len(content)) + content

        def reply(head: bytes, value: bytes) -> bytes:
            return struct.pack("!IQ", len(head), len(value)) + head + value

        head = b"\x84\xa7failure\xc0\xa5cpu_s\x00\xaapeak_bytes\x00\xa4keep\xc3"
        said = {
            "noise": os.urandom(100_000),
            "mark": mark,
            "frame": mark + struct.pack("!I", 1000) + b"short",
            "endless": mark + struct.pack("!I", 0xFFFFFFFF) + b"x" * (1 << 20),
            "reply": framed(struct.pack("!IQ", 10, 1 << 60)),
            "head": framed(reply(os.urandom(100), b"\xc0")),
            "value": framed(reply(head, b"\x92\xc0")),
        }[what]
        while said:
            said = said[os.write(1, said) :]
        os._exit(114)

    async def test(bench: Bench) -> None:
        result = await bench.try_call(forges, what)
        failure(result, "exited" if what == "noise" else "answer")
        assert await bench.call(forges, "") == "fine"
        assert bench.opened == 2

    run(test)


FLOOD_BYTES = 16 * MIB
"""More than the captured output and all pipes on the way hold."""


def test_output_without_end_is_bounded_and_comes_to_its_time_limit(run: Run) -> None:
    @tangram.function(cpus=1, memory="64MiB", timeout_s=LONG_S, retries=0)
    def floods() -> None:
        written = 0
        while True:
            written += os.write(1, b"x" * 65536)
            if written > FLOOD_BYTES:
                with open("/proc/self/comm", "w") as name:
                    name.write("called")

    async def test(bench: Bench) -> None:
        result = await timed_out(bench, floods)
        assert result.kind in ("timed_out", "lost") and "are not shown" in result.stdout  # it may starve
        assert len(result.stdout) < 300_000

    run(test)


def test_a_function_has_no_network_and_is_not_root(run: Run) -> None:
    @tangram.function(**SMALL)
    def looks() -> list[Any]:
        import socket

        return [os.getuid(), sorted(name for _, name in socket.if_nameindex())]

    async def test(bench: Bench) -> None:
        user, interfaces = await bench.call(looks)
        assert user != 0 and interfaces in ([], ["lo"])

    run(test)


# ---- what happens to it ----


def test_an_endless_import_times_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "IMPORT_S_MAX", 0.5)

    class Slow:
        def __reduce__(self) -> Any:
            import time

            return time.sleep, (100.0,)

        def __call__(self) -> None: ...

    async def test(bench: Bench) -> None:
        message = failure(await bench.try_call(tangram.function(**SMALL)(Slow())), "import")
        assert "was not imported within 0.5 s" in message

    run(test)


def test_a_time_limit_counts_an_import_that_takes_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "START_WAIT_S", 0.2)

    class Slow:
        def __reduce__(self) -> Any:
            import time

            return time.sleep, (100.0,)

        def __call__(self) -> None: ...

    async def test(bench: Bench) -> None:
        slow = tangram.function(cpus=0.5, memory="64MiB", timeout_s=0.5)(Slow())
        assert (await bench.try_call(slow)).kind == "timed_out"
        assert len(bench.instances.instance_views()) == 0

    run(test)


def test_a_call_whose_sandbox_is_lost_is_retried_as_often_as_its_function_allows(run: Run) -> None:
    @tangram.function(cpus=0.5, memory="64MiB", retries=1)
    def sleeps(seconds: float) -> float:
        import time

        print("asleep")
        time.sleep(seconds)
        return seconds

    async def test(bench: Bench) -> None:
        killed: set[int] = set()

        async def kill() -> None:
            """Kill every sandbox as soon as it exists."""
            while True:
                for process in set(first_processes()) - killed:
                    killed.add(process)
                    os.kill(process, signal.SIGKILL)
                await asyncio.sleep(0.005)

        killing = asyncio.ensure_future(kill())
        try:
            result = await bench.try_call(sleeps, 100.0)
        finally:
            killing.cancel()
        assert result.kind == "lost" and result.reason and len(killed) == 2, result
        assert await bench.call(sleeps, 0.0) == 0.0

    run(test)


@pytest.mark.parametrize("moment", ["before it is filled", "before it is loaded"])
def test_a_call_whose_new_instance_dies_gets_another_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    @tangram.function(cpus=0.5, memory="64MiB", retries=1)
    def returns() -> int:
        return 1

    killed: list[int] = []
    unpack = BwrapManager.unpack

    async def kill() -> None:
        [process] = first_processes()
        killed.append(process)
        os.kill(process, signal.SIGKILL)
        await until(lambda: is_exiting(process))

    async def unpack_and_kill(self: BwrapManager, sandbox: str, path: str, tar: BinaryIO) -> None:
        if moment == "before it is filled" and not killed:
            await kill()
        await unpack(self, sandbox, path, tar)
        if not killed:
            await kill()

    monkeypatch.setattr(BwrapManager, "unpack", unpack_and_kill)

    async def test(bench: Bench) -> None:
        result = await bench.try_call(returns)
        assert (result.kind, result.value, result.attempts) == ("value", 1, 2), result
        assert len(killed) == 1

    run(test)


def test_instances_that_a_dead_service_left_are_removed(tmp_path: Path, run: Run) -> None:
    async def inside() -> None:
        state = tmp_path / "kept"
        memory = Memory(4096)
        async with BwrapManager(state=state, node=NODE, owner="service") as manager:
            for name in (f"{PREFIX}left", "run/kept"):
                action = Action(id=name, demand=CLOSE_DEMAND, sandbox=name)
                lease = await manager.start(action, Grant(name, NODE, (), 0), Open(spec=SandboxSpec()))
                assert not (await lease.wait()).lost
        async with (
            BwrapManager(state=state, node=NODE, owner="service", keeps=False) as manager,
            FunctionManager(manager, memory.reserve, memory.release),
        ):
            assert manager.sandboxes() == ("run/kept",)

    asyncio.run(inside())


# ---- what is shared ----


@pytest.mark.parametrize("cpus", [1, 2])
def test_a_call_sees_the_cores_that_it_was_granted(run: Run, cpus: int) -> None:
    if len(os.sched_getaffinity(0)) < cpus:
        pytest.skip(f"this machine has less than {cpus} cores")

    @tangram.function(cpus=cpus, memory="64MiB")
    def cores() -> list[Any]:
        return [len(os.sched_getaffinity(0)), os.environ["TANGRAM_CPUS"], os.environ["OMP_NUM_THREADS"]]

    async def test(bench: Bench) -> None:
        for _ in range(2):
            assert await bench.call(cores) == [cpus, str(cpus), str(cpus)]

    run(test)


def test_the_cpu_of_a_call_is_limited_and_counted(run: Run) -> None:
    # The quota is shorter than a time slice of the kernel: the call is throttled however busy the machine is.
    @tangram.function(cpus=0.04, memory="64MiB")
    def burns(seconds: float) -> float:
        import time

        began = time.process_time()
        while time.process_time() - began < seconds:
            pass
        return time.process_time() - began

    async def test(bench: Bench) -> None:
        result = await bench.try_call(burns, 0.05)
        assert result.value <= result.usage.cpu_s < result.value + 5.0
        assert result.usage.throttled_s > 0.0

    run(test, cores=1.0)


def test_equal_functions_of_two_runs_and_two_functions_of_one_share_nothing(run: Run) -> None:
    def noted(name: str) -> list[str]:
        with open(f"/work/{name}", "w"), open(f"/tmp/{name}", "w"):
            pass
        return sorted(entry for entry in (*os.listdir("/work"), *os.listdir("/tmp")) if not entry.startswith("."))

    @tangram.function(**SMALL)
    def notes(name: str) -> list[str]:
        return noted(name)

    @tangram.function(**SMALL)
    def also_notes(name: str) -> list[str]:
        return noted(name)

    async def test(bench: Bench) -> None:
        assert await bench.call(notes, "a", run="one") == ["a", "a"]
        assert await bench.call(notes, "b", run="two") == ["b", "b"]
        assert await bench.call(also_notes, "c", run="one") == ["c", "c"]
        assert await bench.call(notes, "d", run="one") == ["a", "a", "d", "d"]
        assert sorted(bench.memory.runs.values()) == ["one", "one", "two"]
        assert set(bench.memory.mib_by_sandbox.values()) == {64 + ALLOWANCE_BYTES // MIB}

    run(test)


def test_instances_end_when_they_have_been_idle(run: Run) -> None:
    @tangram.function(cpus=0.5, memory="64MiB", idle_s=0.05)
    def one() -> int:
        return 1

    async def test(bench: Bench) -> None:
        for _ in range(2):
            assert await bench.call(one) == 1
            await until(lambda: len(bench.instances.instance_views()) == 0)
            assert bench.memory.mib_by_sandbox == {} and bench.instances.instance_views() == []
        assert bench.opened == 2

    run(test)


def test_there_are_never_more_instances_than_a_function_may_have(run: Run) -> None:
    @tangram.function(cpus=0.1, memory="64MiB", max_instances=2)
    def ends(code: int) -> int:
        if code:
            os._exit(code)
        return code

    async def test(bench: Bench) -> None:
        results = await asyncio.gather(*(bench.try_call(ends, number % 2) for number in range(8)))
        assert sorted(result.kind for result in results) == ["error"] * 4 + ["value"] * 4
        assert bench.memory.most <= 2

    run(test)


def test_a_call_without_memory_to_reserve_is_refused_with_that_reason(run: Run) -> None:
    @tangram.function(**SMALL)
    def one() -> int:
        return 1

    async def test(bench: Bench) -> None:
        result = await bench.try_call(one)
        assert (result.kind, result.reason) == ("refused", "192 MiB are asked for, and 100 is all there is")
        assert bench.opened == 0 and len(bench.instances.instance_views()) == 0

    run(test, memory_mib=100)


def test_idle_instances_make_room_unless_the_limit_is_of_another_run(run: Run) -> None:
    @tangram.function(**SMALL)
    def one() -> int:
        return 1

    @tangram.function(**SMALL)
    def two() -> int:
        return 2

    async def test(bench: Bench) -> None:
        assert await bench.call(one, run="a") == 1
        assert await bench.call(one, run="b") == 1
        assert await bench.call(two, run="b") == 2  # in the place of the instance of its own run
        assert sorted(bench.memory.runs[name] for name in bench.memory.mib_by_sandbox) == ["a", "b"]
        bench.memory.limit = "memory of a run"
        assert (await bench.try_call(one, run="c")).kind == "refused"
        bench.memory.limit = "capacity"
        assert await bench.call(one, run="c") == 1

    run(test, memory_mib=2 * 192)


def test_a_missing_image_refuses_every_call(run: Run) -> None:
    @tangram.function(**SMALL)
    def one() -> int:
        return 1

    async def test(bench: Bench) -> None:
        with pytest.raises(InvalidAction):
            await bench.try_call(one)
        await until(lambda: len(bench.instances.instance_views()) == 0)

    run(test, image="no-such-image")


def test_an_image_without_python_is_reported(run: Run, tmp_path: Path) -> None:
    @tangram.function(**SMALL)
    def one() -> int:
        return 1

    async def test(bench: Bench) -> None:
        message = failure(await bench.try_call(one), "import")
        assert "no python3" in message

    run(test, image=_bare_image(tmp_path, run))


def _bare_image(tmp_path: Path, run: Run) -> str:
    """A root with bash alone."""
    bash = shutil.which("bash")
    assert bash is not None
    import re
    import subprocess

    root = tmp_path / "bare"
    found = subprocess.run(["ldd", bash], capture_output=True, text=True, check=True).stdout
    for path in {"/bin/bash", *re.findall(r"(/\S+)", found)}:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in ("tmp", "proc", "dev", "work"):
        (root / name).mkdir()
    (root / "bin" / "sh").symlink_to("bash")
    names: list[str] = []

    async def add(bench: Bench) -> None:
        names.append(await bench.manager.add_image(str(root)))

    run(add)
    return names[0]


def test_without_held_programs_each_call_is_a_program_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_instance, "HOLDING_BACKENDS", ())

    @tangram.function(**SMALL)
    def returns(what: str) -> Any:
        print("here")
        if what == "raise":
            raise LookupError("no")
        if what == "exit":
            os._exit(3)
        return what * 10_000

    async def test(bench: Bench) -> None:
        for _ in range(2):
            result = await bench.try_call(returns, "x")
            assert (result.value, result.stdout) == ("x" * 10_000, "here\n")
        assert failure(await bench.try_call(returns, "raise"), "raised") == "LookupError: no"
        assert bench.opened == 1
        failure(await bench.try_call(returns, "exit"), "exited")
        assert await bench.call(returns, "x") == "x" * 10_000
        assert bench.opened == 2

    run(test)


def test_plain_processes_serve_calls_in_the_same_way(tmp_path: Path) -> None:
    looping = tmp_path / "looping"
    marker = str(looping)

    @tangram.function(cpus=0.5, memory="64MiB", timeout_s=LONG_S)
    def returns(what: str) -> Any:
        import time

        print("here")
        if what == "loop":
            open(marker, "w").close()
        while what == "loop":
            time.sleep(0.01)
        return what * 10_000

    async def inside() -> None:
        manager = ProcessManager(root=tmp_path / "root", node=NODE)
        async with asyncio.timeout(DEADLINE_S), benched(manager) as bench:
            for _ in range(2):
                result = await bench.try_call(returns, "x")
                assert (result.value, result.stdout) == ("x" * 10_000, "here\n")
            assert await bench.call(returns, "y" * 30) == "y" * 300_000
            assert bench.opened == 1
            assert (await timed_out(bench, returns, "loop", begun=looping.exists)).kind == "timed_out"
            assert await bench.call(returns, "x") == "x" * 10_000

    before = below(os.getpid())
    asyncio.run(inside())
    assert below(os.getpid()) - before == set()


# ---- what comes out of a sandbox ----

TOKEN = "0123456789abcdef" * 2


def parsed(data: bytes, pieces: list[int]) -> ReplyParser:
    parser = ReplyParser(TOKEN, None)
    while data:
        size = pieces.pop() if pieces else len(data)
        parser.feed(STDOUT, data[:size])
        data = data[size:]
    parser.end()
    return parser


@given(st.binary(max_size=50), st.lists(st.integers(1, 40), max_size=60))
def test_a_response_is_parsed_at_any_split(printed: bytes, pieces: list[int]) -> None:
    mark, head = TOKEN.encode(), encode({"failure": None, "cpu_s": 0.0, "peak_bytes": 0, "keep": True})
    content = REPLY.pack(len(head), 1) + head + b"\x07"
    frame = ANSWER + mark + FRAME.pack(len(content)) + content
    parser = parsed(b"before the mark" + BEGIN + mark + printed + frame + b"more", pieces)
    assert parser.begun and parser.reply().value == b"\x07"
    assert parser.to_exec_result(None).stdout == printed


@given(st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=60))
def test_noise_is_output(noise: bytes, pieces: list[int]) -> None:
    parser = parsed(BEGIN + TOKEN.encode() + noise, pieces)
    assert parser.to_exec_result(None).stdout == noise
    with pytest.raises(MalformedReply):
        parser.reply()


@pytest.mark.parametrize("length", [0, 5, REPLY_BYTES_MAX, REPLY_BYTES_MAX + 1, 0xFFFFFFFF])
def test_a_parser_keeps_no_more_than_an_answer_may_have(length: int) -> None:
    parser = parsed(BEGIN + TOKEN.encode() + ANSWER + TOKEN.encode() + FRAME.pack(length), [])
    tracemalloc.start()
    for _ in range(40):
        parser.feed(STDOUT, b"x" * MIB)
        parser.feed(STDERR, b"x" * MIB)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    wanted = length if length <= REPLY_BYTES_MAX else 0
    assert wanted <= kept < 1.2 * wanted + 3 * MIB
    assert len(parser.to_exec_result(None).stderr) < MIB
    with pytest.raises(MalformedReply):
        parser.reply()


@given(st.binary(max_size=100), st.integers(0, 100), st.integers(0, 1 << 40))
def test_any_bytes_are_a_reply_or_malformed(noise: bytes, head: int, value: int) -> None:
    for content in (noise, REPLY.pack(head, value) + noise, REPLY.pack(0, len(noise)) + noise):
        try:
            decode_reply(content)
        except MalformedReply:
            continue
        pytest.fail("bytes by chance are no reply")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda parts: st.lists(parts, max_size=20) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), parts),
    max_leaves=40,
)


@given(PLAIN)
def test_msgpack_is_written_as_msgspec_writes_it(value: Any) -> None:
    assert encode(value) == msgspec.msgpack.encode(value)


@pytest.mark.parametrize("size", [15, 16, 31, 32, 255, 256, 65535, 65536])
def test_msgpack_is_written_as_msgspec_writes_it_at_every_length(size: int) -> None:
    for value in ("x" * size, b"x" * size, [None] * size, dict.fromkeys(range(size))):
        assert encode(value) == msgspec.msgpack.encode(value)


def test_what_does_not_fit_into_msgpack_is_refused_as_msgspec_does() -> None:
    for value, error in ((1 << 64, OverflowError), (-(1 << 63) - 1, OverflowError), ({1}, TypeError)):
        with pytest.raises(error):
            encode(value)
