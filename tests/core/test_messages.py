"""Messages: the only door of the scheduler. Each survives a wire, none can be changed, wrong ones are refused."""

from __future__ import annotations

import math
import typing

import msgspec
import pytest

from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import CPU, GPU, MEMORY, Demand, cores, fixed, learned, one_of
from tangram.core.messages import (
    Cancel,
    Concluded,
    Effect,
    Event,
    Evicted,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Release,
    Reserve,
    Resident,
    Resize,
    Resized,
    Restore,
    RunChanged,
    Settle,
    Share,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    Used,
    WakeAt,
    Window,
    cpu_node,
)
from tangram.core.speedup import Amdahl, PowerLaw, Table
from tangram.core.trace import EVENTS
from tangram.errors import InvalidAction, InvalidConfig, InvalidInput

CALL = Action(
    id="call-1",
    demand=Demand({GPU: one_of(1, 2, 4), "tokens": fixed(900)}, Table((1, 2, 4), (1, 1.7, 2.5))),
    run="α",
    task="math",
    trajectory="t-7",
    kind="judge",
    key="long",
    service="judge-7b",
    duration_s=3.25,
    timeout_s=60.0,
    deadline_s=600.0,
    priority=-3,
    idempotent=True,
)
TESTS = Action(id="tests-1", demand=Demand({CPU: cores(1, 8)}, Amdahl(0.9)), sandbox="s-1")
SHELL = Action(id="shell-1", demand=Demand({CPU: learned()}), sandbox="s-1")
POWER = Action(id="power-1", demand=Demand({CPU: cores(0.5, 8)}, PowerLaw(0.6)))
GRANT = Grant("call-1", "g0", (Share("gpu@g0", 2, 2, (2, 3)), Share("tokens", 900, 900)), 2, 3, "call-0")
USAGE = Usage(
    cpu_s=1.5, throttled_s=0.25, starved_s=0.1, memory_peak_bytes=1 << 33, overhead_s=0.01, spent={"tokens": 812}
)

SAMPLES: list[Event | Effect] = [
    Submit(action=CALL),
    Submit(action=TESTS),
    Submit(action=SHELL),
    Submit(action=POWER),
    Cancel(action="call-1"),
    Cancel(action="call-1", reason="its run was revoked"),
    Started(action="call-1"),
    Started(action="call-1", attempt=2),
    StartFailed(action="call-1", reason="no such image", retry=False, attempt=1),
    Finished(action="call-1"),
    Finished(action="call-1", usage=USAGE, lost="node went away", attempt=2),
    Concluded(action=SHELL, outcome=Outcome(action="shell-1", status=Status.LOST, reason="it went away")),
    Resized(action="tests-1", limit=4000, attempt=1),
    Used(action="tests-1", cpu_s=1.5, attempt=1),
    Reserve(sandbox="s-1", memory=512),
    Reserve(sandbox="s-2", memory=0, run="α", node="n0"),
    Release(sandbox="s-1"),
    Resident(service="judge-7b", node="g0", devices=(2, 3)),
    Evicted(service="judge-7b", node="g0", devices=(2, 3)),
    PoolChanged(pool=Pool(kind=CPU, node="n0", total=8000, numa=(4000, 4000))),
    PoolChanged(pool=Pool(kind="search", total=20, window=Window(seconds=1.5, bucket=True))),
    NodeChanged(node="n0", state=NodeState.DRAINING),
    RunChanged(run="α", weight=2.5),
    Tick(),
    Start(action=CALL, grant=GRANT),
    Resize(action="tests-1", pool="cpu@n0", reserved=2000, limit=4000),
    Stop(action="call-1", reason="cancelled by the caller"),
    Restore(service="judge-7b", node="g0", devices=(0,)),
    WakeAt(at=12.5),
    Settle(
        outcome=Outcome(
            action="call-1",
            status=Status.TIMED_OUT,
            reason="timeout of 60 s passed",
            waiting_s=1.25,
            execution_s=60.0,
            overhead_s=0.5,
            usage=USAGE,
            attempts=2,
        )
    ),
    Refuse(action="call-1", limit="queue_max", reason="the queue holds 10 actions"),
]


