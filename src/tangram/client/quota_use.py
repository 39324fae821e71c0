"""The use of a quota as a context manager, around the caller's own API client.

Owns one action from its grant until the end of the block. Never calls an API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Self

from tangram.cancellation import run_to_completion
from tangram.client.result import result_of
from tangram.client.transport import Pending, Transport
from tangram.client.validation import Lifecycle, headers_of, status_of
from tangram.core.action import Action
from tangram.errors import InvalidAction
from tangram.managers.quotas.manager import TOKENS, Quota
from tangram.managers.work import HoldGrant


class QuotaUse:
    """Use it as `async with t.quota("search"):`. Inside the block, the requested number of requests may be made."""

    def __init__(
        self, transport: Transport, connection: Lifecycle, quotas: Mapping[str, Quota], action: Action
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._label = f"quota {' and '.join(quotas)}"
        self._lifecycle = Lifecycle(f"the use of {self._label}")
        self._quotas = quotas
        self._action = action
        self._pending: Pending | None = None
        self._spent: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        self._connection.require_open()
        self._lifecycle.begin()
        pending = self._pending = self._transport.submit(self._action, HoldGrant())
        try:
            runs = await pending.started()
        except asyncio.CancelledError:
            await run_to_completion(self._abandon(pending))
            raise
        if not runs:
            settled = await pending.settled()
            result_of(self._label, settled.outcome, None).check()
        self._lifecycle.mark_open()
        return self

    async def _abandon(self, pending: Pending) -> None:
        """Releases an action that may already be granted, or is being granted."""
        pending.cancel()
        if await pending.started():
            self._transport.release_quota(self._action.id, None)
        await pending.settled()

    async def __aexit__(self, *error: object) -> None:
        assert self._pending is not None
        self._lifecycle.mark_closed()
        self._transport.release_quota(self._action.id, self._spent or None)
        await run_to_completion(self._pending.settled())

    def spent(self, *, tokens: int, name: str = "") -> None:
        """Reports the number of tokens that were used, which corrects the estimate. `name`: the quota, if several count
        tokens."""
        self._lifecycle.require_open()
        counting = [each for each, quota in self._quotas.items() if quota.tokens is not None]
        if not counting or type(tokens) is not int or tokens < 0:
            raise InvalidAction(TOKENS, tokens, "a whole number, at least 0, of a quota that counts tokens")
        self._spent[f"{_require_quota_name(name, counting)}/{TOKENS}"] = tokens

    def report_response(self, status: int, headers: Mapping[str, str], name: str = "") -> None:
        """Reports a response of the API: limits in its headers adapt the quota. `name`: the quota, if there are
        several."""
        self._lifecycle.require_open()
        quota = _require_quota_name(name, self._quotas)
        self._transport.report_upstream_response(quota, status_of(status), headers_of(headers), self._action.id)


def _require_quota_name(name: str, names: Collection[str]) -> str:
    if not name and len(names) == 1:
        return next(iter(names))
    if not isinstance(name, str) or name not in names:
        raise InvalidAction("name", name, f"the name of one quota: {' or '.join(map(repr, names))}")
    return name
