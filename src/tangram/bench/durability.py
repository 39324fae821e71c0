"""What is left of acknowledged actions when the service is killed with SIGKILL, again and again.

`tangram serve` runs in a process of its own. Clients keep actions under way in it, over the SDK's connection, which
waits for a service that is down and asks again under the same id. Every action writes its id to a file when it runs,
which is read at the end: what really ran is counted outside of the service. Some actions are declared idempotent. The
service is killed at moments drawn from the seed, some of them while it is still starting, and each time is started
anew on the same journal and port.

On the backend "sandbox" the sandboxes outlive the service, and what waited in them goes on. On "process" they do not:
an action that waited for a sandbox that is gone has a result which says so, and its client opens another one.

`lost` counts actions that were acknowledged and of which no result came, or of which a result that had come was another
one or none when it was asked for at the end. `run_twice` counts actions that were not declared idempotent and ran more
than once; `false_success` those that are said to have succeeded and never ran. `lost_while_running` is no failure: they
ran when the service was killed, and say so. `recovery_s_max` is the longest time from the start of a process to its
answer that it is ready, when all is recovered.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_most
from tangram.bench.service_process import ServiceProcess, a_folder
from tangram.client.remote import Wire
from tangram.core.action import Outcome, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.errors import FileFailed, ManagerError, TangramError
from tangram.managers.work import MIB, Close, Exec, Open, SandboxSpec
from tangram.runtime.wire import Acknowledged, AnyWork, Reply, Submission
from tangram.server.journal.recovery import RESTARTED

OPTIONS = ("backend",)

CORES = 2.0
"""Of the service: fewer than there are actions under way, so that most of them wait when it is killed."""
DEMAND = Demand({CPU: cores(0.5)})
SPEC = SandboxSpec(memory_bytes=32 * MIB)
WAIT_S = 20.0
"""Of one long poll."""
RECONNECT_S = 60.0
"""A service that is not back by then makes all its actions lost."""
AFTER_S_MAX = 0.1
"""The service is killed up to so long after the number of results was reached that was drawn for it."""
EARLY_EVERY, EARLY_S_MAX = 5, 0.6
"""One kill of so many is followed by another one while the next process is starting, up to so long after its start."""
IDEMPOTENT_EVERY = 5
ACKNOWLEDGED_EVERY = 2
"""Of the results that arrived, so many are acknowledged; all others must still be there at the end."""
OPEN_TRIES = 20

_reply = msgspec.json.Decoder(Reply).decode


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    actions: int = 5000
    kills: int = 50
    clients: int = 8
    """Each with a sandbox of its own."""
    at_once: int = 6
    """Actions under way of each."""
    seed: int = 0


FULL = Sizes()
QUICK = Sizes(actions=1000, kills=10)


def measure(
    sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress, backend: str = ""
) -> BenchResult:
    with a_folder(backend) as (folder, chosen):
        return asyncio.run(_measure(sizes, folder, chosen, progress))


async def _measure(sizes: Sizes, folder: Path, backend: str, progress: Progress) -> BenchResult:
    found = Findings()
    (folder / "state").mkdir(mode=0o711)
    tables = {"node": {"backend": backend, "cores": CORES, "state": str(folder / "state")}}
    async with ServiceProcess(folder, tables) as service:
        wire = Wire(service.url, "", "", RECONNECT_S)
        await wire.open()
        try:
            clients = Clients(sizes, wire, folder, backend)
            recoveries, early = await _killed_again_and_again(sizes, service, clients, progress)
            await clients.close()
            forgotten = await clients.forgotten()
        finally:
            await wire.close()
    add_metrics(found, clients, forgotten, recoveries)
    found.notes.append(
        f"Backend {backend}; {sizes.kills} kills under load, and {early} more while the next process was starting."
    )
    return found.result("durability", "measured", sizes)


async def _killed_again_and_again(
    sizes: Sizes, service: ServiceProcess, clients: Clients, progress: Progress
) -> tuple[list[float], int]:
    """The seconds of each recovery, and how often a process was killed that was not up yet."""
    draw = random.Random(sizes.seed)
    recoveries, early = [], 0
    async with asyncio.TaskGroup() as group:
        running = group.create_task(clients.run())
        for number, results in enumerate(sorted(draw.sample(range(sizes.actions), sizes.kills))):
            await clients.until(results)
            await asyncio.sleep(draw.uniform(0.0, AFTER_S_MAX))
            service.kill()
            if number % EARLY_EVERY == EARLY_EVERY - 1:
                early += 1
                await service.start_and_kill(draw.uniform(0.0, EARLY_S_MAX))
            recoveries.append(await service.start())
            progress((number + 1) / (sizes.kills + 1))
        await running
    return recoveries, early


def add_metrics(found: Findings, clients: Clients, forgotten: int, recoveries: list[float]) -> None:
    """All metrics; `forgotten` results the service no longer has, `recoveries` in seconds."""
    outcomes = clients.outcome_by_id
    runs = collections.Counter(clients.ran)
    never = len(clients.acknowledged - outcomes.keys())
    succeeded = [id for id, outcome in outcomes.items() if outcome.status is Status.SUCCEEDED]
    unseen = sum(not runs[id] for id in succeeded if id not in clients.unseen)
    restarted = sum(outcome.reason == RESTARTED for outcome in outcomes.values())
    found.add("lost", float(never + forgotten), at_most(0.0))
    found.add("run_twice", float(sum(runs[id] > 1 for id in runs if id not in clients.idempotent)), at_most(0.0))
    found.add("false_success", float(unseen), at_most(0.0))
    found.add("recovery_s_max", max(recoveries), at_most(2.0))
    found.add("recovery_s_p50", statistics.median(recoveries), PRINTED)
    found.add("lost_while_running", float(restarted), PRINTED)
    found.add("run_again", float(sum(runs[id] > 1 for id in clients.idempotent)), PRINTED)
    found.add("sandboxes_lost", float(sum(box.is_gone for box in clients.boxes)), PRINTED)
    other = len(outcomes) - len(succeeded) - restarted
    found.add("settled_otherwise", float(other), PRINTED)
    reasons = collections.Counter(
        clients.shown(outcome) for outcome in outcomes.values() if outcome.status is not Status.SUCCEEDED
    )
    found.notes.append(
        f"{len(outcomes)} results, {len(succeeded)} of them succeeded"
        + "".join(f"; {count} {reason}" for reason, count in reasons.most_common(4))
        + "."
    )


class _Box:
    """A sandbox of a client, which may be gone after any restart."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gone = False
        self.ids: list[str] = []
        """Actions that were submitted in it."""


