"""What is loaded, evicted and restored ahead is the same live and in the simulator: one policy, one table of room."""

from __future__ import annotations

import random

import pytest
from tests.managers.models.conftest import SIZE, devices, service, until
from tests.managers.models.test_scheduled import Harness, run
from tests.sim.test_devices import Recorder, calls

from tangram.core.action import Status
from tangram.core.demand import GPU
from tangram.core.messages import Evicted, Pool, Resident, Restore
from tangram.core.policies import policy
from tangram.sim.engine import DEVICE_MEMORY_GIB
from tangram.sim.episode import ServiceModel, Workload
from tangram.sim.simulate import simulate

NAMES = "abcd"
RESTORE_S = 0.02
"""So long that what one takes more or less than another does not matter."""


def sequence(seed: int) -> list[str]:
    """One service that is called much, and three that are called so rarely that no decision is a close one."""
    rest = [*"bcd" * 2, *"a" * 6]
    random.Random(seed).shuffle(rest)
    return [*"a" * 30, *rest, *"aa"]


@pytest.mark.parametrize("name", ["fcfs", "paper", "adaptive"])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_sequence_of_calls_loads_and_evicts_the_same(name: str, seed: int) -> None:
    simulated = Recorder()
    models = tuple(ServiceModel(name=each, memory_gib=DEVICE_MEMORY_GIB / 2, restore_s=RESTORE_S) for each in NAMES)
    episode = calls(*sequence(seed), think_s=0.1, work_s=0.001)
    work = Workload(name="test", seed=0, episodes=(episode,), services=models)
    simulate(work, name, (Pool(kind=GPU, node="local", total=1),), observer=simulated)

    async def test(harness: Harness) -> None:
        for each in sequence(seed):
            assert (await harness.call(each)).outcome.status is Status.SUCCEEDED
            await until(lambda: restored(harness))

    services = [service(each, number) for number, each in enumerate(NAMES)]
    specs = devices(1, memory_bytes=2 * SIZE, bandwidth=SIZE / RESTORE_S)
    harness = run(lambda: Harness(services, specs, policy(name)), test)
    assert Recorder(harness.events).places() == simulated.places()
    assert any(isinstance(message, Restore) for message in simulated) == (name == "adaptive")


def restored(harness: Harness) -> bool:
    """Whether the last requested restore ahead is done."""
    answered = set()
    for message in reversed(harness.messages):
        if isinstance(message, Resident | Evicted):
            answered.add(message.service)
        elif isinstance(message, Restore):
            return message.service in answered
    return True
