"""The engine in its process: requests, control, and every way in which it can end."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.rl.processes import DEADLINE_S, gone, is_pending, leaving_nothing, until

from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.processes.framing import FrameTooLong, encode_frame
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines import messages
from tangram.rl.inference.engines.messages import AbortRequest, AddRequest
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import EngineDied, GenerationRequest, PolicyWeights, Sampling, SamplingSeed
from tangram.rl.model.batching import Batcher
from tangram.rl.model.transformer import Transformer, small_config
from tangram.rl.model.weight_store import publish

VOCABULARY = 29
CONTEXT = 64
SLOW = {"decode_s_per_step": 0.1}
"""Slow enough that something can happen while it writes: a request of 40 tokens takes 4 s."""


@functools.cache
def model(version: int) -> Transformer:
    return Transformer.new(
        small_config(VOCABULARY, width=16, heads=2, context_max=CONTEXT), seed=version
    ).requires_grad_(False)


@pytest.fixture(scope="module")
def published():
    """Weights of three versions; the last are not finite."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Transformer.new(model(0).config, seed=3).requires_grad_(False)
        broken.norm[0] = float("nan")
        made = [model(0), model(1), broken]
        yield [publish(each, each.config, folder, version) for version, each in enumerate(made)]


def settings(**options) -> EngineSettings:
    return EngineSettings(**({"slots": 4, "context_max": CONTEXT, "chunk": 8} | options))


def request(number: int, count: int = 5, **sampling) -> GenerationRequest:
    return GenerationRequest(
        id=f"r{number}",
        tokens=tuple((number + position) % VOCABULARY for position in range(count)),
        sampling=Sampling(**({"tokens_max": 8} | sampling)),
        noise=SamplingSeed(seed=number),
    )


def in_process(sent: GenerationRequest, version: int = 0) -> tuple[int, ...]:
    machine = Batcher(model(version), version, slots=1, context_max=CONTEXT, chunk=8, now=lambda: 0.0)
    machine.add(sent)
    while True:
        if done := machine.step().done:
            return done[0][1].tokens


def run(engine: ProcessEngine, weights: PolicyWeights | None, test: Callable[[], Awaitable[None]]) -> None:
    """Nothing is left behind, whatever happened."""

    async def started() -> None:
        if weights is not None:
            await engine.start(weights)
        await test()

    leaving_nothing(started, engine.close)


class Shared:
    """An engine for all tests that leave it as it was, in a loop of its own."""

    def __init__(self, weights: PolicyWeights) -> None:
        self.runner = asyncio.Runner()
        self.engine = ProcessEngine(settings(**SLOW, prefill_s_per_token=0.002))
        self.runner.run(self.engine.start(weights))

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(DEADLINE_S):
                before = asyncio.all_tasks()
                await test()
                assert asyncio.all_tasks() == before

        self.runner.run(main())

    def close(self) -> None:
        with self.runner:
            self.runner.run(self.engine.close())


@pytest.fixture(scope="module")
def shared(published: list[PolicyWeights]) -> Iterator[Shared]:
    made = Shared(published[0])
    yield made
    made.close()


# ---- serving ----


def test_requests_are_answered_independently_with_their_tokens_and_steps_are_recorded_on_request(
    published: list[PolicyWeights],
) -> None:
    engine = ProcessEngine(settings(), record_steps=True)
    first, requests = request(9), [request(number, tokens_max=3 + number) for number in range(9)]

    async def test() -> None:
        await engine.generate(first)
        await until(lambda: len(engine.steps) == 8)
        assert engine.steps[0].commands == ("Add",)
        assert [each.decoded for each in engine.steps] == [0] + [1] * 7

        for each, got in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            assert got.tokens == in_process(each)
            assert (got.engine, got.finish, set(got.versions)) == ("engine", "length", {0})
        await until(lambda: engine.statistics().prefill_tokens == 50)
        known = engine.statistics()
        assert (known.active, known.waiting) == (0, 0)
        assert known.decode_tokens == sum(each.sampling.tokens_max - 1 for each in (first, *requests))
        assert known.idle_s > 0.0

    run(engine, published[0], test)


