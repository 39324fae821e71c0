"""The connection to a Docker engine, where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tangram.errors import ManagerError
from tangram.managers.sandboxes.docker import DockerManager
from tangram.managers.sandboxes.docker.engine import version_prefix


def test_without_an_engine_the_error_names_what_to_start(tmp_path: Path) -> None:
    async def whole() -> None:
        with pytest.raises(ManagerError, match="systemctl start docker") as caught:
            async with DockerManager(socket=str(tmp_path / "none.sock")):
                pass
        assert not caught.value.retry

    asyncio.run(whole())


def test_requests_use_an_api_version_that_the_engine_supports() -> None:
    assert version_prefix({"ApiVersion": "1.41", "MinAPIVersion": "1.12"}) == "/v1.41"
    assert version_prefix({"ApiVersion": "1.52", "MinAPIVersion": "1.44"}) == "/v1.44"
    with pytest.raises(ManagerError, match=r"at least 1\.41"):
        version_prefix({"ApiVersion": "1.40", "MinAPIVersion": "1.12"})
