"""The wire: what goes over HTTP in both directions, as records.

Owns their shape; JSON, with bytes as base64. An id, a sandbox and an image are named as their run names them: no other
run can say them. What a request may hold is checked where it is decoded, so that a record which exists is well formed.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from tangram.core.action import Action, Outcome
from tangram.core.demand import Demand
from tangram.errors import InvalidAction
from tangram.managers.functions.work import Call, Post
from tangram.managers.models.work import Infer
from tangram.managers.quotas.manager import Quota
from tangram.managers.work import Close, Commit, Entry, Exec, Executed, Hold, Open, SandboxSpec
from tangram.runtime.error_records import Fault
from tangram.runtime.orchestrator import Settled

NAME_LENGTH_MAX = 100
"""Of an id, a sandbox or an image: in the service each stands behind the name of its run."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
WAIT_S_MAX = 60.0
"""Of a long poll: what sits between may cut off longer ones."""
WAIT_S = 20.0

NAME_WORDS = f"1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' or '-', the first no '.' or '-'"
MAYBE_NAME_WORDS = f"nothing, or {NAME_WORDS}"
WORDS_BY_PATTERN = {f"^{NAME.pattern}$": NAME_WORDS, f"^({NAME.pattern})?$": MAYBE_NAME_WORDS}

Name = Annotated[str, msgspec.Meta(pattern=f"^{NAME.pattern}$", max_length=NAME_LENGTH_MAX, description=NAME_WORDS)]
MaybeName = Annotated[
    str, msgspec.Meta(pattern=f"^({NAME.pattern})?$", max_length=NAME_LENGTH_MAX, description=MAYBE_NAME_WORDS)
]
Text = Annotated[str, msgspec.Meta(max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

AnyWork = Open | Close | Exec | Commit | Hold | Call | Post | Infer
"""What can be asked for. Sandboxes are made ahead by the service alone."""


# ---- actions ----------------------------------------------------------------------------------------------------


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An action with its work. The same id with the same content is the same action, however often it is sent."""

    id: Name
    work: AnyWork
    demand: Demand | None = None
    """None: what such work usually needs; of a program, what is learned."""
    run: Text = ""
    """Empty: that of the token. Whoever may act for all runs says which one."""
    task: Text = ""
    trajectory: Text = ""
    """Whose time it is; its sandbox, if it is not said."""
    sandbox: MaybeName = ""
    kind: Text = ""
    """Empty: that of its work. `server`: a program that stays up."""
    key: Text = ""
    service: Text = ""
    duration_s: Seconds | None = None
    timeout_s: Seconds | None = None
    deadline_s: Seconds | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    idempotent: bool = False
    at_once: bool = True
    follow: bool = False
    """Keep what it writes for whoever asks for its output while it runs."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an action settled."""

    outcome: Outcome
    executed: Executed | None = None
    answer: bytes = b""
    fault: Fault | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of an action."""

    id: str
    state: str
    """`queued`, `starting`, `running`, `stopping` or `settled`."""
    settled: Ended | None = None


class LetGo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caller is done with the quota that it holds."""

    spent: dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]] | None = None
    """What was really used of what was granted by estimate."""


class Heard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an API answered to whoever holds its quota."""

    status: Annotated[int, msgspec.Meta(ge=100, le=599)]
    headers: dict[str, str] = {}
    action: Name


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results that have arrived: they need not be kept any longer."""

    actions: Annotated[list[Name], msgspec.Meta(max_length=10_000)]


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of an output that is followed."""

    offset: int
    """Bytes of both streams before it, in the order in which they came."""
    stream: Literal["stdout", "stderr", ""] = ""
    """Empty: nothing more comes."""
    data: bytes = b""
    skipped: int = 0
    """Bytes before it that were not kept, because nobody read them in time."""


# ---- everything else --------------------------------------------------------------------------------------------


class SandboxReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    node: str
    spec: SandboxSpec
    function: str = ""
    """Given: it is an instance of this function, which the service has opened."""


class Sandboxes(msgspec.Struct, frozen=True, kw_only=True):
    sandboxes: list[SandboxReply]


class Entries(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[Entry]


class ImageReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Empty: there is none."""


class Remember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name


class ServiceReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    degrees: tuple[int, ...]
    call_s_max: float


class Services(msgspec.Struct, frozen=True, kw_only=True):
    services: list[ServiceReply]


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    quotas: list[Quota]


class Caps(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a run may have; None: what the config says."""

    sandboxes_max: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] | None = None
    """Open at once, those included in which its functions are being called."""
    waiting_max: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] | None = None
    """Actions under way, waiting or running."""
    running_max: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] | None = None
    """Actions that run at once; others wait."""
    requests_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    network: bool | None = None
    """Whether its sandboxes may have the network of the machine."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to be made or changed."""

    weight: Annotated[float, msgspec.Meta(gt=0, lt=1e9)] = 1.0
    caps: Caps = Caps()


class WeightRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run gets of what several want, against 1.0 of the others."""

    weight: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]


class RunReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    weight: float
    caps: Caps
    made_at: float
    """Seconds since 1970."""
    token: str = ""
    """Told once, when it is made: only a hash of it is kept."""
    ending: bool = False
    """It was revoked, and something of it may be left: to revoke it again is to try again."""


class RunsReply(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[RunReply]


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of another size."""

    total: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: Literal["up", "draining"]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers, and whom it takes the caller for."""

    version: str
    instance: str
    run: str
    """That of the token; empty: the caller may act for all."""
    admin: bool
    node: str
    backend: str
    isolates: bool


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer that is none."""

    error: Fault


def settled_of(ended: Ended) -> Settled:
    return Settled(outcome=ended.outcome, executed=ended.executed, answer=ended.answer, fault=ended.fault)


def submission_of(action: Action, work: AnyWork, *, follow: bool) -> Submission:
    """As a client sends it."""
    return Submission(
        id=action.id, work=work, demand=action.demand, run="" if action.run == "default" else action.run,
        task=action.task, trajectory=action.trajectory, sandbox=action.sandbox, kind=action.kind, key=action.key,
        service=action.service, duration_s=action.duration_s, timeout_s=action.timeout_s, deadline_s=action.deadline_s,
        priority=action.priority, idempotent=action.idempotent, at_once=action.at_once, follow=follow,
    )  # fmt: skip


def require_name(field: str, name: str) -> str:
    if len(name) > NAME_LENGTH_MAX or not NAME.fullmatch(name):
        raise InvalidAction(field, name, NAME_WORDS)
    return name
