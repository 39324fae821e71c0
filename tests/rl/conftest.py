"""Engines and trainers of these tests are born where PyTorch was imported once, as those of a run are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tangram.managers.nursery import Nursery
from tangram.rl import child
from tangram.rl.engines.process import PROGRAM


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    """Of one worker, and warm before anybody looks what processes there are."""
    executed = child.EXECUTED
    with closing(Nursery(PROGRAM)) as nursery:
        nursery.warm()
        child.EXECUTED = nursery
        yield
        child.EXECUTED = executed
