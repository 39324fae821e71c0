"""Small modules for tests of the PyTorch engine, imported by the processes of devices and where there is PyTorch."""

from __future__ import annotations

import builtins
import json
import os
import signal
import time
from typing import Any

import torch

FEATURES = 8


class Tied(torch.nn.Module):
    """Two layers with one tensor, a buffer that a checkpoint leaves out, one of another type, and an empty one."""

    def __init__(self, seed: int = 0, dtype: str = "float32") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = torch.nn.Linear(FEATURES, FEATURES, bias=False, dtype=getattr(torch, dtype))
        self.two = torch.nn.Linear(FEATURES, FEATURES, dtype=getattr(torch, dtype))
        self.two.weight = self.one.weight
        self.norm = torch.nn.BatchNorm1d(FEATURES)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        self.register_buffer("steps", torch.arange(FEATURES))
        self.register_buffer("nothing", torch.empty(0, 3))

    def forward(self, numbers: Any) -> Any:
        hidden = self.two(self.one(numbers.to(self.one.weight.dtype))).float()
        return self.norm(hidden) * self.scale + self.steps


def batch(module: Any, payloads: list[bytes]) -> list[bytes]:
    """Rows of different lengths, filled up with zeros."""
    rows = [json.loads(payload) for payload in payloads]
    padded = torch.tensor([row + [0.0] * (FEATURES - len(row)) for row in rows])
    return [json.dumps({"sum": total, "batch": len(rows)}).encode() for total in module(padded).sum(1).tolist()]


def misbehave(module: Any, payload: bytes) -> bytes:
    if payload == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while payload == b"loop":
        module(torch.zeros(1, FEATURES))
        time.sleep(0)
    return json.dumps(torch.get_num_threads()).encode()


def raising(module: Any, payload: bytes) -> bytes:
    raise getattr(builtins, payload.decode())("as asked")


class Unpicklable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = lambda numbers: numbers
