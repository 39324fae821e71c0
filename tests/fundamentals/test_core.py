"""The core in ten short steps. Read from top to bottom; `test_server.py` comes next.

A `Scheduler` takes one event at a time, with the time at which it happened, and returns effects: what to do now. It
never waits, reads a clock or runs anything, so a test can play all other parts: the agents that submit actions, and the
managers that start and finish them.
"""

from __future__ import annotations

from tangram import Action, Amounts, Demand, Limits, PowerLaw, Scheduler, Status, cores, cpu_node, fixed, policy
from tangram.core.messages import (
    Cancel,
    Event,
    Finished,
    Pool,
    Resize,
    Settle,
    Start,
    Started,
    Stop,
    Submit,
)
from tangram.core.trace import Header, Recorder, read


def submit(name: str, *, run: str = "default", seconds: float | None = None, **pools: Amounts) -> Submit:
    """Returns the submission of an action that needs these amounts of these pools."""
    demand = Demand(dict(pools), PowerLaw(0.5))
    return Submit(action=Action(id=name, run=run, demand=demand, duration_s=seconds))


def test_1_an_action_waits_starts_and_finishes() -> None:
    scheduler = Scheduler(policy("fcfs"), cpu_node("node", cores=1))

    # The pool is free, so the first action starts at once. The grant contains its share.
    [start] = scheduler.handle(submit("first", cpu=cores(1)), now=0.0)
    assert isinstance(start, Start)
    assert start.grant.node == "node"
    assert start.grant.shares[0].reserved == 1000  # CPU counts in milli-cores
    assert scheduler.handle(submit("second", cpu=cores(1)), now=1.0) == []  # no effect: it waits

    scheduler.handle(Started(action="first"), now=2.0)  # starting took two seconds
    settle, start = scheduler.handle(Finished(action="first"), now=7.0)
    assert isinstance(settle, Settle)
    assert isinstance(start, Start)

    # The outcome divides the time. The same call grants the core to the next action.
    outcome = settle.outcome
    assert outcome.status is Status.SUCCEEDED
    assert (outcome.waiting_s, outcome.overhead_s, outcome.execution_s) == (0.0, 2.0, 5.0)
    assert outcome.act_s == 7.0
    assert start.action.id == "second"


def test_2_cores_are_held_only_while_an_action_runs() -> None:
    scheduler = Scheduler(policy("fcfs"), cpu_node("node", cores=4))
    cpu = scheduler.ledger.pools["cpu@node"]
    assert (cpu.free, cpu.held) == (4000, 0)
    scheduler.handle(submit("a", cpu=cores(3)), now=0.0)
    assert (cpu.free, cpu.held) == (1000, 3000)
    scheduler.handle(Started(action="a"), now=0.0)
    scheduler.handle(Finished(action="a"), now=1.0)
    # Between two actions of an agent nothing is held, however long the model thinks.
    assert (cpu.free, cpu.held) == (4000, 0)


def test_3_an_elastic_action_takes_free_cores_and_shares_them_when_further_actions_arrive() -> None:
    scheduler = Scheduler(policy("adaptive"), cpu_node("node", cores=8))

    # It admits one to eight cores. Alone, it gets all eight.
    [start] = scheduler.handle(submit("a", seconds=60, cpu=cores(1, 8)), now=0.0)
    assert isinstance(start, Start)
    assert start.grant.shares[0].reserved == 8000
    scheduler.handle(Started(action="a"), now=0.0)

    # A second one arrives: the share of the first shrinks, and both run.
    shrink, start = scheduler.handle(submit("b", seconds=60, cpu=cores(1, 8)), now=1.0)
    assert isinstance(shrink, Resize)
    assert isinstance(start, Start)
    assert shrink.action == "a"
    assert 1000 <= shrink.reserved <= 7000
    assert shrink.reserved + start.grant.shares[0].reserved <= 8000
    scheduler.handle(Started(action="b"), now=1.0)

    # When the second ends, the first grows back to all cores.
    _, grow = scheduler.handle(Finished(action="b"), now=5.0)
    assert isinstance(grow, Resize)
    assert (grow.action, grow.reserved) == ("a", 8000)


def test_4_several_pools_are_granted_together_or_not_at_all() -> None:
    pools = (*cpu_node("node", cores=4), Pool(kind="search", total=1))
    scheduler = Scheduler(policy("fcfs"), pools)
    scheduler.handle(submit("holds the api", search=fixed(1)), now=0.0)

    # It needs a core and the API. The API is in use, so it gets neither and blocks no core.
    assert scheduler.handle(submit("both", cpu=cores(1), search=fixed(1)), now=1.0) == []
    assert scheduler.ledger.pools["cpu@node"].free == 4000
    [start] = scheduler.handle(submit("only a core", cpu=cores(4)), now=2.0)
    assert isinstance(start, Start)

    scheduler.handle(Started(action="only a core"), now=2.0)
    scheduler.handle(Finished(action="only a core"), now=3.0)
    scheduler.handle(Started(action="holds the api"), now=3.0)
    _, start = scheduler.handle(Finished(action="holds the api"), now=4.0)
    assert isinstance(start, Start)
    assert [share.pool for share in start.grant.shares] == ["cpu@node", "search"]


