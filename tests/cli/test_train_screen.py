"""The live view of a training run: what it shows, that it fits and goes on by itself, and that nothing steers it."""

from __future__ import annotations

import io
import re
import threading

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.rl import recordings

from tangram.reports.terminal import sparkline
from tangram.rl.config.rollout_settings import TaskSettings
from tangram.rl.config.training_settings import TrainingSettings, TrainSettings
from tangram.rl.observe.training_progress import TrainingProgress
from tangram.rl.observe.training_status import TRAINING, WARMING
from tangram.rl.runs.metrics_lines import (
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
from tangram.rl.trajectories.trajectory import Stage

NAMES = ("frozenlake", "chain", "codefix")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 120, height: int = 40) -> Console:
    return Console(
        _environ={"TERM": "xterm"},
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        color_system="standard",
        legacy_windows=False,
    )


def log() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def settings(*names: str) -> TrainSettings:
    return TrainSettings(
        tasks=tuple(TaskSettings(name=name) for name in names or NAMES),
        training=TrainingSettings(steps=100, mode="async", staleness=2),
    )


def began(step: int = 0) -> RunBegan:
    return RunBegan(at_s=0.0, began_at=1.0, step=step, mode="async", alpha=2)


def trained(step: int, names: tuple[str, ...] = NAMES, **changes: object) -> Trained:
    one = TaskStep(
        groups=4, trajectories=32, reward=step / 100, turns=1.0, tokens=20.0, staleness_mean=0.25, staleness_max=1
    )
    values: dict[str, object] = {
        "at_s": float(step),
        "step": step,
        "step_s": 2.0,
        "wait_s": 0.5,
        "train_s": 1.0,
        "push_s": 0.1,
        "metrics": {"loss": 0.25, "tokens": 640.0},
        "tasks": dict.fromkeys(names, one),
        "staleness": (72, 24),
        "buffered": 3,
        "in_flight": 12,
        "stages": {"generate": 40, "step": 7},
        "pools": (
            PoolUse(name="cpu@local", total=2.0, actions=9, act_mean_s=0.25, act_p99_s=1.5, held_unit_s=2.0, waiting=4),
        ),
        "engines": (EngineUse(name="engine-0", version=7, busy_share=0.625, prefill_tokens=100, decode_tokens=50),),
    }
    return Trained(**(values | changes))  # type: ignore[arg-type]


def shown(view: TrainingProgress, width: int = 120, height: int = 40) -> list[str]:
    console = terminal(width, height)
    view.console = console
    with console.capture() as captured:
        console.print(view.render())
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()


def running(*lines: object, names: tuple[str, ...] = NAMES) -> TrainingProgress:
    view = TrainingProgress(settings(*names), clock=Clock())
    for line in (began(), *lines):
        view.on_line(line)  # type: ignore[arg-type]
    return view


# ---- what it shows ----------------------------------------------------------------------------------------------


def test_a_run_shows_rewards_scores_rates_staleness_pools_and_engines() -> None:
    view = running(
        *(trained(step) for step in range(1, 9)),
        Evaluated(at_s=1.0, step=1, seconds=1.0, scores={"chain": 0.1}, spread={"chain": 0.02}),
        Evaluated(at_s=8.0, step=8, seconds=1.0, scores={"chain": 0.7}, spread={"chain": 0.03}),
        Noticed(at_s=9.0, kind="stall", text="17 trajectories wait for pool `search`"),
    )
    view.on_begin("chain/0/0.0", "chain")
    view.on_stage("chain/0/0.0", Stage.GENERATE)
    screen = "\n".join(shown(view))
    assert "training" in screen and "step 8 of 100" in screen and "about 3 min 4 s left" in screen
    assert "async, α 2" in screen and "48 trajectories/s, 320 tokens/s" in screen
    assert "wait 25%, train 50%" in screen
    assert re.search(r"staleness +0 █+ 75%  1 █+ 25%", screen)
    assert re.search(r"groups +after step 8: 12 in flight, 3 in the buffer\n", screen)
    assert re.search(r"now +generate 1\n", screen)
    assert "; after step 8: 12 in flight, 3 in the buffer; now in generate 1; " in view.line()
    assert re.search(r"chain +0\.080 +▁+.* +0\.700 ±0\.03, first 0\.100 +2\n", screen)
    assert re.search(r"cpu@local +250 ms +1\.50 s +50% +2 +4", screen)
    assert re.search(r"engine-0 +7 +62%", screen)
    assert "after 9 s: stall: 17 trajectories wait for pool `search`" in screen


