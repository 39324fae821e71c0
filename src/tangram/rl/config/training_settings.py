"""The settings of a training run: those of a rollout, and the tables that say how the policy learns from it.

Owns every key, its default and its sentence. Never reads a file and never makes what a table describes. Promises that a
record that is there is valid, however it was made, and that no run trains on what it does not correct for.

    TrainSettings     the whole file; all tables of RolloutSettings, and
    ├── training      [training]     the schedule: mode, staleness, steps, batch
    ├── objective     [objective]    what is learned of a batch
    ├── warm_start    [warm_start]   supervised steps before
    ├── evaluation    [evaluation]   on seeds that are never trained on
    ├── checkpoints   [checkpoints]  how often, and how many are kept
    └── teachers      [[teachers]]   models that a policy is distilled from
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec

from tangram.config import valid
from tangram.config.tables import MIB, Table
from tangram.config.valid import number, one_of, optional
from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import POSITIVE, TEMPERATURE, RolloutSettings

Mode = Literal["sync", "sync+", "one-off", "start-bound", "rollart"]
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


class TrainingSettings(Table, frozen=True, kw_only=True):
    """The schedule: what runs beside what, and how old a sample may be."""

    mode: Annotated[Mode, one_of(Mode)] = "rollart"
    """`sync`: a batch is played turn by turn, rewarded, trained on, one after the other. `sync+`: each trajectory at
    its own pace, with rewards as they end. `one-off`: the next batch is played, by the old weights to its end, while
    one is trained on. `start-bound`: trajectories go on across updates, and their age is looked at when they start
    only. `rollart`: likewise, but whatever gets too old is stopped at once."""
    staleness: valid.CountOr0 = 1
    """α: versions that may lie between the first token of a trajectory and the gradient step that it is used in. It
    counts in `start-bound` and `rollart`; 0 plays and trains in turn, and nothing older is trained on in either."""
    steps: valid.Count = 200
    """Gradient steps, each on one batch, after which the run is over."""
    seconds_max: Annotated[float | None, MAYBE_SECONDS] = None
    """The run is over after so long too, the warm start not counted."""
    batch: valid.Count = 16
    """Groups of a step."""
    batch_min: valid.MaybeCount = None
    """Groups with which a step may begin once the oldest of them has waited `batch_wait_s`; all, if it is not said."""
    batch_wait_s: Annotated[float | None, MAYBE_SECONDS] = None
    """After which `batch_min` groups are enough; never, if it is not said."""
    buffer_bytes: valid.Size = 256 * MIB
    """That samples may take while they wait to be trained on."""
    pull: Annotated[Pull, one_of(Pull)] = "at_once"
    """When engines take new weights: as soon as they are published, or only once the next batch is there, which is the
    order in which the protocol was published and makes every sample a version older."""
    threads: valid.Count = 1
    """Of PyTorch, in the trainer."""
    stall_s: valid.Seconds = 120.0
    """Without any progress, after which the run says what it waits for and stops what is stuck."""
    stalls_max: valid.Count = 3
    """In a row, with the last of which the run is given up, with a checkpoint."""

    def together(self) -> None:
        if self.batch_min is not None and self.batch_min > self.batch:
            raise InvalidConfig("batch_min", self.batch_min, f"at most batch, which is {self.batch}")
        if (self.batch_min is None) != (self.batch_wait_s is None):
            raise InvalidConfig("batch_wait_s", self.batch_wait_s, "both batch_min and batch_wait_s, or none of them")

    @property
    def alpha(self) -> int:
        """How old a sample may be in this mode; in `start-bound`, when it starts."""
        return {"sync": 0, "sync+": 0, "one-off": 1}.get(self.mode, self.staleness)

    @property
    def bounds_age(self) -> bool:
        """Whether nothing older than α is ever trained on. Only `start-bound` with α above 0 looks at age no more once
        a group has started."""
        return self.mode != "start-bound" or self.alpha == 0


class ObjectiveSettings(Table, frozen=True, kw_only=True):
    """What is learned of a batch."""

    kind: Annotated[Objective, one_of(Objective)] = "grpo"
    """By rewards, each measured against those of its group; or by the log-probabilities of teachers, token by token."""
    learning_rate: Annotated[float, POSITIVE] = 7e-4
    """Of AdamW."""
    decay: Annotated[Decay, one_of(Decay)] = "none"
    """Of the learning rate over the steps of the run, to a tenth."""
    rate_warmup_steps: valid.CountOr0 = 0
    """Over which the learning rate rises from 0."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Of AdamW."""
    gradient_norm_max: Annotated[float, POSITIVE] = 1.0
    """Longer gradients are cut to this."""
    epochs: valid.Count = 2
    """Over each batch."""
    minibatch: valid.Count = 64
    """Trajectories of one step of the optimiser."""
    microbatch: valid.Count = 64
    """Trajectories of one pass through the model; the gradients of a minibatch are accumulated over several."""
    clip_low: Annotated[float, SHARE_OR_0] = 0.2
    """The ratio of probabilities is clipped at 1 less this ..."""
    clip_high: Annotated[float, NOT_NEGATIVE] = 0.28
    """... and 1 plus this."""
    correction: Annotated[Correction, one_of(Correction)] = "truncated"
    """For samples of older weights. `truncated`: the ratio is clipped against the trainer's own probabilities at the
    start of the step, and each token weighs min(start / behaviour, `correction_max`). `behaviour`: the ratio is clipped
    against the probabilities with which tokens were sampled. `none`: no correction, which only a mode that is not
    asynchronous may have."""
    correction_max: Annotated[float, POSITIVE] = 2.0
    """Of the weight of a token."""
    kl: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the divergence from the reference, the policy as it was before the first step; 0: there is none."""
    entropy: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the entropy, which keeps a policy trying."""
    advantage: valid.Text = "std"
    """Of a member: its reward less the mean of its group, divided by the spread (`std`) or not (`mean`); less the mean
    of the others (`leave-one-out`); or `module:name` of a function."""
    loss: valid.Text = "clipped"
    """`clipped`, or `module:name` of a function."""
    normalise: Annotated[Normalise, one_of(Normalise)] = "sequence"
    """A minibatch is averaged over its tokens; over its trajectories, each averaged over its own tokens, so that one
    that reaches its goal in a few turns counts as much as one that needs many; or summed and divided by its
    trajectories times the longest that one may be, so that length does not count."""
    zero_variance: Annotated[Literal["drop", "keep"], one_of(Literal["drop", "keep"])] = "drop"
    """Groups whose members all have the same reward: they say nothing, but count where a batch is averaged."""
    overlong: Annotated[Overlong, one_of(Overlong)] = "keep"
    """Trajectories that were cut off: trained on like others, not trained on, or with the lowest reward of the task."""

    def together(self) -> None:
        if ":" not in self.advantage and self.advantage not in ADVANTAGES:
            raise InvalidConfig("advantage", self.advantage, f"one of {', '.join(ADVANTAGES)}, or `module:name`")
        if ":" not in self.loss and self.loss != "clipped":
            raise InvalidConfig("loss", self.loss, "clipped, or `module:name`")


