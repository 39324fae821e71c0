"""The folder of published weights goes with its owner, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tangram.rl.inference.weights_folder import PREFIX, weights_folder

HOLDS = """
import sys, time
from pathlib import Path
from tangram.rl.inference.weights_folder import weights_folder
with weights_folder(Path(sys.argv[1])) as folder:
    (folder / "bucket").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    time.sleep(600)
"""


def there(below: Path) -> list[Path]:
    return sorted(below.glob(f"{PREFIX}*"))


def test_it_is_deleted_at_the_end_also_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with weights_folder(tmp_path) as folder:
            (folder / "00000000").mkdir()
            assert there(tmp_path) == [folder]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert there(tmp_path) == []


def test_what_a_killed_owner_left_is_deleted_by_the_next_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout is not None]
        os.kill(owners[0].pid, signal.SIGKILL)
        owners[0].wait()
        assert there(tmp_path) == sorted(folders)
        with weights_folder(tmp_path) as mine:
            assert there(tmp_path) == sorted([folders[1], mine])
            assert (folders[1] / "bucket").stat().st_size == 1000
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            if owner.stdout is not None:
                owner.stdout.close()
