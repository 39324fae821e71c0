"""Accounts: counters per run and per class of actions.

Tenants choose these names, and each costs memory here and series in every metrics collector. So RUNS_MAX runs and
CLASSES_MAX classes have an account of their own; other runs count together as OTHER. A class without room is first
counted without its task: `*/exec/tests` is the tests of all tasks of that run that have no class of their own. Accounts
without activity for an hour are evicted when room is short, and start at zero when they return.
"""

from __future__ import annotations

from bisect import bisect_left

from tangram.core.action import Action
from tangram.core.demand import Demand
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.server.observe.amounts import describe_demand
from tangram.server.observe.history import LastHour, Series
from tangram.server.observe.time_breakdown import OTHER, TimeSums

RUNS_MAX = 200
CLASSES_MAX = 300
"""Classes over all runs, not counting the OTHER of each run."""
CLASSES_PER_RUN_MAX = 60
"""Classes of one run, so that the first run leaves some to others."""
TASKS_PER_RUN_MAX = 30
"""Classes of one run with a task in their name: a task may be one item of a data set of thousands."""

DURATION_BUCKETS_S = (0.001, 0.0033, 0.01, 0.033, 0.1, 0.33, 1.0, 3.3, 10.0, 33.0, 100.0, 330.0, 1000.0, 3300.0)
"""Upper bounds of duration buckets in the metrics: few, since each costs a series per run and class."""


class Histogram:
    """A histogram of durations since the server started."""

    __slots__ = ("counts", "edges", "sum_s")

    def __init__(self, edges: tuple[float, ...] = DURATION_BUCKETS_S) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.edges, seconds)] += 1
        self.sum_s += seconds