def test_a_short_request_is_answered_while_a_long_one_goes_on(shared: Shared) -> None:
    engine = shared.engine

    async def test() -> None:
        long = asyncio.create_task(engine.generate(request(1, tokens_max=50)))
        await engine.generate(request(2, tokens_max=2))
        assert not long.done()
        assert engine.statistics().active + engine.statistics().waiting == 1
        await long

    shared.run(test)


def test_a_request_that_cannot_be_served_is_refused_and_affects_no_other(shared: Shared) -> None:
    engine = shared.engine

    async def test() -> None:
        good = asyncio.create_task(engine.generate(request(1)))
        with pytest.raises(InvalidAction, match=f"from 1 to {CONTEXT - 1}"):
            await engine.generate(request(2, CONTEXT))
        assert (await good).tokens == in_process(request(1))

    shared.run(test)


def test_cancellation_aborts_the_request_in_the_engine(published: list[PolicyWeights]) -> None:
    engine = ProcessEngine(settings(slots=1, **SLOW))

    async def test() -> None:
        held = asyncio.create_task(engine.generate(request(1, tokens_max=50)))
        waits = asyncio.create_task(engine.generate(request(2)))
        await until(lambda: engine.statistics().active == 1)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        got = await waits
        assert got.tokens == in_process(request(2))
        # Asked for again at once, under the same id: nothing of the first one comes back.
        assert (await engine.generate(request(1, tokens_max=4))).tokens == in_process(request(1, tokens_max=4))
        await until(lambda: engine.statistics().steps > 0 and engine.statistics().active == 0)
        assert engine.statistics().decode_tokens < 50

    run(engine, published[0], test)


def test_emulated_hardware_is_as_slow_as_declared(shared: Shared) -> None:
    async def test() -> None:
        got = await shared.engine.generate(request(1, 8, tokens_max=6))
        assert got.prefill_s >= 8 * 0.002
        assert got.decode_s >= 5 * SLOW["decode_s_per_step"]

    shared.run(test)


# ---- weights ----


def test_suspend_update_resume_continue_a_request_under_the_new_weights(published: list[PolicyWeights]) -> None:
    engine = ProcessEngine(settings(**SLOW), dtype="float64")

    async def test() -> None:
        going = asyncio.create_task(engine.generate(request(1, tokens_max=40)))
        await until(lambda: engine.statistics().steps > 4)
        await engine.suspend()
        added = asyncio.create_task(engine.generate(request(2)))
        await engine.update(published[1])
        steps = engine.statistics().steps
        assert not going.done()
        await engine.resume()
        got = await going
        old = got.versions.count(0)
        assert 0 < old < 40
        assert got.versions == (0,) * old + (1,) * (40 - old)
        assert got.prefilled == 5 + 5 + old
        assert set((await added).versions) == {1}
        await until(lambda: engine.statistics().steps > steps)
        known = engine.statistics()
        assert known.version == 1 and known.update_s > 0.0 and known.suspended_s > 0.0

    run(engine, published[0], test)


def test_weights_that_cannot_be_had_leave_the_old_ones(
    shared: Shared, published: list[PolicyWeights], tmp_path: Path
) -> None:
    engine = shared.engine
    damaged = publish(model(1), model(1).config, tmp_path, 5)
    bucket = next(Path(damaged.folder).glob("*.bucket"))
    content = bytearray(bucket.read_bytes())
    content[100] ^= 1
    bucket.write_bytes(content)

    async def test() -> None:
        for bad, reason in (
            (damaged, "checksum"),
            (PolicyWeights(version=9, folder=str(tmp_path / "nowhere")), "No such file"),
            (published[2], "not finite"),
        ):
            with pytest.raises(ManagerError, match=reason) as failed:
                await engine.update(bad)
            assert not isinstance(failed.value, EngineDied)
            got = await engine.generate(request(1))
            assert (got.tokens, set(got.versions)) == (in_process(request(1)), {0})
        await engine.update(published[1])
        assert (await engine.generate(request(1))).tokens == in_process(request(1), 1)
        await engine.update(published[0])

    shared.run(test)


