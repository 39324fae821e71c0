"""The engine of the benchmark `services`: real weights without a model.

An answer is a checksum of every byte on the devices. The call then lasts as long as its payload says, without using
this machine's CPU.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Sequence

import msgspec

from tangram.managers.models.devices import Device
from tangram.managers.models.engine import Engine, Piece, Weights, place
from tangram.managers.work import MIB


class ChecksumRequest(msgspec.Struct):
    seconds: float = 0.0
    """Minimum duration of the call."""
    checks: bool = True


class Checksum(Engine):
    batch_max = 1

    def __init__(self, seed: int, size: int) -> None:
        self.seed = seed
        self.size = size

    def prepare(self) -> Weights:
        return Weights([Piece("weights", memoryview(content(self.seed, self.size)))])

    def load(self, weights: Weights, devices: Sequence[Device]) -> list[memoryview]:
        return [
            memoryview(block.memory)[: sum(piece.content.nbytes for piece in pieces)]
            for block, pieces in place(weights, devices)
        ]

    def call(self, loaded: list[memoryview], payloads: list[bytes]) -> list[bytes]:
        requests = [msgspec.json.decode(payload, type=ChecksumRequest) for payload in payloads]
        began_at_s = time.monotonic()
        checksum = 0
        if any(each.checks for each in requests):
            for view in loaded:
                checksum = zlib.crc32(view, checksum)
        time.sleep(max(0.0, max(each.seconds for each in requests) - (time.monotonic() - began_at_s)))
        return [msgspec.json.encode(checksum) for _ in payloads]

    def unload(self, loaded: list[memoryview]) -> None:
        for view in loaded:
            view.release()


def content(seed: int, size: int) -> bytes:
    draw = random.Random(seed)
    return b"".join(draw.randbytes(min(MIB, size - begin)) for begin in range(0, size, MIB))
