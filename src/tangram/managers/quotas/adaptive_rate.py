"""Adaptive rate: the share of a quota that is used after the API has refused a request, and its recovery.

Pure: the time is an argument. Owns the share of one quota, from 0 (a pause) to 1. After a refusal it pauses for as long
as the API requires, then uses slightly less than the API has accepted. Refusals of requests in flight at that time
belong to the same event: they refine its estimate and do not start another pause. Without refusals the share recovers
along a cubic curve (as in TCP CUBIC): fast at first, slowly around the accepted rate, then increasingly faster, so that
a raised limit is soon used.

Parses the headers in which APIs state their limits: `Retry-After`, `RateLimit-*`, also without a suffix,
`X-RateLimit-*`, `X-Rate-Limit-*` (with the suffixes `-requests` and `-tokens` that some add) and
`anthropic-ratelimit-*`.
"""

from __future__ import annotations

import email.utils
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec

BACKOFF_FACTOR = 0.8
"""After a refusal, this part of the accepted rate is used."""
SHARE_MIN = 0.05
"""At least this part of the quota is used: detecting a recovery needs requests."""
RECOVERY_STEPS = 4
"""Time until the full accepted rate is used again. If the limit stays the same, a few requests are refused about every
second time; a higher limit is discovered in the same way."""
STEP_S_MIN = 1.0
"""The share grows in steps of one window, and not faster than this."""
PRIOR_RESPONSES = 4
"""Successes assumed in addition to the observed answers, because a single refusal proves little."""
PASSED_SHARE_MIN = 0.1
"""Lower bound of the accepted part that one refusal event can imply: some APIs report only refusals."""
RESPONSES_MAX = 1000
"""Number of recent answers: enough to estimate the accepted part."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Pause after a refusal that states none. Doubled if the next refusal follows within one window of its end and no
request was accepted meanwhile."""
WAIT_S_MAX = 3600.0
"""Upper bound for a pause that an API requires: a mistaken or hostile one must not stop a run for days."""
TOO_MANY, UNAVAILABLE, OVERLOADED = 429, 503, 529
ROUNDING = 1e-6
"""Rounding error of a sum of seconds below a whole step."""


class RateLimitAdvice(msgspec.Struct, frozen=True):
    """The statements of a response about limits."""

    refused: bool = False
    """The request was refused because of a limit."""
    wait_s: float | None = None
    """Seconds for which no request should be sent."""


class AdaptiveRate:
    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._reduced = self._allowed = 1.0
        """The share that is used after a refusal, and the share that the API accepted."""
        self._steps = 0
        """The start of the growth of the share."""
        self._recovered_at = -math.inf
        self._throttled_at = -math.inf
        self._throttled_share = 1.0
        """The share that was refused."""
        self._throttled_responses: _ResponseWindow | None = None
        """Answers to requests granted in the preceding window; None if they do not apply to the current quota."""
        self._responses = _ResponseWindow()
        """Answers to requests granted since."""
        self._paused_until = -math.inf
        self._pause_s = PAUSE_S

    def record_response(self, advice: RateLimitAdvice, now: float, granted_at: float) -> None:
        """Record the response to a request that was granted at `granted_at`."""
        if advice.wait_s is not None:
            self._paused_until = max(self._paused_until, now + min(advice.wait_s, WAIT_S_MAX))
            self._recovered_at = max(self._recovered_at, self._paused_until)
        if granted_at <= self._throttled_at:
            if self._throttled_responses is not None:
                self._throttled_responses.add(granted_at, self._window_s, advice.refused)
                self._back_off(self._throttled_responses)
            return
        self._recover(now)
        self._responses.add(granted_at, self._window_s, advice.refused)
        if advice.refused:
            self._throttle(now, bare=advice.wait_s is None)

    def set_window(self, window_s: float) -> None:
        """Record a changed quota of the API. Pause and share stay; the accepted part of the new quota is unknown."""
        self._reduced, self._allowed, self._steps = self._current_share(), 1.0, 0
        self._throttled_responses = None
        self._window_s = window_s

    def share(self, now: float) -> float:
        """The part of the quota that may be used now: 0 to 1."""
        if now < self._paused_until:
            return 0.0
        self._recover(now)
        return self._current_share()

    def changes_in(self, now: float) -> float | None:
        """Seconds until the share changes without further responses; None if it does not."""
        if now < self._paused_until:
            return self._paused_until - now
        if self._current_share() >= 1.0:
            return None
        return max(ROUNDING, self._recovered_at + self._step_s - now)

    def paused_s(self, now: float) -> float:
        """Seconds for which no request is sent from now on."""
        return max(0.0, self._paused_until - now)

    @property
    def _step_s(self) -> float:
        return max(STEP_S_MIN, self._window_s)

    def _throttle(self, now: float, *, bare: bool) -> None:
        in_a_row = now < max(self._paused_until, self._throttled_at) + self._step_s
        doubled = in_a_row and self._throttled_at > -math.inf and not self._responses.passed
        self._pause_s = min(2.0 * self._pause_s, PAUSE_S_MAX) if doubled else PAUSE_S
        if bare:
            self._paused_until = max(self._paused_until, now + self._pause_s)
        self._throttled_at, self._throttled_share = now, self._current_share()
        self._throttled_responses, self._responses = self._responses, _ResponseWindow()
        self._recovered_at = max(now, self._paused_until)
        self._steps = 0
        self._back_off(self._throttled_responses)

    def _back_off(self, responses: _ResponseWindow) -> None:
        """The estimate of the share that the API allows, from the refusals so far."""
        let_through = max(PASSED_SHARE_MIN, responses.passed_share())
        self._allowed = max(SHARE_MIN / BACKOFF_FACTOR, self._throttled_share * let_through)
        self._reduced = BACKOFF_FACTOR * self._allowed

    def _recover(self, now: float) -> None:
        if self._current_share() < 1.0 and now > self._recovered_at:
            steps = math.floor((now - self._recovered_at) / self._step_s + ROUNDING)
            self._steps += steps
            self._recovered_at += steps * self._step_s

    def _current_share(self) -> float:
        """A cubic curve that is flat at the allowed share."""
        missing = ((RECOVERY_STEPS - self._steps) / RECOVERY_STEPS) ** 3
        return min(1.0, self._allowed - (self._allowed - self._reduced) * missing)


