"""Lines of training runs that never were, for tests of what is made of them: a seed gives one run, always the same.

lines = run_lines(steps=120)                 a run that learned, whole
lines = run_lines(steps=1, evaluate_every=0) the smallest
lines = resumed_lines(...)                   as three processes wrote it, with what was lost in between
lines = failed_warm_start()                  it never came to its first step
write_lines(folder, lines)                   as `metrics.jsonl`
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    EngineUse,
    Evaluated,
    Noticed,
    PoolUse,
    RunBegan,
    RunEnded,
    TaskStep,
    Trained,
    WarmStartChecked,
)
from tangram.rl.train.trainer import METRIC_DESCRIPTIONS

TASKS = ("frozenlake", "codefix", "lookup")
POOLS = (("cpu@local", 2.0), ("gpu@local", 1.0), ("search", 4.0))
BATCH, MEMBERS = 16, 8
BEGAN_AT = 1_790_000_000.0
SETTINGS: dict[str, object] = {
    "seed": 7,
    "training": {"mode": "async", "staleness": 1, "steps": 120, "batch": BATCH},
    "objective": {"kind": "grpo", "learning_rate": 7e-4, "clip_low": 0.2, "clip_high": 0.28},
    "tasks": [{"name": name, "weight": 1.0} for name in TASKS],
}


def learned(step: float, task: int, speed: float = 1.0) -> float:
    """The score of a policy that learns: from 0.2 to 0.95, one task later than the other."""
    return 0.2 + 0.75 / (1.0 + math.exp(-speed * (step - 25.0 - 15.0 * task) / 8.0))


def run_lines(
    *,
    steps: int = 120,
    tasks: Sequence[str] = TASKS,
    alpha: int = 1,
    mode: str = "async",
    evaluate_every: int = 10,
    warm_steps: int = 60,
    engines: int = 2,
    cause: str = "steps",
    notices: bool = True,
    seed: int = 0,
) -> list[AnyMetricsLine]:
    """A run that began, warmed up, trained and was over; `cause` "": as if it still went on."""
    random_ = random.Random(seed)
    lines: list[AnyMetricsLine] = [RunBegan(at_s=0.0, began_at=BEGAN_AT, mode=mode, alpha=alpha, settings=SETTINGS)]
    lines += warm_lines(tasks, warm_steps, random_)
    at_s = lines[-1].at_s
    if evaluate_every:
        lines.append(evaluated(0, at_s + 1.0, tasks, random_))
    for step in range(1, steps + 1):
        line = trained(step, at_s, tasks, alpha, engines, random_)
        at_s = line.at_s
        lines.append(line)
        if notices and step == steps // 3:
            lines.append(Noticed(at_s=at_s, kind="engine", text="engine-1 was lost (killed by signal 9); restarted"))
        if notices and step == steps // 2:
            lines.append(Noticed(at_s=at_s, kind="stall", text="17 trajectories wait for pool search"))
        if evaluate_every and step % evaluate_every == 0:
            lines.append(evaluated(step, at_s + 0.4, tasks, random_))
    if cause:
        dropped = {"stale": steps // 7} if steps >= 7 else {}
        over = RunEnded(at_s=at_s + 1.0, step=steps, cause=cause, checkpoint=f"checkpoints/{steps:08}",
                    dropped_so_far=dropped)  # fmt: skip
        lines.append(over)
    return lines


def warm_lines(tasks: Sequence[str], steps: int, random_: random.Random) -> list[AnyMetricsLine]:
    lines: list[AnyMetricsLine] = []
    for step in range(10, steps + 1, 10):
        over = step + 10 > steps
        scores = {task: 0.22 * step / steps + random_.uniform(0.0, 0.03) for task in tasks}
        greedy = {task: score / 2.0 for task, score in scores.items()} if over else {}
        lines.append(
            WarmStartChecked(
                at_s=2.0 + 0.2 * step, step=step, loss=3.0 * math.exp(-step / 30.0), scores=scores, greedy=greedy,
                over=over, cause="every task has its score" if over else "",
            )
        )  # fmt: skip
    return lines or [WarmStartChecked(at_s=2.0, step=0, loss=0.0, scores={}, over=True, cause="no warm start")]


def trained(step: int, at_s: float, tasks: Sequence[str], alpha: int, engines: int, random_: random.Random) -> Trained:
    wait_s, train_s, push_s = random_.uniform(0.2, 1.4), random_.uniform(0.5, 0.7), random_.uniform(0.01, 0.04)
    evaluation_s = 0.2 if step % 10 == 0 else 0.0
    step_s = wait_s + train_s + push_s + evaluation_s + 0.03
    count = BATCH * MEMBERS
    ages = [0] * (alpha + 1)
    for _ in range(count):
        ages[min(alpha, int(random_.expovariate(1.2)))] += 1
    shares = [random_.random() for _ in range(4)]
    return Trained(
        at_s=at_s + step_s, step=step, step_s=step_s, wait_s=wait_s, train_s=train_s, push_s=push_s,
        waited_for={
            name: 0.95 * wait_s * share / sum(shares)
            for name, share in zip(("generate", "step", "reward", "reset"), shares, strict=True)
        },
        pull_s=0.02 * engines, exposed_s=0.005 * engines, evaluation_s=evaluation_s,
        metrics=_metrics(step, count, random_),
        tasks={
            task: TaskStep(
                groups=BATCH // len(tasks), trajectories=count // len(tasks),
                reward=min(1.0, max(0.0, learned(step, place) + random_.gauss(0.0, 0.06))), turns=3.0 + place,
                tokens=30.0 + 10.0 * place, staleness_mean=0.3, staleness_max=alpha,
            )
            for place, task in enumerate(tasks)
        },
        staleness=tuple(ages), started=BATCH + (step % 7 == 0), dropped={"stale": 1} if step % 7 == 0 else {},
        aborted=5 if step % 7 == 0 else 0, tokens_discarded=140 if step % 7 == 0 else 0, buffered=step % 4,
        started_so_far=BATCH * step + step // 7, dropped_so_far={"stale": step // 7} if step >= 7 else {},
        in_flight=BATCH, stages={"generate": 60, "step": 30},
        pools=tuple(_pool(name, total, step_s, random_) for name, total in POOLS),
        engines=tuple(
            EngineUse(name=f"engine-{number}", version=step, busy_share=random_.uniform(0.5, 0.95),
                      prefill_tokens=4000, decode_tokens=5000, suspended_s=0.01)
            for number in range(engines)
        ),
    )  # fmt: skip


def _metrics(step: int, count: int, random_: random.Random) -> dict[str, float]:
    metrics = dict.fromkeys(METRIC_DESCRIPTIONS, 0.0)
    metrics |= {
        "loss": -0.02 + random_.gauss(0.0, 0.01),
        "kl_sampler": 0.002 + abs(random_.gauss(0.0, 0.001)),
        "weight_mean": 1.0,
        "weight_truncated": 0.01,
        "clip_share": 0.04 + random_.uniform(0.0, 0.02),
        "entropy": 0.2 + 0.8 * math.exp(-step / 60.0),
        "zero_variance_share": min(0.9, 0.1 + step / 200.0),
        "gradient_norm": 0.6 + random_.random(),
        "learning_rate": 7e-4,
        "trajectories": float(count),
        "tokens": 36.0 * count,
        "tokens_per_s": 9000.0 + random_.uniform(0.0, 800.0),
        "overlong_share": 0.02,
    }
    return metrics


def _pool(name: str, total: float, step_s: float, random_: random.Random) -> PoolUse:
    waiting_s = random_.uniform(0.0, 0.05)
    held = total * step_s * random_.uniform(0.2, 0.6)
    return PoolUse(
        name=name, total=total, actions=random_.randrange(40, 90), act_mean_s=0.06 + waiting_s,
        act_p99_s=0.2 + 4.0 * waiting_s, waiting_mean_s=waiting_s, held_unit_s=held, reserved_unit_s=held * 4.0,
        waiting=random_.randrange(3),
    )  # fmt: skip


def evaluated(step: int, at_s: float, tasks: Sequence[str], random_: random.Random) -> Evaluated:
    scores = {
        task: min(1.0, max(0.0, learned(step, place) + random_.gauss(0.0, 0.03))) for place, task in enumerate(tasks)
    }
    return Evaluated(
        at_s=at_s, step=step, seconds=0.4, scores=scores, spread=dict.fromkeys(tasks, 0.04),
        episodes=dict.fromkeys(tasks, 64),
    )  # fmt: skip


def resumed_lines(*, checkpoints: Sequence[int] = (20, 40), lost: int = 7, steps: int = 60) -> list[AnyMetricsLine]:
    """As it is in the file: each process goes on from a checkpoint, `lost` steps before where the last one was
    killed."""
    random_ = random.Random(1)
    lines = run_lines(steps=checkpoints[0] + lost, cause="", notices=False)
    at_s = lines[-1].at_s
    ends = [each + lost for each in checkpoints[1:]] + [steps]
    for step, end in zip(checkpoints, ends, strict=True):
        at_s += 3.0
        lines.append(
            RunBegan(
                at_s=at_s, began_at=BEGAN_AT, step=step, mode="async", alpha=1, settings=SETTINGS,
                resumed_from=f"checkpoints/{step:08}", left="4 samples went back to the buffer, 12 were restarted",
            )
        )  # fmt: skip
        for number in range(step + 1, end + 1):
            line = trained(number, at_s, TASKS, 1, 2, random_)
            at_s = line.at_s
            lines.append(line)
            if number % 10 == 0:
                lines.append(evaluated(number, at_s, TASKS, random_))
    return [*lines, RunEnded(at_s=at_s, step=steps, cause="steps")]


def failed_warm_start(cause: str = "OSError: no space left on device") -> list[AnyMetricsLine]:
    """It never came to its first step."""
    lines = run_lines(steps=0, evaluate_every=0, cause="")
    return [*lines[:3], RunEnded(at_s=9.0, step=0, cause=cause)]


def write_lines(folder: Path, lines: Iterable[AnyMetricsLine], *, torn: str = "") -> Path:
    """As `metrics.jsonl`. `torn`: what a killed process left of a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    path.write_bytes(text + torn.encode())
    return path
