"""A service without a model whose process is killed at every call, imported by the processes of devices."""

from __future__ import annotations

import os
import signal

from tests.managers.models.bytes_engine import BytesEngine


class Doomed(BytesEngine):
    def __init__(self, lives: str) -> None:
        """`lives`: a file, to which each death adds a line."""
        super().__init__()
        self._lives = lives

    def call(self, loaded: list[memoryview], payloads: list[bytes]) -> list[bytes]:
        with open(self._lives, "a", encoding="utf-8") as file:
            file.write("dies\n")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is dead")
