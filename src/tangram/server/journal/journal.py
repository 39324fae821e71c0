"""The journal: durable storage of actions, results, sandboxes, runs and notes.

Owns the database file, its write-ahead log and its lock. Stores bytes by id and run; does not interpret them. Promises:

- Awaited operations survive a crash of the process (`process`) or of the machine (`power`), in order.
- After a write error every call raises that error; operations awaited before are not lost.
- Reading returns the written content, or raises JournalDamaged.
- It has one owner at a time.

One thread does all disk access. Operations are grouped: those that arrive during a commit go into the next one
together. An operation whose caller is cancelled is still committed.

Ages: a result is kept until it is acknowledged or `retention_s` have passed while the journal was open, since a stopped
server cannot deliver it. Calendar changes have no effect. A backward step of the clock counts nothing, a forward step
at most CLOCK_STEP_S_MAX.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import sqlite3
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tangram.cancellation import run_to_completion
from tangram.clock import Clock, WallClock
from tangram.core.action import ID_LENGTH_MAX
from tangram.errors import InvalidAction, InvalidConfig, InvalidInput, InvariantError, ManagerError
from tangram.files.lock import lock_file, read_holder
from tangram.server.journal.store import (
    CommitBatch,
    JournalCorruption,
    JournaledAction,
    JournaledFact,
    JournaledNote,
    JournaledRun,
    JournaledSandbox,
    JournalStore,
    RecoveredState,
    SubmittedRow,
    digest_of,
)
from tangram.server.tenants import tenant_of

DURABILITIES = ("process", "power")
RETENTION_S = 86400.0
"""A day: a run that was interrupted in the evening finds its results in the morning."""
CLOCK_STEP_S_MAX = 600.0
"""More than the interval between compactions, so no longer time can pass between two readings of the clock."""

BATCH_OPERATIONS_MAX = 1024
BATCH_BYTES_MAX = 8 << 20
"""Size of a batch: a small write does not wait for all large ones."""
RECORD_BYTES_MAX = 256 << 20
"""SQLite limits a row to 1 GB."""
CHECKPOINT_THRESHOLD_BYTES = 4 << 20
"""Size of the write-ahead log at which it is copied into the database: the default of SQLite."""

CommitListener = Callable[[float, int, int], None]
"""Called after each commit with its seconds, its operations, and the size of the write-ahead log."""

_ENVIRONMENT_ERROR_CODES = frozenset(
    (
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    )
)
"""Error codes of SQLite with causes outside of the file: permission, busy, locked, memory, read-only, I/O, full, cannot
open. Other errors at opening mean a damaged file."""


class JournalFailed(ManagerError):
    """The disk failed. The journal accepts no further operation."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__(
            f"the journal {path} cannot be used: {problem}. Everything acknowledged is in it: check the disk (space,"
            " permissions, health) and start the service again",
            retry=False,
        )


class JournalClosed(JournalFailed):
    """The journal was closed, or has not been opened yet."""

    def __init__(self, path: Path) -> None:
        ManagerError.__init__(self, f"the journal {path} is not open", retry=False)


class JournalDamaged(ManagerError):
    """The content of the files differs from the written content."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__(
            f"the journal {path} is damaged: {problem}. It was not changed. Restore an intact copy, or move"
            f" {path} and {path.name}-wal away to start with an empty one, without any actions and sandboxes",
            retry=False,
        )


class JournalBusy(ManagerError):
    """Another server owns the journal."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(
            f"the journal {path} belongs to process {owner}, which is running; stop that service, or give this one"
            " another journal",
            retry=False,
        )


class JournalConflict(InvalidAction):
    """The id belongs to another action."""

    def __init__(self, id: str) -> None:
        super().__init__("id", id, "an unused id; the journal has an action with different content")


