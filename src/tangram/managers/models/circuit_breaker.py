"""The circuit breaker: a service that keeps failing gets no calls for a while.

Owns the count of consecutive failures. Without it, a service whose engine always crashes would cost every caller a
restore and evict other services without any use. After FAILURES_MAX failures the circuit opens: calls are refused until
a pause has passed, then one trial call is admitted (half-open).

The retries of one action count as one failure, and so does a batch. Crashes, hangs and failed loads always count. A
call that raises counts only until a call of the service has succeeded: afterwards the cause is more likely a payload,
and the payloads of one caller must not close the service for others. Then FAILURES_MAX such actions in a row reload the
service.
"""

from __future__ import annotations

from collections.abc import Sequence

from tangram.errors import AdmissionRefused

FAILURES_MAX = 3
PAUSE_S = 30.0
"""Longer than a restore, shorter than a step of training."""

Devices = tuple[int, ...]


class CircuitBreaker:
    def __init__(self, service: str, pause_s: float = PAUSE_S) -> None:
        self._service = service
        self._pause_s = pause_s
        self._failures = 0
        self._failed_actions: set[str] = set()
        """Actions in these failures."""
        self._reason = ""
        self._open_until = 0.0
        self._is_half_open = False
        self._has_succeeded = False
        """Whether a call has succeeded."""
        self._working_devices: set[Devices] = set()
        """Devices on which a call has succeeded since the service was loaded there."""
        self._errors_by_devices: dict[Devices, set[str]] = {}
        """Actions whose calls raised there, in a row."""

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES_MAX

    def admit(self, now: float) -> None:
        """Admit a use of the service. Raises AdmissionRefused. Afterwards the caller reports the results of the calls,
        and finally calls `end_trial`."""
        if not self.is_open:
            return
        left_s = self._open_until - now
        if left_s > 0.0 or self._is_half_open:
            retry_text = f"it is tried again in {left_s:.1f} s" if left_s > 0.0 else "a trial call is under way"
            raise AdmissionRefused(
                "circuit",
                f"service {self._service} failed {self._failures} times in a row; {retry_text}; last: {self._reason}",
            )
        self._is_half_open = True

    def on_loaded(self, devices: Devices) -> None:
        """Forget the state of the service on these devices."""
        self._working_devices.discard(devices)
        self._errors_by_devices.pop(devices, None)

    def record_success(self, devices: Devices) -> None:
        self._has_succeeded = True
        self._working_devices.add(devices)
        self._errors_by_devices.pop(devices, None)
        self._close()

    def record_rejection(self) -> None:
        """Record a rejected payload: the engine works."""
        self._close()

    def record_failure(self, reason: str, now: float, actions: Sequence[str] = ()) -> None:
        """Record a failed load or a lost process. `actions`: the affected actions, if any."""
        self._reason = reason
        self._open_until = now + self._pause_s
        self._is_half_open = False
        if self._failed_actions.isdisjoint(actions):
            self._failures += 1
            self._failed_actions.update(actions)

    def record_error(self, reason: str, now: float, devices: Devices, actions: Sequence[str]) -> bool:
        """Record a call that raised. Returns True if the service must be reloaded before its next call."""
        if not self._has_succeeded:
            self.record_failure(reason, now, actions)
            return False
        raised = self._errors_by_devices.setdefault(devices, set())
        if len(raised) < FAILURES_MAX:
            raised.update(actions[:1])  # a batch counts once
        return devices in self._working_devices and len(raised) >= FAILURES_MAX

    def end_trial(self) -> None:
        """End the admitted use, with or without a result."""
        self._is_half_open = False

    def _close(self) -> None:
        self._failures, self._reason, self._is_half_open = 0, "", False
        self._failed_actions.clear()
