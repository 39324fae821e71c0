"""A part of a quota in the caller's hands, around whatever client it has of its own.

Owns one action from its grant until the caller lets go. Never talks to an API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tangram.client.checks import Life
from tangram.client.result import result_of
from tangram.client.transport import Pending, Transport
from tangram.core.action import Action
from tangram.errors import InvalidAction
from tangram.managers.quota import TOKENS, Quota
from tangram.managers.work import Hold
from tangram.service.orchestrator import undisturbed


class QuotaUse:
    """Use it as `async with t.quota("search"):`. Inside, so many requests may be made; outside, none."""

    def __init__(self, transport: Transport, connection: Life, quota: Quota, action: Action) -> None:
        self._transport = transport
        self._connection = connection
        self._life = Life(f"the use of quota {quota.name}")
        self._quota = quota
        self._action = action
        self._pending: Pending | None = None
        self._spent: dict[str, int] | None = None

    async def __aenter__(self) -> Self:
        self._connection.require()
        self._life.begin()
        pending = self._pending = self._transport.submit(self._action, Hold())
        try:
            runs = await pending.started()
        except asyncio.CancelledError:
            pending.cancel()
            await undisturbed(pending.settled())
            raise
        if not runs:
            settled = await pending.settled()
            result_of(f"quota {self._quota.name}", settled.outcome, None).check()
        self._life.opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pending is not None
        self._life.closed()
        self._transport.let_go(self._action.id, self._spent)
        await undisturbed(self._pending.settled())

    def spent(self, *, tokens: int) -> None:
        """How many tokens it really took, once that is known: the estimate is corrected."""
        self._life.require()
        if self._quota.tokens is None or type(tokens) is not int or tokens < 0:
            raise InvalidAction(TOKENS, tokens, "a whole number, at least 0, of a quota that counts tokens")
        self._spent = {f"{self._quota.name}/{TOKENS}": tokens}

    def heard(self, status: int, headers: Mapping[str, str]) -> None:
        """What the API answered: where it speaks of its limits, the quota follows."""
        self._life.require()
        self._transport.heard(self._quota.name, status, headers, self._action.id)
