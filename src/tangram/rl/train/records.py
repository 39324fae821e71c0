"""Records of a training run: what is handed to a trainer, what it answers, and what is written down of every step.

Records only. The line of a run's `metrics.jsonl` is a `Line`; live view, report and TensorBoard are made of these lines
alone. Times are seconds: durations, or `at_s` since the run began (a run that was resumed goes on counting).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.rollout.records import Group

# ---- what a trainer is given, and answers ---------------------------------------------------------------------------


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that one gradient step is made of."""

    version: int
    """From which the step starts."""
    groups: tuple[Group, ...]
    """Ordered by number, so that the same groups give the same step, in whatever order they came."""

    @property
    def staleness(self) -> tuple[int, ...]:
        """Of each trajectory."""
        return tuple(
            self.version - (each.version_first if each.version_first is not None else self.version)
            for group in self.groups
            for each in group.members
        )


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of a scripted agent, in the tokens of the policy."""

    task: str
    tokens: tuple[int, ...]
    is_action: tuple[bool, ...]


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """A gradient step."""

    weights: Weights
    """That it made: one version more than it started from."""
    metrics: dict[str, float]
    """By name, see METRICS."""
    train_s: float
    push_s: float
    """Of publishing."""


METRICS = {
    "loss": "what was minimised, mean over the minibatches",
    "kl_sampler": "divergence of the trainer at the start of the step from what sampled (k3 over action tokens)",
    "kl_reference": "divergence from the reference (k3), if there is one",
    "kl_teacher": "divergence from what teaches (k3 over action tokens), if one does",
    "weight_mean": "of the off-policy weights of all action tokens",
    "weight_truncated": "share of action tokens whose weight was truncated",
    "clip_share": "of action tokens whose ratio was clipped",
    "entropy": "of the policy at action tokens, in nats",
    "zero_variance_share": "of the groups of the batch",
    "gradient_norm": "before it is cut, mean over the minibatches",
    "learning_rate": "of the step",
    "trajectories": "that were trained on",
    "tokens": "action tokens that were trained on",
    "tokens_per_s": "action tokens trained on, all epochs, per second of training",
    "overlong_share": "of trajectories that were cut off",
}
"""What a trainer tells of a step."""


# ---- what is written down -------------------------------------------------------------------------------------------


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    at_s: float


class Began(Line, frozen=True, kw_only=True, tag="Began"):
    """The first line, and again after each resumption."""

    began_at: float
    """Unix time from which `at_s` counts."""
    step: int = 0
    """From which it goes on."""
    mode: str
    alpha: int
    settings: dict[str, object] = {}
    """Of the run, as JSON."""
    resumed_from: str = ""
    """The checkpoint."""
    left: str = ""
    """What became of samples that were in play or in the buffer, in words."""


class Warmed(Line, frozen=True, kw_only=True, tag="Warmed"):
    """A look at the policy during its warm start."""

    step: int
    loss: float
    scores: dict[str, float]
    """By task: mean reward, sampled."""
    greedy: dict[str, float] = {}
    """By task, of the most likely tokens; at the end only."""
    over: bool = False
    """The warm start ended with this."""
    cause: str = ""
    """Why."""


class TaskStep(msgspec.Struct, frozen=True, kw_only=True):
    """A task in one batch."""

    groups: int
    trajectories: int
    reward: float
    """Mean."""
    turns: float
    tokens: float
    """Mean of a trajectory, written by the policy."""
    staleness_mean: float
    staleness_max: int


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """A pool since the step before."""

    name: str
    total: float
    """Units: cores, devices, requests at once."""
    actions: int = 0
    """That ended."""
    act_mean_s: float = 0.0
    act_p99_s: float = 0.0
    act_cells: dict[int, int] = {}
    """Completion times, counted by cell of the grid of
    `tangram.server.observe.history`: percentiles of several steps are made
    of these."""
    waiting_mean_s: float = 0.0
    held_unit_s: float = 0.0
    """Units times seconds that actions held."""
    reserved_unit_s: float = 0.0
    """What they would have held, had each trajectory held its largest amount from its first action to its last."""
    waiting: int = 0
    """Actions that wait for it now."""


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """An engine since the step before."""

    name: str
    version: int
    busy_share: float
    """Of the time, reading or writing."""
    prefill_tokens: int
    decode_tokens: int
    suspended_s: float = 0.0


class Trained(Line, frozen=True, kw_only=True, tag="Trained"):
    """A gradient step. Its time is what it waited for, what it trained, and little else."""

    step: int
    """Counts from 1; the version that it made."""
    step_s: float
    """From the end of the step before to the end of this one."""
    wait_s: float
    """For the batch."""
    waited_for: dict[str, float] = {}
    """Of these seconds, what the missing trajectories were doing: generate, step, reset, reward, buffer, ..."""
    train_s: float
    push_s: float
    pull_s: float = 0.0
    """Reading of weights, summed over engines."""
    exposed_s: float = 0.0
    """Of these, when the engine could not write."""
    evaluation_s: float = 0.0
    """That the step waited for an evaluation."""
    metrics: dict[str, float]
    tasks: dict[str, TaskStep]
    staleness: tuple[int, ...]
    """Trajectories by staleness, from 0."""
    groups: tuple[int, ...] = ()
    """The numbers of the groups of the batch: no number is in two steps of one lineage of weights."""
    short: int = 0
    """Groups of the batch that have fewer members than they should: what was lost could not be played again."""
    started: int = 0
    """Groups, since the step before; likewise the next three."""
    dropped: dict[str, int] = {}
    """Groups that were not trained on, by cause: stale, failed, full, left_behind, lost_lineage."""
    aborted: int = 0
    """Trajectories that were stopped as stale."""
    tokens_discarded: int = 0
    """Written by the policy, and in no batch."""
    started_so_far: int = 0
    """Groups, since the run began, in lineages that were given up too; likewise the next one."""
    dropped_so_far: dict[str, int] = {}
    """By cause."""
    buffered: int = 0
    """Groups that wait to be trained on."""
    in_flight: int = 0
    """Groups in play."""
    stages: dict[str, int] = {}
    """Trajectories in play by what they do now."""
    pools: tuple[PoolUse, ...] = ()
    engines: tuple[EngineUse, ...] = ()


class Evaluated(Line, frozen=True, kw_only=True, tag="Evaluated"):
    step: int
    seconds: float
    scores: dict[str, float]
    """By task: mean reward of seeds that are not trained on."""
    spread: dict[str, float] = {}
    """By task: standard error of the mean."""
    episodes: dict[str, int] = {}
    """That have a reward, by task."""
    temperature: float = 1.0


class Noticed(Line, frozen=True, kw_only=True, tag="Noticed"):
    """Something that whoever looks at the run should know: an engine was lost, a stall, a fallback, a rollback."""

    kind: str
    """`engine`, `stall`, `rollback`, `checkpoint`, `settings`, `metrics`."""
    text: str
    step: int | None = None
    """From which training goes on after a rollback."""


class Over(Line, frozen=True, kw_only=True, tag="Over"):
    """The last line of a run that ended by itself, or was stopped."""

    step: int
    cause: str
    """`steps`, `seconds`, `interrupted`, or what went wrong."""
    checkpoint: str = ""
    dropped_so_far: dict[str, int] = {}
    """As of a step."""


AnyLine = Began | Warmed | Trained | Evaluated | Noticed | Over
REACHED = (Warmed, Trained, Evaluated)
"""Lines of what a policy has come to: a run without any of them has not really begun."""

RESUMED = "resumed"


def dropped_in(lines: Sequence[AnyLine]) -> dict[str, int]:
    """Groups that a run has dropped, by cause: what the last line says that knows it."""
    return next((line.dropped_so_far for line in reversed(lines) if isinstance(line, Trained | Over)), {})


def noticed_in(line: AnyLine) -> Noticed | None:
    """What whoever looks at the run should know of this line; of one that goes on with a run, what became of its
    samples."""
    if isinstance(line, Noticed):
        return line
    return Noticed(at_s=line.at_s, kind=RESUMED, text=line.left) if isinstance(line, Began) and line.left else None
