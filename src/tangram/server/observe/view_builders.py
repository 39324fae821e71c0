"""Panes: the parts of a View, each made of the scheduler and the picture at the moment somebody looks.

Owns what a caller may see. Reads, and changes nothing. Of other runs than its own a caller sees that they hold units,
and all of them together as one run named HIDDEN; their actions, sandboxes, classes and rows are not there at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest, nsmallest
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import msgspec

from tangram.core.explain import explain
from tangram.core.lanes import Entry, Lane, Run
from tangram.core.queue import ELDER_FACTOR
from tangram.core.scheduler import Scheduler
from tangram.managers.functions.boxed import Instance
from tangram.runtime.views import (
    HIDDEN,
    RUNNING_SHOWN_MAX,
    SANDBOXES_SHOWN_MAX,
    WAITING_SHOWN_MAX,
    ClassView,
    RunningView,
    RunView,
    SandboxView,
    View,
    WaitingView,
)
from tangram.server.observe.accounts import ClassAccount, RunAccount
from tangram.server.observe.pools import pool_views
from tangram.server.observe.sandbox_stats import Box
from tangram.server.observe.shares import Shares
from tangram.server.observe.time_breakdown import OTHER

if TYPE_CHECKING:
    from tangram.server.observe.observer import Picture

CLASSES_SHOWN_MAX = 50


def view(picture: Picture, run: str | None, now: float, at: float) -> View:
    scheduler, accounts = picture.scheduler, picture.accounts
    known = scheduler.queue.runs.get(run) if run is not None else None
    waiting_total = scheduler.queue.waiting if run is None else known.waiting if known is not None else 0
    running = [entry for entry in scheduler.grants.holding.values() if run is None or entry.action.run == run]
    boxes = [box for box in reversed(picture.boxes.by_name.values()) if run is None or box.run == run]
    # Whoever has no account of its own is counted with others, whom it may not see.
    account = None if run is None else accounts.runs.get(run, RunAccount(run))
    return View(
        now_s=now,
        at=at,
        service=picture.service(),
        pools=pool_views(picture, run, now),
        runs=_runs(picture, run, running),
        classes=_classes(picture, account),
        waiting=_waiting(picture, run),
        waiting_total=waiting_total,
        running=tuple([_running(picture, entry) for entry in running[:RUNNING_SHOWN_MAX]]),
        running_total=len(running),
        sandboxes=_sandboxes(picture, boxes[:SANDBOXES_SHOWN_MAX], now),
        sandboxes_total=len(boxes),
        history=picture.buckets.history(account),
    )


def _sandboxes(picture: Picture, boxes: list[Box], now: float) -> tuple[SandboxView, ...]:
    instance_by_name = {instance.sandbox: instance for instance in picture.instances()}
    return tuple([_sandbox(picture.scheduler, box, instance_by_name.get(box.name), now) for box in boxes])


def _sandbox(scheduler: Scheduler, box: Box, instance: Instance | None, now: float) -> SandboxView:
    """Of an instance the picture has seen no actions: its calls are those of no sandbox."""
    place = scheduler.places.by_sandbox.get(box.name)
    view = SandboxView(
        name=box.name,
        run=box.run,
        node=box.node,
        memory_mib=place.memory if place is not None else 0,
        opened_s=box.opened_s,
        active=box.active,
        actions=box.actions,
        last_used_s=box.last_used_s,
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


def _runs(picture: Picture, run: str | None, running: list[Entry]) -> tuple[RunView, ...]:
    scheduler = picture.scheduler
    runs, accounts = scheduler.queue.runs, picture.accounts
    shares = Shares(scheduler.ledger, picture.now())
    if run is None:
        named = [name for name in accounts.runs if name in runs]
        shown = [run_view(shares, accounts.runs[name], [runs[name]]) for name in named]
        unnamed = run_view(shares, accounts.other, [one for name, one in runs.items() if name not in accounts.runs])
        return tuple(shown) if _is_empty(unnamed) else (*shown, unnamed)
    own = accounts.runs.get(run)
    if own is None:
        own = RunAccount(run)
        own.running = len(running)
        own.sandboxes = sum(box.run == run for box in picture.boxes.by_name.values())
    others = RunAccount(HIDDEN)
    for other in accounts.all_runs():
        others.running += other.running
        others.sandboxes += other.sandboxes
    others.running -= own.running
    others.sandboxes -= own.sandboxes
    rest = [one for name, one in runs.items() if name != run]
    mine = run_view(shares, own, [runs[run]] if run in runs else [])
    return (mine, run_view(shares, others, rest)) if rest else (mine,)


def _is_empty(run: RunView) -> bool:
    """As after a run was revoked that is not counted by name any more."""
    return not (run.waiting or run.running or run.sandboxes or run.share or any(run.settled.values()))


def run_view(shares: Shares, account: RunAccount, runs: list[Run]) -> RunView:
    """Of the runs that an account counts."""
    return RunView(
        name=account.name,
        weight=sum(run.usage.weight for run in runs),
        share=shares.of(run.usage for run in runs),
        waiting=sum(run.waiting for run in runs),
        running=account.running,
        sandboxes=account.sandboxes,
        settled=dict(account.settled),
        act=account.hour.all.percentiles(),
        spending=account.spending.view(),
    )


def _classes(picture: Picture, run: RunAccount | None) -> tuple[ClassView, ...]:
    """Classes of one name of several runs are one class to the admin."""
    accounts = [one for one in picture.accounts.classes.values() if one.hour.all.count]
    if run is not None:
        accounts = [one for one in accounts if one.run is run]
    by_name: dict[str, list[ClassAccount]] = {}
    for account in accounts:
        by_name.setdefault(account.name, []).append(account)
    shown = nlargest(
        CLASSES_SHOWN_MAX, by_name.items(), key=lambda item: sum(account.hour.all.total_s for account in item[1])
    )
    return tuple([_class(name, some) for name, some in shown])


def _class(name: str, accounts: list[ClassAccount]) -> ClassView:
    tally = accounts[0].hour.all
    if len(accounts) > 1:
        tally = type(tally)()
        for account in accounts:
            tally.merge(account.hour.all)
    return ClassView(
        name=name,
        act=tally.percentiles(),
        waiting_s=tally.waiting_s / tally.count,
        execution_s=tally.execution_s / tally.count,
        overhead_s=tally.overhead_s / tally.count,
    )


# ---- what waits and what runs ---------------------------------------------------------------------------------


def _running(picture: Picture, entry: Entry) -> RunningView:
    action = entry.action
    life = picture.lives.by_id.get(action.id)
    return RunningView(
        id=action.id,
        run=action.run,
        trajectory=action.trajectory,
        name=life.account.name if life is not None else OTHER,
        state=entry.state.value,
        submitted_s=entry.submitted_at,
        started_s=entry.granted_at,
        node=entry.grant.node if entry.grant is not None else "",
        units={holding.pool.name: holding.units for holding in entry.holdings},
    )


def _waiting(picture: Picture, run: str | None) -> tuple[WaitingView, ...]:
    """What keeps the second of a lane keeps all behind it: the first two are explained, the others like the second."""
    scheduler = picture.scheduler
    hidden = foreign(scheduler, run)
    said: dict[int, list[str]] = {}
    found = []
    for entry in front(scheduler, run, WAITING_SHOWN_MAX):
        before = said.setdefault(id(entry.lane), [])
        if len(before) < 2:
            before.append(explained(scheduler, entry, hidden).removeprefix(entry.id))
        found.append(_waits(picture, entry, entry.id + before[-1]))
    return tuple(found)


def _waits(picture: Picture, entry: Entry, reason: str) -> WaitingView:
    action = entry.action
    life = picture.lives.by_id.get(action.id)
    return WaitingView(
        id=action.id,
        run=action.run,
        trajectory=action.trajectory,
        name=life.account.name if life is not None else OTHER,
        since_s=entry.submitted_at,
        reason=reason,
    )


def front(scheduler: Scheduler, run: str | None, most: int) -> list[Entry]:
    """The first of those that wait, in the order of the queue: elders by arrival, then the poorest run, and within it
    the aged by arrival, then by priority and the policy's key."""
    queue, now = scheduler.queue, scheduler.now
    runs = [one for name, one in queue.runs.items() if one.waiting and run in (None, name)]
    elder_since, aged_since = now - ELDER_FACTOR * queue.ageing_s, now - queue.ageing_s
    elders = nsmallest(most, [entry for one in runs for entry in _elders(one, elder_since, most)])
    found = {entry.seq: entry for entry in elders}
    for one in sorted(runs, key=lambda one: (one.usage.standing(now), one.served)):
        if len(found) >= most:
            break
        first = [entry for lane in one.lanes.values() if lane.waiting for entry in _first(lane, most)]
        ranked = sorted([(_rank(entry, aged_since), entry) for entry in first])
        found.update({entry.seq: entry for _, entry in ranked if entry.seq not in found})
    return list(found.values())[:most]


