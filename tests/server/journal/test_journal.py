"""The journal on real files: what was acknowledged is there, whatever ends its owner or is done to its files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tangram.clock import SimClock
from tangram.errors import InvalidConfig, InvalidInput, InvariantError
from tangram.server.journal import journal as journal_module
from tangram.server.journal import store as journal_store
from tangram.server.journal.journal import (
    CLOCK_STEP_S_MAX,
    Journal,
    JournalBusy,
    JournalConflict,
    JournalDamaged,
    JournaledAction,
    JournalFailed,
    RecoveredState,
)
from tangram.server.journal.store import JournalPhase

DEADLINE_S = 60.0
ROOT = os.geteuid() == 0


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await main

    return asyncio.run(bounded())


def found(path: Path, **options: Any) -> RecoveredState:
    """The recovered content if an owner opens it now."""

    async def main() -> RecoveredState:
        async with Journal(path, **options) as journal:
            return journal.recovered

    return run(main())


def phases(recovered: RecoveredState) -> dict[str, str]:
    """In order."""
    return {known.id: known.phase.value for known in recovered.actions}


def facts(recovered: RecoveredState) -> tuple[Any, ...]:
    """All of it but what may differ: how far it is and what was not whole."""
    return recovered.actions, recovered.sandboxes, recovered.runs, recovered.notes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "journal.db"


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """Where to wait for the disk takes no time, for tests that open a journal thousands of times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield Path(directory) / "journal.db"


def wal_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def size_of(path: Path) -> int:
    return path.stat().st_size


@contextlib.asynccontextmanager
async def crashing(path: Path, aside: Path, **options: Any) -> AsyncIterator[Journal]:
    """A journal whose files, as they are at the end of the block, are copied: what a crash would leave."""
    async with Journal(path, **options) as journal:
        yield journal
        await copy_files(journal, aside)


async def copy_files(journal: Journal, aside: Path) -> None:
    """Copies that belong together: nothing was written meanwhile."""
    files = journal.path, wal_of(journal.path)

    def written() -> list[tuple[int, int]]:
        return [(found.st_size, found.st_mtime_ns) for found in map(os.stat, files)]

    before: list[tuple[int, int]] = []
    while before != written():
        before = written()
        for file, copied in zip(files, (aside, wal_of(aside)), strict=True):
            shutil.copyfile(file, copied)
            copied.chmod(0o600)


async def whole_life(journal: Journal, id: str, result: bytes = b"result") -> None:
    assert await journal.record_submission(id, "run", b"action", b"work") is None
    await journal.record_start(id, 1)
    await journal.record_settled(id, result)


# ---- what is remembered ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "power"])
def test_the_next_owner_finds_everything_in_order(path: Path, durability: str) -> None:
    async def main() -> None:
        async with Journal(path, durability) as journal:
            assert facts(journal.recovered) == ((), (), (), ())
            for id in ("settled", "z-queued", "running", "a-queued"):
                assert await journal.record_submission(id, "run", id.encode(), b"work") is None
            await journal.record_start("settled", 1)
            await journal.record_settled("settled", b"result")
            await journal.record_start("running", 1)
            await journal.record_start("running", 2)
            await journal.record_sandbox_opened("box", "run", "node", b"spec")
            await journal.record_sandbox_opened("gone", "run", "node", b"spec")
            await journal.record_sandbox_closed("gone")
            await journal.record_run("run", b"hash", b"old")
            await journal.record_run("other", b"hash", b"")
            await journal.record_run("run", b"hash", b"new")
            await journal.remove_run("other")
            await journal.put_note("setting", b"\x00value")

    run(main())
    recovered = found(path)
    assert phases(recovered) == {
        "settled": "settled",
        "z-queued": "queued",
        "running": "running",
        "a-queued": "queued",
    }
    settled, queued, running, _ = recovered.actions
    assert (settled.result, settled.action, settled.work) == (b"result", b"", b"")
    assert (queued.run, queued.action, queued.work, queued.result) == ("run", b"z-queued", b"work", None)
    assert running.attempt == 2
    assert [(box.name, box.run, box.node, box.spec) for box in recovered.sandboxes] == [("box", "run", "node", b"spec")]
    assert [(one.name, one.token_hash, one.record) for one in recovered.runs] == [("run", b"hash", b"new")]
    assert [(note.key, note.value) for note in recovered.notes] == [("setting", b"\x00value")]
    assert recovered.report == ()


def test_recovered_actions_continue_under_the_next_owner(path: Path) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            for id in ("first", "second"):
                await journal.record_submission(id, "run", b"action", b"work")
            await journal.record_start("first", 1)
        async with Journal(path) as journal:
            await journal.record_settled("first", b"lost")
            await journal.record_start("second", 1)
            await journal.record_submission("third", "run", b"action", b"work")
            assert await journal.result("first") == b"lost"
            assert await journal.result("second") is None
            assert await journal.result("never") is None

    run(main())
    assert phases(found(path)) == {"first": "settled", "second": "running", "third": "queued"}


