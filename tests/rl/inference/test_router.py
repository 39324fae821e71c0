"""The router: routing, deaths, updates and the end, on scripted engines in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import msgspec
import pytest
from tests.rl.inference.conftest import Rig, a_request, at_gateway, drawn, fake, play, until, weights

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.inference.engine_supervisor import ABANDONED_MAX, REFUSED_MAX
from tangram.rl.inference.engines.fake import FakeEngine
from tangram.rl.inference.engines.protocol import (
    EngineDied,
    Generation,
    GenerationRequest,
    PolicyWeights,
    RequestRefused,
    ServerOverloaded,
)
from tangram.rl.inference.router import ABANDON_DEATHS, PREFILL_COST, Router
from tangram.rl.inference.router_records import (
    AnyRouterEvent,
    EngineLost,
    EngineRemoved,
    EngineStarted,
    EngineState,
    EngineUpdated,
    FallbackBegan,
    FallbackEnded,
    NoEngine,
    RequestAbandoned,
    RequestDropped,
    RequestResumed,
    describe_event,
)

# ---- routing ----


def test_a_task_goes_to_its_preferred_class_and_the_rest_to_the_default() -> None:
    async def test(rig: Rig) -> None:
        generations = [await rig.router.generate(a_request(task=task)) for task in ("frozenlake", "chain", "other")]
        assert [each.engine for each in generations] == ["c", "b", "b"]

    affinity = {"frozenlake": "compute", "default": "bandwidth"}
    at_gateway(test, fake("c", "compute"), fake("b", "bandwidth"), affinity=affinity)


def test_among_equals_the_one_with_the_fewest_tokens_outstanding_is_taken() -> None:
    async def test(rig: Rig) -> None:
        long = asyncio.create_task(rig.router.generate(a_request(tokens=100, tokens_max=50)))
        await until(lambda: bool(rig.engines["a"].active_requests))
        short = [await rig.router.generate(a_request()) for _ in range(3)]
        assert [each.engine for each in short] == ["b", "b", "b"]
        await long

    at_gateway(test, fake("a"), fake("b"))


def test_a_session_stays_where_its_prefix_is() -> None:
    async def test(rig: Rig) -> None:
        first = await rig.router.generate(a_request(session="s", tokens=40))
        # The other one has less to do, but not so much less.
        busy = asyncio.create_task(rig.router.generate(a_request(tokens=5, tokens_max=20)))
        await until(lambda: bool(rig.engines[first.engine].active_requests))
        second = await rig.router.generate(a_request(session="s", tokens=60))
        assert (second.engine, second.reused, second.prefilled) == (first.engine, 48, 12)
        await busy
        assert rig.router.statistics().stayed == 1

    at_gateway(test, fake("a"), fake("b"))


def test_a_session_leaves_an_engine_that_is_overloaded() -> None:
    async def test(rig: Rig) -> None:
        first = await rig.router.generate(a_request(session="s", tokens=10, tokens_max=2))
        assert first.engine == "a"
        # Its prefix has 12 tokens, and the other engine has nothing to do.
        busy = asyncio.create_task(rig.router.generate(a_request(tokens=round(PREFILL_COST * 12), tokens_max=1)))
        await until(lambda: bool(rig.engines["a"].active_requests))
        second = await rig.router.generate(a_request(session="s", tokens=20, tokens_max=1))
        assert second.engine == "b"
        assert rig.router.statistics().moved == 1
        await busy

    at_gateway(test, fake("a"), fake("b"))


def test_a_session_whose_prefix_was_lost_with_an_update_is_not_pinned_to_its_engine() -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.router.generate(a_request(session="s"))).engine == "a"
        await rig.router.update(weights(2))
        busy = asyncio.create_task(rig.router.generate(a_request(tokens=1, tokens_max=2)))
        await until(lambda: bool(rig.engines["a"].active_requests))
        assert (await rig.router.generate(a_request(session="s"))).engine == "b"
        await busy

    at_gateway(test, fake("a"), fake("b"))


def test_an_evaluation_engine_serves_only_tasks_of_its_class() -> None:
    async def test(rig: Rig) -> None:
        generations = [await rig.router.generate(a_request(task=task)) for task in ("evaluation", "chain")]
        assert [each.engine for each in generations] == ["server", "own"]

    at_gateway(
        test, fake("server", "remote", output_is_trainable=False), fake("own"), affinity={"evaluation": "remote"}
    )


# ---- falling back ----


def test_a_class_that_fails_is_replaced_visibly_until_it_is_back() -> None:
    async def test(rig: Rig) -> None:
        router, compute = rig.router, rig.engines["c"]
        compute.die("power")
        generation = await router.generate(a_request(task="frozenlake"))
        assert generation.engine == "b"
        again = await router.generate(a_request(task="frozenlake", tokens_max=1))
        assert again.engine == "b"
        assert router.statistics().fallbacks == {"frozenlake": 2}
        assert not rig.events_of(FallbackEnded)
        await until(lambda: compute.alive)
        await until(lambda: router.statistics().engines[0].state is EngineState.SERVING)
        assert (await router.generate(a_request(task="frozenlake"))).engine == "c"
        assert [(each.wanted, each.used) for each in rig.events_of(FallbackBegan)] == [("compute", "bandwidth")]
        assert [each.hardware for each in rig.events_of(FallbackEnded)] == ["compute"]

    at_gateway(test, fake("c", "compute", start_s=5.0), fake("b", "bandwidth"), affinity={"frozenlake": "compute"})


def test_training_never_falls_back_to_an_evaluation_engine() -> None:
    async def test(rig: Rig) -> None:
        rig.engines["own"].die("power")
        waiting = asyncio.create_task(rig.router.generate(a_request(task="chain")))
        result = await waiting
        assert result.engine == "own" and rig.engines["own"].completed == 1
        assert rig.events_of(FallbackBegan) == []

    at_gateway(test, fake("server", "remote", output_is_trainable=False), fake("own"), affinity={"chain": "default"})


def test_an_unknown_class_without_engines_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"nearest: compute.*comptue"):
        Router([fake("c", "compute")], affinity={"chain": "comptue"})


def test_two_engines_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="name of its own"):
        Router([fake("a"), fake("a")])


# ---- deaths ----


def test_a_request_whose_engine_dies_continues_elsewhere_from_its_tokens() -> None:
    async def test(rig: Rig) -> None:
        request = a_request(tokens=10, tokens_max=20, session="s")
        task = asyncio.create_task(rig.router.generate(request))
        await asyncio.sleep(0.55)
        rig.engines["a"].die("out of memory")
        await rig.router.update(weights(2))
        result = await task
        assert result.tokens == drawn(request)
        assert len(result.logprobs) == len(result.versions) == 20
        assert result.versions[:5] == (1,) * 5 and set(result.versions[5:]) <= {1, 2}
        assert result.finish == "length" and result.engine == "b"
        rest = rig.engines["b"].requests[-1]
        assert rest.id == request.id
        assert (len(rest.tokens), rest.sampling.tokens_max) == (15, 15)
        assert [(event.engine, event.written) for event in rig.events_of(RequestResumed)] == [("a", 5)]
        assert [(event.engine, event.requests, event.deaths) for event in rig.events_of(EngineLost)] == [("a", 1, 1)]

    at_gateway(test, fake("a"), fake("b"))


def test_a_request_whose_only_engine_dies_continues_when_it_is_back() -> None:
    async def test(rig: Rig) -> None:
        request = a_request(tokens_max=20)
        task = asyncio.create_task(rig.router.generate(request))
        await asyncio.sleep(0.55)
        rig.engines["a"].die()
        result = await task
        assert result.tokens == drawn(request)
        assert result.waiting_s > 0.0
        assert [event.incarnation for event in rig.events_of(EngineStarted)] == [1, 2]

    at_gateway(test, fake("a", start_s=3.0))


def test_an_engine_that_dies_after_the_last_token_gets_no_retry() -> None:
    class Dying:
        """Writes all and dies before it says so."""

        def __init__(self) -> None:
            self.inner = fake("a")
            self.name, self.hardware, self.output_is_trainable = "a", "default", True
            self.asked = 0

        async def generate(self, request: GenerationRequest) -> Generation:
            self.asked += 1
            generation = await self.inner.generate(request)
            raise EngineDied("a", "too late", generation)

        async def start(self, given: PolicyWeights) -> None:
            await self.inner.close()
            await self.inner.start(given)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    async def main() -> None:
        engine = Dying()
        router = Router([engine])
        await router.start(weights())
        request = a_request()
        generation = await router.generate(request)
        assert (generation.tokens, generation.finish, engine.asked) == (drawn(request), "length", 1)
        await router.close()

    play(main)


def test_an_engine_that_dies_repeatedly_is_removed_and_the_rest_serve() -> None:
    async def test(rig: Rig) -> None:
        bad = rig.engines["bad"]
        bad.refuse(starts=100)
        bad.die()
        await rig.router.generate(a_request())
        await until(lambda: bool(rig.events_of(EngineRemoved)))
        assert [event.engine for event in rig.events_of(EngineRemoved)] == ["bad"]
        assert [event.deaths for event in rig.events_of(EngineLost)] == [1, 2, 3]
        kept = rig.router.statistics().engines[0]
        assert kept.state is EngineState.REMOVED and "died 3 times" in kept.reason
        assert (await rig.router.generate(a_request())).engine == "good"

    at_gateway(test, fake("bad"), fake("good"), deaths_max=3)


def test_deaths_that_are_far_apart_do_not_remove_an_engine() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(6):
            rig.engines["a"].die()
            await rig.router.generate(a_request())
            await asyncio.sleep(200.0)
        assert rig.events_of(EngineRemoved) == []

    at_gateway(test, fake("a"), deaths_max=3, deaths_window_s=300.0)


def test_when_no_engine_remains_every_request_gets_the_reason() -> None:
    async def test(rig: Rig) -> None:
        waiting = [asyncio.create_task(rig.router.generate(a_request(tokens_max=50))) for _ in range(5)]
        await asyncio.sleep(0.3)
        for engine in rig.engines.values():
            engine.refuse(starts=100)
            engine.die("power")
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, NoEngine) and "no start, as scripted" in str(each) for each in results)
        with pytest.raises(NoEngine, match="no engine is left for task default"):
            await rig.router.generate(a_request())
        with pytest.raises(NoEngine):
            await rig.router.update(weights(2))

    at_gateway(test, fake("a"), fake("b"))


def test_a_start_at_which_every_engine_fails_reports_why_and_leaves_nothing() -> None:
    async def main() -> None:
        engine = fake("a")
        engine.refuse(starts=100)
        router = Router([engine])
        with pytest.raises(NoEngine, match=r"no engine started: a \(default\): died 3 times"):
            await router.start(weights())
        with pytest.raises(NoEngine, match="closed"):
            await router.generate(a_request())

    play(main)


def test_an_engine_that_hangs_and_notices_it_costs_only_time() -> None:
    async def test(rig: Rig) -> None:
        request = a_request(tokens_max=20)
        task = asyncio.create_task(rig.router.generate(request))
        await asyncio.sleep(0.35)
        rig.engines["a"].hang(notice_s=30.0)
        assert (await task).tokens == drawn(request)

    at_gateway(test, fake("a"), fake("b"))


def test_a_request_is_not_blamed_for_an_engine_that_died_idle() -> None:
    async def test(rig: Rig) -> None:
        for engine in rig.engines.values():
            engine.die("power")
        request = a_request()
        assert (await rig.router.generate(request)).tokens == drawn(request)

    at_gateway(test, *(fake(f"e{number}") for number in range(ABANDON_DEATHS + 2)))


# ---- poison ----


def poisonous(request: GenerationRequest) -> bool:
    return request.task == "poison"


def poisoned(rig: Rig) -> asyncio.Task[None]:
    """Kills each engine a moment after a poisonous request came in."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.05)
            for engine in rig.engines.values():
                ids = {request.id for request in engine.requests if poisonous(request)}
                if ids & set(engine.active_requests):
                    engine.die("a bad token")

    return asyncio.create_task(watch())


