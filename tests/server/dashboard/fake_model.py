"""A small deterministic model of a busy service: pools, runs, trajectories and actions, in steps of 0.1 s.

Owns what the development server of the dashboard shows. It schedules first come, first served, and knows no failures
but those that it draws; what it promises is that its records hang together: units add up, every action has a story.
"""

from __future__ import annotations

import math
import random
from collections import deque

import msgspec

from tangram.runtime import views as v

STEP_S = 0.1
HOUR_S = 3600.0
WINDOW_S = 60.0


class Kind(msgspec.Struct, frozen=True):
    """A class of actions: what it asks of which pool, and about how long it takes."""

    name: str
    pool: str
    units: tuple[int, ...]
    mean_s: float
    service: str = ""


class Tenant(msgspec.Struct, frozen=True):
    name: str
    weight: float
    trajectories: int
    think_s: float
    kinds: tuple[Kind, ...]
    memory_mib: int = 0


TENANTS = (
    Tenant(
        "coding-rl",
        2.0,
        26,
        4.0,
        (
            Kind("coding/exec/pytest", "cpu", (1000, 2000, 4000), 3.0),
            Kind("coding/exec/build", "cpu", (2000, 4000), 7.0),
            Kind("coding/exec/edit", "cpu", (250, 500), 0.25),
        ),
        1536,
    ),
    Tenant(
        "deep-search",
        1.0,
        22,
        3.0,
        (Kind("search/call/web", "search-api", (1,), 0.6), Kind("search/exec/parse", "cpu", (500,), 0.8)),
        512,
    ),
    Tenant(
        "distillation",
        1.0,
        10,
        1.5,
        (
            Kind("math/score/teacher-7b", "gpu", (1,), 1.2, "teacher-7b"),
            Kind("math/score/teacher-70b", "gpu", (4,), 4.0, "teacher-70b"),
        ),
    ),
    Tenant("nightly-eval", 0.5, 8, 8.0, (Kind("eval/exec/swe-task", "cpu", (1000, 2000), 9.0),), 2048),
)

CORES, NUMA_CORES, DEVICES, MEMORY_MIB, REQUESTS = 32_000, 16_000, 8, 96 * 1024, 300


class Doing(msgspec.Struct):
    """An action that has not settled."""

    id: str
    tenant: Tenant
    kind: Kind
    trajectory: Walk
    units: int
    submitted_s: float
    needed_s: float
    status: str
    granted_s: float | None = None
    overhead_s: float = 0.0
    parts: tuple[int, ...] = ()
    lines: list[v.StoryLine] = []


class Walk(msgspec.Struct):
    """A trajectory: thinks, acts, thinks again, and is followed by another one after its last turn."""

    name: str
    tenant: Tenant
    began_s: float
    turns: int
    wakes_s: float
    acting: Doing | None = None
    actions: int = 0
    last_used_s: float = 0.0
    thinking_s: float = 0.0


