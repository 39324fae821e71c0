"""Tenants: the identity of a caller, and qualified names.

Only the server knows tenants; the scheduler knows runs. Each run with a token is a tenant, and so is the admin outside
of a run. A qualified name is `TENANT/NAME`, or `TENANT:NAME` of an image: a name that a tenant chose, behind its own.
"""

from __future__ import annotations

import msgspec

from tangram.runtime.error_records import Unauthorized
from tangram.runtime.wire import Caps

TENANT_SEPARATOR = "/"
"""Between the name of a tenant and a name that it chose."""
IMAGE_SEPARATOR = ":"
"""The same for names and keys of images."""


def tenant_of(qualified_name: str) -> str:
    return qualified_name.partition(TENANT_SEPARATOR)[0]


def image_prefix(tenant: str) -> str:
    """The start of the qualified name of each of the tenant's images."""
    return f"{tenant}{IMAGE_SEPARATOR}"


class Revocation:
    """One run from creation to revocation. A later run of that name has another object."""

    __slots__ = ("is_revoked",)

    def __init__(self) -> None:
        self.is_revoked = False
        """Whether requests of the run fail."""

    def revoke(self) -> None:
        self.is_revoked = True


class Principal(msgspec.Struct, frozen=True):
    """The identity of a request."""

    tenant: str
    """Prefix of every name that it chooses, so that callers cannot refer to objects of others."""
    run: str
    """The run it acts for; empty: requests name one."""
    is_admin: bool
    caps: Caps
    revocation: Revocation

    def require_not_revoked(self) -> None:
        """Must be called after each await, before anything is stored for a run: the run may have been revoked
        meanwhile, and the request must not act for a later run of that name. Raises Unauthorized."""
        if self.revocation.is_revoked:
            raise Unauthorized
