"""A checkpoint that is held stays whole, whatever its run does with it; nothing of it is left afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_directory import remove_atomically
from tangram.rl.buffer.sample_buffer import BufferState
from tangram.rl.inference.weights_folder import LOCK, PREFIX
from tangram.rl.runs.checkpoints import (
    VANISHED_MAX,
    DamagedCheckpoint,
    RunState,
    folder_name,
    pin_checkpoint,
    pin_newest_checkpoint,
    read_checkpoint,
    seal,
    write_state,
)


def saved(checkpoints: Path, step: int) -> Path:
    path = checkpoints / folder_name(step)
    (path / "reference").mkdir(parents=True)
    (path / "model.safetensors").write_text(f"weights of {step}")
    (path / "reference" / "model.safetensors").write_text("weights of before")
    buffer = BufferState(
        version=step, waiting=(), in_flight=(), trained=(), dropped=(), dropped_by_cause={}, trajectories_discarded=0,
        tokens_discarded=0, bytes_mean=0.0, puts=0,
    )  # fmt: skip
    write_state(path, RunState(version=step, step=step, ticket_next=0, buffer=buffer, at_s=1.0))
    seal(path)
    return path


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        saved(folder, step)
    return folder


def no_warning(words: str) -> None:
    raise AssertionError(words)


def deleted_first(checkpoints: Path, then: Callable[[], None]) -> Callable[[Path, Path], None]:
    """In place of the linking: whatever is to be held is deleted before, and then something else happens."""

    def link(to: Path, file: Path) -> None:
        remove_atomically(checkpoints / file.relative_to(checkpoints).parts[0])
        then()
        raise FileNotFoundError(file)

    return link


@pytest.mark.parametrize("links", [True, False])
def test_it_stays_whole_when_its_run_deletes_it(
    checkpoints: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def another_disk(self: Path, target: Path) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(Path, "hardlink_to", another_disk)
    with pin_newest_checkpoint(checkpoints, no_warning) as pinned:
        assert pinned.path == checkpoints / folder_name(20)
        remove_atomically(pinned.path)
        assert read_checkpoint(pinned.folder).step == 20
        assert (pinned.folder / "model.safetensors").read_text() == "weights of 20"
        assert (pinned.folder / "reference" / "model.safetensors").is_file()
    assert [each.name for each in checkpoints.parent.iterdir()] == ["checkpoints"]


def test_a_checkpoint_that_is_deleted_before_it_is_pinned_is_replaced_by_the_newest(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Path.hardlink_to

    def saved_meanwhile() -> None:
        saved(checkpoints, 30)
        monkeypatch.setattr(Path, "hardlink_to", link)

    monkeypatch.setattr(Path, "hardlink_to", deleted_first(checkpoints, saved_meanwhile))
    with pin_newest_checkpoint(checkpoints, no_warning) as pinned:
        assert pinned.path.name == folder_name(30)


def test_there_is_an_end_to_checkpoints_that_vanish(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(30, 1000))
    monkeypatch.setattr(Path, "hardlink_to", deleted_first(checkpoints, lambda: void(saved(checkpoints, next(steps)))))
    with (
        pytest.raises(ManagerError, match=f"{VANISHED_MAX} checkpoints in a row were deleted"),
        pin_newest_checkpoint(checkpoints, no_warning),
    ):
        pass
    assert [each.name for each in checkpoints.parent.iterdir()] == ["checkpoints"]


def void(_: object) -> None:
    pass


def test_a_named_checkpoint_that_is_gone_is_reported(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "hardlink_to", deleted_first(checkpoints, lambda: None))
    with (
        pytest.raises(InvalidConfig, match="checkpoint: expected one that is there: its run has just deleted it"),
        pin_checkpoint(checkpoints / folder_name(10)),
    ):
        pass


def test_damage_is_reported_for_the_original_and_the_checkpoint_skipped(checkpoints: Path) -> None:
    (checkpoints / folder_name(20) / "model.safetensors").write_text("weights of 21")
    warnings: list[str] = []
    with pin_newest_checkpoint(checkpoints, warnings.append) as pinned:
        assert pinned.path.name == folder_name(10)
    assert len(warnings) == 1 and f"checkpoint {checkpoints / folder_name(20)} is damaged" in warnings[0]
    with pytest.raises(DamagedCheckpoint, match="00000020 is damaged"), pin_checkpoint(checkpoints / folder_name(20)):
        pass
    (checkpoints / folder_name(10) / "state.msgpack").unlink()
    with (
        pytest.raises(ManagerError, match="every checkpoint in it is damaged"),
        pin_newest_checkpoint(checkpoints, warnings.append),
    ):
        pass


def test_leftovers_of_a_killed_reader_are_removed_by_the_next(checkpoints: Path) -> None:
    left = checkpoints.parent / f"{PREFIX}killed"
    (left / folder_name(20)).mkdir(parents=True)
    (left / LOCK).touch()
    with pin_newest_checkpoint(checkpoints, no_warning):
        assert not left.exists()
    assert [each.name for each in checkpoints.parent.iterdir()] == ["checkpoints"]
