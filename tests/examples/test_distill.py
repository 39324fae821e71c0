"""The example `distill`: two teachers and a student, small, for real."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "examples" / "distill" / "distill.py")]
DEADLINE_S = 600.0
"""A hang is a failure. PyTorch is imported by several processes at once."""


def test_a_student_is_taught_by_both_of_its_teachers(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is an extra, which is not installed")
    done = subprocess.run(
        [*COMMAND, "--quick", "--json", "--folder", str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["steps"] == 10
    for task in ("chain", "frozenlake"):
        assert 0.0 < document["apart_last"][task] < 10.0 and 0.0 < document["apart_first"][task] < 10.0
        assert 0.0 <= document["score_last"][task] <= 1.0
    assert (tmp_path / "counter" / "config.json").is_file()
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0
