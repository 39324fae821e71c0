"""lookup and its search API: real requests, real refusals, and a real judge."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.rl.environments.outside import DEADLINE_S, cancelled_at, connection, played, played_of

from tangram import Client, Quota, Rate
from tangram.errors import ActionLost, InvalidConfig
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments.conformance import check
from tangram.rl.environments.lookup import JUDGE, QUOTA, TABLE_NAMES, Lookup, question_of
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.environments.search_api import (
    ENTITIES,
    ENTITY_BY_NAME,
    RELATIONS,
    RelationTable,
    SearchApi,
    SlidingWindowLimiter,
)
from tangram.rl.rollout.rewards import effective_settings, make_reward
from tangram.rl.trajectories.codec import WordCodec


@asynccontextmanager
async def lookup(folder: Path, **options: Any) -> AsyncIterator[tuple[Client, SearchApi]]:
    """Without a judge."""
    async with connection(folder, "process") as client, Lookup.prepare(client, **options) as api:
        yield client, api


# ---- what can be found ----


def test_the_names_are_each_of_one_entity() -> None:
    names = [name for group in ENTITIES for name in group]
    assert len(names) == len(set(names)) == len(ENTITY_BY_NAME) == 128
    assert not set(names) & {*RELATIONS, "SEARCH", "ANS", "ask", "found", "nothing", "unknown", "over"}
    assert WordCodec(Lookup.words).size <= 63, "60 words, and three marks"
    assert len(Lookup.words) == len(set(Lookup.words))


def test_a_table_depends_on_its_seed_alone_and_every_name_of_an_entity_is_a_key() -> None:
    for seed, relation in itertools.product((0, 1, -5, 1 << 61), RELATIONS):
        for names in ENTITIES:
            answers = {RelationTable(seed).find(name, relation) for name in names}
            assert len(answers) == 1 and answers <= set(TABLE_NAMES)
    assert (
        RelationTable(0).find("unknown", "owner") is None and RelationTable(0).find(TABLE_NAMES[0], "nothing") is None
    )
    assert len({tuple(RelationTable(seed).find(name, "owner") for name in TABLE_NAMES) for seed in range(20)}) == 20


def test_the_answer_of_a_question_is_none_of_what_leads_to_it() -> None:
    for seed in range(200):
        question = question_of(seed)
        table = RelationTable(question.table)
        middle = table.find(question.start, question.relations[0])
        assert middle is not None and table.find(middle, question.relations[1]) == question.answer
        assert len({ENTITY_BY_NAME[name] for name in (question.start, middle, question.answer)}) == 3
    assert len({question_of(seed).answer for seed in range(200)}) > 30


# ---- the server ----


def test_the_rate_limiter_passes_the_configured_number_in_any_window() -> None:
    gate, chance = SlidingWindowLimiter(5, 1.0), random.Random(0)
    now, let_in = 0.0, []
    for _ in range(2000):
        now += chance.expovariate(20.0)
        wait_s = gate.acquire(now)
        assert 0.0 <= wait_s <= 1.0
        if wait_s == 0.0:
            let_in.append(now)
        else:
            assert sum(now - 1.0 < each for each in let_in) == 5, "it refuses only the excess"
    assert all(later - earlier >= 1.0 for earlier, later in zip(let_in, let_in[5:], strict=False))
    assert len(let_in) > 400


def test_the_server_finds_refuses_and_ends() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            api = SearchApi(requests_per_s=4, now=lambda: 100.0)
            async with api, aiohttp.ClientSession() as session:
                url = f"{api.url}/search"
                parameters = {"table": "7", "name": TABLE_NAMES[0], "relation": "owner"}
                async with session.get(url, params=parameters) as response:
                    assert (response.status, await response.json()) == (
                        200,
                        {"name": RelationTable(7).find(TABLE_NAMES[0], "owner")},
                    )
                for wrong, status in (({"name": "unknown"}, 404), ({"table": "x"}, 400), ({"relation": ""}, 404)):
                    async with session.get(url, params=parameters | wrong) as refused:
                        assert refused.status == status
                async with session.get(url, params=parameters) as late:
                    assert (late.status, late.headers["Retry-After"]) == (429, "1.000")
                assert (api.served, api.refused) == (4, 1)
            async with aiohttp.ClientSession() as session:
                with pytest.raises(aiohttp.ClientConnectionError):
                    await session.get(url)

    asyncio.run(main())


@pytest.mark.parametrize(("option", "value"), [("requests_per_s", 0), ("requests_per_s", 1.5), ("latency_s", -1.0)])
def test_options_that_cannot_be_meant_are_refused(option: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=option):
        SearchApi(**{"requests_per_s": 1, option: value})


async def accepts(url: str) -> bool:
    """Whether a server listens there."""
    address = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def test_a_server_whose_start_is_cancelled_is_stopped() -> None:
    async def main() -> None:
        for suspension in range(1, 10):
            api = SearchApi(requests_per_s=1)
            was_cancelled = await cancelled_at(api.__aenter__(), suspension)
            assert was_cancelled != await accepts(api.url)
            await api.__aexit__(None, None, None)
            if not was_cancelled:
                return

    asyncio.run(main())


# ---- the episode ----


def test_the_expert_looks_up_and_answers_correctly(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path) as (client, api):
            codec = WordCodec(Lookup.words)
            for seed in range(10):
                environment = Lookup(ExternalResources(client=client))
                ended, steps = await played(environment, "expert", seed, client)
                assert [step.done for step in steps] == [False, False, True] and ended.total == 1.0
                assert steps[-1].metrics == {"searches": 2.0} and steps[-1].observation == "over"
                for step in steps:
                    codec.encode_observation(step.observation, first=False)
                assert environment.evidence() == {
                    "given": question_of(seed).answer,
                    "expected": question_of(seed).answer,
                }
                await environment.close()
            assert (api.served, api.refused) == (20, 0)

    asyncio.run(main())


def test_a_search_takes_any_name_and_what_is_not_there_costs_no_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path) as (client, api):
            environment = Lookup(ExternalResources(client=client), turns=20)
            observation = await environment.reset(3)
            question = question_of(3)
            assert observation == f"ask {question.start} {' '.join(question.relations)}"
            for name in ENTITIES[ENTITY_BY_NAME[question.start]]:
                step = await environment.step(f"SEARCH {name} {question.relations[0]}")
                assert step.observation == f"found {RelationTable(question.table).find(name, question.relations[0])}"
            assert api.served == 8
            for action, answer in (
                ("SEARCH absent owner", "nothing"), (f"SEARCH {question.start} over", "nothing"), ("SEARCH", "unknown"),
                (f"SEARCH {question.start} owner rival", "unknown"), ("ANS", "unknown"), ("", "unknown"),
                (f"ANS {question.answer} please", "unknown"),
            ):  # fmt: skip
                step = await environment.step(action)
                assert (step.observation, step.done, step.reward) == (answer, False, 0.0)
            assert api.served == 8 and environment.evidence() is None
            await environment.close()

    asyncio.run(main())


def test_the_last_turn_ends_it_and_nothing_is_played_after_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path) as (client, _):
            environment = Lookup(ExternalResources(client=client), turns=1)
            await environment.reset(0)
            step = await environment.step("nonsense")
            assert (step.done, step.reward) == (True, 0.0)
            with pytest.raises(ValueError, match="the episode is over"):
                await environment.step("ANS x")
            await environment.close()

    asyncio.run(main())


def test_an_answer_that_is_an_alias_is_paid_by_the_judge_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path) as (client, _):
            question = question_of(1)
            alias = next(n for n in ENTITIES[ENTITY_BY_NAME[question.answer]] if n != question.answer)
            environment = Lookup(ExternalResources(client=client))
            await environment.reset(1)
            step = await environment.step(f"ANS {alias}")
            assert (step.done, step.reward) == (True, 0.0)
            assert environment.evidence() == {"given": alias, "expected": question.answer}
            await environment.reset(1)
            await environment.step("ANS absent")
            assert environment.evidence() is None, "what is no name needs no judge"
            await environment.close()

    asyncio.run(main())


def test_the_agents_have_the_knowledge_that_they_declare(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path) as (client, _):
            right = dict.fromkeys(Lookup.agents, 0.0)
            for agent, seed in itertools.product(Lookup.agents, range(60)):
                environment = Lookup(ExternalResources(client=client), turns=4)
                ended, _ = await played(environment, agent, seed, client)
                right[agent] += ended.total
                await environment.close()
            assert right["expert"] == 60.0 and 10.0 < right["teacher"] < 31.0 and right["random"] < 9.0

    asyncio.run(main())


def test_it_keeps_the_protocol(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path) as (client, _):
            report = await check("lookup", resources=ExternalResources(client=client))
            assert report.ok, report.text()
            assert not [finding.name for finding in report.findings if finding.verdict == "skipped"]

    asyncio.run(main())


# ---- what the API does not do ----


def test_more_than_the_api_allows_waits_and_none_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path, requests_per_s=20) as (client, api):

            async def one(seed: int) -> float:
                environment = Lookup(ExternalResources(client=client))
                ended, _ = await played(environment, "expert", seed, client)
                await environment.close()
                return ended.total

            assert sum(await asyncio.gather(*(one(seed) for seed in range(20)))) == 20.0
            assert (api.served, api.refused) == (40, 0), "twice what it allows in a second"

    asyncio.run(main())


def test_an_api_with_a_lower_rate_than_configured_refuses_and_requests_are_retried(tmp_path: Path) -> None:
    async def main() -> None:
        quota = Quota(QUOTA, concurrent=64, requests=Rate(1000, 1.0))
        async with (
            connection(tmp_path, "process", quotas=[quota]) as client,
            Lookup.prepare(client, requests_per_s=3) as api,
        ):
            assert client.transport.quota(QUOTA) == quota, "that of the user stays"
            environments = [Lookup(ExternalResources(client=client)) for _ in range(3)]
            results = await asyncio.gather(*(played(e, "expert", s, client) for s, e in enumerate(environments)))
            assert [ended.total for ended, _ in results] == [1.0] * 3
            assert api.refused > 0
            for environment in environments:
                await environment.close()

    asyncio.run(main())


def test_an_api_that_is_gone_is_an_infrastructure_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.client.api.BACKOFF_S", 0.001)

    async def main() -> None:
        async with lookup(tmp_path) as (client, _):
            environment = Lookup(ExternalResources(client=client), url="http://127.0.0.1:1")
            await environment.reset(0)
            with pytest.raises(ActionLost, match="failed after 5 tries"):
                await environment.step(f"SEARCH {TABLE_NAMES[0]} owner")
            await environment.close()

    asyncio.run(main())


def test_cancelled_wherever_it_waits_the_quota_is_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with lookup(tmp_path, concurrent=1, latency_s=0.01) as (client, _):
            for suspension in itertools.count(1):
                environment = Lookup(ExternalResources(client=client))
                await environment.reset(0)
                was_cancelled = await cancelled_at(environment.step(f"SEARCH {TABLE_NAMES[0]} owner"), suspension)
                await environment.close()
                again = Lookup(ExternalResources(client=client))
                await again.reset(0)
                step = await again.step(f"SEARCH {TABLE_NAMES[1]} owner")  # would wait without end
                assert step.observation.startswith("found ")
                if not was_cancelled:
                    assert suspension > 1
                    return

    asyncio.run(main())


# ---- what all episodes share ----


def test_outside_of_prepare_there_is_nothing_to_search_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lookup runs commands or calls: it needs a client"):
        Lookup(ExternalResources())

    async def main() -> None:
        with pytest.raises(ValueError, match="needs a client"):
            async with Lookup.prepare(None):
                raise AssertionError("it is prepared without a client")
        async with connection(tmp_path, "process") as client:
            with pytest.raises(InvalidConfig, match="turns"):
                Lookup(ExternalResources(client=client), turns=0)
            with pytest.raises(InvalidConfig, match=r"play inside `async with Lookup\.prepare"):
                await Lookup(ExternalResources(client=client)).reset(0)

    asyncio.run(main())


def test_concurrent_users_share_one_api_until_the_last_has_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            first, second = Lookup.prepare(client, requests_per_s=100), Lookup.prepare(client, requests_per_s=200)
            api, same = await asyncio.gather(first.__aenter__(), second.__aenter__())
            assert api is same
            await first.__aexit__(None, None, None)
            environment = Lookup(ExternalResources(client=client))
            ended, _ = await played(environment, "expert", 0, client)
            assert ended.total == 1.0
            await second.__aexit__(None, None, None)
            with pytest.raises(InvalidConfig, match="play inside"):
                await environment.reset(0)
            async with Lookup.prepare(client, requests_per_s=300) as another:
                assert another is not api and client.transport.quota(QUOTA).requests == Rate(300, 1.0)

    asyncio.run(main())


def test_preparing_can_be_cancelled_wherever_it_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            for suspension in itertools.count(1):
                preparing = Lookup.prepare(client)
                if not await cancelled_at(preparing.__aenter__(), suspension):
                    await preparing.__aexit__(None, None, None)
                    assert suspension > 1
                    return

    asyncio.run(main())


# ---- with the real judge ----


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this module alone; the judge is trained in it once."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_judge_pays_for_every_name_of_what_is_right_and_for_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        rewards: list[float] = []
        needs = await Lookup.needs(lambda share, _: rewards.append(share))
        async with connection(tmp_path, "process", **needs) as client, Lookup.prepare(client):
            reward = make_reward(effective_settings(Lookup, RewardSettings()), client)

            async def worth(seed: int, answer: str) -> float:
                environment = Lookup(ExternalResources(client=client))
                await environment.reset(seed)
                step = await environment.step(f"ANS {answer}")
                score = await reward.score(played_of(environment, [step], seed, client))
                await environment.close()
                return score.value

            right = wrong = last = 0.0
            for seed in range(4):
                entity = ENTITY_BY_NAME[question_of(seed).answer]
                for number, names in enumerate(ENTITIES):
                    values = await asyncio.gather(*(worth(seed, name) for name in names))
                    last += len(values) * (number != entity)
                    right += sum(values) * (number == entity)
                    wrong += sum(values) * (number != entity)
            assert right >= 31 and wrong / last <= 0.01
            assert await worth(0, "absent") == 0.0
            assert (await client.infer(JUDGE, {"given": TABLE_NAMES[0], "expected": TABLE_NAMES[0]})).json()[
                "score"
            ] == 1.0

    asyncio.run(main())
