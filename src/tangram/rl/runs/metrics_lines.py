"""Metrics lines: one record per event of a training run.

Records only. Each line of `metrics.jsonl` is a MetricsLine; live view, report and TensorBoard are made of these lines
alone. Times are seconds: durations, or `at_s` since the run began, resumptions included.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    at_s: float


class RunBegan(MetricsLine, frozen=True, kw_only=True, tag="Began"):
    """The first line, and again after each resumption."""

    began_at: float
    """Unix time at which `at_s` is 0."""
    step: int = 0
    """The step from which the run continues."""
    mode: str
    alpha: int
    settings: dict[str, object] = {}
    """The settings of the run, as JSON."""
    resumed_from: str = ""
    """Path of the checkpoint."""
    left: str = ""
    """For a resumed run: what happened to samples in flight and in the buffer."""


class WarmStartChecked(MetricsLine, frozen=True, kw_only=True, tag="Warmed"):
    """A check of the policy during its warm start."""

    step: int
    loss: float
    scores: dict[str, float]
    """By task: mean reward of sampled episodes."""
    greedy: dict[str, float] = {}
    """By task: mean reward of greedy decoding; only at the end."""
    over: bool = False
    """The warm start ended with this check."""
    cause: str = ""
    """Why it ended."""


class TaskStep(msgspec.Struct, frozen=True, kw_only=True):
    """One task in one batch."""

    groups: int
    trajectories: int
    reward: float
    """Mean."""
    turns: float
    tokens: float
    """Mean number of action tokens of a trajectory."""
    staleness_mean: float
    staleness_max: int


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """One pool since the step before."""

    name: str
    total: float
    """Units: cores, devices, requests at once."""
    actions: int = 0
    """Actions that ended."""
    act_mean_s: float = 0.0
    act_p99_s: float = 0.0
    act_cells: dict[int, int] = {}
    """Completion times, counted by cell of the grid of `tangram.runtime.latency_histogram`, from which percentiles of
    several steps are computed."""
    waiting_mean_s: float = 0.0
    held_unit_s: float = 0.0
    """Units times seconds held by actions."""
    reserved_unit_s: float = 0.0
    """Unit-seconds held if each trajectory had reserved its largest amount from its first action to its last."""
    waiting: int = 0
    """Actions that wait for the pool now."""


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """One engine since the step before."""

    name: str
    version: int
    busy_share: float
    """Share of the time in prefill or decode."""
    prefill_tokens: int
    decode_tokens: int
    suspended_s: float = 0.0


class Trained(MetricsLine, frozen=True, kw_only=True, tag="Trained"):
    """A gradient step. `step_s` is mostly `wait_s` and `train_s`."""

    step: int
    """Counts from 1; equals the version that the step made."""
    step_s: float
    """Time from the end of the step before to the end of this one."""
    wait_s: float
    """Time that the step waited for the batch."""
    waited_for: dict[str, float] = {}
    """The seconds of `wait_s` by stage of the missing trajectories: generate, step, reset, reward, buffer, ..."""
    train_s: float
    push_s: float
    pull_s: float = 0.0
    """Pulling weights, summed over engines."""
    exposed_s: float = 0.0
    """The part of `pull_s` in which the engine could not generate."""
    evaluation_s: float = 0.0
    """Time that the step waited for an evaluation."""
    metrics: dict[str, float]
    tasks: dict[str, TaskStep]
    staleness: tuple[int, ...]
    """Number of trajectories by staleness, from 0."""
    groups: tuple[int, ...] = ()
    """Group numbers of the batch. No number is in two steps of one lineage of weights."""
    short: int = 0
    """Groups of the batch with fewer members than configured, because lost ones could not be replaced."""
    started: int = 0
    """Groups that were started since the step before."""
    dropped: dict[str, int] = {}
    """Groups since the step before that were dropped, by cause: stale, failed, full, left_behind, lost_lineage."""
    aborted: int = 0
    """Trajectories since the step before that were stopped as stale."""
    tokens_discarded: int = 0
    """Tokens since the step before that the policy sampled and that are in no batch."""
    started_so_far: int = 0
    """Groups that were started since the run began, in lost lineages too."""
    dropped_so_far: dict[str, int] = {}
    """Groups that were dropped since the run began, in lost lineages too, by cause."""
    buffered: int = 0
    """Groups that wait to be trained on."""
    in_flight: int = 0
    """Groups in flight."""
    stages: dict[str, int] = {}
    """Number of trajectories in flight by stage."""
    pools: tuple[PoolUse, ...] = ()
    engines: tuple[EngineUse, ...] = ()


class Evaluated(MetricsLine, frozen=True, kw_only=True, tag="Evaluated"):
    step: int
    seconds: float
    scores: dict[str, float]
    """By task: mean reward on held-out seeds."""
    spread: dict[str, float] = {}
    """By task: standard error of the mean."""
    episodes: dict[str, int] = {}
    """Number of episodes with a reward, by task."""
    temperature: float = 1.0


class Noticed(MetricsLine, frozen=True, kw_only=True, tag="Noticed"):
    """An event that a person should see: an engine was lost, a stall, a fallback, a rollback."""

    kind: str
    """`engine`, `stall`, `rollback`, `checkpoint`, `settings`, `metrics`."""
    text: str
    step: int | None = None
    """The step from which training continues after a rollback."""


class RunEnded(MetricsLine, frozen=True, kw_only=True, tag="Over"):
    """The last line of a run that ended without a crash."""

    step: int
    cause: str
    """`steps`, `seconds`, `interrupted`, or the error."""
    checkpoint: str = ""
    dropped_so_far: dict[str, int] = {}
    """As in Trained."""


AnyMetricsLine = RunBegan | WarmStartChecked | Trained | Evaluated | Noticed | RunEnded
PROGRESS_LINES = (WarmStartChecked, Trained, Evaluated)
"""Lines that show progress of the policy: a run without any of them has made none."""

RESUMED = "resumed"


def dropped_groups(lines: Sequence[AnyMetricsLine]) -> dict[str, int]:
    """Returns the groups that a run dropped, by cause, from the last line that has them."""
    return next((line.dropped_so_far for line in reversed(lines) if isinstance(line, Trained | RunEnded)), {})


def notice_of(line: AnyMetricsLine) -> Noticed | None:
    """Returns what a person should see of a line; of a resumption, what happened to the samples."""
    if isinstance(line, Noticed):
        return line
    return Noticed(at_s=line.at_s, kind=RESUMED, text=line.left) if isinstance(line, RunBegan) and line.left else None
