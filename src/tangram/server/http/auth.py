"""Authentication: the tenant of a token, the admin, and rate limits by token bucket.

Owns the tokens, stored only as hashes, and the limits of each run. Returns a token only once. Promises that
only the token determines the run, and that the time to reject a wrong token reveals nothing about valid ones.

A token is 32 random bytes, so it cannot be guessed and a plain hash suffices. Tokens are looked up by hash: an attacker
cannot choose how many characters of a comparison match.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from tangram.errors import AdmissionRefused, InvalidAction
from tangram.runtime.wire import RUN, Caps, RunReply, RunRequest
from tangram.server.journal.journal import JournaledRun
from tangram.server.tenants import Principal, Revocation

TOKEN_PREFIX = "tgr_"
"""Prefix that makes a leaked token recognizable."""
TOKEN_BYTES = 32
TOKEN_LENGTH_MAX = 512
"""As the config limits it; a longer token is not even hashed."""
RUNS_MAX = 1000
ADMIN_TENANT = "admin"
"""The tenant of objects that the admin, or an unauthenticated local caller, creates outside of a run."""
RESERVED_RUN_NAMES = (ADMIN_TENANT, "default", "warm")

WRONG_TOKENS_PER_S, WRONG_TOKENS_BURST = 1.0, 20.0
"""Wrong tokens from one address before it must wait."""
TRACKED_ADDRESSES_MAX = 10_000


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Journal record of a run."""

    weight: float
    caps: Caps
    made_at: float


class RunStore(Protocol):
    async def record_run(self, run: str, token_hash: bytes, record: bytes) -> None: ...

    async def record_run_ending(self, run: str, record: bytes) -> None: ...

    async def remove_run(self, run: str) -> None: ...