def test_before_the_first_step_the_screen_shows_the_current_work() -> None:
    view = TrainingProgress(settings(), clock=Clock())
    view.on_startup(0.5, "making images")
    assert "making images" in "\n".join(shown(view))


def test_after_the_first_step_the_screen_does_not_show_that_it_starts() -> None:
    assert running().status.phase == TRAINING, "no task is warmed up"
    view = TrainingProgress(msgspec.structs.replace(settings(), tasks=(TaskSettings(name="chain", warm_until=0.5),)))
    view.on_startup(0.8, "engines start: engine")
    view.on_line(began())
    assert view.status.phase == WARMING and "engines start" not in "\n".join(shown(view))
    view.on_startup(0.0, "demonstrations of chain")
    assert "demonstrations of chain" in "\n".join(shown(view))
    view.on_line(msgspec.structs.replace(began(), resumed_from="checkpoints/00000000"))
    assert view.status.phase == TRAINING, "its warm start was before"


def test_its_time_is_that_of_the_run() -> None:
    clock = Clock()
    view = TrainingProgress(settings(), clock=clock)
    clock.now += 9.0
    assert view.elapsed_s() == 9.0
    view.on_line(msgspec.structs.replace(began(40), at_s=100.0))
    clock.now += 5.0
    assert view.elapsed_s() == 105.0, "what it took before it was resumed counts, and what it took to start does not"
    view.on_line(RunEnded(at_s=104.0, step=41, cause="steps"))
    clock.now += 5.0
    assert view.elapsed_s() == 104.0, "as the summary has it"


def test_a_run_that_went_back_shows_where_it_is() -> None:
    view = running(trained(5), trained(6))
    view.on_line(Noticed(at_s=9.0, kind="rollback", text="the trainer died", step=4))
    assert "step 4 of 100" in "\n".join(shown(view))


def test_the_warm_start_has_a_bar_of_its_own() -> None:
    view = running(WarmStartChecked(at_s=1.0, step=20, loss=1.25, scores={"chain": 0.3}))
    assert view.status.phase == WARMING
    screen = "\n".join(shown(view))
    assert "warm start" in screen and "step 20 of at most 400, loss 1.250" in screen
    assert re.search(r"chain +0\.300", screen)
    view.on_line(
        WarmStartChecked(at_s=2.0, step=40, loss=0.5, scores={"chain": 0.5}, over=True, cause="reached by all")
    )
    assert view.status.phase == TRAINING and "step 0 of 100" in "\n".join(shown(view))


def test_a_resumed_run_measures_its_pace_from_the_resumption() -> None:
    view = running(trained(5, step_s=10.0), trained(6, step_s=10.0))
    view.on_line(trained(6, step_s=1.0))
    assert view.status.remaining_s() == 94.0


def test_a_finished_run_shows_why_it_ended() -> None:
    view = running(trained(1), RunEnded(at_s=3.0, step=1, cause="seconds"))
    assert "step 1 of 100 (its time is over)" in "\n".join(shown(view))


def test_what_trajectories_do_now_is_watched() -> None:
    view = running(trained(1))
    view.on_begin("chain/0/0.0", "chain")
    view.on_begin("chain/0/1.0", "chain")
    view.on_stage("chain/0/0.0", Stage.REWARD)
    assert view.stage_counts() == {"reward": 1, "beginning": 1}
    view.on_end(msgspec.structs.replace(recordings.played("chain", "random", 1), id="chain/0/0.0"))
    assert view.stage_counts() == {"beginning": 1}


def test_sparks_go_from_low_to_high_and_show_what_is_below_0() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-1.0, 0.0, 1.0]) == "▁▅█"
    assert sparkline([3.0, 0.0]) == "█▁"
    assert sparkline([0.0, 1.0], unicode=False).isascii() and sparkline([]) == ""


def test_rewards_that_are_not_finite_are_left_out() -> None:
    bad = msgspec.structs.replace(trained(1).tasks["chain"], reward=float("nan"))
    view = running(trained(1, tasks={"chain": bad}), trained(2))
    assert list(view.status.tasks["chain"].rewards) == [0.02]
    shown(view)