# ---- ends ----


def test_a_killed_engine_gives_each_request_back_with_what_was_written(published: list[PolicyWeights]) -> None:
    engine = ProcessEngine(settings(slots=2, **SLOW))

    async def test() -> None:
        requests = [request(number, tokens_max=55) for number in (1, 2, 3)]
        tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
        await until(lambda: engine.statistics().decode_tokens > 2 * 20)
        os.kill(engine.pid, signal.SIGKILL)
        died = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, EngineDied) and "signal 9" in str(each) for each in died)
        for each, asked_for in zip(died[:2], requests, strict=False):
            assert isinstance(each, EngineDied) and each.written is not None
            tokens = each.written.tokens
            assert 8 <= len(tokens) < 55
            assert tokens == in_process(asked_for)[: len(tokens)]
            assert len(each.written.logprobs) == len(each.written.versions) == len(tokens)
        assert isinstance(died[2], EngineDied) and died[2].written is None
        with pytest.raises(EngineDied):
            await engine.generate(request(4))
        with pytest.raises(EngineDied):
            await engine.update(published[1])

        await engine.start(published[1])
        assert (await engine.generate(request(4))).tokens == in_process(request(4), 1)

    run(engine, published[0], test)


def test_an_engine_without_work_may_be_silent_and_one_with_work_counts_as_dead_then(
    published: list[PolicyWeights],
) -> None:
    engine = ProcessEngine(settings(**SLOW), hang_s=1.5)

    async def test() -> None:
        await engine.generate(request(1))
        await engine.suspend()
        waits = asyncio.create_task(engine.generate(request(2)))
        silent_since = time.monotonic()
        await until(lambda: time.monotonic() - silent_since > 2.5)
        assert engine.alive and not waits.done()
        await engine.resume()
        assert (await waits).tokens == in_process(request(2))

        known = engine.statistics().steps
        task = asyncio.create_task(engine.generate(request(1, tokens_max=55)))
        await until(lambda: engine.statistics().steps > known + 20)
        pid = engine.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineDied, match="sent nothing for") as died:
            await task
        assert died.value.written is not None and len(died.value.written.tokens) >= 8
        assert gone(pid)

        await engine.start(published[0])
        written = died.value.written.tokens
        rest = GenerationRequest(
            id="r1 again",
            tokens=request(1).tokens + written,
            sampling=Sampling(tokens_max=55 - len(written)),
            noise=request(1).noise,
        )
        # Noise depends on positions, so every engine continues with the same tokens.
        assert written + (await engine.generate(rest)).tokens == in_process(request(1, tokens_max=55))

    run(engine, published[0], test)


def test_closing_ends_what_is_in_it(published: list[PolicyWeights]) -> None:
    engine = ProcessEngine(settings(**SLOW))

    async def test() -> None:
        task = asyncio.create_task(engine.generate(request(1, tokens_max=55)))
        await until(lambda: engine.statistics().active == 1)
        pid = engine.pid
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await task
        assert gone(pid)
        await engine.close()

    run(engine, published[0], test)


def test_an_engine_that_does_not_listen_is_closed_all_the_same(published: list[PolicyWeights]) -> None:
    engine = ProcessEngine(settings())

    async def test() -> None:
        os.kill(engine.pid, signal.SIGSTOP)
        pid = engine.pid
        await engine.close()
        assert gone(pid)

    run(engine, published[0], test)


def test_it_is_not_started_twice(shared: Shared, published: list[PolicyWeights]) -> None:
    async def test() -> None:
        with pytest.raises(ManagerError, match="runs already"):
            await shared.engine.start(published[0])

    shared.run(test)


