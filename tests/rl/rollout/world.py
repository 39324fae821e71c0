"""A world of scripted environments, rewards and engines, on virtual time.

Environments do what their Plan says and remember themselves in the World; so a test can ask what is still open. There
is one World at a time: environments are made by import path, and find it here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import msgspec

from tangram.clock import VirtualLoop
from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.agents import RandomAgent
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest
from tangram.rl.rollout.rewards import PlayedTrajectory, RewardFailed, Score
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.trajectories.codec import WordCodec
from tangram.rl.trajectories.trajectory import Ending, GroupTicket, Trajectory

T = TypeVar("T")

FOR_EVER_S = 1e6
PATH = "tests.rl.rollout.world:Scripted"
CODEC = WordCodec(["look", "go", "end"])


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one environment does."""

    turns: int = 3
    """After which it is over."""
    reset_s: float = 0.0
    step_s: float = 0.0
    close_s: float = 0.0
    fail: str = ""
    """`make`, `reset` or `step`: raises there."""
    hang: str = ""
    """`reset`, `step` or `close`: never answers."""
    fail_close: bool = False
    at: int = 0
    """The turn in which a step fails or hangs."""
    deaf: bool = False
    """Keeps a cancellation of its step to itself and answers."""
    never_listens: str = ""
    """`reset`, `step` or `close`: does not answer, and keeps all cancellations to itself, until the World ends it."""
    exits: str = ""
    """`make`, `reset`, `step` or `close`: leaves Python there, by raising `leaves`."""
    leaves: BaseException = SystemExit(3)
    cancels_itself: bool = False
    odd: Any = None
    """What its steps answer instead of a Step."""
    says: str = "look"
    reward: float = 1.0


class Scripted:
    words: ClassVar[tuple[str, ...]] = ("look", "go", "end")
    turns_max: ClassVar[int] = 8
    tokens_max: ClassVar[int] = 4
    agents: ClassVar[Mapping[str, MakeAgent]] = {"random": lambda chance: RandomAgent(chance, ("go",))}

    def __init__(self, resources: ExternalResources) -> None:
        world = World.current
        assert world is not None
        self.trajectory = resources.trajectory
        self._world = world
        self._turn = 0
        self._tried = self.trajectory.endswith("/options")
        if self._tried:  # made and closed by a rollout that is entered
            self.plan = Plan()
            world.tried += 1
            return
        number = world.made.get(self.trajectory, 0)
        world.made[self.trajectory] = number + 1
        self.plan = world.plan(self.trajectory, number)
        if self.plan.exits == "make":
            raise self.plan.leaves
        if self.plan.fail == "make":
            raise OSError("no room")
        world.open.append(self)

    async def reset(self, seed: int) -> str:
        return await self._answer("reset", self.plan.reset_s, self.plan.says)

    async def step(self, action: str) -> Step:
        turn, self._turn = self._turn, self._turn + 1
        try:
            await self._answer("step", self.plan.step_s, "", here=turn == self.plan.at)
        except asyncio.CancelledError:
            if not self.plan.deaf:
                raise
        if self.plan.odd is not None:
            return self.plan.odd  # type: ignore[no-any-return]
        done = self._turn >= self.plan.turns
        return Step(observation="end" if done else "look", reward=self.plan.reward if done else 0.0, done=done)

    async def close(self) -> None:
        if self._tried:
            self._world.tried -= 1
            return
        assert self in self._world.open, f"{self.trajectory} is closed twice"
        self._world.open.remove(self)
        self._world.closed += 1
        await self._misbehave("close")
        await asyncio.sleep(FOR_EVER_S if self.plan.hang == "close" else self.plan.close_s)
        if self.plan.fail_close:
            raise OSError("close: no such machine")

    async def _answer(self, what: str, seconds: float, answer: str, *, here: bool = True) -> str:
        if here and self.plan.cancels_itself and what == "step":
            raise asyncio.CancelledError
        if here:
            await self._misbehave(what)
        if here and self.plan.hang == what:
            await asyncio.sleep(FOR_EVER_S)
        if seconds:
            await asyncio.sleep(seconds)
        if here and self.plan.fail == what:
            raise ConnectionResetError(f"{what}: connection lost")
        return answer

    async def _misbehave(self, what: str) -> None:
        if self.plan.exits == what:
            raise self.plan.leaves
        while self.plan.never_listens == what and not self._world.over.is_set():
            with suppress(asyncio.CancelledError):
                await self._world.over.wait()


