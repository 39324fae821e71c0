"""Pace: how much of a quota is used after the API has said that it was too much, and the way back.

Pure: time comes in as an argument. Owns the share of one quota, from nothing (a pause) to all of it. An API that
refuses is believed at once: nothing for as long as it asks, then somewhat less than what it has let through. What it
refuses of requests that were under way at that time belongs to the same complaint: it says how much was too much, and
is not a new one. Without complaints the share grows back: fast at first, hardly at all around what was let through
before, then ever faster, so that an API which allows more again is soon used whole.

Reads the headers in which APIs speak of their limits: `Retry-After`, `RateLimit`, `RateLimit-*`, `X-RateLimit-*`,
`X-Rate-Limit-*` (with the suffixes `-requests` and `-tokens` that some add) and `anthropic-ratelimit-*`.
"""

from __future__ import annotations

import email.utils
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec

LEFT = 0.8
"""Of what the API let through is used after a complaint ..."""
SHARE_MIN = 0.05
"""... but never less than this of the quota: whatever is left must be enough to find out that things are better."""
BACK_STEPS = 4
"""After which all that it let through is used again. Where the limit stays, about every second time after so many steps
a few requests are refused, which is how a higher limit would be found."""
STEP_S_MIN = 1.0
"""The share grows each time after a window, and not faster than this."""
TRUST = 4
"""Answers that are taken for granted beside those that were heard where hardly any were: one refusal alone proves
little."""
LET_THROUGH_MIN = 0.1
"""One complaint never says that less than this part of what was asked is allowed: some tell of refusals alone."""
ANSWERS_MAX = 1000
"""The last ones: they say well enough what part is let through."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""After a complaint that says not how long; doubled when the next one comes within a window of its end and nothing at
all was let through meanwhile."""
WAIT_S_MAX = 3600.0
"""Of what an API asks for: a mistaken or hostile one must not stop a run for days."""
TOO_MANY, UNAVAILABLE, OVERLOADED = 429, 503, 529
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
        self._window_s = window_s
        self._base = self._allowed = 1.0
        """The share that is used after a complaint, and the one that the API let through."""
        self._steps = 0
        """By which the share has grown since."""
        self._grown_at = -math.inf
        self._complained_at = -math.inf
        self._complained_of = 1.0
        """The share that was too much."""
        self._complaint: _Answers | None = None
        """The answers to what was granted in the window before it; None: they say nothing of the present quota."""
        self._answers = _Answers()
        """To what was granted since."""
        self._paused_until = -math.inf
        self._pause_s = PAUSE_S

    def heard(self, advice: Advice, now: float, granted_at: float) -> None:
        """An answer to a request of which the quota was granted then."""
        if advice.wait_s is not None:
            self._paused_until = max(self._paused_until, now + min(advice.wait_s, WAIT_S_MAX))
            self._grown_at = max(self._grown_at, self._paused_until)
        if granted_at <= self._complained_at:
            if self._complaint is not None:
                self._complaint.add(granted_at, self._window_s, advice.refused)
                self._fall(self._complaint)
            return
        self._grow(now)
        self._answers.add(granted_at, self._window_s, advice.refused)
        if advice.refused:
            self._complain(now, bare=advice.wait_s is None)

    def window(self, window_s: float) -> None:
        """The API has another quota from now on. Pause and share stay. Which part of the new one is let through is to
        be found out."""
        self._base, self._allowed, self._steps = self._grown(), 1.0, 0
        self._complaint = None
        self._window_s = window_s

    def share(self, now: float) -> float:
        """Of the quota that may be used now: 0 to 1."""
        if now < self._paused_until:
            return 0.0
        self._grow(now)
        return self._grown()

    def changes_in(self, now: float) -> float | None:
        """Seconds until the share changes if nothing is heard; None: it does not."""
        if now < self._paused_until:
            return self._paused_until - now
        if self._grown() >= 1.0:
            return None
        return max(ROUNDING, self._grown_at + self._step_s - now)

    def paused_s(self, now: float) -> float:
        """For which nothing is asked from now on."""
        return max(0.0, self._paused_until - now)

    @property
    def _step_s(self) -> float:
        return max(STEP_S_MIN, self._window_s)

    def _complain(self, now: float, *, bare: bool) -> None:
        in_a_row = now < max(self._paused_until, self._complained_at) + self._step_s
        doubled = in_a_row and self._complained_at > -math.inf and not self._answers.let_through
        self._pause_s = min(2.0 * self._pause_s, PAUSE_S_MAX) if doubled else PAUSE_S
        if bare:
            self._paused_until = max(self._paused_until, now + self._pause_s)
        self._complained_at, self._complained_of = now, self._grown()
        self._complaint, self._answers = self._answers, _Answers()
        self._grown_at = max(now, self._paused_until)
        self._steps = 0
        self._fall(self._complaint)

    def _fall(self, complaint: _Answers) -> None:
        """To what the complaint, as far as it is known, says that is allowed."""
        let_through = max(LET_THROUGH_MIN, complaint.part())
        self._allowed = max(SHARE_MIN / LEFT, self._complained_of * let_through)
        self._base = LEFT * self._allowed

    def _grow(self, now: float) -> None:
        if self._grown() < 1.0 and now > self._grown_at:
            steps = math.floor((now - self._grown_at) / self._step_s + ROUNDING)
            self._steps += steps
            self._grown_at += steps * self._step_s

    def _grown(self) -> float:
        """A cubic curve that is flat where it passes what is allowed."""
        missing = ((BACK_STEPS - self._steps) / BACK_STEPS) ** 3
        return min(1.0, self._allowed - (self._allowed - self._base) * missing)


