"""Recovery: resumes the content of the journal at start-up.

Owns no state. Every recorded action ends with a known outcome; none runs twice unless it is idempotent. Queued actions
are queued again in order; running actions run again if they are idempotent, and settle as lost otherwise; results stay.
Sandboxes that their manager kept are adopted; for others the reason of their loss is kept. Actions of a run whose
revocation had begun are cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import msgspec

from tangram.core.action import Status
from tangram.errors import AdmissionRefused, ManagerError
from tangram.managers.base import AdoptingManager, Manager
from tangram.managers.work import Close, Open, SandboxSpec
from tangram.runtime.wire import AnyWork
from tangram.server.actions.service import ActionService
from tangram.server.journal.adapter import decode_action, decode_work
from tangram.server.journal.store import JournalPhase, RecoveredState
from tangram.server.tenants import TENANT_SEPARATOR, tenant_of

log = logging.getLogger("tangram.server")

RESTARTED_REASON = "the service was restarted while it ran"


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    queued: int = 0
    rerun: int = 0
    lost: int = 0
    refused: int = 0
    """Queued or idempotent actions that settled immediately: their sandbox was lost or capacity is missing."""
    results: int = 0
    sandboxes: int = 0
    sandboxes_lost: int = 0
    damage: tuple[str, ...] = ()
    """The damage found in the journal."""

    def __str__(self) -> str:
        counts = (
            (self.queued, "queued again"),
            (self.rerun, "run again"),
            (self.lost, "lost while running"),
            (self.refused, "not resumed"),
            (self.results, "result kept" if self.results == 1 else "results kept"),
            (self.sandboxes, "sandbox adopted" if self.sandboxes == 1 else "sandboxes adopted"),
            (self.sandboxes_lost, "sandbox lost" if self.sandboxes_lost == 1 else "sandboxes lost"),
        )
        text = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        return "; ".join([*([text] if text else []), *self.damage])


async def recover(
    action_service: ActionService,
    recovered: RecoveredState,
    manager: Manager,
    node: str,
    ending_tenants: Collection[str] = (),
) -> RecoveryReport:
    """Resumes what `recovered` contains. Cancels the actions of `ending_tenants`."""
    adopted: Mapping[str, SandboxSpec] = manager.adopted if isinstance(manager, AdoptingManager) else {}
    missing: Mapping[str, str] = manager.missing if isinstance(manager, AdoptingManager) else {}
    adopted_names, lost_sandboxes = await _adopt_sandboxes(action_service, recovered, adopted, missing, node)
    queued = rerun = lost = refused = results = 0
    for journaled in recovered.actions:
        if journaled.phase is JournalPhase.SETTLED:
            results += 1
            continue
        action, work = decode_action(journaled.action), decode_work(journaled.work)
        if tenant_of(action.id) in ending_tenants:
            await action_service.conclude(action, Status.CANCELLED, f"its run {action.run} was revoked")
            continue
        if journaled.phase is JournalPhase.RUNNING and _had_completed(work, action.sandbox in adopted_names):
            await action_service.conclude(action, Status.SUCCEEDED, "")
        elif journaled.phase is JournalPhase.RUNNING and not action.idempotent:
            lost += 1
            await action_service.conclude(action, Status.LOST, RESTARTED_REASON)
        elif not await action_service.resume(action, work, len(journaled.action) + len(journaled.work)):
            refused += 1
        elif journaled.phase is JournalPhase.QUEUED:
            queued += 1
        else:
            rerun += 1
    return RecoveryReport(
        queued=queued, rerun=rerun, lost=lost, refused=refused, results=results, sandboxes=len(adopted_names),
        sandboxes_lost=lost_sandboxes, damage=recovered.report,
    )  # fmt: skip


def _had_completed(work: AnyWork, has_sandbox: bool) -> bool:
    """An open has completed if its sandbox exists, a close if its sandbox does not."""
    return has_sandbox if isinstance(work, Open) else isinstance(work, Close) and not has_sandbox


async def _adopt_sandboxes(
    action_service: ActionService,
    recovered: RecoveredState,
    adopted: Mapping[str, SandboxSpec],
    missing: Mapping[str, str],
    node: str,
) -> tuple[set[str], int]:
    """Returns the names of adopted sandboxes, and the number of lost ones."""
    run_by_name = {sandbox.name: sandbox.run for sandbox in recovered.sandboxes}
    opened = set(run_by_name)
    for journaled in recovered.actions:  # an opening whose completion was not written
        if journaled.phase is JournalPhase.RUNNING and isinstance(decode_work(journaled.work), Open):
            action = decode_action(journaled.action)
            run_by_name.setdefault(action.sandbox, action.run)
    adopted_names, lost = set(), 0
    for name, run in run_by_name.items():
        spec = adopted.get(name)
        if spec is None:
            why = missing.get(name, "it did not outlive the service")
        else:
            try:
                action_service.adopt(name, run, spec, node)
            except AdmissionRefused as error:
                why = f"there was no room for it after a restart: {error}"
            else:
                adopted_names.add(name)
                await action_service.journal.record_sandbox_opened(name, run, node, msgspec.msgpack.encode(spec))
                continue
        if name in opened:
            lost += 1
            action_service.record_lost_sandbox(name, why)
            log.warning("sandbox lost sandbox=%s: %s", name, why)
        await action_service.journal.record_sandbox_closed(name)
    for name in adopted.keys() - adopted_names:
        if TENANT_SEPARATOR in name:  # instances of functions never outlive the server
            log.warning("sandbox ended sandbox=%s: the journal does not know it, or has no room for it", name)
        try:
            await action_service.orchestrator.close_on_node(name, node)
        except ManagerError as error:
            log.error("sandbox not closed sandbox=%s: %s", name, error)
    return adopted_names, lost