def test_one_of_several_has_a_number_in_its_name() -> None:
    assert ProcessEngine(settings(count=2), 1).name == "engine-1"


@pytest.mark.parametrize(
    ("options", "weights", "reason"),
    [
        ({}, PolicyWeights(version=0, folder="/nowhere"), "No such file"),
        ({"context_max": 2 * CONTEXT}, None, "context_max"),
        ({}, 2, "not finite"),
    ],
)
def test_a_failed_start_reports_why_and_leaves_nothing(
    published: list[PolicyWeights], options: dict, weights: PolicyWeights | int | None, reason: str
) -> None:
    engine = ProcessEngine(settings(**options))
    chosen = weights if isinstance(weights, PolicyWeights) else published[weights or 0]

    async def test() -> None:
        with pytest.raises(ManagerError, match=reason) as failed:
            await engine.start(chosen)
        assert not failed.value.retry or isinstance(weights, PolicyWeights)
        with pytest.raises(EngineDied):
            await engine.generate(request(1))

    run(engine, None, test)


def test_a_child_that_falls_over_at_once_is_quoted(
    published: list[PolicyWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.rl.inference.engines.process.PROGRAM", "tangram.rl.model.there_is_no_such_program")
    engine = ProcessEngine(settings())

    async def test() -> None:
        with pytest.raises(ManagerError, match=r"No module named .*there_is_no_such_program"):
            await engine.start(published[0])

    run(engine, None, test)


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    engine = ProcessEngine(settings())
    os.mkfifo(tmp_path / "manifest.json")  # which the engine waits to read

    async def test() -> None:
        start = asyncio.create_task(engine.start(PolicyWeights(version=0, folder=str(tmp_path))))
        await until(lambda: engine.alive)
        pid = engine.pid
        with pytest.raises(EngineDied, match="being started"):
            await engine.generate(request(1))
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert gone(pid)

    run(engine, None, test)


def test_settings_of_which_it_cannot_be_made_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="float32 or float64"):
        ProcessEngine(settings(), dtype="float8")
    with pytest.raises(InvalidConfig, match="kind: expected process"):
        ProcessEngine(EngineSettings(kind="openai", url="http://127.0.0.1:1"))


OWNER = """
import asyncio, sys
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.config.rollout_settings import EngineSettings

async def main():
    engine = ProcessEngine(EngineSettings(slots=4, context_max={context}, chunk=8))
    await engine.start(PolicyWeights(version=0, folder={folder!r}))
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_engine_ends_with_its_owner(published: list[PolicyWeights], number: signal.Signals) -> None:
    program = OWNER.format(context=CONTEXT, folder=published[0].folder)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            os.kill(pid, signal.SIGINT)  # Ctrl-C reaches all; an engine leaves it to its owner
            asyncio.run(until(lambda: not is_pending(pid, signal.SIGINT)))
            assert not gone(pid)
            owner.send_signal(number)
            asyncio.run(until(lambda: gone(pid)))
        finally:
            owner.kill()


# ---- frames ----


def test_messages_survive_being_cut_anywhere() -> None:
    sent = [AddRequest(request=request(1)), AbortRequest(id="r1"), AddRequest(request=request(2, top_k=2))]
    content = b"".join(map(encode_frame, sent))
    for size in (1, 3, 7, len(content)):
        frames = messages.command_frames()
        received = [each for at in range(0, len(content), size) for each in frames.feed(content[at : at + size])]
        assert received == sent


def test_a_length_that_no_message_has_is_not_waited_for() -> None:
    with pytest.raises(FrameTooLong):
        list(messages.command_frames().feed(b"\xff" * 8))


def test_an_answer_is_no_command() -> None:
    frame = encode_frame(messages.EngineReady())
    with pytest.raises(msgspec.ValidationError):
        list(messages.command_frames().feed(frame))
    assert list(messages.reply_frames().feed(frame)) == [messages.EngineReady()]