@pytest.mark.parametrize("engines", [1, 2, 5])
def test_only_the_request_that_kills_engines_is_given_up(engines: int) -> None:
    async def test(rig: Rig) -> None:
        watch = poisoned(rig)
        innocent = [a_request(tokens_max=30) for _ in range(6)]
        tasks = [asyncio.create_task(rig.router.generate(request)) for request in innocent]
        await asyncio.sleep(0.2)
        poison = a_request(tokens_max=30, task="poison")
        with pytest.raises(RequestAbandoned, match=rf"{poison.id} was inside 3 engines when they died") as given_up:
            await rig.router.generate(poison)
        assert given_up.value.request == poison.id
        results = await asyncio.gather(*tasks)
        assert [each.tokens for each in results] == [drawn(request) for request in innocent]
        assert [event.request for event in rig.events_of(RequestDropped)] == [poison.id]
        watch.cancel()
        assert rig.events_of(EngineRemoved) == [], "its deaths do not count against the engines"
        await until(lambda: all(kept.state is EngineState.SERVING for kept in rig.router.statistics().engines))

    at_gateway(test, *(fake(f"e{number}") for number in range(engines)), deaths_max=3)


def test_an_engine_that_dies_of_every_request_is_removed_though_it_starts_well_each_time() -> None:
    async def test(rig: Rig) -> None:
        watch = poisoned(rig)
        requests = [a_request(tokens_max=30, task="poison") for _ in range(40)]
        results = await asyncio.gather(*map(rig.router.generate, requests), return_exceptions=True)
        watch.cancel()
        given_up = [each for each in results if isinstance(each, RequestAbandoned)]
        assert len(given_up) == ABANDONED_MAX
        assert sum(isinstance(each, NoEngine) for each in results) == len(requests) - ABANDONED_MAX
        (removed,) = rig.events_of(EngineRemoved)
        assert "and completed no request; the last time: engine a: a bad token" in removed.reason
        assert len(rig.events_of(EngineLost)) <= ABANDONED_MAX + ABANDON_DEATHS

    at_gateway(test, fake("a"), deaths_max=3)


