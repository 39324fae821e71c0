"""Buckets: the intervals of BUCKET_S that make up the history.

Owns the current bucket. A settled action first counts in its class only; `fold` adds classes to runs and totals when a
view is built or the bucket ends, so that each action costs little.
"""

from __future__ import annotations

from tangram.core.ledger import PoolState
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.runtime.views import BUCKET_S, BUCKETS_MAX, HistoryBucket
from tangram.server.observe.accounts import Accounts, ClassAccount, RunAccount
from tangram.server.observe.history import SLICE_S, PoolUtilization, Series

BUCKETS_PER_SLICE = round(SLICE_S / BUCKET_S)

EMPTY_SERIES = Series()


class Buckets:
    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.utilization = PoolUtilization()
        self.end_s = BUCKET_S
        self._number = 0
        self._latencies = LatencyHistogram()
        self._series = Series()
        """All runs together."""
        self._utilization_by_bucket: dict[int, dict[str, float]] = {}
        """By bucket, oldest first."""
        self._unfolded_classes: list[ClassAccount] = []
        """Classes with settled actions that `fold` has yet to add."""

    def on_settled(self, account: ClassAccount, waiting_s: float, execution_s: float, overhead_s: float) -> None:
        if not account.latencies.count:
            self._unfolded_classes.append(account)
        account.add(waiting_s, execution_s, overhead_s)

    def fold(self) -> None:
        """Adds settled actions to runs and totals."""
        number = self._number // BUCKETS_PER_SLICE
        for account in self._unfolded_classes:
            latencies, account.latencies = account.latencies, LatencyHistogram()
            account.hour.add(latencies, number)
            account.run.hour.add(latencies, number)
            account.run.latencies.merge(latencies)
            self._latencies.merge(latencies)
        self._unfolded_classes.clear()

    def close(self, now: float, pools: dict[str, PoolState]) -> None:
        """Closes buckets that have ended. Waiting and running actions count as before the first event after the end."""
        self.fold()
        slice_before = self._number // BUCKETS_PER_SLICE
        last = int(now // BUCKET_S)
        self._close_one()
        if last - self._number > BUCKETS_MAX:
            # The pause is longer than the history.
            self.utilization.close(self._number * BUCKET_S, (last - BUCKETS_MAX) * BUCKET_S)
            self._number = last - BUCKETS_MAX
        while self._number < last:
            self._close_one()
        self.end_s = (self._number + 1) * BUCKET_S
        self.utilization.reset_pools(pools, now)
        number = self._number // BUCKETS_PER_SLICE
        if number != slice_before:
            self._accounts.forget(number)

    def _close_one(self) -> None:
        number = self._number
        self._utilization_by_bucket[number] = self.utilization.close(number * BUCKET_S, (number + 1) * BUCKET_S)
        if len(self._utilization_by_bucket) > BUCKETS_MAX:
            del self._utilization_by_bucket[next(iter(self._utilization_by_bucket))]
        waiting = running = 0
        for run in self._accounts.all_runs():
            waiting += run.waiting
            running += run.running
            if run.latencies.count or run.waiting or run.running:
                if run.series is None:
                    run.series = Series()
                run.series.put(number, run.latencies, run.waiting, run.running)
                run.latencies = LatencyHistogram()
        self._series.put(number, self._latencies, waiting, running)
        self._latencies = LatencyHistogram()
        self._number = number + 1

    def history(self, account: RunAccount | None) -> tuple[HistoryBucket, ...]:
        """Returns the history of a run, or of all, oldest first. The utilization of pools is the same for all."""
        series = self._series if account is None else account.series or EMPTY_SERIES
        first = self._number - BUCKETS_MAX
        return tuple(
            [series.bucket(number, busy) for number, busy in self._utilization_by_bucket.items() if number >= first]
        )
