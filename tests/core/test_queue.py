"""The queue: fair share over runs, ageing, elders, and pools that are closed to those behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.action import Action, Usage
from tangram.core.demand import Demand, cores, fixed, learned
from tangram.core.lanes import STALE_SPARE
from tangram.core.ledger import RECENT_S
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
    Effect,
    Finished,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Release,
    Reserve,
    RunChanged,
    Settle,
    Start,
    Started,
    Submit,
    Tick,
    Window,
    cpu_node,
)
from tangram.core.offers import Offers
from tangram.core.policies import policy
from tangram.core.policies.base import Begin, Decision
from tangram.core.policies.fixed import Fixed
from tangram.core.queue import ELDER_FACTOR, EXACT_LANES_MAX
from tangram.core.scheduler import Scheduler
from tangram.core.snapshot import Snapshot
from tangram.errors import InvariantError

Make = Callable[..., Any]

NODE = cpu_node("n0", 4)
API = Pool(kind="api", total=4)
ONE, TWO, THREE, FOUR = ({"cpu": cores(count)} for count in (1, 2, 3, 4))


# ---- order within a run -----------------------------------------------------------------------------------------


def test_higher_priority_goes_first_within_a_run_and_arrival_breaks_ties(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("all", FOUR)
    c.submit("a", TWO)
    c.submit("b", TWO, priority=1)
    c.submit("c", TWO, priority=1)
    c.run("all")
    assert c.starts() == ["b", "c"]


def test_a_priority_means_nothing_to_another_run(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("all", FOUR, run="x")
    c.submit("a", FOUR, run="x", priority=100)
    c.submit("b", FOUR, run="y")
    c.run("all")
    assert c.starts() == ["b"], "it is the turn of y"


def test_a_size_aware_policy_starts_short_actions_first_and_passes_over_what_does_not_fit(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive")
    c.submit("all", FOUR, duration_s=1.0)
    c.submit("long", TWO, duration_s=100.0)
    c.submit("wide", FOUR, duration_s=1.0)
    c.submit("short", TWO, duration_s=1.0)
    c.run("all")
    assert c.starts() == ["short", "long"]


# ---- fair share -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [Window(seconds=60.0), Window(seconds=60.0, sliding=True)])
def test_what_a_run_spent_of_a_quota_long_ago_does_not_count_against_it(cluster: Make, window: Window) -> None:
    c = cluster(*cpu_node("n0", 4), Pool(kind="tokens", total=10, window=window))
    c.submit("spent", {"tokens": fixed(9)}, run="x")
    c.run("spent")
    for name, run in (("ax", "x"), ("ay", "y"), ("by", "y"), ("cy", "y")):
        c.submit(name, {"cpu": cores(1)}, run=run)
    c.submit("dx", {"cpu": cores(1)}, run="x")
    c.submit("dy", {"cpu": cores(1)}, run="y")
    c.now = 100.0  # the quota is whole again, and no action has demanded it since
    c.run("ay")
    assert c.starts() == ["dy"], "within the last minute x had more"
    c.now = 1000.0
    c.run("by")
    assert c.starts() == ["dx"]


def test_the_run_with_the_smaller_share_goes_first(cluster: Make) -> None:
    c = cluster(*NODE)
    for number in range(8):
        c.submit(f"x{number}", ONE, run="x")
    for number in range(4):
        c.submit(f"y{number}", ONE, run="y")
    order = []
    for number in range(4):
        c.run(f"x{number}")
        order.extend(c.starts())
    assert order == ["y0", "y1", "x4", "x5"], "until each has half"


def test_weights_divide_a_pool_in_their_ratio(cluster: Make) -> None:
    c = cluster(*NODE)
    c.send(RunChanged(run="x", weight=3.0))
    c.submit("all", FOUR, run="z")
    for number in range(4):
        c.submit(f"x{number}", ONE, run="x")
        c.submit(f"y{number}", ONE, run="y")
    c.run("all")
    assert sorted(c.starts()) == ["x0", "x1", "x2", "y0"]


def test_the_dominant_resource_decides_whose_turn_it_is(cluster: Make) -> None:
    c = cluster(*NODE, API)
    c.submit("calls", {"api": fixed(3)}, run="caller")
    c.submit("cores", {"cpu": cores(2)}, run="computer")
    c.submit("all", TWO, run="other")
    c.submit("b", TWO, run="caller")
    c.submit("a", TWO, run="computer")
    c.run("all")
    assert c.starts() == ["a"], "half of the cores is less than three quarters of the calls"


def test_a_run_alone_gets_everything(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("y", ONE, run="y")
    for number in range(3):
        c.submit(f"x{number}", ONE, run="x")
    assert len(c.running()) == 4


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    ends=st.lists(st.integers(0, 999), min_size=10, max_size=60),
    name=st.sampled_from(["fcfs", "fixed:1", "paper", "adaptive"]),
)
def test_no_run_gets_ahead_of_a_waiting_one_by_more_than_the_action_that_starts(
    weights: list[float], sizes: list[int], ends: list[int], name: str
) -> None:
    """The bound of fair share: the run that starts was the poorest of all waiting runs, so that afterwards its weighted
    share exceeds that of no waiting run by more than its own action: share_i <= share_j + size_i / (total * weight_i).

    A strict policy keeps a pool for the poorest run's next action until it fits. Under one that lets others pass, what
    is not enough for that action goes to smaller ones, so there all sizes are equal."""
    total = 12
    if name == "adaptive":
        sizes = sizes[:1]
    scheduler = Scheduler(policy(name), (Pool(kind="api", total=total),), limits=Limits(ageing_s=1e9))
    running: dict[str, int] = {}
    shares, waiting, count = [0.0] * len(weights), [0] * len(weights), 0

    def take(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Settle):
                run = int(effect.outcome.action.partition(".")[0])
                shares[run] -= running.pop(effect.outcome.action) / total / weights[run]
            elif isinstance(effect, Start):
                run = int(effect.action.run)
                assert shares[run] <= min(shares[j] for j in range(len(weights)) if waiting[j]) + 1e-9
                running[effect.action.id] = effect.grant.shares[0].reserved
                shares[run] += running[effect.action.id] / total / weights[run]
                waiting[run] -= 1

    def submit(run: int) -> None:
        nonlocal count
        demand = Demand({"api": fixed(sizes[count % len(sizes)])})
        waiting[run] += 1
        count += 1
        action = Action(id=f"{run}.{count}", run=str(run), demand=demand, duration_s=1.0)
        take(scheduler.handle(Submit(action=action), 0.0))

    for run, weight in enumerate(weights):
        scheduler.handle(RunChanged(run=str(run), weight=weight), 0.0)
    for number in range(total * len(weights)):
        submit(number % len(weights))
    for end in ends:
        action = list(running)[end % len(running)]
        take(scheduler.handle(Started(action=action), 0.0))
        take(scheduler.handle(Finished(action=action), 0.0))
        submit(int(action.partition(".")[0]))


def test_runs_whose_actions_take_a_whole_pool_take_turns(cluster: Make) -> None:
    c = cluster(*NODE)
    order = []
    for number in range(6):
        for run in "xyz":
            c.submit(f"{run}{number}", FOUR, run=run)
    while c.running():
        order.extend(c.running())
        c.run(c.running()[0])
    assert [name[0] for name in order] == list("xyz") * 6


def turns(c: Any, seconds_by_run: dict[str, float], total_s: float, **fields: Any) -> dict[str, float]:
    """By run, for how long it had the whole pool: always one acts, and each has another one that waits."""
    had = dict.fromkeys(seconds_by_run, 0.0)
    for number in range(2):
        for run in had:
            c.submit(f"{run}{number}", FOUR, run=run, **(fields.get(run) or {}))
    number = 2
    while c.now < total_s:
        name = c.running()[0]
        run = name.rstrip("0123456789")
        c.run(name, seconds_by_run[run])
        had[run] += seconds_by_run[run]
        c.submit(f"{run}{number}", FOUR, run=run, **(fields.get(run) or {}))
        number += 1
    return had


@pytest.mark.parametrize("name", ["fcfs", "paper", "adaptive"])
def test_runs_that_take_turns_at_a_whole_pool_have_it_in_the_ratio_of_their_weights(cluster: Make, name: str) -> None:
    c = cluster(*NODE, policy=name, ageing_s=1e9)
    c.send(RunChanged(run="x", weight=2.0))
    had = turns(c, {"x": 3.0, "y": 2.0}, 600.0)
    assert had["x"] / had["y"] == pytest.approx(2.0, rel=0.1), "however long their actions take"


def test_memory_of_resting_sandboxes_does_not_keep_a_run_from_cores_that_another_one_fills(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4, memory_gib=4.0), ageing_s=1e9)
    c.send(Reserve(sandbox="small", memory=64, run="x"))
    c.send(Reserve(sandbox="large", memory=1024, run="y"))
    had = turns(c, {"x": 0.5, "y": 0.5}, 600.0, x={"sandbox": "small"}, y={"sandbox": "large"})
    assert had["y"] / had["x"] > 1 / 3, "it counts, as a quarter of the memory is a share, but is not all"


def test_a_new_run_alternates_at_once_with_the_run_that_had_the_pool(cluster: Make) -> None:
    c = cluster(*NODE, ageing_s=1e9)
    for number in range(40):
        c.submit(f"x{number}", FOUR, run="x")
    for _ in range(10):
        c.run(c.running()[0], 1.0)
    for number in range(40):
        c.submit(f"y{number}", FOUR, run="y")
    order = []
    for _ in range(24):
        c.run(c.running()[0], 1.0)
        order.append(c.running()[0][0])
    assert order == list("yx") * 12


# ---- ageing -----------------------------------------------------------------------------------------------------


def test_past_ageing_no_later_action_of_its_run_overtakes(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive", ageing_s=10.0)
    c.submit("held", THREE, duration_s=1.0)
    c.submit("wide", FOUR, duration_s=1.0)
    c.submit("small", ONE, duration_s=1.0)
    assert c.starts() == ["small"], "it passes what does not fit"
    c.started("held", "small")
    c.now = 10.0
    c.finished("small")
    c.submit("late", ONE, duration_s=0.1)
    assert c.starts() == [], "now the wide one has aged and keeps what it lacks"
    c.submit("elsewhere", ONE, run="other", duration_s=0.1)
    assert c.starts() == ["elsewhere"], "a poorer run is not held up by that"
    c.finished("held")
    assert c.starts() == []
    c.run("elsewhere")
    assert c.starts() == ["wide"]


def test_among_the_aged_the_oldest_goes_first_whatever_its_size_or_priority(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive", ageing_s=10.0)
    c.submit("all", FOUR, duration_s=1.0)
    c.submit("old", FOUR, duration_s=100.0)
    c.submit("short", FOUR, duration_s=1.0, priority=5)
    c.started("all")
    c.now = 10.0
    c.finished("all")
    assert c.starts() == ["old"]


def test_an_aged_action_closes_only_the_pools_of_its_demand(cluster: Make) -> None:
    c = cluster(*NODE, API, policy="adaptive", ageing_s=10.0)
    c.submit("all", FOUR)
    c.submit("aged", TWO)
    c.now = 20.0
    c.submit("call", {"api": fixed(1)})
    assert c.starts() == ["call"]


def test_an_aged_action_on_one_node_does_not_stop_its_run_on_another(cluster: Make) -> None:
    c = cluster(*NODE, *cpu_node("n1", 4), policy="adaptive", ageing_s=10.0)
    for box, node in (("here", "n0"), ("there", "n1")):
        c.send(Reserve(sandbox=box, memory=0, node=node))
    c.submit("all", THREE, sandbox="here")
    c.submit("aged", FOUR, sandbox="here")
    c.started("all")
    c.now = 15.0
    c.submit("late here", ONE, sandbox="here")
    assert c.starts() == [], "the aged one has closed its pool"
    c.submit("late there", ONE, sandbox="there")
    assert c.starts() == ["late there"]


def test_an_elder_goes_before_everything_later_of_whatever_run(cluster: Make) -> None:
    """The wide action of a run with a large share elsewhere would starve behind poorer runs."""
    ageing_s = 10.0
    c = cluster(*NODE, API, policy="adaptive", ageing_s=ageing_s)
    c.submit("rich", {"api": fixed(4)}, run="rich")
    for number in range(2):
        c.submit(f"poor{number}", TWO, run="poor")
        c.started(f"poor{number}")
    c.submit("wide", FOUR, run="rich")
    overtaken = []
    number = 2
    while "wide" not in c.running():
        c.now += 3.0
        c.submit(f"poor{number}", TWO, run="poor")
        c.started(*c.starts())
        c.finished(f"poor{number - 2}")
        overtaken.extend((c.now, name) for name in c.starts() if name != "wide")
        c.started(*c.starts())
        number += 1
        assert c.now < 60.0, c.explain("wide")
    last = max(at for at, _ in overtaken)
    assert ageing_s < last <= ELDER_FACTOR * ageing_s + 3.0, "until then a poorer run goes first, not longer"


def test_two_elders_do_not_wait_for_each_other(cluster: Make) -> None:
    c = cluster(*NODE, API, policy="adaptive", ageing_s=10.0)
    c.submit("cores", FOUR, run="x")
    c.submit("calls", {"api": fixed(4)}, run="y")
    c.submit("a", {"cpu": cores(4), "api": fixed(4)}, run="x")
    c.submit("b", {"cpu": cores(4), "api": fixed(4)}, run="y")
    c.started("cores", "calls")
    c.now = 100.0
    c.finished("cores")
    c.finished("calls")
    assert c.starts() == ["a"]
    c.run("a")
    assert c.starts() == ["b"]


# ---- closed pools -----------------------------------------------------------------------------------------------


def test_a_cancelled_blocker_lets_those_behind_it_go(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("all", TWO)
    c.submit("wide", FOUR)
    c.submit("small", ONE)
    assert c.running() == ["all"]
    c.cancel("wide")
    assert c.starts() == ["small"]


def test_a_cancelled_blocker_on_one_node_unblocks_actions_without_a_place(cluster: Make) -> None:
    c = cluster(*NODE)
    c.send(Reserve(sandbox="box", memory=0, node="n0"))
    c.submit("all", TWO)
    c.submit("wide", FOUR, sandbox="box")
    c.submit("small", ONE)
    assert c.running() == ["all"]
    c.cancel("wide")
    assert c.starts() == ["small"]


def test_an_action_without_hope_closes_nothing(cluster: Make) -> None:
    c = cluster(*NODE, API, stranded_s=100.0)
    c.submit("all", FOUR)
    c.submit("wide", {"cpu": cores(4), "api": fixed(1)})
    c.submit("small", ONE)
    c.send(PoolChanged(pool=Pool(kind="cpu", node="n0", total=2000)))
    assert c.starts() == [], "four cores are still held"
    c.run("all")
    assert c.starts() == ["small"], "no pool can hold the wide one now"
    c.run("small")
    c.send(PoolChanged(pool=NODE[0]))
    assert c.starts() == ["wide"]


def test_a_call_without_hope_closes_no_quota(cluster: Make) -> None:
    c = cluster(API, Pool(kind="search", total=4))
    c.submit("all", {"api": fixed(4)})
    c.submit("many", {"api": fixed(4), "search": fixed(1)})
    c.submit("few", {"api": fixed(1)})
    c.send(PoolChanged(pool=Pool(kind="api", total=2)))
    c.run("all")
    assert c.starts() == ["few"]


def test_an_aged_action_without_a_place_keeps_one_node_for_itself_and_leaves_the_rest_alone(cluster: Make) -> None:
    c = cluster(*NODE, *cpu_node("n1", 4), policy="adaptive", ageing_s=10.0)
    for box, node in (("here", "n0"), ("there", "n1")):
        c.send(Reserve(sandbox=box, memory=0, node=node))
    c.submit("a", TWO, sandbox="here")
    c.submit("b", ONE, sandbox="there")
    c.submit("c", TWO, sandbox="there")
    c.submit("wide", FOUR)
    c.now = 11.0
    c.submit("late here", ONE, sandbox="here")
    assert c.starts() == [], "n0 has more free, so the aged one waits there"
    c.submit("late there", ONE, sandbox="there")
    assert c.starts() == ["late there"]
    c.run("late there")
    c.run("c")
    c.submit("later there", ONE, sandbox="there")
    assert c.starts() == ["later there"], "n1 has more free now, but it stays with the node that it waits for"
    c.send(NodeChanged(node="n0", state=NodeState.DRAINING))
    assert c.starts() == ["late here"], "n0 takes no new action: what was kept there is released"
    c.submit("last there", ONE, sandbox="there")
    assert c.starts() == [], "now it waits for n1"
    c.run("b")
    c.run("later there")
    assert c.starts() == ["wide"]


def test_of_two_actions_that_wait_behind_each_other_the_one_whose_turn_it_is_starts(cluster: Make) -> None:
    """The first action changes with the shares, and no lane is woken by that."""
    c = cluster(API, Pool(kind="search", total=4), Pool(kind="other", total=4))
    c.submit("calls", {"api": fixed(4)}, run="z")
    c.submit("searches", {"search": fixed(4)}, run="z")
    c.submit("both", {"api": fixed(4), "search": fixed(4)}, run="y")
    c.submit("one", {"api": fixed(4)}, run="x")
    c.run("calls")
    assert c.starts() == [], "neither run was ever served: y came first, and keeps the calls until it has both"
    assert c.explain("one").startswith("one waits behind both, which goes first")
    c.submit("more", {"other": fixed(4)}, run="y")
    assert c.starts() == ["more", "one"], "y has more now, so it is x's turn"
    c.run("searches")
    assert c.starts() == []
    c.run("one")
    assert c.starts() == ["both"]


def test_what_was_closed_on_a_node_that_died_is_closed_no_more(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4, 1.0), *cpu_node("n1", 4, 1.0), ageing_s=10.0)
    c.send(Reserve(sandbox="fills n1", memory=800, node="n1"))
    c.send(Reserve(sandbox="on n0", memory=0, node="n0"))
    c.send(Reserve(sandbox="new", memory=800))
    c.submit("fill", FOUR, sandbox="on n0")
    c.submit("busy", FOUR, sandbox="fills n1")
    c.submit("a", ONE, sandbox="new")
    c.now = 11.0
    c.submit("later", ONE)
    assert c.scheduler.entries["a"].target == "n0", "it has aged, and keeps the cores where there is memory for it"
    c.send(NodeChanged(node="n0", state=NodeState.DOWN))
    c.run("busy")
    assert c.starts() == ["later"], "it lacks memory now, and no cores"
    c.send(Release(sandbox="fills n1"))
    assert c.starts() == ["a"]


def test_check_detects_a_lane_without_a_wake(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("all", FOUR)
    c.submit("a", ONE)
    lane = c.scheduler.entries["a"].lane
    for waiters in lane.blocked_on:
        waiters.lanes.clear()
    with pytest.raises(InvariantError, match="will not wake it"):
        c.scheduler.check()
    lane.blocked_on = ()
    with pytest.raises(InvariantError, match="neither open nor set aside"):
        c.scheduler.check()


def test_check_finds_an_idle_pool_that_is_withheld(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("all", FOUR)
    c.submit("a", ONE)
    c.started("all")
    c.scheduler.queue.wake = lambda pool, **_: None
    with pytest.raises(
        InvariantError, match="a waits although cpu@n0 is idle, could hold it and is not closed"
    ) as caught:
        c.finished("all")
    assert caught.value.story


# ---- an idle pool is never withheld ------------------------------------------------------------------------------


def test_an_idle_smaller_node_is_offered_when_the_policy_does_not_want_the_other(cluster: Make) -> None:
    """fixed:2 waits for two cores on the node that has most left; on the small node there never are two."""
    c = cluster(*cpu_node("n0", 4), *cpu_node("n1", 0.5), policy="fixed:2")
    c.submit("most", THREE)
    c.submit("a", {"cpu": cores(0.5, 4)})
    assert (c.start("a").grant.node, c.start("a").grant.shares[0].reserved) == ("n1", 500)


def test_an_idle_smaller_node_is_offered_with_the_quotas_that_it_takes(cluster: Make) -> None:
    c = cluster(API, *cpu_node("n0", 4), *cpu_node("n1", 0.5), policy="fixed:2")
    c.submit("most", THREE)
    c.submit("a", {"api": fixed(1), "cpu": cores(0.5, 4)})
    assert c.start("a").grant.node == "n1"


def test_a_policy_that_does_not_take_the_idle_node_either_stops(cluster: Make) -> None:
    class OnlyOn(Fixed):
        def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
            for candidate in snapshot.candidates():
                if candidate.node == "n0" and candidate.entry.id != "a":
                    yield Begin(candidate.entry, candidate.node)

    c = cluster(*cpu_node("n0", 4), *cpu_node("n1", 0.5), policy=OnlyOn(2))
    c.submit("most", THREE)
    with pytest.raises(InvariantError, match="policy fixed:2 passed over a although cpu@n1 is unused"):
        c.submit("a", {"cpu": cores(0.5, 4)})


def test_an_action_that_was_passed_over_on_one_node_is_tried_again_when_another_becomes_idle(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4), *cpu_node("n1", 0.5), policy="fixed:2")
    c.submit("most", THREE)
    c.submit("small", {"cpu": fixed(400)})
    assert c.start("small").grant.node == "n1"
    c.submit("a", {"cpu": cores(0.5, 4)})
    assert c.starts() == []
    c.run("small")
    assert c.start("a").grant.node == "n1"


def test_an_action_that_was_passed_over_on_one_node_is_tried_again_when_an_idle_one_has_the_memory(
    cluster: Make,
) -> None:
    c = cluster(*cpu_node("n0", 4, 1.0), *cpu_node("n1", 0.5, 0.5), policy="fixed:2")
    c.submit("most", THREE)
    c.send(Reserve(sandbox="old", memory=400, node="n1"))
    c.send(Reserve(sandbox="new", memory=400))
    c.submit("a", {"cpu": cores(0.5, 4)}, sandbox="new")
    assert c.starts() == []
    c.send(Release(sandbox="old"))
    assert c.start("a").grant.node == "n1"


def test_a_pool_that_shrank_gives_all_it_has_to_what_is_learned(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive")
    c.submit("all", FOUR)
    c.submit("a", {"cpu": learned()})
    c.send(PoolChanged(pool=Pool(kind="cpu", node="n0", total=500)))
    c.run("all")
    assert c.start("a").grant.shares[0].reserved == 500


def test_an_action_that_returns_to_a_lane_waits_there_once(cluster: Make) -> None:
    """A sibling with other wants comes and goes."""
    c = cluster(*NODE, *cpu_node("n1", 1))
    c.submit("all", FOUR)
    c.submit("tiny", ONE)
    c.send(Reserve(sandbox="b", memory=0))
    c.submit("a", ONE, sandbox="b")
    for _ in range(3):
        c.submit("wide", FOUR, sandbox="b", priority=-1)
        c.cancel("wide")
    c.run("all")
    assert c.starts() == ["a"]


# ---- lanes ------------------------------------------------------------------------------------------------------


def test_equal_needs_share_a_lane_and_beyond_a_limit_amounts_of_one_power_of_two_do(cluster: Make) -> None:
    c = cluster(Pool(kind="tokens", total=1_000))
    c.submit("all", {"tokens": fixed(1_000)})
    for units in range(1, 200):
        c.submit(f"a{units}", {"tokens": fixed(units)})
        c.submit(f"b{units}", {"tokens": fixed(units)})
    lanes = c.scheduler.queue.runs["default"].lanes
    assert EXACT_LANES_MAX <= len(lanes) <= EXACT_LANES_MAX + 9
    c.run("all")
    assert c.starts()[:4] == ["a1", "b1", "a2", "b2"]


def test_an_action_behind_a_cancelled_one_of_its_lane_is_tried_at_once() -> None:
    scheduler = Scheduler(policy("adaptive"), (Pool(kind="api", total=8),))
    for name, units in (("holds", 3), ("big", 7), ("middle", 4)):
        scheduler.handle(Submit(action=Action(id=name, demand=Demand({"api": fixed(units)}))), 0.0)
    scheduler.handle(Started(action="holds"), 0.0)
    scheduler.check()
    assert scheduler.statistics().pools["api"]["held"] == 7, "middle needs no more than what is free"


@pytest.mark.parametrize("name", ["fcfs", "fixed:2", "paper", "adaptive"])
def test_a_pool_that_shrank_below_the_first_of_a_lane_serves_the_rest(name: str) -> None:
    scheduler = Scheduler(policy(name), (Pool(kind="api", total=8),), limits=Limits(stranded_s=10.0))
    for action, units in (("holds", 3), ("big", 7), ("middle", 6)):
        scheduler.handle(Submit(action=Action(id=action, demand=Demand({"api": fixed(units)}))), 0.0)
    scheduler.handle(Started(action="holds"), 0.0)
    scheduler.handle(PoolChanged(pool=Pool(kind="api", total=6)), 1.0)
    scheduler.handle(Finished(action="holds"), 2.0)
    scheduler.handle(Tick(), 20.0)
    scheduler.check()
    assert "big" not in scheduler.entries
    assert scheduler.statistics().pools["api"]["held"] == 6


def test_sandboxes_of_different_size_wait_in_different_lanes(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4, memory_gib=1.0), policy="adaptive")
    for name, memory in (("big", 600), ("bigger", 1000), ("small", 100)):
        c.send(Reserve(sandbox=name, memory=memory))
    c.submit("a", ONE, sandbox="big")
    c.submit("b", ONE, sandbox="bigger")
    c.submit("c", ONE, sandbox="small")
    assert c.starts() == ["c"], "it does not wait for the memory that another one lacks"


def test_slots_of_departed_actions_do_not_pile_up(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive", ageing_s=1e9)
    c.submit("all", FOUR, duration_s=1.0)
    c.submit("first", FOUR, duration_s=100.0)
    lane = c.scheduler.entries["first"].lane
    for number in range(500):
        c.submit(f"a{number}", FOUR, duration_s=1.0)
        c.scheduler.handle(Cancel(action=f"a{number}"), 0.0)
    assert lane.waiting == 1
    assert max(len(lane.heap), len(lane.fifo)) <= 2 * lane.waiting + STALE_SPARE + 1


def test_a_start_that_fails_puts_an_action_back_between_its_neighbours(cluster: Make) -> None:
    c = cluster(Pool(kind="api", total=1))
    for name in "abc":
        c.submit(name, {"api": fixed(1)}, priority=1 if name == "b" else 0)
    c.run("a")
    assert c.starts() == ["b"]
    c.submit("d", {"api": fixed(1)}, priority=1)
    c.start_failed("b")
    assert c.starts() == ["b"]
    c.run("b")
    assert c.starts() == ["d"]
    c.run("d")
    assert c.starts() == ["c"]


def test_what_finished_costs_nothing_later(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive")
    for number in range(300):
        c.submit(f"a{number}", {"cpu": learned()}, timeout_s=5.0, deadline_s=1000.0, key=f"k{number % 3}")
        c.scheduler.handle(Started(action=f"a{number}"), c.now)
        c.now += 0.5
        c.scheduler.handle(Finished(action=f"a{number}", usage=Usage(cpu_s=0.1)), c.now)
    s = c.scheduler
    assert (s.entries, s.grants.holding, s.queue.waiting) == ({}, {}, 0)
    [lane] = s.queue.runs["default"].lanes.values()
    assert max(len(lane.heap), len(lane.fifo)) <= STALE_SPARE


def test_an_action_that_leaves_a_lane_lets_the_next_be_tried(cluster: Make) -> None:
    c = cluster(Pool(kind="tokens", total=1000), policy="adaptive")
    c.submit("half", {"tokens": fixed(350)})
    c.submit("rest", {"tokens": fixed(650)})
    for units in range(1, EXACT_LANES_MAX + 1):
        c.submit("lane", {"tokens": fixed(units)})
        c.cancel("lane")
    c.submit("more", {"tokens": fixed(700)}, duration_s=1.0)
    c.submit("less", {"tokens": fixed(600)}, duration_s=2.0)
    assert c.scheduler.entries["more"].lane is c.scheduler.entries["less"].lane
    c.run("rest")
    assert c.starts() == []
    c.cancel("more")
    assert c.starts() == ["less"]


def test_a_draining_node_wakes_no_lane_in_vain(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    assert c.send(NodeChanged(node="n0", state=NodeState.DRAINING)) == [*c.effects]
    assert c.starts() == []
    c.run("a")
    assert c.starts() == [], "a draining node takes no action without a sandbox there"
    c.send(NodeChanged(node="n0", state=NodeState.UP))
    assert c.starts() == ["b"]


# ---- blocked actions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "later_s"), [("fcfs", 0.0), ("paper", 0.0), ("adaptive", 700.0)])
def test_a_node_that_could_not_hold_the_first_is_not_kept_for_it(cluster: Make, policy: str, later_s: float) -> None:
    c = cluster(*cpu_node("g", 4), Pool(kind="gpu", node="g", total=1), *cpu_node("c", 64), policy=policy)
    c.submit("holds", {"gpu": fixed(1), "cpu": cores(4)})
    c.started("holds")
    c.submit("first", {"gpu": fixed(1), "cpu": cores(1)})
    c.now = later_s
    c.submit("second", {"cpu": cores(1)})
    assert c.starts() == ["second"]
    assert c.start("second").grant.node == "c"


@pytest.mark.parametrize(("policy", "later_s"), [("fcfs", 0.0), ("adaptive", 700.0)])
def test_a_node_that_is_too_small_for_the_first_is_not_kept_for_it(cluster: Make, policy: str, later_s: float) -> None:
    c = cluster(*cpu_node("large", 8), *cpu_node("small", 4), policy=policy)
    c.submit("holds", {"cpu": cores(8)})
    c.submit("first", {"cpu": cores(6)})
    c.now = later_s
    c.submit("second", {"cpu": cores(1)})
    assert c.starts() == ["second"]
    c.submit("third", {"cpu": cores(4)})
    assert c.starts() == [], "only three cores are left there"
    c.submit("fourth", {"cpu": cores(1)})
    assert c.starts() == ([] if policy == "fcfs" else ["fourth"]), "where order counts, the third goes first there"


@pytest.mark.parametrize(("policy", "later_s"), [("fcfs", 0.0), ("adaptive", 700.0)])
def test_an_action_that_becomes_first_is_started_at_once(cluster: Make, policy: str, later_s: float) -> None:
    c = cluster(Pool(kind="api", total=10), *cpu_node("n", 8), policy=policy)
    for number in range(7):
        c.submit(f"x{number}", {"api": fixed(1)}, run="r2")
    c.submit("b", {"cpu": cores(2)}, run="r1")
    c.submit("large", {"api": fixed(4)}, run="r0")
    c.now = later_s
    c.submit("small", {"api": fixed(1)}, run="r1")
    assert c.starts() == [], "r0 has less than r1, so its action goes first"
    c.submit("d", {"cpu": cores(4)}, run="r0")
    started = c.starts()
    c.now += RECENT_S
    c.send(Tick())
    assert [*started, *c.starts()] == ["d", "small"], "now r0 has had more"


@pytest.mark.parametrize("policy", ["fcfs", "adaptive"])
@pytest.mark.parametrize("many", ["run", "service"])
def test_one_look_is_enough_for_all_that_are_stopped_by_the_same(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, policy: str, many: str
) -> None:
    c = cluster(Pool(kind="gpu", node="n", total=2), policy=policy)
    for number in range(120):
        c.submit(f"a{number}", {"gpu": fixed(1)}, **{many: f"{many}{number}"})
    looks = []
    fit = Offers.fit
    monkeypatch.setattr(Offers, "fit", lambda offers, entry: looks.append(entry.id) or fit(offers, entry))
    c.run("a0")
    assert len(c.starts()) == 1
    assert len(looks) <= 4
