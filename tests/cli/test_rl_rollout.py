"""`tangram rl rollout`, `check`, `profile`: a config is played from beginning to end, by real engines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.cli.rl_rollout import EngineEventSummary
from tangram.rl.inference.router_records import EngineLost, EngineRemoved, RequestDropped, RequestResumed

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
    document = cli("rl", "rollout", str(config), "--groups", "4", "--out", str(out), "--json").json
    assert document["groups"] == 4 and set(document["tasks"]) == {"frozenlake", "chain"}
    assert document["tasks"]["chain"]["trajectories"] == 4 and document["tasks"]["chain"]["turns"] == 4
    shown = cli("rl", "show", str(out), "--json").json
    assert len(json.dumps(shown)) > 1000
    engines = {turn["engine"] for line in out.read_text().splitlines()[1:] if (turn := _first_turn(line))}
    assert engines == {"fast", "wide"}
    profiled = {each["task"]: each["hardware"] for each in cli("rl", "profile", str(out), "--json").json}
    assert set(profiled) == {"frozenlake", "chain"} and profiled["chain"] == "bandwidth"
    again = cli("rl", "replay", str(out))
    assert again.code == 0, again.err


def test_engines_and_trajectories_share_one_clock(cli: Cli, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    assert cli("rl", "rollout", str(config), "--groups", "1", "--out", str(out), "--quiet").code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    started = [each["record"]["at_s"] for each in lines if each["record"].get("name") == "EngineStarted"]
    began = [each["record"]["began_s"] for each in lines if each["kind"] == "trajectory"]
    assert len(started) == 2 and len(began) == 2
    assert min(started) > 0.0 and max(started) <= min(began), "no episode starts before the engines serve"


def test_one_group_is_printed_in_the_singular(cli: Cli, config: Path) -> None:
    assert "1 group in " in cli("rl", "rollout", str(config), "--groups", "1", "--quiet").out


def _first_turn(line: str) -> dict[str, str] | None:
    record = json.loads(line)
    return record["record"]["turns"][0] if record["kind"] == "trajectory" else None


def test_explain_prints_the_engines_of_each_task_and_starts_nothing(cli: Cli, config: Path) -> None:
    result = cli("rl", "rollout", str(config), "--explain")
    assert result.code == 0 and "its affinity is compute; if it fails: bandwidth" in result.out
    assert "frozenlake  environment\n" in result.out
    assert {
        bound["task"]: bound["used"] for bound in cli("rl", "rollout", str(config), "--explain", "--json").json["tasks"]
    } == {
        "frozenlake": "compute",
        "chain": "bandwidth",
        "default": "bandwidth",
    }


def test_explain_prints_the_reward_of_a_task(cli: Cli, config: Path) -> None:
    config.write_text(f'{TASK}[tasks.reward]\nkind = "function"\nfunction = "my:reward"\n')
    assert "chain  function by my:reward\n" in cli("rl", "rollout", str(config), "--explain").out
    document = cli("rl", "rollout", str(config), "--explain", "--json").json
    assert document["rewards"] == {"chain": "function by my:reward"}


def test_errors_are_reported_before_anything_starts(cli: Cli, config: Path, tmp_path: Path) -> None:
    config.write_text(CONFIG.replace("chain", "chian"))
    wrong = cli("rl", "rollout", str(config))
    assert wrong.code == 2 and "chain" in wrong.err
    config.write_text(CONFIG.replace('affinity = "compute"', 'afinity = "compute"'))
    assert "did you mean affinity?" in cli("rl", "rollout", str(config)).err
    config.write_text(CONFIG)
    there = tmp_path / "log.jsonl"
    there.write_text("mine")
    assert cli("rl", "rollout", str(config), "--out", str(there)).code == 2 and there.read_text() == "mine"


TASK = '[[tasks]]\nname = "chain"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TASK * 2, "tasks.name: expected each table [[tasks]] to have its own name"),
        (f'[policy]\ncheckpoint = "nowhere"\n{TASK}', "policy.checkpoint: expected a folder with words.json"),
        (f"[[engines]]\ncontext_max = 4\n{TASK}", "engines.context_max: expected more than tokens_max of task chain"),
        (f"{TASK}[tasks.options]\nfoo = 1\n", "options of task chain: expected options that"),
        (
            f'{TASK}[tasks.reward]\nkind = "command"\n[resources]\nbackend = "process"\n',
            "tasks.chain.reward.kind: expected a kind that tangram.rl.environments.chain:Chain can be rewarded by",
        ),
        (
            f'{TASK}[tasks.reward]\nkind = "model"\nservice = "nope"\n[resources]\nbackend = "process"\n',
            "tasks.chain.reward.service: expected a service of connect(services=...)",
        ),
        (
            f'{TASK}[tasks.reward]\nkind = "function"\nfunction = "no_such:f"\n[resources]\nbackend = "process"\n',
            "tasks.chain.reward.function: expected a module that can be imported",
        ),
    ],
)
def test_errors_of_the_file_are_reported_before_anything_is_played(
    cli: Cli, config: Path, text: str, expected: str
) -> None:
    config.write_text(text)
    out = config.with_name("log.jsonl")
    wrong = cli("rl", "rollout", str(config), "--quiet", "--out", str(out))
    assert wrong.code == 2 and f"tangram: {config}: {expected}" in wrong.err
    assert not out.exists() or '"trajectory"' not in out.read_text()


def test_a_repeated_warning_is_printed_once_with_its_count() -> None:
    happened = EngineEventSummary()
    for number in range(260):
        happened.add(EngineLost(at_s=0.0, engine="a", reason=f"bad token {number}", requests=0, deaths=1))
        happened.add(RequestResumed(at_s=0.0, request="r", session="", task="t", engine="a", written=3))
        happened.add(RequestDropped(at_s=0.0, request=f"r{number}", reason=f"request r{number} is given up"))
    happened.add(EngineLost(at_s=0.0, engine="b", reason="killed", requests=0, deaths=1))
    happened.add(EngineRemoved(at_s=0.0, engine="a", reason="died 3 times"))
    assert happened.lines() == [
        "engine a was lost and is restarted (death 1): bad token 0. 259 more of this kind.",
        "request r0 is given up. 259 more of this kind.",
        "engine b was lost and is restarted (death 1): killed.",
        "engine a is removed: died 3 times.",
    ]


def test_a_check_has_a_limit_for_each_call(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging_chain.py").write_text(
        "import asyncio\nfrom tangram.rl.environments.chain import Chain\n"
        "class Hanging(Chain):\n    async def step(self, action): await asyncio.sleep(3600.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = cli("rl", "check", "hanging_chain:Hanging", "--timeout", "0.2")
    assert result.code == 1 and "expected an answer within 0.2 s, got none" in result.out


def test_check_prints_which_contracts_a_task_keeps(cli: Cli) -> None:
    result = cli("rl", "check", "chain", "--option", "length=4", "--json")
    assert result.code == 0 and result.json["ok"]
    assert cli("rl", "check", "frozenlike").code == 2
