"""How much of a quota is used after the API has complained, and how APIs say so."""

from __future__ import annotations

import pytest

from tangram.managers.quotas.adaptive_rate import (
    BACKOFF_FACTOR,
    PASSED_SHARE_MIN,
    PAUSE_S,
    PRIOR_RESPONSES,
    RECOVERY_STEPS,
    RESPONSES_MAX,
    SHARE_MIN,
    WAIT_S_MAX,
    AdaptiveRate,
    RateLimitAdvice,
    parse_rate_limit,
)

REFUSED, FINE = RateLimitAdvice(refused=True), RateLimitAdvice()
NOON = 1_800_000_000.0
ONE_REFUSED = PRIOR_RESPONSES / (PRIOR_RESPONSES + 1)
"""What one refusal alone says that is let through."""


def test_a_quota_without_complaints_is_used_whole() -> None:
    pace = AdaptiveRate(60.0)
    pace.record_response(FINE, 5.0, 4.0)
    assert pace.share(5.0) == 1.0
    assert pace.changes_in(5.0) is None


def test_a_complaint_pauses_for_the_retry_after_and_then_leaves_a_part() -> None:
    pace = AdaptiveRate(60.0)
    pace.record_response(RateLimitAdvice(refused=True, wait_s=7.0), 100.0, 99.0)
    assert (pace.share(106.9), pace.changes_in(106.0), pace.paused_s(106.0)) == (0.0, 1.0, 1.0)
    assert pace.share(107.0) == pytest.approx(BACKOFF_FACTOR * ONE_REFUSED)
    assert pace.paused_s(107.0) == 0.0


def test_the_share_of_requests_that_succeed_shows_how_much_is_used() -> None:
    pace = AdaptiveRate(10.0)
    for number in range(100):
        pace.record_response(FINE if number % 10 == 0 else REFUSED, 100.0 + number / 1000, 99.9)
    assert pace.share(102.0) == pytest.approx(BACKOFF_FACTOR * 10 / 100), "ten in a hundred"
    pace.record_response(REFUSED, 103.0, 102.5)
    assert pace.share(105.0) == pytest.approx(BACKOFF_FACTOR * BACKOFF_FACTOR * ONE_REFUSED * 10 / 100), "a new one"


def test_only_the_window_before_a_complaint_and_its_last_answers_count() -> None:
    pace = AdaptiveRate(10.0)
    for number in range(50):
        pace.record_response(FINE, 1.0 + number / 1000, 0.5)
    for _ in range(3):
        pace.record_response(REFUSED, 12.0, 11.5)
    assert pace.share(13.0) == pytest.approx(BACKOFF_FACTOR * PRIOR_RESPONSES / (PRIOR_RESPONSES + 3)), (
        "what was let through long ago says nothing"
    )
    pace = AdaptiveRate(1e6)
    for number in range(10 * RESPONSES_MAX):
        pace.record_response(FINE, 1.0 + number, 1.0 + number)
    for number in range(RESPONSES_MAX):
        pace.record_response(REFUSED, 20_000.0, 15_000.0 + number)
    assert pace.share(20_001.0) == pytest.approx(BACKOFF_FACTOR * PASSED_SHARE_MIN), "the last thousand were refused"


def test_complaints_alone_never_reduce_the_rate_to_zero() -> None:
    pace = AdaptiveRate(10.0)
    for _ in range(500):
        pace.record_response(REFUSED, 100.0, 99.0)
    assert pace.share(102.0) == pytest.approx(BACKOFF_FACTOR * PASSED_SHARE_MIN)


def test_pauses_grow_while_nothing_is_let_through_and_are_short_again_as_soon_as_something_is() -> None:
    pace = AdaptiveRate(1.0)
    now, pauses = 0.0, []

    def complain() -> None:
        nonlocal now
        now += 0.01
        pace.record_response(REFUSED, now, now)
        pauses.append(round(pace.paused_s(now), 6))
        now += pauses[-1]

    for _ in range(8):
        complain()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    now += 0.01
    pace.record_response(FINE, now, now)
    complain()
    complain()
    assert pauses[8:] == [PAUSE_S, 2.0], "one was let through before the first of these, none before the second"
    now += 100.0
    complain()
    assert pauses[10:] == [PAUSE_S], "after a calm time"


def test_the_share_never_falls_to_nothing_and_grows_back_whole() -> None:
    pace = AdaptiveRate(10.0)
    for number in range(1, 40):
        pace.record_response(RateLimitAdvice(refused=True, wait_s=0.0), float(number), number - 0.5)
    assert pace.share(39.0) == SHARE_MIN
    now, before, steps = 39.0, SHARE_MIN, 0
    while (again_s := pace.changes_in(now)) is not None:
        now += again_s
        assert pace.share(now) >= before
        before = pace.share(now)
        steps += 1
    assert pace.share(now) == 1.0
    assert now == pytest.approx(39.0 + 10.0 * steps)
    assert steps <= 21, "from the least of all"


def test_growth_is_flat_around_what_was_let_through() -> None:
    pace = AdaptiveRate(1.0)
    for number in range(100):
        pace.record_response(REFUSED if number < 50 else FINE, 0.0, 0.0)
    allowed = 50 / 100
    at = [pace.share(PAUSE_S + step) / allowed for step in range(2 * RECOVERY_STEPS + 1)]
    assert at[0] == pytest.approx(BACKOFF_FACTOR)
    assert at[RECOVERY_STEPS] == pytest.approx(1.0)
    assert at[RECOVERY_STEPS - 1] > 0.99 and at[RECOVERY_STEPS + 1] < 1.01
    assert at[-1] == pytest.approx(2.0 - BACKOFF_FACTOR), "beyond, it is as fast as it was before"


