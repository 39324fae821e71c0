"""Metrics: the counters of the server in the text format of Prometheus, rendered by `prometheus_client`.

Owns names, units and labels. `ReportedMetrics` holds what the HTTP middleware and the journal report, by the names of
FAMILIES. `MetricsCollector` adds the series of actions and pools, read from the observer at every scrape. Promises that
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
from tangram.server.observe.accounts import DURATION_BUCKETS_S, ClassAccount, Histogram, RunAccount
from tangram.server.observe.pool_views import RunShares, waiting_actions
from tangram.server.observe.state_observer import StateObserver
from tangram.server.observe.time_breakdown import OTHER

SERIES_MAX = 1000
"""Series of one reported family: routes times statuses are a tenth of that."""

REQUEST_BUCKETS_S = (0.001, 0.0033, 0.01, 0.033, 0.1, 0.33, 1.0, 3.3, 10.0, 33.0)
COMMIT_BUCKETS_S = (0.0001, 0.00033, 0.001, 0.0033, 0.01, 0.033, 0.1, 0.33, 1.0, 3.3)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

Labels = tuple[str, ...]
"""Values, in the order of the family's labels."""


class MetricFamily(msgspec.Struct, frozen=True):
    """One metric with all its series."""

    name: str
    kind: str
    help: str
    labels: Labels = ()
    edges: tuple[float, ...] = DURATION_BUCKETS_S
    """Upper bounds of the buckets of a histogram."""


CLASS_LABELS = ("run", "class")

FAMILIES = (
    MetricFamily(
        "tangram_build_info", GAUGE, "Always 1; the labels identify the service.", ("version", "policy", "durability")
    ),
    MetricFamily("tangram_actions_total", COUNTER, "Settled actions by status.", ("run", "status")),
    MetricFamily("tangram_actions_waiting", GAUGE, "Actions in the queue.", ("run",)),
    MetricFamily("tangram_actions_running", GAUGE, "Actions that hold units: starting, running or stopping.", ("run",)),
    MetricFamily(
        "tangram_action_completion_seconds",
        HISTOGRAM,
        "Action completion time (ACT), from submission to settlement.",
        CLASS_LABELS,
    ),
    MetricFamily(
        "tangram_action_waiting_seconds", HISTOGRAM, "Part of the completion time: waiting for units.", CLASS_LABELS
    ),
    MetricFamily(
        "tangram_action_execution_seconds", HISTOGRAM, "Part of the completion time: execution.", CLASS_LABELS
    ),
    MetricFamily(
        "tangram_action_overhead_seconds", HISTOGRAM, "Part of the completion time: overhead of Tangram.", CLASS_LABELS
    ),
    MetricFamily("tangram_time_seconds_total", COUNTER, "Where the time of trajectories went.", ("run", "part")),
    MetricFamily(
        "tangram_pool_units", GAUGE, "Units of a pool: milli-cores, MiB, devices, requests, tokens.", ("pool", "state")
    ),
    MetricFamily("tangram_pool_waiting_actions", GAUGE, "Queued actions that wait for the pool.", ("pool",)),
    MetricFamily(
        "tangram_node_draining", GAUGE, "1 while a node accepts no new sandboxes and actions, else 0.", ("node",)
    ),
    MetricFamily("tangram_run_share", GAUGE, "Largest share of a run over all kinds of pool, from 0 to 1.", ("run",)),
    MetricFamily("tangram_run_weight", GAUGE, "Weight of a run in fair share.", ("run",)),
    MetricFamily(
        "tangram_sandboxes", GAUGE, "Sandboxes: active while an action runs in them, else frozen.", ("run", "state")
    ),
    MetricFamily("tangram_refusals_total", COUNTER, "Refusals by limit.", ("limit",)),
    MetricFamily("tangram_scheduler_events_total", COUNTER, "Events handled by the scheduler.", ("event",)),
    MetricFamily("tangram_http_requests_total", COUNTER, "HTTP requests by route and status.", ("route", "status")),
    MetricFamily(
        "tangram_http_request_seconds",
        HISTOGRAM,
        "Time to the start of the response, including the wait of a long poll.",
        ("route",),
        REQUEST_BUCKETS_S,
    ),
    MetricFamily(
        "tangram_journal_commit_seconds", HISTOGRAM, "Time to commit a batch of the journal.", (), COMMIT_BUCKETS_S
    ),
    MetricFamily("tangram_journal_operations_total", COUNTER, "Operations committed to the journal."),
    MetricFamily("tangram_journal_log_bytes", GAUGE, "Size of the write-ahead log of the journal."),
)
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}


class ReportedMetrics:
    """Series that are counted where they occur."""

    def __init__(self) -> None:
        self.values_by_family: dict[str, dict[Labels, float]] = {}
        self.histograms_by_family: dict[str, dict[Labels, Histogram]] = {}

    def count(self, name: str, labels: Mapping[str, str] | None = None, amount: float = 1) -> None:
        family = _require_family(name, COUNTER)
        series = self.values_by_family.setdefault(name, {})
        values = _bounded_labels(family, _label_values(family, labels), series)
        series[values] = series.get(values, 0) + amount

    def set(self, name: str, labels: Mapping[str, str] | None, value: float) -> None:
        family = _require_family(name, GAUGE)
        series = self.values_by_family.setdefault(name, {})
        series[_bounded_labels(family, _label_values(family, labels), series)] = value

    def observe(self, name: str, labels: Mapping[str, str] | None, seconds: float) -> None:
        family = _require_family(name, HISTOGRAM)
        series = self.histograms_by_family.setdefault(name, {})
        values = _bounded_labels(family, _label_values(family, labels), series)
        distribution = series.get(values)
        if distribution is None:
            distribution = series[values] = Histogram(family.edges)
        distribution.observe(seconds)

    def on_response(self, route: str, status: int, seconds: float) -> None:
        """Counts a request by its route: paths are unbounded."""
        self.count("tangram_http_requests_total", {"route": route, "status": str(status)})
        self.observe("tangram_http_request_seconds", {"route": route}, seconds)

    def on_refused(self, limit: str) -> None:
        """Counts a request that was refused before the scheduler, which counts its own."""
        self.count("tangram_refusals_total", {"limit": limit})

    def on_commit(self, seconds: float, operations: int, log_bytes: int) -> None:
        """Counts a batch of the journal."""
        self.observe("tangram_journal_commit_seconds", None, seconds)
        self.count("tangram_journal_operations_total", None, operations)
        self.set("tangram_journal_log_bytes", None, log_bytes)


