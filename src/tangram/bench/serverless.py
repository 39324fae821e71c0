"""Rewards of three tasks on reserved workers, against functions that scale from zero.

Each task has a reward function of its own, that takes its time. A few rollouts are played, with a pause between them in
which a trainer would train. Once every function has all its instances for the whole time, as a reservation would have
it; once instances come when a trajectory ends and go when they are idle. The processes and calls are real; engine and
environments are waits.

`busy_share_*` is the share of instance time in which a reward was computed; `rollout_ratio` how much longer a rollout
takes with functions that scale from zero, the starts of their processes included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress
from tangram.bench.rollout import WORDS, Fixed, Waits
from tangram.client.client import Client
from tangram.client.functions import Function, function
from tangram.client.transport import LocalTransport
from tangram.core.messages import cpu_node
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.functions import Call, FunctionManager
from tangram.managers.functions.host import Statistics
from tangram.managers.quotas.manager import QuotaManager
from tangram.managers.work import Hold
from tangram.reports.statistics import ratio_of
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    RewardSettings,
    RolloutSettings,
    TaskSettings,
)
from tangram.rl.inference.engines.fake import FakeEngine
from tangram.rl.inference.engines.protocol import Request, Weights
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.runtime.orchestrator import Orchestrator

SECONDS = {"code": 0.12, "judge": 0.06, "math": 0.03}
"""What the reward of a task takes: running tests, asking a small model, comparing an answer."""
INSTANCES = 4
"""Of each function, at most; reserved: always."""
CORES = 0.1
"""Of a call: they sleep, and all of them fit."""
FOR_EVER_S = 3600.0
IDLE_S = 0.25
"""Elastic: short beside the pause between rollouts, as half a minute is beside a training step."""
TOKENS = 4


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    rollouts: int = 6
    groups: int = 6
    members: int = 8
    turns: int = 12
    latency_s: float = 0.25
    spread: float = 0.5
    pause_s: float = 3.0
    """Between two rollouts."""


FULL = Sizes()
QUICK = Sizes(rollouts=2)


# ---- the rewards --------------------------------------------------------------------------------------------------


def code(played: dict[str, Any]) -> float:
    return _reward("code", played)


def judge(played: dict[str, Any]) -> float:
    return _reward("judge", played)


def math(played: dict[str, Any]) -> float:
    return _reward("math", played)


def _reward(task: str, played: dict[str, Any]) -> float:
    time.sleep(SECONDS[task])
    return float(len(played["turns"]) > 0)


def _declared(called: Any, idle_s: float) -> Function[..., Any]:
    made: Function[..., Any] = function(cpus=CORES, max_instances=INSTANCES, idle_s=idle_s)(called)
    return made


code_elastic, judge_elastic, math_elastic = (_declared(each, IDLE_S) for each in (code, judge, math))
code_reserved, judge_reserved, math_reserved = (_declared(each, FOR_EVER_S) for each in (code, judge, math))


# ---- the benchmark ------------------------------------------------------------------------------------------------


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found = Findings()
    reserved, reserved_s = await _side("reserved", sizes)
    progress(0.5)
    elastic, elastic_s = await _side("elastic", sizes)
    progress(1.0)
    ratio = ratio_of(elastic_s, reserved_s)
    assert ratio is not None
    found.add("busy_share_reserved", reserved.busy_s / reserved.instance_s, PRINTED)
    found.add("busy_share_elastic", elastic.busy_s / elastic.instance_s, PRINTED)
    found.add("rollout_ratio", ratio, PRINTED)
    found.notes.append(
        f"The same {elastic.calls} rewards took {reserved.instance_s:.1f} s of reserved and {elastic.instance_s:.1f} s"
        f" of elastic instances, of which {elastic.begun} were begun."
    )
    return found.result("serverless", "measured", sizes)


@contextlib.asynccontextmanager
async def _connected() -> AsyncIterator[tuple[Client, FunctionManager]]:
    """A client whose functions can be looked at."""
    functions = FunctionManager()
    quotas = QuotaManager((), lambda event: orchestrator.tell(event))
    pools = cpu_node("local", len(os.sched_getaffinity(0)))
    orchestrator = Orchestrator(Scheduler(policy("adaptive"), pools), {}, {Hold: quotas, Call: functions})
    async with Client(LocalTransport(orchestrator, quotas)) as client:
        yield client, functions


async def _side(name: str, sizes: Sizes) -> tuple[Statistics, list[float]]:
    """What its instances did, and the seconds of each rollout."""
    seconds = []
    engine = FakeEngine(_written, token_s=0.002)
    await engine.start(Weights(version=0, folder=""))
    async with _connected() as (client, functions):
        if name == "reserved":
            await _all_at_once(client)
        settings = _settings(name, sizes)
        before = functions.statistics()
        async with Rollout(settings, engine, Fixed(), client) as rollout:
            source = tickets(settings)
            for _ in range(sizes.rollouts):
                batch = await rollout.collect(source, sizes.groups)
                seconds.append(batch.ended_s - batch.began_s)
                await asyncio.sleep(sizes.pause_s)
        after = functions.statistics()
    await engine.close()
    return _between(before, after), seconds


async def _all_at_once(client: Client) -> None:
    """All instances are there before it begins."""
    for each in (code_reserved, judge_reserved, math_reserved):
        await asyncio.gather(*(client.call(each, {"turns": [], "instance": number}) for number in range(INSTANCES)))


def _between(before: Statistics, after: Statistics) -> Statistics:
    return Statistics(
        calls=after.calls - before.calls,
        busy_s=after.busy_s - before.busy_s,
        instance_s=after.instance_s - before.instance_s,
        begun=after.begun - before.begun,
    )


def _settings(side: str, sizes: Sizes) -> RolloutSettings:
    waits = Waits(latency_s=sizes.latency_s, spread=sizes.spread, turns=sizes.turns)
    return RolloutSettings(
        engines=(EngineSettings(),),
        groups=GroupSettings(size=sizes.members),
        tasks=tuple(
            TaskSettings(
                name=task, environment="tangram.bench.rollout:Waiting", options=msgspec.to_builtins(waits),
                tokens_max=TOKENS,
                reward=RewardSettings(kind="function", function=f"tangram.bench.serverless:{task}_{side}"),
            )
            for task in SECONDS
        ),
    )  # fmt: skip


def _written(request: Request) -> list[int]:
    return [len(request.tokens) % WORDS] * request.sampling.tokens_max
