"""Settings of a training run: those of a rollout, and the tables about learning.

Owns every key, its default and its description. Never reads a file and never creates the described objects. Promises
that every record is valid, however it was created, and that no run trains on stale samples without a correction.

    TrainSettings     the whole file; all tables of RolloutSettings, and
    ├── training      [training]     the schedule: mode, staleness, steps, batch
    ├── objective     [objective]    advantages, loss and optimiser
    ├── warm_start    [warm_start]   behaviour cloning before
    ├── evaluation    [evaluation]   on held-out seeds
    ├── checkpoints   [checkpoints]  how often, and how many are kept
    └── teachers      [[teachers]]   models that a policy is distilled from
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec

from tangram.config import validators
from tangram.config.tables import MIB, ConfigTable
from tangram.config.validators import number, one_of, optional
from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import POSITIVE, TEMPERATURE, RolloutSettings

Mode = Literal["sync", "sync+", "one-off", "start-bound", "async"]
Objective = Literal["grpo", "distill"]
Normalise = Literal["tokens", "sequence", "constant"]
Correction = Literal["truncated", "behaviour", "none"]
Overlong = Literal["keep", "mask", "punish"]
Decay = Literal["none", "linear", "cosine"]
Pull = Literal["at_once", "after_batch"]
ADVANTAGES = ("std", "mean", "leave-one-out")

NOT_NEGATIVE = number("a number, at least 0", zero=True)
MAYBE_SECONDS = optional(number("a number of seconds above 0"))
SHARE_OR_0 = number("from 0 to 1", zero=True, most=1.0)


class TrainingSettings(ConfigTable, frozen=True, kw_only=True):
    """The schedule: what runs concurrently, and how stale a sample may be."""

    mode: Annotated[Mode, one_of(Mode, renamed={"rollart": "async"})] = "async"
    """`sync`: a batch is played in lockstep turns, rewarded, then trained on. `sync+`: each trajectory at its own pace,
    with rewards as they end. `one-off`: the next batch is played to its end by the old weights while one is trained on
    (one-step off-policy). `start-bound`: trajectories continue across weight updates; staleness is bounded only when
    they start. `async`: as `start-bound`, but a trajectory that becomes too stale is stopped immediately."""
    staleness: validators.CountOr0 = 1
    """α: versions between the first token of a trajectory and the gradient step that uses it. It applies to
    `start-bound` and `async`; with 0, playing and training alternate, and no sample is older than the weights."""
    steps: validators.Count = 200
    """Gradient steps of the run, one batch each."""
    seconds_max: Annotated[float | None, MAYBE_SECONDS] = None
    """Time limit of the run, without the warm start."""
    batch: validators.Count = 16
    """Groups per gradient step."""
    batch_min: validators.MaybeCount = None
    """Groups that suffice for a step once the oldest of them has waited `batch_wait_s`; by default all."""
    batch_wait_s: Annotated[float | None, MAYBE_SECONDS] = None
    """Wait after which `batch_min` groups suffice; by default never."""
    buffer_bytes: validators.Size = 256 * MIB
    """Memory for samples that wait to be trained on."""
    pull: Annotated[Pull, one_of(Pull)] = "at_once"
    """When engines take new weights: `at_once` when they are published, or `after_batch`, once the next batch is
    complete, which is the order of the RollArt paper and makes every sample one version older."""
    threads: validators.Count = 1
    """PyTorch threads of the trainer."""
    stall_s: validators.Seconds = 120.0
    """Watchdog: after this long without progress, the run reports what it waits for and stops what is stuck."""
    stalls_max: validators.Count = 3
    """Consecutive stalls after which the run saves a checkpoint and ends."""

    def check_consistency(self) -> None:
        if self.batch_min is not None and self.batch_min > self.batch:
            raise InvalidConfig("batch_min", self.batch_min, f"at most batch, which is {self.batch}")
        if (self.batch_min is None) != (self.batch_wait_s is None):
            raise InvalidConfig("batch_wait_s", self.batch_wait_s, "both batch_min and batch_wait_s, or none of them")

    @property
    def staleness_bound(self) -> int:
        """α, the staleness bound of this mode; in `start-bound`, only at the start."""
        return {"sync": 0, "sync+": 0, "one-off": 1}.get(self.mode, self.staleness)

    @property
    def enforces_staleness(self) -> bool:
        """Whether nothing staler than α is ever trained on. Only `start-bound` with α above 0 does not check staleness
        after a group has started."""
        return self.mode != "start-bound" or self.staleness_bound == 0


class ObjectiveSettings(ConfigTable, frozen=True, kw_only=True):
    """The objective and the optimiser."""

    kind: Annotated[Objective, one_of(Objective)] = "grpo"
    """`grpo`: learns from rewards, relative to those of the group; `distill`: learns from the log-probabilities of
    teachers, per token."""
    learning_rate: Annotated[float, POSITIVE] = 7e-4
    """Learning rate of AdamW."""
    decay: Annotated[Decay, one_of(Decay)] = "none"
    """Decay of the learning rate to a tenth over the steps of the run."""
    rate_warmup_steps: validators.CountOr0 = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight decay of AdamW."""
    gradient_norm_max: Annotated[float, POSITIVE] = 1.0
    """Gradients with a larger norm are clipped to this norm."""
    epochs: validators.Count = 2
    """Passes over each batch."""
    minibatch: validators.Count = 64
    """Trajectories of one optimiser step."""
    microbatch: validators.Count = 64
    """Trajectories of one forward and backward pass; gradients accumulate over the microbatches of a minibatch."""
    clip_low: Annotated[float, SHARE_OR_0] = 0.2
    """Lower clip: the probability ratio is clipped at 1 - `clip_low`."""
    clip_high: Annotated[float, NOT_NEGATIVE] = 0.28
    """Upper clip: the probability ratio is clipped at 1 + `clip_high`. A value above `clip_low` is clip-higher, as in
    DAPO."""
    correction: Annotated[Correction, one_of(Correction)] = "truncated"
    """Off-policy correction for samples of older weights. `truncated` (decoupled PPO with truncated importance
    sampling, TIS): the ratio is clipped against the trainer's probabilities at the start of the step, and each token
    has the importance weight min(start / sampler, `correction_max`). `behaviour`: the ratio is clipped against the
    probabilities of the sampler. `none`: no correction, allowed only if α is 0."""
    correction_max: Annotated[float, POSITIVE] = 2.0
    """Upper bound of the importance weight of a token."""
    kl: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the KL divergence from the reference, which is the policy before the first step; 0: no reference."""
    entropy: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the entropy bonus, which keeps a policy exploring."""
    advantage: validators.Text = "std"
    """Advantage of a member: its reward minus the group mean, divided by the standard deviation (`std`) or not
    (`mean`); minus the mean of the others (`leave-one-out`); or `module:name` of a function."""
    loss: validators.Text = "clipped"
    """`clipped`, the clipped GRPO loss, or `module:name` of a function."""
    normalise: Annotated[Normalise, one_of(Normalise)] = "sequence"
    """`tokens`: mean over the tokens of a minibatch, as in DAPO. `sequence`: mean over its trajectories, each the mean
    over its tokens, so that a short trajectory counts as much as a long one, as in GRPO. `constant`: sum divided by
    trajectories times the longest possible trajectory, so that length does not matter, as in Dr. GRPO."""
    zero_variance: Annotated[Literal["drop", "keep"], one_of(Literal["drop", "keep"])] = "drop"
    """Groups whose members all have the same reward, so no advantage: `drop` leaves them out of the batch, `keep`
    counts them in means over it."""
    overlong: Annotated[Overlong, one_of(Overlong)] = "keep"
    """Trajectories that were cut off: trained on like others, not trained on (`mask`), or with the lowest reward of the
    task (`punish`)."""

    def check_consistency(self) -> None:
        if ":" not in self.advantage and self.advantage not in ADVANTAGES:
            raise InvalidConfig("advantage", self.advantage, f"one of {', '.join(ADVANTAGES)}, or `module:name`")
        if ":" not in self.loss and self.loss != "clipped":
            raise InvalidConfig("loss", self.loss, "clipped, or `module:name`")


