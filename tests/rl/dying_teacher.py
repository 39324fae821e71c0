"""A teacher whose process is killed during a call, imported by the processes of devices."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tangram.managers.models.torch_engine import PlacedModule
from tangram.rl.model.teacher import TeacherEngine


class Dying(TeacherEngine):
    def __init__(self, checkpoint: str, lives: str) -> None:
        """`lives`: a file; each of its lines is one death."""
        super().__init__(checkpoint)
        self._lives = Path(lives)

    def answer(self, placed: PlacedModule, payloads: list[bytes]) -> list[bytes]:
        left = self._lives.read_text().splitlines()
        if left:
            self._lives.write_text("\n".join(left[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(placed, payloads)
