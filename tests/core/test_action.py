"""Actions: the only states, the only changes between them, and what is refused before it can do harm."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.action import (
    ID_LENGTH_MAX,
    PRIORITY_MAX,
    TRANSITIONS,
    Action,
    Outcome,
    State,
    Status,
    Usage,
    wrong_transition,
)
from tangram.core.demand import Demand, cores
from tangram.errors import InvalidAction, InvalidInput

DEMAND = Demand({"cpu": cores(1)})

ALLOWED = {
    ("queued", "starting"),
    ("queued", "cancelled"),
    ("queued", "failed"),
    ("starting", "running"),
    ("starting", "stopping"),
    ("starting", "queued"),
    ("starting", "failed"),
    ("running", "succeeded"),
    ("running", "failed"),
    ("running", "stopping"),
    ("running", "queued"),
    ("stopping", "cancelled"),
    ("stopping", "failed"),
}
"""Written out once more, so that a change of the table is a change of two places."""

PAIRS = [(before, after) for before in State for after in State]


# ---- states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda state: state.value)
def test_the_table_allows_exactly_these_changes(before: State, after: State) -> None:
    assert (after in TRANSITIONS[before]) == ((before.value, after.value) in ALLOWED)


def test_a_forbidden_change_names_the_allowed_ones() -> None:
    assert wrong_transition(State.STOPPING, State.RUNNING, "a-1") == (
        "action a-1 cannot go from stopping to running; allowed from there: cancelled, failed"
    )
    assert wrong_transition(State.SUCCEEDED, State.RUNNING, "a-1").endswith("nothing: it has settled")


def test_every_state_has_its_row_in_the_table() -> None:
    assert list(TRANSITIONS) == list(State)


def test_an_action_that_has_settled_never_changes_again() -> None:
    assert [state for state in State if state.terminal] == [State.SUCCEEDED, State.FAILED, State.CANCELLED]


def test_what_is_stopping_still_holds_its_units() -> None:
    assert [state for state in State if state.holds_units] == [State.STARTING, State.RUNNING, State.STOPPING]


def test_every_state_can_be_reached_and_every_live_one_can_settle() -> None:
    reached = {State.QUEUED}
    for _ in State:
        reached |= {after for before in reached for after in TRANSITIONS[before]}
    assert reached == set(State)
    settles = {state for state in State if state.terminal}
    for _ in State:
        settles |= {state for state in State if settles & set(TRANSITIONS[state])}
    assert settles == set(State)


# ---- what an action may say -------------------------------------------------------------------------------------


def refusal(**fields: object) -> InvalidAction:
    with pytest.raises(InvalidAction) as caught:
        Action(**{"id": "a-1", "demand": DEMAND, **fields})  # type: ignore[arg-type]  # some fields are wrong on purpose
    return caught.value


@pytest.mark.parametrize("field", ["id", "run"])
@pytest.mark.parametrize("value", ["", "x" * (ID_LENGTH_MAX + 1), "two\nlines", "\x00", "\ud800"], ids=repr)
def test_an_id_that_cannot_stand_in_a_log_line_is_refused(field: str, value: str) -> None:
    error = refusal(**{field: value})
    assert (error.field, error.value, error.expected) == (field, value, "1 to 200 printable characters")


@pytest.mark.parametrize("field", ["task", "trajectory", "sandbox", "kind", "key", "service"])
@pytest.mark.parametrize("value", ["x" * (ID_LENGTH_MAX + 1), "tab\t"], ids=["long", "tab"])
def test_a_tag_that_cannot_stand_in_a_log_line_is_refused(field: str, value: str) -> None:
    error = refusal(**{field: value})
    assert (error.field, error.value, error.expected) == (field, value, "at most 200 printable characters")


@pytest.mark.parametrize("field", ["duration_s", "timeout_s", "deadline_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_not_positive_and_finite_is_refused(field: str, value: float) -> None:
    error = refusal(**{field: value})
    assert (error.field, error.expected) == (field, "a positive, finite number of seconds")
    assert error.value is value
    assert str(error) == f"{field}: expected a positive, finite number of seconds, got {value!r}"


@pytest.mark.parametrize("value", [PRIORITY_MAX + 1, -PRIORITY_MAX - 1, 1.5, math.nan])
def test_a_priority_that_is_no_whole_number_within_its_limits_is_refused(value: float) -> None:
    error = refusal(priority=value)
    assert (error.field, error.expected) == ("priority", "a whole number from -100 to 100")
    assert error.value is value


def test_the_limits_themselves_are_within_the_limits() -> None:
    long = "x" * ID_LENGTH_MAX
    for priority in (-PRIORITY_MAX, PRIORITY_MAX):
        action = Action(id=long, demand=DEMAND, run=long, task=long, key=long, service=long, priority=priority)
        assert (action.id, action.priority) == (long, priority)


def test_ids_in_any_script_are_welcome() -> None:
    assert Action(id="проба 7/α→β", demand=DEMAND, run="mañana").id == "проба 7/α→β"


def test_tags_and_times_may_be_left_out() -> None:
    action = Action(id="a-1", demand=DEMAND)
    assert (action.run, action.kind, action.task, action.sandbox, action.service) == ("default", "exec", "", "", "")
    assert (action.duration_s, action.timeout_s, action.deadline_s, action.idempotent) == (None, None, None, False)


def test_an_action_does_not_change_after_it_was_made() -> None:
    action = Action(id="a-1", demand=DEMAND)
    with pytest.raises(AttributeError):
        action.priority = 5  # type: ignore[misc]  # that is the point


# ---- how it ends ------------------------------------------------------------------------------------------------

SECONDS = st.floats(0.0, 1e6)


@given(SECONDS, SECONDS, SECONDS)
def test_completion_time_is_waiting_and_execution_and_overhead(waiting: float, execution: float, ours: float) -> None:
    outcome = Outcome(action="a", status=Status.SUCCEEDED, waiting_s=waiting, execution_s=execution, overhead_s=ours)
    assert outcome.act_s == pytest.approx(waiting + execution + ours)
    assert all(outcome.act_s >= part for part in (waiting, execution, ours))


@pytest.mark.parametrize("field", ["cpu_s", "throttled_s", "starved_s", "overhead_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, "1", None])
def test_a_measured_time_that_is_no_time_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        Usage(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
    assert (caught.value.field, caught.value.expected) == (f"usage.{field}", "a finite number of seconds, at least 0")
    assert caught.value.value is value


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("memory_peak_bytes", -1, "usage.memory_peak_bytes"),
        ("memory_peak_bytes", 1.5, "usage.memory_peak_bytes"),
        ("memory_peak_bytes", True, "usage.memory_peak_bytes"),
        ("spent", {"tokens": -1}, "usage.spent['tokens']"),
        ("spent", {"tokens": 2.5}, "usage.spent['tokens']"),
        ("spent", {"tokens": True}, "usage.spent['tokens']"),
        ("spent", [7], "usage.spent"),
    ],
)
def test_a_measured_count_that_is_no_whole_number_is_refused(field: str, value: object, named: str) -> None:
    with pytest.raises(InvalidInput, match="whole number") as caught:
        Usage(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.field == named


def test_what_was_measured_may_be_nothing_or_a_whole_number_of_seconds() -> None:
    usage = Usage(cpu_s=0, throttled_s=3, starved_s=0.0, overhead_s=1, memory_peak_bytes=0, spent={"tokens": 0})
    assert (usage.throttled_s, usage.spent) == (3, {"tokens": 0})


def test_an_outcome_that_never_ran_took_no_time() -> None:
    outcome = Outcome(action="a", status=Status.REFUSED, reason="queue_max")
    assert (outcome.act_s, outcome.attempts, outcome.usage) == (0.0, 0, Usage())


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.value)
def test_an_action_and_its_outcome_survive_a_wire(status: Status) -> None:
    action = Action(id="a", demand=DEMAND, timeout_s=3.5, idempotent=True)
    outcome = Outcome(action="a", status=status, usage=Usage(cpu_s=1.25, spent={"tokens": 7}), attempts=2)
    for record in (action, outcome):
        assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5),
        ("run", None),
        ("task", 1),
        ("duration_s", "5"),
        ("timeout_s", True),
        ("demand", {"cpu": 1}),
        ("priority", True),
        ("idempotent", 1),
        ("idempotent", "no"),
        ("idempotent", None),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(field: str, value: object) -> None:
    fields = {"id": "a", "demand": Demand({"cpu": cores(1)}), field: value}
    with pytest.raises(InvalidAction) as caught:
        Action(**fields)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert caught.value.value == value
