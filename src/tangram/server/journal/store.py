"""The journal in SQLite: tables, one transaction per batch, and verification of everything that is read.

Owns the connection and all statements. Synchronous: runs on the thread of the journal. Promises that a batch is written
completely or not at all, and that damaged content is never returned: every row carries a checksum, since SQLite checks
only the structure of its pages.

The write-ahead log is copied into the database only as a whole and is empty afterwards. So a truncated log leaves the
state after one of its commits, never a mixture with pages of later commits.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tangram.files.atomic_file import replace_file
from tangram.server.tenants import tenant_of

SCHEMA_VERSION = 1
APPLICATION_ID = 0x54_4E_47_4A
"""'TNGJ': identifies the file type."""

WAL_HEADER_BYTES = 32
WAL_FRAME_HEADER_BYTES = 24
"""SQLite's log is a header, then frames of a header and a page each."""

ROWS_MAX = 64
"""Rows per statement. Each statement releases the GIL, and a busy thread may hold it for 5 ms then, so a batch uses few
statements."""
CACHED_STATEMENTS = 1024
"""All statements, with every number of rows."""

PRUNE_ROWS_MAX = 512
PRUNE_BYTES_MAX = 8 << 20
"""Rows and bytes examined in one step of a compaction: about the size of a batch."""
VACUUM_PAGES = 128
"""Pages returned to the file system in one step."""
FREE_PAGES_KEPT = 256
"""1 MiB stays in the file for later writes."""

RECOVERED_RESULT_BYTES_MAX = 64 << 20
"""Size of results read at opening; there may be more on disk than fits in memory."""

