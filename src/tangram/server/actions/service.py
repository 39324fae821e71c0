"""The action service: tenants submit actions, wait for them, follow their output and cancel them.

Owns what callers know of: actions under way by id, open sandboxes, outputs that are followed. Never lets a caller see
or touch what is another's. Promises that an action which was acknowledged is in the journal; that the same submission,
however often it is sent, is one action; that a result is there until its caller has said that it arrived, or it is too
old; and that what a caller left behind, a sandbox or a quota that it holds, is taken back after a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import count

import msgspec

from tangram.config import RunLimits
from tangram.core.action import Action, Outcome, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.core.messages import Concluded, Pool, PoolChanged, RunChanged
from tangram.errors import AdmissionRefused, InvalidInput, ManagerError, TangramError
from tangram.managers.functions import BoxedFunctionManager
from tangram.managers.functions.work import Call, Post
from tangram.managers.quotas.adaptive_rate import advice_of
from tangram.managers.quotas.manager import Quota, QuotaManager
from tangram.managers.work import MIB, Close, Commit, Exec, Hold, Open, Prepare, SandboxSpec
from tangram.runtime.error_records import Draining, NotFound, fault_of
from tangram.runtime.orchestrator import Orchestrator, Settled
from tangram.runtime.wire import AnyWork, Caps, Chunk, Ended, Reply, SandboxReply, Submission
from tangram.server.actions.drain_gate import Gate
from tangram.server.actions.images import OwnedImages
from tangram.server.actions.instance_limits import Rooms
from tangram.server.actions.output_buffer import EndedTails, Tail
from tangram.server.actions.registry import Live, Lives
from tangram.server.actions.tenants import space_of
from tangram.server.actions.translate import (
    ERRAND,
    Names,
    Rules,
    capped,
    endpoint_pool,
    function_pool,
    running_pool,
    translated,
)
from tangram.server.http.auth import Caller
from tangram.server.journal.adapter import decode_settled, encode
from tangram.server.journal.journal import Journal, JournalFailed, Phase

SWEEP_S = 5.0
"""How often what was left behind is looked for."""
FUNCTIONS_MAX = 200
"""Functions and endpoints of one run that have a pool: those that were called last."""
RESULT_BYTES_MAX = 192 << 10
"""Of a result that is handed out at once: as JSON it is a third longer."""
GONE_MAX = 10_000
"""Sandboxes of which it is remembered why they are gone."""

log = logging.getLogger("tangram.server")


class Desk:
    def __init__(
        self,
        orchestrator: Orchestrator,
        journal: Journal,
        quotas: QuotaManager,
        images: OwnedImages,
        functions: BoxedFunctionManager,
        *,
        rules: Rules,
        limits: RunLimits,
        node: str,
        warm: bool,
        now: Callable[[], float],
        held: Callable[[str], int],
    ) -> None:
        """`warm`: after a sandbox was opened, another one like it is made ahead. `held`: units of a pool."""
        self.orchestrator = orchestrator
        self.journal = journal
        self.limits = limits
        self.draining = False
        self.gate = Gate()
        self.gone: dict[str, str] = {}
        """Sandboxes that did not survive a restart, and why."""
        self._quotas = quotas
        self._images = images
        self.rules = rules
        self._node = node
        self._now = now
        self._functions = functions
        self._lives = Lives(now, lambda space: self.rooms.changed(space))
        self.rooms = Rooms(self._lives, functions, orchestrator.tell, held, limits.sandboxes_max)
        self._tails = EndedTails(now)
        self._functions_by_space: dict[str, dict[str, None]] = {}
        """Their pools, the one that was called last at the end."""
        self._capped: set[str] = set()
        """Runs of which only so many actions may run at once."""
        self._warm = warm
        self._numbers = count(1)

    def names(self, caller: Caller) -> Names:
        return Names(caller.space, self._images.by_name)

    # ---- actions ----

    async def submit(self, caller: Caller, asked: Submission) -> Live | Settled:
        """Returns when it is in the journal. Raises InvalidInput, AdmissionRefused and Unauthorized for what is not
        taken in, of which nothing is kept."""
        if self.journal.kept_bytes[caller.space] >= self.limits.results_bytes_max:
            await self.journal.written()  # some may have been acknowledged just now
        caller.require_standing()
        action, work = translated(asked, caller, self.names(caller), self.rules)
        live, is_mine = self._lives.actions.get(action.id), False
        records = encode(action), encode(work)
        size = sum(map(len, records))
        if live is None:
            try:
                self._require_room(caller, action, work, size)
            except (AdmissionRefused, ManagerError):
                known_result = await self.journal.result(action.id)
                if known_result is None:
                    raise
                return decode_settled(known_result)  # it was taken in before, and asks for no room now
            live, is_mine = self._enter(action, work, size, follow=asked.follow), True
        try:
            known = await self.journal.submitted(action.id, action.run, *records)
        except BaseException as error:
            if is_mine:
                self._give_up(live)
            if isinstance(error, JournalFailed):
                self.orchestrator.fail(error)
            raise
        if known is not None and known.phase is Phase.SETTLED:
            if is_mine:
                self._give_up(live)
            assert known.result is not None
            return decode_settled(known.result)
        if is_mine:
            await self._begin(live)
        return live

    def _require_room(self, caller: Caller, action: Action, work: AnyWork, size: int) -> None:
        """For an action of so many bytes."""
        if self.draining:
            raise Draining
        if (
            isinstance(work, Exec | Commit)
            and action.sandbox not in self._lives.boxes
            and action.sandbox not in self.gone
        ):
            raise NotFound("sandbox", self.names(caller).outer(action.sandbox))
        most = caller.caps.waiting_max or self.limits.waiting_max
        if self._lives.actions_by_space[caller.space] >= most:
            said = f"this run has {most} actions under way, which is the most; wait until some have settled"
            raise AdmissionRefused("waiting_max", said)
        self._require_bytes(caller.space, size)
        if isinstance(work, Open):
            self.rooms.require_box(caller.space)
        if isinstance(work, Call):
            self.rooms.require_call(caller.space)
        if isinstance(work, Commit):
            self._images.require_room(caller.space, self.limits.images_max, work.image)

    def _require_bytes(self, space: str, size: int) -> None:
        most, waiting = self.limits.waiting_bytes_max, self._lives.bytes_by_space[space]
        if waiting + size > most:
            said = (
                f"this action has {size} bytes, actions of this run under way have {waiting}, and {most} is the most;"
                " wait until some have settled, or write large input to a file of the sandbox"
            )
            raise AdmissionRefused("waiting_bytes_max", said)
        most, kept = self.limits.results_bytes_max, self.journal.kept_bytes[space]
        if kept >= most:
            said = (
                f"results of this run that were not acknowledged have {kept} bytes, and {most} is the most; fetch them"
                " and acknowledge them (POST /v1/acknowledge)"
            )
            raise AdmissionRefused("results_bytes_max", said)

    def _enter(self, action: Action, work: AnyWork, size: int, *, follow: bool) -> Live:
        return self._lives.enter(action, work, size, Tail(self.limits.output_bytes_max) if follow else None)

    def _leave(self, live: Live) -> None:
        """Nothing is known of it any more but what the journal has."""
        if self._lives.leave(live) and live.tail is not None:
            self._tails.keep(live.action.id, live.tail)

    def _give_up(self, live: Live) -> None:
        """It is none: nothing is begun, and whoever waits for its end, as the end of its run does, hears of that."""
        self._leave(live)
        live.settled.set_exception(NotFound("action", live.action.id))
        live.settled.exception()

    async def _begin(self, live: Live) -> None:
        """Hand it to the orchestrator. What that refuses settles: it was acknowledged to the journal already."""
        action = live.action
        if isinstance(live.work, Exec | Commit) and action.sandbox not in self._lives.boxes:
            gone = self.gone.get(action.sandbox, "it did not survive a restart of the service")
            settled = await self.conclude(action, Status.LOST, f"its sandbox is gone: {gone}")
            self._tell(live, settled)
            return
        try:
            self._announce(space_of(action.id), live.work)
            asked = capped(action) if action.run in self._capped else action
            ticket = live.ticket = self.orchestrator.submit(asked, live.work, live.tail)
        except (AdmissionRefused, InvalidInput) as error:
            refused = _refused(action.id, error)
            await self.journal.settled(action.id, encode(refused))
            self._tell(live, refused)
            return
        if live.cancelled:
            self.orchestrator.cancel(action.id, live.why_cancelled)
        ticket.started.add_done_callback(lambda _: _set(live.started))
        ticket.settled.add_done_callback(lambda done: self._on_settled(live, done))

    def _on_settled(self, live: Live, done: asyncio.Future[Settled]) -> None:
        error = done.exception()
        if error is None:
            self._tell(live, done.result())
        elif isinstance(error, InvalidInput | AdmissionRefused):
            self._tell(live, _refused(live.action.id, error))
        elif not live.settled.done():  # the orchestrator has ended; the action stays in the journal
            live.settled.set_exception(error)
            live.settled.exception()

    def _prepare(self, work: Open) -> None:
        """Have a sandbox like this one made, which nobody waits for."""
        action = Action(
            id=f"warm-{next(self._numbers)}", demand=Demand({CPU: cores(ERRAND[Open])}), run="warm", kind="prepare"
        )
        with contextlib.suppress(AdmissionRefused):
            self.orchestrator.submit(action, Prepare(spec=work.spec))

    def _tell(self, live: Live, settled: Settled) -> None:
        if self._warm and isinstance(live.work, Open) and settled.outcome.status is Status.SUCCEEDED:
            self._prepare(live.work)
        if not live.settled.done():
            live.settled.set_result(settled)
        _set(live.started)
        self._leave(live)

    def _announce(self, space: str, work: AnyWork) -> None:
        """The scheduler knows a pool before an action asks for it."""
        if isinstance(work, Call):
            self.rooms.announce(space)
            pool = Pool(kind=function_pool(space, work), total=work.function.max_instances, private=True)
        elif isinstance(work, Post):
            pool = Pool(kind=endpoint_pool(space, work), total=work.endpoint.max_concurrency, private=True)
        else:
            return
        known = self._functions_by_space.setdefault(space, {})
        if pool.kind not in known:
            if len(known) >= FUNCTIONS_MAX:
                self._forget_function(space, known)
            self.orchestrator.tell(PoolChanged(pool=pool))
        known.pop(pool.kind, None)
        known[pool.kind] = None

    def _forget_function(self, space: str, known: dict[str, None]) -> None:
        """The one that was not called for longest, and is not being called."""
        called = {kind for live in self._lives.of_space(space) for kind in live.action.demand.pools}
        kind = next((kind for kind in known if kind not in called), None)
        if kind is None:
            said = f"{FUNCTIONS_MAX} functions of this run are being called, which is the most; wait for some"
            raise AdmissionRefused("functions_max", said)
        del known[kind]
        self.orchestrator.tell(PoolChanged(pool=Pool(kind=kind, total=0, private=True)))

    async def look(self, caller: Caller, id: str, *, wait_s: float, until_started: bool = False) -> Reply:
        """What has become of an action, after waiting so long for it to settle, or to start."""
        inner = self.names(caller).inner("id", id)
        live = self._lives.actions.get(inner)
        if live is not None:
            return await self.wait(caller, live, id, wait_s=wait_s, until_started=until_started)
        size = await self.journal.result_bytes(inner)
        if size is not None and size > RESULT_BYTES_MAX:
            return Reply(id=id, state="settled")
        return await self.whole(caller, id)

    async def whole(self, caller: Caller, id: str) -> Reply:
        """Of an action that has settled, however large its result is."""
        result = await self.journal.result(self.names(caller).inner("id", id))
        if result is None:
            raise NotFound("action", id)
        return self._reply(caller, id, decode_settled(result))

    async def wait(self, caller: Caller, live: Live, id: str, *, wait_s: float, until_started: bool = False) -> Reply:
        live.seen_s = self._now()
        if isinstance(live.work, Hold):  # a holder is heard of often, or it is not there any more
            wait_s = min(wait_s, self.limits.hold_idle_s / 3)
        try:
            awaited = live.started if until_started else live.settled
            if wait_s > 0.0 and not awaited.done():
                await asyncio.wait((awaited,), timeout=wait_s)
        finally:
            live.seen_s = self._now()
        if live.settled.done():
            if self.draining and live.settled.exception() is not None:
                raise Draining  # it is left to the next service, which is worth waiting for
            return self.reply(caller, id, live.settled.result())
        return Reply(id=id, state=live.state)

    def reply(self, caller: Caller, id: str, settled: Settled) -> Reply:
        """With the result, unless that is so large that it is to be asked for in turn: by `whole`."""
        executed = settled.executed
        size = len(settled.answer) + (0 if executed is None else len(executed.stdout) + len(executed.stderr))
        return Reply(id=id, state="settled") if size > RESULT_BYTES_MAX else self._reply(caller, id, settled)

    def _reply(self, caller: Caller, id: str, settled: Settled) -> Reply:
        """As its caller knows things: without the name of its space before them."""
        outer = self.names(caller).outer
        outcome = msgspec.structs.replace(settled.outcome, action=id, reason=outer(settled.outcome.reason))
        fault = settled.fault
        if fault is not None:
            said = {"message": outer(fault.message), "value": outer(fault.value), "expected": outer(fault.expected)}
            fault = msgspec.structs.replace(fault, **said)
        ended = Ended(outcome=outcome, executed=settled.executed, answer=settled.answer, fault=fault)
        return Reply(id=id, state="settled", settled=ended)

    async def cancel(self, caller: Caller, id: str) -> None:
        """A request: it settles when nothing of it is left. Nothing if it has settled."""
        inner = self.names(caller).inner("id", id)
        live = self._lives.actions.get(inner)
        if live is not None:
            self._cancel(live)
        elif await self.journal.result(inner) is None:
            raise NotFound("action", id)

    def _cancel(self, live: Live, why: str = "") -> None:
        if not live.cancelled:
            live.cancelled, live.why_cancelled = True, why
            self.orchestrator.cancel(live.action.id, why)

    def acknowledge(self, caller: Caller, ids: Iterable[str]) -> None:
        names = self.names(caller)
        for id in ids:
            inner = names.inner("id", id)
            if inner not in self._lives.actions:
                self.journal.fetched(inner)
                self._tails.drop(inner)

    def follow(self, caller: Caller, id: str, after: int) -> AsyncIterator[Chunk]:
        inner = self.names(caller).inner("id", id)
        live = self._lives.actions.get(inner)
        tail = live.tail if live is not None else self._tails.get(inner)
        if tail is None:
            raise NotFound("output that can be followed, of action", id)
        return tail.follow(after)

    # ---- quotas ----

    def let_go(self, caller: Caller, id: str, spent: dict[str, int] | None) -> None:
        self._quotas.let_go(self.names(caller).inner("id", id), spent)

    def heard(self, caller: Caller, quota: str, status: int, headers: Mapping[str, str], id: str, at: float) -> None:
        inner = self.names(caller).inner("action", id)
        granted_at = self._quotas.granted_at(inner)
        if granted_at is not None:  # whoever holds nothing of it has nothing to say about it
            self._quotas.advise(quota, advice_of(status, headers, at), granted_at)

    def quotas(self) -> list[Quota]:
        return self._quotas.all()

    def set_quota(self, quota: Quota) -> None:
        """Until the service is started anew: what lasts is in its config."""
        self._quotas.add(quota)
        self.rules = msgspec.structs.replace(self.rules, quota_pools=quota_pools(self._quotas.all()))

    # ---- sandboxes ----

    def sandboxes(self, caller: Caller) -> list[SandboxReply]:
        """Those that are open, and the instances of functions: the caller's, or all if it is the admin, who has not
        said of which run."""
        sees_all = caller.admin and not caller.run
        names = [name for name, box in self._lives.boxes.items() if sees_all or box.space == caller.space]
        instances = [each for each in self._functions.seen() if sees_all or each.owner == caller.space]
        return [self.sandbox_reply(caller, name) for name in names] + [
            SandboxReply(name=each.sandbox, run=each.run, node=self._node, spec=each.spec, function=each.function)
            for each in instances
        ]

    def sandbox_reply(self, caller: Caller, inner: str) -> SandboxReply:
        box = self._lives.boxes[inner]
        return SandboxReply(name=self.names(caller).outer(inner), run=box.run, node=self._node, spec=box.spec)

    def sandbox(self, caller: Caller, name: str) -> str:
        """Its name here, if it is open and the caller's."""
        inner = self.names(caller).inner("sandbox", name)
        box = self._lives.boxes.get(inner)
        if box is None:
            if inner in self.gone:
                raise ManagerError(f"sandbox {name} is gone: {self.gone[inner]}", retry=False)
            raise NotFound("sandbox", name)
        box.used_s = self._now()
        return inner

    @contextlib.contextmanager
    def using(self, caller: Caller, name: str) -> Iterator[str]:
        """As `sandbox`, for work on its files, however long that takes. What its manager says of it names it as its
        caller does."""
        inner = self.sandbox(caller, name)
        box = self._lives.boxes[inner]
        box.active += 1
        try:
            yield inner
        except ManagerError as error:
            if type(error) is not ManagerError:
                raise  # it is of the service, and names nothing of a manager
            raise ManagerError(self.names(caller).outer(str(error)), retry=error.retry) from error
        finally:
            box.active -= 1
            box.used_s = self._now()

    async def discard(self, caller: Caller, name: str) -> None:
        """End a sandbox at once, with all that runs in it. It may be an instance of a function."""
        is_box = self.names(caller).inner("sandbox", name) in self._lives.boxes
        if not is_box and await self._functions.end(caller.space, name):
            return
        await self._discard(self.sandbox(caller, name))

    async def _discard(self, inner: str) -> None:
        """What opens or closes it has settled before it is ended: an opening that came to its end afterwards would
        leave a sandbox that nobody knows of."""
        for live in self._lives.of_box(inner):
            self._cancel(live)
        while making := [live.settled for live in self._lives.of_box(inner) if _makes_or_ends(live)]:
            await asyncio.wait(making)
        await self.orchestrator.discard(inner)
        self._lives.leave_box(inner)  # in one turn with its memory: whoever opens one of that name has another
        await self.journal.sandbox_closed(inner)

    # ---- runs ----

    def weigh(self, run: str, weight: float) -> None:
        self.orchestrator.tell(RunChanged(run=run, weight=weight))

    def cap(self, run: str, caps: Caps) -> None:
        """How many sandboxes a run may have, and how many of its actions may run at once, of those that come from now
        on; None: as many as there is room for."""
        self.rooms.cap(run, caps.sandboxes_max)
        if caps.running_max is None:
            self._capped.discard(run)
            return
        self._capped.add(run)
        self.orchestrator.tell(PoolChanged(pool=Pool(kind=running_pool(run), total=caps.running_max, private=True)))

    async def end_run(self, space: str) -> None:
        """Its actions are cancelled, its results deleted, its sandboxes closed, the instances of its functions ended
        and its images forgotten. Can be done again: what fails keeps nothing else from going, is logged, and raised as
        one ManagerError at the end."""
        lives = self._lives.of_space(space)
        for live in lives:
            self._cancel(live, f"its run {live.action.run} was revoked")
            self._quotas.let_go(live.action.id)
        if lives:
            await asyncio.wait({live.settled for live in lives})
        self._tails.forget(lambda id: space_of(id) == space)
        self.gone = {name: why for name, why in self.gone.items() if space_of(name) != space}
        await self.journal.forget((space,))
        boxes = [name for name, box in self._lives.boxes.items() if box.space == space]
        failures = [await self._tried(f"sandbox {name}", self._discard(name)) for name in boxes]
        failures.append(await self._tried(f"functions of {space}", self._functions.end(space)))
        self.rooms.forget(space)
        for kind in self._functions_by_space.pop(space, ()):
            self.orchestrator.tell(PoolChanged(pool=Pool(kind=kind, total=0, private=True)))
        for image in self._images.of(space):
            failures.append(await self._tried(f"image {image}", self._images.forget_of_ended(image)))
        said = [failure for failure in failures if failure]
        if said:
            raise ManagerError(f"of run {space} something is left; revoke it again: {'; '.join(said)}")

    async def _tried(self, what: str, ending: Awaitable[object]) -> str:
        """Why it failed, which is logged; empty if it did not. A journal that fails is the end of everything."""
        try:
            await ending
        except JournalFailed:
            raise
        except (TangramError, OSError) as error:
            log.error("not ended %s: %s", what, error)
            return f"{what}: {error}"
        return ""

    # ---- what was left behind ----

    async def sweep(self) -> None:
        now = self._now()
        for live in list(self._lives.actions.values()):
            if isinstance(live.work, Hold) and now - live.seen_s > self.limits.hold_idle_s:
                log.warning("hold expired action=%s: its holder was silent", live.action.id)
                self._cancel(live, f"its holder said nothing for {self.limits.hold_idle_s:g} s (hold_idle_s)")
                self._quotas.let_go(live.action.id)
        self._tails.sweep()
        for name, box in list(self._lives.boxes.items()):
            if not box.active and now - box.used_s > self.limits.sandbox_idle_s and not self.draining:
                log.warning("sandbox closed sandbox=%s: nobody used it for %.0f s", name, self.limits.sandbox_idle_s)
                try:
                    await self._discard(name)
                    self._note_gone(name, f"nobody used it for {self.limits.sandbox_idle_s:.0f} s (sandbox_idle_s)")
                except JournalFailed:
                    raise
                except ManagerError as error:
                    log.error("sandbox not closed sandbox=%s: %s", name, error)

    # ---- recovery ----

    def _note_gone(self, sandbox: str, why: str) -> None:
        self.gone[sandbox] = why
        if len(self.gone) > GONE_MAX:
            del self.gone[next(iter(self.gone))]

    def adopt(self, sandbox: str, run: str, spec: SandboxSpec, node: str) -> None:
        """A sandbox that outlived the service before this one. Raises AdmissionRefused if it has no room here."""
        self.orchestrator.adopt(sandbox, -(-spec.memory_bytes // MIB), run, node)
        self._lives.enter_box(sandbox, run, spec)

    async def resume(self, action: Action, work: AnyWork, size: int) -> bool:
        """An action of the journal, where it has so many bytes, queued again. False: it has settled instead."""
        live = self._enter(action, work, size, follow=False)
        await self._begin(live)
        return live.ticket is not None

    async def conclude(self, action: Action, status: Status, reason: str) -> Settled:
        """An action that the orchestrator never has: it ended with the service before this one, or its sandbox did.
        Whoever observes ends is told of this one too."""
        settled = Settled(outcome=Outcome(action=action.id, status=status, reason=reason))
        await self.journal.settled(action.id, encode(settled))
        self.orchestrator.tell(Concluded(action=action, outcome=settled.outcome))
        return settled


def quota_pools(quotas: Iterable[Quota]) -> frozenset[str]:
    return frozenset(pool.kind for quota in quotas for pool in quota.pools())


def _refused(action: str, error: AdmissionRefused | InvalidInput) -> Settled:
    fault = fault_of(error)
    return Settled(outcome=Outcome(action=action, status=Status.REFUSED, reason=fault.message), fault=fault)


def _makes_or_ends(live: Live) -> bool:
    """Its sandbox, which has not settled."""
    return isinstance(live.work, Open | Close) and not live.settled.done()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