class _ResponseWindow:
    """Counts how many of the last requests were accepted."""

    def __init__(self) -> None:
        self._responses: deque[tuple[float, bool]] = deque()
        self.passed = 0

    def add(self, granted_at: float, window_s: float, refused: bool) -> None:
        self._responses.append((granted_at, refused))
        self.passed += not refused
        while len(self._responses) > RESPONSES_MAX or self._responses[0][0] <= granted_at - window_s:
            self.passed -= not self._responses.popleft()[1]

    def passed_share(self) -> float:
        return max(self.passed / len(self._responses), PRIOR_RESPONSES / (PRIOR_RESPONSES + len(self._responses)))


# ---- headers --------------------------------------------------------------------------------------------------------

_REMAINING = re.compile(r"(?:(?:x-)?rate-?limit|anthropic-ratelimit)-(?:.+-)?remaining(?:-.+)?")
_ITEM = re.compile(r"\s*(\"[^\"]*\"|[^;,=\s]+)\s*((?:;[^;,]*)*)")
"""An item of a structured list: a name and its parameters."""
_PARAMETER = re.compile(r";\s*([a-z]+)\s*=\s*([0-9.]+)")
_PAIR = re.compile(r"([a-z]+)\s*=\s*([0-9.]+)")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPOCH_MIN, EPOCH_MS_MIN = 1e9, 1e11
"""A reset value above this is a calendar time rather than a number of seconds; above the second, one in
milliseconds."""


def parse_rate_limit(status: int, headers: Mapping[str, str], wall_s: float) -> RateLimitAdvice:
    """Parse the headers of an HTTP response. `wall_s`: the local calendar time. Times in the response are compared with
    its own `Date`, if it has one, because two clocks rarely agree."""
    lower = {name.lower(): value for name, value in headers.items()}
    wall_s = _parse_date(lower.get("date", ""), wall_s)
    has_retry_after = "retry-after" in lower or "retry-after-ms" in lower
    refused = status in (TOO_MANY, OVERLOADED) or (status == UNAVAILABLE and has_retry_after)
    # In other responses, such as a 202, the header states when to poll, not when to send other requests.
    waits = [_retry_after_s(lower, wall_s)] if refused else []
    waits.extend(_resets(lower, wall_s))
    known = [wait for wait in waits if wait is not None]
    return RateLimitAdvice(refused=refused, wait_s=max(known) if known else None)


def _parse_date(text: str, otherwise_s: float) -> float:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return otherwise_s


def _retry_after_s(lower: Mapping[str, str], wall_s: float) -> float | None:
    exact = _parse_seconds(lower.get("retry-after-ms", ""), wall_s)
    return _longest_wait_s(lower.get("retry-after", ""), wall_s) if exact is None else exact / 1000.0


def _resets(lower: Mapping[str, str], wall_s: float) -> Iterator[float | None]:
    """Seconds until the exhausted limits are reset."""
    for name, value in lower.items():
        if _REMAINING.fullmatch(name) and any(_is_zero(item) for item in value.split(",")):
            reset = name.replace("remaining", "reset")
            yield _longest_wait_s(lower.get(f"{reset}-after") or lower.get(reset, ""), wall_s)
    policy = lower.get("ratelimit", "")
    if ";" not in policy:
        pairs = dict(_PAIR.findall(policy))
        if _is_zero(pairs.get("remaining", "")):
            yield _parse_seconds(pairs.get("reset", ""), wall_s)
        return
    windows = {name: parameters.get("w", "") for name, parameters in _parse_items(lower.get("ratelimit-policy", ""))}
    for name, parameters in _parse_items(policy):
        if _is_zero(parameters.get("r", "")):
            yield _parse_seconds(parameters.get("t") or windows.get(name, ""), wall_s)


def _parse_items(text: str) -> list[tuple[str, dict[str, str]]]:
    """Items of a structured list, such as `"default";r=0;t=5, "daily";r=100;t=3600`."""
    return [(name, dict(_PARAMETER.findall(parameters))) for name, parameters in _ITEM.findall(text)]


def _is_zero(text: str) -> bool:
    try:
        return float(text.partition(";")[0]) <= 0.0
    except ValueError:
        return False


def _longest_wait_s(text: str, wall_s: float) -> float | None:
    """Values of a header, or of a list of them: the same header may come several times."""
    seconds = _parse_seconds(text, wall_s)
    if seconds is not None or "," not in text:
        return seconds
    return max(
        (seconds for part in text.split(",") if (seconds := _parse_seconds(part, wall_s)) is not None), default=None
    )


def _parse_seconds(text: str, wall_s: float) -> float | None:
    """Seconds from now on. None if the value cannot be parsed."""
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
    return max(0.0, date_s - wall_s) if math.isfinite(date_s := _parse_date(text, math.nan)) else None
