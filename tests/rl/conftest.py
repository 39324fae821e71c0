"""Engines and trainers of these tests are forked from one server."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _fork_server(rl_fork_server: None) -> None:
    pass
