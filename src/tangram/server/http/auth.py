"""Authentication: the tenant of a token, the admin, and rate limits by token bucket.

Owns the tokens, of which only hashes are kept, and what each run may have. Never hands a token out twice. Promises that
a token tells which run it is and nothing else does, and that how long a wrong one takes to be refused says nothing
about the right ones.

A token is 32 random bytes: nobody finds one by trying. So a plain hash protects it, and it is looked up by that hash:
whoever tries cannot choose how much of one is alike.
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
from tangram.runtime.error_records import Unauthorized
from tangram.runtime.wire import RUN, Caps, RunReply, RunRequest
from tangram.server.journal.journal import Run

PREFIX = "tgr_"
"""So that a token that lies about is known for what it is."""
TOKEN_BYTES = 32
TOKEN_LENGTH_MAX = 512
"""As the config takes them: what is longer is not even hashed."""
RUNS_MAX = 1000
ADMIN = "admin"
"""The name that stands before what the admin, or anybody on this machine, makes in no run's name."""
RESERVED = (ADMIN, "default", "warm")

FAILURES_PER_S, FAILURES_BURST = 1.0, 20.0
"""Wrong tokens from one address; then it waits."""
ADDRESSES_MAX = 10_000


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run, in the journal."""

    weight: float
    caps: Caps
    made_at: float


class Standing:
    """Of one run, from the making of its name to its revocation. Another run of that name has another one."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended = False
        """It was revoked: nothing more is done in its name."""


class Caller(msgspec.Struct, frozen=True):
    """Whom a request comes from."""

    space: str
    """Stands before every name that it chooses, so that no two callers can mean the same thing."""
    run: str
    """In whose name all is done; empty: it says so itself."""
    admin: bool
    caps: Caps
    standing: Standing

    def require_standing(self) -> None:
        """Asked after whatever was waited for, and before anything is entered for a run: a request may be under way
        when its run is revoked, and must not act for the next one of that name. Raises Unauthorized."""
        if self.standing.ended:
            raise Unauthorized


class Facts(Protocol):
    """Where runs are kept."""

    async def run_changed(self, run: str, token_hash: bytes, record: bytes) -> None: ...

    async def run_ending(self, run: str, record: bytes) -> None: ...

    async def run_removed(self, run: str) -> None: ...


