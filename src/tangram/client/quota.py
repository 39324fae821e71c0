"""Parts of quotas in the caller's hands, around whatever clients it has of its own.

Owns one action from its grant until the caller lets go. Never talks to an API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

from tangram.client.result import result_of
from tangram.client.transport import Pending, Transport
from tangram.client.validation import Life, headers_of, status_of
from tangram.core.action import Action
from tangram.errors import InvalidAction
from tangram.managers.quotas.manager import TOKENS, Quota
from tangram.managers.work import Hold
from tangram.runtime.orchestrator import undisturbed


class QuotaUse:
    """Use it as `async with t.quota("search"):`. Inside, so many requests may be made; outside, none."""

    def __init__(self, transport: Transport, connection: Life, quotas: Mapping[str, Quota], action: Action) -> None:
        self._transport = transport
        self._connection = connection
        self._shown = f"quota {' and '.join(quotas)}"
        self._life = Life(f"the use of {self._shown}")
        self._quotas = quotas
        self._action = action
        self._pending: Pending | None = None
        self._spent: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        self._connection.require()
        self._life.begin()
        pending = self._pending = self._transport.submit(self._action, Hold())
        try:
            runs = await pending.started()
        except asyncio.CancelledError:
            await undisturbed(self._give_up(pending))
            raise
        if not runs:
            settled = await pending.settled()
            result_of(self._shown, settled.outcome, None).check()
        self._life.opened()
        return self

    async def _give_up(self, pending: Pending) -> None:
        """It may have been granted already, or be granted in this moment: then nobody else lets go of it."""
        pending.cancel()
        if await pending.started():
            self._transport.let_go(self._action.id, None)
        await pending.settled()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pending is not None
        self._life.closed()
        self._transport.let_go(self._action.id, self._spent or None)
        await undisturbed(self._pending.settled())

    def spent(self, *, tokens: int, name: str = "") -> None:
        """How many tokens it really took, once that is known: the estimate is corrected. `name`: of which quota, where
        several that count tokens are used."""
        self._life.require()
        counting = [each for each, quota in self._quotas.items() if quota.tokens is not None]
        if not counting or type(tokens) is not int or tokens < 0:
            raise InvalidAction(TOKENS, tokens, "a whole number, at least 0, of a quota that counts tokens")
        self._spent[f"{_chosen(name, counting)}/{TOKENS}"] = tokens

    def heard(self, status: int, headers: Mapping[str, str], name: str = "") -> None:
        """What the API answered: where it speaks of its limits, the quota follows. `name`: of which quota, where
        several are used."""
        self._life.require()
        quota = _chosen(name, self._quotas)
        self._transport.heard(quota, status_of(status), headers_of("headers", headers), self._action.id)


def _chosen(name: str, names: Collection[str]) -> str:
    if not name and len(names) == 1:
        return next(iter(names))
    if not isinstance(name, str) or name not in names:
        raise InvalidAction("name", name, f"the quota that is meant: {' or '.join(map(repr, names))}")
    return name
