"""Fork servers that all tests of a worker share: PyTorch is imported once, and not for every child."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tangram.managers.models import manager as model_manager
from tangram.processes import child
from tangram.processes.fork_server import ForkServer
from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.inference.engines.process import PROGRAM
from tangram.rl.rollout import assembly
from tangram.rl.train import pipeline


class Lasting(ForkServer):
    """A run closes its fork server. This one outlives it."""

    async def aclose(self) -> None:
        pass

    def end(self) -> None:
        asyncio.run(super().aclose())


@contextmanager
def shared() -> Iterator[None]:
    """Warm before any test lists the processes. A process that a test executes has its own, as any run."""
    # The first optimizer of a process imports torch._dynamo, which takes a second of CPU time in each trainer.
    lasting, own = Lasting(PROGRAM, "torch._dynamo"), assembly.fork_server_of

    def fork_server_of(settings: RolloutSettings) -> ForkServer:
        return lasting if any(engine.kind == "process" for engine in settings.engines) else own(settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "DISABLED_FORK_SERVER", lasting)
        patch.setattr(assembly, "fork_server_of", fork_server_of)
        patch.setattr(pipeline, "fork_server_of", fork_server_of)
        lasting.start_importing()
        try:
            yield
        finally:
            lasting.end()


class Pool:
    """Fork servers by what they import and by their environment, in the place of those that managers start."""

    def __init__(self) -> None:
        self._servers: dict[object, Lasting] = {}

    def get(self, *modules: str, env: Mapping[str, str]) -> Lasting:
        environment = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
        key = modules, os.getcwd(), tuple(sorted(environment.items()))
        server = self._servers.get(key)
        if server is None:
            server = self._servers[key] = Lasting(*modules, env=environment)
        server.start_importing()  # before a test counts its descriptors
        return server

    def end(self) -> None:
        for server in self._servers.values():
            server.end()


@contextmanager
def pooled_for_models(pool: Pool, *also: str) -> Iterator[None]:
    """Managers of model services take their fork server from a pool. `also`: modules that children would import
    themselves."""

    def get(*modules: str, env: Mapping[str, str]) -> Lasting:
        return pool.get(*modules, *also, env=env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_manager, "ForkServer", get)
        yield
