"""Metrics: the counters of the service as Prometheus reads them, in its text format 0.0.4.

Owns the names, units and labels, and how they are written. What concerns actions is read from the picture when somebody
asks. What concerns requests and the journal is told by them: `count`, `observe` and `set`, by the names of FAMILIES.
Promises that every label value is escaped, whoever chose it, and that no family has more than SERIES_MAX series: what
comes beyond is counted with OTHER in every label. Names of runs and classes are bounded by the accounts already.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from tangram.core.messages import NodeState
from tangram.errors import InvariantError
from tangram.server.observe.accounts import EDGES, ClassAccount, Distribution, RunAccount
from tangram.server.observe.observer import Picture
from tangram.server.observe.pools import waiting_actions
from tangram.server.observe.shares import Shares
from tangram.server.observe.time_breakdown import OTHER

SERIES_MAX = 1000
"""Of one family that is told from outside: routes times statuses are a tenth of that."""

REQUEST_EDGES = (0.001, 0.0033, 0.01, 0.033, 0.1, 0.33, 1.0, 3.3, 10.0, 33.0)
COMMIT_EDGES = (0.0001, 0.00033, 0.001, 0.0033, 0.01, 0.033, 0.1, 0.33, 1.0, 3.3)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

Labels = tuple[str, ...]
"""Values, in the order of the family's labels."""


class Family(msgspec.Struct, frozen=True):
    """One metric with all its series."""

    name: str
    kind: str
    help: str
    labels: Labels = ()
    edges: tuple[float, ...] = EDGES
    """Of a histogram: the upper ends of its buckets."""


BY_CLASS = ("run", "class")

FAMILIES = (
    Family("tangram_build_info", GAUGE, "Always 1; says what runs.", ("version", "policy", "durability")),
    Family("tangram_actions_total", COUNTER, "Actions that have settled, by how.", ("run", "status")),
    Family("tangram_actions_waiting", GAUGE, "Actions in the queue.", ("run",)),
    Family("tangram_actions_running", GAUGE, "Actions that hold units: starting, running or stopping.", ("run",)),
    Family("tangram_action_completion_seconds", HISTOGRAM, "From submission to the end: ACT.", BY_CLASS),
    Family("tangram_action_waiting_seconds", HISTOGRAM, "Of that, waiting for units.", BY_CLASS),
    Family("tangram_action_execution_seconds", HISTOGRAM, "Of that, the action itself.", BY_CLASS),
    Family("tangram_action_overhead_seconds", HISTOGRAM, "Of that, our own work: starting, cleaning up.", BY_CLASS),
    Family("tangram_time_seconds_total", COUNTER, "Where the time of trajectories went.", ("run", "part")),
    Family("tangram_pool_units", GAUGE, "Units of a pool: milli-cores, MiB, devices, requests, tokens.",
           ("pool", "state")),
    Family("tangram_pool_waiting_actions", GAUGE, "Actions in the queue that a pool is too short for.", ("pool",)),
    Family("tangram_node_draining", GAUGE, "1 while a node takes no new sandboxes and actions, else 0.", ("node",)),
    Family("tangram_run_share", GAUGE, "The largest part that a run has of any kind of pool, from 0 to 1.", ("run",)),
    Family("tangram_run_weight", GAUGE, "Its weight in fair share.", ("run",)),
    Family("tangram_sandboxes", GAUGE, "Sandboxes: active while an action runs in them, else frozen.",
           ("run", "state")),
    Family("tangram_refusals_total", COUNTER, "What was kept out, by the limit that did.", ("limit",)),
    Family("tangram_scheduler_events_total", COUNTER, "Events that the scheduler has handled.", ("event",)),
    Family("tangram_http_requests_total", COUNTER, "Requests that were answered.", ("route", "status")),
    Family("tangram_http_request_seconds", HISTOGRAM, "Until the answer began; of a long poll with its waiting.",
           ("route",), REQUEST_EDGES),
    Family("tangram_journal_commit_seconds", HISTOGRAM, "To write a batch of the journal.", (), COMMIT_EDGES),
    Family("tangram_journal_operations_total", COUNTER, "Changes that those batches were made of."),
    Family("tangram_journal_log_bytes", GAUGE, "Size of the write-ahead log of the journal."),
    Family("process_cpu_seconds_total", COUNTER, "CPU time of the service itself."),
    Family("process_resident_memory_bytes", GAUGE, "Memory of the service itself."),
    Family("process_virtual_memory_bytes", GAUGE, "Its address space."),
    Family("process_open_fds", GAUGE, "Its open file descriptors."),
    Family("process_max_fds", GAUGE, "How many it may have."),
    Family("process_start_time_seconds", GAUGE, "When it started, in seconds since 1970."),
)  # fmt: skip
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}


