"""Records of the HTTP API: requests and responses as JSON, with bytes as base64.

Ids, sandboxes and images have the names that their run gave them; no other run can refer to them. Limits are checked
while decoding, so a record that exists is well-formed.
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
from tangram.managers.work import Close, Commit, Exec, ExecResult, FileEntry, HoldGrant, Open, SandboxSpec
from tangram.runtime.error_records import ErrorRecord
from tangram.runtime.orchestrator import SettledAction

NAME_LENGTH_MAX = 100
"""Length of an id or of the name of a sandbox or an image: the service prefixes each with the name of its run."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
WAIT_S_MAX = 60.0
"""Longest wait of a long poll: proxies may cut off longer ones."""
WAIT_S = 20.0

NAME_DESCRIPTION = f"1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' or '-', the first not '.' or '-'"
OPTIONAL_NAME_DESCRIPTION = f"an empty string, or {NAME_DESCRIPTION}"
DESCRIPTION_BY_PATTERN = {f"^{NAME.pattern}$": NAME_DESCRIPTION, f"^({NAME.pattern})?$": OPTIONAL_NAME_DESCRIPTION}

Name = Annotated[
    str, msgspec.Meta(pattern=f"^{NAME.pattern}$", max_length=NAME_LENGTH_MAX, description=NAME_DESCRIPTION)
]
OptionalName = Annotated[
    str,
    msgspec.Meta(pattern=f"^({NAME.pattern})?$", max_length=NAME_LENGTH_MAX, description=OPTIONAL_NAME_DESCRIPTION),
]
Text = Annotated[str, msgspec.Meta(max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

AnyWork = Open | Close | Exec | Commit | HoldGrant | Call | Post | Infer
"""Work that can be requested. Only the service itself prepares sandboxes."""


# ---- actions ----------------------------------------------------------------------------------------------------


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An action with its work. The id is an idempotency key: the same id with the same content is the same action,
    however often it is sent."""

    id: Name
    work: AnyWork
    demand: Demand | None = None
    """None: the default demand of the work; for a program, the learned demand."""
    run: Text = ""
    """Empty: the run of the token. A token for all runs must name one."""
    task: Text = ""
    trajectory: Text = ""
    """Trajectory to which its time is charged; by default its sandbox."""
    sandbox: OptionalName = ""
    kind: Text = ""
    """Empty: the kind of its work. `server`: a long-running program."""
    key: Text = ""
    service: Text = ""
    duration_s: Seconds | None = None
    timeout_s: Seconds | None = None
    deadline_s: Seconds | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    idempotent: bool = False
    at_once: bool = True
    follow: bool = False
    """Buffers output, so that it can be followed while the action runs."""


class SettledReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an action settled."""

    outcome: Outcome
    executed: ExecResult | None = None
    answer: bytes = b""
    fault: ErrorRecord | None = None


class ActionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of an action."""

    id: str
    state: str
    """`queued`, `starting`, `running`, `stopping` or `settled`."""
    settled: SettledReply | None = None


class QuotaRelease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Releases the quota that an action holds."""

    spent: dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]] | None = None
    """Actual use of units that were granted by estimate."""


class UpstreamResponse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The response of an API to the holder of its quota."""

    status: Annotated[int, msgspec.Meta(ge=100, le=599)]
    headers: dict[str, str] = {}
    action: Name


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Acknowledges results: the service may delete them."""

    actions: Annotated[list[Name], msgspec.Meta(max_length=10_000)]


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of followed output."""

    offset: int
    """Bytes of both streams before this chunk, in the order in which they were written."""
    stream: Literal["stdout", "stderr", ""] = ""
    """Empty at the end of the output."""
    data: bytes = b""
    skipped: int = 0
    """Bytes before this chunk that were dropped because they were not read in time."""


# ---- everything else --------------------------------------------------------------------------------------------


class SandboxReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    node: str
    spec: SandboxSpec
    function: str = ""
    """Set if the sandbox is an instance of this function, opened by the service."""


class SandboxesReply(msgspec.Struct, frozen=True, kw_only=True):
    sandboxes: list[SandboxReply]


class DirectoryReply(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[FileEntry]


class ImageReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Empty if there is none."""


class ImageKeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name


class ServiceReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    degrees: tuple[int, ...]
    call_s_max: float


class ServicesReply(msgspec.Struct, frozen=True, kw_only=True):
    services: list[ServiceReply]


class QuotasReply(msgspec.Struct, frozen=True, kw_only=True):
    quotas: list[Quota]


class Caps(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of a run; None: the default of the config."""

    sandboxes_max: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] | None = None
    """Sandboxes open at once, including those of functions."""
    waiting_max: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] | None = None
    """Actions that are waiting or running."""
    running_max: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] | None = None
    """Actions running at once; others wait."""
    requests_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    network: bool | None = None
    """Whether its sandboxes may use the network of the machine."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to create or change."""

    weight: Annotated[float, msgspec.Meta(gt=0, lt=1e9)] = 1.0
    caps: Caps = Caps()


class WeightRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weight in fair share; the default is 1.0."""

    weight: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]


class RunReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    weight: float
    caps: Caps
    made_at: float
    """Seconds since 1970."""
    token: str = ""
    """Returned once, at creation: only a hash of it is stored."""
    ending: bool = False
    """The run was revoked, but some of its objects may be left; revoke it again to retry."""


class RunsReply(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[RunReply]


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sets the size of a pool."""

    total: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: Literal["up", "draining"]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The service, and the identity that it gives the caller."""

    version: str
    instance: str
    run: str
    """The run of the token; empty: the caller may act for all runs."""
    admin: bool
    node: str
    backend: str
    isolates: bool


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Every error response."""

    error: ErrorRecord


def settled_action_of(ended: SettledReply) -> SettledAction:
    return SettledAction(outcome=ended.outcome, executed=ended.executed, answer=ended.answer, fault=ended.fault)


def submission_of(action: Action, work: AnyWork, *, follow: bool) -> Submission:
    """A submission as a client sends it."""
    return Submission(
        id=action.id, work=work, demand=action.demand, run="" if action.run == "default" else action.run,
        task=action.task, trajectory=action.trajectory, sandbox=action.sandbox, kind=action.kind, key=action.key,
        service=action.service, duration_s=action.duration_s, timeout_s=action.timeout_s, deadline_s=action.deadline_s,
        priority=action.priority, idempotent=action.idempotent, at_once=action.at_once, follow=follow,
    )  # fmt: skip


def require_name(field: str, name: str) -> str:
    if len(name) > NAME_LENGTH_MAX or not NAME.fullmatch(name):
        raise InvalidAction(field, name, NAME_DESCRIPTION)
    return name