class _Answers:
    """How many of the last requests were let through."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, bool]] = deque()
        self.let_through = 0

    def add(self, granted_at: float, window_s: float, refused: bool) -> None:
        self._kept.append((granted_at, refused))
        self.let_through += not refused
        while len(self._kept) > ANSWERS_MAX or self._kept[0][0] <= granted_at - window_s:
            self.let_through -= not self._kept.popleft()[1]

    def part(self) -> float:
        return max(self.let_through / len(self._kept), TRUST / (TRUST + len(self._kept)))


# ---- headers --------------------------------------------------------------------------------------------------------

_REMAINING = re.compile(r"(?:(?:x-)?rate-?limit|anthropic-ratelimit)-(?:.+-)?remaining(?:-.+)?")
_ITEM = re.compile(r"\s*(\"[^\"]*\"|[^;,=\s]+)\s*((?:;[^;,]*)*)")
"""Of a structured list: a name and its parameters."""
_PARAMETER = re.compile(r";\s*([a-z]+)\s*=\s*([0-9.]+)")
_PAIR = re.compile(r"([a-z]+)\s*=\s*([0-9.]+)")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPOCH_MIN, EPOCH_MS_MIN = 1e9, 1e11
"""A reset above this is a time of the calendar rather than a number of seconds, and above that one in milliseconds."""


def advice_of(status: int, headers: Mapping[str, str], wall_s: float) -> Advice:
    """What an HTTP answer says. `wall_s`: the time of the calendar here. Times that the answer names are measured
    against its own `Date`, if it has one: two clocks are rarely alike."""
    lower = {name.lower(): value for name, value in headers.items()}
    wall_s = _date(lower.get("date", ""), wall_s)
    asks = "retry-after" in lower or "retry-after-ms" in lower
    refused = status in (TOO_MANY, OVERLOADED) or (status == UNAVAILABLE and asks)
    # An answer that is none of these says when to look for what was asked, such as a 202, and not when to ask others.
    waits = [_retry_after_s(lower, wall_s)] if refused else []
    waits.extend(_resets(lower, wall_s))
    known = [wait for wait in waits if wait is not None]
    return Advice(refused=refused, wait_s=max(known) if known else None)


def _date(text: str, otherwise_s: float) -> float:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return otherwise_s


def _retry_after_s(lower: Mapping[str, str], wall_s: float) -> float | None:
    exact = _seconds(lower.get("retry-after-ms", ""), wall_s)
    return _longest(lower.get("retry-after", ""), wall_s) if exact is None else exact / 1000.0


def _resets(lower: Mapping[str, str], wall_s: float) -> Iterator[float | None]:
    """Seconds until those limits of which nothing remains are reset."""
    for name, value in lower.items():
        if _REMAINING.fullmatch(name) and any(_is_nothing(each) for each in value.split(",")):
            reset = name.replace("remaining", "reset")
            yield _longest(lower.get(f"{reset}-after") or lower.get(reset, ""), wall_s)
    said = lower.get("ratelimit", "")
    if ";" not in said:
        pairs = dict(_PAIR.findall(said))
        if _is_nothing(pairs.get("remaining", "")):
            yield _seconds(pairs.get("reset", ""), wall_s)
        return
    windows = {name: parameters.get("w", "") for name, parameters in _items(lower.get("ratelimit-policy", ""))}
    for name, parameters in _items(said):
        if _is_nothing(parameters.get("r", "")):
            yield _seconds(parameters.get("t") or windows.get(name, ""), wall_s)


def _items(text: str) -> list[tuple[str, dict[str, str]]]:
    """Of a structured list, such as `"default";r=0;t=5, "daily";r=100;t=3600`."""
    return [(name, dict(_PARAMETER.findall(parameters))) for name, parameters in _ITEM.findall(text)]


def _is_nothing(text: str) -> bool:
    try:
        return float(text.partition(";")[0]) <= 0.0
    except ValueError:
        return False


def _longest(text: str, wall_s: float) -> float | None:
    """Of a value, or of a list of them: the same header may come several times."""
    found = _seconds(text, wall_s)
    if found is not None or "," not in text:
        return found
    return max((each for part in text.split(",") if (each := _seconds(part, wall_s)) is not None), default=None)


def _seconds(text: str, wall_s: float) -> float | None:
    """From now on. None: it says nothing that is understood."""
    text = text.strip()
    try:
        value = float(text)
        if not math.isfinite(value):
            return None
        if value >= EPOCH_MS_MIN:
            value /= 1000.0
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
    return max(0.0, when - wall_s) if math.isfinite(when := _date(text, math.nan)) else None
