"""The journal as a SQLite database: its tables, a transaction per batch, and a check of everything that is read.

Owns the connection and every statement. Never waits for anything but the disk, and knows nothing of asyncio: all of it
runs on the one thread of the journal. Promises that a batch is written whole or not at all, and that nothing is handed
out which is not as it was written: every row carries a checksum, since SQLite checks the shape of its pages only.

The log is copied into the database only as a whole, and is empty afterwards. So a log that was cut anywhere leaves the
state after one of its commits, never a mixture with pages that later commits had already changed.
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

from tangram.server.actions.tenants import space_of
from tangram.server.journal.wal import Log, read_log

SCHEMA_VERSION = 1
APPLICATION_ID = 0x54_4E_47_4A
"""'TNGJ': what kind of file it is."""

ROWS_MAX = 64
"""Of one statement. Each statement lets go of the interpreter, and a busy thread may keep it for 5 ms then: a batch
costs few statements, however many rows it has."""
CACHED_STATEMENTS = 1024
"""All of them, with every number of rows."""

PRUNE_ROWS_MAX = 512
PRUNE_BYTES_MAX = 8 << 20
"""Looked at in one step of a compaction, in rows and in bytes of results: about what a batch may have."""
VACUUM_PAGES = 128
"""Given back to the file system in one step."""
FREE_PAGES_KEPT = 256
"""1 MiB stays in the file for what comes next."""

RECOVERED_RESULT_BYTES_MAX = 64 << 20
"""Of all results that are read at opening; there may be more on disk than fits in memory."""

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
"""`meta` is first: its page is the first that is copied from the log, so that `_commits_in_file` sees a copy begun. An
action has a row in `works` until it settles and one in `results` from then on; `starts` is for those under way."""


class Damage(Exception):
    """What was read is not what was written."""


class Phase(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    """Its start was committed, its end was not."""
    SETTLED = "settled"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal has of an action."""

    id: str
    run: str
    phase: Phase
    attempt: int = 0
    """The latest one, while running."""
    action: bytes = b""
    work: bytes = b""
    """Given at opening, until it settles."""
    result: bytes | None = None
    """Of a settled one. None at opening if all results were too many to be read: ask for it."""
    fetched: bool = False
    """Its caller has it."""
    digest: bytes = b""


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    node: str
    spec: bytes


