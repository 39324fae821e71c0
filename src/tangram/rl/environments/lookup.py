"""lookup: a question over two hops, answered through a search API that allows so much and no more.

    ask bako owner rival           who is the rival of the owner of bako?
    SEARCH bako owner              found dilu
    SEARCH dilu rival              found zemo
    ANS zemo                       over

Every entity has several names, and the API writes any of them. What is right is an entity, so any of its names is a
right answer. That cannot be told by looking; a judge can tell it, a small model behind the service `judge`: the reward
that is meant is of the kind `model`. What the environment pays itself is stricter: whether the answer is, letter for
letter, the name that the last search would have found.

What all episodes share is made once, around them. The judge is a model service, which a connection has from its
beginning; the server and the quota come with `prepare`:

    async with tangram.connect(**await Lookup.needs()) as client:
        async with Lookup.prepare(client):
            environment = Lookup(Outside(client=client))
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from tangram.client.api import Api
from tangram.client.client import Client
from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.managers.models.devices import Emulated
from tangram.managers.models.service import Service
from tangram.managers.quotas.manager import Quota, Rate
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments.lookup_judge import JudgeSettings, Progress, cache_folder, have_judge
from tangram.rl.environments.protocol import MakeAgent, Outside, Step
from tangram.rl.environments.search_api import (
    ENTITIES,
    ENTITY_BY_NAME,
    RELATIONS,
    SPELLINGS,
    WINDOW_S,
    SearchApi,
    Table,
)
from tangram.runtime.orchestrator import undisturbed

log = logging.getLogger("tangram")

QUOTA, JUDGE = "search", "judge"
"""The quota and the service, as the client knows them."""
REQUESTS_PER_S, CONCURRENT = 500, 64
"""That the API allows unless it is said otherwise: more than two cores play, so that it limits only who wants that."""
ASKED_S_MAX = 10.0
"""Of one request."""
DEVICE = Emulated(memory_bytes=64 << 20)
"""For the judge, which is small and needs no GPU: a part of this machine's memory, and its cores."""
SPELLED = tuple(name for names in ENTITIES for name in names[:SPELLINGS])
"""The names that tables write and questions use."""
SEEDS = 1 << 62
"""A table has a seed of its own: who plays cannot guess it from that of the episode."""


class _Shared:
    """The search API of one client, for as long as somebody is inside `prepare`."""

    def __init__(self) -> None:
        self.api: SearchApi | None = None
        self._users = 0
        self._turn = asyncio.Lock()

    async def enter(self, client: Client, api: SearchApi, quota: Quota) -> SearchApi:
        """This one, or the one that is there already."""
        async with self._turn:
            if self.api is None:
                async with AsyncExitStack() as stack:
                    await stack.enter_async_context(api)
                    await _add_quota(client, quota)
                    stack.pop_all()
                self.api = api
            self._users += 1
            return self.api

    async def leave(self) -> None:
        async with self._turn:
            self._users -= 1
            if not self._users and self.api is not None:
                api, self.api = self.api, None
                await api.__aexit__(None, None, None)


_shared_by_client: WeakKeyDictionary[Client, _Shared] = WeakKeyDictionary()
_with_our_quota: WeakSet[Client] = WeakSet()


async def _add_quota(client: Client, quota: Quota) -> None:
    """Unless the user said what it should be. One of ours stays when its server ends: the next one replaces it."""
    try:
        client.quota(quota.name)
    except InvalidAction:
        _with_our_quota.add(client)
    if client in _with_our_quota:
        await client.add_quota(quota)


async def _hear_judge(client: Client) -> None:
    """So that it is loaded, and is the right one. Who rewards otherwise may have none."""
    one, other = ENTITIES[0][:2]
    try:
        said = (await client.infer(JUDGE, {"given": one, "expected": other})).json()
    except InvalidAction as error:
        log.warning("lookup is played without its judge: %s; tangram.connect(**await Lookup.needs()) has it", error)
        return
    if not isinstance(said, dict) or said.get("score") != 1.0:
        raise InvalidConfig(f"service {JUDGE}", said, f"a judge that knows {one} and {other}, as Lookup.needs() has it")


class Question(msgspec.Struct, frozen=True):
    """What is asked in one episode, and what is right."""

    table: int
    start: str
    relations: tuple[str, str]
    answer: str
    """One name of the entity."""


def question_of(seed: int) -> Question:
    """The answer is none of the entities on the way to it."""
    chance = random.Random(f"lookup question {seed}")
    while True:
        number = chance.randrange(SEEDS)
        table, start, relations = Table(number), chance.choice(SPELLED), (_any(chance), _any(chance))
        middle = table.find(start, relations[0])
        assert middle is not None
        answer = table.find(middle, relations[1])
        assert answer is not None
        if len({ENTITY_BY_NAME[name] for name in (start, middle, answer)}) == 3:
            return Question(number, start, relations, answer)


def _any(chance: random.Random) -> str:
    return chance.choice(RELATIONS)