class Metrics:
    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._numbers: dict[str, dict[Labels, float]] = {}
        self._distributions: dict[str, dict[Labels, Distribution]] = {}

    # ---- what is told ----

    def count(self, name: str, labels: Mapping[str, str] | None = None, amount: float = 1) -> None:
        family = _family(name, COUNTER)
        series = self._numbers.setdefault(name, {})
        values = _bounded(family, _values(family, labels), series)
        series[values] = series.get(values, 0) + amount

    def set(self, name: str, labels: Mapping[str, str] | None, value: float) -> None:
        family = _family(name, GAUGE)
        series = self._numbers.setdefault(name, {})
        series[_bounded(family, _values(family, labels), series)] = value

    def observe(self, name: str, labels: Mapping[str, str] | None, seconds: float) -> None:
        family = _family(name, HISTOGRAM)
        series = self._distributions.setdefault(name, {})
        values = _bounded(family, _values(family, labels), series)
        distribution = series.get(values)
        if distribution is None:
            distribution = series[values] = Distribution(family.edges)
        distribution.observe(seconds)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request; by its route, not by its path, of which there is no end."""
        self.count("tangram_http_requests_total", {"route": route, "status": str(status)})
        self.observe("tangram_http_request_seconds", {"route": route}, seconds)

    def refused(self, limit: str) -> None:
        """A request that did not get as far as the scheduler, which counts its own."""
        self.count("tangram_refusals_total", {"limit": limit})

    def committed(self, seconds: float, operations: int, log_bytes: int) -> None:
        """A batch of the journal."""
        self.observe("tangram_journal_commit_seconds", None, seconds)
        self.count("tangram_journal_operations_total", None, operations)
        self.set("tangram_journal_log_bytes", None, log_bytes)

    # ---- what is asked ----

    def text(self) -> str:
        lines: list[str] = []
        numbers = {name: dict(series) for name, series in self._numbers.items()}
        for name, values, number in (*_of_actions(self._picture), *_of_pools(self._picture), *process_samples()):
            series = numbers.setdefault(name, {})
            series[values] = series.get(values, 0) + number
        distributions = {**self._distributions, **_of_classes(self._picture)}
        for family in FAMILIES:
            lines.append(f"# HELP {family.name} {_escaped_help(family.help)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
            for values, number in numbers.get(family.name, {}).items():
                labels = written_labels(family.labels, values)
                lines.append(f"{family.name}{{{labels}}} {_number(number)}" if labels else
                             f"{family.name} {_number(number)}")  # fmt: skip
            for values, distribution in distributions.get(family.name, {}).items():
                lines.extend(_histogram(family.name, written_labels(family.labels, values), distribution))
        return "\n".join(lines) + "\n"


# ---- from the picture -----------------------------------------------------------------------------------------

Sample = tuple[str, Labels, float]


def _of_actions(picture: Picture) -> Iterator[Sample]:
    scheduler = picture.scheduler
    shares = Shares(scheduler.ledger, picture.now())
    yield "tangram_build_info", (picture.version, scheduler.policy.name, picture.durability), 1
    for account in picture.accounts.all_runs():
        runs = scheduler.queue.runs
        if account is not picture.accounts.other:
            known = [runs[account.name]] if account.name in runs else []
        else:
            known = [run for name, run in runs.items() if name not in picture.accounts.runs]
        if known or account.settled:
            yield from _of_run(account)
            yield "tangram_run_share", (account.name,), shares.of(run.usage for run in known)
            yield "tangram_run_weight", (account.name,), sum(run.usage.weight for run in known)
    for limit, count in picture.refusals.items():
        yield "tangram_refusals_total", (limit,), count
    for event, count in picture.events.items():
        yield "tangram_scheduler_events_total", (str(event.__struct_config__.tag),), count


def _of_run(account: RunAccount) -> Iterator[Sample]:
    name = account.name
    for status, count in account.settled.items():
        yield "tangram_actions_total", (name, status), count
    yield "tangram_actions_waiting", (name,), account.waiting
    yield "tangram_actions_running", (name,), account.running
    yield "tangram_sandboxes", (name, "active"), account.active
    yield "tangram_sandboxes", (name, "frozen"), account.sandboxes - account.active
    for part, seconds in account.spending.parts().items():
        yield "tangram_time_seconds_total", (name, part), seconds


def _of_pools(picture: Picture) -> Iterator[Sample]:
    now, waiting = picture.now(), waiting_actions(picture)
    for pool in picture.scheduler.ledger.pools.values():
        spent = pool.spent - pool.come_back(now)
        states = {"total": pool.total, "held": pool.held, "spent": spent, "free": pool.total - pool.held - spent}
        for state, units in states.items():
            yield "tangram_pool_units", (pool.name, state), units
        yield "tangram_pool_waiting_actions", (pool.name,), waiting[pool.name]
    for node, node_state in picture.scheduler.ledger.nodes.items():
        yield "tangram_node_draining", (node,), node_state is NodeState.DRAINING


PARTS: dict[str, Callable[[ClassAccount], Distribution]] = {
    "tangram_action_completion_seconds": lambda account: account.completion,
    "tangram_action_waiting_seconds": lambda account: account.waiting,
    "tangram_action_execution_seconds": lambda account: account.execution,
    "tangram_action_overhead_seconds": lambda account: account.overhead,
}


def _of_classes(picture: Picture) -> dict[str, dict[Labels, Distribution]]:
    classes = picture.accounts.classes.values()
    return {name: {(one.run.name, one.name): part(one) for one in classes} for name, part in PARTS.items()}


# ---- writing --------------------------------------------------------------------------------------------------


def _family(name: str, kind: str) -> Family:
    family = FAMILY_BY_NAME.get(name)
    if family is None or family.kind != kind:
        raise InvariantError(f"{name!r} is no {kind} of the metrics; those are named in FAMILIES")
    return family


def _values(family: Family, labels: Mapping[str, str] | None) -> Labels:
    given = labels or {}
    if len(given) != len(family.labels) or not all(name in given for name in family.labels):
        raise InvariantError(f"{family.name} has the labels {family.labels}, not {tuple(given)}")
    return tuple([given[name] for name in family.labels])


def _bounded(family: Family, values: Labels, series: Mapping[Labels, object]) -> Labels:
    return values if values in series or len(series) < SERIES_MAX else (OTHER,) * len(family.labels)


def written_labels(names: Labels, values: Labels) -> str:
    """`run="a",class="b"`, each value escaped."""
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return repr(value)


def _histogram(name: str, labels: str, distribution: Distribution) -> Iterator[str]:
    before = f"{labels}," if labels else ""
    total = 0
    for edge, count in zip((*distribution.edges, math.inf), distribution.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{before}le="{_number(edge)}"}} {total}'
    around = f"{{{labels}}}" if labels else ""
    yield f"{name}_sum{around} {_number(distribution.sum_s)}"
    yield f"{name}_count{around} {total}"


PROC = Path("/proc")


def process_samples() -> Iterator[tuple[str, tuple[str, ...], float]]:
    """By the names that all exporters use."""
    try:
        # The name of the program stands in parentheses and may hold anything, these included.
        fields = (PROC / "self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot_s = _boot_s()
        descriptors = len(os.listdir(PROC / "self/fd"))
    except OSError:
        return
    per_s, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    user, system, started, virtual, resident = (int(fields[place]) for place in (11, 12, 19, 20, 21))
    yield "process_cpu_seconds_total", (), (user + system) / per_s
    yield "process_resident_memory_bytes", (), resident * page
    yield "process_virtual_memory_bytes", (), virtual
    yield "process_open_fds", (), descriptors
    yield "process_max_fds", (), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield "process_start_time_seconds", (), boot_s + started / per_s


def _boot_s() -> float:
    for line in (PROC / "stat").read_text(encoding="utf-8").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
