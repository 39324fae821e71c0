"""The example `mixed`: both sides for real, what it says where something is missing, and what is left when it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tangram.bench.base import default_backend

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples" / "mixed"
COMMAND = [sys.executable, str(FOLDER / "mixed.py")]
RUNS = {"coding", "search", "distillation"}
DEADLINE_S = 600.0
"""Of one run, and of whatever is waited for: a hang is a failure. PyTorch is imported by several processes at once."""
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""A sitecustomize, which every Python imports first."""


def skipped(why: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI has everything that this example needs, but: {why}")
    pytest.skip(why)


@pytest.fixture
def everything() -> None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is an extra, which is not installed")
    backend, why = default_backend()
    if backend != "sandbox":
        skipped(why)


def left_by(folder: Path) -> list[str]:
    """Processes that were given this folder for their temporary files, or work in it."""
    names = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            words = (process / "cmdline").read_bytes()
            if str(folder).encode() in words + (process / "environ").read_bytes():
                names.append(words.replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return names


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def nothing_is_left(folder: Path) -> None:
    wait_until(lambda: left_by(folder) == [])
    assert list(folder.iterdir()) == []
    assert str(folder) not in Path("/proc/mounts").read_text()


def temporary(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder of its own for temporary files, and the environment that says so."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder, os.environ | {"TMPDIR": str(folder)}


# ---- both sides -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("everything")
def test_three_runs_share_all_pools_and_nothing_is_refused_lost_wrong_or_left(tmp_path: Path) -> None:
    folder, environment = temporary(tmp_path)
    page = tmp_path / "out" / "mixed.html"
    done = subprocess.run(
        [*COMMAND, "--quick", "--json", "--report", str(page)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    nothing_is_left(folder)
    sides: dict[str, Any] = json.loads(done.stdout)["sides"]
    assert list(sides) == ["shared", "as today"]
    shared, today = sides.values()

    for side in (shared, today):
        assert set(side["runs"]) == RUNS
        assert all(run["actions"] > 0 for run in side["runs"].values())
        assert side["answers"] > 0 and side["answers_wrong"] == 0
    assert shared["rejected"] == 0
    assert [run["lost"] for run in shared["runs"].values()] == [0, 0, 0]
    assert shared["runs"]["coding"]["reward_mean"] == shared["runs"]["search"]["reward_mean"] == 1.0

    # The same work on both sides: the same actions, the same answers, and a search for each that was not lost.
    def actions(side: dict[str, Any]) -> dict[str, int]:
        return {name: run["actions"] for name, run in side["runs"].items()}

    assert actions(shared) == actions(today)
    assert shared["answers"] == today["answers"]
    rewards = [side["runs"]["distillation"]["reward_mean"] for side in (shared, today)]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-4)
    assert shared["served"] == today["served"] + sum(run["lost"] for run in today["runs"].values())

    # As today each teacher has its device; shared they make room for each other.
    assert (shared["devices"], today["devices"]) == (1, 2)
    assert shared["restores"] > 0 and today["restores"] == 0

    assert [path.name for path in page.parent.iterdir()] == ["mixed.html"]
    shown = page.read_text()
    assert "Shared: all teachers on 1 device" in shown and "As today: a device for each teacher, 2 devices" in shown


# ---- the reference ----------------------------------------------------------------------------------------------


@pytest.fixture
def teachers() -> ModuleType:
    pytest.importorskip("safetensors", reason="it comes with transformers, which is an extra")
    spec = importlib.util.spec_from_file_location("mixed_teachers", FOLDER / "teachers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        return module
    finally:
        del sys.modules[spec.name]


def test_the_reference_accepts_only_the_answer_of_its_own_teacher(teachers: ModuleType, tmp_path: Path) -> None:
    made = [teachers.make(name, 0, tmp_path) for name in ("algebra", "chess")]
    reference = teachers.Reference(made)
    tokens = (5, 900, 23, 7, 411)
    own, other = (tuple(teachers.logprobs(each.weights, tokens).tolist()) for each in made)
    assert reference.error(teachers.TeacherCall("algebra", tokens, own)) <= teachers.TOLERANCE
    assert reference.error(teachers.TeacherCall("algebra", tokens, other)) > teachers.TOLERANCE
    assert reference.error(teachers.TeacherCall("algebra", tokens, own[:-1])) == float("inf")


# ---- how it ends otherwise --------------------------------------------------------------------------------------


def models_are_prepared(folder: Path) -> bool:
    return any("tangram.managers.models" in words for words in left_by(folder))


def agents_are_at_work(folder: Path) -> bool:
    return any(folder.glob("*/state-shared/owners/*/boxes/*"))


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("begun", [models_are_prepared, agents_are_at_work])
def test_ctrl_c_leaves_nothing_behind_and_ends_with_130(begun: Callable[[Path], bool], tmp_path: Path) -> None:
    folder, environment = temporary(tmp_path)
    running = subprocess.Popen(
        [*COMMAND, "--quick", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        wait_until(lambda: begun(folder) or running.poll() is not None)
        assert running.poll() is None, running.communicate()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        out, err = running.communicate(timeout=DEADLINE_S)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
    assert (running.returncode, out, err) == (130, b"", b"")
    nothing_is_left(folder)


def test_without_pytorch_the_error_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*COMMAND, "--quick"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mixed: torch and transformers cannot be imported; install what the teachers need: "
        ".venv/bin/pip install -c constraints.txt '.[transformers]'\n"
    )


@pytest.mark.usefixtures("everything")
def test_without_sandboxes_it_points_to_the_doctor(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run([*COMMAND, "--quick"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bubblewrap" in done.stderr and "`tangram doctor` says what works on this machine" in done.stderr


def test_help_shows_an_example() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert "python examples/mixed/mixed.py --report build/mixed.html" in done.stdout
