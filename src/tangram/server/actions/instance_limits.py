"""Limits on sandboxes per tenant: open ones and instances of functions count together.

Owns the caps, and per tenant that calls functions a pool with one unit for each call that may have an instance now: the
cap less its open sandboxes. Where a sandbox is refused, a call waits. Promises that open sandboxes and calls in
instances together never exceed the cap. Idle instances may exceed it only while they are being ended.
"""

from __future__ import annotations

from collections.abc import Callable

from tangram.core.ledger import Ledger
from tangram.core.messages import Pool, PoolChanged
from tangram.errors import AdmissionRefused
from tangram.server.actions.registry import ActionRegistry
from tangram.server.actions.translate import instances_pool


class InstanceLimits:
    def __init__(
        self,
        registry: ActionRegistry,
        ledger: Ledger,
        notify: Callable[[PoolChanged], None],
        sandboxes_max: int,
    ) -> None:
        """`sandboxes_max` applies to tenants without a cap of their own."""
        self._registry = registry
        self._ledger = ledger
        self._notify = notify
        self._sandboxes_max = sandboxes_max
        self._max_by_tenant: dict[str, int] = {}
        self._published_by_tenant: dict[str, int] = {}
        """Sizes of the pools that exist."""

    def set_cap(self, tenant: str, sandboxes_max: int | None) -> None:
        if sandboxes_max is None:
            self._max_by_tenant.pop(tenant, None)
        else:
            self._max_by_tenant[tenant] = sandboxes_max

    def remaining(self, tenant: str) -> int:
        """Returns how many instances the tenant may have in addition to its open sandboxes."""
        most = self._max_by_tenant.get(tenant, self._sandboxes_max)
        return max(0, most - self._registry.sandboxes_by_tenant[tenant])

    def require_sandbox_capacity(self, tenant: str) -> None:
        """Raises AdmissionRefused if the cap leaves no room for a sandbox. Calls keep their instances, and one call can
        always proceed."""
        calls = 0
        if self._registry.calls_by_tenant[tenant]:
            pool = self._ledger.pools.get(instances_pool(tenant))
            calls = max(1, pool.held if pool is not None and tenant in self._published_by_tenant else 0)
        if self.remaining(tenant) <= calls:
            usage = f"{self._registry.sandboxes_by_tenant[tenant]} sandboxes"
            if calls:
                usage += f" and {calls} for calls of functions"
            raise AdmissionRefused("sandboxes_max", f"this run has {usage}, the maximum; close one")

    def require_call_capacity(self, tenant: str) -> None:
        if not self.remaining(tenant):
            most = self._registry.sandboxes_by_tenant[tenant]
            reason = f"this run has {most} sandboxes, the maximum, and a call of a function needs one; close one"
            raise AdmissionRefused("sandboxes_max", reason)

    def ensure_pool(self, tenant: str) -> None:
        """Creates the pool before the tenant calls a function."""
        if tenant not in self._published_by_tenant:
            self._publish_remaining(tenant)

    def refresh(self, tenant: str) -> bool:
        """Updates the pool after the tenant's sandboxes or cap have changed. Returns whether its size changed."""
        if self._published_by_tenant.get(tenant) in (None, self.remaining(tenant)):
            return False
        self._publish_remaining(tenant)
        return True

    def _publish_remaining(self, tenant: str) -> None:
        size = self._published_by_tenant[tenant] = self.remaining(tenant)
        self._notify(PoolChanged(pool=Pool(kind=instances_pool(tenant), total=size, private=True)))

    def remove_tenant(self, tenant: str) -> None:
        self._max_by_tenant.pop(tenant, None)
        if self._published_by_tenant.pop(tenant, None) is not None:
            self._notify(PoolChanged(pool=Pool(kind=instances_pool(tenant), total=0, private=True)))
