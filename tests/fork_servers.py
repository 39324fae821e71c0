"""One nursery for all tests of a worker: what they start is born where PyTorch was imported once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tangram.processes import child
from tangram.processes.fork_server import Nursery
from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.inference.engines.process import PROGRAM
from tangram.rl.rollout import assembly
from tangram.rl.train import pipeline


class Lasting(Nursery):
    """A run closes its nursery. This one outlives it."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@contextmanager
def shared() -> Iterator[None]:
    """Warm before anybody looks what processes there are. A process that a test executes has its own, as any run."""
    lasting, own = Lasting(PROGRAM), assembly.nursery_of

    def nursery_of(settings: RolloutSettings) -> Nursery:
        return lasting if any(engine.kind == "process" for engine in settings.engines) else own(settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "EXECUTED", lasting)
        patch.setattr(assembly, "nursery_of", nursery_of)
        patch.setattr(pipeline, "nursery_of", nursery_of)
        lasting.warm()
        try:
            yield
        finally:
            lasting.end()
