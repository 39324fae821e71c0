"""Plans: what a policy decides is done, and what is no decision stops everything by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tangram.core.demand import cores
from tangram.core.messages import cpu_node
from tangram.core.policies.base import ArrivalOrder, Begin
from tangram.core.snapshot import Snapshot
from tangram.errors import InvariantError

Make = Callable[..., Any]

NODE = cpu_node("n0", 4)
ONE = {"cpu": cores(1)}


class Told(ArrivalOrder):
    """Plans and orders as the test says."""

    name = "told"

    def __init__(self, plan: Callable[[Snapshot], Any] | None = None, key: Any = 0.0) -> None:
        self._plan = plan
        self._key = key

    def order(self, entry: object, snapshot: object) -> Any:
        return self._key

    def plan(self, snapshot: Snapshot) -> Any:
        return self._plan(snapshot) if self._plan else self._begin_all(snapshot)

    def _begin_all(self, snapshot: Snapshot) -> Iterator[Begin]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node)


@pytest.mark.parametrize("plan", [None, 42])
def test_a_plan_that_is_no_iterator_is_named(cluster: Make, plan: Any) -> None:
    c = cluster(*NODE, policy=Told(lambda snapshot: plan))
    with pytest.raises(InvariantError, match=f"policy told planned {plan}, expected an iterator of decisions"):
        c.submit("a", ONE)


def test_a_plan_may_be_any_iterable(cluster: Make) -> None:
    c = cluster(*NODE, policy=Told(lambda snapshot: [Begin(c.entry, c.node) for c in [next(snapshot.candidates())]]))
    c.submit("a", ONE)
    assert c.starts() == ["a"]


def test_an_error_of_the_policy_itself_stays_what_it_is(cluster: Make) -> None:
    def wrong(snapshot: Snapshot) -> Any:
        raise TypeError("a bug of the policy")

    with pytest.raises(TypeError, match="a bug of the policy"):
        cluster(*NODE, policy=Told(wrong)).submit("a", ONE)


def test_what_is_no_decision_is_named(cluster: Make) -> None:
    c = cluster(*NODE, policy=Told(lambda snapshot: [42]))
    with pytest.raises(InvariantError, match="policy told decided 42, expected Begin, Hold, Adjust or Preload"):
        c.submit("a", ONE)


def test_a_candidate_is_no_decision_and_the_story_of_its_action_is_told(cluster: Make) -> None:
    c = cluster(*NODE, policy=Told(lambda snapshot: snapshot.candidates()))
    with pytest.raises(InvariantError, match=r"policy told decided Candidate\(.*, expected Begin") as caught:
        c.submit("a", ONE)
    assert "Submit" in caught.value.story[0]


@pytest.mark.parametrize("key", [math.nan, None, "soon", [1.0]])
def test_an_order_that_is_no_number_is_named_with_the_story(cluster: Make, key: Any) -> None:
    c = cluster(*NODE, policy=Told(key=key))
    with pytest.raises(InvariantError, match=r"policy told orders a by .*, not by a number") as caught:
        c.submit("a", ONE)
    assert repr(key) in caught.value.what
    assert "Submit" in caught.value.story[0]


@pytest.mark.parametrize("key", [-math.inf, math.inf, 3, True])
def test_an_order_may_be_any_number(cluster: Make, key: Any) -> None:
    c = cluster(*NODE, policy=Told(key=key))
    c.submit("a", ONE)
    assert c.starts() == ["a"]
