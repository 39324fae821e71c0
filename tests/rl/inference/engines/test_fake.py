"""The fake engine keeps the contract of engines."""

from __future__ import annotations

import asyncio

import pytest
from tests.rl.inference.conftest import STOP, a_request, drawn, fake, play, weights

from tangram.errors import ManagerError
from tangram.rl.inference.engines.fake import FakeEngine, text_script
from tangram.rl.inference.engines.protocol import EngineDied, GenerationRequest, Sampling, SamplingSeed
from tangram.rl.trajectories.codec import WordCodec


def test_the_fake_engine_generates_the_script_token_by_token() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = fake(token_s=0.5, prefill_s_per_token=0.01)
        await engine.start(weights(3))
        request = a_request(tokens=100, tokens_max=4)
        began_s = loop.time()
        generation = await engine.generate(request)
        assert loop.time() - began_s == pytest.approx(1.0 + 4 * 0.5, abs=1e-3)
        assert (generation.tokens, generation.versions, generation.prefilled) == (drawn(request), (3,) * 4, 100)
        assert (generation.prefill_s, generation.decode_s) == (pytest.approx(1.0), pytest.approx(2.0))

    play(main)


def test_it_stops_at_a_token_that_ends_an_action() -> None:
    async def main() -> None:
        engine = FakeEngine(lambda request: (5, 6, STOP))
        await engine.start(weights())
        generation = await engine.generate(a_request(tokens_max=9))
        assert (generation.tokens, generation.finish) == ((5, 6, STOP), "stop")
        assert (await engine.generate(a_request(tokens_max=2))).finish == "length"

    play(main)


def test_a_session_is_read_once_until_the_weights_change() -> None:
    async def main() -> None:
        engine = fake()
        await engine.start(weights())
        turns = [a_request(session="s", tokens=tokens, tokens_max=5) for tokens in (10, 20, 30)]
        generations = [await engine.generate(turn) for turn in turns[:2]]
        await engine.update(weights(2))
        generations.append(await engine.generate(turns[2]))
        assert [(each.prefilled, each.reused) for each in generations] == [(10, 0), (5, 15), (30, 0)]

    play(main)


def test_what_is_being_written_waits_while_it_is_suspended_and_is_read_again_after_an_update() -> None:
    async def main() -> None:
        engine = fake(token_s=1.0)
        await engine.start(weights())
        request = a_request(tokens=10, tokens_max=4)
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(2.5)
        await engine.suspend()
        other = asyncio.create_task(engine.generate(a_request(tokens_max=1)))
        await asyncio.sleep(100.0)
        assert not task.done() and not other.done() and len(engine.active_requests) == 2
        await engine.update(weights(2))
        await engine.resume()
        result = await task
        assert (result.tokens, result.versions, result.prefilled) == (drawn(request), (1, 1, 2, 2), 22)
        assert (await other).versions == (2,)
        assert engine.statistics().suspended_s == pytest.approx(100.0, abs=0.01)

    play(main)


def test_when_it_dies_each_request_gets_the_tokens_generated_so_far() -> None:
    async def main() -> None:
        engine = fake(token_s=1.0)
        await engine.start(weights())
        requests = [a_request(tokens_max=10) for _ in range(3)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(3.5)
        engine.die("power")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for request, died in zip(requests, results, strict=True):
            assert isinstance(died, EngineDied) and died.written is not None and "power" in str(died)
            assert died.written.tokens == drawn(request)[:3]
        with pytest.raises(EngineDied, match="is not running"):
            await engine.generate(a_request())
        await engine.start(weights(2))
        assert (await engine.generate(a_request(tokens_max=1))).versions == (2,)

    play(main)


def test_it_hangs_until_that_is_detected_or_it_is_closed() -> None:
    async def main() -> None:
        engine = fake()
        await engine.start(weights())
        engine.hang(notice_s=10.0)
        with pytest.raises(EngineDied, match="stopped responding"):
            await engine.generate(a_request())
        await engine.start(weights())
        engine.hang()
        stuck = [asyncio.create_task(engine.update(weights(2))), asyncio.create_task(engine.generate(a_request()))]
        await asyncio.sleep(1000.0)
        assert not any(task.done() for task in stuck)
        await engine.close()
        results = await asyncio.gather(*stuck, return_exceptions=True)
        assert [type(each) for each in results] == [EngineDied, EngineDied]

    play(main)


def test_it_refuses_as_often_as_configured() -> None:
    async def main() -> None:
        engine = fake()
        engine.refuse(starts=1)
        with pytest.raises(ManagerError, match="no start"):
            await engine.start(weights())
        await engine.start(weights())
        engine.refuse(updates=1)
        with pytest.raises(ManagerError, match="no update"):
            await engine.update(weights(2))
        assert engine.version == 1
        await engine.update(weights(2))
        assert engine.version == 2

    play(main)


def test_a_whole_text_goes_on_in_another_engine() -> None:
    async def main() -> None:
        codec = WordCodec(["go", "left", "right"])
        answer = text_script(codec, lambda request: "go left go right")
        engines = [FakeEngine(answer, name=name, token_s=1.0) for name in ("a", "b")]
        for engine in engines:
            await engine.start(weights())
        tokens = codec.encode_observation("left", first=True)
        sampling = Sampling(tokens_max=10, stop=codec.stop)
        request = GenerationRequest(id="r", tokens=tokens, sampling=sampling, noise=SamplingSeed(seed=1))
        task = asyncio.create_task(engines[0].generate(request))
        await asyncio.sleep(2.5)
        engines[0].die()
        with pytest.raises(EngineDied) as died:
            await task
        assert died.value.written is not None
        first = died.value.written.tokens
        rest = GenerationRequest(id="r", tokens=(*tokens, *first), sampling=sampling, noise=SamplingSeed(seed=1))
        second = await engines[1].generate(rest)
        assert codec.decode_action(first) == "go left" and codec.decode_action(second.tokens) == "go right"
        assert second.finish == "stop"

    play(main)