def test_requests_that_kill_an_engine_which_serves_requests_in_between_do_not_remove_it() -> None:
    async def test(rig: Rig) -> None:
        watch = poisoned(rig)
        for _ in range(2 * ABANDONED_MAX):
            with pytest.raises(RequestAbandoned):
                await rig.router.generate(a_request(tokens_max=30, task="poison"))
            await rig.router.generate(a_request(tokens_max=2))
        watch.cancel()
        assert rig.events_of(EngineRemoved) == []

    at_gateway(test, fake("a"), deaths_max=3)


class Crowded(FakeEngine):
    """Has no free slot, and refuses one of the requests late."""

    async def generate(self, request: GenerationRequest) -> Generation:
        if request.task != "told":
            return await super().generate(request)
        await asyncio.sleep(500.0)
        raise ServerOverloaded(self.name, "no place", None)


def test_an_engine_without_completed_requests_is_removed_however_rarely_it_dies() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(NoEngine, match=r"died 3 times and completed no request; the last time: engine a: no place"):
            await rig.router.generate(a_request(task="told"))

    at_gateway(test, Crowded(drawn, name="a"), deaths_max=3, deaths_window_s=300.0)


def test_deaths_of_a_busy_engine_do_not_count_against_requests() -> None:
    async def test(rig: Rig) -> None:
        requests = [a_request(task=task, tokens_max=100_000) for task in ("told", "other", "other")]
        results = await asyncio.gather(*map(rig.router.generate, requests), return_exceptions=True)
        assert all(isinstance(each, NoEngine) for each in results), results
        assert len(rig.events_of(EngineLost)) == 4 and rig.events_of(RequestDropped) == []

    at_gateway(test, Crowded(drawn, name="a", token_s=1.0), deaths_max=4)


