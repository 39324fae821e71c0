"""A run whose environments act in a shared service, which is killed and started again in the middle of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from tests.client.conftest import why_not
from tests.rl.train.proof import assert_sound, nothing_left
from tests.rl.train.tiny import settings_of
from tests.server.process import Process

from tangram.rl.config.rollout_settings import ResourceSettings
from tangram.rl.runs.metrics_lines import AnyMetricsLine, RunEnded, Trained

pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

from tangram.rl.train.pipeline import train

pytestmark = pytest.mark.slow

STEPS, BATCH = 5, 2
KILLED_AFTER = (1, 3)
"""Steps."""
DEADLINE_S = 180.0


def test_a_service_that_is_killed_costs_no_sample_and_no_run(tmp_path: Path) -> None:
    reason = why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    service = Process(tmp_path / "service", backend="sandbox", node="cores = 2")

    async def main() -> RunEnded:
        made = {step: asyncio.Event() for step in KILLED_AFTER}

        def tell(line: AnyMetricsLine) -> None:
            if isinstance(line, Trained) and line.step in made:
                made[line.step].set()

        async def kill() -> None:
            for step in KILLED_AFTER:
                await made[step].wait()
                await asyncio.to_thread(service.kill)
                await asyncio.to_thread(service.start)

        settings = settings_of(steps=STEPS, task={"environment": "tests.rl.train.tiny:PickInside", "concurrency": 4})
        settings = msgspec.structs.replace(settings, resources=ResourceSettings(url=service.url))
        async with asyncio.timeout(DEADLINE_S):
            over, _ = await asyncio.gather(train(settings, tmp_path / "run", on_line=tell), kill())
        return over

    with nothing_left(), service:
        assert asyncio.run(main()).cause == "steps"
    assert "Traceback" not in service.log, service.log
    owners = service.folder / "state" / "owners"
    assert not owners.exists() or list(owners.iterdir()) == [], "sandboxes are left"
    assert_sound(tmp_path / "run", steps=STEPS, batch=BATCH, age_max=1)
