"""An engine without a model: its weights are bytes of a seed, and an answer proves that they are where they should be.

The answer to a payload is a checksum of all bytes that lie on the devices, the payload, and how many payloads were in
the call. Some payloads misbehave instead; `wait:FILE` and `stubborn:FILE` touch FILE when they have begun. `calls` is a
file that records all payloads, `hoard` one that lets the engine fill its last device before its weights come.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tangram.errors import InvalidAction
from tangram.managers.models.devices import Device
from tangram.managers.models.engine import Engine, Piece, Weights, place

PIECES = 4
KEPT: list[list[memoryview]] = []
"""What an engine does not let go of."""


def content(seed: int, size: int) -> list[bytes]:
    return [random.Random(f"{seed}-{number}").randbytes(size // PIECES) for number in range(PIECES)]


def expected(seed: int, size: int, payload: bytes, batch: int = 1) -> bytes:
    return expected_answer(content(seed, size), payload, batch)


def expected_answer(pieces: Sequence[bytes | memoryview], payload: bytes, batch: int) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return json.dumps({"weights": digest.hexdigest(), "payload": payload.hex(), "batch": batch}).encode()


class LateError(RuntimeError):
    """Takes long to say what it is: until its file is gone, which it makes, each time."""

    def __str__(self) -> str:
        path = Path(self.args[0])
        path.touch()
        while path.exists():
            time.sleep(0.01)
        return "late"


class BytesEngine(Engine):
    def __init__(self, seed: int = 1, size: int = 1 << 20, batch_max: int = 1, log: str = "", **faults: str) -> None:
        self.seed, self.size, self.batch_max, self.log, self.faults = seed, size, batch_max, log, faults

    def note(self, word: str) -> None:
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(f"{word} {self.seed}\n")

    def prepare(self) -> Weights:
        self.note("prepare")
        self.fail("prepare")
        return Weights([Piece(f"piece{n}", memoryview(part)) for n, part in enumerate(content(self.seed, self.size))])

    def fail(self, step: str) -> None:
        """As `faults` says; a path means: as long as that file is there."""
        fault, _, path = self.faults.get(step, "").partition(":")
        if not fault or (path and not Path(path).exists()):
            return
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(3600)
        raise RuntimeError(f"{step} fails, as configured")

    def load(self, weights: Weights, devices: Sequence[Device]) -> list[memoryview]:
        self.note("load")
        views = []
        if Path(self.faults.get("hoard", "/nowhere")).exists():
            devices[-1].allocate(self.size)
        for block, pieces in place(weights, devices):
            with memoryview(block.memory) as whole:
                offset = 0
                for piece in pieces:
                    views.append(whole[offset : offset + piece.content.nbytes])
                    offset += piece.size
        if "greedy" in self.faults:
            devices[0].allocate(1 << 40)
        self.fail("load")
        return views

    def call(self, loaded: list[memoryview], payloads: list[bytes]) -> list[bytes]:
        if "calls" in self.faults:
            with open(self.faults["calls"], "ab") as file:
                file.write(b"".join(payload + b"\n" for payload in payloads))
        for payload in payloads:
            self.misbehave(payload)
        answers = [expected_answer(loaded, payload, len(payloads)) for payload in payloads]
        return answers[1:] if b"few" in payloads else answers

    def misbehave(self, payload: bytes) -> None:
        word, _, path = payload.decode().partition(":")
        if word == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "raise":
            raise RuntimeError("no such token")
        if word == "bad":
            raise InvalidAction("payload", "bad", "a payload that is good")
        if word == "lingers":
            raise LateError(path)
        if word in ("wait", "stubborn", "slow", "turned"):
            Path(path).touch()
        if word == "turned":
            try:
                time.sleep(3600)
            except BaseException as error:
                raise RuntimeError("the interrupt became an error") from error
        while word == "slow" and Path(path).exists():
            time.sleep(0.01)
        if word == "wait":
            time.sleep(3600)
        while word == "stubborn":
            try:
                time.sleep(3600)
            except BaseException:
                continue

    def unload(self, loaded: list[memoryview]) -> None:
        self.note("unload")
        self.fail("unload")
        if "keep" in self.faults:
            KEPT.append(loaded)
            return
        for view in loaded:
            view.release()
