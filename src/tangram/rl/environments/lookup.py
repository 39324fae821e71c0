"""lookup: a question over two hops, answered through a rate-limited search API.

    ask bako owner rival           who is the rival of the owner of bako?
    SEARCH bako owner              found dilu
    SEARCH dilu rival              found zemo
    ANS zemo                       over

Every entity has several names, and the API uses any of them. The correct answer is an entity, so any of its names is
correct. Names do not show which of them belong together; a judge, a small model behind the service `judge`, decides
that: the intended reward is of kind `model`. The environment's own reward is stricter: whether the answer is literally
the name that the last search would have returned.

Shared resources are created once, around all episodes. The judge is a model service of the connection; `prepare` starts
the server and adds the quota:

    async with tangram.connect(**await Lookup.needs()) as client:
        async with Lookup.prepare(client):
            environment = Lookup(ExternalResources(client=client))
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

from tangram.cancellation import run_to_completion
from tangram.client.api import Api
from tangram.client.client import Client
from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.managers.models.devices import Emulated
from tangram.managers.models.service import Service
from tangram.managers.quotas.manager import Quota, Rate
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments.lookup_judge import JudgeSettings, Progress, cache_folder, ensure_judge
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step
from tangram.rl.environments.search_api import (
    ENTITIES,
    ENTITY_BY_NAME,
    RELATIONS,
    SPELLINGS,
    WINDOW_S,
    RelationTable,
    SearchApi,
)

log = logging.getLogger("tangram")

QUOTA, JUDGE = "search", "judge"
"""Names of quota and service in the client."""
REQUESTS_PER_S, CONCURRENT = 500, 64
"""Default limits of the API: more than two cores can use, so that it limits only runs that configure less."""
REQUEST_S_MAX = 10.0
"""Time limit of one request."""
DEVICE = Emulated(memory_bytes=64 << 20)
"""Resources of the judge, which is small and needs no GPU: part of this machine's memory, and its cores."""
TABLE_NAMES = tuple(name for names in ENTITIES for name in names[:SPELLINGS])
"""The names that tables and questions use."""
SEEDS = 1 << 62
"""A table has its own seed, which the agent cannot derive from that of the episode."""


class _SharedSearchApi:
    """The search API of one client, shared by all users of `prepare`."""

    def __init__(self) -> None:
        self.api: SearchApi | None = None
        self._users = 0
        self._lock = asyncio.Lock()

    async def enter(self, client: Client, api: SearchApi, quota: Quota) -> SearchApi:
        """Returns the running API, or starts this one."""
        async with self._lock:
            if self.api is None:
                async with AsyncExitStack() as stack:
                    await stack.enter_async_context(api)
                    await _add_quota(client, quota)
                    stack.pop_all()
                self.api = api
            self._users += 1
            return self.api

    async def leave(self) -> None:
        async with self._lock:
            self._users -= 1
            if not self._users and self.api is not None:
                api, self.api = self.api, None
                await api.__aexit__(None, None, None)


_shared_by_client: WeakKeyDictionary[Client, _SharedSearchApi] = WeakKeyDictionary()
_clients_with_own_quota: WeakSet[Client] = WeakSet()


async def _add_quota(client: Client, quota: Quota) -> None:
    """Adds the quota unless the user configured one. Our own quota outlives its server; the next one replaces it."""
    try:
        client.quota(quota.name)
    except InvalidAction:
        _clients_with_own_quota.add(client)
    if client in _clients_with_own_quota:
        await client.add_quota(quota)


async def _require_judge(client: Client) -> None:
    """Loads the judge and checks that it is the right one. A client with another reward may have none."""
    one, other = ENTITIES[0][:2]
    try:
        reply = (await client.infer(JUDGE, {"given": one, "expected": other})).json()
    except InvalidAction as error:
        log.warning("lookup is played without its judge: %s; tangram.connect(**await Lookup.needs()) has it", error)
        return
    if not isinstance(reply, dict) or reply.get("score") != 1.0:
        raise InvalidConfig(
            f"service {JUDGE}", reply, f"a judge that knows {one} and {other}, as Lookup.needs() has it"
        )


class LookupQuestion(msgspec.Struct, frozen=True):
    """The question of one episode, and its answer."""

    table: int
    start: str
    relations: tuple[str, str]
    answer: str
    """One name of the entity."""


def question_of(seed: int) -> LookupQuestion:
    """The answer is no entity on the path to it."""
    rng = random.Random(f"lookup question {seed}")
    while True:
        number = rng.randrange(SEEDS)
        table, start, relations = (
            RelationTable(number),
            rng.choice(TABLE_NAMES),
            (_random_relation(rng), _random_relation(rng)),
        )
        middle = table.find(start, relations[0])
        assert middle is not None
        answer = table.find(middle, relations[1])
        assert answer is not None
        if len({ENTITY_BY_NAME[name] for name in (start, middle, answer)}) == 3:
            return LookupQuestion(number, start, relations, answer)


def _random_relation(rng: random.Random) -> str:
    return rng.choice(RELATIONS)


