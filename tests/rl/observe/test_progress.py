"""Progress of a rollout: what it counts, how it looks on a terminal and in a log, and that nothing steers either."""

from __future__ import annotations

import io
import re
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.rl import recordings

from tangram.reports.live import LINE_EVERY_S
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.observe.rollout_progress import WINDOW_S, RolloutProgress
from tangram.rl.trajectories.trajectory import Ending, Group, Stage, Trajectory


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal() -> Console:
    return Console(
        _environ={"TERM": "xterm"},
        file=io.StringIO(),
        force_terminal=True,
        width=120,
        height=40,
        color_system="standard",
        legacy_windows=False,
    )


def log() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def trajectory(member: int = 0, ending: Ending = Ending.FINISHED, **changes: object) -> Trajectory:
    played = recordings.played("chain", "random", 1, member=member)
    reward = 0.5 if ending.is_rewarded else None
    return msgspec.structs.replace(played, ending=ending, reward=reward, **changes)


def group(*members: Trajectory, left_out: tuple[Trajectory, ...] = (), wanted: int | None = None) -> Group:
    count = len(members) if wanted is None else wanted
    return Group(id="chain/0", task="chain", seed=1, members=members, left_out=left_out, wanted=count)


def engine(name: str = "engine-0", **changes: object) -> EngineStatistics:
    return EngineStatistics(name=name, **changes)  # type: ignore[arg-type]


# ---- counting ---------------------------------------------------------------------------------------------------


def test_a_trajectory_is_counted_where_it_is() -> None:
    progress = RolloutProgress(2)
    progress.on_begin("chain/0/0.0", "chain")
    assert {stage: n for stage, n in progress.stage_counts().items() if n} == {"beginning": 1}
    for stage in (Stage.RESET, Stage.GENERATE, Stage.STEP, Stage.REWARD):
        progress.on_stage("chain/0/0.0", stage)
        assert {stage: n for stage, n in progress.stage_counts().items() if n} == {stage.value: 1}
    done = trajectory(0)
    progress.on_end(done)
    assert {stage: n for stage, n in progress.stage_counts().items() if n} == {"buffer": 1}
    progress.on_group(group(done))
    assert not any(progress.stage_counts().values())
    assert (progress.groups_done, progress.tasks["chain"].reward) == (1, 0.5)


def test_groups_that_lose_members_and_dropped_groups_are_distinguished() -> None:
    progress = RolloutProgress(3)
    failed = trajectory(1, Ending.ENV_FAILED, cause="sandbox lost")
    progress.on_end(failed)
    progress.on_group(group(trajectory(0), left_out=(failed,), wanted=2))
    progress.on_group(group(left_out=(failed,), wanted=2))
    assert (progress.groups_done, progress.groups_short, progress.groups_dropped) == (1, 1, 1)
    assert "1 of 3 groups (1 with fewer members), 1 dropped" in progress.line()
    assert "not finished: env_failed 1" in progress.line()
    assert progress.last_failure == "chain/0/1.0 env_failed: sandbox lost"


def test_rewards_are_of_those_that_have_one() -> None:
    progress = RolloutProgress(1)
    progress.on_end(trajectory(0))
    progress.on_end(trajectory(1, Ending.STALE))
    progress.on_end(msgspec.structs.replace(trajectory(2), reward=float("nan")))
    assert progress.tasks["chain"].reward == 0.5
    progress.on_begin("x", "other")
    assert progress.tasks["other"].reward is None and "other -" in progress.line()


def test_engines_are_up_suspended_or_dead() -> None:
    progress = RolloutProgress(1)
    progress.set_engines([engine("a"), engine("b")])
    assert progress.engine_states() == {"up": 2, "suspended": 0, "dead": 0}
    progress.set_engines([engine("a", suspended_s=1.0), engine("b")])
    assert progress.engine_states() == {"up": 1, "suspended": 1, "dead": 0}
    progress.set_engines([engine("a", suspended_s=1.0)])
    assert progress.engine_states() == {"up": 1, "suspended": 0, "dead": 1}
    progress.set_engines([engine("a", suspended_s=1.0), engine("b")])
    assert progress.engine_states()["dead"] == 0


