"""`tangram train`: its command line, its summary, and how it ends, with a scripted pipeline."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.cli.training_config import load_config
from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.runs.checkpoints import NoCheckpoint
from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    Evaluated,
    Noticed,
    RunBegan,
    RunEnded,
    TaskStep,
    Trained,
    WarmStartChecked,
)
from tangram.rl.runs.metrics_log import MetricsLog
from tangram.rl.runs.run_folder import open_run

Cli = Callable[..., Any]

CONFIG = """
seed = 3
[training]
steps = 4
batch = 2
[groups]
size = 2
[[tasks]]
name = "frozenlake"
warm_until = 0.5
[[tasks]]
name = "chain"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def step(number: int, reward: float) -> Trained:
    task = TaskStep(groups=1, trajectories=2, reward=reward, turns=1.0, tokens=9.0, staleness_mean=0.0, staleness_max=0)
    return Trained(
        at_s=10.0 + number,
        step=number,
        step_s=1.0,
        wait_s=0.25,
        train_s=0.5,
        push_s=0.1,
        metrics={"loss": 0.5, "tokens": 36.0},
        tasks={"frozenlake": task, "chain": task},
        staleness=(3, 1),
        dropped={"stale": 1} if number == 2 else {},
        dropped_so_far={"stale": 1} if number >= 2 else {},
    )


def checkpoint_of(folder: Path) -> str:
    """Relative to the root, as a pipeline reports it."""
    return str(folder.absolute() / "checkpoints" / "00000004")


LEFT = "from step 2, version 2: 3 groups wait; checkpoint 00000003 is damaged"


class Scripted:
    """A scripted pipeline, in a real folder with a real log."""

    def __init__(self) -> None:
        self.settings: TrainSettings | None = None
        self.resumed = False
        self.refuse: Exception | None = None
        self.refuse_begun: Exception | None = None
        self.fail: Exception | None = None
        self.cause = "steps"

    async def __call__(
        self,
        settings: TrainSettings,
        folder: Path,
        *,
        resume: bool = False,
        modules: tuple[str, ...] = (),
        on_line: Callable[[AnyMetricsLine], None] | None = None,
        client: object = None,
        progress: Callable[[float, str], None] | None = None,
        observer: object = None,
    ) -> RunEnded:
        self.settings, self.resumed = settings, resume
        with open_run(folder, settings, resume=resume), MetricsLog(folder, resume=resume) as log:

            def both(line: AnyMetricsLine) -> None:
                log.append(line)
                assert on_line is not None
                on_line(line)

            assert progress is not None
            progress(0.5, "starting")
            if self.refuse is not None:
                raise self.refuse
            first = 2 if resume else 0
            came = "00000002" if resume else ""
            both(
                RunBegan(
                    at_s=0.0,
                    began_at=0.0,
                    step=first,
                    mode="async",
                    alpha=1,
                    resumed_from=came,
                    left=LEFT if resume else "",
                )
            )
            if self.refuse_begun is not None:
                both(RunEnded(at_s=1.0, step=0, cause=str(self.refuse_begun)))
                raise self.refuse_begun
            if not resume:
                both(WarmStartChecked(at_s=5.0, step=30, loss=0.2, scores={"frozenlake": 0.4}, over=True))
                both(Evaluated(at_s=6.0, step=0, seconds=1.0, scores={"frozenlake": 0.4, "chain": 0.1}))
            for number in range(first + 1, settings.training.steps + 1):
                both(step(number, number / 10))
                await asyncio.sleep(0)
            if self.fail is not None:
                raise self.fail
            both(Noticed(at_s=15.0, kind="engine", text="engine-0 was lost and is back"))
            both(Evaluated(at_s=16.0, step=4, seconds=1.0, scores={"frozenlake": 0.9, "chain": 0.75}))
            over = RunEnded(
                at_s=17.0, step=4, cause=self.cause, checkpoint=checkpoint_of(folder), dropped_so_far={"stale": 1}
            )
            both(over)
            return over


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr("tangram.rl.train.pipeline.train", scripted)
    return scripted