class Journal:
    def __init__(
        self,
        path: str | Path,
        durability: str = "process",
        *,
        retention_s: float = RETENTION_S,
        clock: Clock | None = None,
        on_commit: CommitListener | None = None,
    ) -> None:
        if durability not in DURABILITIES:
            raise InvalidConfig("journal.durability", durability, "'process' or 'power'")
        if not retention_s > 0.0:
            raise InvalidConfig("journal.retention_s", retention_s, "a positive number of seconds")
        self.path = Path(os.path.abspath(path))
        self.durability = durability
        self.recovered = RecoveredState()
        """The content at opening, until `drop_recovered`."""
        self._on_commit = on_commit
        self._retention_s = retention_s
        self._clock = clock or WallClock()
        self._lock = -1
        self._thread: ThreadPoolExecutor | None = None
        self._store: JournalStore
        """Set by opening, as `_uptime`."""
        self._uptime: _UptimeClock
        self._seq_by_id: dict[str, int] = {}
        """Rows of the actions that have not settled."""
        self.unfetched_bytes: collections.Counter[str] = collections.Counter()
        """By tenant: size of results that are not acknowledged."""
        self._next_seq = 1
        self._batches: collections.deque[_PendingBatch] = collections.deque()
        """The first is next to commit; the last accepts operations."""
        self._is_committing = False
        """A commit is in progress or scheduled."""
        self._idle = asyncio.Event()
        self._compacting = asyncio.Lock()
        self._is_store_open = False
        self._is_accepting = False
        """Operations are accepted between opening and closing."""
        self._failure: Exception | None = None
        """Raised by every call."""

    # ---- opening and closing ----

    async def __aenter__(self) -> Self:
        assert self._thread is None, "a journal is opened once"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        try:
            await run_to_completion(self._on_thread(self._open))
        except BaseException:
            await run_to_completion(self._close())
            raise
        self.recovered = self._store.take_recovered()
        self.unfetched_bytes = self._store.unfetched_bytes
        self._seq_by_id = self._store.seq_by_id
        self._next_seq = self._store.next_seq
        self._uptime = _UptimeClock(self._clock, self._store.uptime_s)
        self._is_accepting = True
        return self

    async def __aexit__(self, *error: object) -> None:
        """Commits pending operations."""
        self._is_accepting = False
        await run_to_completion(self._close())

    def drop_recovered(self) -> None:
        """Frees the memory of `recovered`."""
        self.recovered = RecoveredState()

    def _open(self) -> None:
        try:
            _require_directory(self.path.parent)
            for name in (f"{self.path.name}.lock", self.path.name, f"{self.path.name}-wal"):
                _require_private(self.path.with_name(name))
            self._lock = _acquire_lock(self.path)
            self._store = JournalStore(self.path, survives_power_loss=self.durability == "power")
            self._is_store_open = True
        except (JournalCorruption, UnicodeError) as error:  # damaged names may not be valid UTF-8
            raise JournalDamaged(self.path, error) from None
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            raise (JournalFailed if code in _ENVIRONMENT_ERROR_CODES else JournalDamaged)(self.path, error) from error
        except OSError as error:
            raise JournalFailed(self.path, error) from error

    async def _close(self) -> None:
        assert self._thread is not None
        if self._is_committing:
            await self._idle.wait()
        try:
            if self._is_store_open:
                await self._on_thread(self._store.close)
        finally:
            self._thread.shutdown()
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    # ---- actions ----

    async def record_submission(self, id: str, run: str, action: bytes, work: bytes) -> JournaledAction | None:
        """Returns None for a new action, which is now queued. For a repeated submission, returns the stored action.
        Raises JournalConflict if the content differs."""
        _require_name("id", id)
        _require_name("run", run)
        size = _require_record("action", action) + _require_record("work", work)
        digest = digest_of(run, action, work)
        self._require_usable()
        batch = self._open_batch(size)
        if id in self._seq_by_id:
            batch.queried_ids.append(id)
            await batch.wait_committed()
        else:
            seq = self._seq_by_id[id] = self._next_seq
            self._next_seq += 1
            batch.submitted.append(SubmittedRow(seq, id, run, digest, action, work))
            await batch.wait_committed()
            if seq not in batch.duplicates:
                return None
        known = batch.actions_by_id[id]
        if known.digest != digest:
            raise JournalConflict(id)
        return known

    async def record_start(self, id: str, attempt: int) -> None:
        """The action may be started after this returns."""
        assert type(attempt) is int and 0 < attempt < 1 << 31, f"attempts count from 1, got {attempt!r}"
        seq = self._seq_of(id)
        batch = self._open_batch()
        batch.started[seq] = attempt
        await batch.wait_committed()
        _require_stored(id, seq, batch)

    async def record_settled(self, id: str, settled: bytes) -> None:
        """The result may be delivered after this returns."""
        size = _require_record("settled", settled)
        seq = self._seq_of(id)
        batch = self._open_batch(size)
        del self._seq_by_id[id]
        self.unfetched_bytes[tenant_of(id)] += size
        batch.settled.append((seq, self._uptime.read(), settled))
        await batch.wait_committed()
        _require_stored(id, seq, batch)

    def record_fetched(self, id: str) -> None:
        """Records that the caller has the result. Does not wait: if the record is lost, the result is only kept
        longer."""
        self._require_usable()
        if id in self._seq_by_id:
            raise InvariantError(f"action {id} has not settled, so there is no result to acknowledge")
        self._open_batch().fetched.append(id)

    async def flush(self) -> None:
        """Waits until all earlier operations are committed."""
        await self._open_batch().wait_committed()

    async def result(self, id: str) -> bytes | None:
        """The result of a settled action; None if it has not settled, is unknown, or its result was deleted."""
        result: bytes | None = await self._call_store(JournalStore.result, id)
        return result

    async def result_bytes(self, id: str) -> int | None:
        """The size of a result; None as in `result`."""
        size: int | None = await self._call_store(JournalStore.result_bytes, id)
        return size

    def _seq_of(self, id: str) -> int:
        self._require_usable()
        seq = self._seq_by_id.get(id)
        if seq is None:
            raise InvariantError(f"the journal has no action {id} that is queued or running")
        return seq

    # ---- sandboxes, runs and notes ----

    async def record_sandbox_opened(self, name: str, run: str, node: str, spec: bytes) -> None:
        _require_name("run", run)
        _require_name("node", node)
        size = _require_record("spec", spec)
        await self._set_fact("sandbox", name, JournaledSandbox(name=name, run=run, node=node, spec=spec), size)

    async def record_sandbox_closed(self, name: str) -> None:
        await self._set_fact("sandbox", name, None)

    async def record_run(self, run: str, token_hash: bytes, record: bytes) -> None:
        size = _require_record("token_hash", token_hash) + _require_record("record", record)
        await self._set_fact("run", run, JournaledRun(name=run, token_hash=token_hash, record=record), size)

    async def record_run_ending(self, run: str, record: bytes) -> None:
        """Revokes the token of a run. Its name stays reserved until `remove_run`."""
        ending = JournaledRun(name=run, token_hash=b"", record=record, ending=True)
        await self._set_fact("run", run, ending, _require_record("record", record))

    async def remove_run(self, run: str) -> None:
        """The run's results stay until `delete_results` is called for it."""
        await self._set_fact("run", run, None)

    async def put_note(self, key: str, value: bytes) -> None:
        await self._set_fact("note", key, JournaledNote(key=key, value=value), _require_record("value", value))

    async def _set_fact(self, kind: str, key: str, fact: JournaledFact | None, size: int = 0) -> None:
        _require_name(f"{kind} name", key)
        batch = self._open_batch(size)
        batch.facts[kind, key] = fact
        await batch.wait_committed()

    # ---- compaction ----

    async def compact(self) -> int:
        """Deletes acknowledged and expired results and shrinks the file, in small steps between commits. Call it every
        few minutes. Never touches live actions. Returns the number of deleted results."""
        self._require_usable()
        async with self._compacting:
            deleted = await self.delete_results(())
            while await self._compaction_step(JournalStore.vacuum):
                pass
            await self._call_store(JournalStore.checkpoint)
            return deleted

    async def delete_results(self, runs: Collection[str]) -> int:
        """Also deletes the results of these runs; leaves shrinking to the next compaction. Returns the number of
        deleted results."""
        last, deleted = 0, 0
        while True:
            up_s = self._uptime.read()
            step = await self._compaction_step(JournalStore.prune, last, up_s - self._retention_s, tuple(runs), up_s)
            if step is None:
                return deleted
            last, count, freed_bytes = step
            deleted += count
            self.unfetched_bytes.subtract(freed_bytes)

    async def _compaction_step(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Runs one step of a compaction, and copies the log if it became too long."""
        result = await self._call_store(function, *arguments)
        if self._store.wal_bytes > CHECKPOINT_THRESHOLD_BYTES:
            await self._call_store(JournalStore.checkpoint)
        return result

    # ---- group commit ----

    def _open_batch(self, size: int = 0) -> _PendingBatch:
        """The batch for the next operation of this size."""
        self._require_usable()
        batch = self._batches[-1] if self._batches else None
        if batch is None or batch.operations >= BATCH_OPERATIONS_MAX or batch.bytes + size > BATCH_BYTES_MAX:
            batch = _PendingBatch()
            self._batches.append(batch)
        batch.add_operation(size)
        if not self._is_committing:
            self._is_committing = True
            self._idle.clear()
            # Deferred, so that further operations of this turn of the loop join.
            asyncio.get_running_loop().call_soon(self._commit_next)
        return batch

    def _commit_next(self) -> None:
        if not self._batches:
            self._is_committing = False
            self._idle.set()
            return
        batch = self._batches.popleft()
        batch.begin_commit(self._uptime.read(), self._clock.now())
        self._on_thread(self._store.commit, batch).add_done_callback(functools.partial(self._on_commit_done, batch))

    def _on_commit_done(self, batch: _PendingBatch, done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is not None:
            self._batches.appendleft(batch)
            self._fail(error)
            self._commit_next()
            return
        if batch.duplicates:
            self._drop_duplicates(batch)
        self.unfetched_bytes.subtract(batch.freed_bytes)
        batch.resolve(None)
        if self._on_commit is not None:
            self._on_commit(self._clock.now() - batch.began_at, batch.operations, self._store.wal_bytes)
        if self._store.wal_bytes > CHECKPOINT_THRESHOLD_BYTES:
            self._on_thread(self._store.checkpoint).add_done_callback(self._on_checkpoint_done)
        else:
            self._commit_next()

    def _drop_duplicates(self, batch: _PendingBatch) -> None:
        """Later batches may have a start or end of a submission whose id was taken: they write nothing of it."""
        duplicates = [row for row in batch.submitted if row.seq in batch.duplicates]
        for row in duplicates:
            if self._seq_by_id.get(row.id) == row.seq:
                del self._seq_by_id[row.id]
        for later in self._batches:
            later.duplicates.update([row.seq for row in duplicates])

    def _on_checkpoint_done(self, done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is not None:
            self._fail(error)
        self._commit_next()

    def _fail(self, error: BaseException) -> None:
        """Fails all operations from now on: nothing may be written after a gap."""
        if self._failure is None:
            self._failure = (JournalDamaged if isinstance(error, JournalCorruption) else JournalFailed)(
                self.path, error
            )
            self._failure.__cause__ = error
        for batch in self._batches:
            batch.resolve(self._failure)
        self._batches.clear()

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._is_accepting:
            raise JournalClosed(self.path)

    async def _call_store(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Runs on the thread between two commits."""
        self._require_usable()
        try:
            return await self._on_thread(function, self._store, *arguments)
        except Exception as error:
            self._fail(error)
            self._require_usable()
            raise

    def _on_thread(self, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class _PendingBatch(CommitBatch):
    """A batch with the callers that wait for its commit."""

    def __init__(self) -> None:
        super().__init__()
        self.began_at = 0.0
        self._waiters: list[asyncio.Future[None]] = []

    def add_operation(self, size: int) -> None:
        self.operations += 1
        self.bytes += size

    def begin_commit(self, uptime_s: float, now: float) -> None:
        self.uptime_s, self.began_at = uptime_s, now

    def wait_committed(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def resolve(self, error: Exception | None) -> None:
        for waiter in self._waiters:
            if waiter.done():
                continue  # it was cancelled
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


class _UptimeClock:
    """Seconds for which the journal was open, over all owners."""

    def __init__(self, clock: Clock, before_s: float) -> None:
        self._clock = clock
        self._counted_s = before_s
        self._last_s = clock.now()

    def read(self) -> float:
        now_s = self._clock.now()
        self._counted_s += min(max(now_s - self._last_s, 0.0), CLOCK_STEP_S_MAX)
        self._last_s = now_s
        return self._counted_s


# ---- input checks ---------------------------------------------------------------------------------------------------


def _require_name(field: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= ID_LENGTH_MAX or not value.isprintable():
        raise InvalidInput(field, value, f"1 to {ID_LENGTH_MAX} printable characters")


def _require_record(field: str, value: object) -> int:
    """Returns the size of the record."""
    if not isinstance(value, bytes):
        raise InvalidInput(field, type(value).__name__, "bytes")
    if len(value) > RECORD_BYTES_MAX:
        raise InvalidInput(field, f"{len(value)} bytes", f"at most {RECORD_BYTES_MAX} bytes")
    return len(value)


def _require_stored(id: str, seq: int, batch: CommitBatch) -> None:
    if seq in batch.duplicates:
        raise InvariantError(f"action {id} was not stored: its id was taken")


# ---- the files ------------------------------------------------------------------------------------------------------


def _require_directory(directory: Path) -> None:
    """Rejects a directory in which other users could replace the files."""
    uid = os.geteuid()
    try:
        status = os.stat(directory)
    except FileNotFoundError:
        status = None
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise InvalidConfig("journal", str(directory), f"a directory that exists: mkdir -m 700 {directory}")
    if status.st_uid != uid:
        raise InvalidConfig(
            "journal",
            f"{directory} of user {status.st_uid}",
            f"a directory of user {uid}, who runs the service: chown {uid} {directory}",
        )
    if status.st_mode & 0o022:
        raise InvalidConfig(
            "journal",
            f"{directory} with mode {stat.S_IMODE(status.st_mode):o}",
            f"a directory that others cannot write to: chmod go-w {directory}",
        )


def _require_private(path: Path) -> None:
    """Checks a file of the journal, if it exists."""
    uid = os.geteuid()
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise InvalidConfig("journal", str(path), "a regular file, not a link or a directory; move it away")
    if status.st_uid != uid or status.st_mode & 0o077:
        raise InvalidConfig(
            "journal",
            f"{path} of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}",
            f"a file that only user {uid} can read and write: chown {uid} {path}; chmod 600 {path}",
        )


def _acquire_lock(path: Path) -> int:
    """Returns a descriptor that holds the lock until it is closed or its process ends."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        return lock_file(lock, holder=f"{os.getpid()}\n")
    except BlockingIOError:
        owner = read_holder(lock)
        raise JournalBusy(path, owner if owner.isdecimal() else "(unknown)") from None