class Choosy(FakeEngine):
    """Refuses what is of task `refused`, and lives."""

    async def generate(self, request: GenerationRequest) -> Generation:
        if request.task == "refused":
            await asyncio.sleep(0.1)
            raise RequestRefused(self.name, "it said 500: no")
        return await super().generate(request)


def test_an_engine_that_refuses_every_request_is_removed() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3 * REFUSED_MAX):
            with pytest.raises(RequestRefused):
                await rig.router.generate(a_request(task="refused"))
        with pytest.raises(NoEngine, match=rf"it refused {REFUSED_MAX} requests in a row and served none.*500: no"):
            await rig.router.generate(a_request(task="refused"))

    at_gateway(test, Choosy(drawn, name="a"), deaths_max=3)


def test_an_engine_that_serves_requests_may_refuse_any_number() -> None:
    async def test(rig: Rig) -> None:
        for number in range(5 * REFUSED_MAX):
            with pytest.raises(RequestRefused):
                await rig.router.generate(a_request(task="refused"))
            if number % (REFUSED_MAX - 1) == 0:
                await rig.router.generate(a_request(tokens_max=1))
        assert rig.events_of(EngineLost) == []

    at_gateway(test, Choosy(drawn, name="a"))


# ---- aborts ----


def test_cancelling_a_request_reaches_its_engine_and_no_other_request() -> None:
    async def test(rig: Rig) -> None:
        kept, left = a_request(tokens_max=20), a_request(tokens_max=20)
        tasks = [asyncio.create_task(rig.router.generate(request)) for request in (kept, left)]
        await asyncio.sleep(0.25)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], Generation) and results[0].tokens == drawn(kept)
        assert isinstance(results[1], asyncio.CancelledError)
        assert rig.engines["a"].aborted == 1
        statistics = rig.router.statistics()
        assert (statistics.served, statistics.cancelled, statistics.failed) == (1, 1, 0)

    at_gateway(test, fake("a"))