# ---- a run ------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_what_was_reached_and_where_everything_is(cli: Cli, config: Path, pipeline: Scripted) -> None:
    done = cli("train", config)
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert ["frozenlake", "0.400", "0.400", "0.900", "0.400", "8"] in rows
    assert ["chain", "0.100", "0.750", "0.400", "8"] in rows
    assert "async, α 1: 4 steps in 17 s" in done.out
    assert "16 samples, at most 1 version old; groups that were dropped: 1 stale" in done.out
    assert "noticed: engine: engine-0 was lost and is back" in done.out
    assert "report:      build/runs/small/report.html" in done.out and Path("build/runs/small/report.html").is_file()
    assert "tensorboard --logdir build/runs/small/tensorboard" in done.out
    assert "tangram rl eval build/runs/small" in done.out
    assert "checkpoint:  build/runs/small/checkpoints/00000004" in done.out, "the path is relative to the root"
    assert "over: step 4 of 4 (all are made)" in done.err and "; 17 s so far" in done.err, "as long as the summary says"


def test_the_effects_of_a_resumption_are_printed(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert "resumed" not in cli("train", config, "--steps", 3).out
    done = cli("train", config, "--resume")
    assert f"noticed after 0 s: resumed: {LEFT}\n" in done.err and f"noticed: resumed: {LEFT}\n" in done.out
    quiet = cli("train", config, "--steps", 5, "--resume", "--quiet")
    assert "resumed" not in quiet.err and f"noticed: resumed: {LEFT}\n" in quiet.out


def test_one_is_not_several(cli: Cli, config: Path, pipeline: Scripted) -> None:
    pipeline.fail = ManagerError("no more")
    assert "async, α 1: 1 step in 11 s" in cli("train", config, "--steps", 1).out


def test_json_prints_the_summary_alone(cli: Cli, config: Path, pipeline: Scripted) -> None:
    document = cli("train", config, "--json").json
    assert (document["steps"], document["cause"], document["exit_code"], document["samples"]) == (4, "steps", 0, 16)
    assert (
        document["tasks"]["chain"]["first_evaluation"] == 0.1 and document["tasks"]["chain"]["last_evaluation"] == 0.75
    )
    assert document["report"] and document["staleness_max"] == 1


def test_without_a_terminal_the_view_is_a_line(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert "over: step 4 of 4 (all are made); reward frozenlake 0.400" in cli("train", config).err
    assert "step 4" not in cli("train", config, "--fresh", "--quiet").err


def test_the_report_goes_where_it_is_wanted(cli: Cli, config: Path, pipeline: Scripted, tmp_path: Path) -> None:
    assert cli("train", config, "--report", tmp_path / "deep" / "mine.html").code == 0
    assert (tmp_path / "deep" / "mine.html").is_file()
    assert not Path("build/runs/small/report.html").exists()


def test_options_override_the_config(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert cli("train", config, "--seed", 9, "--steps", 3, "--set", "tasks.chain.weight=2.5", "--out", "mine").code == 0
    settings = pipeline.settings
    assert settings is not None and (settings.seed, settings.training.steps) == (9, 3)
    assert settings.task("chain").weight == 2.5 and Path("mine/settings.json").is_file()


# ---- the folder -------------------------------------------------------------------------------------------------


def test_a_run_that_is_there_is_not_overwritten(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert cli("train", config, "--steps", 2).code == 0
    before = Path("build/runs/small/metrics.jsonl").read_bytes()
    wrong = cli("train", config, "--seed", 5)
    assert wrong.code == 2 and Path("build/runs/small/metrics.jsonl").read_bytes() == before
    assert f"tangram train {config} --seed 5 --resume" in wrong.err
    assert "--out RUN" in wrong.err and "--fresh" in wrong.err


def test_resume_goes_on_and_counts_all(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert cli("train", config, "--steps", 3).code == 0
    document = cli("train", config, "--resume", "--json").json
    assert pipeline.resumed and document["steps"] == 4
    assert document["samples"] == 16, "the third step was lost and done again"
    assert document["tasks"]["frozenlake"]["warm"] == 0.4


def test_there_must_be_something_to_resume(cli: Cli, config: Path, pipeline: Scripted) -> None:
    wrong = cli("train", config, "--resume")
    assert wrong.code == 2 and "start one without --resume" in wrong.err and pipeline.settings is None
    assert cli("train", config, "--resume", "--fresh").code == 2


def test_a_folder_that_cannot_be_written_is_named_before_anything_starts(
    cli: Cli, config: Path, pipeline: Scripted, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    for out, why in (("file", "it is a file"), ("file/below", "Not a directory"), ("/proc/run", "No such file")):
        for how in ((), ("--fresh",)):
            wrong = cli("train", config, "--out", out, *how)
            assert wrong.code == 2 and f"--out: expected a folder that can be written ({why}" in wrong.err
    assert pipeline.settings is None and (tmp_path / "file").read_text() == "mine"


def test_a_report_that_cannot_be_written_costs_no_run(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert cli("train", config).code == 0
    assert "it is a folder" in cli("train", config, "--fresh", "--report", config.parent).err
    assert Path("build/runs/small/metrics.jsonl").exists()


def test_fresh_deletes_the_run_and_nothing_else(cli: Cli, config: Path, pipeline: Scripted) -> None:
    folder = Path("build/runs/small")
    assert cli("train", config).code == 0
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "00000004").mkdir(parents=True)
    assert cli("train", config, "--fresh", "--json").json["samples"] == 16
    assert (folder / "notes.txt").read_text() == "mine" and not (folder / "checkpoints" / "00000004").exists()


def test_foreign_folders_with_our_names_are_left_alone(cli: Cli, config: Path, pipeline: Scripted) -> None:
    Path("mine/checkpoints/best").mkdir(parents=True)
    for how in ((), ("--fresh",)):
        wrong = cli("train", config, "--out", "mine", *how)
        assert wrong.code == 2 and "move them away" in wrong.err and "--resume" not in wrong.err
    assert [path.name for path in Path("mine").rglob("*")] == ["checkpoints", "best"]


def test_a_run_with_a_live_trainer_is_not_deleted(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert cli("train", config).code == 0
    with open_run(Path("build/runs/small"), load_config(TrainSettings, config), resume=True):
        wrong = cli("train", config, "--fresh")
    assert wrong.code == 2 and "no other process trains in" in wrong.err
    assert Path("build/runs/small/metrics.jsonl").exists()


# ---- how it ends ------------------------------------------------------------------------------------------------


def test_a_run_that_failed_ends_with_1_and_its_cause(cli: Cli, config: Path, pipeline: Scripted) -> None:
    pipeline.fail = ManagerError("the trainer died 4 times in a row")
    failed = cli("train", config)
    assert failed.code == 1 and "the run failed: the trainer died 4 times in a row" in failed.err
    assert "frozenlake" in failed.out and f"resume it: tangram train {config} --resume" in failed.err


def test_a_damaged_line_of_metrics_costs_the_summary_alone(cli: Cli, config: Path, pipeline: Scripted) -> None:
    assert cli("train", config).code == 0
    metrics = Path("build/runs/small/metrics.jsonl")
    metrics.write_bytes(metrics.read_bytes().replace(b"{", b"damaged", 1))
    resumed = cli("train", config, "--resume", "--json")
    assert resumed.code == 0 and "tangram: no summary: build/runs/small/metrics.jsonl:1: expected" in resumed.err
    assert resumed.json == {"folder": "build/runs/small", "cause": "steps", "exit_code": 0, "report": ""}


def test_a_run_without_a_complete_checkpoint_cannot_be_resumed(cli: Cli, config: Path, pipeline: Scripted) -> None:
    pipeline.fail = NoCheckpoint(["checkpoint 00000004 is damaged"])
    failed = cli("train", config)
    assert failed.code == 1 and "resume it" not in failed.err
    assert "there is no other: start again with --fresh, or with other weights by policy.checkpoint" in failed.err


def test_an_end_that_was_not_meant_is_a_failure(cli: Cli, config: Path, pipeline: Scripted) -> None:
    pipeline.cause = "3 stalls in a row"
    failed = cli("train", config, "--json")
    assert failed.code == 1 and failed.json["cause"] == "3 stalls in a row" and "3 stalls in a row" in failed.err


@pytest.mark.parametrize(("error", "again"), [(InvalidInput("batch", "nan", "groups that can be trained on"), True),
                         (InvalidConfig("engine a", "one for evaluation", "one that trains"), False)])  # fmt: skip
def test_what_is_wrong_with_a_run_that_began_is_a_failure_of_it(
    cli: Cli, config: Path, pipeline: Scripted, error: InvalidInput, again: bool
) -> None:
    """What is wrong with its config, the same command would find wrong again."""
    pipeline.fail = error
    failed = cli("train", config)
    assert failed.code == 1 and f"the run failed: {error}" in failed.err
    assert (f"resume it: tangram train {config} --resume" in failed.err) is again
    assert "4 steps in" in failed.out and Path("build/runs/small/report.html").is_file()


def test_settings_that_cannot_be_trained_with_end_with_2_and_leave_nothing(
    cli: Cli, config: Path, pipeline: Scripted
) -> None:
    pipeline.refuse = InvalidConfig("sampling.top_k", 5, "0")
    wrong = cli("train", config)
    assert wrong.code == 2 and "sampling.top_k" in wrong.err and "so far" not in wrong.err
    assert not Path("build/runs/small").exists()
    pipeline.refuse, pipeline.refuse_begun = None, InvalidConfig("task chain", "towards", "words")
    wrong = cli("train", config)
    assert wrong.code == 2 and "task chain" in wrong.err and not Path("build/runs/small").exists()
    pipeline.refuse_begun = None
    assert cli("train", config).code == 0, "repaired, it begins"
    pipeline.refuse = InvalidConfig("seed", 5, "4")
    assert cli("train", config, "--resume").code == 2
    assert Path("build/runs/small/metrics.jsonl").stat().st_size, "what there was before stays"


WAITS = """
import asyncio, sys
import tangram.rl.train.pipeline as pipeline
from tangram.rl.runs.metrics_log import MetricsLog
from tangram.rl.runs.run_folder import open_run
from tangram.rl.runs.metrics_lines import RunBegan, RunEnded

async def train(settings, folder, *, resume=False, modules=(), on_line=None, client=None, progress=None, observer=None):
    with open_run(folder, settings, resume=resume), MetricsLog(folder, resume=resume) as log:
        began = RunBegan(at_s=0.0, began_at=0.0, mode="async", alpha=1, resumed_from={resumed_from!r})
        log.append(began)
        on_line(began)
        print("ready", flush=True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if {patient}:
                print("saving", flush=True)
                await asyncio.Event().wait()
            log.append(RunEnded(at_s=1.0, step=0, cause="interrupted", checkpoint="there"))
            raise

pipeline.train = train
from tangram.cli import main
sys.argv = ["tangram", "train", {config!r}]
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_prints_how_to_resume(config: Path, number: int, code: int) -> None:
    out, err, ended = _signalled(config, [number], patient=False)
    assert ended == code
    assert f"resume it: tangram train {config} --resume" in err
    assert "checkpoint:  there" in out and "Traceback" not in err
    assert "an unfinished warm start is not saved" in err


def test_after_a_signal_the_current_step_finishes_with_a_notice(config: Path) -> None:
    _, err, _ = _signalled(config, [signal.SIGINT], patient=False, resumed_from="a checkpoint")
    assert "the current step is finished and saved; a second signal stops it at once" in err


def test_a_second_signal_does_not_wait(config: Path) -> None:
    _, err, ended = _signalled(config, [signal.SIGINT, signal.SIGINT], patient=True)
    assert ended == 130 and "Traceback" not in err


def _signalled(config: Path, numbers: list[int], *, patient: bool, resumed_from: str = "") -> tuple[str, str, int]:
    program = textwrap.dedent(WAITS.format(config=str(config), patient=patient, resumed_from=resumed_from))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=config.parent, env=environment,
    )  # fmt: skip
    with running:
        try:
            assert running.stdout is not None
            waited = []
            for number, expected in zip(numbers, ("ready", "saving"), strict=False):
                line = running.stdout.readline()
                assert line.strip() == expected, running.communicate(timeout=60)
                waited.append(line)
                running.send_signal(number)
            out, err = running.communicate(timeout=120)
        finally:
            running.kill()
    return "".join(waited) + out, err, running.returncode


# ---- --explain and --set ----------------------------------------------------------------------------------------


def test_explain_prints_the_plan_and_starts_nothing(cli: Cli, config: Path, pipeline: Scripted) -> None:
    result = cli("train", config, "--explain", "--set", "training.mode=one-off")
    assert result.code == 0 and pipeline.settings is None and not Path("build").exists()
    assert "one-off, α 1: the next batch is played by the old weights" in result.out
    assert "4; each of 2 groups of 2, 4 trajectories; at most 4 groups" in result.out
    assert "until frozenlake has 0.5" in result.out
    assert "nothing: all tasks are played and rewarded inside this process" in result.out
    assert "no preference: the least loaded engine" in result.out
    document = cli("train", config, "--explain", "--json").json
    assert document["mode"] == "async" and document["binding"]["tasks"][0]["task"] == "frozenlake"


def test_explain_prints_that_alpha_0_alternates_rollout_and_training(cli: Cli, config: Path) -> None:
    for mode in ("start-bound", "async"):
        output = cli(
            "train", config, "--explain", "--set", f"training.mode={mode}", "--set", "training.staleness=0"
        ).out
        assert f"{mode}, α 0: a batch is played, each trajectory at its own pace, then trained on" in output


def test_explain_refuses_what_would_be_refused(cli: Cli, config: Path) -> None:
    wrong = cli("train", config, "--explain", "--set", "sampling.top_k=3")
    assert wrong.code == 2 and f"{config}: sampling.top_k: expected 0 for training" in wrong.err


def test_a_policy_that_lacks_words_of_the_tasks_is_refused_before_anything_starts(
    cli: Cli, config: Path, pipeline: Scripted, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")
    from tangram.rl.environments.registry import words_of

    policy = tmp_path / "policy"
    policy.mkdir()
    model = {"model_type": "llama", "vocab_size": 40, "hidden_size": 8, "intermediate_size": 8,
             "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 256}  # fmt: skip
    (policy / "config.json").write_text(json.dumps(model))
    (policy / "words.json").write_text(json.dumps(words_of(["frozenlake"])))
    lacks = sorted({*words_of(["chain"])} - {*words_of(["frozenlake"])})
    for more in (["--explain"], []):
        wrong = cli("train", config, "--set", f"policy.checkpoint={policy}", *more)
        assert wrong.code == 2 and "policy.checkpoint: expected a policy that knows all words of the tasks" in wrong.err
        assert f"it lacks {', '.join(lacks[:8])}" in wrong.err
        assert pipeline.settings is None and not Path("build/runs/small").exists()
    config.write_text(CONFIG.replace('[[tasks]]\nname = "chain"\n', ""))
    assert cli("train", config, "--set", f"policy.checkpoint={policy}", "--explain").code == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("warm_start.agent=techer", "warm_start.agent: expected an agent of task frozenlake, which has a warm start"),
        ("groups.groups_extra=2", "groups.groups_extra: expected 0 for training"),
    ],
)
def test_what_training_could_not_do_is_refused_before_anything_starts(
    cli: Cli, config: Path, pipeline: Scripted, change: str, expected: str
) -> None:
    for more in (["--explain"], []):
        wrong = cli("train", config, "--set", change, *more)
        assert wrong.code == 2 and expected in wrong.err
        assert pipeline.settings is None and not Path("build/runs/small").exists()


def test_explain_prints_external_effects(cli: Cli, config: Path) -> None:
    config.write_text(CONFIG + '[[tasks]]\nname = "codefix"\n')
    result = cli("train", config, "--explain", "--set", "resources.backend=process")
    assert "process; actions of codefix; rewards of codefix by command" in result.out


def test_a_loss_that_is_not_there_is_refused_before_anything_starts(cli: Cli, config: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")
    wrong = cli("train", config, "--explain", "--set", "objective.loss=json:nothing")
    assert wrong.code == 2 and "objective.loss: expected `module:name` of a function" in wrong.err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("training.stalness=2", "did you mean staleness?"),
        ("trainig.staleness=2", "did you mean training?"),
        ("staleness=2", "it is a key of [training]"),
        ("training.staleness=two", "a whole number, at least 0"),
        ("training.staleness=[1", "a value as TOML has it"),
        ("training.staleness=", "a value as TOML has it"),
        ("training.staleness.x=1", "a whole number, at least 0"),
        ("training", "key=value"),
        (".x=1", "key=value"),
        ("tasks.frozenlak.weight=2", "did you mean frozenlake?"),
        ("tasks.2.weight=2", "0 to 1"),
        ("engines.1.count=2", "0: there is one"),
        ("engines[0].cuont=2", "did you mean count?"),
        ("teachers.0.name=x", "there is no [[teachers]] in it"),
        ("objective.kind=distill", "tasks[0].reward.kind"),
        ("tasks.chain.wieght=2", "did you mean weight?"),
        ("tasks=3", "tasks.NAME.KEY=VALUE"),
        ("objective.correction=none", "in mode async samples are older"),
        ("training.batch_min=2", "both batch_min and batch_wait_s"),
        ("policy.width=63", "policy.heads: expected a divisor of width, which is 63"),
        ("policy.heads=64", "an even part of width, which is 64"),
        ("policy.heads=5", "a divisor of width, which is 64"),
        ("engines.0.context_max=2000000", "at most 1048576"),
    ],
)
def test_an_error_in_a_change_names_the_change(cli: Cli, config: Path, change: str, expected: str) -> None:
    wrong = cli("train", config, "--set", "training.steps=7", "--set", change, "--explain")
    assert wrong.code == 2 and f"--set {change}" in wrong.err and expected in wrong.err


@pytest.mark.parametrize(
    ("key", "value"),
    [("sampling.temperature", 0.0), ("sampling.top_k", 3), ("sampling.top_p", 0.5), ("groups.size", 1)],
)
def test_a_task_that_can_be_played_but_not_trained_on_is_reported_with_the_file_and_its_table(
    cli: Cli, config: Path, pipeline: Scripted, key: str, value: float
) -> None:
    for how in ((), ("--explain",)):
        wrong = cli("train", config, "--set", f"{key}={value}", *how)
        assert wrong.code == 2 and f"{config}: {key}: expected " in wrong.err
    assert pipeline.settings is None and not Path("build").exists()


def test_an_error_in_the_file_names_the_file(cli: Cli, config: Path) -> None:
    config.write_text(CONFIG.replace("batch = 2", "bacth = 2"))
    wrong = cli("train", config, "--set", "training.steps=7", "--explain")
    assert wrong.code == 2 and f"{config}:5" in wrong.err and "did you mean batch?" in wrong.err
    config.write_text(CONFIG.replace('"chain"', '"chian"'))
    wrong = cli("train", config, "--explain")
    assert wrong.code == 2 and str(config) in wrong.err and "chain" in wrong.err
    assert cli("train", config.parent / "none.toml").code == 2
    assert "got 'a folder'" in cli("train", config.parent).err
    config.write_text("[training\n")
    assert f"{config}:1" in cli("train", config, "--set", "seed=1").err
    config.write_bytes(b"run = '\xff'\n")
    assert "UTF-8" in cli("train", config).err


def test_changes_are_values_of_toml_or_plain_words(config: Path) -> None:
    changes = [
        "training.mode=start-bound",
        'run="two words"',
        "tasks.0.options.size=4",
        "tasks.chain.reward.kind=environment",
        "tasks.chain.options.names=['a', \"b\", 1.5, true]",
        "engines[0].count=2",
        "training.seconds_max = 1e3",
        "policy.checkpoint=weights",
        "training.batch_min=1",
        "training.batch_wait_s=2",
    ]
    settings = load_config(TrainSettings, config, changes)
    assert (settings.training.mode, settings.run, settings.training.seconds_max) == ("start-bound", "two words", 1000.0)
    assert settings.task("frozenlake").options == {"size": 4}
    assert settings.task("chain").options == {"names": ["a", "b", 1.5, True]}
    assert settings.engines[0].count == 2 and settings.training.batch_wait_s == 2.0
    assert settings.policy.checkpoint == str(config.parent / "weights"), "as in the file: from its folder"


def test_a_change_may_give_what_the_file_lacks(config: Path) -> None:
    config.write_text(CONFIG.replace("batch = 2", "batch = 2\nbatch_min = 1"))
    assert load_config(TrainSettings, config, ["training.batch_wait_s=5"]).training.batch_min == 1


def test_the_paths_of_teachers_start_at_the_folder_of_the_file(config: Path) -> None:
    reward = 'reward = { kind = "teacher", service = "wise" }\n'
    config.write_text(CONFIG + reward + '[[teachers]]\nname = "wise"\ncheckpoint = "wise/weights"\n')
    assert load_config(TrainSettings, config).teachers[0].checkpoint == str(config.parent / "wise" / "weights")


ASKS = 'reward = { kind = "teacher", service = "wise" }\n'
WISE = '[[teachers]]\nname = "wise"\ncheckpoint = "x"\n'
LAKE = CONFIG.replace("warm_until = 0.5\n", ASKS)
DISTILL = LAKE + ASKS + '[objective]\nkind = "distill"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LAKE + '[objective]\nkind = "distill"\n' + WISE, 'tasks[1].reward.kind: expected "teacher"'),
        (DISTILL, "tasks[0].reward.service: expected one of the teachers (there are none: [[teachers]]"),
        (DISTILL + WISE.replace("wise", "wist"), "tasks[0].reward.service: expected one of the teachers (wist)"),
        (CONFIG + WISE, "teachers[0].name: expected one that a task asks"),
        (DISTILL + WISE + WISE, "teachers[1].name: expected each name once"),
        (CONFIG + '[[engines]]\n[[engines]]\nkind = "openai"\nurl = "http://a"\n', "engines[1].kind: expected process"),
    ],
)
def test_the_teacher_of_each_task_is_checked_before_anything_starts(
    cli: Cli, config: Path, pipeline: Scripted, text: str, expected: str
) -> None:
    config.write_text(text)
    wrong = cli("train", config)
    assert wrong.code == 2 and str(config) in wrong.err and expected in wrong.err, wrong.err
    assert pipeline.settings is None


@pytest.mark.parametrize("text", [DISTILL + WISE, LAKE + WISE, DISTILL + '[resources]\nurl = "http://a"\n'])
def test_teachers_may_cover_some_tasks_all_tasks_or_further_tasks(config: Path, text: str) -> None:
    config.write_text(text)
    assert load_config(TrainSettings, config).task("frozenlake").reward.kind == "teacher"


def test_a_rollout_takes_the_config_of_a_training_run(cli: Cli, config: Path) -> None:
    result = cli("rl", "rollout", config, "--explain")
    assert result.code == 0 and "frozenlake" in result.out
    config.write_text(CONFIG.replace("batch = 2", "bacth = 2"))
    assert "did you mean batch?" in cli("rl", "rollout", config, "--explain").err
