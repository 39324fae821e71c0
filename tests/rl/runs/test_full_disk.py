"""A full disk: whichever file of a checkpoint finds no room, the error is reported and the checkpoint before stays."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rl.played import played, settings
from tests.rl.samples import run_state, waiting

from tangram.errors import ManagerError
from tangram.rl.rollout.assembly import save_codec
from tangram.rl.runs.checkpoints import write_state
from tangram.rl.runs.run_folder import RunFolder, open_run
from tangram.rl.trajectories.codec import Codec, WordCodec
from tangram.rl.trajectories.tokenizer import TextCodec

pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

from tangram.rl.model.learner import Learner
from tangram.rl.model.transformer import Transformer, small_config

PAGE = os.sysconf("SC_PAGESIZE")
"""By which the room of a tmpfs is counted: each file takes one at least."""
ROOM = 4096 * PAGE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("needs root, to mount a small disk")
        pytest.skip("needs root, to mount a small disk")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM},mode=0700", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def resize(disk: Path, pages: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={pages * PAGE}", str(disk)], check=True)


def used(disk: Path) -> int:
    status = os.statvfs(disk)
    return (status.f_blocks - status.f_bfree) * status.f_frsize // PAGE


def learner() -> Learner:
    """With a reference, and with an optimiser that has something to be kept."""
    model = Transformer.new(small_config(23, layers=1, width=16, heads=2, context_max=96), 3)
    made = Learner(settings({"kl": 0.1}), model, reward_low={"toy": -1.0}, tokens_longest=32)
    made.step(played(0))
    return made


async def saved(folder: RunFolder, step: int, made: Learner, codec: Codec) -> None:
    async with folder.checkpoint(step) as path:
        made.save(path)
        save_codec(codec, path)
        write_state(path, run_state(step, waiting=[waiting(7, 1)]))


@pytest.mark.parametrize("kind", ["words", "text"])
def test_a_file_of_a_checkpoint_without_room_is_reported_and_the_one_before_stays(
    disk: Path, tmp_path: Path, kind: str
) -> None:
    """The disk grows page by page, until the second checkpoint fits as well."""
    if kind == "text":
        pytest.importorskip("transformers")
        from tests.rl.trajectories.test_tokenizer import folder_of

        (tmp_path / "tokenizer").mkdir()
        codec: Codec = TextCodec(folder_of(tmp_path / "tokenizer", chats=True))
    else:
        codec = WordCodec(("go", "look"))
    made = learner()
    warnings: list[str] = []
    with open_run(disk, settings({"kl": 0.1}), resume=False) as folder:
        asyncio.run(saved(folder, 0, made, codec))
        files = [path for path in (folder.checkpoints / "00000000").rglob("*") if path.is_file()]
        taken = used(disk)
        while not folder.has_checkpoint(1):
            resize(disk, taken + len(warnings))
            try:
                asyncio.run(saved(folder, 1, made, codec))
            except ManagerError as error:
                warnings.append(str(error))
                assert [path.name for path in folder.checkpoints.iterdir()] == ["00000000"]
                assert (checkpoint := folder.latest_checkpoint()) is not None and (
                    checkpoint.step,
                    checkpoint.warnings,
                ) == (0, ())
    assert len(warnings) >= len(files) > 5, "there was a size at which each of them found no room"
    assert all("cannot be written" in text and "No space left on device" in text for text in warnings)
