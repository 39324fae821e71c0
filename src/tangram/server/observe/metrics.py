"""Metrics: the counters of the service in the text format of Prometheus, rendered by `prometheus_client`.

Owns names, units and labels. Series of actions and pools are read from the observer at every scrape. The HTTP
middleware and the journal report theirs through `count`, `observe` and `set`, by the names of FAMILIES. Promises that
no family has more than SERIES_MAX series: further ones count with OTHER in every label. The accounts already bound the
names of runs and classes. `prometheus_client` adds the families `process_*`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import msgspec
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

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
        """All series in the text format of Prometheus."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """The families with their samples: the interface of a collector of `prometheus_client`."""
        numbers = {name: dict(series) for name, series in self._numbers.items()}
        for name, values, number in (*_of_actions(self._picture), *_of_pools(self._picture)):
            series = numbers.setdefault(name, {})
            series[values] = series.get(values, 0) + number
        distributions = {**self._distributions, **_of_classes(self._picture)}
        for family in FAMILIES:
            yield _collected(family, numbers.get(family.name, {}), distributions.get(family.name, {}))
        yield from ProcessCollector(registry=None).collect()


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


# ---- families and series --------------------------------------------------------------------------------------


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


def _collected(family: Family, numbers: Mapping[Labels, float], distributions: Mapping[Labels, Distribution]) -> Metric:
    if family.kind == HISTOGRAM:
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for values, distribution in distributions.items():
            counts = zip((*distribution.edges, math.inf), accumulate(distribution.counts), strict=True)
            buckets = [(floatToGoString(edge), float(count)) for edge, count in counts]
            histogram.add_metric(values, buckets, sum_value=distribution.sum_s)
        return histogram
    kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for values, number in numbers.items():
        metric.add_metric(values, number)
    return metric
