"""Checkpoints: whole or not at all, and what is damaged is passed over with a word."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.rl.samples import run_state, waiting

from tangram.cancellation import run_to_completion
from tangram.errors import InvalidInput, ManagerError
from tangram.rl.config.training_settings import CheckpointSettings, TrainSettings
from tangram.rl.runs import checkpoints
from tangram.rl.runs.checkpoints import CHECKSUMS_FILE, STATE, RunState, read_checkpoint, steps_in, write_state
from tangram.rl.runs.metrics_lines import WarmStartChecked
from tangram.rl.runs.run_folder import RunFolder, open_run
from tangram.rl.runs.sample_log import log_files
from tangram.rl.trajectories.training_batch import strip_for_training

SETTINGS = TrainSettings(checkpoints=CheckpointSettings(keep=2))


async def saved(folder: RunFolder, state: RunState, weights: bytes = b"weights") -> None:
    """As an owner of a trainer does it."""
    async with folder.checkpoint(state.step) as path:
        (path / "optimiser").mkdir()
        (path / "optimiser" / "00.bucket").write_bytes(weights)
        (path / "words.json").write_text("[]")
        await run_to_completion(asyncio.to_thread(write_state, path, state))


def save(folder: RunFolder, state: RunState) -> None:
    asyncio.run(saved(folder, state))


def files(folder: RunFolder) -> list[str]:
    return sorted(each.name for each in folder.checkpoints.iterdir())


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    state = run_state(40, waiting=[waiting(7, 39, 40)], in_flight=[8, 9], trained=[(0, 6)], ticket_next=10)
    warm = WarmStartChecked(at_s=1.0, step=50, loss=0.5, scores={"lake": 0.3}, over=True)
    state = msgspec.structs.replace(state, warm=warm, random=b"\x00\xff", evaluations=3, note="a note")
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder:
        assert folder.latest_checkpoint() is None
        save(folder, state)
        assert folder.has_checkpoint(40) and not folder.has_checkpoint(20)
        checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None and checkpoint.warnings == () and checkpoint.step == 40
    assert (checkpoint.path / "optimiser" / "00.bucket").read_bytes() == b"weights"
    kept = msgspec.structs.replace(state.buffer.waiting[0], group=strip_for_training(state.buffer.waiting[0].group))
    buffer = msgspec.structs.replace(state.buffer, waiting=(kept,))
    assert checkpoint.state == msgspec.structs.replace(state, buffer=buffer)


def test_old_checkpoints_go_with_their_logs_once_a_newer_one_is_there(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder, folder.open_sample_log(None) as log:
        for step in (0, 20, 40, 60):
            log.rotate(step)
            save(folder, run_state(step))
        assert steps_in(folder.checkpoints) == [40, 60]
        assert [step for step, _ in log_files(folder.samples)] == [40, 60]


def test_a_checkpoint_that_fails_leaves_nothing_and_takes_nothing_away(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder, folder.open_sample_log(None) as log:
        for step in (0, 20):
            log.rotate(step)
            save(folder, run_state(step))
        log.rotate(40)
        with pytest.raises(RuntimeError, match="the trainer died"):
            asyncio.run(half_saved(folder, 40, RuntimeError("the trainer died")))
        with pytest.raises(ManagerError, match="cannot be written: No space"):
            asyncio.run(half_saved(folder, 40, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(InvalidInput, match=f"that {STATE} was written"):
            asyncio.run(half_saved(folder, 40))
        with pytest.raises(ManagerError, match="exists already"):
            save(folder, run_state(20))
        assert files(folder) == ["00000000", "00000020"]
        assert [step for step, _ in log_files(folder.samples)] == [0, 20, 40]
        checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None and checkpoint.step == 20


async def half_saved(folder: RunFolder, step: int, error: Exception | None = None) -> None:
    async with folder.checkpoint(step) as path:
        (path / "half").write_bytes(b"...")
        if error is not None:
            raise error


def test_a_full_disk_is_reported_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder:
        save(folder, run_state(20))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
            with pytest.raises(ManagerError, match=r"state.msgpack cannot be written: File too large"):
                save(folder, run_state(40))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert files(folder) == ["00000020"]


def test_room_is_made_on_a_full_disk_alone_and_the_newest_that_is_whole_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tmp_path / "run", TrainSettings(checkpoints=CheckpointSettings(keep=3)), resume=False) as folder:
        assert not folder.make_room()
        for step in (0, 20, 40):
            save(folder, run_state(step))
        assert not folder.make_room(), "the disk has room"
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
        (folder.checkpoints / "00000040" / STATE).unlink()
        assert folder.make_room() and steps_in(folder.checkpoints) == [20, 40]
        assert not folder.make_room() and steps_in(folder.checkpoints) == [20, 40]
        asyncio.run(saved(folder, run_state(60), bytes(100_000)))
        assert not folder.make_room(), "deleting all of them would not be enough"


def test_cancellation_leaves_a_complete_checkpoint_or_none(tmp_path: Path) -> None:
    asyncio.run(_cancelled(tmp_path))


async def _cancelled(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder:
        for loops in range(8):
            task = asyncio.create_task(saved(folder, run_state(loops)))
            for _ in range(loops):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert all(name.isdecimal() for name in files(folder))
            for step in steps_in(folder.checkpoints):
                read_checkpoint(folder.checkpoints / f"{step:08d}")


def test_a_run_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is held up until the loop has done something else: were it written on the loop, it would hang."""
    asyncio.run(_goes_on(tmp_path, monkeypatch))


