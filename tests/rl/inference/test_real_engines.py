"""The router on real engines in processes of their own: what is killed goes on, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.rl.inference.conftest import a_request

from tangram.bench import affinity as bench
from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.affinity import HARDWARE_BY_CLASS
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.inference.router import Router
from tangram.rl.inference.router_records import AnyRouterEvent, EngineLost

DEADLINE_S = 180.0
STEP_S = 0.05
"""Slow enough to be killed in the middle."""


def published(folder: Path, version: int, seed: int) -> PolicyWeights:
    pytest.importorskip("torch")
    from tangram.rl.model.transformer import Transformer, small_config
    from tangram.rl.model.weight_store import publish

    config = small_config(50, layers=1, width=32, heads=2, context_max=128)
    return publish(Transformer.new(config, seed), config, str(folder), version)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def decoding(engine: ProcessEngine) -> None:
    """Until the engine has written some tokens of the requests that it has now."""
    await until(lambda: engine.statistics().active > 0)
    steps = engine.statistics().steps
    await until(lambda: engine.statistics().steps >= steps + 10)


def with_engines(
    count: int,
    test: Callable[[Router, list[ProcessEngine], list[AnyRouterEvent]], Awaitable[None]],
    weights: PolicyWeights,
) -> None:
    async def main() -> None:
        settings = EngineSettings(count=count, context_max=128, decode_s_per_step=STEP_S)
        # 64 bits, so that another batch does not round a token into another one.
        engines = [ProcessEngine(settings, number, dtype="float64") for number in range(count)]
        events: list[AnyRouterEvent] = []
        router = Router(engines, on_event=events.append)
        async with asyncio.timeout(DEADLINE_S):
            await router.start(weights)
            try:
                await test(router, engines, events)
                statistics = router.statistics()
                assert statistics.requests == 0 and all(kept.load == 0 for kept in statistics.engines)
            finally:
                await router.close()
        assert not any(engine.alive for engine in engines)

    asyncio.run(main())


def test_what_is_killed_in_the_middle_goes_on_token_for_token(tmp_path: Path) -> None:
    async def test(router: Router, engines: list[ProcessEngine], events: list[AnyRouterEvent]) -> None:
        requests = [a_request(tokens=5 + number, tokens_max=60, session=f"s{number}", stop=()) for number in range(4)]
        undisturbed = await asyncio.gather(*(router.generate(request) for request in requests))
        await until(lambda: not any(engine.statistics().active for engine in engines))
        tasks = [asyncio.create_task(router.generate(request)) for request in requests]
        await until(lambda: sum(kept.requests for kept in router.statistics().engines) == 4)
        await decoding(engines[0])
        os.kill(engines[0].pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert [each.tokens for each in results] == [each.tokens for each in undisturbed]
        for before, after in zip(undisturbed, results, strict=True):
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-9)
        assert router.statistics().resumed >= 1
        assert [event.engine for event in events if isinstance(event, EngineLost)] == [engines[0].name]
        await until(lambda: all(kept.state == "serving" for kept in router.statistics().engines))
        again = await asyncio.gather(*(router.generate(request) for request in requests))
        assert [each.tokens for each in again] == [each.tokens for each in undisturbed]

    with_engines(2, test, published(tmp_path, 1, seed=1))


def test_an_engine_that_is_killed_during_an_update_comes_back_with_the_new_weights(tmp_path: Path) -> None:
    first, second = published(tmp_path, 1, seed=1), published(tmp_path, 2, seed=2)

    async def test(router: Router, engines: list[ProcessEngine], events: list[AnyRouterEvent]) -> None:
        task = asyncio.create_task(router.generate(a_request(tokens_max=80, stop=())))
        await until(lambda: router.statistics().engines[0].requests == 1)
        await decoding(engines[0])
        update = asyncio.create_task(router.update(second))
        os.kill(engines[0].pid, signal.SIGKILL)
        await update
        result = await task
        assert len(result.tokens) == 80 and list(result.versions) == sorted(result.versions)
        assert result.versions[-1] == 2
        assert (await router.generate(a_request(tokens_max=2, stop=()))).versions == (2, 2)

    with_engines(1, test, first)


def test_missing_weights_cost_no_request_anything(tmp_path: Path) -> None:
    async def test(router: Router, engines: list[ProcessEngine], events: list[AnyRouterEvent]) -> None:
        tasks = [asyncio.create_task(router.generate(a_request(tokens_max=60, stop=()))) for _ in range(4)]
        await until(lambda: sum(kept.requests for kept in router.statistics().engines) == 4)
        incarnations = [engine.pid for engine in engines]
        with pytest.raises(ManagerError, match=r"no engine applied version 9.*/nonexistent/manifest.json"):
            await router.update(PolicyWeights(version=9, folder="/nonexistent"))
        results = await asyncio.gather(*tasks)
        assert {version for each in results for version in each.versions} == {1}
        assert router.statistics().version == 1
        assert [engine.pid for engine in engines] == incarnations
        assert not any(isinstance(event, EngineLost) for event in events)

    with_engines(2, test, published(tmp_path, 1, seed=1))


# ---- the benchmark ----


def test_the_fleets_of_the_benchmark_cost_about_the_same_and_differ_as_published() -> None:
    costs = [bench.cost(fleet) for fleet in bench.FLEETS]
    assert max(costs) / min(costs) < 1.06
    compute, bandwidth = (bench.engine_settings(bench.FULL, name, 1) for name in HARDWARE_BY_CLASS)
    assert bandwidth.prefill_s_per_token / compute.prefill_s_per_token == pytest.approx(989.5 / 148.0)
    assert bandwidth.decode_s_per_step / compute.decode_s_per_step == pytest.approx(3.35 / 4.0)
    assert bench.draw_work(bench.FULL, 1) == bench.draw_work(bench.FULL, 1) != bench.draw_work(bench.FULL, 2)