def test_a_request_can_be_cancelled_while_it_waits_for_an_engine() -> None:
    async def test(rig: Rig) -> None:
        rig.engines["a"].die()
        task = asyncio.create_task(rig.router.generate(a_request()))
        await asyncio.sleep(1.0)
        assert rig.router.statistics().waiting == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.router.statistics().waiting == 0

    at_gateway(test, fake("a", start_s=60.0))


def test_an_id_that_is_being_served_is_refused() -> None:
    async def test(rig: Rig) -> None:
        request = a_request()
        task = asyncio.create_task(rig.router.generate(request))
        await asyncio.sleep(0.0)
        with pytest.raises(InvalidInput, match="being served already"):
            await rig.router.generate(request)
        await task
        assert (await rig.router.generate(request)).tokens == drawn(request)

    at_gateway(test, fake("a"))


# ---- updates ----


def test_an_update_changes_the_version_in_the_middle_of_a_request() -> None:
    async def test(rig: Rig) -> None:
        task = asyncio.create_task(rig.router.generate(a_request(tokens_max=10)))
        await asyncio.sleep(0.45)
        await rig.router.update(weights(2))
        result = await task
        assert result.versions == (1,) * 4 + (2,) * 6
        assert [event.version for event in rig.events_of(EngineUpdated)] == [2]
        assert rig.router.statistics().version == 2

    at_gateway(test, fake("a", update_s=5.0))


def test_a_slow_engine_does_not_delay_the_rest() -> None:
    async def test(rig: Rig) -> None:
        update = asyncio.create_task(rig.router.update(weights(2)))
        await until(lambda: bool(rig.events_of(EngineUpdated)))
        assert not rig.engines["fast"].suspended and rig.engines["slow"].suspended and not update.done()
        await update
        assert [event.engine for event in rig.events_of(EngineUpdated)] == ["fast", "slow"]
        assert rig.events_of(EngineUpdated)[0].took_s < 2.0

    at_gateway(test, fake("fast", update_s=1.0), fake("slow", update_s=50.0))


def test_an_engine_that_refuses_accepted_weights_is_restarted_with_them() -> None:
    async def test(rig: Rig) -> None:
        request = a_request(tokens_max=30)
        task = asyncio.create_task(rig.router.generate(request))
        await until(lambda: bool(rig.engines["a"].active_requests))
        rig.engines["a"].refuse(updates=1)
        await rig.router.update(weights(2))
        await until(lambda: rig.engines["a"].alive and rig.engines["a"].version == 2)
        result = await task
        assert result.tokens == drawn(request)
        assert [event.engine for event in rig.events_of(EngineLost)] == ["a"]
        assert "no update" in rig.events_of(EngineLost)[0].reason

    at_gateway(test, fake("a"), fake("b", update_s=3.0))