class WarmStartSettings(ConfigTable, frozen=True, kw_only=True):
    """Behaviour cloning before the first version: supervised steps on scripted agents that know the format but not the
    goal. It ends for a task at its `warm_until`."""

    agent: validators.Text = "teacher"
    """Name of the agent that the policy imitates."""
    episodes: validators.Count = 512
    """Demonstrations of each task, played once and imitated repeatedly."""
    batch: validators.Count = 64
    """Episodes of one step."""
    learning_rate: Annotated[float, POSITIVE] = 3e-3
    """Learning rate of the AdamW of the warm start."""
    steps_max: validators.Count = 400
    """Maximum number of steps before training begins."""
    check_every: validators.Count = 10
    """Steps between two checks of the policy."""
    check_episodes: validators.Count = 64
    """Episodes of each task in a check."""


class EvaluationSettings(ConfigTable, frozen=True, kw_only=True):
    """Evaluations on held-out seeds, while training continues."""

    every: validators.CountOr0 = 10
    """Steps between two evaluations; 0: never."""
    episodes: validators.Count = 64
    """Episodes of each task in an evaluation."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """0 is greedy decoding."""


class CheckpointSettings(ConfigTable, frozen=True, kw_only=True):
    """Checkpoints, from which a run is resumed."""

    every: validators.Count = 20
    """Steps between two checkpoints; there is also one at the start and at the end."""
    keep: validators.Count = 2
    """Number of newest checkpoints; older ones are deleted."""


class TeacherSettings(ConfigTable, frozen=True, kw_only=True):
    """A model that a policy is distilled from, served as a model service. Tasks name it by `reward = { kind =
    "teacher", service = NAME }`."""

    name: validators.Name
    """Name of its model service."""
    checkpoint: validators.PathText
    """A folder in our own or in Hugging Face layout, with the vocabulary of the policy."""


class TrainSettings(RolloutSettings, frozen=True, kw_only=True):
    """All settings of a training run."""

    training: TrainingSettings = TrainingSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    teachers: tuple[TeacherSettings, ...] = ()

    PATH_KEYS: ClassVar = {**RolloutSettings.PATH_KEYS, "teachers": ("checkpoint",)}

    def check_consistency(self) -> None:
        mode, correction = self.training.mode, self.objective.correction
        if correction == "none" and self.training.staleness_bound > 0:
            raise InvalidConfig(
                "objective.correction",
                correction,
                f"truncated or behaviour: in mode {mode} samples are older than the weights they train, and without a "
                "correction each would count as if it were new (a ratio of 1)",
            )
        for at, engine in enumerate(self.engines):
            if engine.kind != self.engines[0].kind:
                expected = f"{self.engines[0].kind} as engines[0]: weights are published for one kind of engines"
                raise InvalidConfig(f"engines[{at}].kind", engine.kind, expected)
        self._require_known_teachers()

    @property
    def is_group_relative(self) -> bool:
        """Whether a reward counts relative to its group, so that a single member has no advantage."""
        own = self.objective
        return own.kind == "grpo" and (own.zero_variance == "drop" or own.advantage in ADVANTAGES)

    def require_group_baseline(self) -> None:
        """Raises InvalidConfig for groups that can never have an advantage."""
        if self.is_group_relative and self.groups.size < 2:
            expected = (
                "at least 2: a reward is measured against those of its group, and of one alone nothing is learned; or "
                'an advantage of your own, with objective.zero_variance = "keep"'
            )
            raise InvalidConfig("groups.size", self.groups.size, expected)

    def with_trainable_groups(self) -> Self:
        """Drops groups instead of closing them with one member if that member would have no advantage."""
        if not self.is_group_relative or self.groups.size_min > 1:
            return self
        return msgspec.structs.replace(self, groups=msgspec.structs.replace(self.groups, size_min=2))

    def _require_known_teachers(self) -> None:
        """Raises InvalidConfig unless teachers have distinct names, and each reward of kind `teacher` names one, here
        or at the shared service."""
        if self.objective.kind == "distill":
            for at, task in enumerate(self.tasks):
                if task.reward.kind != "teacher":
                    expected = f'"teacher" with its service, as objective.kind = "distill" has {task.name} learn by one'
                    raise InvalidConfig(f"tasks[{at}].reward.kind", task.reward.kind, expected)
        names = [teacher.name for teacher in self.teachers]
        services = [task.reward.service if task.reward.kind == "teacher" else "" for task in self.tasks]
        for at, name in enumerate(services):
            if name and name not in names and not self.resources.url:
                known = ", ".join(names) if names else "there are none: [[teachers]] with a name and a checkpoint"
                raise InvalidConfig(f"tasks[{at}].reward.service", name, f"one of the teachers ({known})")
        for at, name in enumerate(names):
            if name in names[:at]:
                raise InvalidConfig(f"teachers[{at}].name", name, "each name once")
            if name not in services:
                expected = 'one that a task asks, by reward = { kind = "teacher", service = NAME }; or no such teacher'
                raise InvalidConfig(f"teachers[{at}].name", name, expected)