def test_5_two_runs_share_fairly_even_if_one_submits_more() -> None:
    scheduler = Scheduler(policy("fcfs"), cpu_node("node", cores=4))
    running = {"busy": 0, "modest": 0}
    for i in range(50):
        scheduler.handle(submit(f"busy-{i}", run="busy", cpu=cores(1)), now=0.0)
    for i in range(10):
        scheduler.handle(submit(f"modest-{i}", run="modest", cpu=cores(1)), now=0.0)

    # The busy run submitted first and has all four cores. As its actions end, the other run gets its half.
    for i in range(4):
        scheduler.handle(Started(action=f"busy-{i}"), now=1.0)
        for effect in scheduler.handle(Finished(action=f"busy-{i}"), now=2.0 + i):
            if isinstance(effect, Start):
                running[effect.action.run] += 1
    assert running == {"busy": 2, "modest": 2}


def test_6_short_actions_go_first_but_no_action_starves() -> None:
    scheduler = Scheduler(policy("adaptive"), cpu_node("node", cores=1), limits=Limits(ageing_s=100.0))
    order = []

    def next_start(event: Event, now: float) -> None:
        for effect in scheduler.handle(event, now):
            if isinstance(effect, Start):
                order.append(effect.action.id)
                scheduler.handle(Started(action=effect.action.id), now)

    next_start(submit("running", seconds=1, cpu=cores(1)), 0.0)
    next_start(submit("long", seconds=60, cpu=cores(1)), 0.0)
    next_start(submit("short", seconds=1, cpu=cores(1)), 10.0)
    next_start(Finished(action="running"), 20.0)
    assert order[-1] == "short"  # submitted later, but it delays the others less

    # After `ageing_s` in the queue, no later action of its run overtakes the long one.
    next_start(submit("another short one", seconds=1, cpu=cores(1)), 110.0)
    next_start(Finished(action="short"), 120.0)
    assert order[-1] == "long"


def test_7_a_cancelled_action_keeps_its_units_until_its_manager_reports_the_end() -> None:
    scheduler = Scheduler(policy("fcfs"), cpu_node("node", cores=1))
    scheduler.handle(submit("a", cpu=cores(1)), now=0.0)
    scheduler.handle(Started(action="a"), now=0.0)
    scheduler.handle(submit("b", cpu=cores(1)), now=0.0)

    # Cancelling is a request. The processes still run, so the core is still in use.
    [stop] = scheduler.handle(Cancel(action="a"), now=1.0)
    assert isinstance(stop, Stop)
    assert scheduler.ledger.pools["cpu@node"].free == 0

    settle, start = scheduler.handle(Finished(action="a"), now=3.0)
    assert isinstance(settle, Settle)
    assert isinstance(start, Start)
    assert settle.outcome.status is Status.CANCELLED
    assert start.action.id == "b"


def test_8_a_lost_action_is_not_a_failure_of_the_agent() -> None:
    scheduler = Scheduler(policy("fcfs"), cpu_node("node", cores=2))
    ends = {}
    for name, end in [
        ("wrong answer", Finished(action="wrong answer")),  # any exit code is a result
        ("crashed", Finished(action="crashed", lost="the sandbox was killed")),
    ]:
        scheduler.handle(submit(name, cpu=cores(1)), now=0.0)
        scheduler.handle(Started(action=name), now=0.0)
        [settle] = scheduler.handle(end, now=1.0)
        assert isinstance(settle, Settle)
        ends[name] = settle.outcome
    assert ends["wrong answer"].status is Status.SUCCEEDED
    assert ends["crashed"].status is Status.LOST  # never make it a reward of 0
    assert ends["crashed"].reason == "the sandbox was killed"


def test_9_the_scheduler_explains_in_one_sentence_why_an_action_waits() -> None:
    scheduler = Scheduler(policy("fcfs"), cpu_node("node", cores=4))
    scheduler.handle(submit("a", cpu=cores(3)), now=0.0)
    scheduler.handle(submit("b", cpu=cores(2)), now=0.0)
    assert scheduler.explain("a") == "a is starting on 3 cores of cpu@node"
    assert scheduler.explain("b") == "b waits for 2 cores of cpu@node, where 1 core of 4 cores are free"
    assert scheduler.explain("c") == "c is not live: it has settled or was never submitted"


def test_10_a_recorded_trace_replays_to_the_same_effects() -> None:
    pools = cpu_node("node", cores=4)
    scheduler, recorder = Scheduler(policy("adaptive"), pools), Recorder()
    trace = [recorder.header(Header(policy="adaptive", pools=pools, limits=scheduler.limits))]
    events: list[Event] = [submit("a", cpu=cores(1, 4)), submit("b", cpu=cores(1, 4)), submit("c", cpu=cores(2))]
    events += [Started(action="a"), Started(action="b"), Finished(action="a"), Cancel(action="c")]
    for second, event in enumerate(events):
        now = float(second)
        trace.append(recorder.lines(now, event, scheduler.handle(event, now)))
    recorded = b"".join(trace)

    # The events alone reproduce the trace, byte for byte.
    header, lines = read(recorded.splitlines())
    scheduler, recorder = Scheduler(policy(header.policy), header.pools, limits=header.limits), Recorder()
    replayed = recorder.header(header)
    for line in lines:
        if line.seq == line.cause:  # an event; the other lines are its effects
            replayed += recorder.lines(line.t, line.message, scheduler.handle(line.message, line.t))
    assert replayed == recorded