# ---- that it fits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 10), (20, 5)])
@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_it_fits(width: int, height: int, count: int) -> None:
    names = tuple(f"task-{number}-of-a-long-name" for number in range(count))
    pool, engine = trained(1).pools[0], trained(1).engines[0]
    view = TrainingProgress(settings(*names) if names else TrainSettings(), clock=Clock())
    view.on_line(began())
    pools = tuple(msgspec.structs.replace(pool, name=f"pool-{number}") for number in range(count))
    engines = tuple(msgspec.structs.replace(engine, name=f"engine-{number}") for number in range(count))
    for step in range(1, 80):
        view.on_line(trained(step, names, pools=pools, engines=engines, dropped_so_far={"stale": 1}, aborted=2))
    for number in range(count):
        view.on_line(Noticed(at_s=1.0, kind="stall", text=f"number {number} " + "x" * 200))
    rows = shown(view, width, height)
    assert len(rows) < height
    assert max(map(cell_len, rows)) <= width
    assert "step 79" in rows[0] or width < 60


def test_what_does_not_fit_is_counted() -> None:
    names = tuple(f"t{number:02}" for number in range(40))
    rows = shown(running(trained(1, names), names=names), 80, 24)
    first = next(at for at, row in enumerate(rows) if row.startswith("t00"))
    last = next(at for at, row in enumerate(rows) if "more" in row)
    assert rows[last].split() == ["and", str(40 - (last - first)), "more"]
    assert any(row.startswith("cpu@local") for row in rows) and any(row.startswith("engine-0") for row in rows)


def test_names_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\x07[bold]x"
    view = TrainingProgress(settings("chain"), clock=Clock())
    view.on_line(began())
    pool, engine = trained(1).pools[0], trained(1).engines[0]
    view.on_line(
        trained(
            1,
            (evil,),
            pools=(msgspec.structs.replace(pool, name=evil),),
            engines=(msgspec.structs.replace(engine, name=evil),),
            stages={evil: 1},
            dropped_so_far={evil: 1},
        )
    )
    view.on_line(Noticed(at_s=0.0, kind=evil, text=evil))
    view.on_startup(0.1, evil)
    rows = "\n".join(shown(view)) + view.line()
    assert "\x1b" not in rows and "\x07" not in rows and "\\x1b[2J\\x07[bold" in rows


# ---- that it goes on by itself ----------------------------------------------------------------------------------


def test_on_a_terminal_it_is_drawn_when_nothing_happens_and_leaves_one_line() -> None:
    drawn = threading.Event()

    class Drawn(TrainingProgress):
        count = 0

        def render(self) -> object:  # type: ignore[override]
            self.count += 1
            if self.count > 3:
                drawn.set()
            return super().render()

    console = terminal()
    with Drawn(settings(), console=console) as view:
        view.on_line(began())
        view.on_line(trained(1))
        assert drawn.wait(30.0)
    last = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text(console)).rstrip().splitlines()[-1]
    assert last.startswith("training: step 1 of 100; reward frozenlake 0.010")


def test_without_a_terminal_lines_come_when_nothing_happens() -> None:
    notified = threading.Event()

    class Lines(io.StringIO):
        def write(self, words: str) -> int:
            count = super().write(words)
            if self.getvalue().count("training: step 1 of 100") >= 2:
                notified.set()
            return count

    console = Console(file=Lines(), force_terminal=False, width=80)
    with TrainingProgress(settings(), console=console, line_every_s=0.01) as view:
        view.on_line(began())
        view.on_line(trained(1))
        assert notified.wait(30.0)
        view.on_line(Noticed(at_s=61.0, kind="engine", text="engine-0 was lost"))
    assert "noticed after 1 min 1 s: engine: engine-0 was lost\n" in text(console)
    assert "training-progress" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("fancy", [False, True])
def test_the_resumption_is_shown_first_and_stays(fancy: bool) -> None:
    left = "from step 40, version 40: 21 groups wait to be trained on, none dropped; checkpoint 00000060 is damaged"
    console = terminal() if fancy else log()
    with TrainingProgress(settings(), console=console) as view:
        view.on_line(msgspec.structs.replace(began(40), left=left))
    assert f"noticed after 0 s: resumed: {left}\n" in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text(console))
    rows = shown(view, width=160)
    assert f"  after 0 s: resumed: {left}" in rows[rows.index("noticed") + 1]


def test_quiet_prints_nothing() -> None:
    console = log()
    with TrainingProgress(settings(), console=console, quiet=True) as view:
        view.on_line(trained(1))
        view.on_line(Noticed(at_s=1.0, kind="engine", text="lost"))
    assert text(console) == ""
