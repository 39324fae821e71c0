"""The tables of a config, as records.

Owns every key with its default and its description; the reference page is generated from them. Never reads a file and
never converts to the records of managers. Promises that every record is valid, however it was created.

    Config      the whole file
    ├── service     [service]    the service: where it listens, what it stores
    ├── node        [node]       the machine whose cores and memory are shared
    ├── limits      [limits]     default limits of a run
    ├── scheduler   [scheduler]  core.limits.Limits
    ├── quotas      [[quotas]]   the quotas of APIs
    ├── services    [[services]] the models
    └── devices     [[devices]]  the devices on which they are loaded
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec

from tangram.config import validators
from tangram.config.validators import Validator, address_of, is_loopback, one_of
from tangram.core.limits import Limits
from tangram.core.policies import DEFAULT_POLICY
from tangram.errors import InvalidConfig

MIB, GIB = 1 << 20, 1 << 30

BANDWIDTH = 25e9
"""Link speed of an emulated device: what PCIe 4.0 with 16 lanes reaches of its 32e9 bytes per second."""
MODEL_S_MAX = 600.0
"""Default time limit of a load and of a call: longer than the first start of a server, which takes minutes, and short
enough that a device that hangs is not lost for a night."""


def validated(key: str, value: Any, kind: Validator) -> Any:
    """Converts a value to the type of its field. Raises InvalidConfig."""
    try:
        return kind.parse(value)
    except ValueError as error:
        better = str(error) if type(error) is ValueError else ""  # errors of another kind are bugs
        raise InvalidConfig(key, value, better or kind.expected) from None


@functools.cache
def field_types(table: type[msgspec.Struct]) -> dict[str, Validator | Any]:
    """Returns what each key of a table takes: a Valid, or the type of one or several tables. A table of the core
    declares only types and checks the rest itself."""
    plain = {int: validators.COUNT, float: validators.SECONDS}
    type_by_field: dict[str, Validator | Any] = {}
    for key, hint in get_type_hints(table, include_extras=True).items():
        if key not in table.__struct_fields__:
            continue
        if get_origin(hint) is Annotated:
            type_by_field[key] = next(each for each in get_args(hint) if isinstance(each, Validator))
        else:
            type_by_field[key] = plain.get(hint, hint)
    return type_by_field


class ConfigTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table that checks each of its values. `check_consistency` checks values against each other."""

    RENAMED_KEYS: ClassVar[dict[str, str]] = {}
    """New names by former names, for the error. Stored settings keep the former names."""

    def __post_init__(self) -> None:
        for key, kind in field_types(type(self)).items():
            if isinstance(kind, Validator):
                validated(key, getattr(self, key), kind)
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raises InvalidConfig with the key to change."""


class ConfigRoot(ConfigTable, frozen=True, kw_only=True):
    """The record of a whole file."""

    PATH_KEYS: ClassVar[dict[str, tuple[str, ...]]] = {}
    """By table, the keys with paths, which are relative to the folder of the file."""


class ServiceConfig(ConfigTable, frozen=True, kw_only=True):
    """Where `tangram serve` listens, who may use it, and what it stores."""

    listen: validators.Listen = "127.0.0.1:7433"
    """The address to listen on. Port 0 picks a free one. Any address but loopback needs `admin_token_file`."""
    tls_certificate: validators.PathOrNone = ""
    """The certificate chain in PEM. With it the service speaks only HTTPS."""
    tls_key: validators.PathOrNone = ""
    """The private key of the certificate, in PEM. Set both or neither."""
    admin_token_file: validators.PathOrNone = ""
    """A file with the token of the admin, who creates runs and their tokens. Other users must not be able to read
    it."""
    open_on_loopback: validators.Flag = True
    """Whether every user of this machine has the rights of the admin. Ignored if there is an admin token."""
    journal: validators.PathText = "journal.db"
    """The database of the journal. Its write-ahead log and its lock file are in the same folder."""
    durability: Annotated[validators.Durability, one_of(validators.Durability)] = "process"
    """What acknowledged actions survive: `process`: a crash of the service; `power`: also a power failure, at the cost
    of a disk write per batch of actions."""
    results_keep_s: validators.Seconds = 86_400.0
    """How long an unacknowledged result is kept."""
    drain_s: validators.SecondsOr0 = 30.0
    """How long running actions may continue after SIGTERM before they are stopped."""
    event_log: validators.PathOrNone = ""
    """A file that records every event as a line of JSON. Each start begins a new one; the previous file is renamed to
    the time of its end. Recording stops at 4 GiB."""
    policy: validators.Policy = DEFAULT_POLICY
    """The scheduling policy."""
    endpoints: validators.Addresses = ()
    """URL prefixes of the HTTP function endpoints that the service may call for its callers."""
    sandboxes_on_stop: Annotated[validators.OnStop, one_of(validators.OnStop)] = "keep"
    """`keep`: sandboxes outlive the service and its next process adopts them; `close`: the service closes all sandboxes
    when it stops, including adopted ones."""

    def check_consistency(self) -> None:
        if bool(self.tls_certificate) != bool(self.tls_key):
            key, other = ("tls_key", "tls_certificate") if self.tls_certificate else ("tls_certificate", "tls_key")
            raise InvalidConfig(key, getattr(self, key), f"a path, as {other} has one: both or none")
        if not self.admin_token_file and not is_loopback(address_of(self.listen)[0]):
            raise InvalidConfig(
                "admin_token_file",
                self.admin_token_file,
                f"the path of a file with the admin's token, because others than this machine reach {self.listen};"
                " or listen on 127.0.0.1",
            )
        if not self.admin_token_file and not self.open_on_loopback:
            raise InvalidConfig(
                "admin_token_file",
                self.admin_token_file,
                "the path of a file with the admin's token: open_on_loopback = false requires one",
            )


class NodeConfig(ConfigTable, frozen=True, kw_only=True):
    """The machine whose cores and memory are shared."""

    name: validators.NodeName = "local"
    """The name of the node in pools, traces and the dashboard."""
    backend: Annotated[validators.Backend, one_of(validators.Backend)] = "sandbox"
    """How commands run: `sandbox`, which needs root; `process`, plain processes without isolation; `docker`, containers
    of a Docker engine; `fake`, not at all, for tests."""
    cores: validators.MaybeCores = None
    """The cores that all sandboxes may use together. Default: all cores of the machine."""
    memory: validators.MaybeSize = None
    """The memory that all sandboxes may reserve together. Default: nine tenths of the available memory."""
    state: validators.PathOrNone = ""
    """The directory of sandboxes and images. Default: TANGRAM_STATE, or /var/lib/tangram."""
    warm: validators.CountOr0 = 0
    """The number of sandboxes to prepare ahead, each like the last one that was opened."""

    def check_consistency(self) -> None:
        if self.warm and self.backend != "sandbox":
            raise InvalidConfig("warm", self.warm, '0: only the backend "sandbox" makes sandboxes ahead')


class RunLimits(ConfigTable, frozen=True, kw_only=True):
    """Limits of each run, unless the admin sets others for it. `connections_max` applies to all runs together."""

    body_bytes_max: validators.Size = 64 * MIB
    """Size of the JSON body of a request."""
    file_bytes_max: validators.Size = 4 * GIB
    """Size of an uploaded file or archive."""
    sandboxes_max: validators.Count = 1000
    """Sandboxes that are open or wait for memory, those of running function calls included."""
    images_max: validators.Count = 200
    """Images that the run has created and not removed."""
    waiting_max: validators.Count = 20_000
    """Actions that are waiting or running."""
    waiting_bytes_max: validators.Size = 256 * MIB
    """Total size of the requests of live actions, which are in memory and in the journal."""
    results_bytes_max: validators.Size = 1 * GIB
    """The total size of unacknowledged results. Beyond it new actions are refused, and actions that end settle as lost,
    without their output."""
    requests_per_s: validators.PerSecond = 5000.0
    """Requests per second, in the long run."""
    requests_burst: validators.Count = 10_000
    """Requests in a burst, after a pause."""
    sandbox_idle_s: validators.Seconds = 3600.0
    """A sandbox that was not used for this long is closed. A function instance ends after this long at the latest."""
    hold_idle_s: validators.Seconds = 60.0
    """The lease of a quota expires if its holder does not renew it for this long."""
    network: validators.Flag = False
    """Whether sandboxes may have the network of the machine, where the service itself listens."""
    output_bytes_max: validators.Size = 4 * MIB
    """Output of one action that is buffered for slow readers of its stream."""
    connections_max: validators.Count = 10_000
    """Open connections of all runs together."""


class RateConfig(ConfigTable, frozen=True, kw_only=True):
    """A number of units per number of seconds."""

    units: validators.Count
    """The number of requests or tokens."""
    seconds: validators.Seconds
    """The length of the window."""


class QuotaConfig(ConfigTable, frozen=True, kw_only=True):
    """The quota of an API: at least one of `concurrent`, `requests` and `tokens`."""

    name: validators.QuotaName
    """The name that actions use."""
    concurrent: validators.MaybeCount = None
    """Requests at the same time."""
    requests: RateConfig | None = None
    """Requests per window."""
    tokens: RateConfig | None = None
    """Tokens per window."""

    def check_consistency(self) -> None:
        if self.concurrent is None and self.requests is None and self.tokens is None:
            raise InvalidConfig("name", self.name, "at least one of concurrent, requests and tokens beside it")


class ModelConfig(ConfigTable, frozen=True, kw_only=True):
    """A model that actions call by its name."""

    name: validators.Name
    """The name that actions use."""
    engine: validators.EngineName
    """The import path of its engine in the processes of the devices: an Engine, or a factory that takes `arguments`."""
    arguments: validators.Arguments = {}
    """The arguments of the engine. Paths in them are relative to the working directory of the service."""
    degrees: validators.Degrees = (1,)
    """The numbers of devices on which it can run."""
    memory_bytes: validators.SizeOr0 = 0
    """The memory that it needs on all its devices together. 0: the size of its weights, which is unknown for an engine
    that calls a server."""
    load_s_max: validators.Seconds = MODEL_S_MAX
    """Time limit of a load."""
    call_s_max: validators.Seconds = MODEL_S_MAX
    """Time limit of a call, unless its caller sets another."""


class DeviceConfig(ConfigTable, frozen=True, kw_only=True):
    """A device for models. Without any, models are loaded on the CUDA devices of the machine."""

    kind: Annotated[validators.DeviceKind, one_of(validators.DeviceKind)]
    """A PyTorch device, or an emulated one: memory of the machine behind a link of configured speed."""
    memory_bytes: validators.Size
    """The memory that models may use."""
    bandwidth: validators.PerSecond = BANDWIDTH
    """Bytes per second from host memory. Only for an emulated device."""
    place: validators.Text = ""
    """The PyTorch name, such as `cuda:0`. Required for a CUDA device, and only valid there."""
    name: validators.Text = ""
    """A display name. Only for a CUDA device."""

    def check_consistency(self) -> None:
        if self.kind == "cuda":
            if not self.place:
                raise InvalidConfig("place", self.place, 'the place of a device of PyTorch, such as "cuda:0"')
            if self.bandwidth != BANDWIDTH:
                raise InvalidConfig("bandwidth", self.bandwidth, "nothing: a CUDA device is as fast as it is")
        for key in ("place", "name"):
            if self.kind == "emulated" and getattr(self, key):
                raise InvalidConfig(key, getattr(self, key), "nothing: only CUDA devices have one")


class Config(ConfigRoot, frozen=True, kw_only=True):
    """The whole config of `tangram serve`, with its defaults."""

    service: ServiceConfig = ServiceConfig()
    node: NodeConfig = NodeConfig()
    limits: RunLimits = RunLimits()
    scheduler: Limits = Limits()
    quotas: tuple[QuotaConfig, ...] = ()
    services: tuple[ModelConfig, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()

    PATH_KEYS: ClassVar = {
        "service": ("tls_certificate", "tls_key", "admin_token_file", "journal", "event_log"),
        "node": ("state",),
    }

    @property
    def listen_host(self) -> str:
        """The host, without the brackets of an IPv6 address."""
        return address_of(self.service.listen)[0]

    @property
    def listen_port(self) -> int:
        return address_of(self.service.listen)[1]

    def check_consistency(self) -> None:
        _require_unique_names("quotas", self.quotas)
        _require_unique_names("services", self.services)


def _require_unique_names(key: str, records: Iterable[QuotaConfig | ModelConfig]) -> None:
    index_by_name: dict[str, int] = {}
    for at, record in enumerate(records):
        if record.name in index_by_name:
            raise InvalidConfig(
                f"{key}[{at}].name", record.name, f"each name once; {key}[{index_by_name[record.name]}] has it"
            )
        index_by_name[record.name] = at
