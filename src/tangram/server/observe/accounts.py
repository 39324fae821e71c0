"""Accounts: what is counted per run and per class of actions.

Owns the counters and which names have some of their own. Names are chosen by tenants, and each costs memory here and
series in whoever collects the metrics: so there is room for RUNS_MAX runs and CLASSES_MAX classes. A run that finds no
room is counted under OTHER together with all others like it. So is a class, after its task was left out of its name:
`*/exec/tests` are the tests of all tasks of that run which have no class of their own. Whoever has not been seen for an
hour makes room when that is needed, and begins at zero when it comes back.
"""

from __future__ import annotations

from bisect import bisect_left

from tangram.core.action import Action
from tangram.core.demand import Demand
from tangram.server.observe.amounts import asked_for
from tangram.server.observe.history import Hour, Series, Tally
from tangram.server.observe.time_breakdown import OTHER, Sums

RUNS_MAX = 200
CLASSES_MAX = 300
"""Classes, over all runs, OTHER of each run not counted."""
RUN_CLASSES_MAX = 60
"""Of one run, so that the first one leaves some to the rest ..."""
RUN_TASKS_MAX = 30
"""... and of those so many with a task in their name: a task may be one item of a data set of thousands."""

EDGES = (0.001, 0.0033, 0.01, 0.033, 0.1, 0.33, 1.0, 3.3, 10.0, 33.0, 100.0, 330.0, 1000.0, 3300.0)
"""The upper ends of the buckets of seconds in the metrics: few, since each costs a series per run and class."""


class Distribution:
    """How often something took how long, since the service began: a histogram of the metrics."""

    __slots__ = ("counts", "edges", "sum_s")

    def __init__(self, edges: tuple[float, ...] = EDGES) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.edges, seconds)] += 1
        self.sum_s += seconds


class RunAccount:
    """Of one run, or of all that have none of their own."""

    __slots__ = (
        "active", "classes", "hour", "name", "running", "sandboxes", "series", "settled", "spending", "tally", "tasks",
        "waiting",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting = self.running = 0
        """Actions, now."""
        self.sandboxes = self.active = 0
        """Sandboxes, and those of them in which an action runs."""
        self.settled: dict[str, int] = {}
        """By status."""
        self.tally = Tally()
        """Of the bucket that is being filled."""
        self.hour = Hour()
        self.series: Series | None = None
        """From its first bucket in which there was anything."""
        self.spending = Sums()
        self.classes = self.tasks = 0
        """How many classes it has, and how many of them name a task."""

    def count(self, status: str) -> None:
        self.settled[status] = self.settled.get(status, 0) + 1


class ClassAccount:
    """Of one class of one run."""

    __slots__ = (
        "_asked", "_demand", "completion", "execution", "hour", "live", "name", "overhead", "run", "tally", "waiting",
        "with_task",
    )  # fmt: skip

    def __init__(self, run: RunAccount, name: str, *, with_task: bool) -> None:
        self.run = run
        self.name = name
        self.with_task = with_task
        self.live = 0
        """Actions that have yet to settle."""
        self.tally = Tally()
        """Of what nobody has looked at yet."""
        self.hour = Hour()
        self.completion, self.waiting = Distribution(), Distribution()
        self.execution, self.overhead = Distribution(), Distribution()
        self._demand: Demand | None = None
        self._asked = ""

    def add(self, waiting_s: float, execution_s: float, overhead_s: float) -> None:
        self.tally.add(waiting_s, execution_s, overhead_s)
        self.completion.observe(waiting_s + execution_s + overhead_s)
        self.waiting.observe(waiting_s)
        self.execution.observe(execution_s)
        self.overhead.observe(overhead_s)

    def asked(self, demand: Demand) -> str:
        """What an action asks for, in words. Those of one class mostly ask for the same, and share the words."""
        if demand != self._demand:
            self._demand = demand
            self._asked = asked_for(demand)
        return self._asked


Key = tuple[str, str, str, str]
"""Run, task, kind and key of an action."""


class Accounts:
    def __init__(self) -> None:
        self.runs: dict[str, RunAccount] = {}
        self.other = RunAccount(OTHER)
        """Of all runs without an account of their own. A run of that name has none, or the two would look the same."""
        self.classes: dict[tuple[str, str], ClassAccount] = {}
        """By the name of the account of the run, and their own."""
        self._by_key: dict[Key, ClassAccount] = {}
        """What a look at the four names of an action has led to, as far as that was an account by its own name."""
        self._classes_named = 0

    def all_runs(self) -> list[RunAccount]:
        return [*self.runs.values(), self.other]

    def run(self, name: str) -> RunAccount:
        account = self.runs.get(name)
        if account is None:
            if name == OTHER or len(self.runs) >= RUNS_MAX:
                return self.other
            account = self.runs[name] = RunAccount(name)
        return account

    def of(self, action: Action) -> ClassAccount:
        key = (action.run, action.task, action.kind, action.key)
        account = self._by_key.get(key)
        if account is None:
            account = self._find(action)
            if account.with_task or (not action.task and account.name != OTHER):
                self._by_key[key] = account
        return account

    def _find(self, action: Action) -> ClassAccount:
        run = self.run(action.run)
        if run is not self.other:
            named = [(class_name(action.task, action.kind, action.key), bool(action.task))]
            if action.task:
                named.append((class_name("*", action.kind, action.key), False))
            for name, with_task in named:
                account = self.classes.get((run.name, name))
                if account is not None:
                    return account
                if name != OTHER and self._has_room(run, with_task=with_task):
                    run.classes += 1
                    run.tasks += with_task
                    self._classes_named += 1
                    return self._open(run, name, with_task=with_task)
        return self.classes.get((run.name, OTHER)) or self._open(run, OTHER, with_task=False)

    def _has_room(self, run: RunAccount, *, with_task: bool) -> bool:
        if with_task and run.tasks >= RUN_TASKS_MAX:
            return False
        return run.classes < RUN_CLASSES_MAX and self._classes_named < CLASSES_MAX

    def _open(self, run: RunAccount, name: str, *, with_task: bool) -> ClassAccount:
        account = self.classes[run.name, name] = ClassAccount(run, name, with_task=with_task)
        return account

    def forget(self, slice_number: int) -> None:
        """What is no longer of the hour; and where there is little room left, whoever has nothing in it."""
        for run in self.all_runs():
            run.hour.forget(slice_number)
        for account in self.classes.values():
            account.hour.forget(slice_number)
        if 2 * self._classes_named > CLASSES_MAX or 2 * len(self.runs) > RUNS_MAX:
            self._make_room()

    def drop(self, name: str) -> None:
        """The run has ended: whoever comes under its name begins at zero."""
        self.runs.pop(name, None)
        self.classes = {key: account for key, account in self.classes.items() if account.run.name != name}
        self._count_again()

    def _make_room(self) -> None:
        self.classes = {key: account for key, account in self.classes.items() if account.live or account.hour.all.count}
        self.runs = {
            name: run
            for name, run in self.runs.items()
            if run.waiting or run.running or run.sandboxes or run.hour.all.count
        }
        self._count_again()

    def _count_again(self) -> None:
        self._by_key = {
            key: account
            for key, account in self._by_key.items()
            if self.classes.get((account.run.name, account.name)) is account
        }
        self._classes_named = 0
        for run in self.all_runs():
            run.classes = run.tasks = 0
        for account in self.classes.values():
            if account.name != OTHER:
                self._classes_named += 1
                account.run.classes += 1
                account.run.tasks += account.with_task


def class_name(*words: str) -> str:
    """`task/kind/key`, without what is empty."""
    return "/".join([word for word in words if word])
