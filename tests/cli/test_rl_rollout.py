"""`tangram rl rollout`, `check`, `profile`: a config is played from beginning to end, by real engines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]

if os.environ.get("CI") != "true":
    pytest.importorskip("torch")

CONFIG = """
seed = 3
[[engines]]
name = "fast"
hardware = "compute"
slots = 8
[[engines]]
name = "wide"
hardware = "bandwidth"
slots = 8
[groups]
size = 2
[[tasks]]
name = "frozenlake"
affinity = "compute"
[[tasks]]
name = "chain"
affinity = "bandwidth"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "rollout.toml"
    path.write_text(CONFIG)
    return path


def test_a_rollout_is_played_written_down_shown_and_profiled(cli: Cli, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    told = cli("rl", "rollout", str(config), "--groups", "4", "--out", str(out), "--json").json
    assert told["groups"] == 4 and set(told["tasks"]) == {"frozenlake", "chain"}
    assert told["tasks"]["chain"]["trajectories"] == 4 and told["tasks"]["chain"]["turns"] == 4
    shown = cli("rl", "show", str(out), "--json").json
    assert len(json.dumps(shown)) > 1000
    engines = {turn["engine"] for line in out.read_text().splitlines()[1:] if (turn := _first_turn(line))}
    assert engines == {"fast", "wide"}
    profiled = {each["task"]: each["hardware"] for each in cli("rl", "profile", str(out), "--json").json}
    assert set(profiled) == {"frozenlake", "chain"} and profiled["chain"] == "bandwidth"
    again = cli("rl", "replay", str(out))
    assert again.code == 0, again.err


def _first_turn(line: str) -> dict[str, str] | None:
    record = json.loads(line)
    return record["record"]["turns"][0] if record["kind"] == "trajectory" else None


def test_explain_says_who_serves_whom_and_starts_nothing(cli: Cli, config: Path) -> None:
    said = cli("rl", "rollout", str(config), "--explain")
    assert said.code == 0 and "its affinity is compute; if it fails: bandwidth" in said.out
    assert {
        bound["task"]: bound["used"] for bound in cli("rl", "rollout", str(config), "--explain", "--json").json["tasks"]
    } == {
        "frozenlake": "compute",
        "chain": "bandwidth",
        "default": "bandwidth",
    }


def test_what_is_wrong_is_said_before_anything_starts(cli: Cli, config: Path, tmp_path: Path) -> None:
    config.write_text(CONFIG.replace("chain", "chian"))
    wrong = cli("rl", "rollout", str(config))
    assert wrong.code == 2 and "chain" in wrong.err
    config.write_text(CONFIG.replace('affinity = "compute"', 'afinity = "compute"'))
    assert "did you mean affinity?" in cli("rl", "rollout", str(config)).err
    config.write_text(CONFIG)
    there = tmp_path / "log.jsonl"
    there.write_text("mine")
    assert cli("rl", "rollout", str(config), "--out", str(there)).code == 2 and there.read_text() == "mine"


def test_check_says_what_a_task_keeps(cli: Cli) -> None:
    found = cli("rl", "check", "chain", "--option", "length=4", "--json")
    assert found.code == 0 and found.json["ok"]
    assert cli("rl", "check", "frozenlike").code == 2
