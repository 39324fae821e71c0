"""Buckets: the stretches of BUCKET_S into which the history is cut.

Owns the one that is being filled and when it ends. What settles is first counted with its class, and goes from there to
its run and to all when somebody looks or the bucket ends: so that what happens for every action is little.
"""

from __future__ import annotations

from tangram.core.ledger import PoolState
from tangram.runtime.views import BUCKET_S, BUCKETS_MAX, Bucket
from tangram.server.observe.accounts import Accounts, ClassAccount, RunAccount
from tangram.server.observe.history import SLICE_S, Busy, Series, Tally

BUCKETS_PER_SLICE = round(SLICE_S / BUCKET_S)

EMPTY = Series()


class Buckets:
    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.levels = Busy()
        self.end_s = BUCKET_S
        """Of the one that is being filled."""
        self._number = 0
        self._tally = Tally()
        self._series = Series()
        """Of all runs together."""
        self._busy: dict[int, dict[str, float]] = {}
        """Per bucket, the oldest first."""
        self._touched: list[ClassAccount] = []
        """Classes in which something settled that their runs have not heard of."""

    def settled(self, account: ClassAccount, waiting_s: float, execution_s: float, overhead_s: float) -> None:
        if not account.tally.count:
            self._touched.append(account)
        account.add(waiting_s, execution_s, overhead_s)

    def fold(self) -> None:
        """Tell runs and hours what has settled."""
        number = self._number // BUCKETS_PER_SLICE
        for account in self._touched:
            tally, account.tally = account.tally, Tally()
            account.hour.add(tally, number)
            account.run.hour.add(tally, number)
            account.run.tally.merge(tally)
            self._tally.merge(tally)
        self._touched.clear()

    def close(self, now: float, pools: dict[str, PoolState]) -> None:
        """End those that are over by now. Waiting and running actions are counted as they were before the event that
        came first after them."""
        self.fold()
        slice_before = self._number // BUCKETS_PER_SLICE
        last = int(now // BUCKET_S)
        self._end_one()
        if last - self._number > BUCKETS_MAX:
            # Nothing happened for longer than is remembered.
            self.levels.close(self._number * BUCKET_S, (last - BUCKETS_MAX) * BUCKET_S)
            self._number = last - BUCKETS_MAX
        while self._number < last:
            self._end_one()
        self.end_s = (self._number + 1) * BUCKET_S
        self.levels.renew(pools, now)
        number = self._number // BUCKETS_PER_SLICE
        if number != slice_before:
            self._accounts.forget(number)

    def _end_one(self) -> None:
        number = self._number
        self._busy[number] = self.levels.close(number * BUCKET_S, (number + 1) * BUCKET_S)
        if len(self._busy) > BUCKETS_MAX:
            del self._busy[next(iter(self._busy))]
        waiting = running = 0
        for run in self._accounts.all_runs():
            waiting += run.waiting
            running += run.running
            if run.tally.count or run.waiting or run.running:
                if run.series is None:
                    run.series = Series()
                run.series.put(number, run.tally, run.waiting, run.running)
                run.tally = Tally()
        self._series.put(number, self._tally, waiting, running)
        self._tally = Tally()
        self._number = number + 1

    def history(self, account: RunAccount | None) -> tuple[Bucket, ...]:
        """Of one run, or of all, the oldest first. How busy the pools were is the same for everybody."""
        series = self._series if account is None else account.series or EMPTY
        first = self._number - BUCKETS_MAX
        return tuple([series.bucket(number, busy) for number, busy in self._busy.items() if number >= first])