class Run(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    token_hash: bytes
    record: bytes
    ending: bool = False
    """It was revoked, and what it had may not all be gone."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    value: bytes


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What was found at opening."""

    actions: tuple[Known, ...] = ()
    """In the order of their submission."""
    sandboxes: tuple[Sandbox, ...] = ()
    runs: tuple[Run, ...] = ()
    notes: tuple[Note, ...] = ()
    commits: int = 0
    """Since the journal was made: the last one that is there."""
    report: tuple[str, ...] = ()
    """What was not whole, in sentences."""


class Entry:
    """A live action, as the journal remembers it."""

    __slots__ = ("seq", "id", "run", "digest", "refused")

    def __init__(self, seq: int, id: str, run: str, digest: bytes) -> None:
        self.seq = seq
        self.id = id
        self.run = run
        self.digest = digest
        self.refused = False
        """The id was taken already: this one was not added, and nothing more is written of it."""


Fact = Sandbox | Run | Note
FACT_BY_KIND: dict[str, type[Fact]] = {"sandbox": Sandbox, "run": Run, "note": Note}


class Batch:
    """What goes into one commit. In it, the order matters within one action only: submitted, started, settled,
    fetched."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Entry, bytes, bytes]] = []
        self.started: dict[Entry, int] = {}
        self.settled: list[tuple[Entry, float, bytes]] = []
        self.fetched: list[str] = []
        self.freed_bytes: Counter[str] = Counter()
        """Of the results that were fetched by this, by the space of their ids."""
        self.facts: dict[tuple[str, str], Fact | None] = {}
        """None: there is no such thing any more."""
        self.asked: list[str] = []
        """Ids of which the caller wants to know what is there."""
        self.known: dict[str, Known] = {}
        """The answers, and those of refused entries."""
        self.up_s = 0.0
        self.operations = 0
        self.bytes = 0


def digest_of(run: str, action: bytes, work: bytes) -> bytes:
    """Two submissions are the same if this is."""
    hashed = hashlib.blake2b(msgspec.msgpack.encode((run, len(action))), digest_size=16)
    hashed.update(action)
    hashed.update(work)
    return hashed.digest()


def _seal(*fields: object, content: bytes = b"") -> int:
    return zlib.crc32(content, zlib.crc32(msgspec.msgpack.encode(fields)))


class Store:
    """An open journal. Everything raises sqlite3.Error, OSError or Damage."""

    def __init__(self, path: Path, *, power: bool) -> None:
        self._wal = path.with_name(path.name + "-wal")
        self.recovered = Recovered()
        self.live: list[Entry] = []
        self.up_s = 0.0
        self.commits = 0
        self.next_seq = 1
        self.kept_bytes: Counter[str] = Counter()
        """Of results that nobody had fetched at opening, by the space of their ids."""
        self.wal_bytes = 0
        log = _inspected(path, self._wal)
        # Look first, through a connection that cannot write: SQLite would copy the log into a damaged database as well.
        with contextlib.closing(_looking(path)) as self._db:
            self._require_version()
            self._require_whole()
            self._load_meta(_commits_in_file(path) if log.size_bytes else 0, log)
            self._load(_reported(self._wal, log, self.commits))
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
        self._db = _connected(path)
        try:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if power else 'NORMAL'}")
            # What a statement may have to take back is a page or two; in a file it would stay open, and need a disk.
            self._db.execute("PRAGMA temp_store = MEMORY")
            self.checkpoint()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Copies the log into the database and deletes it; where that fails, it stays for the next opening."""
        self._db.close()

    def checkpoint(self) -> None:
        """Copy the whole log into the database and empty it."""
        busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("another program has the journal open, and the log cannot be copied")
        self.wal_bytes = 0

    # ---- writing ----

    def commit(self, batch: Batch) -> None:
        with self._transaction(batch.up_s):
            refused = self._add(batch.submitted)
            starts = [(e.seq, n, _seal(e.seq, n)) for e, n in batch.started.items() if not e.refused]
            self._many("INSERT OR REPLACE INTO starts", starts)
            self._settle([row for row in batch.settled if not row[0].refused])
            fetched = self._select(
                "UPDATE results SET fetched = seq WHERE fetched IS NULL AND seq IN (SELECT seq FROM actions WHERE id IN"
                " (",
                [(id,) for id in batch.fetched],
                ")) RETURNING (SELECT id FROM actions WHERE actions.seq = results.seq), length(result)",
            )
            batch.freed_bytes = _by_space(fetched)
            self._set_facts(batch.facts)
            batch.known = self._known(batch.asked + refused)

    def _add(self, submitted: list[tuple[Entry, bytes, bytes]]) -> list[str]:
        """Returns the ids that were taken."""
        entries = [entry for entry, _, _ in submitted]
        rows = [(e.seq, e.id, e.run, e.digest, _seal(e.seq, e.id, e.run, e.digest)) for e in entries]
        refused = []
        if self._many("INSERT INTO actions", rows, "ON CONFLICT (id) DO NOTHING") < len(rows):
            found = self._select("SELECT id, seq FROM actions WHERE id IN (", [(e.id,) for e in entries], ")")
            seq_by_id = dict(found)
            for entry in entries:
                entry.refused = seq_by_id[entry.id] != entry.seq
            refused = [entry.id for entry in entries if entry.refused]
        self._many("INSERT INTO works", [(e.seq, action, work) for e, action, work in submitted if not e.refused])
        return refused

    def _settle(self, settled: list[tuple[Entry, float, bytes]]) -> None:
        seqs = [(entry.seq,) for entry, _, _ in settled]
        rows = [(e.seq, at_s, None, _seal(e.seq, at_s, content=result), result) for e, at_s, result in settled]
        self._many("INSERT INTO results", rows)
        self._many("DELETE FROM works WHERE seq IN (", seqs, ")")
        self._many("DELETE FROM starts WHERE seq IN (", seqs, ")")

    def _set_facts(self, facts: dict[tuple[str, str], Fact | None]) -> None:
        put, gone = [], []
        for (kind, key), fact in facts.items():
            if fact is None:
                gone.append((kind, key))
            else:
                record = msgspec.msgpack.encode(fact)
                put.append((None, kind, key, record, _seal(kind, key, content=record)))
        self._many(
            "INSERT INTO facts",
            put,
            "ON CONFLICT (kind, key) DO UPDATE SET record = excluded.record, seal = excluded.seal",
        )
        self._many("DELETE FROM facts WHERE (kind, key) IN (", gone, ")")

    @contextlib.contextmanager
    def _transaction(self, up_s: float) -> Any:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            commits = self.commits + 1
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (1, ?, ?, ?)", (commits, up_s, _seal(commits, up_s)))
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self.commits = commits
        self.up_s = up_s
        self.wal_bytes = os.stat(self._wal).st_size

    def _many(self, head: str, rows: Sequence[tuple[object, ...]], tail: str = "") -> int:
        """One statement for many rows. Returns how many it changed."""
        return sum(self._db.execute(*statement).rowcount for statement in _statements(head, rows, tail))

    def _select(self, head: str, rows: Sequence[tuple[object, ...]], tail: str) -> list[Any]:
        return [row for statement in _statements(head, rows, tail) for row in self._db.execute(*statement)]

    # ---- reading ----

    def result(self, id: str) -> bytes | None:
        known = self._known([id]).get(id)
        return None if known is None else known.result

    def result_bytes(self, id: str) -> int | None:
        found = self._db.execute(
            "SELECT length(result) FROM results JOIN actions USING (seq) WHERE id = ?", (id,)
        ).fetchone()
        return None if found is None else int(found[0])

    def _known(self, ids: list[str]) -> dict[str, Known]:
        rows = self._select(f"{_ACTIONS} WHERE a.id IN (", [(id,) for id in ids], ")") if ids else []
        return {known.id: known for known in (_checked(row) for row in rows)}

    # ---- compaction ----

    def prune(
        self, after: int, settled_before_s: float, runs: Sequence[str], up_s: float
    ) -> tuple[int, int, Counter[str]] | None:
        """One step: delete from the next results those that were fetched, are old, or belong to these runs. Returns
        up to where it looked, how many it deleted, and the bytes of those that nobody had fetched, by the space of
        their ids; None if there was nothing left to look at."""
        last, *_ = self._db.execute(
            "SELECT max(seq) FROM (SELECT seq, sum(size) OVER (ORDER BY seq) - size AS before FROM"
            " (SELECT seq, length(result) AS size FROM results WHERE seq > ? ORDER BY seq LIMIT ?)) WHERE before < ?",
            (after, PRUNE_ROWS_MAX, PRUNE_BYTES_MAX),
        ).fetchone()
        if last is None:
            return None
        is_meant = (
            "FROM results JOIN actions USING (seq) WHERE seq > ? AND seq <= ? AND"
            f" (fetched IS NOT NULL OR settled_s <= ? OR run IN ({','.join('?' * len(runs))}))"
        )
        which = (after, last, settled_before_s, *runs)
        with self._transaction(up_s):
            unfetched = self._db.execute(f"SELECT id, length(result) {is_meant} AND fetched IS NULL", which).fetchall()
            deleted = self._db.execute(f"DELETE FROM actions WHERE seq IN (SELECT seq {is_meant})", which).rowcount
            self._db.execute(
                "DELETE FROM results WHERE seq > ? AND seq <= ? AND seq NOT IN (SELECT seq FROM actions)", (after, last)
            )
        return last, deleted, _by_space(unfetched)

    def vacuum(self) -> bool:
        """One step: give free pages back. Returns whether there are more."""
        free, *_ = self._db.execute("PRAGMA freelist_count").fetchone()
        if free > FREE_PAGES_KEPT:
            pages = min(VACUUM_PAGES, free - FREE_PAGES_KEPT)
            self._db.executescript(f"PRAGMA incremental_vacuum({pages})")
            self.wal_bytes = os.stat(self._wal).st_size
        return bool(free - VACUUM_PAGES > FREE_PAGES_KEPT)

    # ---- opening ----

    def _require_version(self) -> None:
        application, version = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if application != APPLICATION_ID:
            raise Damage("it is not a journal of Tangram")
        if version != SCHEMA_VERSION:
            raise Damage(f"it is of version {version}, and this Tangram reads version {SCHEMA_VERSION}")

    def _require_whole(self) -> None:
        found = [line for (line,) in self._db.execute("PRAGMA integrity_check(3)")]
        if found != ["ok"]:
            raise Damage("; ".join(" ".join(str(line).split()) for line in found))

    def _load_meta(self, commits_in_file: int, log: Log) -> None:
        self.commits, self.up_s = _meta(self._db)
        if self.commits < commits_in_file:
            raise Damage(
                f"the database has parts of commit {commits_in_file}, but of its log, which was being copied into it,"
                f" only {log.whole_bytes} bytes up to commit {self.commits} are whole"
            )

    def _load(self, report: tuple[str, ...]) -> None:
        actions, room_bytes = [], RECOVERED_RESULT_BYTES_MAX
        running = 0
        for row in self._db.execute(f"{_ACTIONS} ORDER BY a.seq"):
            known = _checked(row)
            seq = row[0]
            if known.phase is not Phase.SETTLED:
                self.live.append(Entry(seq, known.id, known.run, known.digest))
                running += known.phase is Phase.RUNNING
            elif known.result is not None:
                if not known.fetched:
                    self.kept_bytes[space_of(known.id)] += len(known.result)
                room_bytes -= len(known.result)
                if room_bytes < 0:
                    known = msgspec.structs.replace(known, result=None)
            actions.append(known)
            self.next_seq = seq + 1
        self._require_counts(len(actions), len(self.live), running)
        facts = self._load_facts()
        self.recovered = Recovered(
            actions=tuple(actions),
            sandboxes=tuple(fact for fact in facts if isinstance(fact, Sandbox)),
            runs=tuple(fact for fact in facts if isinstance(fact, Run)),
            notes=tuple(fact for fact in facts if isinstance(fact, Note)),
            commits=self.commits,
            report=report,
        )

    def _require_counts(self, actions: int, live: int, running: int) -> None:
        """Rows that belong to no action were those of an action that is missing."""
        expected = {"works": live, "starts": running, "results": actions - live}
        for table, count in expected.items():
            found, *_ = self._db.execute(f"SELECT count(*) FROM {table}").fetchone()
            if found != count:
                raise Damage(f"the table {table} has {found} rows, and {count} belong to actions that are there")

    def _load_facts(self) -> list[Fact]:
        facts = []
        for kind, key, record, seal in self._db.execute("SELECT kind, key, record, seal FROM facts ORDER BY number"):
            if not isinstance(record, bytes) or kind not in FACT_BY_KIND or _seal(kind, key, content=record) != seal:
                raise Damage(f"the record of {kind} {key!r} is not as it was written")
            facts.append(msgspec.msgpack.decode(record, type=FACT_BY_KIND[kind]))
        return facts


_ACTIONS = (
    "SELECT a.seq, a.id, a.run, a.digest, a.seal, w.action, w.work, s.attempt, s.seal, r.settled_s, r.fetched, r.seal,"
    " r.result FROM actions a LEFT JOIN works w USING (seq) LEFT JOIN starts s USING (seq) LEFT JOIN results r USING"
    " (seq)"
)


def _checked(row: tuple[Any, ...]) -> Known:
    """One row of `_ACTIONS`."""
    seq, id, run, digest, seal, action, work, attempt, start_seal, settled_s, fetched, result_seal, result = row
    if _seal(seq, id, run, digest) != seal:
        raise Damage(f"action {id!r} is not as it was written")
    if isinstance(result, bytes) and work is None and start_seal is None and fetched in (None, seq):
        if _seal(seq, settled_s, content=result) != result_seal:
            raise Damage(f"the result of action {id} is not as it was written")
        return Known(id=id, run=run, phase=Phase.SETTLED, result=result, fetched=fetched is not None, digest=digest)
    if not isinstance(action, bytes) or not isinstance(work, bytes) or result_seal is not None:
        raise Damage(f"action {id} must have either work or a result")
    if digest_of(run, action, work) != digest:
        raise Damage(f"the work of action {id} is not as it was written")
    if start_seal is None and attempt is None:
        return Known(id=id, run=run, phase=Phase.QUEUED, action=action, work=work, digest=digest)
    if _seal(seq, attempt) != start_seal:
        raise Damage(f"the start of action {id} is not as it was written")
    return Known(id=id, run=run, phase=Phase.RUNNING, attempt=attempt, action=action, work=work, digest=digest)


def _by_space(rows: Iterable[tuple[str, int]]) -> Counter[str]:
    """The sum of sizes, given by id."""
    found: Counter[str] = Counter()
    for id, size in rows:
        found[space_of(id)] += size
    return found


def _statements(head: str, rows: Sequence[tuple[object, ...]], tail: str) -> Iterable[tuple[str, list[object]]]:
    for first in range(0, len(rows), ROWS_MAX):
        chunk = rows[first : first + ROWS_MAX]
        row = f"({','.join('?' * len(chunk[0]))})"
        yield f"{head} VALUES {','.join([row] * len(chunk))} {tail}", [value for values in chunk for value in values]


# ---- the files ------------------------------------------------------------------------------------------------------


def create(path: Path) -> None:
    """A new, empty journal. It appears whole or not at all, so that an empty file is never a new journal."""
    part = path.with_name(path.name + ".new")
    for left in (part, *(part.with_name(part.name + end) for end in ("-wal", "-journal"))):
        left.unlink(missing_ok=True)
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(_connected(part)) as db:
        db.executescript(SCHEMA)
        db.execute("INSERT INTO meta VALUES (1, 0, 0.0, ?)", (_seal(0, 0.0),))
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.rename(part, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _inspected(path: Path, wal: Path) -> Log:
    """Makes the journal if there is none. SQLite would delete the log of a database that is empty."""
    log = read_log(wal)
    there = path.exists()
    if log.size_bytes and not there:
        raise Damage(f"the database is gone, and its log {wal} is still there")
    if there and path.stat().st_size == 0:
        raise Damage("the database is empty, without even a header")
    if not there:
        create(path)
    return log


def _looking(path: Path, way: str = "mode=ro") -> sqlite3.Connection:
    """A connection that changes neither the database nor its log."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?{way}", uri=True, isolation_level=None)


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=1.0, cached_statements=CACHED_STATEMENTS)
    try:
        for pragma in (
            "locking_mode = EXCLUSIVE",  # first: with one owner, the index of the log needs no shared memory
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "wal_autocheckpoint = 0",  # `checkpoint` is called between batches, where nobody waits for a commit
            "cache_spill = OFF",  # only whole commits are written to the log
            "secure_delete = OFF",  # to overwrite what is deleted would cost as much as to write it
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        db.close()
        raise
    return db


def _commits_in_file(path: Path) -> int:
    """What the database says without its log. 0: it says nothing, as in the middle of being copied to."""
    with contextlib.suppress(sqlite3.Error, Damage), contextlib.closing(_looking(path, "immutable=1")) as db:
        return _meta(db)[0]
    return 0


def _meta(db: sqlite3.Connection) -> tuple[int, float]:
    rows = db.execute("SELECT commits, up_s, seal FROM meta").fetchall()
    if len(rows) != 1 or _seal(*rows[0][:2]) != rows[0][2]:
        raise Damage("the number of its last commit is not as it was written")
    commits, up_s, _ = rows[0]
    return commits, up_s


def _reported(wal: Path, log: Log, commits: int) -> tuple[str, ...]:
    if not log.rest_bytes:
        return ()
    return (
        f"the last {log.rest_bytes} bytes of {wal} were not a whole commit and are left out;"
        f" recovered up to commit {commits}",
    )