SCHEMA = f"""
BEGIN;
CREATE TABLE meta (one INTEGER PRIMARY KEY, commits INTEGER, up_s REAL, seal INTEGER);
CREATE TABLE actions (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, run TEXT, digest BLOB, seal INTEGER);
CREATE TABLE works (seq INTEGER PRIMARY KEY, action BLOB, work BLOB);
CREATE TABLE starts (seq INTEGER PRIMARY KEY, attempt INTEGER, seal INTEGER);
CREATE TABLE results (seq INTEGER PRIMARY KEY, settled_s REAL, fetched INTEGER, seal INTEGER, result BLOB);
CREATE TABLE facts (number INTEGER PRIMARY KEY, kind TEXT, key TEXT, record BLOB, seal INTEGER, UNIQUE (kind, key));
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
"""`meta` is first: its page is the first that a checkpoint copies, so `_commits_in_file` detects a partial copy. An
action has a row in `works` until it settles, then one in `results`; `starts` has running actions."""


class JournalCorruption(Exception):
    """The content differs from the written content."""


class JournalPhase(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    """The action was started and has not settled."""
    SETTLED = "settled"


class JournaledAction(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run: str
    phase: JournalPhase
    attempt: int = 0
    """The latest attempt of a running action."""
    action: bytes = b""
    work: bytes = b""
    """Set at opening, for actions that have not settled."""
    result: bytes | None = None
    """Set for settled actions; None at opening if all results together were too large."""
    fetched: bool = False
    """Its caller has acknowledged the result."""
    digest: bytes = b""


class JournaledSandbox(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    node: str
    spec: bytes


class JournaledRun(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    token_hash: bytes
    record: bytes
    ending: bool = False
    """It was revoked and may have remaining objects."""


class JournaledNote(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    value: bytes


class RecoveredState(msgspec.Struct, frozen=True, kw_only=True):
    """The content at opening."""

    actions: tuple[JournaledAction, ...] = ()
    """In order of submission."""
    sandboxes: tuple[JournaledSandbox, ...] = ()
    runs: tuple[JournaledRun, ...] = ()
    notes: tuple[JournaledNote, ...] = ()
    report: tuple[str, ...] = ()
    """Damage that was found, in sentences."""


class SubmittedRow(msgspec.Struct, frozen=True, gc=False):
    """A new action, until its commit."""

    seq: int
    id: str
    run: str
    digest: bytes
    action: bytes
    work: bytes


JournaledFact = JournaledSandbox | JournaledRun | JournaledNote
FACT_BY_KIND: dict[str, type[JournaledFact]] = {"sandbox": JournaledSandbox, "run": JournaledRun, "note": JournaledNote}


class CommitBatch:
    """Operations of one commit. Order matters only within one action: submitted, started, settled, fetched."""

    def __init__(self) -> None:
        self.submitted: list[SubmittedRow] = []
        self.started: dict[int, int] = {}
        """Attempt by seq."""
        self.settled: list[tuple[int, float, bytes]] = []
        """Seq, uptime, and result."""
        self.duplicates: set[int] = set()
        """Seqs of submissions whose id was taken, in this batch or shortly before: nothing is written of them."""
        self.fetched: list[str] = []
        self.freed_bytes: Counter[str] = Counter()
        """By tenant: size of the results that this batch acknowledges."""
        self.facts: dict[tuple[str, str], JournaledFact | None] = {}
        """None deletes the fact."""
        self.queried_ids: list[str] = []
        """Ids whose stored action is requested."""
        self.actions_by_id: dict[str, JournaledAction] = {}
        """Requested actions and those whose id was submitted again."""
        self.uptime_s = 0.0
        self.operations = 0
        self.bytes = 0


def digest_of(run: str, action: bytes, work: bytes) -> bytes:
    """Equal digests mean equal submissions."""
    hashed = hashlib.blake2b(msgspec.msgpack.encode((run, len(action))), digest_size=16)
    hashed.update(action)
    hashed.update(work)
    return hashed.digest()


def _checksum(*fields: object, content: bytes = b"") -> int:
    return zlib.crc32(content, zlib.crc32(msgspec.msgpack.encode(fields)))


class JournalStore:
    """An open journal. Methods raise sqlite3.Error, OSError or JournalCorruption."""

    def __init__(self, path: Path, *, survives_power_loss: bool) -> None:
        self._wal = path.with_name(path.name + "-wal")
        self.recovered = RecoveredState()
        self.seq_by_id: dict[str, int] = {}
        """Actions that had not settled at opening."""
        self.uptime_s = 0.0
        self.commits = 0
        self.next_seq = 1
        self.unfetched_bytes: Counter[str] = Counter()
        """By tenant: size of unacknowledged results at opening."""
        self.wal_bytes = 0
        wal_bytes = _inspect_files(path, self._wal)
        # Verify through a read-only connection: SQLite would copy the log into a damaged database as well.
        with contextlib.closing(_connect_read_only(path)) as self._db:
            self._check_version()
            self._check_integrity()
            self._load_meta(_commits_in_file(path) if wal_bytes else 0)
            self._load()
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
        self._db = _connect(path)
        try:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if survives_power_loss else 'NORMAL'}")
            # Statement journals are a page or two; as files they would stay open and need disk space.
            self._db.execute("PRAGMA temp_store = MEMORY")
            self._report_truncation(wal_bytes)
            self.checkpoint()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Copies the log into the database and deletes it; on failure it stays for the next opening."""
        self._db.close()

    def take_recovered(self) -> RecoveredState:
        """Returns the content at opening, and keeps none of it."""
        recovered, self.recovered = self.recovered, RecoveredState()
        return recovered

    def checkpoint(self) -> None:
        """Copies the whole log into the database and empties it."""
        busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("another program has the journal open, and the log cannot be copied")
        self.wal_bytes = 0

    # ---- writing ----

    def commit(self, batch: CommitBatch) -> None:
        with self._transaction(batch.uptime_s):
            duplicates = self._insert_actions(batch.submitted)
            batch.duplicates.update([row.seq for row in duplicates])
            starts = [(seq, n, _checksum(seq, n)) for seq, n in batch.started.items() if seq not in batch.duplicates]
            self._execute_many("INSERT OR REPLACE INTO starts", starts)
            self._settle([row for row in batch.settled if row[0] not in batch.duplicates])
            fetched = self._select(
                "UPDATE results SET fetched = seq WHERE fetched IS NULL AND seq IN (SELECT seq FROM actions WHERE id IN"
                " (",
                [(id,) for id in batch.fetched],
                ")) RETURNING (SELECT id FROM actions WHERE actions.seq = results.seq), length(result)",
            )
            batch.freed_bytes = _bytes_by_tenant(fetched)
            self._set_facts(batch.facts)
            batch.actions_by_id = self._load_actions(batch.queried_ids + [row.id for row in duplicates])

    def _insert_actions(self, submitted: list[SubmittedRow]) -> list[SubmittedRow]:
        """Returns those whose id was taken."""
        rows = [(e.seq, e.id, e.run, e.digest, _checksum(e.seq, e.id, e.run, e.digest)) for e in submitted]
        inserted, duplicates = submitted, []
        if self._execute_many("INSERT INTO actions", rows, "ON CONFLICT (id) DO NOTHING") < len(rows):
            existing = self._select("SELECT id, seq FROM actions WHERE id IN (", [(e.id,) for e in submitted], ")")
            seq_by_id = dict(existing)
            inserted = [e for e in submitted if seq_by_id[e.id] == e.seq]
            duplicates = [e for e in submitted if seq_by_id[e.id] != e.seq]
        self._execute_many("INSERT INTO works", [(e.seq, e.action, e.work) for e in inserted])
        return duplicates

    def _settle(self, settled: list[tuple[int, float, bytes]]) -> None:
        seqs = [(seq,) for seq, _, _ in settled]
        rows = [(seq, at_s, None, _checksum(seq, at_s, content=result), result) for seq, at_s, result in settled]
        self._execute_many("INSERT INTO results", rows)
        self._execute_many("DELETE FROM works WHERE seq IN (", seqs, ")")
        self._execute_many("DELETE FROM starts WHERE seq IN (", seqs, ")")

    def _set_facts(self, facts: dict[tuple[str, str], JournaledFact | None]) -> None:
        put, deleted = [], []
        for (kind, key), fact in facts.items():
            if fact is None:
                deleted.append((kind, key))
            else:
                record = msgspec.msgpack.encode(fact)
                put.append((None, kind, key, record, _checksum(kind, key, content=record)))
        self._execute_many(
            "INSERT INTO facts",
            put,
            "ON CONFLICT (kind, key) DO UPDATE SET record = excluded.record, seal = excluded.seal",
        )
        self._execute_many("DELETE FROM facts WHERE (kind, key) IN (", deleted, ")")

    @contextlib.contextmanager
    def _transaction(self, up_s: float) -> Any:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            commits = self.commits + 1
            self._db.execute(
                "INSERT OR REPLACE INTO meta VALUES (1, ?, ?, ?)", (commits, up_s, _checksum(commits, up_s))
            )
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self.commits = commits
        self.uptime_s = up_s
        self.wal_bytes = os.stat(self._wal).st_size

    def _execute_many(self, head: str, rows: Sequence[tuple[object, ...]], tail: str = "") -> int:
        """Runs one statement for many rows. Returns how many rows it changed."""
        return sum(self._db.execute(*statement).rowcount for statement in _statements(head, rows, tail))

    def _select(self, head: str, rows: Sequence[tuple[object, ...]], tail: str) -> list[Any]:
        return [row for statement in _statements(head, rows, tail) for row in self._db.execute(*statement)]

    # ---- reading ----

    def result(self, id: str) -> bytes | None:
        known = self._load_actions([id]).get(id)
        return None if known is None else known.result

    def result_bytes(self, id: str) -> int | None:
        row = self._db.execute(
            "SELECT length(result) FROM results JOIN actions USING (seq) WHERE id = ?", (id,)
        ).fetchone()
        return None if row is None else int(row[0])

    def _load_actions(self, ids: list[str]) -> dict[str, JournaledAction]:
        rows = self._select(f"{_SELECT_ACTIONS} WHERE a.id IN (", [(id,) for id in ids], ")") if ids else []
        return {known.id: known for known in (_verified_action(row) for row in rows)}

    # ---- compaction ----

    def prune(
        self, after: int, settled_before_s: float, runs: Sequence[str], up_s: float
    ) -> tuple[int, int, Counter[str]] | None:
        """One step of a compaction: deletes acknowledged, expired and listed runs' results after this seq. Returns the
        last seq examined, the number of deletions, and the unacknowledged bytes deleted by tenant; None at the end."""
        last, *_ = self._db.execute(
            "SELECT max(seq) FROM (SELECT seq, sum(size) OVER (ORDER BY seq) - size AS before FROM"
            " (SELECT seq, length(result) AS size FROM results WHERE seq > ? ORDER BY seq LIMIT ?)) WHERE before < ?",
            (after, PRUNE_ROWS_MAX, PRUNE_BYTES_MAX),
        ).fetchone()
        if last is None:
            return None
        condition = (
            "FROM results JOIN actions USING (seq) WHERE seq > ? AND seq <= ? AND"
            f" (fetched IS NOT NULL OR settled_s <= ? OR run IN ({','.join('?' * len(runs))}))"
        )
        parameters = (after, last, settled_before_s, *runs)
        with self._transaction(up_s):
            unfetched = self._db.execute(
                f"SELECT id, length(result) {condition} AND fetched IS NULL", parameters
            ).fetchall()
            deleted = self._db.execute(
                f"DELETE FROM actions WHERE seq IN (SELECT seq {condition})", parameters
            ).rowcount
            self._db.execute(
                "DELETE FROM results WHERE seq > ? AND seq <= ? AND seq NOT IN (SELECT seq FROM actions)", (after, last)
            )
        return last, deleted, _bytes_by_tenant(unfetched)

    def vacuum(self) -> bool:
        """One step: returns free pages to the file system. Returns whether there are more."""
        free, *_ = self._db.execute("PRAGMA freelist_count").fetchone()
        if free > FREE_PAGES_KEPT:
            pages = min(VACUUM_PAGES, free - FREE_PAGES_KEPT)
            self._db.executescript(f"PRAGMA incremental_vacuum({pages})")
            self.wal_bytes = os.stat(self._wal).st_size
        return bool(free - VACUUM_PAGES > FREE_PAGES_KEPT)

    # ---- opening ----

    def _check_version(self) -> None:
        application, version = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if application != APPLICATION_ID:
            raise JournalCorruption("it is not a journal of Tangram")
        if version != SCHEMA_VERSION:
            raise JournalCorruption(f"it has version {version}; this Tangram reads version {SCHEMA_VERSION}")

    def _check_integrity(self) -> None:
        problems = [line for (line,) in self._db.execute("PRAGMA integrity_check(3)")]
        if problems != ["ok"]:
            raise JournalCorruption("; ".join(" ".join(str(line).split()) for line in problems))

    def _load_meta(self, commits_in_file: int) -> None:
        self.commits, self.uptime_s = _read_meta(self._db)
        if self.commits < commits_in_file:
            raise JournalCorruption(
                f"the database has parts of commit {commits_in_file}, but its log, which was being copied into it, is"
                f" complete only up to commit {self.commits}"
            )

    def _report_truncation(self, wal_bytes: int) -> None:
        """Adds to the report what follows the last complete commit of the log, which SQLite drops silently."""
        _, frames, _ = self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        page_bytes, *_ = self._db.execute("PRAGMA page_size").fetchone()
        committed_bytes = WAL_HEADER_BYTES + max(0, frames) * (WAL_FRAME_HEADER_BYTES + page_bytes)
        trailing_bytes = wal_bytes - (committed_bytes if frames > 0 else 0)
        if trailing_bytes:
            line = (
                f"the last {trailing_bytes} bytes of {self._wal} were not a complete commit and are dropped;"
                f" recovered up to commit {self.commits}"
            )
            self.recovered = msgspec.structs.replace(self.recovered, report=(line,))

    def _load(self) -> None:
        actions, room_bytes = [], RECOVERED_RESULT_BYTES_MAX
        running = 0
        for row in self._db.execute(f"{_SELECT_ACTIONS} ORDER BY a.seq"):
            known = _verified_action(row)
            seq = row[0]
            if known.phase is not JournalPhase.SETTLED:
                self.seq_by_id[known.id] = seq
                running += known.phase is JournalPhase.RUNNING
            elif known.result is not None:
                if not known.fetched:
                    self.unfetched_bytes[tenant_of(known.id)] += len(known.result)
                room_bytes -= len(known.result)
                if room_bytes < 0:
                    known = msgspec.structs.replace(known, result=None)
            actions.append(known)
            self.next_seq = seq + 1
        self._check_row_counts(len(actions), len(self.seq_by_id), running)
        facts = self._load_facts()
        self.recovered = RecoveredState(
            actions=tuple(actions),
            sandboxes=tuple(fact for fact in facts if isinstance(fact, JournaledSandbox)),
            runs=tuple(fact for fact in facts if isinstance(fact, JournaledRun)),
            notes=tuple(fact for fact in facts if isinstance(fact, JournaledNote)),
        )

    def _check_row_counts(self, actions: int, live: int, running: int) -> None:
        """Excess rows mean that their action is missing."""
        expected = {"works": live, "starts": running, "results": actions - live}
        for table, count in expected.items():
            rows, *_ = self._db.execute(f"SELECT count(*) FROM {table}").fetchone()
            if rows != count:
                raise JournalCorruption(f"the table {table} has {rows} rows, but {count} of its actions exist")

    def _load_facts(self) -> list[JournaledFact]:
        facts = []
        for kind, key, record, checksum in self._db.execute(
            "SELECT kind, key, record, seal FROM facts ORDER BY number"
        ):
            if (
                not isinstance(record, bytes)
                or kind not in FACT_BY_KIND
                or _checksum(kind, key, content=record) != checksum
            ):
                raise JournalCorruption(f"the record of {kind} {key!r} was altered")
            facts.append(msgspec.msgpack.decode(record, type=FACT_BY_KIND[kind]))
        return facts