class RunAccount:
    """Counters of one run, or of all runs without an account."""

    __slots__ = (
        "active", "classes", "hour", "name", "running", "sandboxes", "series", "settled", "time_breakdown", "latencies",
        "tasks", "waiting",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting = self.running = 0
        """Actions, now."""
        self.sandboxes = self.active = 0
        """Sandboxes, and those in which an action runs."""
        self.settled: dict[str, int] = {}
        """Settled actions by status."""
        self.latencies = LatencyHistogram()
        """Settled actions of the current bucket."""
        self.hour = LastHour()
        self.series: Series | None = None
        """Starts at the first bucket with activity."""
        self.time_breakdown = TimeSums()
        self.classes = self.tasks = 0
        """Number of classes, and of those with a task in their name."""

    def count(self, status: str) -> None:
        self.settled[status] = self.settled.get(status, 0) + 1


class ClassAccount:
    """Counters of one class of one run."""

    __slots__ = (
        "_demand_text", "_demand", "completion", "execution", "hour", "live_actions", "name", "overhead", "run",
        "latencies", "waiting", "has_task",
    )  # fmt: skip

    def __init__(self, run: RunAccount, name: str, *, has_task: bool) -> None:
        self.run = run
        self.name = name
        self.has_task = has_task
        self.live_actions = 0
        """Actions that have not settled."""
        self.latencies = LatencyHistogram()
        """Completion times not yet added to run and hour."""
        self.hour = LastHour()
        self.completion, self.waiting = Histogram(), Histogram()
        self.execution, self.overhead = Histogram(), Histogram()
        self._demand: Demand | None = None
        self._demand_text = ""

    def add(self, waiting_s: float, execution_s: float, overhead_s: float) -> None:
        self.latencies.add(waiting_s, execution_s, overhead_s)
        self.completion.observe(waiting_s + execution_s + overhead_s)
        self.waiting.observe(waiting_s)
        self.execution.observe(execution_s)
        self.overhead.observe(overhead_s)

    def describe_demand(self, demand: Demand) -> str:
        """The demand as text, cached: actions of one class mostly have the same demand."""
        if demand != self._demand:
            self._demand = demand
            self._demand_text = describe_demand(demand)
        return self._demand_text


ClassKey = tuple[str, str, str, str]
"""Run, task, kind and key of an action."""


class Accounts:
    def __init__(self) -> None:
        self.runs: dict[str, RunAccount] = {}
        self.other = RunAccount(OTHER)
        """The name under which runs without an account count. A run of that name never has its own account."""
        self.classes: dict[tuple[str, str], ClassAccount] = {}
        """By name of the run's account and of the class."""
        self._by_key: dict[ClassKey, ClassAccount] = {}
        """Caches the lookup of accounts by their full name."""
        self._named_class_count = 0

    def all_runs(self) -> list[RunAccount]:
        return [*self.runs.values(), self.other]

    def run(self, name: str) -> RunAccount:
        account = self.runs.get(name)
        if account is None:
            if name == OTHER or len(self.runs) >= RUNS_MAX:
                return self.other
            account = self.runs[name] = RunAccount(name)
        return account

    def account_of(self, action: Action) -> ClassAccount:
        key = (action.run, action.task, action.kind, action.key)
        account = self._by_key.get(key)
        if account is None:
            account = self._find_account(action)
            if account.has_task or (not action.task and account.name != OTHER):
                self._by_key[key] = account
        return account

    def _find_account(self, action: Action) -> ClassAccount:
        run = self.run(action.run)
        if run is not self.other:
            named = [(class_name(action.task, action.kind, action.key), bool(action.task))]
            if action.task:
                named.append((class_name("*", action.kind, action.key), False))
            for name, with_task in named:
                account = self.classes.get((run.name, name))
                if account is not None:
                    return account
                if name != OTHER and self._has_room(run, has_task=with_task):
                    run.classes += 1
                    run.tasks += with_task
                    self._named_class_count += 1
                    return self._open_account(run, name, has_task=with_task)
        return self.classes.get((run.name, OTHER)) or self._open_account(run, OTHER, has_task=False)

    def _has_room(self, run: RunAccount, *, has_task: bool) -> bool:
        if has_task and run.tasks >= TASKS_PER_RUN_MAX:
            return False
        return run.classes < CLASSES_PER_RUN_MAX and self._named_class_count < CLASSES_MAX

    def _open_account(self, run: RunAccount, name: str, *, has_task: bool) -> ClassAccount:
        account = self.classes[run.name, name] = ClassAccount(run, name, has_task=has_task)
        return account

    def forget(self, slice_number: int) -> None:
        """Drops what is older than an hour, and evicts inactive accounts if room is short."""
        for run in self.all_runs():
            run.hour.forget(slice_number)
        for account in self.classes.values():
            account.hour.forget(slice_number)
        if 2 * self._named_class_count > CLASSES_MAX or 2 * len(self.runs) > RUNS_MAX:
            self._evict_idle()

    def drop_run(self, name: str) -> None:
        """The run has ended: a later run of that name starts at zero."""
        self.runs.pop(name, None)
        self.classes = {key: account for key, account in self.classes.items() if account.run.name != name}
        self._recount()

    def _evict_idle(self) -> None:
        self.classes = {
            key: account for key, account in self.classes.items() if account.live_actions or account.hour.total.count
        }
        self.runs = {
            name: run
            for name, run in self.runs.items()
            if run.waiting or run.running or run.sandboxes or run.hour.total.count
        }
        self._recount()

    def _recount(self) -> None:
        self._by_key = {
            key: account
            for key, account in self._by_key.items()
            if self.classes.get((account.run.name, account.name)) is account
        }
        self._named_class_count = 0
        for run in self.all_runs():
            run.classes = run.tasks = 0
        for account in self.classes.values():
            if account.name != OTHER:
                self._named_class_count += 1
                account.run.classes += 1
                account.run.tasks += account.has_task


def class_name(*words: str) -> str:
    """`task/kind/key`, without empty parts."""
    return "/".join([word for word in words if word])