class Runs:
    """The runs that have a token."""

    def __init__(self, facts: Facts, known: Iterable[Run], admin_token: str = "") -> None:
        """Without a token of the admin whoever has none is the admin."""
        self._facts = facts
        self._hash_by_run: dict[str, bytes] = {}
        self._record_by_run: dict[str, Record] = {}
        self._standing_by_run: dict[str, Standing] = {}
        self._caller_by_hash: dict[bytes, Caller] = {}
        self._admin_hash = hash_of(admin_token) if admin_token else b""
        self._turn = asyncio.Lock()
        """Changes go one after the other: what is revoked while it is written does not come back."""
        self._ending: dict[str, Record] = {}
        """Runs whose token was revoked, and which may still have something: their names are taken."""
        self._under_way: set[str] = set()
        """Those of them that somebody is ending now."""
        for run in known:
            record = msgspec.msgpack.decode(run.record, type=Record)
            if run.ending:
                self._ending[run.name] = record
            else:
                self._enter(run.name, run.token_hash, record)

    def _enter(self, name: str, token_hash: bytes, record: Record) -> None:
        self._caller_by_hash.pop(self._hash_by_run.get(name, b""), None)
        self._hash_by_run[name] = token_hash
        self._record_by_run[name] = record
        standing = self._standing_by_run.setdefault(name, Standing())
        self._caller_by_hash[token_hash] = Caller(name, name, False, record.caps, standing)

    @property
    def is_open(self) -> bool:
        """Anybody who reaches the service may do everything."""
        return not self._admin_hash

    def caller(self, token: str) -> Caller | None:
        """None: nobody has that token."""
        if not token:
            return ANYBODY if self.is_open else None
        if len(token) > TOKEN_LENGTH_MAX:
            return None
        found = hash_of(token)
        if self._admin_hash and hmac.compare_digest(found, self._admin_hash):
            return ANYBODY
        return self._caller_by_hash.get(found)

    def acting(self, name: str) -> Caller:
        """The admin, in the name of a run: what it names is the run's."""
        return Caller(name, name, True, self.record(name).caps, self._standing_by_run[name])

    async def make(self, name: str, asked: RunRequest) -> RunReply:
        if not RUN.fullmatch(name) or name in RESERVED:
            raise InvalidAction(
                "run", name, "1 to 40 of a-z, 0-9 and '-', the first no '-'; not " + ", ".join(RESERVED)
            )
        async with self._turn:
            if name in self._record_by_run:
                said = f"there is a run {name}; revoke it first, or change it with PATCH"
                raise AdmissionRefused("run_exists", said)
            if name in self._ending:
                said = f"a run {name} was revoked and has not quite ended; revoke it again, or choose another name"
                raise AdmissionRefused("run_ending", said)
            if len(self._record_by_run) + len(self._ending) >= RUNS_MAX:
                raise AdmissionRefused("runs_max", f"there are {RUNS_MAX} runs, which is the most; revoke one")
            token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
            record = Record(weight=asked.weight, caps=asked.caps, made_at=time.time())
            await self._keep(name, hash_of(token), record)
            return msgspec.structs.replace(self._reply(name), token=token)

    async def change(self, name: str, asked: RunRequest) -> RunReply:
        async with self._turn:
            record = msgspec.structs.replace(self.record(name), weight=asked.weight, caps=asked.caps)
            await self._keep(name, self._hash_by_run[name], record)
            return self._reply(name)

    async def renew(self, name: str) -> RunReply:
        """Another token for a run that keeps all that it has; the old one is void from now on."""
        async with self._turn:
            record = self.record(name)
            token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
            await self._keep(name, hash_of(token), record)
            return msgspec.structs.replace(self._reply(name), token=token)

    async def _keep(self, name: str, token_hash: bytes, record: Record) -> None:
        await self._facts.run_changed(name, token_hash, msgspec.msgpack.encode(record))
        self._enter(name, token_hash, record)

    @property
    def ending(self) -> list[str]:
        """Those that were revoked, and of which something may be left: `revoking` can be entered for them again."""
        return sorted(self._ending)

    @asynccontextmanager
    async def revoking(self, name: str) -> AsyncIterator[None]:
        """Its token is no longer taken from now on, what is under way in its name enters nothing more, and nobody gets
        a token under that name before the context was left without an error, in which all that it has is taken away:
        not after a restart either."""
        async with self._turn:
            if name in self._under_way:
                raise AdmissionRefused("run_ending", f"run {name} is being ended; ask again when that is done")
            if name not in self._ending:
                record = self._ending[name] = self.record(name)
                self._caller_by_hash.pop(self._hash_by_run.pop(name), None)
                del self._record_by_run[name]
                self._standing_by_run.pop(name).ended = True
                await self._facts.run_ending(name, msgspec.msgpack.encode(record))
            self._under_way.add(name)
        try:
            yield
            await self._facts.run_removed(name)
            del self._ending[name]
        finally:
            self._under_way.discard(name)

    def record(self, name: str) -> Record:
        found = self._record_by_run.get(name)
        if found is None:
            raise InvalidAction("run", name, "the name of a run that has a token")
        return found

    def all(self) -> list[RunReply]:
        """Those that have a token, and those that have not quite ended."""
        return [self._reply(name) for name in sorted([*self._record_by_run, *self._ending])]

    def _reply(self, name: str) -> RunReply:
        ending = self._ending.get(name)
        record = ending or self._record_by_run[name]
        return RunReply(
            name=name, weight=record.weight, caps=record.caps, made_at=record.made_at, ending=ending is not None
        )


ANYBODY = Caller(ADMIN, "", True, Caps(), Standing())


def hash_of(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


class Bucket:
    """A token bucket: admits a burst at once, and `per_s` more each second."""

    __slots__ = ("_at", "_burst", "_left", "per_s")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self.per_s, self._burst = per_s, burst
        self._left, self._at = burst, now

    def _fill(self, now: float) -> None:
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self.per_s)
        self._at = now

    def take(self, now: float) -> float:
        """0 if there was one; otherwise the seconds until there is."""
        wait_s = self.peek(now)
        if not wait_s:
            self._left -= 1.0
        return wait_s

    def peek(self, now: float) -> float:
        """As `take`, without taking one."""
        self._fill(now)
        return 0.0 if self._left >= 1.0 else (1.0 - self._left) / self.per_s


class Guesses:
    """Wrong tokens by address: whoever sends many is not even answered whether the next one is right."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """How long this address may not try."""
        bucket = self._buckets.get(address)
        return 0.0 if bucket is None else bucket.peek(self._clock())

    def wrong(self, address: str) -> None:
        now = self._clock()
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = Bucket(FAILURES_PER_S, FAILURES_BURST, now)
            if len(self._buckets) > ADDRESSES_MAX:
                self._buckets.popitem(last=False)
        bucket.take(now)
