"""The circuit breaker: a service that keeps failing gets no calls for a while.

Owns the count of failures in a row. A service whose engine crashes each time would cost every caller a restore and
evict others for nothing. After FAILURES_MAX of them it is refused until a pause has passed; then one call tries it.

What counts is that different actions fail: the repeats of one action count once, and so does a batch. Crashes, hangs
and loads that fail count always. A call that raises counts only as long as no call of the service has ever succeeded:
afterwards it is known to work, so what raises is more likely a payload, and one caller's payloads must not shut the
service for all others. Then FAILURES_MAX such actions in a row mean that the service is loaded afresh.
"""

from __future__ import annotations

from collections.abc import Sequence

from tangram.errors import AdmissionRefused

FAILURES_MAX = 3
PAUSE_S = 30.0
"""Longer than a restore, shorter than a step of training."""

Devices = tuple[int, ...]


class Circuit:
    def __init__(self, service: str, pause_s: float = PAUSE_S) -> None:
        self._service = service
        self._pause_s = pause_s
        self._failures = 0
        self._counted: set[str] = set()
        """Actions in these failures."""
        self._reason = ""
        self._open_until = 0.0
        self._trying = False
        self._proven = False
        """A call has succeeded."""
        self._working: set[Devices] = set()
        """Where a call has succeeded since the service was loaded there."""
        self._raised: dict[Devices, set[str]] = {}
        """Actions whose calls raised there, in a row."""

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES_MAX

    def admit(self, now: float) -> None:
        """Somebody wants to use the service. Raises AdmissionRefused. Otherwise `undecided` has to follow at last, and
        before it what became of the calls."""
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

    def loaded(self, devices: Devices) -> None:
        """What was known of it there is no longer true."""
        self._working.discard(devices)
        self._raised.pop(devices, None)

    def succeeded(self, devices: Devices) -> None:
        self._proven = True
        self._working.add(devices)
        self._raised.pop(devices, None)
        self._close()

    def declined(self) -> None:
        """The engine found a payload wrong: it lives, and nothing more is known."""
        self._close()

    def failed(self, reason: str, now: float, actions: Sequence[str] = ()) -> None:
        """A load failed, or a process was lost. `actions`: whose it was; none: nobody's."""
        self._reason = reason
        self._open_until = now + self._pause_s
        self._trying = False
        if self._counted.isdisjoint(actions):
            self._failures += 1
            self._counted.update(actions)

    def raised(self, reason: str, now: float, devices: Devices, actions: Sequence[str]) -> bool:
        """A call raised. True: the service has to be loaded afresh before it is called again."""
        if not self._proven:
            self.failed(reason, now, actions)
            return False
        raised = self._raised.setdefault(devices, set())
        if len(raised) < FAILURES_MAX:
            raised.update(actions[:1])  # a batch counts once
        return devices in self._working and len(raised) >= FAILURES_MAX

    def undecided(self) -> None:
        """Nobody uses it any more, whatever is known."""
        self._trying = False

    def _close(self) -> None:
        self._failures, self._reason, self._trying = 0, "", False
        self._counted.clear()
