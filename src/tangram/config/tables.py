"""The tables of a config, as records.

Owns every key, its default and its sentence, of which the reference page is made. Never reads a file and never converts
to what managers take: quotas, services and devices are what a file says of them. Promises that a record that is there
is valid, however it was made.

    Config      the whole file
    ├── service     [service]    what listens, and what it keeps
    ├── node        [node]       the machine whose cores and memory are shared
    ├── limits      [limits]     of a run that has none of its own
    ├── scheduler   [scheduler]  core.limits.Limits
    ├── quotas      [[quotas]]   what APIs allow
    ├── services    [[services]] models to be called
    └── devices     [[devices]]  where these are loaded
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec

from tangram.config import valid
from tangram.config.valid import Valid, address_of, is_loopback, one_of
from tangram.core.limits import Limits
from tangram.errors import InvalidConfig

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

BANDWIDTH = 25e9
"""Of an emulated device: what PCIe 4.0 with 16 lanes brings of its 32e9."""
MODEL_S_MAX = 600.0
"""To load a model, and of one call: a server that is started for the first time takes minutes, and a device that hangs
is not lost for a night."""


def checked(key: str, value: Any, kind: Valid) -> Any:
    """As its field takes it. Raises InvalidConfig."""
    try:
        return kind.read(value)
    except ValueError as error:
        better = str(error) if type(error) is ValueError else ""  # those of another kind are not ours
        raise InvalidConfig(key, value, better or kind.words) from None


@functools.cache
def kinds(table: type[msgspec.Struct]) -> dict[str, Valid | Any]:
    """What each key of a table takes: a Valid, or the type of a table or of several. A table of the core says no more
    than types; then its own check says the rest."""
    plain = {int: valid.COUNT, float: valid.SECONDS}
    found: dict[str, Valid | Any] = {}
    for key, hint in get_type_hints(table, include_extras=True).items():
        if key not in table.__struct_fields__:
            continue
        if get_origin(hint) is Annotated:
            found[key] = next(each for each in get_args(hint) if isinstance(each, Valid))
        else:
            found[key] = plain.get(hint, hint)
    return found


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of which every value is checked; `together` checks what has to fit together."""

    def __post_init__(self) -> None:
        for key, kind in kinds(type(self)).items():
            if isinstance(kind, Valid):
                checked(key, getattr(self, key), kind)
        self.together()

    def together(self) -> None:
        """Raises InvalidConfig, which names the key to be changed."""


class Root(Table, frozen=True, kw_only=True):
    """A whole file."""

    PATHS: ClassVar[dict[str, tuple[str, ...]]] = {}
    """By table, the keys that hold paths, which are relative to the folder of the file."""


class ServiceConfig(Table, frozen=True, kw_only=True):
    """What `tangram serve` listens on, who may use it, and what it keeps."""

    listen: valid.Listen = "127.0.0.1:7433"
    """Where it listens; port 0 is any that is free. Whatever is not loopback needs `admin_token_file`."""
    tls_certificate: valid.PathOrNone = ""
    """The certificate and those that signed it, in PEM; with it all is HTTPS."""
    tls_key: valid.PathOrNone = ""
    """The private key of the certificate, in PEM; both or none."""
    admin_token_file: valid.PathOrNone = ""
    """A file that holds the token of the admin, who makes runs and their tokens; others must not be able to read it."""
    open_on_loopback: valid.Flag = True
    """Without an admin token: whether anybody on this machine may do everything. It means nothing beside a token."""
    journal: valid.PathText = "journal.db"
    """The database of all that is remembered; its log and its lock lie beside it."""
    durability: Annotated[valid.Durability, one_of(valid.Durability)] = "process"
    """What an acknowledged action survives: the death of the process, or a loss of power as well, which costs a write
    to the disk for each group of actions."""
    results_keep_s: valid.Seconds = 86_400.0
    """How long a result that nobody fetched is kept."""
    drain_s: valid.SecondsOr0 = 30.0
    """How long SIGTERM lets running actions end before they are stopped."""
    event_log: valid.PathOrNone = ""
    """A file for every event as a line of JSON, begun anew at every start: that of the start before stays beside it,
    with the time of its end in its name. It ends at 4 GiB."""
    policy: valid.Policy = "adaptive"
    """The scheduling policy."""
    endpoints: valid.Addresses = ()
    """HTTP function endpoints that the service calls in the name of its callers: addresses that begin so, and no
    others."""
    sandboxes_on_stop: Annotated[valid.OnStop, one_of(valid.OnStop)] = "keep"
    """Whether sandboxes outlive the service, so that the next one takes them over, or are closed when it stops, those
    that it took over included."""

    def together(self) -> None:
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
                "the path of a file with the admin's token: with open_on_loopback = false nobody may do anything"
                " without one",
            )


