"""The plan that `tangram train --explain` prints, derived from the settings alone. Starts nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tangram.rl.config.training_settings import TrainSettings

DESCRIPTION_BY_MODE = {
    "sync": "a batch is played turn by turn, then trained on",
    "sync+": "a batch is played, each trajectory at its own pace, then trained on",
    "one-off": "the next batch is played by the old weights while one is trained on",
    "start-bound": "trajectories continue across weight updates; staleness is bounded at their start",
    "async": "trajectories continue across weight updates; those that become too stale are stopped",
}


def build_plan(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    """The plan by topic. Raises InvalidConfig for an unknown task."""
    training, objective, groups = settings.training, settings.objective, settings.groups
    return {
        "mode": training.mode,
        "alpha": training.staleness_bound,
        "steps": training.steps,
        "seconds_max": training.seconds_max,
        "batch": {"groups": training.batch, "members": groups.size, "trajectories": training.batch * groups.size},
        "in_play_max": (training.staleness_bound + 1) * training.batch,
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
        "resources": _external_resources(settings),
        "folder": str(folder),
        "checkpoints": {"every": settings.checkpoints.every, "keep": settings.checkpoints.keep},
    }


def _policy(settings: TrainSettings) -> str:
    policy = settings.policy
    if policy.checkpoint:
        return f"checkpoint {policy.checkpoint}"
    return f"new, {policy.layers} layers, width {policy.width}, {policy.heads} heads"


def _external_resources(settings: TrainSettings) -> dict[str, Any]:
    """Tasks that run actions, their rewards, and what both need on this machine."""
    from tangram.rl.environments.registry import tasks_of
    from tangram.rl.environments.shared_setup import needs_client
    from tangram.rl.rollout.rewards import effective_settings

    pairs = list(zip(tasks_of(settings), settings.tasks, strict=True))
    acting = [task_settings.name for task, task_settings in pairs if needs_client(task)]
    rewards = {task_settings.name: effective_settings(task, task_settings.reward).kind for task, task_settings in pairs}
    needed = bool(acting) or any(kind != "environment" for kind in rewards.values())
    resources = settings.resources
    backend = (resources.url or resources.backend) if needed else ""
    return {
        "tasks": acting,
        "rewards": rewards,
        "teachers": [teacher.name for teacher in settings.teachers],
        "where": backend,
        "needs_root": backend == "sandbox",
        "cores": resources.cores if needed and not resources.url else None,
    }


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The plan as text."""
    batch, resources, evaluation = plan["batch"], plan["resources"], plan["evaluation"]
    time_limit = f", at most {plan['seconds_max']:g} s" if plan["seconds_max"] is not None else ""
    lines = [
        f"mode        {plan['mode']}, α {plan['alpha']}: {_mode(plan['mode'], plan['alpha'])}",
        f"steps       {plan['steps']:,}{time_limit}; each of {batch['groups']} groups of {batch['members']}, "
        f"{batch['trajectories']:,} trajectories; at most {plan['in_play_max']} groups started and not yet trained on",
        f"objective   {_objective(plan['objective'])}",
        f"policy      {plan['policy']}",
        f"warm start  {_warm_start(plan['warm_start'])}",
        f"evaluation  {_evaluation(evaluation)}",
        f"resources   {_external_resources_text(resources)}",
        f"folder      {plan['folder']}: a checkpoint every {plan['checkpoints']['every']} steps, the newest "
        f"{plan['checkpoints']['keep']} are kept",
    ]
    if resources["needs_root"] and os.geteuid() != 0:
        lines.append(
            "! sandboxes need root: run it as root, or with --set resources.backend=process, which isolates nothing"
        )
    return lines


def _mode(mode: str, staleness_bound: int) -> str:
    """The staleness rule as text; with α 0 no trajectory continues across updates."""
    return DESCRIPTION_BY_MODE["sync+" if staleness_bound == 0 and mode in ("start-bound", "async") else mode]


def _objective(objective: dict[str, Any]) -> str:
    kl = f", KL {objective['kl']:g} to the reference" if objective["kl"] else ""
    return (
        f"{objective['kind']}, learning rate {objective['learning_rate']:g}, correction {objective['correction']}{kl}"
    )


def _warm_start(warm: dict[str, float]) -> str:
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


def _external_resources_text(resources: dict[str, Any]) -> str:
    if not resources["where"]:
        return "nothing: all tasks are played and rewarded inside this process"
    acting = ", ".join(resources["tasks"])
    rewards = ", ".join(f"{name} by {kind}" for name, kind in resources["rewards"].items() if kind != "environment")
    cores = f" with {resources['cores']:g} cores" if resources["cores"] is not None else ""
    parts = [f"{resources['where']}{cores}"]
    parts += [f"actions of {acting}"] if acting else []
    parts += [f"rewards of {rewards}"] if rewards else []
    parts += [f"teachers: {', '.join(resources['teachers'])}"] if resources["teachers"] else []
    return "; ".join(parts)