class Clients:
    """All who ask for actions, and what they know."""

    def __init__(self, sizes: Sizes, wire: Wire, folder: Path, backend: str) -> None:
        self._sizes = sizes
        self._wire = wire
        self._inside = backend == "sandbox"
        self._trace = "trace" if self._inside else str(folder / "trace")
        """Where actions write their ids: in a sandbox, or in a folder that all of them see."""
        self._shared_trace = folder / "trace"
        self._names = itertools.count(1)
        self._news = asyncio.Condition()
        self._to_acknowledge: list[str] = []
        self._kept: list[str] = []
        """Actions of which the result was not acknowledged."""
        self.acknowledged: set[str] = set()
        """By the service: these it must not lose."""
        self.outcome_by_id: dict[str, Outcome] = {}
        self.idempotent: set[str] = set()
        self.ran: list[str] = []
        """Ids in the order in which they were written."""
        self.unseen: set[str] = set()
        """Actions of sandboxes that are gone with their files."""
        self.boxes: list[_Box] = []

    # ---- what they do ----

    async def run(self) -> None:
        left = iter(range(self._sizes.actions))
        async with asyncio.TaskGroup() as group:
            for _ in range(self._sizes.clients):
                group.create_task(self._client(left))

    async def until(self, results: int) -> None:
        """So many results have come."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.outcome_by_id) >= results)

    async def close(self) -> None:
        """Read what was written, and end all sandboxes."""
        for box in self.boxes:
            await self._leave(box)
        if not self._inside and self._shared_trace.exists():
            self.ran += self._shared_trace.read_text().split()

    async def _client(self, left: Iterator[int]) -> None:
        box, opening = await self._open(), asyncio.Lock()

        async def one_by_one() -> None:
            nonlocal box
            for number in left:  # shared by all clients
                async with opening:
                    if box.is_gone:
                        box = await self._open()
                await self._act(box, f"a{number}", idempotent=number % IDEMPOTENT_EVERY == 0)

        await asyncio.gather(*(one_by_one() for _ in range(self._sizes.at_once)))

    async def _open(self) -> _Box:
        for _ in range(OPEN_TRIES):
            box = _Box(f"box-{next(self._names)}")
            submission = Submission(id=f"open-{box.name}", work=Open(spec=SPEC), sandbox=box.name, idempotent=True)
            reply = await self._settled(submission)
            if reply.settled is not None and reply.settled.outcome.status is Status.SUCCEEDED:
                self.boxes.append(box)
                return box
        raise ManagerError(f"expected a sandbox within {OPEN_TRIES} tries; the last answer was {reply}", retry=False)

    async def _act(self, box: _Box, id: str, *, idempotent: bool) -> None:
        if idempotent:
            self.idempotent.add(id)
        box.ids.append(id)
        command = f"echo {id} >> {self._trace}"
        submission = self._submission(id, Exec(command=command), box.name, idempotent)
        try:
            await self._wire.ask("POST", "/v1/actions", submission, wait_s=0.0)
            self.acknowledged.add(id)
        except ManagerError:
            box.is_gone = True  # it may have been taken in by a service that was killed before it could say so
        try:
            reply = await self._looked(id)
        except ManagerError:
            if id in self.acknowledged:
                return  # it is lost, and counted as such
            outcome = Outcome(action=id, status=Status.REFUSED, reason="its sandbox is gone")
        else:
            assert reply.settled is not None
            outcome = reply.settled.outcome
        await self._arrived(id, outcome)
        if outcome.status not in (Status.SUCCEEDED, Status.REFUSED) and outcome.reason != RESTARTED:
            box.is_gone = True

    def _submission(self, id: str, work: AnyWork, sandbox: str, idempotent: bool) -> Submission:
        demand = DEMAND if isinstance(work, Exec) else None
        return Submission(id=id, work=work, sandbox=sandbox, idempotent=idempotent, demand=demand)

    async def _settled(self, submission: Submission) -> Reply:
        reply = _reply(await self._wire.ask("POST", "/v1/actions", submission, wait_s=WAIT_S))
        return reply if reply.settled is not None else await self._looked(submission.id)

    async def _looked(self, id: str) -> Reply:
        """When it has settled. Raises ManagerError if nothing is known of it."""
        while True:
            reply = _reply(await self._wire.ask("GET", f"/v1/actions/{id}", wait_s=WAIT_S))
            if reply.settled is not None:
                return reply

    async def _arrived(self, id: str, outcome: Outcome) -> None:
        self.outcome_by_id[id] = outcome
        if len(self.outcome_by_id) % ACKNOWLEDGED_EVERY == 0:
            self._to_acknowledge.append(id)
        elif id in self.acknowledged:
            self._kept.append(id)
        async with self._news:
            self._news.notify_all()
        if len(self._to_acknowledge) >= 50:
            ids, self._to_acknowledge = self._to_acknowledge, []
            await self._wire.ask("POST", "/v1/acknowledge", Acknowledged(actions=ids))

    async def _leave(self, box: _Box) -> None:
        try:
            if self._inside:
                content = await self._wire.ask("GET", f"/v1/sandboxes/{box.name}/files", path=self._trace)
                self.ran += content.decode().split()
            await self._settled(self._submission(f"close-{box.name}", Close(), box.name, True))
        except FileFailed:
            await self._settled(self._submission(f"close-{box.name}", Close(), box.name, True))
        except TangramError:
            box.is_gone = True
            if self._inside:
                self.unseen.update(box.ids)

    # ---- what they know ----

    async def forgotten(self) -> int:
        """Results that were not acknowledged, and are not what they were."""
        count = 0
        for id in self._kept:
            try:
                reply = _reply(await self._wire.ask("GET", f"/v1/actions/{id}", wait_s=0.0))
                count += reply.settled is None or reply.settled.outcome != self.outcome_by_id[id]
            except ManagerError:
                count += 1
        return count

    def shown(self, outcome: Outcome) -> str:
        """Without the names of sandboxes, so that alike ones can be counted."""
        words = ["…" if word.strip(":;,.").startswith("box-") else word for word in outcome.reason.split()]
        return f"{outcome.status.value} ({' '.join(words)})"