class NodeConfig(Table, frozen=True, kw_only=True):
    """The machine whose cores and memory are shared."""

    name: valid.NodeName = "local"
    """What it is called in pools, traces and the dashboard."""
    backend: Annotated[valid.Backend, one_of(valid.Backend)] = "sandbox"
    """How commands run: in real sandboxes, which need root; as plain processes, which isolates nothing; through a
    Docker engine; or not at all, for tests."""
    cores: valid.MaybeCores = None
    """What all sandboxes use together at most; all of the machine if it is not said."""
    memory: valid.MaybeSize = None
    """What all sandboxes reserve together at most; nine tenths of what is available if it is not said."""
    state: valid.PathOrNone = ""
    """The directory of sandboxes and images; none: TANGRAM_STATE, or /var/lib/tangram."""
    warm: valid.CountOr0 = 0
    """Sandboxes that are made ahead, each like the last one that was opened."""

    def together(self) -> None:
        if self.warm and self.backend != "sandbox":
            raise InvalidConfig("warm", self.warm, '0: only the backend "sandbox" makes sandboxes ahead')


class RunLimits(Table, frozen=True, kw_only=True):
    """What each run may use, unless the admin gave it limits of its own; the last one is of all runs together."""

    body_bytes_max: valid.Size = 64 * MIB
    """Of the JSON body of one request."""
    file_bytes_max: valid.Size = 4 * GIB
    """Of one file or archive that is streamed in."""
    sandboxes_max: valid.Count = 1000
    """Sandboxes that are open or wait for their memory, those included in which its functions are being called."""
    images_max: valid.Count = 200
    """Images that it has and has not forgotten."""
    waiting_max: valid.Count = 20_000
    """Actions under way, waiting or running."""
    waiting_bytes_max: valid.Size = 256 * MIB
    """What the actions under way were submitted with, together; it is in memory and in the journal."""
    results_bytes_max: valid.Size = 1 * GIB
    """Results that were not acknowledged, together. Beyond, nothing is taken in, and of what is under way already the
    output is not kept: it settles as lost."""
    requests_per_s: valid.PerSecond = 5000.0
    """Requests per second, in the long run."""
    requests_burst: valid.Count = 10_000
    """Requests at once, after a pause."""
    sandbox_idle_s: valid.Seconds = 3600.0
    """A sandbox that nobody used for so long is closed. An instance of a function ends after so long at the latest."""
    hold_idle_s: valid.Seconds = 60.0
    """Whoever holds a part of a quota and says nothing for so long has lost it."""
    network: valid.Flag = False
    """Whether sandboxes may have the network of the machine, where the service itself listens."""
    output_bytes_max: valid.Size = 4 * MIB
    """Output of one action that is kept for whoever streams it and is slow."""
    connections_max: valid.Count = 10_000
    """Connections that are open at once, of all runs together."""


class RateConfig(Table, frozen=True, kw_only=True):
    """So many units in so many seconds."""

    units: valid.Count
    """How many requests or tokens."""
    seconds: valid.Seconds
    """In how many seconds."""


