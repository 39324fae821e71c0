"""View builders: the live view of the dashboard and of `tangram status`, built from scheduler and observer on request.

The timeline and the stories, the other data of the dashboard, come from `StateObserver` (state_observer.py).

Decides what a caller may see; changes nothing. A run sees all other runs as one, named HIDDEN, with the units that they
hold; their actions, sandboxes, classes and rows are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest, nsmallest
from itertools import islice, takewhile
from typing import Protocol

import msgspec

from tangram.core.lanes import Entry, Lane, Run
from tangram.core.queue import ELDER_FACTOR
from tangram.core.scheduler import Scheduler
from tangram.managers.functions.manager import FunctionInstanceView
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.runtime.views import (
    HIDDEN_NAME,
    RUNNING_SHOWN_MAX,
    SANDBOXES_SHOWN_MAX,
    WAITING_SHOWN_MAX,
    ClassView,
    RunningView,
    RunView,
    SandboxView,
    ServiceView,
    View,
    WaitingView,
)
from tangram.server.observe.accounts import Accounts, ClassAccount, RunAccount
from tangram.server.observe.action_tracker import ActionTracker
from tangram.server.observe.buckets import Buckets
from tangram.server.observe.pool_views import LoadedServices, RunShares, pool_views
from tangram.server.observe.sandbox_stats import SandboxStats, TrackedSandbox
from tangram.server.observe.time_breakdown import OTHER

CLASSES_SHOWN_MAX = 50


class ObservedState(Protocol):
    """The state that views show: the part of the state observer that they read."""

    scheduler: Scheduler
    accounts: Accounts
    buckets: Buckets
    sandboxes: SandboxStats
    tracker: ActionTracker
    instances: Callable[[], Sequence[FunctionInstanceView]]
    loaded: dict[str, LoadedServices]

    def now(self) -> float: ...

    def service(self) -> ServiceView: ...


def build_view(observed: ObservedState, run: str | None, now: float, at: float) -> View:
    """`run`: the tenant that the view is for; None for an admin, who sees all runs. `at`: the same moment as `now`, in
    wall-clock time."""
    scheduler, accounts = observed.scheduler, observed.accounts
    waiting_total = scheduler.waiting_count(run)
    running = scheduler.holding_entries(run)
    sandboxes = [
        sandbox for sandbox in reversed(observed.sandboxes.by_name.values()) if run is None or sandbox.run == run
    ]
    # A run without an account is counted among others, whose numbers it must not see.
    account = None if run is None else accounts.runs.get(run, RunAccount(run))
    return View(
        now_s=now,
        at=at,
        service=observed.service(),
        pools=pool_views(scheduler, observed.tracker, observed.loaded, run, now),
        runs=_run_views(observed, run, running),
        classes=_class_views(observed, account),
        waiting=_waiting_views(observed, run),
        waiting_total=waiting_total,
        running=tuple([_running_view(observed, entry) for entry in running[:RUNNING_SHOWN_MAX]]),
        running_total=len(running),
        sandboxes=_sandbox_views(observed, sandboxes[:SANDBOXES_SHOWN_MAX], now),
        sandboxes_total=len(sandboxes),
        history=observed.buckets.history(account),
    )


def _sandbox_views(observed: ObservedState, sandboxes: list[TrackedSandbox], now: float) -> tuple[SandboxView, ...]:
    instance_by_name = {instance.sandbox: instance for instance in observed.instances()}
    return tuple(
        [_sandbox_view(observed.scheduler, sandbox, instance_by_name.get(sandbox.name), now) for sandbox in sandboxes]
    )


def _sandbox_view(
    scheduler: Scheduler, sandbox: TrackedSandbox, instance: FunctionInstanceView | None, now: float
) -> SandboxView:
    """The observer sees no actions of an instance: its calls name no sandbox."""
    state = scheduler.sandboxes.by_id.get(sandbox.name)
    view = SandboxView(
        name=sandbox.name,
        run=sandbox.run,
        node=sandbox.node,
        memory_mib=state.memory if state is not None else 0,
        opened_s=sandbox.opened_at,
        active=sandbox.active_actions,
        actions=sandbox.actions,
        last_used_s=sandbox.last_used_at,
    )
    if instance is None:
        return view
    return msgspec.structs.replace(
        view,
        function=instance.function,
        active=int(instance.idle_s is None),
        actions=instance.calls,
        last_used_s=now - (instance.idle_s or 0.0),
    )


# ---- runs and classes -----------------------------------------------------------------------------------------


def _run_views(observed: ObservedState, run: str | None, running: list[Entry]) -> tuple[RunView, ...]:
    scheduler = observed.scheduler
    runs, accounts = scheduler.queue.runs, observed.accounts
    shares = RunShares(scheduler.ledger, observed.now())
    if run is None:
        named = [name for name in accounts.runs if name in runs]
        shown = [run_view(shares, accounts.runs[name], [runs[name]]) for name in named]
        unnamed = run_view(
            shares, accounts.other, [other_run for name, other_run in runs.items() if name not in accounts.runs]
        )
        return tuple(shown) if _is_empty(unnamed) else (*shown, unnamed)
    own = accounts.runs.get(run)
    if own is None:
        own = RunAccount(run)
        own.running = len(running)
        own.sandboxes = sum(sandbox.run == run for sandbox in observed.sandboxes.by_name.values())
    others = RunAccount(HIDDEN_NAME)
    for other in accounts.all_runs():
        others.running += other.running
        others.sandboxes += other.sandboxes
    others.running -= own.running
    others.sandboxes -= own.sandboxes
    other_runs = [other_run for name, other_run in runs.items() if name != run]
    own_view = run_view(shares, own, [runs[run]] if run in runs else [])
    return (own_view, run_view(shares, others, other_runs)) if other_runs else (own_view,)


def _is_empty(run: RunView) -> bool:
    """True after a run without an account was revoked."""
    return not (run.waiting or run.running or run.sandboxes or run.share or any(run.settled.values()))


def run_view(shares: RunShares, account: RunAccount, runs: list[Run]) -> RunView:
    """The view of the runs that one account counts."""
    return RunView(
        name=account.name,
        weight=sum(run.usage.weight for run in runs),
        share=shares.dominant_share(run.usage for run in runs),
        waiting=sum(run.waiting for run in runs),
        running=account.running,
        sandboxes=account.sandboxes,
        settled=dict(account.settled),
        act=account.hour.total.percentiles(),
        time_breakdown=account.time_breakdown.view(),
    )


def _class_views(observed: ObservedState, run: RunAccount | None) -> tuple[ClassView, ...]:
    """An admin sees classes of the same name of several runs as one."""
    accounts = [account for account in observed.accounts.classes.values() if account.hour.total.count]
    if run is not None:
        accounts = [account for account in accounts if account.run is run]
    by_name: dict[str, list[ClassAccount]] = {}
    for account in accounts:
        by_name.setdefault(account.name, []).append(account)
    shown = nlargest(
        CLASSES_SHOWN_MAX, by_name.items(), key=lambda item: sum(account.hour.total.total_s for account in item[1])
    )
    return tuple([_class_view(name, accounts) for name, accounts in shown])


def _class_view(name: str, accounts: list[ClassAccount]) -> ClassView:
    latencies = accounts[0].hour.total
    if len(accounts) > 1:
        latencies = LatencyHistogram()
        for account in accounts:
            latencies.merge(account.hour.total)
    return ClassView(
        name=name,
        act=latencies.percentiles(),
        waiting_s=latencies.waiting_s / latencies.count,
        execution_s=latencies.execution_s / latencies.count,
        overhead_s=latencies.overhead_s / latencies.count,
    )


# ---- waiting and running actions ------------------------------------------------------------------------------


def _running_view(observed: ObservedState, entry: Entry) -> RunningView:
    action = entry.action
    tracked = observed.tracker.by_id.get(action.id)
    return RunningView(
        id=action.id,
        run=action.run,
        trajectory=action.trajectory,
        name=tracked.account.name if tracked is not None else OTHER,
        state=entry.state.value,
        submitted_s=entry.submitted_at,
        started_s=entry.granted_at,
        node=entry.grant.node if entry.grant is not None else "",
        units={holding.pool.name: holding.units for holding in entry.holdings},
    )


def _waiting_views(observed: ObservedState, run: str | None) -> tuple[WaitingView, ...]:
    """All actions behind the second of a lane wait for the same reason: the first two are explained, the others like
    the second."""
    scheduler = observed.scheduler
    hidden = foreign_ids(scheduler, run)
    explanations_by_lane: dict[int, list[str]] = {}
    views = []
    for entry in queue_front(scheduler, run, WAITING_SHOWN_MAX):
        explanations = explanations_by_lane.setdefault(id(entry.lane), [])
        if len(explanations) < 2:
            explanations.append(explain_for(scheduler, entry, hidden).removeprefix(entry.id))
        views.append(_waiting_view(observed, entry, entry.id + explanations[-1]))
    return tuple(views)


def _waiting_view(observed: ObservedState, entry: Entry, reason: str) -> WaitingView:
    action = entry.action
    tracked = observed.tracker.by_id.get(action.id)
    return WaitingView(
        id=action.id,
        run=action.run,
        trajectory=action.trajectory,
        name=tracked.account.name if tracked is not None else OTHER,
        since_s=entry.submitted_at,
        reason=reason,
    )


def queue_front(scheduler: Scheduler, run: str | None, most: int) -> list[Entry]:
    """The first waiting actions in the order that `core/queue.py` defines. `run`: only its actions; None for all."""
    queue, now = scheduler.queue, scheduler.now
    waiting_runs = [candidate for name, candidate in queue.runs.items() if candidate.waiting and run in (None, name)]
    elder_since, aged_since = now - ELDER_FACTOR * queue.ageing_s, now - queue.ageing_s
    elders = nsmallest(
        most, [entry for waiting_run in waiting_runs for entry in _elders(waiting_run, elder_since, most)]
    )
    entry_by_seq = {entry.seq: entry for entry in elders}
    for waiting_run in sorted(waiting_runs, key=lambda candidate: (candidate.usage.standing(now), candidate.served)):
        if len(entry_by_seq) >= most:
            break
        first = [entry for lane in waiting_run.lanes.values() if lane.waiting for entry in _lane_front(lane, most)]
        ranked = sorted([(_rank(entry, aged_since), entry) for entry in first])
        entry_by_seq.update({entry.seq: entry for _, entry in ranked if entry.seq not in entry_by_seq})
    return list(entry_by_seq.values())[:most]


def _elders(run: Run, since: float, most: int) -> Iterator[Entry]:
    for lane in run.lanes.values():
        waiting = (entry for entry in lane.fifo if entry.lane is lane)
        yield from takewhile(lambda entry: entry.submitted_at <= since, islice(waiting, most))


def _rank(entry: Entry, aged_since: float) -> tuple[float, ...]:
    if entry.submitted_at <= aged_since:
        return (0, entry.seq)
    return (1, -entry.action.priority, entry.key, entry.seq)


def _lane_front(lane: Lane, most: int) -> list[Entry]:
    """The first of a lane: the oldest, which include all aged ones, and the first in the policy's order."""
    if lane.waiting <= most:
        return [entry for entry in lane.fifo if entry.lane is lane]
    oldest = islice((entry for entry in lane.fifo if entry.lane is lane), most)
    first = nsmallest(most, [slot for slot in lane.heap if slot[-1].lane is lane])
    return [*oldest, *(entry for *_, entry in first)]


def foreign_ids(scheduler: Scheduler, run: str | None) -> list[str]:
    """Ids of other runs that an explanation may contain, because their actions closed a pool. Longest first, since one
    id may be a prefix of another."""
    if run is None or not scheduler.queue.closures:
        return []
    queue = scheduler.queue
    closed = [waiters for pool in scheduler.ledger.pools.values() for waiters in
              (queue.pool_waiters(pool), queue.unplaced_waiters(pool))]  # fmt: skip
    ids = {entry.id: None for waiters in closed for name, entry in waiters.blockers.items() if name != run}
    return sorted(ids, key=lambda id: (-len(id), id))


def explain_for(scheduler: Scheduler, entry: Entry, hidden: list[str]) -> str:
    """The explanation of an action, without ids that the caller must not see."""
    sentence = scheduler.explain(entry.id).removeprefix(entry.id)
    for id in hidden:
        sentence = sentence.replace(f"behind {id}, which", f"behind {HIDDEN_NAME}, which")
    return entry.id + sentence
