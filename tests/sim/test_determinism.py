"""Same seed, same trace: in one process, in another, and under any PYTHONHASHSEED."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache

import pytest

from tangram.core.messages import Effect, Event
from tangram.core.trace import Header, Recorder
from tangram.sim.faults import draw_faults
from tangram.sim.simulate import simulate
from tangram.sim.size import Size
from tangram.sim.workloads import build

CASES = [
    ("mixed", "adaptive"),
    ("mixed", "paper"),
    ("mixed", "fcfs"),
    ("coding", "adaptive:no-resize"),
    ("coding", "pods:0.5"),
    ("search", "fixed:2"),
    ("teachers", "adaptive"),
    ("elastic", "adaptive"),
]

PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("determinism", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for workload, name in module.CASES:
    print(module.digest(workload, name, seed=7))
"""


def recorded(workload_name: str, name: str, seed: int) -> bytes:
    """The whole trace of one simulation with faults."""
    workload = build(workload_name, batch=4, seed=seed)
    pools = Size(cores=8, nodes=2, devices=24).pools(workload)
    recorder = Recorder()
    trace = bytearray(recorder.header(Header(policy=name, pools=pools)))

    def observe(now: float, event: Event, effects: list[Effect]) -> None:
        trace.extend(recorder.lines(now, event, effects))

    simulate(workload, name, pools, faults=draw_faults(seed, until_s=200.0), observer=observe)
    return bytes(trace)


@cache  # every hash seed is compared with the same ones
def digest(workload_name: str, name: str, seed: int) -> str:
    return hashlib.sha256(recorded(workload_name, name, seed)).hexdigest()


@pytest.mark.parametrize(("workload", "name"), CASES)
def test_the_same_seed_gives_the_same_trace_and_another_seed_another(workload: str, name: str) -> None:
    first = recorded(workload, name, seed=7)
    assert first.count(b"\n") > 20
    assert first == recorded(workload, name, seed=7)
    assert first != recorded(workload, name, seed=8)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_the_trace_is_the_same_in_another_process_under_any_hash_seed(hash_seed: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, __file__],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [digest(workload, name, seed=7) for workload, name in CASES]
