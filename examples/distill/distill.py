"""Two teachers, one student: a policy that is distilled from models that each know another task.

The teachers are trained first, each by imitating an expert: `counter` of chain, `walker` of frozenlake. The student has
a short warm start on agents that know the form of an answer but not the goal. Then it plays both tasks, and the teacher
of the task returns the log-probability of each token that the student wrote. That is its only training signal: no
reward, and no demonstration. Teachers are model services: they share a device, and an idle one is evicted for the
other.

    .venv/bin/python examples/distill/distill.py
    .venv/bin/python examples/distill/distill.py --quick --json

Owns the command and the settings; everything else is Tangram's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# In parallel with other programs the threads of numpy and PyTorch mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec

from tangram.errors import TangramError
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    ResourceSettings,
    RewardSettings,
    TaskSettings,
)
from tangram.rl.config.training_settings import (
    EvaluationSettings,
    ObjectiveSettings,
    TeacherSettings,
    TrainingSettings,
    TrainSettings,
)
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Evaluated, Noticed, Trained
from tangram.rl.train.behaviour_cloning import clone_behaviour
from tangram.rl.train.pipeline import train
from tangram.rl.trajectories.trajectory import Group, Stage, Trajectory

TEACHERS = {"chain": "counter", "frozenlake": "walker"}
"""Teacher agents by task."""
EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    length: int = 8
    """Values of an answer of chain."""
    turns: int = 8
    """Of frozenlake."""
    episodes: int = 512
    """Episodes of the expert that each teacher imitates ..."""
    imitations: int = 150
    """... and training steps on them."""
    glimpses: int = 60
    """Warm-start steps, in which the student imitates agents that know only the form."""
    steps: int = 60
    """Distillation steps."""
    groups: int = 16
    members: int = 8
    evaluated: int = 48
    """Episodes of each task, at the beginning and at the end."""


FULL = Sizes()
QUICK = Sizes(length=4, turns=6, episodes=192, imitations=60, glimpses=40, steps=10, groups=8, evaluated=16)


def settings_of(sizes: Sizes, folder: Path, seed: int, student: str = "") -> TrainSettings:
    """Return the settings. `student` is the path of its checkpoint."""
    options: dict[str, dict[str, Any]] = {"chain": {"length": sizes.length}, "frozenlake": {"turns": sizes.turns}}
    return TrainSettings(
        seed=seed,
        policy=PolicySettings(checkpoint=student, seed=seed),
        engines=(EngineSettings(slots=sizes.groups * sizes.members),),
        groups=GroupSettings(size=sizes.members),
        resources=ResourceSettings(backend="process"),
        tasks=tuple(
            TaskSettings(name=task, options=options[task], reward=RewardSettings(kind="teacher", service=name))
            for task, name in TEACHERS.items()
        ),
        teachers=tuple(TeacherSettings(name=name, checkpoint=str(folder / name)) for name in TEACHERS.values()),
        training=TrainingSettings(steps=sizes.steps, batch=sizes.groups),
        objective=ObjectiveSettings(kind="distill", normalise="tokens", learning_rate=3e-3, epochs=4, decay="linear"),
        evaluation=EvaluationSettings(every=sizes.steps, episodes=sizes.evaluated),
    )


class Distance:
    """The distance between student and teacher over all trajectories trained on, by task."""

    def __init__(self) -> None:
        self.by_task: dict[str, list[float]] = {task: [] for task in TEACHERS}

    def on_begin(self, trajectory: str, task: str) -> None: ...

    def on_stage(self, trajectory: str, stage: Stage) -> None: ...

    def on_end(self, trajectory: Trajectory) -> None: ...

    def on_group(self, group: Group) -> None:
        self.by_task[group.task] += [each.metrics["teacher_kl"] for each in group.members]


async def main(sizes: Sizes, folder: Path, seed: int, say: Any) -> dict[str, Any]:
    settings, student = settings_of(sizes, folder, seed), folder / "student"
    lines, distance = list[AnyMetricsLine](), Distance()
    began_s = time.monotonic()
    for task, name in TEACHERS.items():
        loss = await clone_behaviour(
            settings, folder / name, agent="expert", episodes=sizes.episodes, steps=sizes.imitations, tasks=(task,)
        )
        say(f"teacher {name} imitates the expert of {task}: loss {loss:.3f}, {time.monotonic() - began_s:.0f} s")
    await clone_behaviour(settings, student, agent="teacher", episodes=sizes.episodes, steps=sizes.glimpses)

    def tell(line: AnyMetricsLine) -> None:
        lines.append(line)
        if isinstance(line, Evaluated):
            scores = ", ".join(f"{task} {score:.2f}" for task, score in line.scores.items())
            say(f"step {line.step}: the student has {scores}")
        elif isinstance(line, Noticed):
            say(line.text)
        elif isinstance(line, Trained) and line.step % 10 == 0:
            apart = ", ".join(f"{task} {_last(values):.3f}" for task, values in distance.by_task.items())
            say(f"step {line.step}: nats from its teacher, for each token: {apart}")

    over = await train(settings_of(sizes, folder, seed, str(student)), folder / "run", on_line=tell, observer=distance)
    evaluated = [line for line in lines if isinstance(line, Evaluated)]
    return {
        "seconds": time.monotonic() - began_s,
        "steps": over.step,
        "apart_first": {task: statistics.fmean(values[:SHOWN]) for task, values in distance.by_task.items()},
        "apart_last": {task: _last(values) for task, values in distance.by_task.items()},
        "score_first": evaluated[0].scores,
        "score_last": evaluated[-1].scores,
    }


SHOWN = 32
"""Trajectories of a task in the displayed mean."""


def _last(values: list[float]) -> float:
    return statistics.fmean(values[-SHOWN:]) if values else float("nan")


def command() -> int:
    parser = argparse.ArgumentParser(description="Distil a policy from two teachers.")
    parser.add_argument("--quick", action="store_true", help="smaller tasks and fewer steps")
    parser.add_argument("--json", action="store_true", help="print the numbers for programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep teachers, checkpoints and metrics there")
    given = parser.parse_args()
    say = (lambda words: print(words, file=sys.stderr, flush=True)) if given.json else print
    try:
        with tempfile.TemporaryDirectory(prefix="tangram-distill-") as temporary:
            folder = given.folder or Path(temporary)
            result = asyncio.run(main(QUICK if given.quick else FULL, folder, given.seed, say))
    except TangramError as error:
        print(f"distill: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if given.json:
        print(json.dumps(result))
        return 0
    for task, name in TEACHERS.items():
        nats = f"{result['apart_first'][task]:.3f} to {result['apart_last'][task]:.3f} nats a token from {name}"
        print(f"{task}: {nats}, score {result['score_first'][task]:.2f} to {result['score_last'][task]:.2f}")
    print(f"{result['steps']} steps, {result['seconds']:.0f} s with the teachers")
    return 0


if __name__ == "__main__":
    sys.exit(command())