def name(message: object) -> str:
    return type(message).__name__


def test_the_samples_cover_every_event_and_every_effect() -> None:
    assert {type(sample) for sample in SAMPLES} == {*typing.get_args(Event), *typing.get_args(Effect)}


def test_events_and_effects_have_nothing_in_common() -> None:
    assert not set(typing.get_args(Event)) & set(typing.get_args(Effect))
    assert typing.get_args(Event) == EVENTS


@pytest.mark.parametrize("message", SAMPLES, ids=name)
def test_every_message_survives_a_wire_as_itself(message: Event | Effect) -> None:
    encoded = msgspec.json.encode(message)
    assert msgspec.json.decode(encoded)["type"] == name(message)
    assert msgspec.json.decode(encoded, type=Event | Effect) == message


@pytest.mark.parametrize("message", SAMPLES, ids=name)
def test_no_message_can_be_changed_on_its_way(message: Event | Effect) -> None:
    for field in (*message.__struct_fields__, "anything"):
        with pytest.raises(AttributeError):
            setattr(message, field, None)


def test_a_message_of_an_unknown_type_is_not_decoded() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Explode'"):
        msgspec.json.decode(b'{"type": "Explode"}', type=Event)


# ---- pools ------------------------------------------------------------------------------------------------------


def test_a_pool_is_named_by_its_kind_and_node() -> None:
    assert Pool(kind=CPU, node="n0", total=1).name == "cpu@n0"
    assert Pool(kind="search", total=1).name == "search"


@pytest.mark.parametrize(
    ("fields", "field", "value", "expected"),
    [
        ({"kind": "", "total": 1}, "pool.kind", "", "a name without '@'"),
        ({"kind": "cpu@n0", "total": 1}, "pool.kind", "cpu@n0", "a name without '@'"),
        ({"kind": "api", "total": -1}, "pool api total", -1, "a whole number of units, at least 0"),
        ({"kind": "api", "total": 1.5}, "pool api total", 1.5, "a whole number of units, at least 0"),
        (
            {"kind": CPU, "node": "n0", "total": 8, "numa": (4, 3)},
            "pool cpu@n0 numa",
            (4, 3),
            "units that add up to the total, 8",
        ),
        (
            {"kind": CPU, "node": "n0", "total": 8, "numa": (9, -1)},
            "pool cpu@n0 numa",
            (9, -1),
            "units that add up to the total, 8",
        ),
        (
            {"kind": CPU, "node": "n0", "total": 8, "window": Window(seconds=1.0)},
            "pool cpu@n0 window",
            Window(seconds=1.0),
            "no window: the units of a node are held",
        ),
        ({"kind": MEMORY, "total": 8}, "pool memory node", "", "the node whose memory it is"),
        ({"kind": CPU, "total": 8}, "pool cpu node", "", "the node whose cpu it is"),
        ({"kind": "gpu", "total": 8}, "pool gpu node", "", "the node whose gpu it is"),
        ({"kind": 3, "total": 1}, "pool.kind", 3, "a name without '@'"),
        ({"kind": None, "total": 1}, "pool.kind", None, "a name without '@'"),
        (
            {"kind": "api", "total": 1, "node": 3},
            "pool api node",
            3,
            "the name of a node; empty: it belongs to none",
        ),
        ({"kind": "api", "total": True}, "pool api total", True, "a whole number of units, at least 0"),
        ({"kind": "api", "total": "1"}, "pool api total", "1", "a whole number of units, at least 0"),
        ({"kind": "api", "total": 1, "window": 60.0}, "pool api window", 60.0, "a Window; None: the units are held"),
        (
            {"kind": CPU, "node": "n0", "total": 8, "numa": (4.0, 4.0)},
            "pool cpu@n0 numa",
            (4.0, 4.0),
            "whole numbers of units",
        ),
    ],
)
def test_a_pool_that_cannot_be_meant_is_refused(
    fields: dict[str, typing.Any], field: str, value: object, expected: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Pool(**fields)
    assert (caught.value.field, caught.value.value, caught.value.expected) == (field, value, expected)


def test_a_pool_may_be_empty() -> None:
    assert Pool(kind="search", total=0).total == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, "x", True, None])
