"""Timelines of rollouts and of training runs as Chrome traces."""

from __future__ import annotations

from itertools import pairwise

from tangram.reports.trace_events import Phase, TraceEvents
from tangram.rl.observe.run_history import RunHistory
from tangram.rl.observe.timeline import RolloutTimeline, StageTime, largest_shares, seconds

STAGES, TRAJECTORIES, TRAINING = "stages", "trajectories", "training"
"""The processes of a trace."""
CAUSES_SHOWN = 4


# ---- rollouts ---------------------------------------------------------------------------------------------------


def trace_of_timeline(timeline: RolloutTimeline) -> TraceEvents:
    """A lane for each stage with its busy and idle times, a lane for each trajectory, and counters of stages."""
    trace = TraceEvents()
    for stage in timeline.stages.values():
        _add_stage(trace, stage)
    for each in timeline.lanes:
        trajectory = each.trajectory
        lane = trace.lane(TRAJECTORIES, trajectory.id)
        for segment in each.segments:
            args = {"attempt": segment.attempt + 1, "failure": segment.failure} if segment.failure else {}
            trace.complete(
                lane,
                segment.activity.label,
                since_s=seconds(segment.began),
                until_s=seconds(segment.ended),
                category=segment.activity.kind.value,
                args={"task": trajectory.task, **args},
            )
    return trace


def _add_stage(trace: TraceEvents, stage: StageTime) -> None:
    lane = trace.lane(STAGES, stage.stage.value)
    edges = [0, *(edge for gap in stage.gaps for edge in (gap.began, gap.ended)), stage.total]
    for since, until in list(pairwise(edges))[::2]:
        if until > since:
            trace.complete(lane, "busy", since_s=seconds(since), until_s=seconds(until), category="busy")
    for gap in stage.gaps:
        causes = largest_shares(gap.causes, gap.length, CAUSES_SHOWN)
        trace.complete(
            lane,
            f"idle: {next(iter(gap.causes)).label}",
            since_s=seconds(gap.began),
            until_s=seconds(gap.ended),
            category="idle",
            args={"because of": causes},
        )
    for since, working, waiting in stage.counts:
        values = {"working": working, "waiting": waiting}
        trace.counter(STAGES, f"{stage.stage.value}: trajectories", at_s=seconds(since), values=values)


# ---- training runs ----------------------------------------------------------------------------------------------


def trace_of_training(run: RunHistory) -> TraceEvents:
    """A lane of steps, each divided into waiting, training, pushing weights and evaluation, counters, and notices.

    Within a step the parts are drawn in this order; a run records how long each took, not when it began.
    """
    trace = TraceEvents()
    lane = trace.lane(TRAINING, "steps")
    if run.warm_start_end_s is not None:
        trace.complete(lane, "warm start", since_s=0.0, until_s=run.warm_start_end_s, category="warm start")
    for step in run.steps:
        since_s = step.at_s - step.step_s
        phases, at_s = [], since_s
        parts = (
            ("wait", step.wait_s),
            ("train", step.train_s),
            ("push", step.push_s),
            ("evaluation", step.evaluation_s),
        )
        for name, length_s in parts:
            phases.append(Phase(name, at_s, at_s + length_s))
            at_s += length_s
        args = {"waited for": step.waited_for, "staleness": list(step.staleness)}
        trace.complete(
            lane,
            f"step {step.step}",
            since_s=since_s,
            until_s=step.at_s,
            category="step",
            args=args,
            phases=phases,
        )
        rewards = {name: task.reward for name, task in step.tasks.items()}
        trace.counter(TRAINING, "reward", at_s=step.at_s, values=rewards)
        groups = {"in flight": step.in_flight, "buffered": step.buffered}
        trace.counter(TRAINING, "groups", at_s=step.at_s, values=groups)
        for engine in step.engines:
            trace.counter(TRAINING, f"{engine.name}: busy share", at_s=step.at_s, values={"busy": engine.busy_share})
        for pool in step.pools:
            trace.counter(TRAINING, f"{pool.name}: waiting actions", at_s=step.at_s, values={"waiting": pool.waiting})
    for evaluation in run.evaluations:
        trace.counter(TRAINING, "held-out reward", at_s=evaluation.at_s, values=evaluation.scores)
    for notice in run.notices:
        trace.instant(TRAINING, f"{notice.kind}: {notice.text}", at_s=notice.at_s)
    return trace
