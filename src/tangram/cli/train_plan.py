"""What `tangram train --explain` says: what would be run, made of the settings alone. Starts nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tangram.rl.config.training_settings import TrainSettings

ORDER = {
    "sync": "a batch is played turn by turn, then trained on",
    "sync+": "a batch is played, each trajectory at its own pace, then trained on",
    "one-off": "the next batch is played by the old weights while one is trained on",
    "start-bound": "trajectories go on across updates; only their start is bounded",
    "rollart": "trajectories go on across updates; what gets too old is stopped",
}


def planned(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    """By topic. Raises InvalidConfig for a task that cannot be found."""
    training, objective, groups = settings.training, settings.objective, settings.groups
    return {
        "mode": training.mode,
        "alpha": training.alpha,
        "steps": training.steps,
        "seconds_max": training.seconds_max,
        "batch": {"groups": training.batch, "members": groups.size, "trajectories": training.batch * groups.size},
        "in_play_max": (training.alpha + 1) * training.batch,
        "objective": {
            "kind": objective.kind,
            "learning_rate": objective.learning_rate,
            "correction": objective.correction,
            "kl": objective.kl,
        },
        "policy": _policy(settings),
        "warm_start": {task.name: task.warm_until for task in settings.tasks if task.warm_until > 0},
        "evaluation": {
            "every": settings.evaluation.every,
            "episodes": settings.evaluation.episodes,
            "temperature": settings.evaluation.temperature,
        },
        "outside": _outside(settings),
        "folder": str(folder),
        "checkpoints": {"every": settings.checkpoints.every, "keep": settings.checkpoints.keep},
    }


def _policy(settings: TrainSettings) -> str:
    policy = settings.policy
    if policy.checkpoint:
        return f"the one in {policy.checkpoint}"
    return f"a new one of {policy.layers} layers, width {policy.width}, {policy.heads} heads"


def _outside(settings: TrainSettings) -> dict[str, Any]:
    """Which tasks act outside, what rewards them, and what that needs here."""
    from tangram.rl.environments.shared_setup import acts_outside
    from tangram.rl.rollout.assembly import tasks_of
    from tangram.rl.rollout.rewards import settings_for

    pairs = list(zip(tasks_of(settings), settings.tasks, strict=True))
    acting = [own.name for task, own in pairs if acts_outside(task)]
    rewards = {own.name: settings_for(task, own.reward).kind for task, own in pairs}
    needed = bool(acting) or any(kind != "environment" for kind in rewards.values())
    outside = settings.outside
    backend = (outside.url or outside.backend) if needed else ""
    return {
        "tasks": acting,
        "rewards": rewards,
        "teachers": [teacher.name for teacher in settings.teachers],
        "where": backend,
        "needs_root": backend == "sandbox",
        "cores": outside.cores if needed and not outside.url else None,
    }


def lines(plan: dict[str, Any]) -> list[str]:
    """For a reader."""
    batch, outside, evaluation = plan["batch"], plan["outside"], plan["evaluation"]
    most = f", at most {plan['seconds_max']:g} s" if plan["seconds_max"] is not None else ""
    found = [
        f"mode        {plan['mode']}, α {plan['alpha']}: {_order(plan['mode'], plan['alpha'])}",
        f"steps       {plan['steps']:,}{most}; each of {batch['groups']} groups of {batch['members']}, "
        f"{batch['trajectories']:,} trajectories; at most {plan['in_play_max']} groups begun and not trained on",
        f"objective   {_objective(plan['objective'])}",
        f"policy      {plan['policy']}",
        f"warm start  {_warm(plan['warm_start'])}",
        f"evaluation  {_evaluation(evaluation)}",
        f"outside     {_where(outside)}",
        f"folder      {plan['folder']}: a checkpoint every {plan['checkpoints']['every']} steps, the newest "
        f"{plan['checkpoints']['keep']} are kept",
    ]
    if outside["needs_root"] and os.geteuid() != 0:
        found.append(
            "! sandboxes need root: run it as root, or with --set outside.backend=process, which isolates nothing"
        )
    return found


def _order(mode: str, alpha: int) -> str:
    """With α 0 nothing goes on across updates."""
    return ORDER["sync+" if alpha == 0 and mode in ("start-bound", "rollart") else mode]


def _objective(objective: dict[str, Any]) -> str:
    kl = f", KL {objective['kl']:g} to the reference" if objective["kl"] else ""
    return (
        f"{objective['kind']}, learning rate {objective['learning_rate']:g}, correction {objective['correction']}{kl}"
    )


def _warm(warm: dict[str, float]) -> str:
    if not warm:
        return "none"
    return "until " + ", ".join(f"{name} has {until:g}" for name, until in warm.items()) + " of the highest reward"


def _evaluation(evaluation: dict[str, Any]) -> str:
    if not evaluation["every"]:
        return "none"
    return (
        f"every {evaluation['every']} steps, {evaluation['episodes']} held-out episodes of each task, "
        f"temperature {evaluation['temperature']:g}"
    )


def _where(outside: dict[str, Any]) -> str:
    if not outside["where"]:
        return "nothing: all tasks are played and rewarded inside this process"
    acting = ", ".join(outside["tasks"])
    rewards = ", ".join(f"{name} by {kind}" for name, kind in outside["rewards"].items() if kind != "environment")
    cores = f" with {outside['cores']:g} cores" if outside["cores"] is not None else ""
    said = [f"{outside['where']}{cores}"]
    said += [f"acts there: {acting}"] if acting else []
    said += [f"rewarded there: {rewards}"] if rewards else []
    said += [f"teachers: {', '.join(outside['teachers'])}"] if outside["teachers"] else []
    return "; ".join(said)
