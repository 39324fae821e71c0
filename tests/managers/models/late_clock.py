"""A clock for the process of a device, which runs late as soon as a server has noted something."""

from __future__ import annotations

import time
from pathlib import Path


class LateClock:
    """Real time until a server has written a word into its log, and much later from then on."""

    def __init__(self, log: Path, word: str) -> None:
        self._log = log
        self._word = word

    def now(self) -> float:
        words = self._log.read_text().split() if self._log.exists() else []
        return time.monotonic() + (1000.0 if self._word in words else 0.0)