async def _goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ticked = asyncio.get_running_loop(), asyncio.Event()
    seal = checkpoints.seal

    def slow(unfinished: Path) -> None:
        asyncio.run_coroutine_threadsafe(_tick(ticked), loop).result(20.0)
        seal(unfinished)

    monkeypatch.setattr(checkpoints, "seal", slow)
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder:
        await saved(folder, run_state(20))
        assert ticked.is_set() and folder.has_checkpoint(20)


async def _tick(ticked: asyncio.Event) -> None:
    ticked.set()


# ---- damage ----


def damaged(tmp_path: Path, name: str, at: int | None) -> str:
    """Two checkpoints, and the newer with a damaged file. Returns the expected warning."""
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder:
        save(folder, run_state(20))
        save(folder, run_state(40))
        file = folder.checkpoints / "00000040" / name
        if at is None:
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[at] ^= 1
            file.write_bytes(content[: at + 1])
        checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None and checkpoint.step == 20
    (warning,) = checkpoint.warnings
    return warning


@pytest.mark.parametrize("at", [None, 0, -2])
@pytest.mark.parametrize("name", [STATE, CHECKSUMS_FILE, "optimiser/00.bucket", "words.json"])
def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path: Path, name: str, at: int | None) -> None:
    warning = damaged(tmp_path, name, at)
    assert "00000040 is damaged" in warning and "_FileChecksum" not in warning


def test_damage_is_described(tmp_path: Path) -> None:
    warning = damaged(tmp_path / "cut", "optimiser/00.bucket", 3)
    assert warning.endswith("optimiser/00.bucket is not what was written: it has 4 bytes instead of 7")
    warning = damaged(tmp_path / "flipped", "optimiser/00.bucket", 6)
    assert re.search(r"its 7 bytes differ \(CRC-32 [0-9a-f]{8} instead of [0-9a-f]{8}\)$", warning)


def test_a_run_that_went_back_writes_the_checkpoint_again(tmp_path: Path) -> None:
    damaged(tmp_path, STATE, None)
    with open_run(tmp_path / "run", SETTINGS, resume=True) as folder:
        checkpoint = folder.latest_checkpoint()
        assert checkpoint is not None
        with folder.open_sample_log(checkpoint) as log:
            assert files(folder) == ["00000020", "00000040.damaged"] and log.step == 20
            log.rotate(40)
            save(folder, run_state(40))
            assert (latest := folder.latest_checkpoint()) is not None and latest.step == 40 and latest.warnings == ()
            log.rotate(60)
            save(folder, run_state(60))
            log.rotate(80)
            save(folder, run_state(80))
        assert files(folder) == ["00000060", "00000080"]


