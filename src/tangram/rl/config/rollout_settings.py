"""Settings of a rollout: the tables of its config, as records.

Owns every key, its default and its description. Never reads a file and never creates the described objects. Promises
that every record is valid, however it was created.

    RolloutSettings   the whole file
    ├── policy        [policy]      the model that plays
    ├── sampling      [sampling]    how tokens are sampled
    ├── engines       [[engines]]   what generates them, by hardware class
    ├── groups        [groups]      members, redundancy, and what happens when a group loses members
    ├── resources     [resources]   where actions run
    └── tasks         [[tasks]]     what is played: environment, limits, affinity and reward of each
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from tangram.config import validators
from tangram.config.tables import ConfigRoot, ConfigTable
from tangram.config.validators import number, one_of
from tangram.errors import InvalidConfig

RewardKind = Literal["usual", "environment", "function", "command", "model", "teacher"]
MemberLossRule = Literal["refill", "close", "drop"]
EngineKind = Literal["process", "openai"]
ServerKind = Literal["vllm", "sglang", "plain"]
Backend = Literal["sandbox", "process", "docker"]


CONTEXT_MAX = 1 << 20
"""Longest context of our own models: the rotary angles of all positions are held in memory."""
KINDS_BY_KEY = {"function": ("function", "command", "model"), "service": ("model", "teacher")}
"""Reward kinds that use these keys."""
TEMPERATURE = number("a number from 0 to 100", zero=True, most=100.0)
SHARE = number("more than 0, at most 1", most=1.0)
POSITIVE = number("a number above 0")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not set("{} ") & set(url)
        )
    except ValueError:  # a port that is no number, or unbalanced brackets
        return False


class EngineSettings(ConfigTable, frozen=True, kw_only=True):
    """Engines of one kind on one hardware class."""

    name: validators.Name = "engine"
    """Name of the engine; if `count` is above 1, each engine appends its number."""
    hardware: validators.Name = "default"
    """Their hardware class, such as `compute` or `bandwidth`, which tasks name in `affinity`."""
    count: validators.Count = 1
    """Number of such engines."""
    kind: Annotated[EngineKind, one_of(EngineKind)] = "process"
    """`process`: our own engine in a child process; `openai`: a server with the OpenAI API."""
    url: validators.Text = ""
    """Address of the server; `{number}` is replaced with the number of the engine."""
    server: Annotated[ServerKind, one_of(ServerKind)] = msgspec.field(default="vllm", name="dialect")
    """API of the server for weight updates and aborts; `plain` has none. Stored as `server`."""
    model: validators.Text = ""
    """Model to request from the server; by default the first that it lists."""
    key_variable: validators.Text = ""
    """Environment variable that holds the API key of the server."""
    silent_s_max: validators.Seconds = 120.0
    """A server counts as dead if it sends nothing for this long while it serves a request, or has no free slot for this
    long. A `sglang` server sends nothing before its response is complete."""
    slots: validators.Count = 16
    """Requests served at once (`max_num_seqs` of vLLM); a server gets at most this many, and the others wait."""
    sessions: validators.CountOr0 = 128
    """Trajectories, beyond those in slots, whose KV cache is kept between turns, so that it is not recomputed. Choose
    the number of trajectories that are open at once; unused sessions take no memory."""
    context_max: validators.Count = 256
    """Tokens of one request, prompt and generation together (`max_model_len` of vLLM)."""
    chunk: validators.Count = 32
    """Chunked prefill: the maximum number of tokens prefilled between two decode steps, like `max_num_batched_tokens`
    of vLLM, which also counts decoded tokens."""
    deterministic: validators.Flag = False
    """Whether generated tokens are independent, to the last bit, of all other requests. This costs speed."""
    threads: validators.Count = 1
    """PyTorch threads of each engine."""
    prefill_s_per_token: validators.SecondsOr0 = 0.0
    """Emulated hardware: minimum prefill time per token."""
    decode_s_per_step: validators.SecondsOr0 = 0.0
    """Emulated hardware: minimum time of a decode step, which generates one token for each request."""

    RENAMED_KEYS: ClassVar = {"dialect": "server"}

    def check_consistency(self) -> None:
        if (self.kind == "openai") != bool(self.url):
            raise InvalidConfig("url", self.url, 'an address for kind = "openai", and none for others')
        if self.url and not _is_address(self.url.replace("{number}", "0")):
            expected = "an address such as http://localhost:8000, in which {number} is the only mark"
            raise InvalidConfig("url", self.url, expected)
        if self.kind == "process" and self.context_max > CONTEXT_MAX:
            raise InvalidConfig("context_max", self.context_max, f"at most {CONTEXT_MAX}")

    def engine_name(self, number: int) -> str:
        """The name of one of these engines, numbered if there are several."""
        return self.name if self.count == 1 else f"{self.name}-{number}"


class RewardSettings(ConfigTable, frozen=True, kw_only=True):
    """The source of a task's reward."""

    kind: Annotated[RewardKind, one_of(RewardKind)] = "usual"
    """`usual`: the default of the task; `environment`: the environment itself; `function`: a function, called as an
    action and scaled from zero; `command`: a command in the sandbox of the environment; `model`: a model service;
    `teacher`: a teacher of the policy, which scores each token."""
    function: validators.Text = ""
    """`module:name` of a function that computes the reward, or converts the result of a command or model to a
    reward."""
    service: validators.Text = ""
    """Name of the model service, or of the teacher."""
    timeout_s: validators.Seconds = 60.0
    """Time limit of one attempt."""
    retries: validators.CountOr0 = 2
    """Retries after infrastructure failures. A trajectory whose reward fails ends as reward_failed, never with reward
    0."""

    def check_consistency(self) -> None:
        if self.kind == "function" and not self.function:
            raise InvalidConfig("function", self.function, "`module:name` of the function that rewards")
        if self.kind in ("model", "teacher") and not self.service:
            raise InvalidConfig("service", self.service, "the name of a model service")
        for key, kinds in KINDS_BY_KEY.items():
            # Otherwise it would be ignored, and the policy trained on an unintended reward.
            if getattr(self, key) and self.kind not in kinds:
                set_it = " or ".join(f'kind = "{kind}"' for kind in kinds)
                expected = f'{set_it} beside it: kind = "{self.kind}" does not use it'
                raise InvalidConfig(key, getattr(self, key), expected)