@pytest.mark.parametrize("count", [1, 3])
def test_weights_that_no_engine_accepts_are_reported_and_all_continue_with_the_previous_ones(count: int) -> None:
    async def test(rig: Rig) -> None:
        request = a_request(tokens_max=30)
        task = asyncio.create_task(rig.router.generate(request))
        await asyncio.sleep(0.25)
        for engine in rig.engines.values():
            engine.refuse(updates=1)
        with pytest.raises(
            ManagerError, match=r"no engine applied version 9.*continue with version 1.*e0: .*no update"
        ) as caught:
            await rig.router.update(weights(9))
        assert all(f"{name}: " in str(caught.value) for name in rig.engines)
        result = await task
        assert (result.tokens, set(result.versions)) == (drawn(request), {1})
        assert rig.events_of(EngineLost) == []
        statistics = rig.router.statistics()
        assert (statistics.version, {kept.version for kept in statistics.engines}) == (1, {1})
        rig.engines["e0"].die()
        await rig.router.update(weights(2))
        assert {kept.version for kept in rig.router.statistics().engines if kept.state is EngineState.SERVING} == {2}

    at_gateway(test, *(fake(f"e{number}", update_s=float(number)) for number in range(count)))


def test_an_engine_that_starts_after_refused_weights_gets_those_before() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(ManagerError, match="no engine applied version 9"):
            await rig.router.update(weights(9))
        rig.engines["a"].die()
        assert (await rig.router.generate(a_request())).versions == (1,) * 8
        # Also if no engine serves when they arrive.
        rig.engines["a"].die()
        waiting = asyncio.create_task(rig.router.generate(a_request()))
        await until(lambda: rig.router.statistics().engines[0].state is EngineState.DOWN)
        with pytest.raises(ManagerError, match="no engine applied version 9"):
            await rig.router.update(weights(9))
        assert (await waiting).versions == (1,) * 8
        assert rig.router.statistics().version == 1

    at_gateway(test, Missing("a", missing=9), deaths_max=50)


class Missing(FakeEngine):
    """The folder of one version is not there."""

    def __init__(self, name: str, missing: int) -> None:
        super().__init__(drawn, name=name, token_s=0.1)
        self._missing = missing

    async def start(self, weights: PolicyWeights) -> None:
        self._require(weights)
        await super().start(weights)

    async def update(self, weights: PolicyWeights) -> None:
        self._require(weights)
        await super().update(weights)

    def _require(self, weights: PolicyWeights) -> None:
        if weights.version == self._missing:
            raise ManagerError(f"{weights.folder}: no such file")


def test_an_engine_that_hangs_in_an_update_is_restarted_with_the_new_weights() -> None:
    async def test(rig: Rig) -> None:
        request = a_request(tokens_max=30)
        task = asyncio.create_task(rig.router.generate(request))
        await asyncio.sleep(0.25)
        rig.engines["a"].hang()
        await rig.router.update(weights(2))
        assert (await task).tokens == drawn(request)
        assert rig.engines["a"].version == 2
        assert "within 10 s" in rig.events_of(EngineLost)[0].reason

    at_gateway(test, fake("a"), update_s_max=10.0)


def test_deaths_by_updates_are_not_blamed_on_requests() -> None:
    async def test(rig: Rig) -> None:
        request = a_request(tokens_max=200)
        task = asyncio.create_task(rig.router.generate(request))
        for version in range(2, 7):
            await asyncio.sleep(1.0)
            for engine in rig.engines.values():
                if engine.active_requests:
                    engine.refuse(updates=1)
            await rig.router.update(weights(version))
            await until(lambda: all(kept.version == version for kept in rig.router.statistics().engines))  # noqa: B023
        assert (await task).tokens == drawn(request)
        assert len(rig.events_of(EngineLost)) == 5 > ABANDON_DEATHS

    at_gateway(test, fake("a"), fake("b"), deaths_max=50)


def test_of_two_updates_the_later_one_wins() -> None:
    async def test(rig: Rig) -> None:
        updates = [asyncio.create_task(rig.router.update(weights(version))) for version in (2, 3, 4)]
        await asyncio.gather(*updates)
        assert {engine.version for engine in rig.engines.values()} == {4}
        # Versions in between were left out, or overtaken.
        assert all(event.version in (2, 4) for event in rig.events_of(EngineUpdated))

    at_gateway(test, fake("a", update_s=1.0), fake("b", update_s=7.0))


def test_weights_are_rolled_back_only_on_request() -> None:
    async def test(rig: Rig) -> None:
        await rig.router.update(weights(9))
        with pytest.raises(InvalidConfig, match="rollback=True"):
            await rig.router.update(weights(8))
        assert rig.engines["a"].version == rig.router.statistics().version == 9
        await rig.router.update(weights(8), rollback=True)
        assert rig.engines["a"].version == rig.router.statistics().version == 8

    at_gateway(test, fake("a"))