def test_another_quota_of_the_same_api_keeps_the_pause_and_the_share() -> None:
    pace = AdaptiveRate(10.0)
    for number in range(100):
        pace.record_response(FINE if number % 10 == 0 else RateLimitAdvice(refused=True, wait_s=5.0), 100.0, 99.9)
    pace.set_window(20.0)
    assert (pace.share(104.9), pace.paused_s(104.0)) == (0.0, 1.0)
    kept = pace.share(105.0)
    assert kept == pytest.approx(BACKOFF_FACTOR * 10 / 100)
    pace.record_response(REFUSED, 106.0, 99.9)
    assert pace.share(107.0) == kept, "what was refused of the old one says nothing of the new one"
    assert pace.share(124.9) == kept, "a window is longer now"
    assert pace.share(125.0) > kept
    assert pace.share(105.0 + 20.0 * RECOVERY_STEPS) == 1.0


def test_a_retry_after_of_days_is_capped() -> None:
    pace = AdaptiveRate(10.0)
    pace.record_response(RateLimitAdvice(refused=True, wait_s=1e9), 0.0, 0.0)
    assert pace.changes_in(0.0) == WAIT_S_MAX


@pytest.mark.parametrize(
    ("status", "headers", "refused", "wait_s"),
    [
        (200, {}, False, None),
        (200, {"X-RateLimit-Remaining-Requests": "12", "X-RateLimit-Reset-Requests": "1s"}, False, None),
        (200, {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m30s"}, False, 90.0),
        (200, {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "250ms"}, False, 0.25),
        (200, {"RateLimit-Remaining": "0", "RateLimit-Reset": "12"}, False, 12.0),
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOON) + 30)}, False, 30.0),
        (
            200,
            {
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:09Z",
            },
            False,
            9.0,
        ),
        (429, {}, True, None),
        (429, {"Retry-After": "3"}, True, 3.0),
        (429, {"retry-after": "Fri, 15 Jan 2027 08:00:20 GMT"}, True, 20.0),
        (429, {"Retry-After": "2", "RateLimit-Remaining": "0", "RateLimit-Reset": "5"}, True, 5.0),
        (503, {}, False, None),
        (503, {"Retry-After": "3"}, True, 3.0),
        (529, {}, True, None),
        (529, {"Retry-After": "3"}, True, 3.0),
        (202, {"Retry-After": "3"}, False, None),
        (301, {"Retry-After": "3"}, False, None),
        (202, {"Retry-After": "3", "RateLimit-Remaining": "0", "RateLimit-Reset": "5"}, False, 5.0),
        (429, {"retry-after-ms": "250"}, True, 0.25),
        (503, {"Retry-After-Ms": "250", "Retry-After": "1"}, True, 0.25),
        (429, {"Retry-After": "10, 20"}, True, 20.0),
        (429, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOON * 1000) + 1500)}, True, 1.5),
        (200, {"X-Rate-Limit-Remaining": "0", "X-Rate-Limit-Reset": str(int(NOON) + 4)}, False, 4.0),
        (200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset-After": "2.5"}, False, 2.5),
        (
            200,
            {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9e9", "X-RateLimit-Reset-After": "2.5"},
            False,
            2.5,
        ),
        (200, {"X-RateLimit-Remaining": "0, 0", "X-RateLimit-Reset": "5"}, False, 5.0),
        (200, {"X-RateLimit-Remaining": "7, 0", "X-RateLimit-Reset": "1, 60"}, False, 60.0),
        (200, {"X-RateLimit-Remaining": "7, 8", "X-RateLimit-Reset": "1, 60"}, False, None),
        (200, {"RateLimit": '"default";r=0;t=5'}, False, 5.0),
        (200, {"RateLimit": '"default";r=50;t=5'}, False, None),
        (200, {"RateLimit": '"burst";r=3;t=1, "daily";r=0;t=600'}, False, 600.0),
        (200, {"RateLimit": "default;r=0", "RateLimit-Policy": "burst;q=1;w=2, default;q=100;w=60"}, False, 60.0),
        (200, {"RateLimit": '"default";r=0'}, False, None),
        (200, {"RateLimit": "limit=100, remaining=0, reset=8"}, False, 8.0),
        (200, {"RateLimit": "limit=100, remaining=1, reset=8"}, False, None),
        (200, {"RateLimit": ";;,=r=0;t", "RateLimit-Policy": "\x00"}, False, None),
        (
            429,
            {"Date": "Fri, 15 Jan 2027 09:00:00 GMT", "Retry-After": "Fri, 15 Jan 2027 09:00:02 GMT"},
            True,
            2.0,
        ),
        (
            200,
            {
                "date": "Fri, 15 Jan 2027 07:00:00 GMT",
                "x-ratelimit-remaining": "0",
                "x-ratelimit-reset": str(int(NOON) - 3600 + 7),
            },
            False,
            7.0,
        ),
        (429, {"Date": "yesterday", "Retry-After": "Fri, 15 Jan 2027 08:00:20 GMT"}, True, 20.0),
        (429, {"Retry-After": "soon"}, True, None),
        (429, {"Retry-After": "nan"}, True, None),
        (429, {"Retry-After": "-5"}, True, 0.0),
        (429, {"Retry-After": "1e400"}, True, None),
        (429, {"Retry-After": "99999-99-99"}, True, None),
        (200, {"X-RateLimit-Remaining": "0"}, False, None),
    ],
)
def test_limits_are_read_from_a_response(
    status: int, headers: dict[str, str], refused: bool, wait_s: float | None
) -> None:
    limit = parse_rate_limit(status, headers, NOON)
    assert limit.refused is refused
    assert limit.wait_s == (None if wait_s is None else pytest.approx(wait_s))
