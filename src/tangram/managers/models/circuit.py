"""Circuits: a service that keeps failing is left alone for a while.

Owns the count of failures in a row. A service whose engine crashes each time would cost every caller a restore and
evict others for nothing. After FAILURES_MAX of them it is refused until a pause has passed; then one call tries it.
"""

from __future__ import annotations

from tangram.errors import AdmissionRefused

FAILURES_MAX = 3
PAUSE_S = 30.0
"""Longer than a restore, shorter than a step of training."""


class Circuit:
    def __init__(self, service: str, pause_s: float = PAUSE_S) -> None:
        self._service = service
        self._pause_s = pause_s
        self._failures = 0
        self._reason = ""
        self._open_until = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES_MAX

    def admit(self, now: float) -> None:
        """Somebody wants to use the service. Raises AdmissionRefused. Otherwise `succeeded`, `failed` or `undecided`
        has to follow."""
        if not self.is_open:
            return
        left_s = self._open_until - now
        if left_s > 0.0 or self._trying:
            when = f"it is tried again in {left_s:.1f} s" if left_s > 0.0 else "one call is trying it just now"
            raise AdmissionRefused(
                "circuit",
                f"service {self._service} failed {self._failures} times in a row; {when}; last: {self._reason}",
            )
        self._trying = True

    def succeeded(self) -> None:
        self._failures, self._reason, self._trying = 0, "", False

    def failed(self, reason: str, now: float) -> None:
        self._failures += 1
        self._reason = reason
        self._open_until = now + self._pause_s
        self._trying = False

    def undecided(self) -> None:
        """It was stopped before anything was known."""
        self._trying = False
