"""Sharing: callers who ask for the same thing at the same time get it from one run.

Owns who waits for which run. Each of them keeps its own deadline and may be cancelled for itself: neither is the matter
of the others. Promises that a run is cancelled only when nobody is left who wants it, that there are never two runs of
one key at a time, and that who finds one that is being stopped waits until that is over and gets another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from tangram.client.transport import Pending
from tangram.core.action import Outcome, Status
from tangram.errors import AdmissionRefused, InvalidInput
from tangram.runtime.orchestrator import Settled

Begin = Callable[[], Pending]


class _Run:
    """One run, and how many wait for it."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.waiting = 0
        self.stopping = False


class Sharing:
    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}
        """Those under way, by key."""

    async def share(self, key: bytes, begin: Begin, action: str, deadline_s: float | None) -> Settled:
        """What came of the run of this key, which is begun if there is none. `deadline_s` is that of this caller, from
        now on, whose name is `action`. Raises what `begin` raises."""
        loop = asyncio.get_running_loop()
        late_at = None if deadline_s is None else loop.time() + deadline_s
        while True:
            run, mine = self._runs.get(key), False
            if run is None:
                run, mine = self._begun(key, begin()), True
            if run.stopping:
                passed = await _passed(run, late_at)
                if passed is None:
                    return _late(action, deadline_s)
                if passed.outcome.status is Status.SUCCEEDED:
                    return passed  # it came to its end before it could be stopped
                self._forget(key, run)
                continue
            settled = await self._join(run, late_at)
            if settled is None or (run.stopping and settled.outcome.status is Status.CANCELLED):
                return _late(action, deadline_s, settled)
            if mine or settled.outcome.status is not Status.REFUSED:
                return settled
            self._forget(key, run)  # it was another caller who did not get in

    def _begun(self, key: bytes, pending: Pending) -> _Run:
        run = self._runs[key] = _Run(pending)
        pending.when_settled(lambda: self._forget(key, run))
        return run

    def _forget(self, key: bytes, run: _Run) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]

    async def _join(self, run: _Run, late_at: float | None) -> Settled | None:
        """None: the deadline has passed, and others still wait. Who is the last to go stops the run, and goes when
        nothing of it is left."""
        run.waiting += 1
        try:
            async with asyncio.timeout_at(late_at) as scope:
                return await run.pending.watched()
        except asyncio.CancelledError:
            if run.waiting == 1:
                await _stopped(run)
            raise
        except TimeoutError:
            if not scope.expired():
                raise
            return await _stopped(run) if run.waiting == 1 else None
        finally:
            run.waiting -= 1


async def _stopped(run: _Run) -> Settled | None:
    """None: it was found to be impossible meanwhile, which nobody asks any more."""
    run.stopping = True
    run.pending.cancel()
    try:
        return await run.pending.settled()
    except (AdmissionRefused, InvalidInput):
        return None


async def _passed(run: _Run, late_at: float | None) -> Settled | None:
    """Until a run that is being stopped has settled. None: the deadline was sooner."""
    try:
        async with asyncio.timeout_at(late_at) as scope:
            return await run.pending.watched()
    except TimeoutError:
        if scope.expired():
            return None
        raise


def _late(action: str, deadline_s: float | None, settled: Settled | None = None) -> Settled:
    """What a caller gets whose deadline has passed: with what its run wrote, if it was the last to wait for that."""
    assert deadline_s is not None
    why = f"deadline of {deadline_s:g} s passed"
    if settled is None:
        return Settled(outcome=Outcome(action=action, status=Status.TIMED_OUT, reason=why, waiting_s=deadline_s))
    outcome = msgspec.structs.replace(settled.outcome, status=Status.TIMED_OUT, reason=why)
    return msgspec.structs.replace(settled, outcome=outcome)
