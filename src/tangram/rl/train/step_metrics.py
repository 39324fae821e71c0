"""Metrics of a step: counts events between two gradient steps, and makes a `Trained` line of them.

Owns the counts. Gets every event from others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tangram.rl.buffer.records import FAILED, LEFT_BEHIND, STALE, DroppedGroup, group_number
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.inference.router_records import EngineUpdated
from tangram.rl.runs.metrics_lines import EngineUse, PoolUse, TaskStep, Trained
from tangram.rl.train.trainer import TrainStepResult
from tangram.rl.trajectories.training_batch import TrainingBatch
from tangram.rl.trajectories.trajectory import Ending, Group, Trajectory

LEFT_BEHIND_CAUSE = "the batch was enough without it, and it is too old for the next one"


class StepMetrics:
    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, now: float, *, started: int = 0, engines: Iterable[EngineStatistics] = ()) -> None:
        """Starts to count the first step. `started`: groups ever started. `engines`: their statistics now; what they
        did before belongs to no step."""
        self._began_at = now
        self._engines = {engine.name: engine for engine in engines}
        """As of the end of the previous step."""
        self._started = started
        """As of the end of the previous step."""
        self._reset()

    def _reset(self) -> None:
        self._aborted = self._tokens_discarded = 0
        self._dropped: Counter[str] = Counter()
        self._wait_s_by_stage: dict[str, float] = {}
        self._wait_s = self._pull_s = self._exposed_s = self._evaluation_s = 0.0

    # ---- events ----

    def on_group_end(self, group: Group) -> None:
        self._aborted += sum(trajectory.ending is Ending.STALE for trajectory in group.left_out)
        self._tokens_discarded += tokens_written(group.left_out)
        if not group.members:
            self._dropped[drop_cause(group)] += 1

    def on_resume_dropped(self, causes: Iterable[str]) -> None:
        """Counts groups that the resumption dropped."""
        self._dropped.update(causes)

    def on_dropped(self, dropped: Iterable[DroppedGroup]) -> None:
        for dropped_group in dropped:
            self._dropped[dropped_group.cause] += 1
            self._tokens_discarded += tokens_written(dropped_group.group.members)

    def add_wait(self, seconds: float, stages: Mapping[str, int]) -> None:
        """Adds time spent waiting for a batch, divided among the stages of trajectories in flight."""
        self._wait_s += seconds
        total = sum(stages.values())
        for stage, number in stages.items():
            self._wait_s_by_stage[stage] = self._wait_s_by_stage.get(stage, 0.0) + seconds * number / total

    def on_engine_updated(self, event: EngineUpdated) -> None:
        self._pull_s += event.pull_s
        self._exposed_s += event.exposed_s

    def add_evaluation(self, seconds: float) -> None:
        """Adds time that training waited for an evaluation."""
        self._evaluation_s += seconds

    # ---- the line ----

    def finish_step(
        self,
        batch: TrainingBatch,
        stepped: TrainStepResult,
        *,
        now: float,
        started: int,
        dropped: Mapping[str, int],
        buffered: int,
        in_flight: int,
        stages: Mapping[str, int],
        pools: tuple[PoolUse, ...],
        engines: Iterable[EngineStatistics],
    ) -> Trained:
        """Ends the step and starts the next. `started`, `dropped`: groups since the run began."""
        step_s = now - self._began_at
        line = Trained(
            at_s=now,
            step=stepped.weights.version,
            step_s=step_s,
            wait_s=self._wait_s,
            waited_for=dict(self._wait_s_by_stage),
            train_s=stepped.train_s,
            push_s=stepped.push_s,
            pull_s=self._pull_s,
            exposed_s=self._exposed_s,
            evaluation_s=self._evaluation_s,
            metrics=stepped.metrics,
            tasks=task_steps(batch),
            staleness=histogram(batch.staleness),
            groups=tuple(group_number(group.id) for group in batch.groups),
            short=sum(not group.is_complete for group in batch.groups),
            started=max(0, started - self._started),
            dropped=dict(self._dropped),
            aborted=self._aborted,
            tokens_discarded=self._tokens_discarded,
            started_so_far=started,
            dropped_so_far=dict(dropped),
            buffered=buffered,
            in_flight=in_flight,
            stages=dict(stages),
            pools=pools,
            engines=self._engine_uses(engines, step_s),
        )
        self._began_at, self._started = now, started
        self._reset()
        return line

    def _engine_uses(self, engines: Iterable[EngineStatistics], seconds: float) -> tuple[EngineUse, ...]:
        uses = []
        for engine in engines:
            before = self._engines.get(engine.name)
            if before is None or before.steps > engine.steps:  # it was restarted
                before = EngineStatistics(name=engine.name)
            self._engines[engine.name] = engine
            busy_s = engine.prefill_s + engine.decode_s - before.prefill_s - before.decode_s
            uses.append(
                EngineUse(
                    name=engine.name,
                    version=engine.version,
                    busy_share=min(1.0, busy_s / seconds) if seconds > 0.0 else 0.0,
                    prefill_tokens=engine.prefill_tokens - before.prefill_tokens,
                    decode_tokens=engine.decode_tokens - before.decode_tokens,
                    suspended_s=engine.suspended_s - before.suspended_s,
                )
            )
        return tuple(uses)


def drop_cause(group: Group) -> str:
    """Returns under which cause a group without members is counted."""
    if any(trajectory.ending is Ending.STALE for trajectory in group.left_out):
        return STALE
    return LEFT_BEHIND if any(trajectory.cause == LEFT_BEHIND_CAUSE for trajectory in group.left_out) else FAILED


def tokens_written(trajectories: Iterable[Trajectory]) -> int:
    """Tokens that the policy sampled."""
    return sum(len(turn.tokens) for trajectory in trajectories for turn in trajectory.turns)


def histogram(values: Iterable[int]) -> tuple[int, ...]:
    """Returns how many values are 0, 1, 2, ..."""
    counts = Counter(values)
    return tuple(counts[value] for value in range(max(counts, default=-1) + 1))


def task_steps(batch: TrainingBatch) -> dict[str, TaskStep]:
    steps = {}
    for task in sorted({group.task for group in batch.groups}):
        groups = [group for group in batch.groups if group.task == task]
        members = [member for group in groups for member in group.members]
        stale = TrainingBatch(version=batch.version, groups=tuple(groups)).staleness
        steps[task] = TaskStep(
            groups=len(groups),
            trajectories=len(members),
            reward=sum(member.reward or 0.0 for member in members) / len(members),
            turns=sum(len(member.turns) for member in members) / len(members),
            tokens=tokens_written(members) / len(members),
            staleness_mean=sum(stale) / len(stale),
            staleness_max=max(stale),
        )
    return steps