class TaskSettings(ConfigTable, frozen=True, kw_only=True):
    """A task that is played."""

    name: validators.Name
    """Name of the task in metrics, routing and records."""
    environment: validators.Text = ""
    """A registered name, or `module:name`; by default the name of the task."""
    options: validators.Arguments = msgspec.field(default_factory=dict)
    """Arguments of the environment."""
    weight: Annotated[float, POSITIVE] = 1.0
    """Its share of all groups, relative to the weights of the other tasks."""
    affinity: validators.Text = ""
    """Hardware class that generates its tokens; by default `bandwidth` if such engines exist, otherwise any."""
    turns_max: validators.MaybeCount = None
    """Maximum turns of an episode; by default the limit of the task."""
    tokens_max: validators.MaybeCount = None
    """Maximum tokens of one action; by default the limit of the task."""
    concurrency: validators.Count = 1024
    """Maximum number of open episodes."""
    reset_timeout_s: validators.Seconds = 120.0
    """Time limit of a reset."""
    step_timeout_s: validators.Seconds = 60.0
    """Time limit of a step."""
    retries: validators.CountOr0 = 2
    """Retries of a failed reset, each with a new environment. A failed step is not repeated, because its effects are
    unknown; instead the episode restarts, at most this many times."""
    backoff_s: validators.SecondsOr0 = 0.2
    """Wait before the first retry; doubles with each retry, with random jitter."""
    reset_ahead: validators.CountOr0 = 0
    """Episodes whose reset may start before they get a slot."""
    warm_until: Annotated[float, number("from 0 to 1", zero=True, most=1.0)] = 0.0
    """Warm start: before training, the policy imitates an agent of the task until it reaches this share of the highest
    reward; 0: no warm start."""
    reward: RewardSettings = RewardSettings()
    """The source of its reward, see below."""