class Lookup:
    """One episode: one question over one table."""

    needs_client: ClassVar[bool] = True
    words: ClassVar[tuple[str, ...]] = (
        *TABLE_NAMES, *RELATIONS, "SEARCH", "ANS", "ask", "found", "nothing", "unknown", "over",
    )  # fmt: skip
    turns_max: int = 4
    tokens_max: ClassVar[int] = 4
    """SEARCH, a name, a relation, and the stop token."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda rng: LookupRandomAgent(rng),
        "teacher": lambda rng: LookupSearchAgent(rng, is_expert=False),
        "expert": lambda rng: LookupSearchAgent(rng, is_expert=True),
    }
    usual_reward: ClassVar[RewardSettings] = RewardSettings(kind="model", service=JUDGE)

    def __init__(self, resources: ExternalResources, *, url: str = "", turns: int = turns_max) -> None:
        """`url`: of another search API than that of `prepare`. Raises InvalidConfig; ValueError without a client."""
        if type(turns) is not int or turns < 1:
            raise InvalidConfig("turns", turns, "a whole number, at least 1")
        if not isinstance(url, str):
            raise InvalidConfig("url", url, "the address of a search API, or none")
        self.turns_max = turns
        self._client: Client = resources.require_client("lookup")
        self._resources = resources
        self._url = url
        self._api: Api | None = None
        self._question: LookupQuestion | None = None
        self._answer: str | None = None
        self._turn = self._searches = 0
        self._done = True

    # ---- shared resources -----------

    @classmethod
    async def needs(cls, progress: Progress | None = None) -> dict[str, Any]:
        """What a connection needs for this task, as arguments of `tangram.connect`: the judge, which is trained now if
        this machine has none yet, and a device for it. Raises ManagerError."""
        folder, settings = cache_folder(), JudgeSettings(groups=ENTITIES)
        await ensure_judge(settings, folder, progress)
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
        """Wraps all episodes of a client: runs the search API, and adds its quota unless the client has one of this
        name. Nested uses share the API. Raises ValueError without a client."""
        client = ExternalResources(client=client).require_client("lookup")
        api = SearchApi(requests_per_s=requests_per_s, latency_s=latency_s)
        quota = Quota(QUOTA, concurrent=concurrent, requests=Rate(requests_per_s, WINDOW_S))
        await _require_judge(client)
        shared = _shared_by_client.setdefault(client, _SharedSearchApi())
        there = await shared.enter(client, api, quota)
        try:
            yield there
        finally:
            await run_to_completion(shared.leave())

    # ---- the episode ----

    async def reset(self, seed: int) -> str:
        question = self._question = question_of(seed)
        resources, shared = self._resources, _shared_by_client.get(self._client)
        url = self._url or (shared.api.url if shared is not None and shared.api is not None else "")
        if not url:
            raise InvalidConfig("url", url, "an API to search in: play inside `async with Lookup.prepare(client):`")
        self._api = self._client.api(
            QUOTA, url, timeout_s=REQUEST_S_MAX, run=resources.run, trajectory=resources.trajectory, task="lookup"
        )
        self._answer = None
        self._turn = self._searches = 0
        self._done = False
        return f"ask {question.start} {' '.join(question.relations)}"

    async def step(self, action: str) -> Step:
        if self._done:
            raise ValueError("lookup: expected a reset before this step, for the episode is over or never began")
        assert self._question is not None
        reply, self._turn = "unknown", self._turn + 1
        match action.split(maxsplit=3):
            case ["SEARCH", name, relation]:
                reply = await self._search(name, relation)
            case ["ANS", name]:
                self._answer = name
        self._done = self._answer is not None or self._turn == self.turns_max
        return Step(
            observation="over" if self._done else reply,
            reward=float(self._answer == self._question.answer),
            done=self._done,
            metrics={"searches": float(self._searches)} if self._done else {},
        )

    async def close(self) -> None:
        self._done = True

    def evidence(self) -> dict[str, str] | None:
        """The payload for the judge. None without an answer, or if it is no name at all, which needs no judge."""
        if self._question is None or self._answer not in ENTITY_BY_NAME:
            return None
        return {"given": self._answer, "expected": self._question.answer}

    async def _search(self, name: str, relation: str) -> str:
        assert self._api is not None and self._question is not None
        self._searches += 1
        if name not in ENTITY_BY_NAME or relation not in RELATIONS:
            return "nothing"  # an unknown name cannot be found, so the request is saved
        query = {"table": str(self._question.table), "name": name, "relation": relation}
        response = await self._api.get("search", params=query)
        if not response.ok:
            raise ManagerError(f"the search API returned {response.status} {response.text[:200]!r}", retry=False)
        name_found = response.json().get("name")
        if name_found not in TABLE_NAMES:
            raise ManagerError(f"the search API returned {name_found!r}, which is no name", retry=False)
        return f"found {name_found}"


# ---- agents -----------------------------------------------------------------------------------------------------


class LookupRandomAgent:
    """A random search, or a random answer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def act(self, observation: str) -> str:
        name = self._rng.choice(TABLE_NAMES)
        return f"ANS {name}" if self._rng.random() < 0.5 else f"SEARCH {name} {_random_relation(self._rng)}"


class LookupSearchAgent:
    """Searches correctly. The expert answers with the last name found, the teacher with a random name that it has
    seen."""

    def __init__(self, rng: random.Random, *, is_expert: bool) -> None:
        self._rng = rng
        self._is_expert = is_expert
        self._remaining_relations: list[str] = []
        self._names_seen: list[str] = []

    def act(self, observation: str) -> str:
        match observation.split():
            case ["ask", start, *relations]:
                self._remaining_relations, self._names_seen = relations, [start]
                name = start
            case ["found", name]:
                self._names_seen.append(name)
            case _:
                name = ""
        if self._remaining_relations and name:
            return f"SEARCH {name} {self._remaining_relations.pop(0)}"
        return f"ANS {self._names_seen[-1] if self._is_expert else self._rng.choice(self._names_seen)}"