_SELECT_ACTIONS = (
    "SELECT a.seq, a.id, a.run, a.digest, a.seal, w.action, w.work, s.attempt, s.seal, r.settled_s, r.fetched, r.seal,"
    " r.result FROM actions a LEFT JOIN works w USING (seq) LEFT JOIN starts s USING (seq) LEFT JOIN results r USING"
    " (seq)"
)


def _verified_action(row: tuple[Any, ...]) -> JournaledAction:
    (
        seq,
        id,
        run,
        digest,
        checksum,
        action,
        work,
        attempt,
        start_checksum,
        settled_s,
        fetched,
        result_checksum,
        result,
    ) = row
    if _checksum(seq, id, run, digest) != checksum:
        raise JournalCorruption(f"action {id!r} was altered")
    if isinstance(result, bytes) and work is None and start_checksum is None and fetched in (None, seq):
        if _checksum(seq, settled_s, content=result) != result_checksum:
            raise JournalCorruption(f"the result of action {id} was altered")
        return JournaledAction(
            id=id, run=run, phase=JournalPhase.SETTLED, result=result, fetched=fetched is not None, digest=digest
        )
    if not isinstance(action, bytes) or not isinstance(work, bytes) or result_checksum is not None:
        raise JournalCorruption(f"action {id} must have either work or a result")
    if digest_of(run, action, work) != digest:
        raise JournalCorruption(f"the work of action {id} was altered")
    if start_checksum is None and attempt is None:
        return JournaledAction(id=id, run=run, phase=JournalPhase.QUEUED, action=action, work=work, digest=digest)
    if _checksum(seq, attempt) != start_checksum:
        raise JournalCorruption(f"the start of action {id} was altered")
    return JournaledAction(
        id=id, run=run, phase=JournalPhase.RUNNING, attempt=attempt, action=action, work=work, digest=digest
    )


