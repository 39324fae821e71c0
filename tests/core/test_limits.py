"""Limits: each is a number that can be meant."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tangram.core.limits import Limits
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import InvalidConfig

COUNTS = [field for field in Limits.__struct_fields__ if field.endswith("_max")]
SECONDS = [field for field in Limits.__struct_fields__ if field.endswith("_s")]


def test_every_limit_counts_or_is_a_time() -> None:
    assert sorted(COUNTS + SECONDS) == sorted(Limits.__struct_fields__)


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [1.5, 2.0, True, "3", None, 0, -1, math.inf])
def test_a_count_is_a_whole_number(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Limits(**{field: value})
    assert (caught.value.field, caught.value.expected) == (f"limits.{field}", "a positive whole number")
    assert caught.value.value is value


@pytest.mark.parametrize("field", SECONDS)
@pytest.mark.parametrize("value", ["3", None, True, 0.0, -1.0, math.inf, math.nan])
def test_a_time_is_finite_and_positive(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Limits(**{field: value})
    assert (caught.value.field, caught.value.expected) == (
        f"limits.{field}",
        "a positive, finite number of seconds",
    )
    assert caught.value.value is value


@pytest.mark.parametrize("name", ["adaptive", None, policy])
def test_a_scheduler_wants_a_policy_not_its_name(name: Any) -> None:
    with pytest.raises(InvalidConfig, match=r'policy: expected a policy, such as policy\("adaptive"\), got') as caught:
        Scheduler(name)
    assert caught.value.value is name