class MetricsCollector:
    """All series; a collector of `prometheus_client`."""

    def __init__(self, reported: ReportedMetrics, observer: StateObserver) -> None:
        self._reported = reported
        self._observer = observer

    def render(self) -> str:
        """Returns the text format of Prometheus."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """Yields the families with their samples."""
        numbers = {name: dict(series) for name, series in self._reported.values_by_family.items()}
        for name, values, number in (*_action_samples(self._observer), *_pool_samples(self._observer)):
            series = numbers.setdefault(name, {})
            series[values] = series.get(values, 0) + number
        distributions = {**self._reported.histograms_by_family, **_class_histograms(self._observer)}
        for family in FAMILIES:
            yield _to_metric(family, numbers.get(family.name, {}), distributions.get(family.name, {}))
        yield from ProcessCollector(registry=None).collect()


# ---- samples of the observer -----------------------------------------------------------------------------------

Sample = tuple[str, Labels, float]


def _action_samples(observer: StateObserver) -> Iterator[Sample]:
    scheduler = observer.scheduler
    shares = RunShares(scheduler.ledger, observer.now())
    yield "tangram_build_info", (observer.version, scheduler.policy.name, observer.durability), 1
    for account in observer.accounts.all_runs():
        runs = scheduler.queue.runs
        if account is not observer.accounts.other:
            known = [runs[account.name]] if account.name in runs else []
        else:
            known = [run for name, run in runs.items() if name not in observer.accounts.runs]
        if known or account.settled:
            yield from _run_samples(account)
            yield "tangram_run_share", (account.name,), shares.dominant_share(run.usage for run in known)
            yield "tangram_run_weight", (account.name,), sum(run.usage.weight for run in known)
    for limit, count in observer.refusals.items():
        yield "tangram_refusals_total", (limit,), count
    for event, count in observer.events.items():
        yield "tangram_scheduler_events_total", (str(event.__struct_config__.tag),), count


def _run_samples(account: RunAccount) -> Iterator[Sample]:
    name = account.name
    for status, count in account.settled.items():
        yield "tangram_actions_total", (name, status), count
    yield "tangram_actions_waiting", (name,), account.waiting
    yield "tangram_actions_running", (name,), account.running
    yield "tangram_sandboxes", (name, "active"), account.active
    yield "tangram_sandboxes", (name, "frozen"), account.sandboxes - account.active
    for part, seconds in account.time_breakdown.parts().items():
        yield "tangram_time_seconds_total", (name, part), seconds


def _pool_samples(observer: StateObserver) -> Iterator[Sample]:
    now, waiting = observer.now(), waiting_actions(observer.scheduler, observer.tracker)
    for pool in observer.scheduler.ledger.pools.values():
        spent = pool.spent - pool.returned_units(now)
        states = {"total": pool.total, "held": pool.held, "spent": spent, "free": pool.total - pool.held - spent}
        for state, units in states.items():
            yield "tangram_pool_units", (pool.name, state), units
        yield "tangram_pool_waiting_actions", (pool.name,), waiting[pool.name]
    for node, node_state in observer.scheduler.ledger.nodes.items():
        yield "tangram_node_draining", (node,), node_state is NodeState.DRAINING


HISTOGRAM_BY_FAMILY: dict[str, Callable[[ClassAccount], Histogram]] = {
    "tangram_action_completion_seconds": lambda account: account.completion,
    "tangram_action_waiting_seconds": lambda account: account.waiting,
    "tangram_action_execution_seconds": lambda account: account.execution,
    "tangram_action_overhead_seconds": lambda account: account.overhead,
}


def _class_histograms(observer: StateObserver) -> dict[str, dict[Labels, Histogram]]:
    classes = observer.accounts.classes.values()
    return {
        name: {(account.run.name, account.name): histogram(account) for account in classes}
        for name, histogram in HISTOGRAM_BY_FAMILY.items()
    }


# ---- families and series --------------------------------------------------------------------------------------


def _require_family(name: str, kind: str) -> MetricFamily:
    family = FAMILY_BY_NAME.get(name)
    if family is None or family.kind != kind:
        raise InvariantError(f"{name!r} is not a {kind} in FAMILIES")
    return family


def _label_values(family: MetricFamily, labels: Mapping[str, str] | None) -> Labels:
    values = labels or {}
    if len(values) != len(family.labels) or not all(name in values for name in family.labels):
        raise InvariantError(f"{family.name} has the labels {family.labels}, not {tuple(values)}")
    return tuple([values[name] for name in family.labels])


def _bounded_labels(family: MetricFamily, values: Labels, series: Mapping[Labels, object]) -> Labels:
    return values if values in series or len(series) < SERIES_MAX else (OTHER,) * len(family.labels)


def _to_metric(
    family: MetricFamily, numbers: Mapping[Labels, float], distributions: Mapping[Labels, Histogram]
) -> Metric:
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