class QuotaConfig(Table, frozen=True, kw_only=True):
    """What one API allows: at least one of `concurrent`, `requests` and `tokens`."""

    name: valid.QuotaName
    """What actions call it."""
    concurrent: valid.MaybeCount = None
    """Requests that are under way at once."""
    requests: RateConfig | None = None
    """Requests in a window of time."""
    tokens: RateConfig | None = None
    """Tokens in a window of time."""

    def together(self) -> None:
        if self.concurrent is None and self.requests is None and self.tokens is None:
            raise InvalidConfig("name", self.name, "at least one of concurrent, requests and tokens beside it")


class ModelConfig(Table, frozen=True, kw_only=True):
    """A model that actions call by its name."""

    name: valid.Name
    """What actions call it."""
    engine: valid.EngineName
    """Where the processes of the devices import its engine from: an Engine, or what makes one of `arguments`."""
    arguments: valid.Arguments = {}
    """What the engine is made of. Paths in it are relative to where the service was started."""
    degrees: valid.Degrees = (1,)
    """Numbers of devices that it can run on."""
    memory_bytes: valid.SizeOr0 = 0
    """What it takes of all its devices together; 0: as much as its weights, which an engine in front of a server does
    not know."""
    load_s_max: valid.Seconds = MODEL_S_MAX
    """A load that takes longer is ended."""
    call_s_max: valid.Seconds = MODEL_S_MAX
    """A call that takes longer is stopped, unless its caller says another time."""


class DeviceConfig(Table, frozen=True, kw_only=True):
    """A device that models are loaded on. Without any, services are loaded on the CUDA devices of the machine."""

    kind: Annotated[valid.DeviceKind, one_of(valid.DeviceKind)]
    """A device of PyTorch, or one that is not there: memory of the machine behind a link of invented speed."""
    memory_bytes: valid.Size
    """Its memory, as far as models may use it."""
    bandwidth: valid.PerSecond = BANDWIDTH
    """Bytes per second from host memory; only of an emulated one."""
    place: valid.Text = ""
    """As PyTorch calls it, such as `cuda:0`; only of a CUDA device, which needs it."""
    name: valid.Text = ""
    """What it is called for people; only of a CUDA device."""

    def together(self) -> None:
        if self.kind == "cuda":
            if not self.place:
                raise InvalidConfig("place", self.place, 'the place of a device of PyTorch, such as "cuda:0"')
            if self.bandwidth != BANDWIDTH:
                raise InvalidConfig("bandwidth", self.bandwidth, "nothing: a CUDA device is as fast as it is")
        for key in ("place", "name"):
            if self.kind == "emulated" and getattr(self, key):
                raise InvalidConfig(key, getattr(self, key), "nothing: only CUDA devices have one")


class Config(Root, frozen=True, kw_only=True):
    """All that `tangram serve` is told. What is not said is as here."""

    service: ServiceConfig = ServiceConfig()
    node: NodeConfig = NodeConfig()
    limits: RunLimits = RunLimits()
    scheduler: Limits = Limits()
    quotas: tuple[QuotaConfig, ...] = ()
    services: tuple[ModelConfig, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()

    PATHS: ClassVar = {
        "service": ("tls_certificate", "tls_key", "admin_token_file", "journal", "event_log"),
        "node": ("state",),
    }

    @property
    def listen_host(self) -> str:
        """Without the brackets of a v6 address."""
        return address_of(self.service.listen)[0]

    @property
    def listen_port(self) -> int:
        return address_of(self.service.listen)[1]

    @property
    def is_public(self) -> bool:
        """Whether others than this machine can reach it."""
        return not is_loopback(self.listen_host)

    @property
    def is_open(self) -> bool:
        """Whether there is no admin token, so that everybody on this machine is the admin."""
        return not self.service.admin_token_file

    def together(self) -> None:
        _require_own_names("quotas", self.quotas)
        _require_own_names("services", self.services)


def _require_own_names(key: str, records: Iterable[QuotaConfig | ModelConfig]) -> None:
    seen: dict[str, int] = {}
    for at, record in enumerate(records):
        if record.name in seen:
            raise InvalidConfig(f"{key}[{at}].name", record.name, f"each name once; {key}[{seen[record.name]}] has it")
        seen[record.name] = at
