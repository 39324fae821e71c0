"""Every event in every order: the scheduler keeps its promises whatever callers, managers and machines do.

A fake cluster answers Start with Started or StartFailed, ends actions or loses them, answers Stop, loses nodes and
brings them back, changes pools, and lets time pass. It keeps books of its own, from the effects alone, and compares:

- no pool ever gives out more than it has, no device and no exclusive core belongs to two;
- what starts was accepted, waits, and gets an amount that its demand admits, on the node of its sandbox;
- a sandbox goes to a node that could hold all that waits for it, if there is one;
- everything accepted settles exactly once, and once all nodes and pools are back everything does settle;
- a rigid action that is alone in wanting one pool is never kept from it while it has room;
- waits are bounded. Let a be `ageing_s` and h the longest that an action holds units. An action that was submitted at t
  and needs one pool closes that pool at t + a. From t + ELDER_FACTOR * a on it goes before all that was submitted
  after it. Then only the n actions that came before it can still take from the pool, each once per attempt and for at
  most h, after those that hold units by then. So it starts within ELDER_FACTOR * a + (1 + n * attempts_max) * h. What
  is checked here is the step that makes this true: that nothing later takes from a pool which such an elder lacks.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram.core.action import Action, Outcome, Usage
from tangram.core.demand import (
    CPU,
    EXCLUSIVE_CORE,
    GPU,
    MEMORY,
    Amounts,
    Demand,
    between,
    cores,
    fixed,
    learned,
    one_of,
)
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
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
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    Used,
    WakeAt,
    Window,
)
from tangram.core.policies import policy
from tangram.core.queue import ELDER_FACTOR
from tangram.core.scheduler import Scheduler
from tangram.core.speedup import PowerLaw

POOLS = (
    Pool(kind=CPU, node="n0", total=8000, numa=(4000, 4000)),
    Pool(kind=EXCLUSIVE_CORE, node="n0", total=4, numa=(2, 2)),
    Pool(kind=MEMORY, node="n0", total=4096),
    Pool(kind=CPU, node="n1", total=4000, numa=(2000, 2000)),
    Pool(kind=MEMORY, node="n1", total=2048),
    Pool(kind=GPU, node="n1", total=5),
    Pool(kind=CPU, node="n2", total=2000),
    Pool(kind=MEMORY, node="n2", total=1024),
    Pool(kind=GPU, node="g0", total=8),
    Pool(kind=CPU, node="g0", total=2000),
    Pool(kind=MEMORY, node="g0", total=1024),
    Pool(kind="api", total=3),
    Pool(kind="tokens", total=20, window=Window(seconds=10.0)),
    Pool(kind="calls", total=5, window=Window(seconds=10.0, bucket=True)),
    Pool(kind="posts", total=4, window=Window(seconds=8.0, sliding=True, arrival_s=1.0)),
)
POOL_BY_NAME = {pool.name: pool for pool in POOLS}
NODES = ("n0", "n1", "n2", "g0")
"""With devices are n1 and g0 only."""
LIMITS = Limits(ageing_s=20.0, stranded_s=40.0, queue_max=40, run_queue_max=30, sandboxes_max=12)
SERVICES = ("judge", "teacher")


def either(*options: Amounts) -> st.SearchStrategy[Amounts]:
    return st.sampled_from(options)


CPU_AMOUNTS = either(
    learned(), learned(0.5), cores(0.5), cores(2), cores(4), cores(1, 4), cores(0.5, 8), between(300, 900)
)
DEMANDS: st.SearchStrategy[dict[str, Amounts]] = st.one_of(
    st.fixed_dictionaries({CPU: CPU_AMOUNTS}),
    st.fixed_dictionaries({CPU: either(learned(), cores(1), cores(1, 2)), "api": either(fixed(1))}),
    st.fixed_dictionaries({CPU: either(cores(1), cores(1, 3)), "tokens": either(fixed(3))}),
    st.fixed_dictionaries({GPU: either(fixed(1), fixed(2), fixed(3), one_of(1, 2, 4), one_of(2, 8), between(1, 8))}),
    st.fixed_dictionaries({GPU: either(fixed(1), one_of(1, 2)), "api": either(fixed(1))}),
    st.fixed_dictionaries(
        {CPU: either(learned(), cores(1), cores(2)), GPU: either(fixed(1), fixed(3), one_of(1, 2, 4))}
    ),
    st.fixed_dictionaries({GPU: either(fixed(1), fixed(4)), CPU: either(cores(0.5), cores(1, 4))}),
    st.fixed_dictionaries({"api": either(fixed(1), fixed(2), fixed(3))}),
    st.fixed_dictionaries({"tokens": either(fixed(1), fixed(7), fixed(12), fixed(20)), "api": either(fixed(1))}),
    st.fixed_dictionaries({"tokens": either(fixed(4), fixed(20)), "calls": either(fixed(1), fixed(2))}),
    st.fixed_dictionaries({"calls": either(fixed(1), fixed(5))}),
    st.fixed_dictionaries({"posts": either(fixed(1), fixed(4)), "api": either(fixed(1))}),
    st.fixed_dictionaries({EXCLUSIVE_CORE: either(fixed(1), fixed(3), one_of(1, 2, 4))}),
    st.fixed_dictionaries({CPU: either(cores(1)), EXCLUSIVE_CORE: either(fixed(1))}),
)
SECONDS = st.sampled_from([None, None, 0.5, 5.0, 30.0])


class Books:
    """The state of the cluster from the effects alone: the holders of each pool."""

    def __init__(self) -> None:
        self.total = {pool.name: pool.total for pool in POOLS}
        self.held: dict[str, dict[str, int]] = {name: {} for name in self.total}
        """Per pool, units by holder; the riders of a batch hold as their leader."""
        self.cells: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in self.total}
        self.charged: dict[str, tuple[float, int]] = {}
        """Of the tokens, per action: when its last attempt was charged, and how much."""
        self.charged_before: list[tuple[float, int]] = []
        """The same of what is over."""
        self.memory_max = 4096
        """The most that a node ever had."""

    def free(self, pool: str) -> int:
        return self.total.get(pool, 0) - sum(self.held[pool].values())

    def take(self, grant: Grant, now: float) -> None:
        holder = grant.batch or grant.action
        for share in grant.shares:
            name = share.pool
            assert share.limit >= share.reserved > 0
            if POOL_BY_NAME[name].window is not None:
                if name == "tokens":
                    assert self.spent_now(now) + share.reserved <= self.total[name], f"{name} is overspent"
                    self.charged[grant.action] = (now, share.reserved)
                continue
            riding = holder != grant.action and name.startswith(GPU)
            if not riding:
                assert self.free(name) >= share.reserved, f"{name} is oversold by {grant}"
                self.held[name][grant.action] = share.reserved
            if name.startswith((GPU, EXCLUSIVE_CORE)):
                self._settle_in(name, holder if riding else grant.action, share.cells, riding)

    def spent_now(self, now: float) -> int:
        """Tokens spent in the present window."""
        charges = [*self.charged.values(), *self.charged_before]
        return sum(units for at, units in charges if window_of(at) == window_of(now))

    def correct(self, action: str, really: int | None, now: float) -> None:
        """An attempt is over: it spent `really`, or what was granted. What an earlier window gave back stays so."""
        if action not in self.charged:
            return
        at, units = self.charged.pop(action)
        if really is None or window_of(at) == window_of(now):
            self.charged_before.append((at, units if really is None else really))
        else:
            self.charged_before.extend([(at, units), (now, max(0, really - units))])

    def _settle_in(self, name: str, holder: str, cells: tuple[int, ...], riding: bool) -> None:
        if riding:
            assert self.cells[name][holder] == cells
            return
        used = [cell for some in self.cells[name].values() for cell in some]
        assert not set(used) & set(cells), f"{name}: {cells} belong to two"
        assert all(cell < self.total[name] for cell in cells)
        self.cells[name][holder] = cells

    def give_back(self, grant: Grant, riders: list[Grant]) -> None:
        """`riders` are the other live grants of the same batch: the last of them frees the devices."""
        for share in grant.shares:
            name = share.pool
            if name not in self.held or POOL_BY_NAME[name].window is not None:
                continue
            holder = grant.action
            if name.startswith(GPU) and grant.batch:
                holder = grant.batch
                if riders:
                    continue
            self.held[name].pop(holder, None)
            self.cells[name].pop(holder, None)


def window_of(at: float) -> int:
    return math.floor(at / 10.0 + 1e-9)


class SchedulerMachine(RuleBasedStateMachine):
    policy_name = "fcfs"

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(policy(self.policy_name), POOLS, limits=LIMITS)
        self.now = 0.0
        self.books = Books()
        self.live: dict[str, tuple[Action, float]] = {}
        """Accepted and not settled, with the time of submission."""
        self.outcomes: dict[str, Outcome] = {}
        self.granted: dict[str, Grant] = {}
        self.starting: dict[str, None] = {}
        self.running: dict[str, None] = {}
        self.stopping: dict[str, None] = {}
        self.boxes: dict[str, str] = {}
        """Sandboxes by the node on which they stand, empty if nowhere yet."""
        self.memory: dict[str, int] = {}
        """Of every sandbox."""
        self.guests: dict[str, str] = {}
        """Waiting actions, by the sandbox for whose memory they wait though it is not theirs."""
        self.wakes: list[float] = []
        self.states = dict.fromkeys(NODES, NodeState.UP)
        self.count = 0
        self.late: list[tuple[str, int]] = []

    @initialize(weights=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3))
    def weigh(self, weights: tuple[float, ...]) -> None:
        for number, weight in enumerate(weights):
            self.send(RunChanged(run=f"r{number}", weight=weight))

    # ---- sending, and carrying out what comes back ----

    def send(self, event: Event, now: float | None = None) -> list[Effect]:
        elders = self.elders()
        effects = self.scheduler.handle(event, self.now if now is None else now)
        for effect in effects:
            self.carry_out(effect, event, elders)
        self.scheduler.check()
        return effects

    def carry_out(self, effect: Effect, event: Event, elders: dict[str, tuple[str, int, float]]) -> None:
        if isinstance(effect, Start):
            self.start(effect, elders)
        elif isinstance(effect, Resize):
            grant = self.granted[effect.action]
            assert effect.action in self.running or effect.action in self.starting
            assert 0 < effect.reserved <= effect.limit
            held = self.books.held[effect.pool]
            more = effect.reserved - held[effect.action]
            assert more <= max(0, self.books.free(effect.pool)), f"{effect} oversells"
            held[effect.action] = effect.reserved
            assert any(share.pool == effect.pool for share in grant.shares)
        elif isinstance(effect, Stop):
            assert effect.action in self.granted and effect.action not in self.stopping
            self.stopping[effect.action] = None
        elif isinstance(effect, Settle):
            self.settle(effect.outcome)
        elif isinstance(effect, WakeAt):
            heapq.heappush(self.wakes, effect.at)
        elif isinstance(effect, Refuse):
            assert isinstance(event, Submit | Reserve)
            assert effect.reason
        else:
            assert isinstance(effect, Restore)

    def start(self, effect: Start, elders: dict[str, tuple[str, int, float]]) -> None:
        action, grant = effect.action, effect.grant
        assert action.id in self.live and action.id not in self.granted
        assert [share.pool.partition("@")[0] for share in grant.shares] == list(action.demand.pools)
        for share, amounts in zip(grant.shares, action.demand.pools.values(), strict=True):
            node = share.pool.partition("@")[2]
            assert node in ("", grant.node)
            if node:
                assert self.states[node] is not NodeState.DOWN
                assert self.states[node] is NodeState.UP or self.boxes.get(action.sandbox) == node
            if amounts.elastic and share.pool.startswith(CPU) and grant.width != share.reserved:
                assert amounts.admits(grant.width) and amounts.min <= share.reserved <= amounts.max
            elif amounts.declared and not share.pool.startswith(GPU):
                assert amounts.admits(share.reserved)
            self.check_elders(action, share.pool, elders)
        if grant.node and action.sandbox:
            if not self.boxes[action.sandbox]:
                self.check_place(action.sandbox, grant.node)
            assert self.boxes[action.sandbox] in ("", grant.node), "later actions stay"
            self.boxes[action.sandbox] = grant.node
        if action.id in self.guests:
            self.boxes[self.guests.pop(action.id)] = grant.node
        self.books.take(grant, self.now)
        self.granted[action.id] = grant
        self.starting[action.id] = None

    def check_place(self, sandbox: str, node: str) -> None:
        """If there is a node that could hold all waiting actions of the sandbox, this is one."""
        demands = [action.demand for action, _ in self.live.values() if action.sandbox == sandbox]
        least = [(kind, max(1, amounts.min)) for demand in demands for kind, amounts in demand.pools.items()]
        least.extend([(MEMORY, self.memory[sandbox])] * bool(self.memory[sandbox]))

        def could_hold(node: str) -> bool:
            for kind, units in least:
                pool = kind if kind in POOL_BY_NAME else f"{kind}@{node}"
                chunk = 1 << (units - 1).bit_length() if kind == GPU else units
                if pool != kind and self.books.total.get(pool, 0) < chunk:
                    return False
            return True

        assert could_hold(node) or not any(map(could_hold, self.up())), f"{sandbox} goes to {node}: {least}"

    def up(self) -> list[str]:
        return [node for node, state in self.states.items() if state is NodeState.UP]

    def settle(self, outcome: Outcome) -> None:
        assert outcome.action in self.live, f"{outcome} settles what does not live"
        _, submitted_at = self.live.pop(outcome.action)
        self.outcomes[outcome.action] = outcome
        self.guests.pop(outcome.action, None)
        assert outcome.act_s == pytest.approx(max(0.0, self.now - submitted_at), abs=1e-6)
        assert min(outcome.waiting_s, outcome.execution_s, outcome.overhead_s) >= 0.0
        self.forget(outcome.action)

    def forget(self, action: str) -> None:
        """Its attempt is over."""
        for states in (self.starting, self.running, self.stopping):
            states.pop(action, None)
        grant = self.granted.pop(action, None)
        self.books.correct(action, None, self.now)
        if grant is not None:
            riders = [other for other in self.granted.values() if other.batch and other.batch == grant.batch]
            self.books.give_back(grant, riders)
            self.late.append((action, grant.attempt))

    # ---- the bound on waiting ----

    def elders(self) -> dict[str, tuple[str, int, float]]:
        """Waiting actions that need one pool, whose turn it is over everything later: pool, units, submitted."""
        first_by_pool = {}
        for action, submitted_at in self.live.values():
            if action.id in self.granted or len(action.demand.pools) > 1:
                continue
            if submitted_at > self.now - ELDER_FACTOR * LIMITS.ageing_s:
                continue
            kind, amounts = next(iter(action.demand.pools.items()))
            name = f"{CPU}@{self.boxes.get(action.sandbox, '')}" if kind == CPU else kind
            whole = kind in (CPU, "api") and amounts.declared and name in self.books.total
            if whole and amounts.min <= self.books.total[name]:
                first_by_pool[action.id] = (name, amounts.min, submitted_at)
        return first_by_pool

    def check_elders(self, action: Action, pool: str, elders: dict[str, tuple[str, int, float]]) -> None:
        for elder, (name, units, submitted_at) in elders.items():
            if name != pool or elder == action.id or elder not in self.live or elder in self.granted:
                continue
            if submitted_at < self.live[action.id][1] and self.books.free(pool) < units:
                raise AssertionError(
                    f"{action.id} takes from {pool}, which {elder} has waited for since {submitted_at}"
                )

    # ---- callers ----

    @rule(
        pools=DEMANDS, run=st.integers(0, 2), box=st.integers(0, 9), priority=st.integers(-1, 1), timeout_s=SECONDS,
        deadline_s=SECONDS, idempotent=st.booleans(), hint=st.sampled_from([None, 1.0, 20.0]), key=st.integers(0, 1),
        power=st.booleans(), same_id=st.sampled_from([False] * 9 + [True]),
    )  # fmt: skip
    def submit(
        self, pools: dict[str, Amounts], run: int, box: int, priority: int, timeout_s: float | None,
        deadline_s: float | None, idempotent: bool, hint: float | None, key: int, power: bool, same_id: bool,
    ) -> None:  # fmt: skip
        self.count += 1
        sandbox = list(self.boxes)[box] if box < len(self.boxes) else ""
        taken = next(iter(self.live), "")
        action = Action(
            id=taken if same_id and taken else f"a{self.count}",
            demand=Demand(pools, speedup=PowerLaw(0.5) if power else None),
            run=f"r{run}", sandbox=sandbox, priority=priority, timeout_s=timeout_s, deadline_s=deadline_s,
            idempotent=idempotent, at_once=not idempotent, duration_s=hint, key=f"k{key}",
            service=SERVICES[key] if GPU in pools else "",
        )  # fmt: skip
        if action.id == taken:
            effects = self.scheduler.handle(Submit(action=action), self.now)
            assert Refuse(action=taken, limit="id", reason=effects[0].reason) in effects  # type: ignore[union-attr]
            return
        self.live[action.id] = (action, self.now)
        waiting = len(self.live) - len(self.granted) - 1
        effects = self.send(Submit(action=action))
        if any(isinstance(effect, Refuse) for effect in effects):
            del self.live[action.id]
        elif action.id not in self.granted:
            assert waiting < LIMITS.queue_max

    @rule(
        memory=st.sampled_from([0, 100, 1000, 3000, 5000]),
        run=st.integers(0, 2),
        node=st.sampled_from(["", "", *NODES]),
        yields=st.booleans(),
    )
    def reserve(self, memory: int, run: int, node: str, yields: bool) -> None:
        self.count += 1
        sandbox = f"box{self.count}"
        effects = self.send(Reserve(sandbox=sandbox, memory=memory, run=f"r{run}", node=node, yields=yields))
        if not any(isinstance(effect, Refuse) for effect in effects):
            assert memory <= self.books.memory_max
            self.boxes[sandbox] = node
            self.memory[sandbox] = memory

    @precondition(lambda self: self.boxes)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        sandbox = list(self.boxes)[pick % len(self.boxes)]
        self.boxes.pop(sandbox)
        self.send(Release(sandbox=sandbox))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        action = list(self.live)[pick % len(self.live)]
        waiting = action not in self.granted
        self.send(Cancel(action=action))
        assert (action in self.outcomes) == waiting, "what holds units holds them until it has stopped"

    @rule(run=st.integers(0, 2), weight=st.sampled_from([0.5, 1.0, 2.0]))
    def change_weight(self, run: int, weight: float) -> None:
        self.send(RunChanged(run=f"r{run}", weight=weight))

    # ---- managers ----

    @precondition(lambda self: self.starting)
    @rule(pick=st.integers(0, 99), say_attempt=st.booleans())
    def started(self, pick: int, say_attempt: bool) -> None:
        action = list(self.starting)[pick % len(self.starting)]
        del self.starting[action]
        self.running[action] = None
        self.send(Started(action=action, attempt=self.granted[action].attempt if say_attempt else 0))

    @precondition(lambda self: self.starting)
    @rule(pick=st.integers(0, 99), retry=st.booleans())
    def start_failed(self, pick: int, retry: bool) -> None:
        action = list(self.starting)[pick % len(self.starting)]
        grant = self.granted[action]
        self.books.correct(action, 0, self.now)
        self.forget(action)
        self.send(StartFailed(action=action, reason="no image", retry=retry, attempt=grant.attempt))

    @precondition(lambda self: self.starting)
    @rule(pick=st.integers(0, 99), memory=st.sampled_from([100, 1000, 3000, 5000]))
    def short_of_memory(self, pick: int, memory: int) -> None:
        """Like a call that finds none for an instance."""
        action = list(self.starting)[pick % len(self.starting)]
        demand, grant = self.live[action][0], self.granted[action]
        if CPU not in demand.demand.pools or demand.sandbox:
            return
        self.books.correct(action, 0, self.now)
        self.forget(action)
        self.late.pop()  # the next attempt has the same number
        self.count += 1
        sandbox = self.guests[action] = f"guest{self.count}"
        self.memory[sandbox] = memory
        self.send(StartFailed(action=action, reason="short", attempt=grant.attempt, sandbox=sandbox, memory=memory))

    @precondition(lambda self: self.guests)
    @rule(pick=st.integers(0, 99))
    def do_without(self, pick: int) -> None:
        action = list(self.guests)[pick % len(self.guests)]
        self.send(Release(sandbox=self.guests.pop(action)))

    @precondition(lambda self: self.running)
    @rule(
        pick=st.integers(0, 99), cpu_s=st.sampled_from([0.0, 0.1, 5.0]), starved_s=st.sampled_from([0.0, 1000.0]),
        lost=st.sampled_from(["", "", "", "killed"]), overhead_s=st.sampled_from([0.0, 0.2]),
        spent=st.sampled_from([None, {"tokens": 1}, {"tokens": 3}]),
    )  # fmt: skip
    def finish(
        self, pick: int, cpu_s: float, starved_s: float, lost: str, overhead_s: float, spent: dict[str, int] | None
    ) -> None:
        action = list(self.running)[pick % len(self.running)]
        usage = Usage(cpu_s=cpu_s, starved_s=starved_s, overhead_s=overhead_s, spent=spent)
        self.end(action, usage, lost)

    def end(self, action: str, usage: Usage, lost: str = "") -> None:
        attempt = self.granted[action].attempt
        self.books.correct(action, usage.spent["tokens"] if usage.spent else None, self.now)
        self.forget(action)
        self.send(Finished(action=action, usage=usage, lost=lost, attempt=attempt))

    @precondition(lambda self: self.starting)
    @rule(pick=st.integers(0, 99))
    def lost_while_starting(self, pick: int) -> None:
        self.end(list(self.starting)[pick % len(self.starting)], Usage(), "killed before it ran")

    @precondition(lambda self: self.stopping)
    @rule(pick=st.integers(0, 99))
    def stopped(self, pick: int) -> None:
        action = list(self.stopping)[pick % len(self.stopping)]
        self.end(action, Usage())
        assert action in self.outcomes

    @precondition(lambda self: self.late)
    @rule(pick=st.integers(0, 99), kind=st.integers(0, 3))
    def last_words(self, pick: int, kind: int) -> None:
        """A late message of an attempt that is over."""
        action, attempt = self.late[pick % len(self.late)]
        before = self.scheduler.statistics().late_events
        event = [
            Started(action=action, attempt=attempt),
            StartFailed(action=action, reason="late", attempt=attempt),
            Finished(action=action, attempt=attempt),
            Resized(action=action, limit=1000, attempt=attempt),
            Used(action=action, cpu_s=1.0, attempt=attempt),
        ][kind]
        self.send(event)
        assert self.scheduler.statistics().late_events == before + 1

    @rule(
        service=st.sampled_from(SERVICES), size=st.sampled_from([1, 2, 4]), start=st.integers(0, 7), gone=st.booleans(),
        node=st.sampled_from(["g0", "n1"]),
    )  # fmt: skip
    def residency(self, service: str, size: int, start: int, gone: bool, node: str) -> None:
        start = start // size * size
        devices = tuple(range(start, start + size))
        if gone:
            self.send(Evicted(service=service, node=node, devices=devices))
        else:
            self.send(Resident(service=service, node=node, devices=devices, batch_max=size))

    # ---- pools and nodes ----

    @rule(pick=st.integers(0, 99), share=st.sampled_from([0.0, 0.2, 0.5, 0.75, 1.0, 1.5]))
    def change_pool(self, pick: int, share: float) -> None:
        pool = POOLS[pick % len(POOLS)]
        if self.states.get(pool.node) is not NodeState.DOWN:
            self.resize_pool(pool, share)

    def resize_pool(self, pool: Pool, share: float) -> None:
        numa = tuple(int(units * share) for units in pool.numa)
        total = sum(numa) if numa else int(pool.total * share)
        self.books.total[pool.name] = total
        if pool.kind == MEMORY:
            self.books.memory_max = max(self.books.memory_max, total)
        self.send(PoolChanged(pool=Pool(kind=pool.kind, node=pool.node, total=total, window=pool.window, numa=numa)))

    @rule(
        node=st.sampled_from(NODES),
        state=st.sampled_from([NodeState.UP, NodeState.UP, NodeState.DRAINING, NodeState.DOWN]),
    )
    def change_node(self, node: str, state: NodeState) -> None:
        before, self.states[node] = self.states[node], state
        if state is NodeState.DOWN:
            self.lose_node(node)
        elif before is NodeState.DOWN:
            self.join_node(node)
        self.send(NodeChanged(node=node, state=state))
        if state is NodeState.DOWN:
            assert not [grant for grant in self.granted.values() if grant.node == node]

    def lose_node(self, node: str) -> None:
        for action in [action for action, grant in self.granted.items() if grant.node == node]:
            self.forget(action)
        for name in [pool.name for pool in POOLS if pool.node == node]:
            self.books.total.pop(name, None)
        self.boxes = {box: at for box, at in self.boxes.items() if at != node}

    def join_node(self, node: str) -> None:
        for pool in POOLS:
            if pool.node == node:
                self.resize_pool(pool, 1.0)

    # ---- time ----

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 7.0, 25.0, 60.0]))
    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wakes and self.wakes[0] <= until:
            self.now = max(self.now, heapq.heappop(self.wakes))
            self.send(Tick())
        self.now = until

    @rule(back_s=st.sampled_from([0.0, 3.0]))
    def unasked_tick(self, back_s: float) -> None:
        """Also one from a clock that stepped back."""
        self.send(Tick(), now=self.now - back_s)

    # ---- what must hold after every step ----

    @invariant()
    def books_agree(self) -> None:
        assert list(self.scheduler.entries) == list(self.live) or set(self.scheduler.entries) == set(self.live)
        statistics = self.scheduler.statistics()
        assert statistics.holding == len(self.granted)
        assert statistics.waiting == len(self.live) - len(self.granted)
        for name, pool in statistics.pools.items():
            assert pool["total"] == self.books.total[name]
            if not name.startswith(MEMORY) and POOL_BY_NAME[name].window is None:
                assert pool["held"] == sum(self.books.held[name].values())
        for action in self.live:
            assert self.scheduler.explain(action).startswith(action)

    @invariant()
    def no_action_is_kept_from_an_uncontended_pool(self) -> None:
        waiting = [action for action, _ in self.live.values() if action.id not in self.granted]
        for action in waiting:
            kind, amounts = next(iter(action.demand.pools.items()))
            alone = not any(kind in other.demand.pools for other in waiting if other is not action)
            if kind == "api" and len(action.demand.pools) == 1 and alone:
                assert self.books.free("api") < amounts.min, f"{action.id} is kept from an idle pool"

    # ---- the end ----

    def teardown(self) -> None:
        for node in NODES:
            self.change_node(node, NodeState.UP)
        for pool in POOLS:
            self.resize_pool(pool, 1.0)
        for _ in range(400):
            if not self.live:
                break
            for action in list(self.starting):
                if action in self.starting:
                    self.started(list(self.starting).index(action), False)
            for action in [*self.stopping, *self.running]:
                if action in self.granted:
                    self.end(action, Usage())
            self.release_empty()
            self.advance(1.0)
        assert not self.live, [self.scheduler.explain(action) for action in self.live]
        self.release_empty()
        self.all_is_back()

    def release_empty(self) -> None:
        """Memory comes back only when sandboxes end."""
        used = [action.sandbox for action, _ in self.live.values()]
        for sandbox in [box for box in self.boxes if box not in used]:
            del self.boxes[sandbox]
            self.send(Release(sandbox=sandbox))

    def all_is_back(self) -> None:
        self.advance(100.0)
        statistics = self.scheduler.statistics()
        assert statistics.sandboxes == statistics.waiting == statistics.holding == 0
        for name, pool in statistics.pools.items():
            assert pool["held"] == 0, name
        assert sum(statistics.settled.values()) == len(self.outcomes)
        eight, five = (self.scheduler.ledger.pools[name] for name in ("gpu@g0", "gpu@n1"))
        assert eight.free_chunks() == (0, 0, 0, 1), "all devices are one chunk again"
        assert five.free_chunks() == (1, 0, 1)


def machine(name: str) -> Any:
    case = type(f"Machine[{name}]", (SchedulerMachine,), {"policy_name": name}).TestCase
    case.settings = settings(max_examples=80, stateful_step_count=60)
    return case


TestFcfs = machine("fcfs")
TestFixed = machine("fixed:2")
TestPaper = machine("paper")
TestAdaptive = machine("adaptive")
TestAdaptiveWithoutResizing = machine("adaptive:no-resize")
