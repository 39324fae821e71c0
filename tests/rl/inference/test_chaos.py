"""Random deaths, hangs, refusals, aborts and updates, over many seeds in virtual time: every request is answered once
and rightly, is cancelled, or ends with an error that says why; nothing is left of it anywhere."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from tests.rl.inference.conftest import Rig, a_request, drawn, fake, play, token_at, weights

from tangram.errors import ManagerError
from tangram.rl.inference.engines.fake import FakeEngine
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest
from tangram.rl.inference.router_records import (
    EngineRemoved,
    EngineState,
    EngineUpdated,
    NoEngine,
    RequestAbandoned,
    RequestDropped,
)

SEEDS = 80
REQUESTS = 40
CLASSES = ("compute", "bandwidth")


class Chaos:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engines = [self._engine(number) for number in range(self.random.randint(1, 4))]
        classes = {engine.hardware for engine in self.engines}
        self.rig = Rig(
            *self.engines,
            affinity={"reader": "compute", "default": "bandwidth"} if len(classes) > 1 else {},
            deaths_max=self.random.choice([2, 3, 1000]),
            deaths_window_s=self.random.choice([5.0, 300.0]),
            start_s_max=20.0,
            update_s_max=5.0,
        )
        self.version = 1
        self.sent: dict[str, GenerationRequest] = {}
        self.ends: Counter[str] = Counter()
        self.over = False

    def _engine(self, number: int) -> FakeEngine:
        speed = self.random.choice([0.01, 0.1, 0.3])
        return fake(
            f"e{number}",
            CLASSES[number % len(CLASSES)],
            token_s=speed,
            start_s=self.random.choice([0.0, 1.0, 4.0]),
            update_s=self.random.choice([0.0, 0.5, 3.0]),
            prefill_s_per_token=speed / 20.0,
        )

    async def run(self) -> None:
        router = self.rig.router
        await router.start(weights(self.version))
        trouble = asyncio.create_task(self.trouble())
        trainer = asyncio.create_task(self.train())
        async with asyncio.timeout(36_000.0):  # a hang is a failure
            await asyncio.gather(*(self._trajectory(number) for number in range(REQUESTS // 4)))
        self.over = True
        trouble.cancel()
        trainer.cancel()
        await asyncio.gather(trouble, trainer, return_exceptions=True)
        self._check_nothing_is_left()
        await router.close()
        self.rig.check_idle()

    async def _trajectory(self, number: int) -> None:
        """Its turns one after the other, as rollouts have them."""
        await asyncio.sleep(self.random.uniform(0.0, 20.0))
        tokens = self.random.randint(1, 60)
        for _ in range(4):
            request = a_request(
                tokens=tokens,
                tokens_max=self.random.randint(1, 40),
                task=self.random.choice(["reader", "writer"]),
                session=f"trajectory-{number}",
            )
            tokens += self.random.randint(1, 30)
            await self._request(request)

    async def _request(self, request: GenerationRequest) -> None:
        self.sent[request.id] = request
        task = asyncio.create_task(self.rig.router.generate(request))
        if self.random.random() < 0.2:
            await asyncio.wait({task}, timeout=self.random.uniform(0.0, 3.0))
            task.cancel()
        (results,) = await asyncio.gather(task, return_exceptions=True)
        self.ends[self._end(request, results)] += 1

    def _end(self, request: GenerationRequest, found: Generation | BaseException) -> str:
        match found:
            case Generation():
                self._check(request, found)
                return "answered"
            case asyncio.CancelledError():
                return "cancelled"
            case RequestAbandoned():
                assert request.id in str(found)
                return "given up"
            case NoEngine():
                assert all(kept.state is EngineState.REMOVED for kept in self.rig.router.statistics().engines), found
                return "no engine"
        raise found

    def _check(self, request: GenerationRequest, generation: Generation) -> None:
        assert generation.tokens == drawn(request), "each token once and in order, of any engine"
        assert generation.finish == "length"
        assert len(generation.logprobs) == len(generation.versions) == len(generation.tokens)
        assert list(generation.versions) == sorted(generation.versions), "weights never go back within a trajectory"
        assert generation.versions[-1] <= self.version

    def _check_nothing_is_left(self) -> None:
        statistics = self.rig.router.statistics()
        assert statistics.requests == statistics.waiting == 0
        assert all(kept.load == kept.requests == 0 for kept in statistics.engines)
        assert all(engine.active_requests == () for engine in self.engines), "an orphan"
        assert sum(self.ends.values()) == len(self.sent)
        assert statistics.served == self.ends["answered"]
        assert statistics.cancelled == self.ends["cancelled"]
        assert statistics.failed == self.ends["given up"] + self.ends["no engine"]
        assert len(self.rig.events_of(RequestDropped)) == self.ends["given up"]
        removed = [kept.name for kept in statistics.engines if kept.state is EngineState.REMOVED]
        assert sorted(removed) == sorted(event.engine for event in self.rig.events_of(EngineRemoved))

    async def trouble(self) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(1 / 4.0))
            engine = self.random.choice(self.engines)
            match self.random.choice(["die", "die", "hang", "hang without end", "refuse", "no start"]):
                case "die":
                    engine.die("chaos")
                case "hang":
                    engine.hang(notice_s=self.random.uniform(0.1, 10.0))
                case "hang without end":
                    # Only an update detects it, and there is always another one.
                    engine.hang()
                case "refuse":
                    engine.refuse(updates=1)
                case "no start":
                    engine.refuse(starts=1)

    async def train(self) -> None:
        """Weights are never taken back."""
        updates: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(self.random.expovariate(1 / 3.0))
                self.version += 1
                updates.add(asyncio.create_task(self.rig.router.update(weights(self.version))))
                done = {task for task in updates if task.done()}
                for task in done:
                    assert isinstance(task.exception(), ManagerError | None)  # no engine may have taken them
                updates -= done
        finally:
            for task in updates:
                task.cancel()
            await asyncio.gather(*updates, return_exceptions=True)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_request_ends_once_and_rightly(seed: int) -> None:
    chaos = Chaos(seed)
    play(chaos.run)


def test_the_chaos_reaches_every_end() -> None:
    """Else the seeds prove less than they seem to."""
    ends: Counter[str] = Counter()
    resumed = stayed = updates = fallbacks = 0
    for seed in range(30):
        chaos = Chaos(seed)
        play(chaos.run)
        ends += chaos.ends
        statistics = chaos.rig.router.statistics()
        resumed += statistics.resumed
        stayed += statistics.stayed
        updates += len(chaos.rig.events_of(EngineUpdated))
        fallbacks += sum(statistics.fallbacks.values())
    assert {"answered", "cancelled", "given up", "no engine"} <= set(ends), ends
    assert min(resumed, stayed, updates, fallbacks) > 50, (resumed, stayed, updates, fallbacks)


@pytest.mark.parametrize("seed", range(20))
def test_closing_at_any_moment_ends_all_requests(seed: int) -> None:
    async def main() -> None:
        chaos = Chaos(seed)
        router = chaos.rig.router
        starting = asyncio.create_task(router.start(weights()))
        await asyncio.sleep(chaos.random.choice([0.0, 0.5, 5.0, 5.0]))
        trouble = asyncio.create_task(chaos.trouble())
        trainer = asyncio.create_task(chaos.train())
        tasks = [
            asyncio.create_task(router.generate(a_request(tokens_max=chaos.random.randint(1, 200)))) for _ in range(20)
        ]
        await asyncio.sleep(chaos.random.uniform(0.0, 20.0))
        async with asyncio.timeout(600.0):
            await router.close()
            results = await asyncio.gather(starting, *tasks, return_exceptions=True)
        trouble.cancel()
        trainer.cancel()
        await asyncio.gather(trouble, trainer, return_exceptions=True)
        assert all(isinstance(each, Generation | NoEngine | RequestAbandoned) for each in results[1:]), results
        chaos.rig.check_idle()

    play(main)


def test_tokens_of_the_tests_depend_on_their_position_alone() -> None:
    """The check of the order would otherwise prove nothing."""
    request = a_request(tokens=3, tokens_max=30)
    tokens = drawn(request)
    assert len(set(tokens)) == len(tokens)
    assert tokens[7] == token_at(request.noise, 10)