class Lookup:
    """One episode: one question over one table."""

    acts_outside: ClassVar[bool] = True
    words: ClassVar[tuple[str, ...]] = (
        *SPELLED, *RELATIONS, "SEARCH", "ANS", "ask", "found", "nothing", "unknown", "over",
    )  # fmt: skip
    turns_max: int = 4
    tokens_max: ClassVar[int] = 4
    """SEARCH, a name, a relation, and the end."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda chance: Guessing(chance),
        "teacher": lambda chance: Searching(chance, knows=False),
        "expert": lambda chance: Searching(chance, knows=True),
    }
    usual_reward: ClassVar[RewardSettings] = RewardSettings(kind="model", service=JUDGE)

    def __init__(self, outside: Outside, *, url: str = "", turns: int = turns_max) -> None:
        """`url`: of another search API than that of `prepare`. Raises InvalidConfig; ValueError without a client."""
        if type(turns) is not int or turns < 1:
            raise InvalidConfig("turns", turns, "a whole number, at least 1")
        if not isinstance(url, str):
            raise InvalidConfig("url", url, "the address of a search API, or none")
        self.turns_max = turns
        self._client: Client = outside.require_client("lookup")
        self._outside = outside
        self._url = url
        self._api: Api | None = None
        self._question: Question | None = None
        self._answer: str | None = None
        self._turn = self._searches = 0
        self._over = True

    # ---- what all episodes share ----

    @classmethod
    async def needs(cls, progress: Progress | None = None) -> dict[str, Any]:
        """What a connection must be given for this task, as `tangram.connect` names it: the judge, which is trained
        here if this machine has none yet, and a device for it. Raises ManagerError."""
        folder, settings = cache_folder(), JudgeSettings(groups=ENTITIES)
        await have_judge(settings, folder, progress)
        arguments = {"settings": msgspec.to_builtins(settings), "folder": str(folder)}
        service = Service(name=JUDGE, engine="tangram.rl.model.judge:JudgeEngine", arguments=arguments)
        return {"services": [service], "devices": [DEVICE]}

    @classmethod
    @asynccontextmanager
    async def prepare(
        cls,
        client: Client | None,
        *,
        requests_per_s: int = REQUESTS_PER_S,
        concurrent: int = CONCURRENT,
        latency_s: float = 0.0,
    ) -> AsyncIterator[SearchApi]:
        """Around all episodes of a client: the search API is there, and its quota, unless the client has one of this
        name. Whoever comes while another is inside gets the same API. Raises ValueError without a client."""
        client = Outside(client=client).require_client("lookup")
        api = SearchApi(requests_per_s=requests_per_s, latency_s=latency_s)
        quota = Quota(QUOTA, concurrent=concurrent, requests=Rate(requests_per_s, WINDOW_S))
        await _hear_judge(client)
        shared = _shared_by_client.setdefault(client, _Shared())
        there = await shared.enter(client, api, quota)
        try:
            yield there
        finally:
            await undisturbed(shared.leave())

    # ---- the episode ----

    async def reset(self, seed: int) -> str:
        question = self._question = question_of(seed)
        outside, shared = self._outside, _shared_by_client.get(self._client)
        url = self._url or (shared.api.url if shared is not None and shared.api is not None else "")
        if not url:
            raise InvalidConfig("url", url, "an API to search in: play inside `async with Lookup.prepare(client):`")
        self._api = self._client.api(
            QUOTA, url, timeout_s=ASKED_S_MAX, run=outside.run, trajectory=outside.trajectory, task="lookup"
        )
        self._answer = None
        self._turn = self._searches = 0
        self._over = False
        return f"ask {question.start} {' '.join(question.relations)}"

    async def step(self, action: str) -> Step:
        if self._over:
            raise ValueError("lookup: expected a reset before this step, for the episode is over or never began")
        assert self._question is not None
        said, self._turn = "unknown", self._turn + 1
        match action.split(maxsplit=3):
            case ["SEARCH", name, relation]:
                said = await self._search(name, relation)
            case ["ANS", name]:
                self._answer = name
        self._over = self._answer is not None or self._turn == self.turns_max
        return Step(
            observation="over" if self._over else said,
            reward=float(self._answer == self._question.answer),
            done=self._over,
            metrics={"searches": float(self._searches)} if self._over else {},
        )

    async def close(self) -> None:
        self._over = True

    def evidence(self) -> dict[str, str] | None:
        """For the judge. None if there is no answer, or one that is no name at all: that needs no judge."""
        if self._question is None or self._answer not in ENTITY_BY_NAME:
            return None
        return {"given": self._answer, "expected": self._question.answer}

    async def _search(self, name: str, relation: str) -> str:
        assert self._api is not None and self._question is not None
        self._searches += 1
        if name not in ENTITY_BY_NAME or relation not in RELATIONS:
            return "nothing"  # what is found nowhere is not worth a part of the quota
        asked = {"table": str(self._question.table), "name": name, "relation": relation}
        answer = await self._api.get("search", params=asked)
        if not answer.ok:
            raise ManagerError(f"the search API answered {answer.status} {answer.text[:200]!r}", retry=False)
        found = answer.json().get("name")
        if found not in SPELLED:
            raise ManagerError(f"the search API found {found!r}, which is no name", retry=False)
        return f"found {found}"


# ---- agents -----------------------------------------------------------------------------------------------------


class Guessing:
    """Any search, or any answer."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def act(self, observation: str) -> str:
        name = self._chance.choice(SPELLED)
        return f"ANS {name}" if self._chance.random() < 0.5 else f"SEARCH {name} {_any(self._chance)}"


class Searching:
    """Searches right. Then it answers what it found last; or any name that it has seen, if it does not know better."""

    def __init__(self, chance: random.Random, *, knows: bool) -> None:
        self._chance = chance
        self._knows = knows
        self._left: list[str] = []
        self._seen: list[str] = []

    def act(self, observation: str) -> str:
        match observation.split():
            case ["ask", start, *relations]:
                self._left, self._seen = relations, [start]
                name = start
            case ["found", name]:
                self._seen.append(name)
            case _:
                name = ""
        if self._left and name:
            return f"SEARCH {name} {self._left.pop(0)}"
        return f"ANS {self._seen[-1] if self._knows else self._chance.choice(self._seen)}"