def _bytes_by_tenant(rows: Iterable[tuple[str, int]]) -> Counter[str]:
    """Sums sizes, given by id, per tenant."""
    bytes_by_tenant: Counter[str] = Counter()
    for id, size in rows:
        bytes_by_tenant[tenant_of(id)] += size
    return bytes_by_tenant


def _statements(head: str, rows: Sequence[tuple[object, ...]], tail: str) -> Iterable[tuple[str, list[object]]]:
    for first in range(0, len(rows), ROWS_MAX):
        chunk = rows[first : first + ROWS_MAX]
        row = f"({','.join('?' * len(chunk[0]))})"
        yield f"{head} VALUES {','.join([row] * len(chunk))} {tail}", [value for values in chunk for value in values]


# ---- the files ------------------------------------------------------------------------------------------------------


def create(path: Path) -> None:
    """Creates an empty journal. It appears under its name complete, so an empty file is never a new journal."""
    part = path.with_name(path.name + ".new")
    for leftover in (part, *(part.with_name(part.name + end) for end in ("-wal", "-journal"))):
        leftover.unlink(missing_ok=True)
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(_connect(part, is_new=True)) as db:
        db.executescript(SCHEMA)
        db.execute("INSERT INTO meta VALUES (1, 0, 0.0, ?)", (_checksum(0, 0.0),))
    replace_file(part, path, durable=True)


