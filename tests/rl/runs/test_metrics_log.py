"""The metrics log: every line is complete, and lines of abandoned weights do not count."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tangram.errors import InvalidConfig, InvalidTrace, ManagerError
from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    EngineUse,
    Evaluated,
    Noticed,
    PoolUse,
    RunBegan,
    RunEnded,
    TaskStep,
    Trained,
    WarmStartChecked,
)
from tangram.rl.runs.metrics_log import MetricsLog, last_logged, read_metrics, scalars
from tangram.rl.runs.run_folder import METRICS, TENSORBOARD

if os.environ.get("CI") != "true":
    pytest.importorskip("tensorboardX")


def began(step: int = 0, resumed_from: str = "") -> RunBegan:
    return RunBegan(at_s=0.0, began_at=1.0, step=step, mode="async", alpha=1, resumed_from=resumed_from)


def trained(step: int, reward: float = 0.5, **changes: object) -> Trained:
    values: dict[str, object] = {
        "at_s": float(step),
        "step": step,
        "step_s": 2.0,
        "wait_s": 0.5,
        "train_s": 1.0,
        "push_s": 0.1,
        "metrics": {"loss": 0.25, "tokens": 640.0, "trajectories": 32.0, "tokens_per_s": 900.0},
        "tasks": {
            "chain": TaskStep(
                groups=4, trajectories=32, reward=reward, turns=1.0, tokens=20.0, staleness_mean=0.25, staleness_max=1
            )
        },
        "staleness": (24, 8),
    }
    return Trained(**(values | changes))  # type: ignore[arg-type]


def evaluated(step: int) -> Evaluated:
    return Evaluated(at_s=1.0, step=step, seconds=1.0, scores={"chain": 0.4})


def warmed(step: int) -> WarmStartChecked:
    return WarmStartChecked(at_s=0.0, step=step, loss=1.0, scores={"chain": 0.2})


def written(folder: Path, *lines: AnyMetricsLine, resume: bool = False) -> Path:
    with MetricsLog(folder, resume=resume) as log:
        for line in lines:
            log.append(line)
        assert not log.tensorboard_error
    return folder / METRICS


def steps(path: Path) -> list[tuple[str, int]]:
    return [(type(line).__name__, line.step) for line in read_metrics(path) if not isinstance(line, Noticed)]


# ---- what is written is there -----------------------------------------------------------------------------------


def test_metrics_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    lines: list[AnyMetricsLine] = [
        began(),
        warmed(10),
        trained(
            1,
            dropped={"stale": 2},
            pools=(PoolUse(name="cpu@local", total=2.0, actions=3, act_mean_s=0.5),),
            engines=(EngineUse(name="engine-0", version=1, busy_share=0.5, prefill_tokens=1, decode_tokens=2),),
        ),
        evaluated(1),
        Noticed(at_s=2.0, kind="stall", text="17 trajectories wait for pool `search`"),
        RunEnded(at_s=3.0, step=1, cause="steps", checkpoint="checkpoints/1"),
    ]
    assert read_metrics(written(tmp_path, *lines)) == lines


def test_numbers_that_are_not_finite_are_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, trained(1, metrics={"loss": math.nan, "gradient_norm": math.inf, "entropy": 1.0}))
    assert json.loads(path.read_text())["metrics"]["loss"] == {"$number": "nan"}
    (line,) = read_metrics(path)
    assert isinstance(line, Trained)
    assert math.isnan(line.metrics["loss"]) and line.metrics["gradient_norm"] == math.inf
    assert line.metrics["entropy"] == 1.0


def test_text_with_half_a_character_is_written(tmp_path: Path) -> None:
    (line,) = read_metrics(written(tmp_path, Noticed(at_s=0.0, kind="stall", text="broken \ud800 text")))
    assert isinstance(line, Noticed) and line.text == "broken \\ud800 text"


def test_a_line_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, resume=False) as log:
        log.append(began())
        assert steps(log.path) == [("RunBegan", 0)]


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with MetricsLog(tmp_path, resume=False) as log:
        log.append(began())

        def full(file: int, data: memoryview) -> int:
            if len(data) > 20:
                return real(file, data[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        whole = log.path.read_bytes()
        monkeypatch.setattr(os, "write", lambda file, data: full(file, data) if len(data) > 5 else real(file, data))
        with pytest.raises(ManagerError, match="No space left"):
            log.append(Noticed(at_s=0.0, kind="stall", text="x" * 3))
        monkeypatch.undo()
        assert log.path.read_bytes() == whole
        log.append(trained(1))
    assert steps(log.path) == [("RunBegan", 0), ("Trained", 1)]


def test_a_new_run_does_not_write_into_an_old_one(tmp_path: Path) -> None:
    path = written(tmp_path, began())
    before = path.read_bytes()
    with pytest.raises(InvalidConfig, match="resume it"):
        MetricsLog(tmp_path, resume=False)
    assert path.read_bytes() == before


@pytest.mark.parametrize("torn", [b"", b'{"type":"Trai', b"x" * 200_000])
def test_what_a_killed_process_left_of_a_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = written(tmp_path, began(), trained(1))
    with path.open("ab") as file:
        file.write(torn)
    assert steps(path) == [("RunBegan", 0), ("Trained", 1)]
    written(tmp_path, began(1, "checkpoints/1"), trained(2), resume=True)
    assert steps(path) == [("RunBegan", 0), ("Trained", 1), ("RunBegan", 1), ("Trained", 2)]


def test_a_file_of_one_torn_line_starts_over(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"type":"Beg')
    assert steps(written(tmp_path, began(), resume=True)) == [("RunBegan", 0)]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, began())
    with path.open("ab") as file:
        file.write(b'{"type":"Nonsense"}\n')
    with pytest.raises(InvalidTrace, match=r"metrics\.jsonl:2"):
        read_metrics(path)
    with pytest.raises(InvalidConfig, match="can be read"):
        read_metrics(tmp_path / "none.jsonl")


# ---- which lines count ------------------------------------------------------------------------------------------


def test_steps_after_the_checkpoint_that_a_run_went_on_from_do_not_count(tmp_path: Path) -> None:
    written(tmp_path, began(), warmed(10), trained(1), evaluated(1), trained(2), evaluated(2), trained(3))
    path = written(tmp_path, began(1, "checkpoints/1"), trained(2, 0.9), resume=True)
    assert steps(path) == [
        ("RunBegan", 0),
        ("WarmStartChecked", 10),
        ("Trained", 1),
        ("Evaluated", 1),
        ("RunBegan", 1),
        ("Trained", 2),
    ]
    last = read_metrics(path)[-1]
    assert isinstance(last, Trained) and last.tasks["chain"].reward == 0.9


def test_a_run_that_went_back_by_itself_forgets_what_it_lost(tmp_path: Path) -> None:
    lost = (trained(2), evaluated(2), trained(3))
    path = written(
        tmp_path, began(), trained(1), *lost, Noticed(at_s=0.0, kind="rollback", text="to 1"), trained(2, 0.9)
    )
    assert steps(path) == [("RunBegan", 0), ("Trained", 1), ("Trained", 2)]


def test_a_run_that_went_back_and_made_no_step_since_has_lost_what_it_lost(tmp_path: Path) -> None:
    back = Noticed(at_s=0.0, kind="rollback", text="to 1", step=1)
    path = written(tmp_path, began(), trained(1), evaluated(1), trained(2), evaluated(2), trained(3), back)
    assert steps(path) == [("RunBegan", 0), ("Trained", 1), ("Evaluated", 1)]


def test_an_evaluation_that_comes_late_counts(tmp_path: Path) -> None:
    path = written(tmp_path, began(), trained(1), trained(2), evaluated(1), trained(3))
    assert ("Evaluated", 1) in steps(path) and len(steps(path)) == 5


def test_the_last_logged_time_and_evaluation_of_a_resumed_run(tmp_path: Path) -> None:
    over = RunEnded(at_s=99.0, step=3, cause="killed")
    late = msgspec.structs.replace(evaluated(2), at_s=50.0)
    written(tmp_path, began(), trained(1), evaluated(1), trained(2), trained(3), late, over)
    path = tmp_path / METRICS
    assert last_logged(path, 1) == (evaluated(1).at_s, 1)
    assert last_logged(path, 2) == (50.0, 2), "an evaluation that came late counts, the steps that are lost do not"
    assert last_logged(path, 3) == (99.0, 2)
    with path.open("ab") as file:
        file.write(b"damaged\n")
    assert last_logged(path, 3) == (0.0, -1)


def test_a_warm_start_that_is_done_again_counts_once(tmp_path: Path) -> None:
    written(tmp_path, began(), warmed(10), warmed(20))
    assert steps(written(tmp_path, began(), warmed(10), resume=True)) == [
        ("RunBegan", 0),
        ("RunBegan", 0),
        ("WarmStartChecked", 10),
    ]


# ---- TensorBoard ------------------------------------------------------------------------------------------------


def events(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """As TensorBoard reads them: what comes after a start forgets what it has of that step and later ones."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    rows: list[tuple[int, dict[str, float]]] = []
    for path in sorted((folder / TENSORBOARD).iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                rows = [(step, values) for step, values in rows if step < event.step]
            if event.summary.value:
                rows.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
    yield from rows


def test_tensorboard_shows_the_scalars_of_every_step(tmp_path: Path) -> None:
    pools = (PoolUse(name="cpu@local", total=2.0, actions=3, act_mean_s=0.5, act_p99_s=1.5, held_unit_s=1.0),)
    engines = (EngineUse(name="engine-0", version=1, busy_share=0.75, prefill_tokens=1, decode_tokens=2),)
    written(tmp_path, began(), trained(1, pools=pools, engines=engines), evaluated(1))
    (_, step), (_, evaluation) = events(tmp_path)
    expected = {
        "reward/chain": 0.5,
        "loss/loss": 0.25,
        "staleness/mean": 0.25,
        "staleness/max": 1,
        "time/wait_s": 0.5,
        "time/train_s": 1.0,
        "throughput/trajectories_per_s": 16.0,
        "throughput/tokens_per_s": 320.0,
        "act/cpu@local": 0.5,
        "utilisation/cpu@local": 0.25,
        "engine/engine-0": 0.75,
    }
    assert {tag: step[tag] for tag in expected} == expected
    assert evaluation == {"eval/chain": pytest.approx(0.4)}
    assert "loss/tokens" not in step


def test_tensorboard_events_survive_the_kill_of_their_process(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, resume=False) as log:
        for step in (1, 2, 3):
            log.append(trained(step))
            assert [number for number, _ in events(tmp_path)] == list(range(1, step + 1))


def test_tensorboard_forgets_the_steps_of_lost_weights(tmp_path: Path) -> None:
    written(tmp_path, began(), trained(1, 0.1), trained(2, 0.2), trained(3, 0.3))
    written(tmp_path, began(1, "checkpoints/1"), trained(2, 0.75), resume=True)
    shown = [(step, values["reward/chain"]) for step, values in events(tmp_path)]
    assert shown == [(1, pytest.approx(0.1)), (2, 0.75)]


@pytest.mark.parametrize("step", [1, None])
def test_tensorboard_forgets_the_steps_that_a_run_lost_without_ending(tmp_path: Path, step: int | None) -> None:
    back = Noticed(at_s=0.0, kind="rollback", text="to 1", step=step)
    later = () if step is not None else (trained(2, 0.75),)
    written(tmp_path, began(), warmed(10), trained(1, 0.5), trained(2, 0.25), trained(3, 0.125), back, *later)
    shown = [(number, values["reward/chain"]) for number, values in events(tmp_path) if "reward/chain" in values]
    assert shown == [(1, 0.5), *((2, 0.75) for _ in later)]
    assert [number for number, values in events(tmp_path) if "warm/loss" in values] == [10], "it is not lost with them"


def test_events_are_written_without_importing_pytorch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tangram.rl.runs.metrics_log import MetricsLog\n"
        "with MetricsLog(Path(sys.argv[1]), resume=False) as log: print(repr(log.tensorboard_error))\n"
        "print([name for name in ('torch', 'numpy', 'tensorboardX') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "''\n[]\n", "")
    assert list((tmp_path / TENSORBOARD).iterdir())


def test_without_tensorboardx_the_rest_is_written_and_the_reason_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX.record_writer", None)
    with MetricsLog(tmp_path, resume=False) as log:
        log.append(trained(1))
        assert "tensorboardX" in log.tensorboard_error and "arl-tangram[rl]" in log.tensorboard_error
    assert steps(log.path) == [("Trained", 1)] and not (tmp_path / TENSORBOARD).exists()


def test_a_folder_that_tensorboard_cannot_have_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / TENSORBOARD).write_text("a file")
    with MetricsLog(tmp_path, resume=False) as log:
        log.append(trained(1))
        assert "cannot be written" in log.tensorboard_error
    assert steps(log.path) == [("Trained", 1)]


def test_a_step_of_nothing_has_no_rates() -> None:
    values = scalars(trained(1, step_s=0.0, staleness=(), tasks={}, metrics={}))
    assert not any(tag.startswith(("throughput/", "staleness/")) for tag in values)
