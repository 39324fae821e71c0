"""The settings of a rollout: the tables of its config, as records.

Owns every key, its default and its sentence. Never reads a file and never makes what a table describes. Promises that a
record that is there is valid, however it was made.

    RolloutSettings   the whole file
    ├── policy        [policy]      the model that plays
    ├── sampling      [sampling]    how its tokens are drawn
    ├── engines       [[engines]]   what writes them, by class of hardware
    ├── groups        [groups]      members, redundancy, and what becomes of a group that loses members
    ├── outside       [outside]     where actions run
    └── tasks         [[tasks]]     what is played: environment, limits, affinity and reward of each
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from tangram.config import valid
from tangram.config.tables import Root, Table
from tangram.config.valid import number, one_of
from tangram.errors import InvalidConfig

RewardKind = Literal["usual", "environment", "function", "command", "model", "teacher"]
LossRule = Literal["refill", "close", "drop"]
EngineKind = Literal["process", "openai"]
Dialect = Literal["vllm", "sglang", "plain"]
Backend = Literal["sandbox", "process", "docker"]


CONTEXT_MAX = 1 << 20
"""Tokens of any model of ours: the angles of all positions are held in memory."""
KINDS_BY_KEY = {"function": ("function", "command", "model"), "service": ("model", "teacher")}
"""Which rewards use a key of theirs."""
TEMPERATURE = number("a number from 0 to 100", zero=True, most=100.0)
SHARE = number("more than 0, at most 1", most=1.0)
POSITIVE = number("a number above 0")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not set("{} ") & set(url)
        )
    except ValueError:  # of a port that is no number, or brackets that are not closed
        return False


class EngineSettings(Table, frozen=True, kw_only=True):
    """Engines of one kind on one class of hardware."""

    name: valid.Name = "engine"
    """What they are called; several are numbered."""
    hardware: valid.Name = "default"
    """Their class, such as `compute` or `bandwidth`, which tasks name in `affinity`."""
    count: valid.Count = 1
    """How many of them."""
    kind: Annotated[EngineKind, one_of(EngineKind)] = "process"
    """Our own in a process of its own, or a server that speaks the OpenAI API."""
    url: valid.Text = ""
    """Of a server; `{number}` in it becomes the number of each of several."""
    dialect: Annotated[Dialect, one_of(Dialect)] = "vllm"
    """Of a server: how it is told to take weights and to stop, if it can be told."""
    model: valid.Text = ""
    """Of a server: the model to ask for; the first that it has, if it is not said."""
    key_variable: valid.Text = ""
    """Of a server: the environment variable that holds its key."""
    silent_s_max: valid.Seconds = 120.0
    """Of a server: one that says nothing for so long while it serves a request counts as dead, and so does one that has
    no place for any request for so long. One of dialect `sglang` says nothing before its answer is whole."""
    slots: valid.Count = 16
    """Requests that are served at once; a server is asked no more than these, and the others wait."""
    sessions: valid.CountOr0 = 128
    """Trajectories between two turns whose tokens are kept besides, so that they are not read again: as many as are
    open at once. They take memory as far as there are so many."""
    context_max: valid.Count = 256
    """Tokens of one request, read and written."""
    chunk: valid.Count = 32
    """Tokens that are read at most between two steps of writing."""
    deterministic: valid.Flag = False
    """Whether what is written does not depend, to the last bit, on who else is being served. It costs speed."""
    threads: valid.Count = 1
    """Of PyTorch, for each."""
    prefill_s_per_token: valid.SecondsOr0 = 0.0
    """Emulated hardware: what reading a token takes at least."""
    decode_s_per_step: valid.SecondsOr0 = 0.0
    """Emulated hardware: what a step that writes one token for each request takes at least."""

    def together(self) -> None:
        if (self.kind == "openai") != bool(self.url):
            raise InvalidConfig("url", self.url, 'an address for kind = "openai", and none for others')
        if self.url and not _is_address(self.url.replace("{number}", "0")):
            expected = "an address such as http://localhost:8000, in which {number} is the only mark"
            raise InvalidConfig("url", self.url, expected)
        if self.kind == "process" and self.context_max > CONTEXT_MAX:
            raise InvalidConfig("context_max", self.context_max, f"at most {CONTEXT_MAX}")


class RewardSettings(Table, frozen=True, kw_only=True):
    """Where the reward of a task comes from."""

    kind: Annotated[RewardKind, one_of(RewardKind)] = "usual"
    """What is usual for the task; what the environment says; a function, called as an action and scaled from zero; a
    command in the sandbox of the environment; a model service; or a teacher of the policy, which says of each token how
    likely it is."""
    function: valid.Text = ""
    """`module:name` of a function: of the reward, or of what makes a reward of a command's or model's answer."""
    service: valid.Text = ""
    """Of a model service; of a teacher, its name."""
    timeout_s: valid.Seconds = 60.0
    """Of one try."""
    retries: valid.CountOr0 = 2
    """If the infrastructure failed. A reward that cannot be had ends its trajectory as reward_failed, never with 0."""

    def together(self) -> None:
        if self.kind == "function" and not self.function:
            raise InvalidConfig("function", self.function, "`module:name` of the function that rewards")
        if self.kind in ("model", "teacher") and not self.service:
            raise InvalidConfig("service", self.service, "the name of a model service")
        for key, kinds in KINDS_BY_KEY.items():
            # It would be ignored, and the policy trained on another reward than was meant.
            if getattr(self, key) and self.kind not in kinds:
                set_it = " or ".join(f'kind = "{kind}"' for kind in kinds)
                expected = f'{set_it} beside it: kind = "{self.kind}" does not use it'
                raise InvalidConfig(key, getattr(self, key), expected)


class TaskSettings(Table, frozen=True, kw_only=True):
    """A task that is played."""

    name: valid.Name
    """Its tag: what metrics, routing and records call it."""
    environment: valid.Text = ""
    """A registered name, or `module:name`; that of the task if it is not said."""
    options: valid.Arguments = msgspec.field(default_factory=dict)
    """For the environment."""
    weight: Annotated[float, POSITIVE] = 1.0
    """Of all groups, how many are of this task, in proportion."""
    affinity: valid.Text = ""
    """The class of hardware on which its tokens should be written; empty: `bandwidth`, where there are such engines,
    else any."""
    turns_max: valid.MaybeCount = None
    """Of an episode; what the task says, if it is not said here."""
    tokens_max: valid.MaybeCount = None
    """Of one action; what the task says, if it is not said here."""
    concurrency: valid.Count = 1024
    """Episodes that are open at once."""
    reset_timeout_s: valid.Seconds = 120.0
    """A reset that takes longer has failed."""
    step_timeout_s: valid.Seconds = 60.0
    """A step that takes longer has failed."""
    retries: valid.CountOr0 = 2
    """Of a reset that failed, each with a new environment. A step that failed is not repeated: what it did is unknown;
    the episode begins anew instead, as often."""
    backoff_s: valid.SecondsOr0 = 0.2
    """Before the first retry, doubled before each that follows, less a part by chance."""
    reset_ahead: valid.CountOr0 = 0
    """Episodes whose reset may begin before their turn comes."""
    warm_until: Annotated[float, number("from 0 to 1", zero=True, most=1.0)] = 0.0
    """Before training, a policy imitates an agent of the task until it has this share of the highest reward; 0: it does
    not."""
    reward: RewardSettings = RewardSettings()
    """Where its reward comes from, see below."""


class GroupSettings(Table, frozen=True, kw_only=True):
    """Groups, and what becomes of those that lose members."""

    size: valid.Count = 8
    """Members that are trained on."""
    members_extra: valid.CountOr0 = 0
    """Members that are played besides; the first `size` that end are kept."""
    groups_extra: valid.CountOr0 = 0
    """Groups that a rollout plays besides; the first that are whole are kept. In training there are none."""
    on_loss: Annotated[LossRule, one_of(LossRule)] = "refill"
    """A member that failed is played again as a new attempt; or the group is closed with those that it has, if they
    are `size_min`; or it is dropped whole."""
    refills_max: valid.CountOr0 = 16
    """Of one group; after these it is closed or dropped as `size_min` says."""
    size_min: valid.Count = 1
    """Members with which a group may be closed; in training by rewards at least 2, as one alone teaches nothing."""

    def together(self) -> None:
        if self.size_min > self.size:
            raise InvalidConfig("size_min", self.size_min, f"at most size, which is {self.size}")


class PolicySettings(Table, frozen=True, kw_only=True):
    """The model that plays."""

    checkpoint: valid.PathOrNone = ""
    """A folder: our own, or a Hugging Face one; our own engines play those of the Llama or Qwen2 kind, other kinds want
    a server that does. None: a new one of these sizes."""
    layers: valid.Count = 2
    """Of a new one."""
    width: valid.Count = 64
    """Of a new one."""
    heads: valid.Count = 4
    """Of a new one."""
    seed: valid.CountOr0 = 0
    """Of the first weights."""

    def together(self) -> None:
        if self.checkpoint:
            return  # which has its own sizes
        if self.width % self.heads:
            raise InvalidConfig("heads", self.heads, f"a divisor of width, which is {self.width}")
        if self.width // self.heads % 2:
            expected = f"one that has an even part of width, which is {self.width}, for each: positions turn pairs"
            raise InvalidConfig("heads", self.heads, expected)


class SamplingSettings(Table, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: Annotated[float, TEMPERATURE] = 1.0
    """0 takes the most likely token always: for evaluation, not for training."""
    top_k: valid.CountOr0 = 0
    """Only so many of the most likely tokens; 0: all."""
    top_p: Annotated[float, SHARE] = 1.0
    """Only the most likely tokens that have this share together; 1: all."""
    keep_ids: valid.Flag = False
    """Whether the ids that top-k and top-p left are kept for each token: without them nothing can be trained on what
    was sampled."""


class OutsideSettings(Table, frozen=True, kw_only=True):
    """Where actions run. Nothing is started if no task acts outside."""

    url: valid.Text = ""
    """Of a shared service, with TANGRAM_TOKEN as the token; empty: inside this process."""
    backend: Annotated[Backend, one_of(Backend)] = "sandbox"
    """Inside this process: how commands run."""
    cores: valid.MaybeCores = None
    """Inside this process: what all sandboxes may use together; all of the machine, if it is not said."""
    memory: valid.MaybeSize = None
    """Inside this process: what all sandboxes may use together; all of the machine, if it is not said."""
    warm: valid.CountOr0 = 4
    """Inside this process: sandboxes that are made ahead."""


class RolloutSettings(Root, frozen=True, kw_only=True):
    """A rollout, whole."""

    run: valid.Name = "rl"
    """Whose share of the pools its actions count against."""
    seed: valid.CountOr0 = 0
    """Of what is played."""
    policy: PolicySettings = PolicySettings()
    sampling: SamplingSettings = SamplingSettings()
    engines: tuple[EngineSettings, ...] = (EngineSettings(),)
    groups: GroupSettings = GroupSettings()
    outside: OutsideSettings = OutsideSettings()
    tasks: tuple[TaskSettings, ...] = ()

    PATHS: ClassVar = {"policy": ("checkpoint",)}

    def task(self, name: str) -> TaskSettings:
        """Raises KeyError."""
        return {task.name: task for task in self.tasks}[name]