def _elders(run: Run, since: float, most: int) -> Iterator[Entry]:
    for lane in run.lanes.values():
        waiting = (entry for entry in lane.fifo if entry.lane is lane)
        yield from takewhile(lambda entry: entry.submitted_at <= since, islice(waiting, most))


def _rank(entry: Entry, aged_since: float) -> tuple[float, ...]:
    if entry.submitted_at <= aged_since:
        return (0, entry.seq)
    return (1, -entry.action.priority, entry.key, entry.seq)


def _first(lane: Lane, most: int) -> list[Entry]:
    """Of one lane: the oldest, among whom are those that have aged, and the first by the policy's order."""
    if lane.waiting <= most:
        return [entry for entry in lane.fifo if entry.lane is lane]
    oldest = islice((entry for entry in lane.fifo if entry.lane is lane), most)
    first = nsmallest(most, [item for item in lane.heap if item[3].lane is lane])
    return [*oldest, *[item[3] for item in first]]


def foreign(scheduler: Scheduler, run: str | None) -> list[str]:
    """Ids of other runs that may stand in an explanation: whoever has closed a pool. The longest first, since one may
    be the beginning of another."""
    if run is None or not scheduler.queue.closures:
        return []
    queue = scheduler.queue
    closed = [waiters for pool in scheduler.ledger.pools.values() for waiters in
              (queue.of_pool(pool), queue.of_newcomers(pool))]  # fmt: skip
    ids = {entry.id: None for waiters in closed for name, entry in waiters.blockers.items() if name != run}
    return sorted(ids, key=lambda id: (-len(id), id))


def explained(scheduler: Scheduler, entry: Entry, hidden: list[str]) -> str:
    """Why it waits, or what it does, without the ids that are not the caller's to see."""
    sentence = explain(scheduler, entry).removeprefix(entry.id)
    for id in hidden:
        sentence = sentence.replace(f"behind {id}, which", f"behind {HIDDEN}, which")
    return entry.id + sentence