def test_tokens_per_second_are_those_of_the_last_seconds() -> None:
    clock = Clock()
    progress = RolloutProgress(1, clock=clock)
    progress.set_engines([engine(decode_tokens=500)])
    clock.now += 2.0
    progress.set_engines([engine(decode_tokens=700)])
    assert progress.tokens_per_s() == pytest.approx(100.0)
    clock.now += 1.0
    progress.set_engines([engine(decode_tokens=40)])  # it was restarted
    assert progress.tokens_per_s() == pytest.approx(240 / 3)
    clock.now += 2 * WINDOW_S
    assert progress.tokens_per_s() == pytest.approx(0.0, abs=1e-9)


def test_without_engines_the_tokens_are_those_of_trajectories() -> None:
    clock = Clock()
    progress = RolloutProgress(1, clock=clock)
    clock.now += 2.0
    done = trajectory()
    progress.on_end(done)
    assert progress.tokens_per_s() == pytest.approx(len(done.versions) / 2)


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    clock = Clock()
    progress = RolloutProgress(4, clock=clock)
    assert progress.remaining_s() is None
    clock.now += 30.0
    progress.on_group(group(trajectory()))
    assert progress.remaining_s() == pytest.approx(90.0) and "about 1 min 30 s left" in progress.line()
    for _ in range(5):
        progress.on_group(group(trajectory()))
    assert progress.remaining_s() == 0.0


# ---- the look ---------------------------------------------------------------------------------------------------


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    clock, console = Clock(), log()
    with RolloutProgress(2, console=console, clock=clock) as progress:
        for member in range(100):
            progress.on_end(trajectory(member))
        assert text(console) == ""
        clock.now += LINE_EVERY_S
        progress.on_stage("a", Stage.STEP)
        progress.on_stage("a", Stage.REWARD)
        assert text(console).count("\n") == 1
    lines = text(console).splitlines()
    assert len(lines) == 2 and all(line.startswith("rollout: 0 of 2 groups, 100 trajectories ended") for line in lines)
    assert "\x1b" not in text(console)


def test_a_terminal_shows_all_of_it_and_is_left_clean() -> None:
    console = terminal()
    with RolloutProgress(4, console=console) as progress:
        progress.on_begin("chain/0/0.0", "chain")
        progress.on_stage("chain/0/0.0", Stage.GENERATE)
        progress.on_end(trajectory(1, Ending.TRUNCATED))
        progress.set_engines([engine("engine-0", version=3, active=2, waiting=1), engine("engine-1")])
        progress.set_engines([engine("engine-0", version=3, active=2, waiting=1)])
        shown = Console(file=io.StringIO(), width=120)
        shown.print(progress.render())
        for words in (
            "0 of 4 groups", "generate 1", "tokens/s", "chain", "1 ended", "reward 0.5", "not finished: truncated 1",
            "1 up, 1 dead", "engine-0 v3 2+1", "engine-1 v0 dead",
        ):  # fmt: skip
            assert words in text(shown)
    assert text(console).endswith("so far\n")
    assert "\x1b[?25h" in text(console), "the cursor is shown again"
    for each in threading.enumerate():
        if "Refresh" in type(each).__name__:
            each.join(30)
            assert not each.is_alive()


def test_quiet_writes_nothing() -> None:
    for console in (terminal(), log()):
        clock = Clock()
        with RolloutProgress(1, console=console, quiet=True, clock=clock) as progress:
            clock.now += 100.0
            progress.on_end(trajectory())
        assert text(console) == ""


def test_it_ends_also_when_the_rollout_breaks() -> None:
    console = terminal()
    with pytest.raises(RuntimeError), RolloutProgress(1, console=console):
        raise RuntimeError
    assert "\x1b[?25h" in text(console)


@given(trajectories=st.lists(recordings.trajectories(), max_size=4), name=recordings.texts)
def test_no_name_steers_a_terminal(trajectories: list[Trajectory], name: str) -> None:
    progress = RolloutProgress(1)
    progress.on_begin(name, name)
    progress.set_engines([engine(name)])
    for each in trajectories:
        progress.on_end(each)
    shown = log()
    shown.print(progress.render())
    shown.print(progress.line(), markup=False, highlight=False)
    rest = re.sub(r"\n", "", text(shown))
    assert rest.isprintable(), rest
