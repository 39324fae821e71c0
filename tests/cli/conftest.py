"""How the tests of the command line call it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.testing
from typer.testing import CliRunner

from tangram.cli import app


@pytest.fixture(scope="session", autouse=True)
def _fork_server(rl_fork_server: None) -> None:
    pass


@pytest.fixture(scope="session", autouse=True)
def _command_tree() -> Iterator[None]:
    """Builds the tree of all verbs once, as a process of the command does, and not for each call: that takes 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli() -> Callable[..., Answer]:
    """Call a verb in this process. An exception that is not ours fails the test with its traceback."""

    def call(*words: object) -> Answer:
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def recording(cli: Callable[..., Answer], tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    done = cli("sim", "coding", "--batch", 4, "--policies", "adaptive", "--seeds", 1, "--record", path, "--workers", 1)
    assert done.code == 0
    return path