def test_a_replay_gets_the_outcome_of_the_action(path: Path) -> None:
    async def main() -> None:
        async def again() -> JournaledAction | None:
            return await journal.record_submission("a", "run", b"action", b"work")

        async with Journal(path) as journal:
            assert await again() is None
            known = await again()
            assert known is not None and known.phase is JournalPhase.QUEUED
            await journal.record_start("a", 3)
            known = await again()
            assert known is not None and (known.phase, known.attempt) == (JournalPhase.RUNNING, 3)
            settling = asyncio.create_task(journal.record_settled("a", b"result"))
            await asyncio.sleep(0)
            known = await again()  # in the same commit as its end
            assert known is not None and (known.phase, known.result) == (JournalPhase.SETTLED, b"result")
            await settling
        async with Journal(path) as journal:
            known = await again()
            assert known is not None and (known.phase, known.result) == (JournalPhase.SETTLED, b"result")
            assert await journal.record_submission("b", "run", b"action", b"work") is None

    run(main())
    assert phases(found(path)) == {"a": "settled", "b": "queued"}


def test_of_two_that_come_together_one_is_new_and_one_a_replay(path: Path) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            one, two = await asyncio.gather(
                *(journal.record_submission("a", "run", b"action", b"work") for _ in range(2))
            )
            assert one is None
            assert two is not None and two.phase is JournalPhase.QUEUED

    run(main())


@pytest.mark.parametrize("content", [("other", b"action", b"work"), ("run", b"actionw", b"ork"), ("run", b"", b"work")])
def test_an_id_with_other_content_is_refused_and_changes_nothing(path: Path, content: tuple[str, bytes, bytes]) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            await journal.record_submission("live", "run", b"action", b"work")
            await whole_life(journal, "settled")
            for id in ("live", "settled"):
                with pytest.raises(JournalConflict, match=id):
                    await journal.record_submission(id, *content)
            assert await journal.result("settled") == b"result"
            await journal.record_start("live", 1)

    run(main())
    assert phases(found(path)) == {"live": "running", "settled": "settled"}


