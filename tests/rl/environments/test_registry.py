"""Tasks by name and by import path, and the errors of invalid ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tangram.errors import InvalidConfig
from tangram.rl.environments import registry
from tangram.rl.environments.chain import Chain
from tangram.rl.environments.frozenlake import FrozenLake
from tangram.rl.environments.protocol import ExternalResources, Step
from tangram.rl.environments.registry import missing_of, names, register, resolve, words_of
from tangram.rl.trajectories.codec import WordCodec


class Maze:
    words: ClassVar = ("left", "right")
    turns_max: ClassVar = 3
    tokens_max: ClassVar = 2
    agents: ClassVar[dict[str, Any]] = {}

    def __init__(self, resources: ExternalResources) -> None: ...

    async def reset(self, seed: int) -> str:
        return "left"

    async def step(self, action: str) -> Step:
        return Step(observation="right", done=True)

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_task_by_name", {})
    monkeypatch.setattr(sys, "path", list(sys.path))


def refused(name: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        resolve(name)
    assert caught.value.field == "environment"
    return str(caught.value)


def test_a_built_in_task_is_loaded_by_its_name() -> None:
    assert resolve("frozenlake") is FrozenLake
    assert resolve("chain") is Chain


def test_a_built_in_task_is_imported_at_first_use_only() -> None:
    program = (
        "import sys; from tangram.rl.environments import registry as r;"
        "there = lambda: [m for m in r.BUILT_IN if f'tangram.rl.environments.{m}' in sys.modules];"
        "print(there()); r.resolve('chain'); print(there())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split("\n")[:2] == ["[]", "['chain']"]


def test_a_task_is_registered_by_a_call_or_by_a_decorator() -> None:
    assert register("maze", Maze) is Maze
    assert register("labyrinth")(Maze) is Maze
    assert resolve("maze") is resolve("labyrinth") is Maze
    assert names()[-2:] == ("labyrinth", "maze")


def test_a_name_belongs_to_one_task() -> None:
    register("maze", Maze)
    register("maze", Maze)
    with pytest.raises(InvalidConfig, match="a name that is free"):
        register("maze", Chain)
    with pytest.raises(InvalidConfig, match="a name that is free"):
        register("chain", Maze)
    assert resolve("maze") is Maze and resolve("chain") is Chain


@pytest.mark.parametrize("name", ["", "a b", "my:maze", "-x", "x" * 200])
def test_an_unusable_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="letters, digits"):
        register(name, Maze)


def test_an_unknown_name_is_answered_by_the_nearest() -> None:
    register("maze", Maze)
    assert "did you mean frozenlake?" in refused("frozen_lake")
    assert "did you mean maze?" in refused("mase")
    assert "there are frozenlake, chain, codefix, lookup, maze" in refused("poker")


def test_a_task_is_loaded_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_mazes.py").write_text(
        "from tangram.rl.environments.chain import Chain\nclass Kinds:\n    class Long(Chain): ...\n"
    )
    task: Any = resolve("my_own_mazes:Kinds.Long")
    assert task.__qualname__ == "Kinds.Long"
    assert "there is no Lang (did you mean Long?)" in refused("my_own_mazes:Kinds.Lang")


def test_a_failed_import_is_reported_with_the_module_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_broken_maze.py").write_text("import no_such_engine\n")
    (tmp_path / "my_raising_maze.py").write_text("raise RuntimeError('no ice today')\n")
    assert "No module named 'no_such_engine'" in refused("my_broken_maze:Maze")
    assert "a module my_raising_maze that can be imported (RuntimeError: no ice today)" in refused("my_raising_maze:M")
    assert "No module named 'no_such_maze'" in refused("no_such_maze:Maze")


@pytest.mark.parametrize("path", [":", "a:", ":b", "a b:c", "a..b:c", "../x:y", "os:path;x"])
def test_what_is_no_path_is_not_imported(path: str) -> None:
    assert "module:name" in refused(path)


def test_what_is_no_task_is_refused_with_all_that_it_lacks() -> None:
    error = refused("collections:OrderedDict")
    for lacking in (
        "words",
        "turns_max",
        "tokens_max",
        "agents",
        "async def reset",
        "async def step",
        "async def close",
    ):
        assert lacking in error
    assert "async def" not in refused("math:pi")


@pytest.mark.parametrize(
    ("key", "value", "lacking"),
    [
        ("words", ["left"], "words"),
        ("words", ("turn left",), "words"),
        ("turns_max", 0, "turns_max"),
        ("turns_max", True, "turns_max"),
        ("tokens_max", 1.5, "tokens_max"),
        ("agents", {"expert": 3}, "agents"),
        ("acts_outside", False, "needs_client, which is the new name"),
        ("step", lambda self, action: None, "async def step"),
    ],
)
def test_each_part_of_a_task_is_looked_at(key: str, value: object, lacking: str) -> None:
    assert missing_of(Maze) == []
    (missing,) = missing_of(type("Wrong", (Maze,), {key: value}))
    assert missing.startswith(lacking)


def test_the_words_of_tasks_make_one_vocabulary() -> None:
    words = words_of(["chain", Maze, Chain])
    assert set(words) == {*Chain.words, *Maze.words} and len(words) == len(set(words))
    assert WordCodec(words).encode_action("left") != WordCodec(words).encode_action("right")
    assert WordCodec(words).words == WordCodec(words_of([Maze, "chain"])).words


def test_a_task_without_words_has_no_vocabulary_of_words() -> None:
    with pytest.raises(InvalidConfig, match="tokenizer of text"):
        words_of(["chain", type("Talk", (Maze,), {"words": ()})])
