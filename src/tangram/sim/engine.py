"""The discrete-event simulation engine: plays the episodes of a workload and replaces every manager.

Owns virtual time and the ground truth of each action. Drives anything with `handle(event, now) -> effects`: the
scheduler of `core/`, or a baseline. Same workload, same scheduler, same faults: same result.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import CORE, CPU, GPU
from tangram.core.messages import (
    Decider,
    Event,
    Evicted,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Observer,
    Pool,
    PoolChanged,
    Refuse,
    Release,
    Reserve,
    Resident,
    Resize,
    Resized,
    Restore,
    Settle,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    WakeAt,
)
from tangram.errors import InvariantError
from tangram.sim.apis import REFUSAL_S, SimulatedApis
from tangram.sim.cpushare import CpuShare, shape
from tangram.sim.devices import SimulatedDevices
from tangram.sim.episode import SimEpisode, SimStep, Workload
from tangram.sim.result import COMPLETED, ActionRow, SampledCurve, SimulationResult

DEVICE_MEMORY_GIB = 80.0
"""Per emulated device, as on the accelerators of the publications."""

EVENTS_MAX = 200_000_000
"""A simulation with more events is stuck."""


class _SimAction(msgspec.Struct, eq=False):
    """One submitted action and its ground truth."""

    action: Action
    step: SimStep
    episode: _EpisodeState
    submitted_at: float
    grant: Grant | None = None
    attempt: int = 0
    batch: str = ""
    """The batch of its last grant."""
    started_at: float = -1.0
    refused: bool = False
    """Rejected by an API: the action does nothing until it ends."""
    node: str = ""
    width: float = 1.0
    limit: float = 1.0


class _EpisodeState(msgspec.Struct, eq=False):
    """One episode in progress."""

    episode: SimEpisode
    sandbox: str
    turn: int = 0
    outstanding: int = 0
    failed: bool = False


class StartFaults:
    """The faults of starts that are in effect now; without any, every start succeeds and takes no extra time."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []
        """Extra seconds before an action is Started; the longest counts."""
        self.failing: list[tuple[float, random.Random]] = []
        """Shares of starts that fail, each with its random numbers."""

    def delay_s(self) -> float:
        return max(self.delays_s, default=0.0)

    def failure(self, attempt: int) -> str:
        """Return why this attempt cannot start; empty if it can."""
        fails = [rng.random() < share for share, rng in self.failing]
        return "no such image" if any(fails) else ""


