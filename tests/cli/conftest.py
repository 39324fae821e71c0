"""How the tests of the command line call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from tangram.cli import app


@pytest.fixture(scope="session", autouse=True)
def _fork_server(rl_fork_server: None) -> None:
    pass


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
