"""Settings that hold for every test.

Property tests use the profile `ci` unless HYPOTHESIS_PROFILE names another: the same examples in every run, so that a
red test is red again on the next machine. HYPOTHESIS_PROFILE=dev searches at random and remembers what failed.

Tests marked `docker` start Docker engines. `make test-docker` selects them and sets TANGRAM_DOCKER_TESTS=1; then a
missing engine is a failure. They are below DOCKER_TESTS, because the collection of all tests takes longer.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell starts its background jobs with SIGINT ignored, and ignored signals are inherited: tests of interrupts would
# then wait for processes that never receive one.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing here about the code: tests share machines of unknown speed, and timing
# belongs in benchmarks.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("ci", UNTIMED, derandomize=True, database=None, max_examples=100, print_blob=True)
settings.register_profile("dev", UNTIMED, derandomize=False, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without garbage collections, which take half of the time: nearly everything is kept. Then exempts the
    test modules and their imports from them: a full collection would visit all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def rl_fork_server() -> Iterator[None]:
    """Engines and trainers of all tests of a worker are forked from one server, which imports PyTorch once."""
    from tests.fork_servers import shared

    with shared():
        yield


@pytest.fixture(scope="session")
def fork_server_pool() -> Iterator[Any]:
    """Fork servers of model services, which `pooled_for_models` hands out."""
    from tests.fork_servers import Pool

    pool = Pool()
    yield pool
    pool.end()


DOCKER_TESTS = ("tests/contracts", "tests/managers/sandboxes/docker")
"""Folders with tests that are marked `docker`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent.parent
    for item in items:
        if not item.get_closest_marker("docker"):
            continue
        if not any(item.path.is_relative_to(root / folder) for folder in DOCKER_TESTS):
            raise pytest.UsageError(f"{item.nodeid} is marked `docker`; make test-docker runs only {DOCKER_TESTS}")
        if os.environ.get("TANGRAM_DOCKER_TESTS") != "1":
            item.add_marker(pytest.mark.skip(reason="needs a Docker engine: run make test-docker"))
