"""Engines and trainers of these tests are born in one nursery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fork_servers import shared


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    with shared():
        yield