class Simulator:
    """Plays one workload against one scheduler."""

    def __init__(
        self,
        workload: Workload,
        scheduler: Decider,
        pools: tuple[Pool, ...],
        *,
        name: str = "",
        timeout_s: float | None = None,
        hints: bool = False,
        truth: dict[str, SimStep] | None = None,
        observer: Observer | None = None,
        progress: Callable[[int, int], None] | None = None,
        start_faults: StartFaults | None = None,
    ) -> None:
        self.workload = workload
        self.scheduler = scheduler
        self.now = 0.0
        self._name = name
        self._hints = hints
        self._timeout_s = timeout_s
        self._observer = observer
        self._progress = progress
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._actions: dict[str, _SimAction] = {}
        self.pools = {pool.name: pool for pool in pools}
        self.cpus = {p.node: CpuShare(p.total / CORE) for p in pools if p.kind == CPU}
        self._cpu_next: dict[str, float] = dict.fromkeys(self.cpus, math.inf)
        self._core_s_before = 0.0
        """Core-seconds used on nodes that have failed."""
        self._core_s_starting = 0.0
        """Core-seconds charged to actions for their start."""
        self._devices = SimulatedDevices(workload.services, pools, DEVICE_MEMORY_GIB)
        self._batches: dict[str, int] = {}
        """Number of calls in each batch."""
        self._apis = SimulatedApis(workload.apis)
        self._episodes = [
            _EpisodeState(episode, f"box-{episode.id}" if episode.memory else "") for episode in workload.episodes
        ]
        self._finished_episodes = 0
        self._failed_episodes = 0
        self._total = sum(len(turn.steps) for episode in workload.episodes for turn in episode.turns)
        self._rows: list[ActionRow] = []
        self._ends: list[float] = []
        self._samples = SampledCurve()
        self.start_faults = start_faults or StartFaults()
        self._truth = truth if truth is not None else {}
        """Per live action, what only the simulator knows."""
        self.down: dict[str, bool] = {}

    # ---- time ----

    def call_at(self, at: float, call: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, call, arguments))

    def run(self) -> SimulationResult:
        """Run until every episode has ended."""
        for playing in self._episodes:
            self.call_at(playing.episode.start_s, self._begin_episode, playing)
        events = 0
        heap = self._heap
        while heap and self._finished_episodes < len(self._episodes):
            events += 1
            at, _, call, arguments = heapq.heappop(heap)
            self.now = at
            call(*arguments)
            if not events & 4095:
                if self._progress is not None:
                    self._progress(len(self._rows), self._total)
                if events > EVENTS_MAX:
                    raise InvariantError(f"simulation {self._name} takes more than {EVENTS_MAX} events")
        if self._finished_episodes < len(self._episodes):
            raise InvariantError(
                f"simulation {self._name} of {self.workload.name} seed {self.workload.seed} is stuck"
                f" at {self.now:.3f} s: {len(self._actions)} actions never settle"
            )
        if self._progress is not None:
            self._progress(self._total, self._total)
        return self._result()

    def send(self, event: Event) -> None:
        """Handle one event and execute its effects."""
        effects = self.scheduler.handle(event, self.now)
        if self._observer is not None:
            self._observer(self.now, event, effects)
        for effect in effects:
            _EFFECTS[type(effect)](self, effect)

    # ---- episodes ----

    def _begin_episode(self, playing: _EpisodeState) -> None:
        if playing.sandbox:
            episode = playing.episode
            self.send(Reserve(sandbox=playing.sandbox, memory=episode.memory, run=episode.run))
        if not playing.failed:
            self._think(playing)

    def _think(self, playing: _EpisodeState) -> None:
        turns = playing.episode.turns
        if playing.turn == len(turns):
            self._end_episode(playing)
        else:
            self.call_at(self.now + turns[playing.turn].think_s, self._submit_turn, playing)

    def _submit_turn(self, playing: _EpisodeState) -> None:
        if playing.failed:
            return
        episode = playing.episode
        turn = episode.turns[playing.turn]
        playing.outstanding = len(turn.steps)
        for index, step in enumerate(turn.steps):
            action = self._make_action(playing, step, index)
            self._actions[action.id] = _SimAction(action, step, playing, self.now)
            self._truth[action.id] = step
            self.send(Submit(action=action))

    def _make_action(self, playing: _EpisodeState, step: SimStep, index: int) -> Action:
        episode = playing.episode
        return Action(
            id=f"{episode.id}.{playing.turn}.{index}",
            demand=step.demand,
            run=episode.run,
            task=step.task or episode.task,
            trajectory=episode.id,
            sandbox=playing.sandbox if CPU in step.demand.pools else "",
            kind=step.kind,
            key=step.key,
            service=step.service,
            duration_s=step.work_s if self._hints else None,
            timeout_s=self._timeout_s,
            at_once=step.at_once,
        )

    def _end_episode(self, playing: _EpisodeState) -> None:
        self._finished_episodes += 1
        self._ends.append(self.now)
        if playing.failed:
            self._failed_episodes += 1
        if playing.sandbox:
            self.send(Release(sandbox=playing.sandbox))

    def _on_settled(self, effect: Settle) -> None:
        outcome = effect.outcome
        live = self._actions.pop(outcome.action)
        self._join_batch(live, "")
        self._truth.pop(outcome.action, None)
        self._rows.append(self._row(live, outcome))
        playing = live.episode
        playing.outstanding -= 1
        if outcome.status.value not in COMPLETED:
            playing.failed = True
        if playing.outstanding == 0:
            if playing.failed:
                self._end_episode(playing)
            else:
                playing.turn += 1
                self._think(playing)

    def _on_refused(self, effect: Refuse) -> None:
        live = self._actions.get(effect.action)
        if live is not None:
            self._on_settled(Settle(outcome=Outcome(action=effect.action, status=Status.REFUSED, reason=effect.reason)))
            return
        for playing in self._episodes:
            if playing.sandbox == effect.action and not playing.failed:
                playing.failed = True
                playing.sandbox = ""
                self._end_episode(playing)

    def _row(self, live: _SimAction, outcome: Outcome) -> ActionRow:
        return ActionRow(
            id=live.action.id,
            run=live.action.run,
            kind=live.action.kind,
            key=live.action.key,
            status=outcome.status.value,
            submitted_at=live.submitted_at,
            ended_at=self.now,
            waiting_s=outcome.waiting_s,
            execution_s=outcome.execution_s,
            overhead_s=outcome.overhead_s,
            node=live.node,
            width=live.width,
            cpu_s=outcome.usage.cpu_s,
        )

    # ---- managers ----

    def _start(self, effect: Start) -> None:
        live = self._actions[effect.action.id]
        grant = effect.grant
        live.grant, live.node, live.attempt = grant, grant.node, grant.attempt
        self._join_batch(live, grant.batch)
        live.started_at = -1.0
        if reason := self.start_faults.failure(grant.attempt):
            self.call_at(self.now, self._on_start_failed, live, grant.attempt, reason)
            return
        delay = live.step.overhead_s + self.start_faults.delay_s()
        if GPU in effect.action.demand.pools:
            delay += self._load(live.action.service, grant.node, _devices_of(grant))
        if delay > 0.0 or grant.batch:  # a batch starts when all members are present
            self.call_at(self.now + delay, self._on_started, live, grant.attempt)
        else:
            self._on_started(live, grant.attempt)

    def _on_start_failed(self, live: _SimAction, attempt: int, reason: str) -> None:
        if self._is_current(live, attempt):
            live.grant = None
            self.send(StartFailed(action=live.action.id, reason=reason))

    def _is_current(self, live: _SimAction, attempt: int) -> bool:
        return live.attempt == attempt and self._actions.get(live.action.id) is live and live.grant is not None

    def _join_batch(self, live: _SimAction, batch: str) -> None:
        """Move the action from its batch to this one."""
        if live.batch:
            self._batches[live.batch] -= 1
            if not self._batches[live.batch]:
                del self._batches[live.batch]
        if batch:
            self._batches[batch] = self._batches.get(batch, 0) + 1
        live.batch = batch

    def _load(self, service: str, node: str, devices: tuple[int, ...]) -> float:
        """Return the seconds until the service can be called there."""
        seconds, evicted = self._devices.load(service, node, devices, self.now)
        for place in evicted:
            self.send(Evicted(service=place.service, node=node, devices=place.devices))
        return seconds

    def _report_resident(self, service: str, node: str, devices: tuple[int, ...]) -> None:
        if self._devices.take_loaded(service, node, devices, self.now):
            batch_max = self._devices.service(service).batch_max
            self.send(Resident(service=service, node=node, devices=devices, batch_max=batch_max))

    def _on_started(self, live: _SimAction, attempt: int) -> None:
        if not self._is_current(live, attempt) or self.down.get(live.node):
            return
        live.started_at = self.now
        grant, step = live.grant, live.step
        assert grant is not None
        self.send(Started(action=live.action.id))
        if not self._is_current(live, attempt):
            return
        live.refused = not self._apis.admit(live.action.id, step, self.now)
        if live.refused:
            self.call_at(self.now + REFUSAL_S, self._finish, live, attempt, "429 too many requests")
            return
        if CPU in live.action.demand.pools:
            self._run_on_cpu(live, grant)
            return
        if GPU in live.action.demand.pools:
            devices = _devices_of(grant)
            self._report_resident(live.action.service, live.node, devices)
            live.width = float(len(devices))
            batch_size = self._batches.get(live.batch, 1)
            slower = batch_size ** self._devices.service(live.action.service).batch_growth
            self.call_at(self.now + slower * step.work_s / step.speedup.at(live.width), self._finish, live, attempt, "")
            return
        self.call_at(self.now + step.work_s, self._finish, live, attempt, "")

    def _run_on_cpu(self, live: _SimAction, grant: Grant) -> None:
        share = next(share for share in grant.shares if share.pool.startswith(CPU))
        step = live.step
        live.width = grant.width / CORE if step.demand.elastic == CPU else 1.0
        live.limit = share.limit / CORE
        work, demand = shape(step.work_s, step.busy, step.speedup, live.width, live.limit)
        self.cpus[live.node].add(live.action.id, work, demand, share.reserved / CORE, self.now)
        self._schedule_next_completion(live.node)

    def _schedule_next_completion(self, node: str) -> None:
        """Schedule an event for the next completion on the node."""
        following = self.cpus[node].next_completion()
        if following is not None and following[0] < self._cpu_next[node]:
            self._cpu_next[node] = following[0]
            self.call_at(max(following[0], self.now), self._on_cpu_due, node, following[0])

    def _on_cpu_due(self, node: str, expected_at: float) -> None:
        """The next completion was expected now; contention may have moved it, or an earlier one came first."""
        if self._cpu_next[node] != expected_at:
            return
        self._cpu_next[node] = math.inf
        cpu = self.cpus.get(node)
        if cpu is None or self.down.get(node):
            return
        following = cpu.next_completion()
        if following is not None and following[0] <= self.now:
            self._finish(self._actions[following[1]], self._actions[following[1]].attempt, "")
            self._samples.add(self.now, sum(cpu.busy for cpu in self.cpus.values()))
        if node in self.cpus:
            self._schedule_next_completion(node)

    def _finish(self, live: _SimAction, attempt: int, lost: str) -> None:
        if not self._is_current(live, attempt) or live.started_at < 0.0:
            return
        usage = self._remove_from_node(live)
        live.grant = None
        self.send(Finished(action=live.action.id, usage=usage, lost=lost))

    def _remove_from_node(self, live: _SimAction) -> Usage:
        """Remove the action from its node and return its usage."""
        self._apis.release(live.action.id)
        if live.refused:
            return Usage()
        kinds = live.action.demand.pools
        if CPU in kinds and live.node in self.cpus:
            used = self.cpus[live.node].remove(live.action.id, self.now)
            self._schedule_next_completion(live.node)
            starting_core_s = live.step.busy * live.step.overhead_s
            self._core_s_starting += starting_core_s
            cpu_s = used.used_core_s + starting_core_s
            return Usage(cpu_s=cpu_s, throttled_s=used.slowed_s, starved_s=used.starved_s, spent=live.step.spent)
        return Usage(spent=live.step.spent)

    def _resize(self, effect: Resize) -> None:
        live = self._actions[effect.action]
        if live.started_at >= 0.0 and not live.refused:
            step = live.step
            before, _ = shape(step.work_s, step.busy, step.speedup, live.width, live.limit)
            live.limit = effect.limit / CORE
            after, demand = shape(step.work_s, step.busy, step.speedup, live.width, live.limit)
            self.cpus[live.node].reconfigure(
                effect.action, self.now, demand=demand, weight=effect.reserved / CORE, scale=after / before
            )
            self._schedule_next_completion(live.node)
        self.send(Resized(action=effect.action, limit=effect.limit))

    def _stop(self, effect: Stop) -> None:
        live = self._actions[effect.action]
        self.call_at(self.now, self._on_stopped, live, live.attempt)

    def _on_stopped(self, live: _SimAction, attempt: int) -> None:
        if not self._is_current(live, attempt):
            return
        usage = self._remove_from_node(live) if live.started_at >= 0.0 else Usage()
        live.grant = None
        self.send(Finished(action=live.action.id, usage=usage))

    def _restore(self, effect: Restore) -> None:
        """Restore, unless the devices are in use by now."""
        service, node, devices = effect.service, effect.node, effect.devices
        if self.down.get(node) or self._in_use(node, devices):
            self.send(Evicted(service=service, node=node, devices=devices))
        else:
            self.call_at(self.now + self._load(service, node, devices), self._report_resident, service, node, devices)

    def _in_use(self, node: str, devices: tuple[int, ...]) -> bool:
        return any(
            live.grant is not None
            and live.node == node
            and any(device in devices for device in _devices_of(live.grant))
            for live in self._actions.values()
        )

    def _wake_at(self, effect: WakeAt) -> None:
        self.call_at(max(effect.at, self.now), self._tick)

    def _tick(self) -> None:
        self.send(Tick())

    # ---- faults ----

    def node_down(self, node: str) -> None:
        """Fail a node; its actions end without an event."""
        if self.down.get(node):
            return
        self.down[node] = True
        if node in self.cpus:
            self._core_s_before += self.cpus[node].used_total(self.now)
            self.cpus[node] = CpuShare(self.pools[f"{CPU}@{node}"].total / CORE)
        self._devices.clear(node)
        for live in self._actions.values():
            if live.grant is not None and live.node == node:
                live.grant = None
                self._apis.release(live.action.id)
        self.send(NodeChanged(node=node, state=NodeState.DOWN))

    def node_up(self, node: str) -> None:
        """Bring a node back, empty."""
        if not self.down.pop(node, False):
            return
        if node in self.cpus:
            self.cpus[node].set_capacity(self.pools[f"{CPU}@{node}"].total / CORE, self.now)
        for pool in self.pools.values():
            if pool.node == node:
                self.send(PoolChanged(pool=pool))
        self.send(NodeChanged(node=node, state=NodeState.UP))

    def crash(self, pick: float) -> None:
        """Kill one running action; `pick` in [0, 1) chooses it."""
        running = [live for live in self._actions.values() if live.grant is not None and live.started_at >= 0.0]
        if running:
            live = running[int(pick * len(running))]
            self._finish(live, live.attempt, "its process was killed")

    def change_pool(self, pool: Pool) -> None:
        """Change the total of a pool; if its node is down, when the node is back."""
        self.pools[pool.name] = pool
        self._devices.grow(pool)
        if self.down.get(pool.node):
            return
        if pool.kind == CPU:
            self.cpus[pool.node].set_capacity(pool.total / CORE, self.now)
            self._schedule_next_completion(pool.node)
        self._apis.set_quota(pool, self.now)
        self.send(PoolChanged(pool=pool))

    # ---- result ----

    def _result(self) -> SimulationResult:
        capacity = sum(pool.total for pool in self.pools.values() if pool.kind == CPU) / CORE
        used = self._core_s_before + self._core_s_starting + sum(cpu.used_total(self.now) for cpu in self.cpus.values())
        return SimulationResult(
            name=self._name,
            workload=self.workload.name,
            seed=self.workload.seed,
            rows=self._rows,
            episode_ends=self._ends,
            episodes_failed=self._failed_episodes,
            makespan_s=max(self._ends, default=0.0) - min((e.start_s for e in self.workload.episodes), default=0.0),
            cores=capacity,
            core_s=used,
            busy=self._samples.rows(),
        )


def _devices_of(grant: Grant) -> tuple[int, ...]:
    return next((share.cells for share in grant.shares if share.pool.startswith(GPU)), ())


_EFFECTS: dict[type, Callable[[Simulator, Any], None]] = {
    Start: Simulator._start,
    Resize: Simulator._resize,
    Stop: Simulator._stop,
    Restore: Simulator._restore,
    WakeAt: Simulator._wake_at,
    Settle: Simulator._on_settled,
    Refuse: Simulator._on_refused,
}