class Model:
    def __init__(self, seed: int = 1, *, tenants: tuple[Tenant, ...] = TENANTS, at: float = 1_790_000_000.0) -> None:
        self.random = random.Random(seed)
        self.instance = f"instance-{seed}"
        self.recovered = ""
        self.state = "up"
        self.began_at = at
        self.now = 0.0
        self.tenants = tenants
        self.waiting: deque[Doing] = deque()
        self.running: list[Doing] = []
        self.rows: list[v.TimelineRow] = []
        self.changes_by_id: dict[str, tuple[Doing, str]] = {}
        self.spent: deque[float] = deque()
        self.resident = [""] * DEVICES
        self.history: deque[v.HistoryBucket] = deque(maxlen=v.BUCKETS_MAX)
        self.busy: dict[str, float] = {}
        self.busy_steps = 0
        self.bucket_rows = 0
        self.names = 0
        self.actions = 0
        self.settled: dict[str, dict[str, int]] = {t.name: {} for t in tenants}
        self.time_breakdown: dict[str, dict[str, float]] = {t.name: {} for t in tenants}
        self.walks = [self.walk(t) for t in tenants for _ in range(t.trajectories)]

    # Going on.

    def advance(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / STEP_S))):
            self.step()

    def settle(self, rows: int) -> None:
        """Goes on until that many actions have settled."""
        while len(self.rows) < rows:
            self.step()

    def step(self) -> None:
        self.now = round(self.now + STEP_S, 6)
        while self.spent and self.spent[0] < self.now - WINDOW_S:
            self.spent.popleft()
        for doing in [d for d in self.running if d.granted_s is not None and self.now >= d.granted_s + d.needed_s]:
            self.end(doing)
        for walk in self.walks:
            if walk.acting is None:
                walk.thinking_s += STEP_S
                if self.now >= walk.wakes_s:
                    self.submit(walk)
        self.admit()
        self.count()

    def walk(self, tenant: Tenant) -> Walk:
        self.names += 1
        wakes = self.now + self.random.expovariate(1 / tenant.think_s)
        turns = self.random.randint(4, 14)
        return Walk(f"{tenant.kinds[0].name.split('/')[0]}-{self.names:05d}", tenant, self.now, turns, wakes)

    def submit(self, walk: Walk) -> None:
        self.actions += 1
        kind = self.random.choice(walk.tenant.kinds)
        status = self.random.choices(("succeeded", "timed_out", "cancelled", "lost"), (97, 1.6, 1, 0.4))[0]
        needed = min(60.0, self.random.lognormvariate(math.log(kind.mean_s), 0.6))
        doing = Doing(
            f"{walk.tenant.name}/{walk.name}-{walk.actions + 1}",
            walk.tenant,
            kind,
            walk,
            self.random.choice(kind.units),
            self.now,
            needed,
            status,
            lines=[v.StoryLine(at_s=self.now, text=f"submitted by trajectory {walk.name}, class {kind.name}")],
        )
        walk.acting = doing
        self.waiting.append(doing)
        self.changes_by_id[doing.id] = (doing, "queued")

    def admit(self) -> None:
        closed: set[str] = set()
        for doing in list(self.waiting):
            parts = None if doing.kind.pool in closed else self.places(doing)
            if parts is None:
                closed.add(doing.kind.pool)
                continue
            self.waiting.remove(doing)
            self.running.append(doing)
            doing.parts = parts
            doing.granted_s = self.now
            loading = doing.kind.service and any(self.resident[k] != doing.kind.service for k in parts)
            doing.overhead_s = min(doing.needed_s * 0.6, 0.8 if loading else 0.04 + self.random.random() * 0.1)
            if doing.kind.service:
                for k in parts:
                    self.resident[k] = doing.kind.service
            if doing.kind.pool == "search-api":
                self.spent.append(self.now)
            text = f"granted {doing.units} of {doing.kind.pool} after {self.now - doing.submitted_s:.1f} s"
            doing.lines.append(v.StoryLine(at_s=self.now, text=text))
            self.changes_by_id[doing.id] = (doing, "running")

    def places(self, doing: Doing) -> tuple[int, ...] | None:
        """Where it would run now; None: nowhere."""
        if doing.kind.pool == "cpu":
            for numa in range(CORES // NUMA_CORES):
                if self.cores(numa) + doing.units <= NUMA_CORES:
                    return (numa,)
            return None
        if doing.kind.pool == "gpu":
            taken = {k for d in self.running if d.kind.pool == "gpu" for k in d.parts}
            chunks = [tuple(range(k, k + doing.units)) for k in range(0, DEVICES, doing.units)]
            free = [chunk for chunk in chunks if not taken & set(chunk)]
            free.sort(key=lambda chunk: sum(self.resident[k] != doing.kind.service for k in chunk))
            return free[0] if free else None
        held = sum(1 for d in self.running if d.kind.pool == doing.kind.pool)
        return () if len(self.spent) + held < REQUESTS else None

    def cores(self, numa: int) -> int:
        return sum(d.units for d in self.running if d.kind.pool == "cpu" and numa in d.parts)

    def end(self, doing: Doing) -> None:
        assert doing.granted_s is not None
        walk = doing.trajectory
        self.running.remove(doing)
        waiting = doing.granted_s - doing.submitted_s
        execution = self.now - doing.granted_s - doing.overhead_s
        began = doing.granted_s + doing.overhead_s
        doing.lines += [
            v.StoryLine(at_s=began, text=f"started on node-a, NUMA or devices {list(doing.parts)}"),
            v.StoryLine(at_s=self.now, text=f"{doing.status} after {execution:.2f} s of execution"),
        ]
        self.changes_by_id[doing.id] = (doing, doing.status)
        cpu = doing.units if doing.kind.pool == "cpu" else 0
        times = (doing.submitted_s, doing.granted_s, self.now, waiting, execution, doing.overhead_s)
        who = (doing.id, doing.tenant.name, walk.name, doing.kind.name, doing.status)
        self.rows.append(v.TimelineRow(len(self.rows) + 1, *who, *times, cpu, "node-a"))
        ends = self.settled[doing.tenant.name]
        ends[doing.status] = ends.get(doing.status, 0) + 1
        spent = self.time_breakdown[doing.tenant.name]
        pool = "api" if doing.kind.pool == "search-api" else doing.kind.pool
        for key, seconds in ((pool, waiting), (".execution", execution), (".overhead", doing.overhead_s)):
            spent[key] = spent.get(key, 0.0) + seconds
        walk.acting = None
        walk.actions += 1
        walk.last_used_s = self.now
        walk.wakes_s = self.now + self.random.expovariate(1 / doing.tenant.think_s)
        if walk.actions >= walk.turns:
            spent[".thinking"] = spent.get(".thinking", 0.0) + walk.thinking_s
            self.walks[self.walks.index(walk)] = self.walk(doing.tenant)

    # Looking back.

    def used(self) -> dict[str, float]:
        devices = sum(d.units for d in self.running if d.kind.pool == "gpu")
        calls = sum(1 for d in self.running if d.kind.pool == "search-api")
        memory = sum(walk.tenant.memory_mib for walk in self.open_sandboxes())
        return {
            "cpu": sum(self.cores(numa) for numa in range(2)) / CORES,
            "memory": memory / MEMORY_MIB,
            "gpu": devices / DEVICES,
            "search-api": min(1.0, (len(self.spent) + calls) / REQUESTS),
        }

    def open_sandboxes(self) -> list[Walk]:
        return [walk for walk in self.walks if walk.tenant.memory_mib and (walk.actions or walk.acting)]

    def count(self) -> None:
        for pool, part in self.used().items():
            self.busy[pool] = self.busy.get(pool, 0.0) + part
        self.busy_steps += 1
        if self.busy_steps * STEP_S < v.BUCKET_S - 1e-9:
            return
        rows = self.rows[self.bucket_rows :]
        act = percentiles([row.ended_s - row.submitted_s for row in rows])
        bucket = v.HistoryBucket(
            from_s=self.now - v.BUCKET_S,
            ended=len(rows),
            p50_s=act.p50_s,
            p95_s=act.p95_s,
            p99_s=act.p99_s,
            waiting_s=sum(row.waiting_s for row in rows),
            execution_s=sum(row.execution_s for row in rows),
            overhead_s=sum(row.overhead_s for row in rows),
            waiting=len(self.waiting),
            running=len(self.running),
            busy={pool: total / self.busy_steps for pool, total in self.busy.items()},
        )
        self.history.append(bucket)
        self.busy, self.busy_steps, self.bucket_rows = {}, 0, len(self.rows)

    # The records.

    def view(self) -> v.View:
        sandboxes = tuple(self.sandbox(walk) for walk in self.open_sandboxes())
        recent = [row for row in self.rows if row.ended_s > self.now - HOUR_S]
        return v.View(
            now_s=self.now,
            at=self.began_at + self.now,
            service=self.service(),
            pools=self.pools() if self.tenants else (),
            runs=tuple(self.run(tenant, recent) for tenant in self.tenants),
            classes=classes(recent),
            waiting=tuple(self.waits(doing) for doing in list(self.waiting)[: v.WAITING_SHOWN_MAX]),
            waiting_total=len(self.waiting),
            running=tuple(self.runs(doing) for doing in self.running),
            running_total=len(self.running),
            sandboxes=sandboxes,
            sandboxes_total=len(sandboxes),
            history=tuple(self.history) if self.tenants else (),
        )

    def service(self) -> v.ServiceView:
        return v.ServiceView(
            version="0.1.0",
            state=self.state,
            began_at=self.began_at,
            instance=self.instance,
            policy="adaptive",
            durability="process",
            recovered=self.recovered,
        )

    def pools(self) -> tuple[v.PoolView, ...]:
        held = {
            pool: [d for d in self.running if d.kind.pool == pool] for pool in ("cpu", "gpu", "search-api")
        }  # fmt: skip
        numa = tuple(v.PoolPart(index=k, total=NUMA_CORES, held=self.cores(k)) for k in range(2))
        taken = {k for d in held["gpu"] for k in d.parts}
        devices = tuple(
            v.PoolPart(index=k, total=1, held=int(k in taken), service=self.resident[k]) for k in range(DEVICES)
        )
        boxes = [
            v.PoolHolder(id=f"{w.name}-box", run=w.tenant.name, units=w.tenant.memory_mib)
            for w in self.open_sandboxes()
        ]
        return (
            self.pool("cpu", "cpu", "milli-cores", CORES, holders_of(held["cpu"]), parts=numa),
            self.pool("memory", "memory", "MiB", MEMORY_MIB, tuple(boxes)),
            self.pool("gpu", "gpu", "devices", DEVICES, holders_of(held["gpu"]), parts=devices),
            self.pool("search-api", "api", "requests", REQUESTS, holders_of(held["search-api"]), window_s=WINDOW_S),
        )

    def pool(
        self,
        name: str,
        kind: str,
        unit: str,
        total: int,
        holders: tuple[v.PoolHolder, ...],
        *,
        parts: tuple[v.PoolPart, ...] = (),
        window_s: float | None = None,
    ) -> v.PoolView:
        units = sum(holder.units for holder in holders)
        spent = max(0, len(self.spent) - units) if window_s else 0
        return v.PoolView(
            name=name,
            kind=kind,
            node="" if window_s else "node-a",
            unit=unit,
            total=total,
            held=units,
            spent=spent,
            free=total - units - spent,
            waiting=sum(1 for doing in self.waiting if doing.kind.pool == name),
            window_s=window_s,
            parts=parts,
            holders=holders,
        )

    def run(self, tenant: Tenant, recent: list[v.TimelineRow]) -> v.RunView:
        name = tenant.name
        mine = [d for d in self.running if d.tenant is tenant]
        cores = sum(d.units for d in mine if d.kind.pool == "cpu") / CORES
        devices = sum(d.units for d in mine if d.kind.pool == "gpu") / DEVICES
        spent = self.time_breakdown[name]
        waiting = {pool: seconds for pool, seconds in spent.items() if not pool.startswith(".")}
        rest = {key: spent.get(f".{key}", 0.0) for key in ("execution", "overhead", "thinking")}
        return v.RunView(
            name=name,
            weight=tenant.weight,
            share=max(cores, devices),
            waiting=sum(1 for d in self.waiting if d.tenant is tenant),
            running=len(mine),
            sandboxes=sum(1 for walk in self.open_sandboxes() if walk.tenant is tenant),
            settled=dict(self.settled[name]),
            act=percentiles([row.ended_s - row.submitted_s for row in recent if row.run == name]),
            time_breakdown=v.TimeBreakdown(
                total_s=sum(waiting.values()) + sum(rest.values()),
                waiting_s=waiting,
                execution_s=rest["execution"],
                overhead_s=rest["overhead"],
                thinking_s=rest["thinking"],
            ),
        )

    def waits(self, doing: Doing) -> v.WaitingView:
        return v.WaitingView(
            id=doing.id,
            run=doing.tenant.name,
            trajectory=doing.trajectory.name,
            name=doing.kind.name,
            since_s=doing.submitted_s,
            reason=self.reason(doing),
        )

    def reason(self, doing: Doing) -> str:
        first = next(one for one in self.waiting if one.kind.pool == doing.kind.pool)
        lack = f"{doing.units} of {doing.kind.pool}, of which too little is free"
        if first is doing:
            return f"{doing.id} waits for {lack}"
        return f"{doing.id} waits behind {first.id}, which goes first and waits for {lack}"

    def runs(self, doing: Doing) -> v.RunningView:
        assert doing.granted_s is not None
        begun = self.now >= doing.granted_s + doing.overhead_s
        return v.RunningView(
            id=doing.id,
            run=doing.tenant.name,
            trajectory=doing.trajectory.name,
            name=doing.kind.name,
            state="running" if begun else "starting",
            submitted_s=doing.submitted_s,
            started_s=doing.granted_s,
            node="" if doing.kind.pool == "search-api" else "node-a",
            units={doing.kind.pool: doing.units},
        )

    def sandbox(self, walk: Walk) -> v.SandboxView:
        active = int(walk.acting is not None and walk.acting.granted_s is not None)
        return v.SandboxView(
            name=f"{walk.name}-box",
            run=walk.tenant.name,
            node="node-a" if active or walk.actions else "",
            memory_mib=walk.tenant.memory_mib,
            opened_s=walk.began_s,
            active=active,
            actions=walk.actions + active,
            last_used_s=self.now if active else walk.last_used_s,
        )

    def timeline(self, after: int, limit: int) -> v.TimelineView:
        first = max(after, len(self.rows) - v.TIMELINE_ROWS_MAX)
        rows = tuple(self.rows[first : first + limit])
        last = rows[-1].seq if rows else after
        return v.TimelineView(instance=self.instance, rows=rows, last=last, forgotten=first - after)

    def story(self, id: str) -> v.Story | None:
        if id not in self.changes_by_id:
            return None
        doing, status = self.changes_by_id[id]
        explanation = {"queued": self.reason, "running": where}.get(status, ending)(doing)
        return v.Story(
            id=id,
            run=doing.tenant.name,
            name=doing.kind.name,
            status=status,
            explanation=explanation,
            lines=tuple(doing.lines),
        )


def where(doing: Doing) -> str:
    return f"{doing.id} is running on {doing.units} of {doing.kind.pool}"


def ending(doing: Doing) -> str:
    return "" if doing.status == "succeeded" else f"{doing.status}: as the model drew it"


def holders_of(doings: list[Doing]) -> tuple[v.PoolHolder, ...]:
    ordered = sorted(doings, key=lambda d: -d.units)[:200]
    return tuple(v.PoolHolder(id=d.id, run=d.tenant.name, units=d.units, parts=d.parts) for d in ordered)


def percentiles(times: list[float]) -> v.Percentiles:
    if not times:
        return v.Percentiles()
    ordered = sorted(times)
    p50, p95, p99 = (ordered[round((len(ordered) - 1) * part)] for part in (0.5, 0.95, 0.99))
    return v.Percentiles(count=len(times), mean_s=sum(times) / len(times), p50_s=p50, p95_s=p95, p99_s=p99)


def classes(rows: list[v.TimelineRow]) -> tuple[v.ClassView, ...]:
    by_name: dict[str, list[v.TimelineRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    found = []
    for name, mine in by_name.items():
        means = {
            key: sum(getattr(row, key) for row in mine) / len(mine)
            for key in ("waiting_s", "execution_s", "overhead_s")
        }
        found.append(v.ClassView(name=name, act=percentiles([r.ended_s - r.submitted_s for r in mine]), **means))
    return tuple(sorted(found, key=lambda one: -one.act.mean_s * one.act.count)[:50])
