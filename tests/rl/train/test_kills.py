"""Real processes of a real run are killed, and it is resumed: what is in its folder afterwards proves that no group was
trained on twice, that no step is missing, and that nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.rl.processes import gone
from tests.rl.train.proof import assert_sound, lines_of, nothing_left
from tests.rl.train.tiny import HOLDS

from tangram.rl.runs.metrics_lines import Noticed, RunBegan, RunEnded, Trained, WarmStartChecked
from tangram.rl.runs.run_folder import open_run, read_settings

pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
BATCH = 2
DEADLINE_S = 180.0
"""Far more than a life takes on a machine that others use too."""
TRAINER, ENGINE, FORK_SERVER = "trainer_child", "engine_child", "tangram-fork"
CONFIG = """
[policy]
layers = 1
width = 16
heads = 2
[[engines]]
context_max = 32
slots = 8
sessions = 32
[groups]
size = 2
[[tasks]]
name = "pick"
environment = "tests.rl.train.tiny:Pick"
warm_until = {warm_until}
[training]
mode = "{mode}"
steps = {steps}
batch = 2
[objective]
loss = "tests.rl.train.held_learner:clipped"
zero_variance = "keep"
[warm_start]
episodes = 8
batch = 4
steps_max = 4
check_every = 2
check_episodes = 2
[evaluation]
every = 3
episodes = 2
[checkpoints]
every = 2
keep = 100
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.005)
    return result


