"""Recovery: what becomes of all that a service left in its journal, when the next one starts.

Owns no state. Promises that nothing is lost and nothing runs twice unasked: what was queued is queued again in its
order; what was running is run again if its caller declared that it may be, and is settled as lost otherwise; results
stay. Sandboxes that their manager kept are taken over, and of the others it is said why they are gone. Nothing of a run
whose revocation was under way is taken up again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import msgspec

from tangram.core.action import Status
from tangram.errors import AdmissionRefused, ManagerError
from tangram.managers.work import Close, Open, SandboxSpec
from tangram.runtime.wire import AnyWork
from tangram.server.actions.service import Desk
from tangram.server.actions.tenants import SEPARATOR, space_of
from tangram.server.journal.adapter import decode_action, decode_work
from tangram.server.journal.journal import Phase, Recovered

log = logging.getLogger("tangram.server")

RESTARTED = "the service was restarted while it ran"


@runtime_checkable
class Keeping(Protocol):
    """A manager whose sandboxes outlive it."""

    adopted: dict[str, SandboxSpec]
    """Those that are back, by name."""
    missing: dict[str, str]
    """Those that are not, and why."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    queued: int = 0
    again: int = 0
    lost: int = 0
    refused: int = 0
    """Queued, or to be run again, and settled at once: its sandbox is gone, or there is no room for it any more."""
    results: int = 0
    sandboxes: int = 0
    sandboxes_lost: int = 0
    notes: tuple[str, ...] = ()
    """What of the journal was not whole."""

    def __str__(self) -> str:
        counts = (
            (self.queued, "queued again"),
            (self.again, "run again"),
            (self.lost, "lost while running"),
            (self.refused, "not taken up again"),
            (self.results, "result kept" if self.results == 1 else "results kept"),
            (self.sandboxes, "sandbox taken over" if self.sandboxes == 1 else "sandboxes taken over"),
            (self.sandboxes_lost, "sandbox lost" if self.sandboxes_lost == 1 else "sandboxes lost"),
        )
        found = ", ".join(f"{count} {what}" for count, what in counts if count)
        return "; ".join([*([found] if found else []), *self.notes])


async def recover(desk: Desk, found: Recovered, manager: object, node: str, ending: Collection[str] = ()) -> Report:
    """`ending`: spaces of which nothing goes on."""
    adopted: Mapping[str, SandboxSpec] = manager.adopted if isinstance(manager, Keeping) else {}
    missing: Mapping[str, str] = manager.missing if isinstance(manager, Keeping) else {}
    taken, lost_boxes = await _take_over(desk, found, adopted, missing, node)
    queued = again = lost = refused = results = 0
    for known in found.actions:
        if known.phase is Phase.SETTLED:
            results += 1
            continue
        action, work = decode_action(known.action), decode_work(known.work)
        if space_of(action.id) in ending:
            await desk.conclude(action, Status.CANCELLED, f"its run {action.run} was revoked")
            continue
        if known.phase is Phase.RUNNING and _is_done(work, action.sandbox in taken):
            await desk.conclude(action, Status.SUCCEEDED, "")
        elif known.phase is Phase.RUNNING and not action.idempotent:
            lost += 1
            await desk.conclude(action, Status.LOST, RESTARTED)
        elif not await desk.resume(action, work, len(known.action) + len(known.work)):
            refused += 1
        elif known.phase is Phase.QUEUED:
            queued += 1
        else:
            again += 1
    return Report(
        queued=queued, again=again, lost=lost, refused=refused, results=results, sandboxes=len(taken),
        sandboxes_lost=lost_boxes, notes=found.report,
    )  # fmt: skip


def _is_done(work: AnyWork, has_box: bool) -> bool:
    """An opening whose sandbox is back has been done, and so has a closing whose sandbox is not."""
    return has_box if isinstance(work, Open) else isinstance(work, Close) and not has_box


async def _take_over(
    desk: Desk, found: Recovered, adopted: Mapping[str, SandboxSpec], missing: Mapping[str, str], node: str
) -> tuple[set[str], int]:
    """The names of those that are back, and how many are not."""
    run_by_name = {sandbox.name: sandbox.run for sandbox in found.sandboxes}
    opened = set(run_by_name)
    for known in found.actions:  # its opening was not yet written down as done
        if known.phase is Phase.RUNNING and isinstance(decode_work(known.work), Open):
            action = decode_action(known.action)
            run_by_name.setdefault(action.sandbox, action.run)
    taken, lost = set(), 0
    for name, run in run_by_name.items():
        spec = adopted.get(name)
        if spec is None:
            why = missing.get(name, "it did not survive the end of the service")
        else:
            try:
                desk.adopt(name, run, spec, node)
            except AdmissionRefused as error:
                why = f"there was no room for it after a restart: {error}"
            else:
                taken.add(name)
                await desk.journal.sandbox_opened(name, run, node, msgspec.msgpack.encode(spec))
                continue
        if name in opened:
            lost += 1
            desk.gone[name] = why
            log.warning("sandbox lost sandbox=%s: %s", name, why)
        await desk.journal.sandbox_closed(name)
    for name in adopted.keys() - taken:
        if SEPARATOR in name:  # otherwise it is nobody's: an instance of a function never outlives the service
            log.warning("sandbox ended sandbox=%s: the journal does not know it, or has no room for it", name)
        try:
            await desk.orchestrator.end_sandbox(name, node)
        except ManagerError as error:
            log.error("sandbox not closed sandbox=%s: %s", name, error)
    return taken, lost