class World:
    """Environments that are not closed, and requests without a response."""

    current: ClassVar[World | None] = None

    def __init__(self, plan: Callable[[str, int], Plan] | Plan | None = None) -> None:
        """`plan`: of the nth environment of a trajectory."""
        World.current = self
        fixed = plan if isinstance(plan, Plan) else Plan()
        self.plan = plan if callable(plan) else lambda trajectory, number: fixed
        self.open: list[Scripted] = []
        self.made: dict[str, int] = {}
        self.closed = 0
        self.tried = 0
        """Environments that were made to try options, and are not closed."""
        self.over = asyncio.Event()
        """Ends those that never listen."""
        self.ended: list[Trajectory] = []

    def endings(self) -> dict[str, Ending]:
        return {each.id: each.ending for each in self.ended}

    def check(self, *rollouts: Rollout) -> None:
        """Nothing is left, and every trajectory ended once."""
        assert self.open == [] and self.tried == 0
        ids = [each.id for each in self.ended]
        assert len(ids) == len(set(ids)), "a trajectory ended twice"
        for rollout in rollouts:
            statistics = rollout.statistics()
            assert all(task.playing == {} for task in statistics.tasks.values()), statistics
            assert statistics.closing == 0
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert others == set(), f"tasks are left: {others}"


class Talker:
    """Generates `go`, each time after `token_s`. Dies on command."""

    def __init__(self, token_s: float = 1.0, *, version: int = 0, waiting_s: float = 0.0) -> None:
        self.token_s = token_s
        self.version = version
        self.waiting_s = waiting_s
        self.dead: Exception | None = None
        self.inside: dict[str, asyncio.Future[None]] = {}
        self.asked: list[GenerationRequest] = []
        self.aborted: list[str] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        if self.dead is not None:
            raise self.dead
        assert request.id not in self.inside, f"{request.id} twice"
        self.asked.append(request)
        written = self.inside[request.id] = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(self.token_s, _answer, written)
        try:
            await written
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise
        finally:
            timer.cancel()
            del self.inside[request.id]
        tokens = CODEC.encode_action("go")[: request.sampling.tokens_max]
        return Generation(
            tokens=tokens,
            logprobs=(-1.0,) * len(tokens),
            versions=(self.version,) * len(tokens),
            finish="stop" if tokens[-1] in CODEC.stop else "length",
            engine="talker",
            waiting_s=self.waiting_s,
            decode_s=self.token_s,
        )

    def die(self, error: Exception | None = None) -> None:
        self.dead = error or ManagerError("no engine is left")
        for written in self.inside.values():
            if not written.done():
                written.set_exception(self.dead)


def _answer(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


class Judge:
    """A reward that takes its time, and fails for the episodes in `fails`."""

    def __init__(self, seconds: float = 0.0, fails: Callable[[str], bool] = lambda trajectory: False) -> None:
        self.seconds = seconds
        self.fails = fails
        self.inside = 0

    async def score(self, played: PlayedTrajectory) -> Score:
        self.inside += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.inside -= 1
        if self.fails(played.id):
            raise RewardFailed("the judge is not there")
        return Score(value=0.5)


def settings(*, groups: GroupSettings | None = None, context_max: int = 256, **task: Any) -> RolloutSettings:
    return RolloutSettings(
        engines=(EngineSettings(context_max=context_max),),
        groups=groups or GroupSettings(size=1, size_min=1, on_loss="close"),
        tasks=(TaskSettings(name="scripted", environment=PATH, **task),),
    )


def ticket(number: int = 0) -> GroupTicket:
    return GroupTicket(task="scripted", number=number, seed=number)


def run(doing: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(doing)


def chance(*key: object) -> random.Random:
    return random.Random("/".join(map(str, key)))