def test_a_window_that_never_ends_or_has_no_length_is_refused(seconds: typing.Any) -> None:
    with pytest.raises(InvalidConfig, match=r"window\.seconds: expected a positive, finite number of seconds"):
        Window(seconds=seconds)


@pytest.mark.parametrize("run", ["", None, 3])
def test_a_run_without_a_name_is_refused(run: typing.Any) -> None:
    with pytest.raises(InvalidConfig, match="run: expected a name of at least one character"):
        RunChanged(run=run, weight=1.0)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan, "2", True])
def test_a_run_without_a_positive_weight_is_refused(weight: typing.Any) -> None:
    with pytest.raises(InvalidConfig, match="weight of run α: expected a positive, finite number"):
        RunChanged(run="α", weight=weight)


def test_an_end_of_another_action_concludes_none() -> None:
    with pytest.raises(InvalidInput, match=r"concluded\.outcome: expected the outcome of action shell-1"):
        Concluded(action=SHELL, outcome=Outcome(action="other", status=Status.LOST))


# ---- machines ---------------------------------------------------------------------------------------------------


def test_a_machine_has_cores_and_if_it_counts_memory() -> None:
    assert cpu_node("n0", 2.5) == (Pool(kind=CPU, node="n0", total=2500),)
    assert cpu_node("n0", 8, memory_gib=1.5)[1] == Pool(kind=MEMORY, node="n0", total=1536)


@pytest.mark.parametrize("numa_nodes", [2, 3, 7])
def test_the_cores_of_a_machine_are_all_in_some_numa_node(numa_nodes: int) -> None:
    (pool,) = cpu_node("n0", 8, numa_nodes=numa_nodes)
    assert len(pool.numa) == numa_nodes
    assert sum(pool.numa) == pool.total == 8000
    assert max(pool.numa) - min(pool.numa) < numa_nodes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"cores": -1}, "a whole number of units, at least 0"),
        ({"cores": math.nan}, "a finite number of cores"),
        ({"cores": math.inf}, "a finite number of cores"),
        ({"cores": 8, "memory_gib": -1}, "a whole number of units, at least 0"),
        ({"cores": 8, "memory_gib": math.inf}, "a finite number of GiB"),
        ({"cores": 8, "numa_nodes": 0}, "at least one NUMA node"),
        ({"cores": 8, "numa_nodes": -2}, "at least one NUMA node"),
        ({"cores": 8, "numa_nodes": 1.5}, "at least one NUMA node"),
        ({"cores": "4"}, "a finite number of cores"),
        ({"cores": True}, "a finite number of cores"),
        ({"cores": 8, "memory_gib": "1"}, "a finite number of GiB"),
        ({"cores": 8, "node": ""}, "a name of at least one character"),
        ({"cores": 8, "node": 3}, "a name of at least one character"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(arguments: dict[str, typing.Any], expected: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        cpu_node(**{"node": "n0", **arguments})
    assert caught.value.expected == expected


# ---- sandboxes and services -------------------------------------------------------------------------------------


def test_a_sandbox_without_an_id_or_with_negative_memory_is_refused() -> None:
    with pytest.raises(InvalidAction, match="sandbox: expected an id of at least one character"):
        Reserve(sandbox="", memory=1)
    with pytest.raises(
        InvalidAction, match="memory of sandbox s-1: expected a whole number of MiB, at least 0, got -1"
    ):
        Reserve(sandbox="s-1", memory=-1)


@pytest.mark.parametrize("devices", [(), (0, 1, 2), (1, 2), (0, 2), (1, 0), (2, 3, 4, 5)], ids=str)
def test_a_service_lives_on_an_aligned_chunk_only(devices: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match="a chunk: 2\\*\\*k neighbouring devices") as caught:
        Resident(service="judge-7b", node="g0", devices=devices)
    assert caught.value.value == devices
