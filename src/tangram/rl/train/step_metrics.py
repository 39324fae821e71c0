"""The ledger of a step: what happens between two gradient steps, counted until the second is done.

Owns the counting and the making of a `Trained` line of it. It is told, and asks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tangram.rl.buffer.records import FAILED, LEFT_BEHIND, STALE, number_of
from tangram.rl.buffer.sample_buffer import Dropped
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.inference.router_records import EngineUpdated
from tangram.rl.rollout.records import Ending, Group, Trajectory
from tangram.rl.train.records import Batch, EngineUse, PoolUse, Stepped, TaskStep, Trained

LEFT_BEHIND_CAUSE = "the batch was enough without it, and it is too old for the next one"


class StepLedger:
    def __init__(self, now_s: float, *, started: int = 0, engines: Iterable[EngineStatistics] = ()) -> None:
        """`started`: groups, ever; `engines`: as they are: what they did before is of no step."""
        self._began_s = now_s
        self._engines = {each.name: each for each in engines}
        """As they were at the end of the step before."""
        self._started = started
        """Groups, until then."""
        self._clear()

    def _clear(self) -> None:
        self._aborted = self._discarded = 0
        self._dropped: Counter[str] = Counter()
        self._waited: dict[str, float] = {}
        self._wait_s = self._pull_s = self._exposed_s = self._evaluation_s = 0.0

    # ---- what it is told ----

    def group_ended(self, group: Group) -> None:
        self._aborted += sum(each.ending is Ending.STALE for each in group.left_out)
        self._discarded += written(group.left_out)
        if not group.members:
            self._dropped[lost_by(group)] += 1

    def dropped_before(self, causes: Iterable[str]) -> None:
        """Groups that were dropped when the run was resumed."""
        self._dropped.update(causes)

    def dropped(self, dropped: Iterable[Dropped]) -> None:
        for each in dropped:
            self._dropped[each.cause] += 1
            self._discarded += written(each.group.members)

    def waited(self, seconds: float, stages: Mapping[str, int]) -> None:
        """For a batch, while trajectories in play did this."""
        self._wait_s += seconds
        total = sum(stages.values())
        for stage, number in stages.items():
            self._waited[stage] = self._waited.get(stage, 0.0) + seconds * number / total

    def updated(self, event: EngineUpdated) -> None:
        self._pull_s += event.pull_s
        self._exposed_s += event.exposed_s

    def evaluated(self, seconds: float) -> None:
        """That training stood still for it."""
        self._evaluation_s += seconds

    # ---- what it makes of it ----

    def line(
        self,
        batch: Batch,
        stepped: Stepped,
        *,
        now_s: float,
        started: int,
        dropped: Mapping[str, int],
        buffered: int,
        in_flight: int,
        stages: Mapping[str, int],
        pools: tuple[PoolUse, ...],
        engines: Iterable[EngineStatistics],
    ) -> Trained:
        """The step is done; what comes belongs to the next. `started`, `dropped`: groups, ever."""
        step_s = now_s - self._began_s
        made = Trained(
            at_s=now_s,
            step=stepped.weights.version,
            step_s=step_s,
            wait_s=self._wait_s,
            waited_for=dict(self._waited),
            train_s=stepped.train_s,
            push_s=stepped.push_s,
            pull_s=self._pull_s,
            exposed_s=self._exposed_s,
            evaluation_s=self._evaluation_s,
            metrics=stepped.metrics,
            tasks=tasks_of(batch),
            staleness=histogram(batch.staleness),
            groups=tuple(number_of(group.id) for group in batch.groups),
            short=sum(not group.whole for group in batch.groups),
            started=max(0, started - self._started),
            dropped=dict(self._dropped),
            aborted=self._aborted,
            tokens_discarded=self._discarded,
            started_so_far=started,
            dropped_so_far=dict(dropped),
            buffered=buffered,
            in_flight=in_flight,
            stages=dict(stages),
            pools=pools,
            engines=self._uses(engines, step_s),
        )
        self._began_s, self._started = now_s, started
        self._clear()
        return made

    def _uses(self, engines: Iterable[EngineStatistics], seconds: float) -> tuple[EngineUse, ...]:
        uses = []
        for each in engines:
            before = self._engines.get(each.name)
            if before is None or before.steps > each.steps:  # it was started anew
                before = EngineStatistics(name=each.name)
            self._engines[each.name] = each
            busy_s = each.prefill_s + each.decode_s - before.prefill_s - before.decode_s
            uses.append(
                EngineUse(
                    name=each.name,
                    version=each.version,
                    busy_share=min(1.0, busy_s / seconds) if seconds > 0.0 else 0.0,
                    prefill_tokens=each.prefill_tokens - before.prefill_tokens,
                    decode_tokens=each.decode_tokens - before.decode_tokens,
                    suspended_s=each.suspended_s - before.suspended_s,
                )
            )
        return tuple(uses)


def lost_by(group: Group) -> str:
    """Why it has no members, as it is counted."""
    if any(each.ending is Ending.STALE for each in group.left_out):
        return STALE
    return LEFT_BEHIND if any(each.cause == LEFT_BEHIND_CAUSE for each in group.left_out) else FAILED


def written(trajectories: Iterable[Trajectory]) -> int:
    """Tokens of the policy."""
    return sum(len(turn.tokens) for each in trajectories for turn in each.turns)


def histogram(values: Iterable[int]) -> tuple[int, ...]:
    """How many are 0, 1, 2, ..."""
    counts = Counter(values)
    return tuple(counts[value] for value in range(max(counts, default=-1) + 1))


def tasks_of(batch: Batch) -> dict[str, TaskStep]:
    found = {}
    for task in sorted({group.task for group in batch.groups}):
        groups = [group for group in batch.groups if group.task == task]
        members = [each for group in groups for each in group.members]
        stale = Batch(version=batch.version, groups=tuple(groups)).staleness
        found[task] = TaskStep(
            groups=len(groups),
            trajectories=len(members),
            reward=sum(each.reward or 0.0 for each in members) / len(members),
            turns=sum(len(each.turns) for each in members) / len(members),
            tokens=written(members) / len(members),
            staleness_mean=sum(stale) / len(stale),
            staleness_max=max(stale),
        )
    return found