class GroupSettings(ConfigTable, frozen=True, kw_only=True):
    """Groups, and what happens when they lose members."""

    size: validators.Count = 8
    """Members of a group that are trained on."""
    members_extra: validators.CountOr0 = 0
    """Redundant members; the first `size` members that end are kept."""
    groups_extra: validators.CountOr0 = 0
    """Redundant groups of a rollout; the first complete ones are kept. Not used in training."""
    on_loss: Annotated[MemberLossRule, one_of(MemberLossRule)] = "refill"
    """`refill`: a failed member is played again as a new attempt; `close`: the group ends with its remaining
    members, if they are at least `size_min`; `drop`: the whole group is dropped."""
    refills_max: validators.CountOr0 = 16
    """Maximum refills of one group; afterwards it is closed if `size_min` allows, otherwise dropped."""
    size_min: validators.Count = 1
    """Minimum members of a closed group; with group-relative rewards at least 2, because one member has no
    advantage."""

    def check_consistency(self) -> None:
        if self.size_min > self.size:
            raise InvalidConfig("size_min", self.size_min, f"at most size, which is {self.size}")


class PolicySettings(ConfigTable, frozen=True, kw_only=True):
    """The model that plays."""

    checkpoint: validators.PathOrNone = ""
    """A folder in our own or in Hugging Face layout. Our own engines serve Llama and Qwen2 models; other models need a
    server. Empty: a new model with the sizes below."""
    layers: validators.Count = 2
    """Layers of a new model."""
    width: validators.Count = 64
    """Hidden size of a new model."""
    heads: validators.Count = 4
    """Attention heads of a new model."""
    seed: validators.CountOr0 = 0
    """Seed of the initial weights of a new model."""

    def check_consistency(self) -> None:
        if self.checkpoint:
            return  # the checkpoint has its own sizes
        if self.width % self.heads:
            raise InvalidConfig("heads", self.heads, f"a divisor of width, which is {self.width}")
        if self.width // self.heads % 2:
            expected = f"one that has an even part of width, which is {self.width}, for each: positions turn pairs"
            raise InvalidConfig("heads", self.heads, expected)


class SamplingSettings(ConfigTable, frozen=True, kw_only=True):
    """How tokens are sampled."""

    temperature: Annotated[float, TEMPERATURE] = 1.0
    """0 is greedy decoding: for evaluation, not for training."""
    top_k: validators.CountOr0 = 0
    """Sample among this many of the most likely tokens only; 0: all."""
    top_p: Annotated[float, SHARE] = 1.0
    """Sample among the most likely tokens whose probabilities add up to this; 1: all."""
    keep_ids: validators.Flag = False
    """Whether to store for each token the ids that top-k and top-p kept: training on such samples needs them."""


class ResourceSettings(ConfigTable, frozen=True, kw_only=True):
    """Where actions run. Nothing is started if no task and no reward runs actions."""

    url: validators.Text = ""
    """Address of a shared service, with TANGRAM_TOKEN as the token; empty: embedded in this process."""
    backend: Annotated[Backend, one_of(Backend)] = "sandbox"
    """Embedded: the backend that runs commands."""
    cores: validators.MaybeCores = None
    """Embedded: cores for all sandboxes together; by default all cores of the machine."""
    memory: validators.MaybeSize = None
    """Embedded: memory for all sandboxes together; by default nine tenths of the available memory."""
    warm: validators.CountOr0 = 4
    """Embedded: sandboxes that are prepared ahead."""


class RolloutSettings(ConfigRoot, frozen=True, kw_only=True):
    """All settings of a rollout."""

    run: validators.Name = "rl"
    """Name of the run in fair share, to which its actions are charged."""
    seed: validators.CountOr0 = 0
    """Determines the tickets: tasks, environments and sampling noise."""
    policy: PolicySettings = PolicySettings()
    sampling: SamplingSettings = SamplingSettings()
    engines: tuple[EngineSettings, ...] = (EngineSettings(),)
    groups: GroupSettings = GroupSettings()
    resources: ResourceSettings = msgspec.field(default=ResourceSettings(), name="outside")
    """Stored as `resources`."""
    tasks: tuple[TaskSettings, ...] = ()

    PATH_KEYS: ClassVar = {"policy": ("checkpoint",)}
    RENAMED_KEYS: ClassVar = {"outside": "resources"}

    def task(self, name: str) -> TaskSettings:
        """Raises KeyError."""
        return {task.name: task for task in self.tasks}[name]