def test_an_engine_that_restarts_during_an_update_serves_only_the_newest_weights() -> None:
    async def test(rig: Rig) -> None:
        rig.engines["a"].die()
        waiting = asyncio.create_task(rig.router.generate(a_request()))
        await until(lambda: rig.router.statistics().engines[0].state is EngineState.STARTING)
        await asyncio.sleep(1.0)
        await rig.router.update(weights(2))
        await rig.router.update(weights(3))
        assert (await waiting).versions == (3,) * 8

    at_gateway(test, fake("a", start_s=5.0, update_s=2.0))


# ---- the end ----


def test_closing_ends_all_requests() -> None:
    async def main() -> None:
        rig = Rig(fake("a"), fake("b", "other", start_s=100.0), affinity={"x": "other"})
        starting = asyncio.create_task(rig.router.start(weights()))
        await asyncio.sleep(1.0)
        inside = asyncio.create_task(rig.router.generate(a_request(tokens_max=100)))
        update = asyncio.create_task(rig.router.update(weights(2)))
        await asyncio.sleep(0.5)
        rig.engines["a"].hang()
        third = asyncio.create_task(rig.router.update(weights(3)))
        await asyncio.sleep(0.5)
        await rig.router.close()
        await rig.router.close()
        results = await asyncio.gather(starting, inside, update, third, return_exceptions=True)
        assert isinstance(results[1], NoEngine) and "closed" in str(results[1])
        assert isinstance(results[3], NoEngine)
        assert {kept.state for kept in rig.router.statistics().engines} == {EngineState.CLOSED}
        rig.check_idle()

    play(main)


def test_a_listener_that_fails_affects_nothing() -> None:
    async def main() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))

        def listener(event: object) -> None:
            raise RuntimeError("no paper")

        router = Router([fake("a")], on_event=listener)
        await router.start(weights())
        request = a_request()
        assert (await router.generate(request)).tokens == drawn(request)
        await router.close()
        assert len(faults) == 1

    with asyncio.Runner() as runner:
        runner.run(main())


def test_errors_of_a_request_reach_its_caller() -> None:
    class Choosy:
        def __init__(self) -> None:
            self.inner = fake("a")
            self.name, self.hardware, self.output_is_trainable = "a", "default", True

        async def generate(self, request: GenerationRequest) -> Generation:
            raise InvalidInput("tokens", len(request.tokens), "fewer")

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    async def main() -> None:
        router = Router([Choosy()])
        await router.start(weights())
        with pytest.raises(InvalidInput, match="expected fewer"):
            await router.generate(a_request())
        statistics = router.statistics()
        assert (statistics.failed, statistics.engines[0].state, statistics.engines[0].load) == (
            1,
            EngineState.SERVING,
            0,
        )
        await router.close()

    play(main)


def test_no_engine_is_a_failure_of_the_world() -> None:
    assert issubclass(NoEngine, ManagerError) and issubclass(RequestAbandoned, ManagerError)


# ---- events ----


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            EngineLost(at_s=0.0, engine="a", reason="it ended with\nsignal 9", requests=1, deaths=2),
            "engine a was lost with 1 request inside and is restarted (death 2): it ended with signal 9.",
        ),
        (EngineRemoved(at_s=0.0, engine="a", reason="died 3 times."), "engine a is removed: died 3 times."),
        (
            FallbackBegan(at_s=0.0, task="chain", wanted="compute", used="bandwidth"),
            "task chain falls back to bandwidth, since no engine of class compute serves.",
        ),
        (FallbackEnded(at_s=0.0, task="chain", hardware="compute"), "task chain is served by class compute again."),
    ],
)
def test_an_event_is_one_sentence(event: AnyRouterEvent, sentence: str) -> None:
    assert describe_event(event) == sentence


def test_every_event_has_a_sentence() -> None:
    example: dict[type, Any] = {float: 1.5, int: 2, str: "x"}
    for kind in get_args(AnyRouterEvent):
        fields = {field.name: example[field.type] for field in msgspec.structs.fields(kind)}
        text = describe_event(kind(**fields))
        assert text.endswith(".") and "\n" not in text
