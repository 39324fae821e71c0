"""The journal adapter: stores actions and results of the orchestrator in the journal.

Owns the encoding of actions, work and results. Makes no decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from tangram.core.action import Action, Status
from tangram.managers.work import Close, Commit, Open
from tangram.runtime.orchestrator import ActionTicket, SettledAction
from tangram.runtime.wire import AnyWork
from tangram.server.journal.journal import RECORD_BYTES_MAX, Journal
from tangram.server.tenants import TENANT_SEPARATOR, tenant_of

encode = msgspec.msgpack.Encoder().encode
decode_action = msgspec.msgpack.Decoder(Action).decode
decode_work = msgspec.msgpack.Decoder(AnyWork).decode
decode_settled = msgspec.msgpack.Decoder(SettledAction).decode


class JournalAdapter:
    """Stores the actions of tenants. Actions of the server itself have no tenant in their id and are not stored."""

    def __init__(
        self, journal: Journal, on_committed: Callable[[str], Awaitable[None]], node: str, *, results_bytes_max: int
    ) -> None:
        """`on_committed` records a committed image. `results_bytes_max` limits the unacknowledged results of one
        tenant."""
        self._journal = journal
        self._results_bytes_max = results_bytes_max
        self._on_committed = on_committed
        self._node = node

    async def record_start(self, ticket: ActionTicket) -> None:
        if TENANT_SEPARATOR in ticket.action.id:
            await self._journal.record_start(ticket.action.id, ticket.attempt)

    async def record_settled(self, ticket: ActionTicket, settled: SettledAction) -> SettledAction:
        action, work = ticket.action, ticket.work
        if TENANT_SEPARATOR not in action.id:
            return settled
        settled, content = self._within_limits(settled)
        done = self._journal.record_settled(action.id, content)
        if isinstance(work, Open) and settled.outcome.status is Status.SUCCEEDED:
            spec = encode(work.spec)
            await asyncio.gather(
                self._journal.record_sandbox_opened(action.sandbox, action.run, self._node, spec), done
            )
        elif isinstance(work, Commit) and settled.outcome.status is Status.SUCCEEDED:
            await asyncio.gather(self._on_committed(work.image), done)
        elif isinstance(work, Close) and settled.outcome.status is not Status.LOST:
            await asyncio.gather(self._journal.record_sandbox_closed(action.sandbox), done)
        else:
            await done
        return settled

    def _within_limits(self, settled: SettledAction) -> tuple[SettledAction, bytes]:
        """Returns the result and its encoding. Drops the content of a result that exceeds the tenant's limit or that of
        a record, and sets the reason."""
        content, most = encode(settled), self._results_bytes_max
        kept = self._journal.unfetched_bytes[tenant_of(settled.outcome.action)]
        why = ""
        if len(content) > RECORD_BYTES_MAX:
            why = f"a journal record has at most {RECORD_BYTES_MAX}; write more to a file of the sandbox and fetch that"
        elif kept >= most:
            why = f"unacknowledged results of this run have {kept} bytes, and the maximum is {most} (results_bytes_max)"
        if not why or (settled.executed is None and not settled.answer):
            return settled, content
        reason = f"there was no room for its result of {len(content)} bytes: {why}"
        outcome = msgspec.structs.replace(settled.outcome, status=Status.LOST, reason=reason)
        settled = msgspec.structs.replace(settled, outcome=outcome, executed=None, answer=b"")
        return settled, encode(settled)