def _inspect_files(path: Path, wal: Path) -> int:
    """Creates the journal if there is none. Returns the size of its log. SQLite would delete the log of an empty
    database."""
    wal_bytes = wal.stat().st_size if wal.exists() else 0
    exists = path.exists()
    if wal_bytes and not exists:
        raise JournalCorruption(f"the database is gone, but its log {wal} exists")
    if exists and path.stat().st_size == 0:
        raise JournalCorruption("the database is empty, without even a header")
    if not exists:
        create(path)
    return wal_bytes


def _connect_read_only(path: Path, parameters: str = "mode=ro") -> sqlite3.Connection:
    """A connection that changes neither the database nor its log."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?{parameters}", uri=True, isolation_level=None)


def _connect(path: Path, *, is_new: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=1.0, cached_statements=CACHED_STATEMENTS)
    try:
        for pragma in (
            "locking_mode = EXCLUSIVE",  # first: with one owner the log index needs no shared memory
            *(("auto_vacuum = INCREMENTAL",) if is_new else ()),  # persistent; setting it again writes to the log
            "journal_mode = WAL",
            "wal_autocheckpoint = 0",  # `checkpoint` runs between batches, when no commit waits
            "cache_spill = OFF",  # only complete commits are written to the log
            "secure_delete = OFF",  # overwriting deleted rows would cost as much as writing them
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        db.close()
        raise
    return db


def _commits_in_file(path: Path) -> int:
    """Number of commits in the database without its log; 0 if unreadable, as during a copy."""
    with (
        contextlib.suppress(sqlite3.Error, JournalCorruption),
        contextlib.closing(_connect_read_only(path, "immutable=1")) as db,
    ):
        return _read_meta(db)[0]
    return 0


def _read_meta(db: sqlite3.Connection) -> tuple[int, float]:
    rows = db.execute("SELECT commits, up_s, seal FROM meta").fetchall()
    if len(rows) != 1 or _checksum(*rows[0][:2]) != rows[0][2]:
        raise JournalCorruption("the number of its last commit was altered")
    commits, up_s, _ = rows[0]
    return commits, up_s