@pytest.mark.parametrize("operations_max", [1, 1024], ids=["three_commits", "one_commit"])
def test_an_action_whose_id_was_taken_has_no_outcome(
    path: Path, operations_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.server.journal.journal.BATCH_OPERATIONS_MAX", operations_max)

    async def main() -> None:
        async with Journal(path) as journal:
            await whole_life(journal, "a", b"first")
            ends = await asyncio.gather(
                journal.record_submission("a", "run", b"other", b"work"),
                journal.record_start("a", 1),
                journal.record_settled("a", b"second"),
                return_exceptions=True,
            )
            assert [type(end) for end in ends] == [JournalConflict, InvariantError, InvariantError]
            assert await journal.result("a") == b"first"

    run(main())
    assert phases(found(path)) == {"a": "settled"}


def test_an_action_that_is_not_live_cannot_start_or_settle(path: Path) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            await whole_life(journal, "a")
            for id in ("a", "never"):
                with pytest.raises(InvariantError, match=id):
                    await journal.record_start(id, 1)
                with pytest.raises(InvariantError, match=id):
                    await journal.record_settled(id, b"again")
            await journal.record_submission("b", "run", b"", b"")
            with pytest.raises(InvariantError, match="not settled"):
                journal.record_fetched("b")

    run(main())


def test_input_that_cannot_be_kept_is_refused_and_breaks_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RECORD_BYTES_MAX", 100)

    async def main() -> None:
        async with Journal(path) as journal:
            for id in ("", "x" * 201, "a\0b", "\ud800", 7):
                with pytest.raises(InvalidInput):
                    await journal.record_submission(id, "run", b"", b"")  # type: ignore[arg-type]
                with pytest.raises(InvalidInput):
                    await journal.put_note(id, b"")  # type: ignore[arg-type]
            for record in (b"x" * 101, "text", None):
                with pytest.raises(InvalidInput):
                    await journal.record_submission("a", "run", b"", record)  # type: ignore[arg-type]
            await whole_life(journal, "a")

    run(main())
    assert phases(found(path)) == {"a": "settled"}


def test_a_closed_journal_takes_nothing(path: Path) -> None:
    async def main() -> None:
        journal = Journal(path)
        with pytest.raises(JournalFailed, match="not open"):
            await journal.put_note("a", b"")
        async with journal:
            pass
        with pytest.raises(JournalFailed, match="not open"):
            await journal.record_submission("a", "run", b"", b"")
        with pytest.raises(JournalFailed, match="not open"):
            await journal.compact()

    run(main())


@pytest.mark.parametrize("options", [{"durability": "hope"}, {"retention_s": 0.0}, {"retention_s": float("nan")}])
def test_options_that_cannot_be_meant_are_refused(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="journal"):
        Journal(path, **options)


# ---- group commit ---------------------------------------------------------------------------------------------------


def test_writers_at_the_same_time_share_commits_and_each_gets_its_own(path: Path) -> None:
    commits: list[tuple[float, int, int]] = []

    async def main() -> None:
        async with Journal(path, on_commit=lambda *commit: commits.append(commit)) as journal:

            async def writer(number: int) -> None:
                for step in range(5):
                    id = f"{number}-{step}"
                    await whole_life(journal, id, id.encode())
                    assert await journal.result(id) == id.encode()

            await asyncio.gather(*(writer(number) for number in range(64)))

    run(main())
    recovered = found(path)
    assert {known.id: known.result for known in recovered.actions} == {
        f"{number}-{step}": f"{number}-{step}".encode() for number in range(64) for step in range(5)
    }
    assert 15 <= len(commits) < 64 * 15, "operations that came together were not committed together"


def test_a_cancelled_writer_has_still_written(path: Path) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            task = asyncio.create_task(journal.record_submission("a", "run", b"action", b"work"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            await journal.record_start("a", 1)

    run(main())
    assert phases(found(path)) == {"a": "running"}


def test_closing_commits_what_is_pending(path: Path) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            await whole_life(journal, "a")
            tasks = [asyncio.create_task(journal.record_submission(str(n), "run", b"", b"")) for n in range(2000)]
            await asyncio.sleep(0)
            journal.record_fetched("a")
        assert all(task.done() and task.result() is None for task in tasks)

    run(main())
    recovered = found(path)
    assert list(phases(recovered)) == ["a", *map(str, range(2000))]
    assert recovered.actions[0].fetched


def test_large_records_are_committed_in_batches_of_bounded_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "BATCH_BYTES_MAX", 1000)
    monkeypatch.setattr(journal_module, "CHECKPOINT_THRESHOLD_BYTES", 50_000)
    commits: list[tuple[float, int, int]] = []

    async def main() -> None:
        async with Journal(path, on_commit=lambda *commit: commits.append(commit)) as journal:
            await asyncio.gather(*(journal.record_submission(str(n), "run", b"", b"x" * 900) for n in range(50)))
            await journal.put_note("last", b"")
            assert size_of(wal_of(path)) < 100_000

    run(main())
    recovered = found(path)
    assert len(commits) >= 50
    assert list(phases(recovered)) == list(map(str, range(50)))


# ---- the end of the process -----------------------------------------------------------------------------------------

WRITER = """
import asyncio, os, sys
from tangram.server.journal.journal import Journal

async def main(path, durability, first):
    async with Journal(path, durability) as journal:
        number = first

        async def writer():
            nonlocal number
            while True:
                number += 1
                id = f"{number:09}"
                for word, write in (
                    ("submitted", lambda: journal.record_submission(id, "run", b"action", id.encode() * 40)),
                    ("starting", lambda: journal.record_start(id, 1)),
                    ("settled", lambda: journal.record_settled(id, id.encode() * 60)),
                ):
                    await write()
                    os.write(1, f"{word} {id}\\n".encode())

        await asyncio.gather(*(writer() for _ in range(8)))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""
"""Writes until it is killed, and says what was acknowledged."""


def acknowledged_until_killed(path: Path, durability: str, first: int, lines: int) -> list[tuple[str, str]]:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path), durability, str(first)], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        printed = b"".join(child.stdout.readline() for _ in range(lines))
        child.send_signal(signal.SIGKILL)
        printed += child.stdout.read()
    assert child.returncode == -signal.SIGKILL
    whole = printed[: printed.rfind(b"\n") + 1]
    return [tuple(line.split()) for line in whole.decode().splitlines()]  # type: ignore[misc]


@pytest.mark.parametrize(("durability", "kills"), [("process", 14), ("power", 6)])
def test_what_was_acknowledged_survives_a_kill_at_any_moment(path: Path, durability: str, kills: int) -> None:
    moments = random.Random(7)
    expected: dict[str, str] = {}
    order = {"submitted": 0, "starting": 1, "settled": 2}
    first = 0
    for kill in range(kills):
        for word, id in acknowledged_until_killed(path, durability, first, moments.randrange(1, 600)):
            expected[id] = word
        recovered = found(path)
        at_least = {"queued": 0, "running": 1, "settled": 2}
        there = {known.id: known for known in recovered.actions}
        for id, word in expected.items():
            assert at_least[there[id].phase.value] >= order[word], f"kill {kill}: {id} was {word}"
        assert list(there) == sorted(there), "the order of submission"
        for id, known in there.items():
            if known.phase is JournalPhase.SETTLED:
                assert known.result == id.encode() * 60
            else:
                assert known.work == id.encode() * 40
        first = int(max(there))


def test_a_second_owner_is_refused_until_the_first_is_dead(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "process", "0"], stdout=subprocess.PIPE)
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().startswith(b"submitted")
            with pytest.raises(JournalBusy, match=f"process {child.pid}"):
                found(path)
        finally:
            child.kill()
        child.stdout.read()
    assert found(path).actions


def test_two_owners_in_one_process_are_two_owners(path: Path) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            with pytest.raises(JournalBusy, match=str(os.getpid())):
                async with Journal(path):
                    pass
            await whole_life(journal, "a")

    run(main())
    assert phases(found(path)) == {"a": "settled"}


# ---- a log that was cut ---------------------------------------------------------------------------------------------


def commits_in_log(path: Path) -> int:
    log = wal_of(path).read_bytes()
    frame = FRAME_HEADER + int.from_bytes(log[8:12], "big")
    begins = range(WAL_HEADER, len(log), frame)
    return sum(log[at + 4 : at + 8] != bytes(4) for at in begins if log[at + 8 : at + 16] == log[16:24])


def shrink_pages(path: Path) -> None:
    """The smallest pages there are, so that every byte of a log can be tried."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("PRAGMA page_size = 512")
        db.execute("VACUUM")


async def crash_after_each_of_some_operations(path: Path, aside: Path) -> list[tuple[int, tuple[Any, ...]]]:
    """Where the log ended after each commit, and what was there then."""
    ends = []
    async with crashing(path, aside) as journal:

        async def commit(doing: Awaitable[Any]) -> None:
            await doing
            ends.append(size_of(wal_of(path)))

        ends.append(0)
        await commit(journal.record_submission("a", "run", b"action", b"work"))
        await commit(journal.record_start("a", 1))
        await commit(journal.record_settled("a", b"result" * 50))
        await commit(journal.put_note("key", b"value"))
    log = wal_of(aside).read_bytes()
    assert ends[-1] == len(log)
    states = []
    for end in ends:
        cut = aside.with_name("cut")
        shutil.copyfile(aside, cut)
        cut.chmod(0o600)
        wal_of(cut).write_bytes(log[:end])
        store = journal_store.JournalStore(cut, survives_power_loss=False)
        states.append((end, facts(store.recovered)))
        store.close()
    return states


WAL_HEADER, FRAME_HEADER = 32, 24
"""Bytes, as the file format of SQLite says; a page follows each header of a frame."""
STRIDE = 11
"""It divides no size of a page, so that cuts within pages fall on different places of each."""


def cuts_of(log: bytes) -> list[int]:
    """Every byte of the headers, both sides of every boundary between a header and a page, and a stride in between."""
    frame = FRAME_HEADER + int.from_bytes(log[8:12], "big")
    begins = range(WAL_HEADER, len(log) + 1, frame)
    edges = [*range(WAL_HEADER), *(begin + at for begin in begins for at in range(-2, FRAME_HEADER + 2))]
    return sorted({size for size in (*edges, *range(0, len(log), STRIDE)) if 0 <= size <= len(log)})


def test_a_log_cut_at_headers_and_a_stride_is_read_up_to_the_last_whole_commit(memory_path: Path) -> None:
    found(memory_path)
    shrink_pages(memory_path)
    aside = memory_path.with_name("aside")
    states = run(crash_after_each_of_some_operations(memory_path, aside))
    assert [phases(RecoveredState(actions=state[0])) for _, state in states] == [
        {},
        {"a": "queued"},
        {"a": "running"},
        {"a": "settled"},
        {"a": "settled"},
    ]
    database, log = aside.read_bytes(), wal_of(aside).read_bytes()
    cut = memory_path.with_name("cut")
    for size in cuts_of(log):
        cut.write_bytes(database)
        wal_of(cut).write_bytes(log[:size])
        store = journal_store.JournalStore(cut, survives_power_loss=False)
        store.close()
        end, state = max((one for one in states if one[0] <= size), key=lambda one: one[0])
        assert facts(store.recovered) == state, f"cut at {size}"
        rest = f"the last {size - end} bytes of {wal_of(cut)}"
        mentions = [rest in line and f"commit {store.commits}" in line for line in store.recovered.report]
        assert mentions == ([True] if size > end else []), f"cut at {size}"


def test_the_owner_of_a_truncated_journal_gets_a_warning_and_continues(path: Path) -> None:
    aside = path.with_name("aside")
    run(crash_after_each_of_some_operations(path, aside))
    os.truncate(wal_of(aside), size_of(wal_of(aside)) - 1)

    async def main() -> None:
        async with crashing(aside, path.with_name("again")) as journal:
            assert len(journal.recovered.report) == 1
            await whole_life(journal, "b")

    run(main())
    recovered = found(path.with_name("again"))
    assert recovered.report == (), "it was reported once"
    assert phases(recovered) == {"a": "settled", "b": "settled"}


def test_a_damaged_log_is_read_up_to_the_damage(memory_path: Path) -> None:
    found(memory_path)
    shrink_pages(memory_path)
    aside = memory_path.with_name("aside")
    states = run(crash_after_each_of_some_operations(memory_path, aside))
    database, log = aside.read_bytes(), wal_of(aside).read_bytes()
    cut = memory_path.with_name("cut")
    for at in range(0, len(log), 7):
        cut.write_bytes(database)
        wal_of(cut).write_bytes(log[:at] + bytes([log[at] ^ 0x10]) + log[at + 1 :])
        store = journal_store.JournalStore(cut, survives_power_loss=False)
        store.close()
        _, state = max((one for one in states if one[0] <= at), key=lambda one: one[0])
        assert facts(store.recovered) == (states[0][1] if at < WAL_HEADER else state), f"damaged at {at}"
        assert len(store.recovered.report) == 1


# ---- damage ---------------------------------------------------------------------------------------------------------


def make_journal_with_everything(path: Path) -> tuple[Any, ...]:
    async def main() -> None:
        async with Journal(path) as journal:
            for number in range(60):
                await journal.record_submission(f"a{number}", "run", os.urandom(200), os.urandom(300))
                if number % 3:
                    await journal.record_start(f"a{number}", number)
                if number % 3 == 2:
                    await journal.record_settled(f"a{number}", os.urandom(9000 if number < 6 else 500))
            for number in range(20):
                await journal.record_sandbox_opened(f"box{number}", "run", "node", os.urandom(300))
            await journal.record_run("run", b"hash", b"record")
            await journal.put_note("key", b"value")

    run(main())
    assert not wal_of(path).exists()
    return facts(found(path))


def test_damage_anywhere_in_the_database_is_detected_or_harmless(memory_path: Path) -> None:
    whole = make_journal_with_everything(memory_path)
    database = memory_path.read_bytes()
    moments = random.Random(11)
    messages = []
    for _ in range(400):
        damaged = bytearray(database)
        at = moments.randrange(len(damaged))
        width = moments.choice((1, 1, 4, 512, 4096))
        what = bytes(width) if moments.random() < 0.3 else moments.randbytes(width)
        damaged[at : at + width] = what[: len(damaged) - at]
        memory_path.write_bytes(damaged)
        try:
            there = facts(found(memory_path))
        except JournalDamaged as error:
            messages.append(str(error))
        else:
            assert there == whole, f"{width} bytes at {at}"
    assert len(messages) > 200
    assert all(str(memory_path) in message and "move" in message for message in messages)


def test_a_database_truncated_at_any_page_is_detected(memory_path: Path) -> None:
    make_journal_with_everything(memory_path)
    database = memory_path.read_bytes()
    for size in sorted({0, 1, 99, 100, 101, 4095, *range(4096, len(database), 4096), len(database) - 1}):
        memory_path.write_bytes(database[:size])
        with pytest.raises(JournalDamaged, match=r"journal\.db"):
            found(memory_path)
        assert memory_path.read_bytes() == database[:size], "nothing was changed"


def test_a_log_without_its_database_is_detected(path: Path) -> None:
    aside = path.with_name("aside")
    run(crash_after_each_of_some_operations(path, aside))
    log = wal_of(aside).read_bytes()
    aside.unlink()
    with pytest.raises(JournalDamaged, match="is gone"):
        found(aside)
    assert wal_of(aside).read_bytes() == log


def test_a_log_that_was_truncated_while_it_was_copied_is_detected(path: Path) -> None:
    """The pages of later commits are in the database already: with the rest of the log they would be a mixture."""
    aside = path.with_name("aside")
    states = run(crash_after_each_of_some_operations(path, aside))
    log = wal_of(aside).read_bytes()
    found(aside)  # copies all of it
    wal_of(aside).write_bytes(log[: states[2][0]])
    wal_of(aside).chmod(0o600)
    database = aside.read_bytes()
    with pytest.raises(JournalDamaged, match="being copied"):
        found(aside)
    assert (aside.read_bytes(), wal_of(aside).read_bytes()) == (database, log[: states[2][0]]), "nothing was changed"
    wal_of(aside).write_bytes(log)
    assert facts(found(aside)) == states[-1][1], "a log that is whole says it all again"


@pytest.mark.parametrize(
    ("statement", "says"), [("PRAGMA user_version = 99", "version 99"), ("PRAGMA application_id = 1", "not a journal")]
)
def test_a_file_of_another_kind_or_version_is_refused(path: Path, statement: str, says: str) -> None:
    found(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(statement)
    with pytest.raises(JournalDamaged, match=says):
        found(path)


def test_a_creation_that_was_interrupted_is_begun_again(path: Path) -> None:
    path.with_name("journal.db.new").write_bytes(b"half of it")
    assert found(path).actions == ()
    assert sorted(file.name for file in path.parent.iterdir()) == ["journal.db", "journal.db.lock"]


# ---- a disk that does not take it -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if not ROOT:
        if os.environ.get("CI") == "true":
            pytest.fail("needs root, to mount a disk that is soon full")
        pytest.skip("needs root, to mount a disk that is soon full")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


def test_a_full_disk_stops_the_journal_and_loses_nothing_acknowledged(small_disk: Path) -> None:
    path = small_disk / "journal.db"
    acknowledged: list[str] = []

    async def main() -> None:
        async with Journal(path) as journal:

            async def writer(number: int) -> None:
                for step in range(1000):
                    id = f"{number}-{step}"
                    await journal.record_submission(id, "run", b"action", os.urandom(3000))
                    acknowledged.append(id)

            ends = await asyncio.gather(*(writer(number) for number in range(8)), return_exceptions=True)
            assert {type(end) for end in ends} == {JournalFailed}
            assert "disk is full" in str(ends[0]) and "start the service again" in str(ends[0])
            for doing in (journal.put_note("key", b""), journal.result("0-0"), journal.compact()):
                with pytest.raises(JournalFailed) as again:
                    await doing
                assert again.value is ends[0]
            with pytest.raises(JournalFailed):
                journal.record_fetched("0-0")

    run(main())
    remount(small_disk, "size=8m")
    there = phases(found(path))
    assert acknowledged
    assert set(acknowledged) <= set(there)


def test_a_journal_that_cannot_be_created_reports_why(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(JournalFailed, match=r"journal\.db cannot be used.*(full|space)"):
        found(small_disk / "journal.db")
    filler.unlink()
    assert found(small_disk / "journal.db").actions == ()


def test_a_disk_that_is_read_only_is_refused(small_disk: Path) -> None:
    path = small_disk / "journal.db"
    found(path)
    remount(small_disk, "ro")
    with pytest.raises(JournalFailed, match=r"Read-only.*permissions"):
        found(path)
    with pytest.raises(JournalFailed, match="Read-only"):
        found(small_disk / "other.db")


# ---- permissions ----------------------------------------------------------------------------------------------------


def test_its_files_are_for_its_owner_alone(path: Path) -> None:
    before = os.umask(0)
    try:

        async def main() -> None:
            async with Journal(path) as journal:
                await whole_life(journal, "a")
                modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
                assert modes == {"journal.db": 0o600, "journal.db-wal": 0o600, "journal.db.lock": 0o600}

        run(main())
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_directory_that_other_users_can_write_to_is_refused(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    try:
        with pytest.raises(InvalidConfig, match="chmod go-w"):
            found(path)
    finally:
        path.parent.chmod(0o700)
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(not ROOT and os.environ.get("CI") != "true", reason="needs root, to give files away")
def test_what_belongs_to_another_user_is_refused(path: Path) -> None:
    found(path)
    os.chown(path, 12345, -1)
    with pytest.raises(InvalidConfig, match="chown"):
        found(path)
    os.chown(path, os.geteuid(), -1)
    os.chown(path.parent, 12345, -1)
    try:
        with pytest.raises(InvalidConfig, match="of user 12345"):
            found(path)
    finally:
        os.chown(path.parent, os.geteuid(), -1)
    found(path)


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal", "journal.db.lock"])
def test_a_file_that_other_users_can_read_or_that_links_elsewhere_is_refused(path: Path, name: str) -> None:
    found(path)
    file = path.with_name(name)
    file.touch()
    file.chmod(0o644)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        found(path)
    elsewhere = path.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(InvalidConfig, match="regular file"):
        found(path)


def test_a_directory_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(InvalidConfig, match="mkdir"):
        found(path.parent / "missing" / "journal.db")


# ---- compaction and age ---------------------------------------------------------------------------------------------


class WrongClock:
    """Returns what it was given."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def now(self) -> float:
        return self.now_s


def test_compaction_deletes_what_was_fetched_and_leaves_the_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "PRUNE_ROWS_MAX", 7)

    async def main() -> None:
        async with Journal(path) as journal:
            for number in range(50):
                await whole_life(journal, f"a{number}")
            for id in ("queued", "running"):
                await journal.record_submission(id, "run", b"", b"")
            await journal.record_start("running", 1)
            for number in range(0, 50, 2):
                journal.record_fetched(f"a{number}")
            await journal.put_note("key", b"")
            assert await journal.compact() == 25
            assert await journal.compact() == 0
            assert await journal.result("a0") is None
            assert await journal.result("a1") == b"result"

    run(main())
    kept = {f"a{number}": "settled" for number in range(1, 50, 2)}
    assert phases(found(path)) == kept | {"queued": "queued", "running": "running"}


def test_results_of_a_finished_run_are_deleted_and_its_live_actions_are_not(path: Path) -> None:
    async def main() -> None:
        async with Journal(path) as journal:
            for name in ("one", "two"):
                await journal.record_submission(f"{name}-live", name, b"", b"")
                await journal.record_submission(f"{name}-settled", name, b"", b"")
                await journal.record_settled(f"{name}-settled", b"")
            assert await journal.delete_results(["one", "never"]) == 1

    run(main())
    assert phases(found(path)) == {"one-live": "queued", "two-live": "queued", "two-settled": "settled"}


def test_the_file_gets_smaller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "PRUNE_BYTES_MAX", 1 << 20)

    async def main() -> None:
        async with Journal(path) as journal:
            for number in range(100):
                await whole_life(journal, str(number), os.urandom(100_000))
                journal.record_fetched(str(number))
            await journal.put_note("key", b"")
            before = size_of(path)
            assert await journal.compact() == 100
            assert size_of(wal_of(path)) == 0
            assert size_of(path) < before / 4

    run(main())


def test_operations_are_committed_between_the_steps_of_a_compaction(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_store, "PRUNE_ROWS_MAX", 1)

    async def main() -> None:
        async with Journal(path) as journal:
            await asyncio.gather(*(whole_life(journal, str(number)) for number in range(200)))
            for number in range(200):
                journal.record_fetched(str(number))
            await journal.put_note("key", b"")
            before = commits_in_log(path)
            compacting = asyncio.create_task(journal.compact())
            await asyncio.sleep(0)
            await journal.put_note("meanwhile", b"")
            assert commits_in_log(path) < before + 100 and not compacting.done()
            assert await compacting == 200

    run(main())


def test_an_old_result_is_deleted_even_if_it_was_never_fetched(path: Path) -> None:
    clock = SimClock()

    async def first() -> None:
        async with Journal(path, retention_s=100.0, clock=clock) as journal:
            await journal.record_submission("live", "run", b"", b"")
            await whole_life(journal, "a")
            clock.set(99.0)
            await whole_life(journal, "b")
            assert await journal.compact() == 0
            clock.set(100.0)
            assert await journal.compact() == 1

    async def later() -> None:
        async with Journal(path, retention_s=100.0, clock=clock) as journal:
            assert await journal.compact() == 0, "while it could not be fetched, it did not age"
            clock.set(5098.0)
            assert await journal.compact() == 0
            clock.set(5099.5)
            assert await journal.compact() == 1

    run(first())
    assert phases(found(path)) == {"live": "queued", "b": "settled"}
    clock.set(5000.0)
    run(later())
    assert phases(found(path)) == {"live": "queued"}


def test_a_clock_that_goes_backwards_makes_nothing_younger_or_older(path: Path) -> None:
    clock = WrongClock()

    async def main() -> None:
        async with Journal(path, retention_s=100.0, clock=clock) as journal:
            await whole_life(journal, "a")
            clock.now_s += 60.0
            assert await journal.compact() == 0
            clock.now_s -= 1e9
            assert await journal.compact() == 0
            await whole_life(journal, "b")
            clock.now_s += 39.0
            assert await journal.compact() == 0
            clock.now_s += 1.0
            assert await journal.compact() == 1, "60 s before the jump and 40 s after it"
            assert await journal.result("b") == b"result"

    run(main())
    clock.now_s = -1e12

    async def later() -> None:
        async with Journal(path, retention_s=100.0, clock=clock) as journal:
            clock.now_s += 59.0
            assert await journal.compact() == 0
            clock.now_s += 1.0
            assert await journal.compact() == 1

    run(later())


def test_a_clock_that_jumps_forward_makes_nothing_old(path: Path) -> None:
    clock = WrongClock()

    async def main() -> None:
        async with Journal(path, retention_s=3 * CLOCK_STEP_S_MAX, clock=clock) as journal:
            await whole_life(journal, "a")
            clock.now_s += 1e9
            assert await journal.compact() == 0
            clock.now_s -= 2e9
            assert await journal.compact() == 0
        clock.now_s = 1e15

    run(main())

    async def later() -> None:
        async with Journal(path, retention_s=3 * CLOCK_STEP_S_MAX, clock=clock) as journal:
            assert await journal.compact() == 0
            for _ in range(2):
                clock.now_s += CLOCK_STEP_S_MAX
                deleted = await journal.compact()
            assert deleted == 1

    run(later())


def test_results_that_do_not_fit_in_memory_are_read_on_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "RECOVERED_RESULT_BYTES_MAX", 1000)

    async def main() -> None:
        async with Journal(path) as journal:
            for number in range(3):
                await whole_life(journal, str(number), b"x" * 600)
        async with Journal(path) as journal:
            assert [len(known.result or b"") for known in journal.recovered.actions] == [600, 0, 0]
            assert await journal.result("2") == b"x" * 600

    run(main())


# ---- any order of everything, and crashes ---------------------------------------------------------------------------


class Model:
    """What the journal should hold."""

    def __init__(self) -> None:
        self.actions: dict[str, tuple[str, int, bytes]] = {}
        self.facts: dict[tuple[str, str], bytes] = {}
        self.fetched: set[str] = set()

    def copy(self) -> Model:
        other = Model()
        other.actions, other.facts, other.fetched = dict(self.actions), dict(self.facts), set(self.fetched)
        return other

    def shown(self) -> tuple[Any, ...]:
        return list(self.actions.items()), sorted(self.facts.items()), sorted(self.fetched)


def shown(recovered: RecoveredState) -> tuple[Any, ...]:
    actions = [
        (one.id, (one.phase.value, one.attempt, one.work if one.result is None else one.result))
        for one in recovered.actions
    ]
    put = {("sandbox", box.name): box.spec for box in recovered.sandboxes}
    put |= {("run", one.name): one.record for one in recovered.runs}
    put |= {("note", note.key): note.value for note in recovered.notes}
    return actions, sorted(put.items()), sorted(one.id for one in recovered.actions if one.fetched)


IDS = st.sampled_from([f"id{number}" for number in range(8)])
NAMES = st.sampled_from(["x", "y"])
BYTES = st.sampled_from([b"", b"1", b"2" * 6000])


class JournalMachine(RuleBasedStateMachine):
    """Operations are begun and not waited for; at a crash those that were acknowledged must be there, and of the others
    the first few, in order."""

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.runner = asyncio.Runner()
        self.opened = 0
        self.journal = self.open(self.directory / "0")
        self.states = [Model()]
        """After each operation since the last that is known to be on disk."""
        self.tasks: list[asyncio.Task[Any]] = []
        """Of the operations that led from each to the next."""

    def open(self, path: Path) -> Journal:
        async def enter() -> Journal:
            return await Journal(path).__aenter__()

        return self.runner.run(enter())

    def do(self, operation: Callable[[], Coroutine[Any, Any, Any]], change: Callable[[Model], None]) -> None:
        async def begin() -> None:
            self.tasks.append(asyncio.create_task(operation()))
            await asyncio.sleep(0)

        self.runner.run(begin())
        state = self.states[-1].copy()
        change(state)
        self.states.append(state)

    @property
    def now(self) -> Model:
        return self.states[-1]

    def of(self, id: str) -> str:
        return self.now.actions[id][0] if id in self.now.actions else ""

    @rule(id=IDS, work=BYTES)
    def submit(self, id: str, work: bytes) -> None:
        def change(model: Model) -> None:
            model.actions.setdefault(id, ("queued", 0, work))

        async def submitted() -> None:
            with contextlib.suppress(JournalConflict):
                await self.journal.record_submission(id, "run", b"action", work)

        self.do(submitted, change)

    @rule(id=IDS, attempt=st.integers(1, 3))
    def start(self, id: str, attempt: int) -> None:
        if self.of(id) in ("queued", "running"):
            work = self.now.actions[id][2]
            self.do(
                lambda: self.journal.record_start(id, attempt),
                lambda model: model.actions.update({id: ("running", attempt, work)}),
            )

    @rule(id=IDS, result=BYTES)
    def settle(self, id: str, result: bytes) -> None:
        if self.of(id) in ("queued", "running"):
            self.do(
                lambda: self.journal.record_settled(id, result),
                lambda model: model.actions.update({id: ("settled", 0, result)}),
            )

    @rule(id=IDS)
    def fetch(self, id: str) -> None:
        if self.of(id) == "settled":

            async def fetched() -> None:
                self.journal.record_fetched(id)
                await self.journal.put_note("fetched", b"")

            def change(model: Model) -> None:
                model.fetched.add(id)
                model.facts["note", "fetched"] = b""

            self.do(fetched, change)

    @rule(kind=st.sampled_from(["sandbox", "run", "note"]), name=NAMES, value=BYTES)
    def put(self, kind: str, name: str, value: bytes) -> None:
        write = {
            "sandbox": lambda: self.journal.record_sandbox_opened(name, "run", "node", value),
            "run": lambda: self.journal.record_run(name, b"hash", value),
            "note": lambda: self.journal.put_note(name, value),
        }[kind]
        self.do(write, lambda model: model.facts.update({(kind, name): value}))

    @rule(kind=st.sampled_from(["sandbox", "run"]), name=NAMES)
    def drop(self, kind: str, name: str) -> None:
        remove = self.journal.record_sandbox_closed if kind == "sandbox" else self.journal.remove_run

        def change(model: Model) -> None:
            model.facts.pop((kind, name), None)

        self.do(lambda: remove(name), change)

    @rule()
    def wait(self) -> None:
        self.runner.run(self.all_acknowledged())
        for task in self.tasks:
            task.result()
        self.states, self.tasks = [self.now], []

    async def all_acknowledged(self) -> None:
        if self.tasks:
            await asyncio.wait(self.tasks)

    @rule()
    def compact(self) -> None:
        # No precondition on `states`: after a crash they depend on how far the journal's thread came, and Hypothesis
        # requires that the same draws are possible in every run.
        self.wait()
        assert self.runner.run(self.journal.compact()) == len(self.now.fetched)
        for id in self.now.fetched:
            del self.now.actions[id]
        self.now.fetched.clear()

    @rule(turns=st.integers(0, 6))
    def crash(self, turns: int) -> None:
        """The files as they are now are what is left."""
        self.opened += 1
        aside = self.directory / str(self.opened)

        async def crash() -> int:
            for _ in range(turns):
                await asyncio.sleep(0)
            acknowledged = max((number for number, task in enumerate(self.tasks, 1) if task.done()), default=0)
            await copy_files(self.journal, aside)
            await self.journal.__aexit__(None, None, None)
            await self.all_acknowledged()
            return acknowledged

        acknowledged = self.runner.run(crash())
        self.journal = self.open(aside)
        there = shown(self.journal.recovered)
        states = [state for state in self.states[acknowledged:] if state.shown() == there]
        assert states, f"{there} is none of {[state.shown() for state in self.states[acknowledged:]]}"
        self.states, self.tasks = [states[0]], []

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.runner.run(self.journal.__aexit__(None, None, None))
            self.runner.run(self.all_acknowledged())
            self.runner.close()
            shutil.rmtree(self.directory)


JournalMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAnyOrderOfEverything = JournalMachine.TestCase
