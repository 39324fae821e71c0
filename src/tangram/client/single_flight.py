"""Single flight: concurrent calls with the same key share one run.

Owns which caller waits for which run. Each caller has its own deadline and cancellation, which do not affect the
others. Promises that a run is cancelled only after its last caller has left, that a key has at most one run, and that
a caller whose key has a stopping run waits for its end and starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from tangram.client.transport import Pending
from tangram.core.action import Outcome, Status
from tangram.errors import AdmissionRefused, InvalidInput, TangramError
from tangram.runtime.orchestrator import SettledAction

StartCall = Callable[[], Pending]


class _InFlightCall:
    """A run of a key, and the number of its waiters."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.waiters = 0
        self.is_stopping = False


class SingleFlight:
    def __init__(self) -> None:
        self._calls: dict[bytes, _InFlightCall] = {}
        """Runs in flight by key."""

    async def run(self, key: bytes, start: StartCall, action: str, deadline_s: float | None) -> SettledAction:
        """Returns the result of the run of this key; `start` starts one if there is none. `deadline_s` counts from now
        and applies to this caller only; `action` is its name. Raises what `start` raises."""
        loop = asyncio.get_running_loop()
        deadline = None if deadline_s is None else loop.time() + deadline_s
        while True:
            call = self._calls.get(key)
            is_starter = call is None
            if call is None:
                call = self._start(key, start())
            try:
                if call.is_stopping:
                    settled = await _wait_stopped(call, deadline)
                    if settled is None:
                        return _timed_out(action, deadline_s)
                    if settled.outcome.status is Status.SUCCEEDED:
                        return settled  # it ended before it could be stopped
                else:
                    settled = await self._join(call, deadline)
                    if settled is None or (call.is_stopping and settled.outcome.status is Status.CANCELLED):
                        return _timed_out(action, deadline_s, settled)
                    if is_starter or settled.outcome.status is not Status.REFUSED:
                        return settled
            except AdmissionRefused:
                if is_starter:
                    raise
            # The run was stopped, or refused, which concerns the action of another caller. Its callback, which would
            # forget it, may come later than this.
            self._forget(key, call)

    def _start(self, key: bytes, pending: Pending) -> _InFlightCall:
        call = self._calls[key] = _InFlightCall(pending)
        pending.add_done_callback(lambda: self._forget(key, call))
        return call

    def _forget(self, key: bytes, call: _InFlightCall) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]

    async def _join(self, call: _InFlightCall, deadline: float | None) -> SettledAction | None:
        """Returns None if the deadline has passed and others still wait. The last waiter stops the run, and returns
        when it has settled."""
        call.waiters += 1
        try:
            async with asyncio.timeout_at(deadline) as scope:
                return await call.pending.settled_shielded()
        except asyncio.CancelledError:
            if call.waiters == 1:
                with contextlib.suppress(TangramError):  # a failure of the run does not undo the cancellation
                    await _stop(call)
            raise
        except TimeoutError:
            if not scope.expired():
                raise
            return await _stop(call) if call.waiters == 1 else None
        finally:
            call.waiters -= 1


async def _stop(call: _InFlightCall) -> SettledAction | None:
    """Returns None if the action turned out to be invalid or was refused, which no caller waits for any more."""
    call.is_stopping = True
    call.pending.cancel()
    try:
        return await call.pending.settled()
    except (AdmissionRefused, InvalidInput):
        return None


async def _wait_stopped(call: _InFlightCall, deadline: float | None) -> SettledAction | None:
    """Waits until a run that is being stopped has settled. Returns None if the deadline passes first."""
    try:
        async with asyncio.timeout_at(deadline) as scope:
            return await call.pending.settled_shielded()
    except TimeoutError:
        if scope.expired():
            return None
        raise


def _timed_out(action: str, deadline_s: float | None, settled: SettledAction | None = None) -> SettledAction:
    """The result of a caller whose deadline has passed; with the output of the run if it was the last waiter."""
    assert deadline_s is not None
    why = f"deadline of {deadline_s:g} s passed"
    if settled is None:
        return SettledAction(outcome=Outcome(action=action, status=Status.TIMED_OUT, reason=why, waiting_s=deadline_s))
    outcome = msgspec.structs.replace(settled.outcome, status=Status.TIMED_OUT, reason=why)
    return msgspec.structs.replace(settled, outcome=outcome)
