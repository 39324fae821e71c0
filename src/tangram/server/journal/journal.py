"""The journal: what the shared service remembers, whatever ends it.

Owns the files of the journal: the database, its log, and the lock that says whose they are. Never decides what becomes
of an action, and does not look into one: it keeps bytes by id and run. Promises:

- what was awaited is there after the death of the process (`process`) or of the machine (`power`), and in order;
- after a failure to write, every call raises that failure; what was awaited before is not lost;
- what is handed out is what was written, or JournalDamaged is raised;
- it has one owner at a time.

One thread does all that touches the disk. Operations gather while a commit is under way and go into the next one
together; whoever awaits an operation goes on when its commit is done. Whoever is cancelled meanwhile has still made it.

Ages. A result is kept until its caller has it or `keep_s` have passed, counted while the journal was open: nobody can
fetch a result from a service that is down. No calendar is asked, so no change of it makes a result older. Of the clock
that is asked a step back counts nothing, and a step forward at most STEP_MAX_S: however wrong, it takes `keep_s /
STEP_MAX_S` of them to delete a result early.
"""

from __future__ import annotations

import asyncio
import collections
import fcntl
import functools
import os
import sqlite3
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tangram.clock import Clock, WallClock
from tangram.core.action import ID_LENGTH_MAX
from tangram.errors import InvalidAction, InvalidConfig, InvalidInput, InvariantError, ManagerError
from tangram.runtime.orchestrator import undisturbed
from tangram.server.actions.tenants import space_of
from tangram.server.journal.store import (
    Batch,
    Damage,
    Entry,
    Fact,
    Known,
    Note,
    Phase,
    Recovered,
    Run,
    Sandbox,
    Store,
    digest_of,
)

__all__ = [
    "Journal",
    "JournalBusy",
    "JournalConflict",
    "JournalDamaged",
    "JournalFailed",
    "Known",
    "Note",
    "Phase",
    "Recovered",
    "Run",
    "Sandbox",
]

DURABILITIES = ("process", "power")
KEEP_S = 86400.0
"""A day: a run that was interrupted in the evening finds its results in the morning."""
STEP_MAX_S = 600.0
"""Compactions come more often than this; between two readings of the clock no more time can have passed."""

BATCH_OPERATIONS_MAX = 1024
BATCH_BYTES_MAX = 8 << 20
"""What is full is a batch of its own: who writes little does not wait for all of who writes much."""
RECORD_BYTES_MAX = 256 << 20
"""SQLite takes rows of less than 1 GB."""
CHECKPOINT_BYTES = 4 << 20
"""Of the log, until it is copied into the database: what SQLite takes as well."""

_THE_DISK = frozenset((3, 5, 6, 7, 8, 10, 13, 14))
"""Codes of SQLite that blame the world around the file: permission, busy, locked, memory, read-only, I/O, full, cannot
open. All others at opening blame what is in it."""


class JournalFailed(ManagerError):
    """The disk does not take or give what is asked of it. The journal takes nothing more."""

    def __init__(self, path: Path, found: object) -> None:
        super().__init__(
            f"the journal {path} cannot be used: {found}. All that was acknowledged is in it: see to the disk (space,"
            " permissions, health) and start the service again",
            retry=False,
        )


class JournalDamaged(ManagerError):
    """The files are there, and what is in them is not what was written."""

    def __init__(self, path: Path, found: object) -> None:
        super().__init__(
            f"the journal {path} is damaged: {found}. Nothing in it was changed. Put a copy back that is whole, or move"
            f" {path} and {path.name}-wal away to begin with an empty one, which forgets all actions and sandboxes",
            retry=False,
        )


class JournalBusy(ManagerError):
    """Another service has it."""

    def __init__(self, path: Path, owner: str) -> None:
        self.owner = owner
        """Its process id."""
        super().__init__(
            f"the journal {path} belongs to process {owner}, which is alive; stop that service, or give this one"
            " another journal",
            retry=False,
        )


class JournalConflict(InvalidAction):
    """The id is that of another action."""

    def __init__(self, id: str) -> None:
        super().__init__("id", id, "an id that no other action has; the journal has one with other content")