class WarmStartSettings(Table, frozen=True, kw_only=True):
    """Supervised steps before the first version, on what scripted agents do that know the format and not the goal. It
    ends for a task at its `warm_until`."""

    agent: valid.Text = "teacher"
    """Whom it imitates."""
    episodes: valid.Count = 512
    """Of each task, that are played once and imitated again and again."""
    batch: valid.Count = 64
    """Episodes of one step."""
    learning_rate: Annotated[float, POSITIVE] = 3e-3
    """Of an AdamW of its own."""
    steps_max: valid.Count = 400
    """After which training begins anyway."""
    check_every: valid.Count = 10
    """Steps, after which it is looked how well the policy does."""
    check_episodes: valid.Count = 64
    """Of each task, by which that is looked at."""


class EvaluationSettings(Table, frozen=True, kw_only=True):
    """On seeds that are never trained on, while training goes on."""

    every: valid.CountOr0 = 10
    """Steps; 0: never."""
    episodes: valid.Count = 64
    """Of each task."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """0 takes the most likely token always."""


class CheckpointSettings(Table, frozen=True, kw_only=True):
    """From which a run is resumed."""

    every: valid.Count = 20
    """Steps; there is one at the start and at the end besides."""
    keep: valid.Count = 2
    """Of them, the newest; older ones are deleted."""


class TeacherSettings(Table, frozen=True, kw_only=True):
    """A model that a policy is distilled from, served as a model service. Tasks name it by
    `reward = { kind = "teacher", service = NAME }`."""

    name: valid.Name
    """Of its service."""
    checkpoint: valid.PathText
    """A folder: our own, or a Hugging Face one. It has the vocabulary of the policy."""


class TrainSettings(RolloutSettings, frozen=True, kw_only=True):
    """A training run, whole."""

    training: TrainingSettings = TrainingSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    teachers: tuple[TeacherSettings, ...] = ()

    PATHS: ClassVar = {**RolloutSettings.PATHS, "teachers": ("checkpoint",)}

    def together(self) -> None:
        mode, correction = self.training.mode, self.objective.correction
        if correction == "none" and self.training.alpha > 0:
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
        self._teachers_are_asked()

    @property
    def by_differences(self) -> bool:
        """Whether a reward is measured against those of its group, so that of one alone nothing is learned."""
        own = self.objective
        return own.kind == "grpo" and (own.zero_variance == "drop" or own.advantage in ADVANTAGES)

    def require_differences(self) -> None:
        """Raises InvalidConfig for groups that can be played, and never say anything by their rewards."""
        if self.by_differences and self.groups.size < 2:
            expected = (
                "at least 2: a reward is measured against those of its group, and of one alone nothing is learned; or "
                'an advantage of your own, with objective.zero_variance = "keep"'
            )
            raise InvalidConfig("groups.size", self.groups.size, expected)

    def as_played(self) -> Self:
        """With groups that are dropped rather than closed with one member, where that would teach nothing."""
        if not self.by_differences or self.groups.size_min > 1:
            return self
        return msgspec.structs.replace(self, groups=msgspec.structs.replace(self.groups, size_min=2))

    def _teachers_are_asked(self) -> None:
        """Each once, and whoever asks one finds it: here, or at the service where actions run."""
        if self.objective.kind == "distill":
            for at, task in enumerate(self.tasks):
                if task.reward.kind != "teacher":
                    expected = f'"teacher" with its service, as objective.kind = "distill" has {task.name} learn by one'
                    raise InvalidConfig(f"tasks[{at}].reward.kind", task.reward.kind, expected)
        names = [teacher.name for teacher in self.teachers]
        asked = [task.reward.service if task.reward.kind == "teacher" else "" for task in self.tasks]
        for at, name in enumerate(asked):
            if name and name not in names and not self.outside.url:
                known = ", ".join(names) if names else "there are none: [[teachers]] with a name and a checkpoint"
                raise InvalidConfig(f"tasks[{at}].reward.service", name, f"one of the teachers ({known})")
        for at, name in enumerate(names):
            if name in names[:at]:
                raise InvalidConfig(f"teachers[{at}].name", name, "each name once")
            if name not in asked:
                expected = 'one that a task asks, by reward = { kind = "teacher", service = NAME }; or no such teacher'
                raise InvalidConfig(f"teachers[{at}].name", name, expected)