def test_without_a_complete_checkpoint_an_error_is_raised(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder:
        save(folder, run_state(20))
        (folder.checkpoints / "00000020" / STATE).unlink()
        with pytest.raises(ManagerError, match=r"00000020 is damaged.*there is no other"):
            folder.latest_checkpoint()


def test_a_state_of_another_release_is_not_guessed_at(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", SETTINGS, resume=False) as folder:
        save(folder, run_state(20))
        save(folder, msgspec.structs.replace(run_state(40), format=2))
        with pytest.raises(ManagerError, match="expected a state of format 1, got 2; resume it with the release"):
            folder.latest_checkpoint()


# ---- killed ----

PROGRAM = """
import asyncio, os, sys
from tangram.rl.runs.checkpoints import write_state
from tangram.rl.runs.run_folder import open_run
from tangram.rl.config.training_settings import CheckpointSettings, TrainSettings
from tests.rl.samples import group, run_state, waiting

async def main(path, resume):
    settings = TrainSettings(checkpoints=CheckpointSettings(keep=2))
    with open_run(path, settings, resume=resume) as folder:
        found = folder.latest_checkpoint() if resume else None
        number = 0 if found is None else found.state.ticket_next
        step = 0 if found is None else found.step + 1
        with folder.open_sample_log(found) as log:
            print(os.getpid(), flush=True)
            while True:
                state = run_state(step, waiting=[waiting(number, step)], ticket_next=number + 3)
                log.rotate(step)
                async with folder.checkpoint(step) as path:
                    (path / "weights").write_bytes(bytes([step % 256]) * 100_000)
                    log.append(group(number + 1, step, tokens=500))
                    await asyncio.to_thread(write_state, path, state)
                log.append(group(number + 2, step, tokens=500))
                print(step, flush=True)
                step, number = step + 1, number + 3

for line in sys.stdin:  # a process for each line: forked, as importing takes a hundred times as long
    if os.fork() == 0:
        asyncio.run(main(sys.argv[1], line == "resume\\n"))
    print("ended", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
KILLS = 25


def test_a_run_that_is_killed_at_any_time_has_a_whole_checkpoint_and_a_readable_log(tmp_path: Path) -> None:
    path, chance = tmp_path / "run", random.Random(7)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for kill in range(KILLS):
            print("resume" if kill else "new", file=parent.stdin, flush=True)
            pid = int(parent.stdout.readline())
            for _ in range(chance.randrange(1, 4)):
                step = int(parent.stdout.readline())
            for _ in range(chance.randrange(200_000)):  # somewhere within the next one
                pass
            os.kill(pid, signal.SIGKILL)
            while not (line := parent.stdout.readline()).startswith("ended"):
                step = int(line)
            assert line == f"ended {-signal.SIGKILL}\n"
            require_whole(path, step)


def require_whole(path: Path, step: int) -> None:
    with open_run(path, SETTINGS, resume=True) as folder:
        checkpoint = folder.latest_checkpoint()
        assert checkpoint is not None and checkpoint.warnings == () and checkpoint.step in (step, step + 1)
        assert (checkpoint.path / "weights").read_bytes() == bytes([checkpoint.step % 256]) * 100_000
        assert all(name.isdecimal() for name in files(folder)), "what was unfinished is swept"
        assert len(steps_in(folder.checkpoints)) <= 3
        logs = folder.samples_after(checkpoint.step)
        assert all(number > checkpoint.state.ticket_next - 3 for number in put_numbers(list(logs)))


def put_numbers(entries: list[object]) -> list[int]:
    return [int(entry.group.id.split("/")[1]) for entry in entries]  # type: ignore[attr-defined]