class Journal:
    def __init__(
        self,
        path: str | Path,
        durability: str = "process",
        *,
        keep_s: float = KEEP_S,
        clock: Clock | None = None,
    ) -> None:
        if durability not in DURABILITIES:
            raise InvalidConfig("journal.durability", durability, "'process' or 'power'")
        if not keep_s > 0.0:
            raise InvalidConfig("journal.keep_s", keep_s, "a positive number of seconds")
        self.path = Path(os.path.abspath(path))
        self.durability = durability
        self.recovered = Recovered()
        """What was found at opening. Whoever has read it may set it to an empty one."""
        self.observe: Callable[[float, int, int], None] = lambda seconds, operations, log_bytes: None
        """Told of each commit how long it took, of how many operations it was, and how long the log is: metrics."""
        self._keep_s = keep_s
        self._clock = clock or WallClock()
        self._lock = -1
        self._thread: ThreadPoolExecutor | None = None
        self._store: Store
        self._up: _UpTime
        self._live: dict[str, Entry] = {}
        self.kept_bytes: collections.Counter[str] = collections.Counter()
        """Of results that nobody has fetched, by the space of their ids."""
        self._next_seq = 1
        self._batches: collections.deque[_Waited] = collections.deque()
        """The last one still takes operations; the first is next."""
        self._busy = False
        """A batch is being committed, or is about to be."""
        self._idle = asyncio.Event()
        self._compacting = asyncio.Lock()
        self._opened = False
        self._taking = False
        """Operations, that is: between the opening and the closing."""
        self._broken: Exception | None = None
        """Raised by every call."""

    # ---- its life ----

    async def __aenter__(self) -> Self:
        assert self._thread is None, "a journal is opened once"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        try:
            await undisturbed(self._on_thread(self._open))
        except BaseException:
            await undisturbed(self._close())
            raise
        self.recovered, self._store.recovered = self._store.recovered, Recovered()
        self.kept_bytes = self._store.kept_bytes
        self._live = {entry.id: entry for entry in self._store.live}
        self._next_seq = self._store.next_seq
        self._up = _UpTime(self._clock, self._store.up_s)
        self._taking = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit what is pending."""
        self._taking = False
        await undisturbed(self._close())

    def _open(self) -> None:
        try:
            _require_directory(self.path.parent)
            for name in (f"{self.path.name}.lock", self.path.name, f"{self.path.name}-wal"):
                _require_private(self.path.with_name(name))
            self._lock = _locked(self.path)
            self._store = Store(self.path, power=self.durability == "power")
            self._opened = True
        except (Damage, UnicodeError) as error:  # names that are damaged may not even be text
            raise JournalDamaged(self.path, error) from None
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            raise (JournalFailed if code in _THE_DISK else JournalDamaged)(self.path, error) from error
        except OSError as error:
            raise JournalFailed(self.path, error) from error

    async def _close(self) -> None:
        assert self._thread is not None
        if self._busy:
            await self._idle.wait()
        try:
            if self._opened:
                await self._on_thread(self._store.close)
        finally:
            self._thread.shutdown()
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    # ---- actions ----

    async def submitted(self, id: str, run: str, action: bytes, work: bytes) -> Known | None:
        """None: it is new, and is queued. Otherwise it was submitted before with the same content, and this is what
        became of it. Raises JournalConflict if its content was another."""
        _require_name("id", id)
        _require_name("run", run)
        size = _require_record("action", action) + _require_record("work", work)
        digest = digest_of(run, action, work)
        self._require_usable()
        entry = self._live.get(id)
        if entry is not None and entry.digest != digest:
            raise JournalConflict(id)
        batch = self._batch(size)
        is_new = entry is None
        if entry is None:
            entry = self._live[id] = Entry(self._next_seq, id, run, digest)
            self._next_seq += 1
            batch.submitted.append((entry, action, work))
        else:
            batch.asked.append(id)
        await batch.committed()
        if is_new and not entry.refused:
            return None
        known = batch.known[id]
        if known.digest != digest:
            raise JournalConflict(id)
        return known

    async def starting(self, id: str, attempt: int) -> None:
        """Launch it when this has returned: what is launched is known to have been."""
        assert type(attempt) is int and 0 < attempt < 1 << 31, f"attempts count from 1, got {attempt!r}"
        entry = self._entry(id)
        batch = self._batch()
        batch.started[entry] = attempt
        await batch.committed()
        _require_added(entry)

    async def settled(self, id: str, settled: bytes) -> None:
        """Tell its caller when this has returned."""
        size = _require_record("settled", settled)
        entry = self._entry(id)
        batch = self._batch(size)
        del self._live[id]
        self.kept_bytes[space_of(id)] += size
        batch.settled.append((entry, self._up.read(), settled))
        await batch.committed()
        _require_added(entry)

    def fetched(self, id: str) -> None:
        """The caller has the result. Not waited for: if it is lost, the result is kept longer."""
        self._require_usable()
        if id in self._live:
            raise InvariantError(f"action {id} has not settled, and so nobody can have its result")
        self._batch().fetched.append(id)

    async def written(self) -> None:
        """Until all that was asked for before is."""
        await self._batch().committed()

    async def result(self, id: str) -> bytes | None:
        """Of an action that has settled. None: it has not, was never there, or the result was not kept any longer."""
        result: bytes | None = await self._ask(Store.result, id)
        return result

    async def result_bytes(self, id: str) -> int | None:
        """How large it is."""
        size: int | None = await self._ask(Store.result_bytes, id)
        return size

    def _entry(self, id: str) -> Entry:
        self._require_usable()
        entry = self._live.get(id)
        if entry is None:
            raise InvariantError(f"the journal has no action {id} that is queued or running")
        return entry

    # ---- everything else ----

    async def sandbox_opened(self, name: str, run: str, node: str, spec: bytes) -> None:
        _require_name("run", run)
        _require_name("node", node)
        size = _require_record("spec", spec)
        await self._set("sandbox", name, Sandbox(name=name, run=run, node=node, spec=spec), size)

    async def sandbox_closed(self, name: str) -> None:
        await self._set("sandbox", name, None)

    async def run_changed(self, run: str, token_hash: bytes, record: bytes) -> None:
        size = _require_record("token_hash", token_hash) + _require_record("record", record)
        await self._set("run", run, Run(name=run, token_hash=token_hash, record=record), size)

    async def run_ending(self, run: str, record: bytes) -> None:
        """It has no token any more, and its name is taken until it is removed."""
        ending = Run(name=run, token_hash=b"", record=record, ending=True)
        await self._set("run", run, ending, _require_record("record", record))

    async def run_removed(self, run: str) -> None:
        """Its results stay until a compaction is told that it has finished."""
        await self._set("run", run, None)

    async def note(self, key: str, value: bytes) -> None:
        await self._set("note", key, Note(key=key, value=value), _require_record("value", value))

    async def _set(self, kind: str, key: str, fact: Fact | None, size: int = 0) -> None:
        _require_name(f"{kind} name", key)
        batch = self._batch(size)
        batch.facts[kind, key] = fact
        await batch.committed()

    # ---- compaction ----

    async def compact(self) -> int:
        """Delete results that were fetched or are older than `keep_s`, and let the file shrink. Goes in small steps,
        between which operations are committed. Call it every few minutes. Returns how many results it deleted; live
        actions are never touched."""
        self._require_usable()
        async with self._compacting:
            deleted = await self.forget(())
            while await self._step(Store.vacuum):
                pass
            await self._ask(Store.checkpoint)
            return deleted

    async def forget(self, runs: Collection[str]) -> int:
        """Delete the results of runs that have finished as well, and do not wait for the file to shrink: that comes
        with the next compaction, and may be under way. Returns how many it deleted."""
        last, deleted = 0, 0
        while True:
            up_s = self._up.read()
            step = await self._step(Store.prune, last, up_s - self._keep_s, tuple(runs), up_s)
            if step is None:
                return deleted
            last, count, freed_bytes = step
            deleted += count
            self.kept_bytes.subtract(freed_bytes)

    async def _step(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Of a compaction, which may write more than a log should have."""
        answer = await self._ask(function, *arguments)
        if self._store.wal_bytes > CHECKPOINT_BYTES:
            await self._ask(Store.checkpoint)
        return answer

    # ---- group commit ----

    def _batch(self, size: int = 0) -> _Waited:
        """The one that takes the next operation, of so many bytes."""
        self._require_usable()
        batch = self._batches[-1] if self._batches else None
        if batch is None or batch.operations >= BATCH_OPERATIONS_MAX or batch.bytes + size > BATCH_BYTES_MAX:
            batch = _Waited()
            self._batches.append(batch)
        batch.operations += 1
        batch.bytes += size
        if not self._busy:
            self._busy = True
            self._idle.clear()
            # Not at once: what else comes in this turn of the loop goes with it.
            asyncio.get_running_loop().call_soon(self._commit_next)
        return batch

    def _commit_next(self) -> None:
        if not self._batches:
            self._busy = False
            self._idle.set()
            return
        batch = self._batches.popleft()
        batch.up_s = self._up.read()
        batch.began_s = self._clock.now()
        self._on_thread(self._store.commit, batch).add_done_callback(functools.partial(self._commit_done, batch))

    def _commit_done(self, batch: _Waited, done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is not None:
            self._batches.appendleft(batch)
            self._break(error)
            self._commit_next()
            return
        for entry, _, _ in batch.submitted:
            if entry.refused and self._live.get(entry.id) is entry:
                del self._live[entry.id]
        self.kept_bytes.subtract(batch.freed_bytes)
        batch.release(None)
        self.observe(self._clock.now() - batch.began_s, batch.operations, self._store.wal_bytes)
        if self._store.wal_bytes > CHECKPOINT_BYTES:
            self._on_thread(self._store.checkpoint).add_done_callback(self._checkpoint_done)
        else:
            self._commit_next()

    def _checkpoint_done(self, done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is not None:
            self._break(error)
        self._commit_next()

    def _break(self, error: BaseException) -> None:
        """Nothing more is written: what came after a gap would not be the truth."""
        if self._broken is None:
            self._broken = (JournalDamaged if isinstance(error, Damage) else JournalFailed)(self.path, error)
            self._broken.__cause__ = error
        for batch in self._batches:
            batch.release(self._broken)
        self._batches.clear()

    def _require_usable(self) -> None:
        if self._broken is not None:
            raise self._broken
        if not self._taking:
            raise JournalFailed(self.path, "it is not open")

    async def _ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Between two commits."""
        self._require_usable()
        try:
            return await self._on_thread(function, self._store, *arguments)
        except Exception as error:
            self._break(error)
            self._require_usable()
            raise

    def _on_thread(self, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class _Waited(Batch):
    """With those who wait for its commit."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s = 0.0
        self._waiters: list[asyncio.Future[None]] = []

    def committed(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def release(self, error: Exception | None) -> None:
        for waiter in self._waiters:
            if waiter.done():
                continue  # it was cancelled
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


class _UpTime:
    """Seconds that the journal was open, over all its owners."""

    def __init__(self, clock: Clock, before_s: float) -> None:
        self._clock = clock
        self._counted_s = before_s
        self._last_s = clock.now()

    def read(self) -> float:
        now_s = self._clock.now()
        self._counted_s += min(max(now_s - self._last_s, 0.0), STEP_MAX_S)
        self._last_s = now_s
        return self._counted_s


# ---- what is let in -------------------------------------------------------------------------------------------------


def _require_name(field: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= ID_LENGTH_MAX or not value.isprintable():
        raise InvalidInput(field, value, f"1 to {ID_LENGTH_MAX} printable characters")


def _require_record(field: str, value: object) -> int:
    """Returns its size."""
    if not isinstance(value, bytes):
        raise InvalidInput(field, type(value).__name__, "bytes")
    if len(value) > RECORD_BYTES_MAX:
        raise InvalidInput(field, f"{len(value)} bytes", f"at most {RECORD_BYTES_MAX} bytes")
    return len(value)


def _require_added(entry: Entry) -> None:
    if entry.refused:
        raise InvariantError(f"action {entry.id} was submitted, and its id was taken; nothing can become of it")


# ---- the files ------------------------------------------------------------------------------------------------------


def _require_directory(directory: Path) -> None:
    """What others may change, they may exchange."""
    us = os.geteuid()
    try:
        found = os.stat(directory)
    except FileNotFoundError:
        found = None
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise InvalidConfig("journal", str(directory), f"a directory that exists: mkdir -m 700 {directory}")
    if found.st_uid != us:
        raise InvalidConfig(
            "journal",
            f"{directory} of user {found.st_uid}",
            f"a directory of user {us}, who runs the service: chown {us} {directory}",
        )
    if found.st_mode & 0o022:
        raise InvalidConfig(
            "journal",
            f"{directory} with mode {stat.S_IMODE(found.st_mode):o}",
            f"a directory that others cannot write to: chmod go-w {directory}",
        )


def _require_private(path: Path) -> None:
    """A file of the journal, if it is there."""
    us = os.geteuid()
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise InvalidConfig("journal", str(path), "a regular file, not a link or a directory; move it away")
    if found.st_uid != us or found.st_mode & 0o077:
        raise InvalidConfig(
            "journal",
            f"{path} of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}",
            f"a file that user {us} alone can read and write: chown {us} {path}; chmod 600 {path}",
        )


def _locked(path: Path) -> int:
    """A descriptor that holds the journal, until it is closed or its process ends in any way."""
    fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise JournalBusy(path, owner if owner.isdecimal() else "(unknown)") from None
    except BaseException:
        os.close(fd)
        raise
    return fd