class RunRegistry:
    """The runs that have a token."""

    def __init__(self, store: RunStore, recovered: Iterable[JournaledRun], admin_token: str = "") -> None:
        """Without an admin token, every caller without a token is the admin."""
        self._store = store
        self._hash_by_run: dict[str, bytes] = {}
        self._record_by_run: dict[str, RunRecord] = {}
        self._revocation_by_run: dict[str, Revocation] = {}
        self._principal_by_hash: dict[bytes, Principal] = {}
        self._admin_hash = hash_token(admin_token) if admin_token else b""
        self._lock = asyncio.Lock()
        """Serializes changes, so that a revoked run cannot be written again."""
        self._ending: dict[str, RunRecord] = {}
        """Revoked runs that may have remaining objects; their names are reserved."""
        self._revoking: set[str] = set()
        """Revoked runs that are being ended now."""
        for run in recovered:
            record = msgspec.msgpack.decode(run.record, type=RunRecord)
            if run.ending:
                self._ending[run.name] = record
            else:
                self._index(run.name, run.token_hash, record)

    def _index(self, name: str, token_hash: bytes, record: RunRecord) -> None:
        self._principal_by_hash.pop(self._hash_by_run.get(name, b""), None)
        self._hash_by_run[name] = token_hash
        self._record_by_run[name] = record
        revocation = self._revocation_by_run.setdefault(name, Revocation())
        self._principal_by_hash[token_hash] = Principal(name, name, False, record.caps, revocation)

    @property
    def allows_anonymous(self) -> bool:
        """Whether every caller is the admin."""
        return not self._admin_hash

    def authenticate(self, token: str) -> Principal | None:
        """None for an unknown token."""
        if not token:
            return ADMIN_PRINCIPAL if self.allows_anonymous else None
        if len(token) > TOKEN_LENGTH_MAX:
            return None
        token_hash = hash_token(token)
        if self._admin_hash and hmac.compare_digest(token_hash, self._admin_hash):
            return ADMIN_PRINCIPAL
        return self._principal_by_hash.get(token_hash)

    def impersonate(self, name: str) -> Principal:
        """The admin acting for a run: names that it chooses are the run's."""
        return Principal(name, name, True, self.record(name).caps, self._revocation_by_run[name])

    async def create(self, name: str, request: RunRequest) -> RunReply:
        if not RUN.fullmatch(name) or name in RESERVED_RUN_NAMES:
            raise InvalidAction(
                "run",
                name,
                "1 to 40 characters of a-z, 0-9 and '-', the first not '-'; not " + ", ".join(RESERVED_RUN_NAMES),
            )
        async with self._lock:
            if name in self._record_by_run:
                reason = f"there is a run {name}; revoke it first, or change it with PATCH"
                raise AdmissionRefused("run_exists", reason)
            if name in self._ending:
                reason = (
                    f"a run {name} was revoked, but not removed completely; revoke it again, or choose another name"
                )
                raise AdmissionRefused("run_ending", reason)
            if len(self._record_by_run) + len(self._ending) >= RUNS_MAX:
                raise AdmissionRefused("runs_max", f"there are {RUNS_MAX} runs, the maximum; revoke one")
            token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
            record = RunRecord(weight=request.weight, caps=request.caps, made_at=time.time())
            await self._save(name, hash_token(token), record)
            return msgspec.structs.replace(self._reply(name), token=token)

    async def change(self, name: str, request: RunRequest) -> RunReply:
        async with self._lock:
            record = msgspec.structs.replace(self.record(name), weight=request.weight, caps=request.caps)
            await self._save(name, self._hash_by_run[name], record)
            return self._reply(name)

    async def renew_token(self, name: str) -> RunReply:
        """Replaces the token of a run, which keeps all its objects. The old token is invalid immediately."""
        async with self._lock:
            record = self.record(name)
            token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
            await self._save(name, hash_token(token), record)
            return msgspec.structs.replace(self._reply(name), token=token)

    async def _save(self, name: str, token_hash: bytes, record: RunRecord) -> None:
        await self._store.record_run(name, token_hash, msgspec.msgpack.encode(record))
        self._index(name, token_hash, record)

    @property
    def ending(self) -> list[str]:
        """Revoked runs that may have remaining objects; `revoking` can be entered for them again."""
        return sorted(self._ending)

    @asynccontextmanager
    async def revoking(self, name: str) -> AsyncIterator[None]:
        """Revokes a run. Its token is invalid immediately, and its requests store nothing more. The body must remove
        all its objects. The name stays reserved until the body has ended without an error, across restarts too."""
        async with self._lock:
            if name in self._revoking:
                raise AdmissionRefused("run_ending", f"run {name} is being revoked; try again when that is done")
            if name not in self._ending:
                record = self._ending[name] = self.record(name)
                self._principal_by_hash.pop(self._hash_by_run.pop(name), None)
                del self._record_by_run[name]
                self._revocation_by_run.pop(name).revoke()
                await self._store.record_run_ending(name, msgspec.msgpack.encode(record))
            self._revoking.add(name)
        try:
            yield
            await self._store.remove_run(name)
            del self._ending[name]
        finally:
            self._revoking.discard(name)

    def record(self, name: str) -> RunRecord:
        run_record = self._record_by_run.get(name)
        if run_record is None:
            raise InvalidAction("run", name, "the name of a run that has a token")
        return run_record

    def replies(self) -> list[RunReply]:
        """Runs with a token, and revoked ones that have not ended."""
        return [self._reply(name) for name in sorted([*self._record_by_run, *self._ending])]

    def _reply(self, name: str) -> RunReply:
        ending = self._ending.get(name)
        record = ending or self._record_by_run[name]
        return RunReply(
            name=name, weight=record.weight, caps=record.caps, made_at=record.made_at, ending=ending is not None
        )


ADMIN_PRINCIPAL = Principal(ADMIN_TENANT, "", True, Caps(), Revocation())


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


class TokenBucket:
    """The rate limiter of a caller, a token bucket: admits a burst, and `per_s` more each second."""

    __slots__ = ("_refilled_at", "_burst", "_tokens", "per_s")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self.per_s, self._burst = per_s, burst
        self._tokens, self._refilled_at = burst, now

    def _refill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._refilled_at) * self.per_s)
        self._refilled_at = now

    def take(self, now: float) -> float:
        """Returns 0 and takes a token, or the seconds until there is one."""
        wait_s = self.peek(now)
        if not wait_s:
            self._tokens -= 1.0
        return wait_s

    def peek(self, now: float) -> float:
        """Like `take`, without taking a token."""
        self._refill(now)
        return 0.0 if self._tokens >= 1.0 else (1.0 - self._tokens) / self.per_s


class WrongTokenLimiter:
    """Limits wrong tokens per address: beyond the limit, the response does not even reveal whether the next one is
    valid."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def retry_after_s(self, address: str) -> float:
        """Seconds for which the address must wait."""
        bucket = self._buckets.get(address)
        return 0.0 if bucket is None else bucket.peek(self._clock())

    def record_failure(self, address: str) -> None:
        now = self._clock()
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = TokenBucket(WRONG_TOKENS_PER_S, WRONG_TOKENS_BURST, now)
            if len(self._buckets) > TRACKED_ADDRESSES_MAX:
                self._buckets.popitem(last=False)
        bucket.take(now)