class Run:
    """Lives of `tangram train` in one folder."""

    def __init__(self, folder: Path, *, mode: str = "async", steps: int = 6, warm_until: float = 0.0) -> None:
        self.steps, self.mode = steps, mode
        self.run = folder / "run"
        self.holds = folder / "holds"
        self.holds.mkdir()
        self._config = folder / "tiny.toml"
        self._config.write_text(CONFIG.format(mode=mode, steps=steps, warm_until=warm_until))
        self._lives = 0
        self.process: subprocess.Popen[bytes]

    # ---- a life ----

    @contextmanager
    def life(self) -> Iterator[None]:
        words = [sys.executable, "-m", "tangram", "train", str(self._config), "--out", str(self.run)]
        self.said = self.holds / f"said.{self._lives}"
        with self.said.open("wb") as output:
            self.process = subprocess.Popen(
                [*words, *(["--resume"] if self._lives else [])],
                cwd=ROOT, env=os.environ | {HOLDS: str(self.holds)}, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._lives += 1
        known: set[int] = set()
        try:
            yield
            known |= set(self.children())
        finally:
            known |= set(self.children())
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            self.release()
        until(lambda: all(gone(pid) for pid in known), f"the end of {known}")

    def ended(self) -> int:
        """Its exit code."""
        return self.process.wait(DEADLINE_S)

    def whole(self) -> None:
        """A life to the end of the run."""
        with self.life():
            assert self.ended() == 0, self.said.read_text()

    def children(self, program: str = "") -> list[int]:
        """Of every generation; `program`: as `top` shows it."""
        child_pids, parents = [], [self.process.pid]
        while parents:
            for listed in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
                try:
                    pids = [int(pid) for pid in listed.read_text().split()]
                    parents += pids
                    child_pids += [pid for pid in pids if program in Path(f"/proc/{pid}/comm").read_text()]
                except (FileNotFoundError, ProcessLookupError):
                    pass
        return child_pids

    def kill(self, *programs: str) -> None:
        for program in programs:
            (pid,) = until(lambda program=program: self.children(program), f"{program} runs")
            forked = self.children(TRAINER) if program == FORK_SERVER else []
            os.kill(pid, signal.SIGKILL)
            until(lambda forked=forked: all(map(gone, forked)), "what it forked ends with it")

    # ---- what happens in it ----

    def hold(self, *names: str) -> None:
        for name in names:
            (self.holds / f"in.{name}").unlink(missing_ok=True)
            (self.holds / f"hold.{name}").touch()

    def comes_to(self, name: str) -> None:
        until(self._or_ended((self.holds / f"in.{name}").exists), f"it comes to {name}")

    def release(self, name: str = "*") -> None:
        for each in self.holds.glob(f"hold.{name}"):
            each.unlink()

    def signal_in(self, name: str, number: int) -> None:
        """Wait until it is notified."""
        self.comes_to(name)
        self.process.send_signal(number)
        until(self._or_ended(lambda: "a second signal stops it at once" in self.said.read_text()), "it has heard")

    def _or_ended(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        def looked() -> bool:
            assert self.process.poll() is None, self.said.read_text()
            return condition()

        return looked

    def lines(self, kind: type) -> list[Any]:
        return lines_of(self.run, kind) if (self.run / "metrics.jsonl").exists() else []

    def notices(self, kind: str) -> list[str]:
        return [line.text for line in self.lines(Noticed) if line.kind == kind]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in (self.run / "checkpoints").glob("????????"))

    def assert_sound(self) -> None:
        assert_sound(self.run, steps=self.steps, batch=BATCH, age_max={"sync+": 0}.get(self.mode, 1))
        assert self.lines(RunEnded)[-1].cause == "steps"
        assert not list((self.run / "checkpoints").glob(".unfinished*")) and self.steps in self.checkpoints()
        with open_run(self.run, read_settings(self.run), resume=True):
            pass  # no process holds it


def test_trainers_and_engines_that_are_killed_cost_no_sample(tmp_path: Path) -> None:
    """In the warm start, in a step, in a save, with the place of their fork, and in the last save."""
    with nothing_left():
        run = Run(tmp_path, steps=7, warm_until=1.0)
        killed = {
            "imitate": [TRAINER], "step.0": [TRAINER], "save.2": [TRAINER], "step.3": [ENGINE],
            "step.5": [FORK_SERVER], "save.7": [TRAINER],
        }  # fmt: skip
        run.hold(*killed)
        with run.life():
            for place, programs in killed.items():
                run.comes_to(place)
                run.kill(*programs)
                run.release(place)
            assert run.ended() == 0, run.said.read_text()
    run.assert_sound()
    assert "the warm start begins again" in run.notices("trainer")[0]
    went_back_to = [text.partition("checkpoint of step ")[2][0] for text in run.notices("rollback")]
    assert went_back_to == ["0", "0", "4", "6"]
    assert len(run.notices("engine")) >= 2


def test_a_run_that_is_killed_again_and_again_goes_on(tmp_path: Path) -> None:
    """In the warm start, in a step, in a checkpoint, and at any moment."""
    with nothing_left():
        run = Run(tmp_path, steps=9, warm_until=1.0)
        for place in ("imitate", "step.1", "save.4"):
            run.hold(place)
            with run.life():
                run.comes_to(place)
                run.process.kill()
        with run.life():
            until(lambda: len(run.lines(RunBegan)) > 3, "it goes on")
            time.sleep(random.uniform(0.0, 0.3))  # any moment is as good
            run.process.kill()
        run.whole()
    run.assert_sound()
    assert len([line for line in run.lines(WarmStartChecked) if line.over]) == 1
    assert "no checkpoint yet" in run.lines(RunBegan)[1].left
    assert [line.step for line in run.lines(RunBegan)][:4] == [0, 0, 0, 2]


def test_signals_end_a_run_with_what_was_reached(tmp_path: Path) -> None:
    with nothing_left():
        run = Run(tmp_path, steps=40, warm_until=1.0)
        run.hold("imitate")
        with run.life():
            run.comes_to("imitate")
            run.process.send_signal(signal.SIGINT)
            assert run.ended() == 130, "a warm start is not waited for"
        assert run.checkpoints() == []
        for number, code, version in ((signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 4)):
            run.hold(f"step.{version}")
            with run.life():
                run.signal_in(f"step.{version}", number)
                run.release(f"step.{version}")
                assert run.ended() == code
            assert run.lines(RunEnded)[-1].cause == "interrupted"
            step = run.lines(Trained)[-1].step
            assert step == run.checkpoints()[-1] == version + 1, "the step is finished and saved, and no other begun"
        run.hold("step.6")
        with run.life():
            run.signal_in("step.6", signal.SIGINT)
            run.process.send_signal(signal.SIGINT)
            assert run.ended() == 130, "although the step does not end"
    assert_sound(run.run, steps=6, batch=BATCH, age_max=1)
