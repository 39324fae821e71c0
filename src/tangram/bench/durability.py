"""Durability of acknowledged actions when the service is killed with SIGKILL again and again.

Clients keep actions in flight over the SDK's connection, which waits for a service that is down and retries under the
same id. Every action appends its id to a file when it runs; the file is read at the end, so executions are counted
outside of the service. The service is killed at times drawn from the seed, sometimes during start-up, and is restarted
on the same journal and port.

On the backend "sandbox", sandboxes survive the service, and actions waiting in them continue. On "process" they do not:
an action that waited for a lost sandbox settles with a result that reports it, and its client opens another sandbox.
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

from tangram.bench.base import PRINTED, BenchRun, Progress, at_most
from tangram.bench.service_process import ServiceProcess
from tangram.client.remote_connection import RemoteConnection
from tangram.core.action import Outcome, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.errors import FileFailed, ManagerError, TangramError
from tangram.managers.work import MIB, Close, Exec, Open, SandboxSpec
from tangram.runtime.wire import Acknowledgement, ActionReply, AnyWork, Submission
from tangram.server.recovery import RESTARTED_REASON

OPTIONS = ("backend",)

CORES = 2.0
"""Fewer than the actions in flight, so that most of them wait when the service is killed."""
DEMAND = Demand({CPU: cores(0.5)})
SPEC = SandboxSpec(memory_bytes=32 * MIB)
WAIT_S = 20.0
"""Timeout of one long poll."""
RECONNECT_S = 60.0
"""If the service is not back by then, all its actions are lost."""
AFTER_S_MAX = 0.1
"""Maximum delay between the drawn number of results and the kill."""
EARLY_EVERY, EARLY_S_MAX = 5, 0.6
"""Every n-th kill is followed by another one during the next start-up, at most this long after it began."""
IDEMPOTENT_EVERY = 5
ACKNOWLEDGED_EVERY = 2
"""Every n-th result is acknowledged; all others must still be available at the end."""
OPEN_TRIES = 20

_reply = msgspec.json.Decoder(ActionReply).decode


class DurabilitySizes(msgspec.Struct, frozen=True, kw_only=True):
    actions: int = 5000
    kills: int = 50
    clients: int = 8
    """Clients, each with a sandbox of its own."""
    at_once: int = 6
    """Actions in flight per client."""
    seed: int = 0


LABEL = "measured"
FULL = DurabilitySizes()
QUICK = DurabilitySizes(actions=1000, kills=10)


async def measure(sizes: DurabilitySizes, run: BenchRun) -> None:
    (run.folder / "state").mkdir(mode=0o711)
    tables = {"node": {"backend": run.backend, "cores": CORES, "state": str(run.folder / "state")}}
    async with ServiceProcess(run.folder, tables) as service:
        wire = RemoteConnection(service.url, "", "", RECONNECT_S)
        await wire.open()
        try:
            clients = Clients(sizes, wire, run.folder, run.backend)
            recoveries, early = await _kill_repeatedly(sizes, service, clients, run.progress)
            await clients.close()
            forgotten = await clients.count_forgotten()
        finally:
            await wire.close()
    add_metrics(run, clients, forgotten, recoveries)
    run.notes.append(
        f"Backend {run.backend}; {sizes.kills} kills under load, and {early} more while the next process was starting."
    )


async def _kill_repeatedly(
    sizes: DurabilitySizes, service: ServiceProcess, clients: Clients, progress: Progress
) -> tuple[list[float], int]:
    """Return the seconds of each recovery, and the number of processes killed during start-up."""
    draw = random.Random(sizes.seed)
    recoveries, early = [], 0
    async with asyncio.TaskGroup() as group:
        running = group.create_task(clients.run())
        for number, results in enumerate(sorted(draw.sample(range(sizes.actions), sizes.kills))):
            await clients.wait_for_results(results)
            await asyncio.sleep(draw.uniform(0.0, AFTER_S_MAX))
            service.kill()
            if number % EARLY_EVERY == EARLY_EVERY - 1:
                early += 1
                await service.start_and_kill(draw.uniform(0.0, EARLY_S_MAX))
            recoveries.append(await service.start())
            progress((number + 1) / (sizes.kills + 1))
        await running
    return recoveries, early


def add_metrics(run: BenchRun, clients: Clients, forgotten: int, recoveries: list[float]) -> None:
    """Add all metrics; `forgotten` is the number of results that the service no longer has, `recoveries` is in
    seconds."""
    outcomes = clients.outcome_by_id
    runs = collections.Counter(clients.executed_ids)
    never = len(clients.acknowledged - outcomes.keys())
    succeeded = [action_id for action_id, outcome in outcomes.items() if outcome.status is Status.SUCCEEDED]
    unseen = sum(not runs[action_id] for action_id in succeeded if action_id not in clients.unobservable)
    restarted = sum(outcome.reason == RESTARTED_REASON for outcome in outcomes.values())
    run.add("lost", float(never + forgotten), at_most(0.0))
    run.add(
        "run_twice",
        float(sum(runs[action_id] > 1 for action_id in runs if action_id not in clients.idempotent)),
        at_most(0.0),
    )
    run.add("false_success", float(unseen), at_most(0.0))
    run.add("recovery_s_max", max(recoveries), at_most(2.0))
    run.add("recovery_s_p50", statistics.median(recoveries), PRINTED)
    run.add("lost_while_running", float(restarted), PRINTED)
    run.add("run_again", float(sum(runs[action_id] > 1 for action_id in clients.idempotent)), PRINTED)
    run.add("sandboxes_lost", float(sum(sandbox.is_gone for sandbox in clients.sandboxes)), PRINTED)
    other = len(outcomes) - len(succeeded) - restarted
    run.add("settled_otherwise", float(other), PRINTED)
    reasons = collections.Counter(
        clients.describe_outcome(outcome) for outcome in outcomes.values() if outcome.status is not Status.SUCCEEDED
    )
    run.notes.append(
        f"{len(outcomes)} results, {len(succeeded)} of them succeeded"
        + "".join(f"; {count} {reason}" for reason, count in reasons.most_common(4))
        + "."
    )


class _ClientSandbox(msgspec.Struct, eq=False):
    """A sandbox of a client; it may be lost in any restart."""

    name: str
    is_gone: bool = False
    action_ids: list[str] = []
    """Actions submitted in it."""


class Clients:
    """All clients and the outcomes that they have received."""

    def __init__(self, sizes: DurabilitySizes, wire: RemoteConnection, folder: Path, backend: str) -> None:
        self._sizes = sizes
        self._wire = wire
        self._trace_is_in_sandbox = backend == "sandbox"
        self._trace = "trace" if self._trace_is_in_sandbox else str(folder / "trace")
        """Where actions append their ids: in a sandbox, or in a shared folder."""
        self._shared_trace = folder / "trace"
        self._names = itertools.count(1)
        self._results_changed = asyncio.Condition()
        self._to_acknowledge: list[str] = []
        self._unacknowledged: list[str] = []
        """Actions whose result was not acknowledged."""
        self.acknowledged: set[str] = set()
        """Acknowledged by the service, which must not lose them."""
        self.outcome_by_id: dict[str, Outcome] = {}
        self.idempotent: set[str] = set()
        self.executed_ids: list[str] = []
        """Ids in the order in which they were written."""
        self.unobservable: set[str] = set()
        """Actions of sandboxes that were lost with their files."""
        self.sandboxes: list[_ClientSandbox] = []

    # ---- running ---------

    async def run(self) -> None:
        left = iter(range(self._sizes.actions))
        async with asyncio.TaskGroup() as group:
            for _ in range(self._sizes.clients):
                group.create_task(self._client(left))

    async def wait_for_results(self, results: int) -> None:
        """Wait until this many results have arrived."""
        async with self._results_changed:
            await self._results_changed.wait_for(lambda: len(self.outcome_by_id) >= results)

    async def close(self) -> None:
        """Read the files and close all sandboxes."""
        for sandbox in self.sandboxes:
            await self._close_sandbox(sandbox)
        if not self._trace_is_in_sandbox and self._shared_trace.exists():
            self.executed_ids += self._shared_trace.read_text().split()

    async def _client(self, left: Iterator[int]) -> None:
        sandbox, opening = await self._open_sandbox(), asyncio.Lock()

        async def one_by_one() -> None:
            nonlocal sandbox
            for number in left:  # shared by all clients
                async with opening:
                    if sandbox.is_gone:
                        sandbox = await self._open_sandbox()
                await self._run_action(sandbox, f"a{number}", idempotent=number % IDEMPOTENT_EVERY == 0)

        await asyncio.gather(*(one_by_one() for _ in range(self._sizes.at_once)))

    async def _open_sandbox(self) -> _ClientSandbox:
        for _ in range(OPEN_TRIES):
            sandbox = _ClientSandbox(f"box-{next(self._names)}")
            submission = Submission(
                id=f"open-{sandbox.name}", work=Open(spec=SPEC), sandbox=sandbox.name, idempotent=True
            )
            reply = await self._submit_and_wait(submission)
            if reply.settled is not None and reply.settled.outcome.status is Status.SUCCEEDED:
                self.sandboxes.append(sandbox)
                return sandbox
        raise ManagerError(f"expected a sandbox within {OPEN_TRIES} tries; the last answer was {reply}", retry=False)

    async def _run_action(self, sandbox: _ClientSandbox, action_id: str, *, idempotent: bool) -> None:
        if idempotent:
            self.idempotent.add(action_id)
        sandbox.action_ids.append(action_id)
        command = f"echo {action_id} >> {self._trace}"
        submission = self._submission(action_id, Exec(command=command), sandbox.name, idempotent)
        try:
            await self._wire.call("POST", "/v1/actions", submission, wait_s=0.0)
            self.acknowledged.add(action_id)
        except ManagerError:
            sandbox.is_gone = True  # a service may have accepted it and been killed before it answered
        try:
            reply = await self._poll_until_settled(action_id)
        except ManagerError:
            if action_id in self.acknowledged:
                return  # counted as lost
            outcome = Outcome(action=action_id, status=Status.REFUSED, reason="its sandbox is gone")
        else:
            assert reply.settled is not None
            outcome = reply.settled.outcome
        await self._record_outcome(action_id, outcome)
        if outcome.status not in (Status.SUCCEEDED, Status.REFUSED) and outcome.reason != RESTARTED_REASON:
            sandbox.is_gone = True

    def _submission(self, action_id: str, work: AnyWork, sandbox: str, idempotent: bool) -> Submission:
        demand = DEMAND if isinstance(work, Exec) else None
        return Submission(id=action_id, work=work, sandbox=sandbox, idempotent=idempotent, demand=demand)

    async def _submit_and_wait(self, submission: Submission) -> ActionReply:
        reply = _reply(await self._wire.call("POST", "/v1/actions", submission, wait_s=WAIT_S))
        return reply if reply.settled is not None else await self._poll_until_settled(submission.id)

    async def _poll_until_settled(self, action_id: str) -> ActionReply:
        """Poll until the action has settled. Raises ManagerError if the service does not have it."""
        while True:
            reply = _reply(await self._wire.call("GET", f"/v1/actions/{action_id}", wait_s=WAIT_S))
            if reply.settled is not None:
                return reply

    async def _record_outcome(self, action_id: str, outcome: Outcome) -> None:
        self.outcome_by_id[action_id] = outcome
        if len(self.outcome_by_id) % ACKNOWLEDGED_EVERY == 0:
            self._to_acknowledge.append(action_id)
        elif action_id in self.acknowledged:
            self._unacknowledged.append(action_id)
        async with self._results_changed:
            self._results_changed.notify_all()
        if len(self._to_acknowledge) >= 50:
            ids, self._to_acknowledge = self._to_acknowledge, []
            await self._wire.call("POST", "/v1/acknowledge", Acknowledgement(actions=ids))

    async def _close_sandbox(self, sandbox: _ClientSandbox) -> None:
        try:
            if self._trace_is_in_sandbox:
                content = await self._wire.call("GET", f"/v1/sandboxes/{sandbox.name}/files", path=self._trace)
                self.executed_ids += content.decode().split()
            await self._submit_and_wait(self._submission(f"close-{sandbox.name}", Close(), sandbox.name, True))
        except FileFailed:
            await self._submit_and_wait(self._submission(f"close-{sandbox.name}", Close(), sandbox.name, True))
        except TangramError:
            sandbox.is_gone = True
            if self._trace_is_in_sandbox:
                self.unobservable.update(sandbox.action_ids)

    # ---- results -----------

    async def count_forgotten(self) -> int:
        """Return how many unacknowledged results are missing or different."""
        count = 0
        for action_id in self._unacknowledged:
            try:
                reply = _reply(await self._wire.call("GET", f"/v1/actions/{action_id}", wait_s=0.0))
                count += reply.settled is None or reply.settled.outcome != self.outcome_by_id[action_id]
            except ManagerError:
                count += 1
        return count

    def describe_outcome(self, outcome: Outcome) -> str:
        """Describe an outcome without names of sandboxes, so that equal ones can be counted."""
        words = ["…" if word.strip(":;,.").startswith("box-") else word for word in outcome.reason.split()]
        return f"{outcome.status.value} ({' '.join(words)})"
