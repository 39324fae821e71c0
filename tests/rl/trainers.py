"""Trainers of a small policy and batches for them. Without PyTorch: a process that only owns a trainer imports this."""

from __future__ import annotations

from pathlib import Path

from tangram.rl.config.rollout_settings import EngineSettings, PolicySettings, TaskSettings
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.train.trainer_process import ProcessTrainer
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch
from tangram.rl.trajectories.trajectory import Ending, Group, Span, Stage, Trajectory, Turn

SIZE = 29
SETTINGS = TrainSettings(
    tasks=(TaskSettings(name="chain"), TaskSettings(name="frozenlake", turns_max=50, tokens_max=40)),
    policy=PolicySettings(layers=1, width=16, heads=2),
    engines=(EngineSettings(context_max=32),),
)
ADDER = "tests.rl.learners:Adder"
EPISODE = Demonstration(task="chain", tokens=(1, 2, 3), is_action=(False, True, True))


def trainer_in(tmp_path: Path, **options) -> ProcessTrainer:
    return ProcessTrainer(SETTINGS, SIZE, tmp_path / "published", **({"learner": ADDER} | options))


def group(task: str = "chain", rewards: tuple[float, ...] = (0.0, 1.0), cause: str = "") -> Group:
    """The task says how the step goes."""
    turn = Turn(observation="see", observation_tokens=(1, 2), action="go", tokens=(3,), logprobs=(-0.5,), versions=(0,))
    members = tuple(
        Trajectory(
            id=f"{task}/0/{member}.0", task=task, group=f"{task}/0", member=member, attempt=0, seed=7, turns=(turn,),
            observation="over", ending=Ending.FINISHED, reward=reward,
            spans=(Span(stage=Stage.STEP, began_s=0.0, ended_s=1.0),),
        )
        for member, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(
        id=f"{task}/0", task=task, seed=7, members=members, left_out=members[:1], wanted=len(members), cause=cause
    )


def batch(version: int, *groups: Group) -> TrainingBatch:
    return TrainingBatch(version=version, groups=groups or (group(),))
