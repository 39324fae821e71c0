"""Fork servers that all tests of a worker share: PyTorch is imported once, and not for every child."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tangram.managers.models import manager as model_manager
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


class Pool:
    """Fork servers by what they import and by their environment, in the place of those that managers start."""

    def __init__(self, *also: str) -> None:
        """`also`: modules that children would import themselves."""
        self._also = also
        self._servers: dict[object, Lasting] = {}

    def get(self, *modules: str, env: Mapping[str, str]) -> Lasting:
        environment = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
        key = modules, os.getcwd(), tuple(sorted(environment.items()))
        server = self._servers.get(key)
        if server is None:
            server = self._servers[key] = Lasting(*modules, *self._also, env=environment)
        server.warm()  # before a test counts its descriptors
        return server

    def end(self) -> None:
        for server in self._servers.values():
            server.end()


@contextmanager
def pooled_for_models(*also: str) -> Iterator[None]:
    """Managers of model services take their fork server from a pool."""
    pool = Pool(*also)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_manager, "Nursery", pool.get)
        try:
            yield
        finally:
            pool.end()
