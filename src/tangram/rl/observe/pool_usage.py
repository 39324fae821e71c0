"""Pool use: what the actions of a run did to each pool since somebody asked last.

Owns the choice of whom to ask: the orchestrator of an embedded client, which is observed; or a service elsewhere, which
is looked at as far as it shows itself. A pool is told by its name, in the units of PoolUse. Promises that what is told
adds up to the whole however often it is asked, and that asking never waits.
"""

from __future__ import annotations

from tangram.client.client import Client
from tangram.client.remote import RemoteTransport
from tangram.client.transport import LocalTransport
from tangram.rl.observe.pool_usage_local import PoolObserver
from tangram.rl.observe.pool_usage_remote import PoolLook
from tangram.rl.train.records import PoolUse


class PoolWatch:
    """Make it inside of the client's context. `None`: there is nothing to tell."""

    def __init__(self, client: Client | None) -> None:
        transport = client._transport if client is not None else None
        self._source: PoolObserver | PoolLook | None = None
        if isinstance(transport, LocalTransport):
            self._source = PoolObserver(transport.orchestrator)
        elif isinstance(transport, RemoteTransport):
            self._source = PoolLook(transport)

    def since_last(self) -> tuple[PoolUse, ...]:
        """Since the call before, or since it was made."""
        return self._source.since_last() if self._source is not None else ()

    def close(self) -> None:
        """It sees nothing more, and tells nothing more."""
        if self._source is not None:
            self._source.close()
