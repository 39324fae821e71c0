"""Rewards of three tasks: reserved workers against functions that scale from zero.

Each task has its own reward function with its own duration. A few rollouts are played, with a pause between them in
which a trainer would train. On the reserved side every function has all its instances for the whole time; on the
elastic side instances start when a trajectory ends and stop when they are idle. The processes and calls are real;
engine and environments are delays.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from tangram.bench.base import PRINTED, BenchRun
from tangram.bench.functions import FOR_EVER_S, connect_functions, declare, statistics_between
from tangram.bench.rollout import WORDS, FixedLengthCodec, LatencyModel
from tangram.client.client import Client
from tangram.managers.functions.host import FunctionStatistics
from tangram.reports.statistics import ratio_of
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    RewardSettings,
    RolloutSettings,
    TaskSettings,
)
from tangram.rl.inference.engines.fake import FakeEngine
from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights
from tangram.rl.rollout.rollout import Rollout, tickets

SECONDS = {"code": 0.12, "judge": 0.06, "math": 0.03}
"""Reward durations by task: running tests, calling a small model, comparing an answer."""
INSTANCES = 4
"""Instances per function: at most, or on the reserved side always."""
IDLE_S = 0.25
"""Idle time of elastic instances: short compared with the pause between rollouts, as half a minute is compared with a
training step."""
TOKENS = 4


class ServerlessSizes(msgspec.Struct, frozen=True, kw_only=True):
    rollouts: int = 6
    groups: int = 6
    members: int = 8
    turns: int = 12
    latency_s: float = 0.25
    spread: float = 0.5
    pause_s: float = 3.0
    """Pause between two rollouts."""


LABEL = "measured"
FULL = ServerlessSizes()
QUICK = ServerlessSizes(rollouts=2)


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


code_elastic, judge_elastic, math_elastic = (declare(each, IDLE_S, INSTANCES) for each in (code, judge, math))
code_reserved, judge_reserved, math_reserved = (declare(each, FOR_EVER_S, INSTANCES) for each in (code, judge, math))


# ---- the benchmark ------------------------------------------------------------------------------------------------


async def measure(sizes: ServerlessSizes, run: BenchRun) -> None:
    reserved, reserved_s = await _run_side("reserved", sizes)
    run.progress(0.5)
    elastic, elastic_s = await _run_side("elastic", sizes)
    ratio = ratio_of(elastic_s, reserved_s)
    assert ratio is not None
    run.add("busy_share_reserved", reserved.busy_s / reserved.instance_s, PRINTED)
    run.add("busy_share_elastic", elastic.busy_s / elastic.instance_s, PRINTED)
    run.add("rollout_ratio", ratio, PRINTED)
    run.notes.append(
        f"The same {elastic.calls} rewards took {reserved.instance_s:.1f} s of reserved and {elastic.instance_s:.1f} s"
        f" of elastic instances; {elastic.started} elastic instances were started."
    )


async def _run_side(name: str, sizes: ServerlessSizes) -> tuple[FunctionStatistics, list[float]]:
    """Return the use of the instances, and the seconds of each rollout."""
    seconds = []
    engine = FakeEngine(_generated_tokens, token_s=0.002)
    await engine.start(PolicyWeights(version=0, folder=""))
    async with connect_functions() as (client, functions):
        if name == "reserved":
            await _start_all_instances(client)
        settings = _settings(name, sizes)
        before = functions.statistics()
        async with Rollout(settings, engine, FixedLengthCodec(), client) as rollout:
            source = tickets(settings)
            for _ in range(sizes.rollouts):
                batch = await rollout.collect(source, sizes.groups)
                seconds.append(batch.ended_s - batch.began_s)
                await asyncio.sleep(sizes.pause_s)
        after = functions.statistics()
    await engine.close()
    return statistics_between(before, after), seconds


async def _start_all_instances(client: Client) -> None:
    """Start all instances before the measurement."""
    for each in (code_reserved, judge_reserved, math_reserved):
        await asyncio.gather(*(client.call(each, {"turns": [], "instance": number}) for number in range(INSTANCES)))


def _settings(side: str, sizes: ServerlessSizes) -> RolloutSettings:
    waits = LatencyModel(latency_s=sizes.latency_s, spread=sizes.spread, turns=sizes.turns)
    return RolloutSettings(
        engines=(EngineSettings(),),
        groups=GroupSettings(size=sizes.members),
        tasks=tuple(
            TaskSettings(
                name=task, environment="tangram.bench.rollout:DelayEnvironment", options=msgspec.to_builtins(waits),
                tokens_max=TOKENS,
                reward=RewardSettings(kind="function", function=f"tangram.bench.serverless:{task}_{side}"),
            )
            for task in SECONDS
        ),
    )  # fmt: skip


def _generated_tokens(request: GenerationRequest) -> list[int]:
    return [len(request.tokens) % WORDS] * request.sampling.tokens_max
