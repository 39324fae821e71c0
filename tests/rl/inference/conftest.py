"""Fixtures of router tests: scripted engines with predictable tokens, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, TypeVar

from tangram.clock import VirtualLoop
from tangram.rl.inference.engines.fake import FakeEngine
from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights, Sampling, SamplingSeed
from tangram.rl.inference.router import Router
from tangram.rl.inference.router_records import AnyRouterEvent

T = TypeVar("T")
E = TypeVar("E")

STOP = 1
"""Ends an action."""
VOCABULARY = 1000


def token_at(noise: SamplingSeed, position: int) -> int:
    """The token at this position, in any engine."""
    return 2 + (noise.seed * 7919 + noise.member * 104729 + noise.attempt * 1299709 + position * 31) % (VOCABULARY - 2)


def drawn(request: GenerationRequest) -> tuple[int, ...]:
    """All that may be written, each token by its position alone, as real engines do."""
    first = len(request.tokens)
    return tuple(token_at(request.noise, first + number) for number in range(request.sampling.tokens_max))


_NUMBERS = count(1)


def a_request(
    *,
    tokens: int = 10,
    tokens_max: int = 8,
    task: str = "default",
    session: str = "",
    stop: tuple[int, ...] = (STOP,),
) -> GenerationRequest:
    number = next(_NUMBERS)
    return GenerationRequest(
        id=f"request-{number}",
        session=session,
        task=task,
        tokens=tuple(range(tokens)),
        sampling=Sampling(tokens_max=tokens_max, stop=stop),
        noise=SamplingSeed(seed=number),
    )


def weights(version: int = 1) -> PolicyWeights:
    return PolicyWeights(version=version, folder=f"/weights/{version}")


def fake(name: str = "a", hardware: str = "default", **options: Any) -> FakeEngine:
    return FakeEngine(drawn, name=name, hardware=hardware, **({"token_s": 0.1} | options))


class Rig:
    """A started router, and all its events."""

    def __init__(self, *engines: FakeEngine, **options: Any) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.events: list[AnyRouterEvent] = []
        self.router = Router(engines, on_event=self.events.append, **options)

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def check_idle(self) -> None:
        """Nothing is left of any request, neither here nor in an engine."""
        statistics = self.router.statistics()
        assert statistics.requests == statistics.waiting == 0
        assert [(kept.requests, kept.load) for kept in statistics.engines] == [(0, 0)] * len(statistics.engines)
        assert [engine.active_requests for engine in self.engines.values()] == [()] * len(self.engines)
        times = [event.at_s for event in self.events]
        assert times == sorted(times)


def play(test: Callable[[], Awaitable[T]]) -> T:
    """In virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_main(test))


async def _main(test: Callable[[], Awaitable[T]]) -> T:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    result = await test()
    assert len(asyncio.all_tasks()) == 1, "a task was left behind"
    assert not faults
    return result


def at_gateway(
    test: Callable[[Rig], Awaitable[None]], *engines: FakeEngine, first_version: int = 1, **options: Any
) -> Rig:
    async def main() -> Rig:
        rig = Rig(*engines, **options)
        await rig.router.start(weights(first_version))
        try:
            await test(rig)
        finally:
            await rig.router.close()
        rig.check_idle()
        return rig

    return play(main)


async def until(condition: Callable[[], bool]) -> None:
    """In virtual time a look costs nothing."""
    async with asyncio.timeout(3600.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
