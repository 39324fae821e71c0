"""How much of a quota is used after the API has complained, and how APIs say so."""

from __future__ import annotations

import pytest

from tangram.managers.pace import CUT, PAUSE_S, SHARE_MIN, STEP, WAIT_S_MAX, Advice, Pace, advice_of

REFUSED = Advice(refused=True)
NOON = 1_800_000_000.0


def test_a_quota_that_nobody_complains_about_is_used_whole() -> None:
    pace = Pace(60.0)
    pace.heard(Advice(), 5.0, 4.0)
    assert pace.share(5.0) == 1.0
    assert pace.changes_in(5.0) is None


def test_a_complaint_pauses_for_as_long_as_the_api_asks_and_then_leaves_a_part() -> None:
    pace = Pace(60.0)
    pace.heard(Advice(refused=True, wait_s=7.0), 100.0, 99.0)
    assert (pace.share(106.9), pace.changes_in(106.0)) == (0.0, 1.0)
    assert pace.share(107.0) == pytest.approx(CUT)


def test_complaints_about_what_was_under_way_are_one_complaint() -> None:
    pace = Pace(10.0)
    pace.heard(REFUSED, 100.0, 99.0)
    for at in (100.0, 100.1, 100.5):
        pace.heard(REFUSED, at, 99.9)
    assert pace.share(102.0) == pytest.approx(CUT)
    pace.heard(REFUSED, 103.0, 102.5)
    assert pace.share(110.0) == pytest.approx(CUT**2)


def test_pauses_grow_while_complaints_follow_each_other_and_are_short_again_after_a_calm_time() -> None:
    pace = Pace(1.0)
    now, pauses = 0.0, []
    for _ in range(8):
        now += 0.01
        pace.heard(REFUSED, now, now)
        pauses.append(round(pace.changes_in(now) or 0.0, 6))
        now += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    pace.heard(REFUSED, now + 100.0, now + 99.0)
    assert pace.changes_in(now + 100.0) == PAUSE_S


def test_the_share_never_falls_to_nothing_and_grows_back_whole() -> None:
    pace = Pace(10.0)
    for number in range(1, 40):
        pace.heard(Advice(refused=True, wait_s=0.0), float(number), number - 0.5)
    assert pace.share(39.0) == SHARE_MIN
    now, steps = 39.0, 0
    while (again_s := pace.changes_in(now)) is not None:
        now += again_s
        assert pace.share(now) > 0.0
        steps += 1
    assert pace.share(now) == 1.0
    assert steps == pytest.approx((1.0 - SHARE_MIN) / STEP, abs=1)
    assert now == pytest.approx(39.0 + 10.0 * steps)


def test_an_api_cannot_ask_for_days() -> None:
    pace = Pace(10.0)
    pace.heard(Advice(refused=True, wait_s=1e9), 0.0, 0.0)
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
        (429, {"Retry-After": "soon"}, True, None),
        (429, {"Retry-After": "nan"}, True, None),
        (429, {"Retry-After": "-5"}, True, 0.0),
        (429, {"Retry-After": "1e400"}, True, None),
        (429, {"Retry-After": "99999-99-99"}, True, None),
        (200, {"X-RateLimit-Remaining": "0"}, False, None),
    ],
)
def test_what_an_answer_says_about_limits(
    status: int, headers: dict[str, str], refused: bool, wait_s: float | None
) -> None:
    found = advice_of(status, headers, NOON)
    assert found.refused is refused
    assert found.wait_s == (None if wait_s is None else pytest.approx(wait_s))
