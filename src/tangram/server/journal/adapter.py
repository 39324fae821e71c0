"""The memory of the orchestrator: the journal, and how what it keeps is written.

Owns the encoding of actions, work and ends. Decides nothing.
"""

from __future__ import annotations

import asyncio

import msgspec

from tangram.core.action import Action, Status
from tangram.managers.work import Close, Commit, Open
from tangram.runtime.orchestrator import Settled, Ticket
from tangram.runtime.wire import AnyWork
from tangram.server.actions.images import OwnedImages
from tangram.server.actions.tenants import SEPARATOR, space_of
from tangram.server.journal.journal import RECORD_BYTES_MAX, Journal

encode = msgspec.msgpack.Encoder().encode
decode_action = msgspec.msgpack.Decoder(Action).decode
decode_work = msgspec.msgpack.Decoder(AnyWork).decode
decode_settled = msgspec.msgpack.Decoder(Settled).decode


class Remembering:
    """The memory of the orchestrator: all that callers asked for, in the journal. What the service does for itself has
    no caller's space before its id, and is not missed after its end."""

    def __init__(self, journal: Journal, images: OwnedImages, node: str, *, results_bytes_max: int) -> None:
        """`results_bytes_max`: of one caller, that nobody has fetched."""
        self._journal = journal
        self._results_bytes_max = results_bytes_max
        self._images = images
        self._node = node

    async def starting(self, ticket: Ticket) -> None:
        if SEPARATOR in ticket.action.id:
            await self._journal.starting(ticket.action.id, ticket.attempt)

    async def settled(self, ticket: Ticket, settled: Settled) -> Settled:
        action, work = ticket.action, ticket.work
        if SEPARATOR not in action.id:
            return settled
        settled, content = self._with_room(settled)
        done = self._journal.settled(action.id, content)
        if isinstance(work, Open) and settled.outcome.status is Status.SUCCEEDED:
            spec = encode(work.spec)
            await asyncio.gather(self._journal.sandbox_opened(action.sandbox, action.run, self._node, spec), done)
        elif isinstance(work, Commit) and settled.outcome.status is Status.SUCCEEDED:
            await asyncio.gather(self._images.committed(work.image), done)
        elif isinstance(work, Close) and settled.outcome.status is not Status.LOST:
            await asyncio.gather(self._journal.sandbox_closed(action.sandbox), done)
        else:
            await done
        return settled

    def _with_room(self, settled: Settled) -> tuple[Settled, bytes]:
        """As it can be kept, and encoded. Of more than its caller may leave here, or than the journal takes at once,
        the content goes, which is said."""
        content, most = encode(settled), self._results_bytes_max
        kept = self._journal.kept_bytes[space_of(settled.outcome.action)]
        why = ""
        if len(content) > RECORD_BYTES_MAX:
            why = f"the journal takes {RECORD_BYTES_MAX} at once; write more to a file of the sandbox and fetch that"
        elif kept >= most:
            why = (
                f"results of {kept} bytes of this run were not acknowledged, and {most} is the most (results_bytes_max)"
            )
        if not why or (settled.executed is None and not settled.answer):
            return settled, content
        reason = f"there was no room for its result of {len(content)} bytes: {why}"
        outcome = msgspec.structs.replace(settled.outcome, status=Status.LOST, reason=reason)
        settled = msgspec.structs.replace(settled, outcome=outcome, executed=None, answer=b"")
        return settled, encode(settled)
