"""Pace: how much of a quota is used after the API has said that it was too much, and the way back.

Pure: time comes in as an argument. Owns the share of one quota, from nothing (a pause) to all of it. An API that
refuses is believed at once: nothing for as long as it asks, then a part. What it refuses of requests that were under
way at that time is the same complaint and not a new one. Without complaints the share grows back, in even steps.

Reads the headers in which APIs speak of their limits: `Retry-After`, `RateLimit-*`, `X-RateLimit-*` (with the suffixes
`-requests` and `-tokens` that some add) and `anthropic-ratelimit-*`.
"""

from __future__ import annotations

import email.utils
import math
import re
from collections.abc import Mapping
from datetime import datetime

import msgspec

CUT = 0.7
"""Of its share is left to a quota after a complaint ..."""
SHARE_MIN = 0.05
"""... but never less than this: whatever is left must be enough to find out that things are better."""
STEP = 0.05
"""By which the share grows ..."""
STEP_S_MIN = 1.0
"""... each time after a window without complaint, and not faster than this."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""After a complaint that says not how long, doubled with each that follows the one before within a window."""
WAIT_S_MAX = 3600.0
"""Of what an API asks for: a mistaken or hostile one must not stop a run for days."""
TOO_MANY, UNAVAILABLE = 429, 503
ROUNDING = 1e-6
"""Seconds over seconds may come out this much below a whole step."""


class Advice(msgspec.Struct, frozen=True):
    """What an answer says about limits."""

    refused: bool = False
    """It was too much."""
    wait_s: float | None = None
    """For which nothing should be asked."""


class Pace:
    def __init__(self, window_s: float) -> None:
        self._step_s = max(STEP_S_MIN, window_s)
        self._share = 1.0
        self._cut_at = -math.inf
        """When the share was cut last."""
        self._grown_at = -math.inf
        self._paused_until = -math.inf
        self._pause_s = PAUSE_S

    def heard(self, advice: Advice, now: float, granted_at: float) -> None:
        if advice.wait_s is not None:
            self._paused_until = max(self._paused_until, now + min(advice.wait_s, WAIT_S_MAX))
        if not advice.refused or granted_at <= self._cut_at:
            return
        self._grow(now)
        in_a_row = now < max(self._paused_until, self._cut_at) + self._step_s
        self._pause_s = min(2.0 * self._pause_s, PAUSE_S_MAX) if in_a_row and self._cut_at > -math.inf else PAUSE_S
        if advice.wait_s is None:
            self._paused_until = max(self._paused_until, now + self._pause_s)
        self._share = max(SHARE_MIN, self._share * CUT)
        self._cut_at = now
        self._grown_at = max(now, self._paused_until)

    def share(self, now: float) -> float:
        """Of the quota that may be used now: 0 to 1."""
        if now < self._paused_until:
            return 0.0
        self._grow(now)
        return self._share

    def changes_in(self, now: float) -> float | None:
        """Seconds until the share changes if nothing is heard; None: it does not."""
        if now < self._paused_until:
            return self._paused_until - now
        if self._share >= 1.0:
            return None
        return max(ROUNDING, self._grown_at + self._step_s - now)

    def _grow(self, now: float) -> None:
        if self._share < 1.0 and now > self._grown_at:
            steps = math.floor((now - self._grown_at) / self._step_s + ROUNDING)
            self._share = min(1.0, self._share + steps * STEP)
            self._grown_at += steps * self._step_s


# ---- headers --------------------------------------------------------------------------------------------------------

_PREFIXES = ("ratelimit", "x-ratelimit", "anthropic-ratelimit")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPOCH_MIN = 1e9
"""A reset above this is a time of the calendar rather than a number of seconds."""


def advice_of(status: int, headers: Mapping[str, str], wall_s: float) -> Advice:
    """What an HTTP answer says. `wall_s`: the time of the calendar, against which some APIs say theirs."""
    lower = {name.lower(): value for name, value in headers.items()}
    refused = status == TOO_MANY or (status == UNAVAILABLE and "retry-after" in lower)
    waits = [_seconds(lower["retry-after"], wall_s)] if "retry-after" in lower else []
    for name, value in lower.items():
        if name.startswith(_PREFIXES) and "remaining" in name and value.strip() == "0":
            waits.append(_seconds(lower.get(name.replace("remaining", "reset"), ""), wall_s))
    known = [wait for wait in waits if wait is not None]
    return Advice(refused=refused, wait_s=max(known) if known else None)


def _seconds(text: str, wall_s: float) -> float | None:
    """From now on. None: it says nothing that is understood."""
    text = text.strip()
    try:
        value = float(text)
        if not math.isfinite(value):
            return None
        return max(0.0, value - wall_s if value >= EPOCH_MIN else value)
    except ValueError:
        pass
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    try:
        return max(0.0, datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() - wall_s)
    except (ValueError, OverflowError):
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - wall_s)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
