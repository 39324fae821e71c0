"""Model services: the right weights on exactly the granted devices, evictions, and the events about them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.managers.models.bytes_engine import BytesEngine, expected
from tests.managers.models.conftest import SIZE, Flag, Rig, devices, own_children, run, service, until

from tangram.core.action import Action
from tangram.core.demand import GPU, Demand, fixed
from tangram.core.messages import Grant, Pool, Share
from tangram.errors import InvalidAction, InvalidConfig, InvariantError, ManagerError
from tangram.managers.models import Infer, ModelManager, Service
from tangram.managers.work import MIB, HoldGrant


class Elsewhere(BytesEngine):
    """Its weights are not those that it prepares."""

    external_weights = True


def test_it_has_one_pool_with_its_devices() -> None:
    assert Rig([service("a")], devices(4)).manager.pools() == (Pool(kind=GPU, node="local", total=4),)


def test_a_call_is_answered_by_the_weights_of_its_service() -> None:
    async def test(rig: Rig) -> None:
        for name, seed in (("a", 1), ("b", 2), ("a", 1)):
            ended = await rig.call(name, payload=b"hello")
            assert (ended.answer, ended.lost) == (expected(seed, SIZE, b"hello"), "")
        assert rig.residency_changes() == ["+a 0", "+b 0"]
        assert rig.manager.statistics().emulated

    run(Rig([service("a", 1), service("b", 2)], devices(1)), test)


def test_a_service_is_loaded_on_exactly_the_devices_of_the_grant() -> None:
    async def test(rig: Rig) -> None:
        for chunk in ((2,), (0, 1), (2, 3), (0, 1, 2, 3)):
            assert (await rig.call("a", chunk, b"x")).answer == expected(1, SIZE, b"x")
        assert rig.residency_changes() == ["+a 2", "+a 0,1", "+a 2,3", "+a 0,1,2,3"]
        assert [place.devices for place in rig.manager.statistics().residents] == [(2,), (0, 1), (2, 3), (0, 1, 2, 3)]

    run(Rig([service("a", degrees=(1, 2, 4))], devices(4)), test)


def test_each_service_is_prepared_once_and_loaded_once_as_long_as_it_stays(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(rig: Rig) -> None:
        for _ in range(3):
            await rig.call("a", (0,))
            await rig.call("a", (1,))

    run(Rig([service("a", log=str(log))], devices(2)), test)
    assert log.read_text().split("\n") == ["prepare 1", "load 1", "load 1", ""]


def test_two_services_that_do_not_fit_together_alternate() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            assert (await rig.call("a", payload=b"x")).answer == expected(1, SIZE, b"x")
            assert (await rig.call("b", payload=b"x")).answer == expected(2, SIZE, b"x")
        assert rig.residency_changes() == [
            "+a 0",
            "-a 0",
            "+b 0",
            "-b 0",
            "+a 0",
            "-a 0",
            "+b 0",
            "-b 0",
            "+a 0",
            "-a 0",
            "+b 0",
        ]

    run(Rig([service("a", 1), service("b", 2)], devices(1, memory_bytes=SIZE * 3 // 2)), test)


def test_the_least_recently_used_is_evicted_and_the_rest_stays() -> None:
    async def test(rig: Rig) -> None:
        for name in ("a", "b", "a", "c"):
            await rig.call(name)
        assert rig.residency_changes() == ["+a 0", "+b 0", "-b 0", "+c 0"]
        assert (await rig.call("a", payload=b"x")).answer == expected(1, SIZE, b"x")

    run(Rig([service("a", 1), service("b", 2), service("c", 3)], devices(1, memory_bytes=2 * SIZE)), test)


def test_a_service_on_several_devices_goes_from_all_of_them_for_one() -> None:
    async def test(rig: Rig) -> None:
        await rig.call("wide", (0, 1))
        await rig.call("a", (1,))
        assert rig.residency_changes() == ["+wide 0,1", "-wide 0,1", "+a 1"]

    services = [service("wide", 1, degrees=(2,)), service("a", 2)]
    run(Rig(services, devices(2, memory_bytes=SIZE + SIZE // 4)), test)


def test_working_memory_counts_as_well_as_weights() -> None:
    async def test(rig: Rig) -> None:
        await rig.call("a")
        await rig.call("b")
        assert rig.residency_changes() == ["+a 0", "-a 0", "+b 0"]

    services = [service("a", 1, memory_bytes=3 * MIB), service("b", 2, memory_bytes=3 * MIB)]
    run(Rig(services, devices(1, memory_bytes=5 * MIB)), test)


def test_memory_of_what_is_evicted_is_given_back_to_the_machine() -> None:
    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    async def test(rig: Rig) -> None:
        pid = rig.manager.process_ids()[0]
        before = resident(pid)
        await rig.call("big")
        full = resident(pid)
        await rig.call("small")
        assert full - before > 24 * MIB
        assert full - resident(pid) > 24 * MIB

    services = [service("big", 1, size=32 * MIB), service("small", 2, size=4096)]
    run(Rig(services, devices(1, memory_bytes=32 * MIB)), test)


def test_host_copies_are_shared_and_not_copied_for_each_process() -> None:
    def private(pid: int) -> int:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))

    async def test(rig: Rig) -> None:
        assert rig.manager.statistics().host_bytes == 64 * MIB
        assert all(private(pid) < 48 * MIB for pid in rig.manager.process_ids().values())

    run(Rig([service("a", size=64 * MIB)], devices(2, memory_bytes=64 * MIB)), test)


# ---- batches ------------------------------------------------------------------------------------------------------


def test_actions_of_one_batch_are_called_together() -> None:
    async def test(rig: Rig) -> None:
        calls = [rig.call("a", (0,), str(number).encode(), batch="lead") for number in range(4)]
        answers = [ended.answer for ended in await asyncio.gather(*calls)]
        assert answers == [expected(1, SIZE, str(number).encode(), batch=4) for number in range(4)]
        assert rig.manager.statistics().calls == 1

    run(Rig([service("a", batch_max=8)], devices(1)), test)


@pytest.mark.parametrize(("batch_max", "sizes"), [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 2, 2, 1]), (3, [3, 3, 3, 2, 2])])
def test_an_engine_is_never_given_more_than_it_can_batch(batch_max: int, sizes: list[int]) -> None:
    async def test(rig: Rig) -> None:
        calls = [rig.call("a", (0,), str(number).encode(), batch="lead") for number in range(5)]
        answers = [json.loads(ended.answer) for ended in await asyncio.gather(*calls)]
        assert [bytes.fromhex(answer["payload"]) for answer in answers] == [b"0", b"1", b"2", b"3", b"4"]
        assert [answer["batch"] for answer in answers] == sizes

    run(Rig([service("a", batch_max=batch_max)], devices(1)), test)


def test_an_action_that_joins_its_batch_late_is_called_next(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        lead = await rig.start("a", (0,), f"slow:{flag}".encode(), batch="lead")
        await until(flag.is_up)
        rider = asyncio.create_task(rig.call("a", (0,), b"late", batch="lead"))
        await asyncio.sleep(0)
        flag.lower()
        assert json.loads((await lead.wait()).answer)["batch"] == 1
        assert (await rider).answer == expected(1, SIZE, b"late")

    run(Rig([service("a", batch_max=8)], devices(1)), test)


# ---- one action per device ----------------------------------------------------------------------------------------


def test_devices_work_side_by_side(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        slow = await rig.start("a", (0,), f"slow:{flag}".encode())
        await until(flag.is_up)
        assert (await rig.call("a", (1,), b"x")).answer == expected(1, SIZE, b"x")
        assert not slow.ended.done()
        flag.lower()
        await slow.wait()

    run(Rig([service("a")], devices(2)), test)


def test_a_device_in_use_is_not_given_to_another_and_nothing_in_use_is_evicted(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        slow = await rig.start("a", (0,), f"slow:{flag}".encode())
        await until(flag.is_up)
        other = asyncio.create_task(rig.call("b", (0,), b"x"))
        done, _ = await asyncio.wait({other}, timeout=0.2)
        assert (done, rig.residency_changes()) == (set(), ["+a 0"])
        flag.lower()
        assert (await slow.wait()).lost == ""
        assert (await other).answer == expected(2, SIZE, b"x")
        assert rig.residency_changes() == ["+a 0", "-a 0", "+b 0"]

    run(Rig([service("a", 1), service("b", 2)], devices(1, memory_bytes=SIZE)), test)


def test_a_service_is_evicted_while_the_process_that_holds_it_runs_a_call_on_another_device(flag: Flag) -> None:
    """The process of device 0 holds `wide`, which is also on device 1, and runs a call on device 0."""

    async def test(rig: Rig) -> None:
        await rig.call("wide", (0, 1))
        slow = await rig.start("small", (0,), f"slow:{flag}".encode())
        await until(flag.is_up)
        assert (await rig.call("b", (1,), b"x")).answer == expected(3, SIZE, b"x")
        assert rig.residency_changes() == ["+wide 0,1", "+small 0", "-wide 0,1", "+b 1"]
        assert not slow.ended.done()
        flag.lower()
        assert (await slow.wait()).lost == ""

    services = [service("wide", 1, degrees=(2,)), service("small", 2, size=4096), service("b", 3)]
    run(Rig(services, devices(2, memory_bytes=SIZE)), test)


def test_two_loads_that_need_the_same_eviction_evict_once() -> None:
    async def test(rig: Rig) -> None:
        await rig.call("wide", (0, 1))
        await asyncio.gather(rig.call("a", (0,)), rig.call("b", (1,)))
        assert sorted(rig.residency_changes()) == ["+a 0", "+b 1", "+wide 0,1", "-wide 0,1"]
        assert rig.residency_changes()[:2] == ["+wide 0,1", "-wide 0,1"]

    services = [service("wide", 1, degrees=(2,)), service("a", 2), service("b", 3)]
    run(Rig(services, devices(2, memory_bytes=SIZE)), test)


# ---- ahead of actions ---------------------------------------------------------------------------------------------


def test_a_service_is_restored_ahead_of_its_next_action() -> None:
    async def test(rig: Rig) -> None:
        await rig.manager.restore("a", (0, 1))
        assert rig.residency_changes() == ["+a 0,1"]
        assert (await rig.call("a", (0, 1), b"x")).answer == expected(1, SIZE, b"x")
        assert rig.residency_changes() == ["+a 0,1"]
        assert rig.manager.statistics().loads == 1

    run(Rig([service("a", degrees=(1, 2))], devices(2)), test)


def test_nothing_is_restored_onto_devices_in_use(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        slow = await rig.start("a", (0,), f"slow:{flag}".encode())
        await until(flag.is_up)
        await rig.manager.restore("b", (0,))
        flag.lower()
        await slow.wait()
        assert rig.residency_changes() == ["+a 0", "-b 0"], "b was not brought there"

    run(Rig([service("a", 1), service("b", 2)], devices(1, memory_bytes=SIZE)), test)


def test_an_action_that_comes_during_a_restore_waits_for_it() -> None:
    async def test(rig: Rig) -> None:
        restoring = asyncio.create_task(rig.manager.restore("a", (0,)))
        await asyncio.sleep(0)
        assert (await rig.call("a", payload=b"x")).answer == expected(1, SIZE, b"x")
        await restoring
        assert rig.manager.statistics().loads == 1

    run(Rig([service("a")], devices(1)), test)


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_a_model_larger_than_a_device_is_refused_at_registration_with_the_sizes() -> None:
    with pytest.raises(InvalidConfig, match=r"service a at degree 1: expected at most 100 bytes.*got '101 bytes"):
        ModelManager([service("a", memory_bytes=101)], devices(1, memory_bytes=100), lambda _: None)
    ModelManager([service("a", degrees=(2,), memory_bytes=200)], devices(2, memory_bytes=100), lambda _: None)


def test_a_model_whose_weights_are_larger_than_declared_is_refused_before_anything_runs() -> None:
    async def test(rig: Rig) -> None:
        raise AssertionError("entered")

    with pytest.raises(InvalidConfig, match=f"expected at most {SIZE - 1} bytes.*got '{SIZE} bytes on each device'"):
        run(Rig([service("a")], devices(1, memory_bytes=SIZE - 1)), test)
    with pytest.raises(InvalidConfig, match=f"memory_bytes: expected at least {SIZE}"):
        run(Rig([service("a", memory_bytes=1000)], devices(1)), test)
    assert own_children() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "a", "degrees": ()},
        {"name": "a", "degrees": (3,)},
        {"name": "a", "degrees": (2, 1)},
        {"name": "a", "memory_bytes": -1},
        {"name": "a", "load_s_max": 0.0},
        {"name": "a", "call_s_max": 0.0},
        {"name": "a", "call_s_max": "600"},
        {"name": "a", "degrees": (1, "2")},
        {"name": "a", "degrees": [1, 2]},
        {"name": "a", "degrees": 2},
        {"name": "a", "engine": None},
        {"name": "a", "engine": BytesEngine},
        {"name": "a", "engine": Elsewhere()},
        {"name": "a", "engine": "module"},
        {"name": "a", "engine": BytesEngine(), "arguments": {"seed": 1}},
    ],
)
def test_an_invalid_service_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        Service(**{"engine": "tests.managers.models.bytes_engine:BytesEngine", **fields})


def test_what_cannot_be_registered_together_is_refused() -> None:
    for services, specs in (([service("a"), service("a")], devices(1)), ([service("a")], [])):
        with pytest.raises(InvalidConfig):
            ModelManager(services, specs, lambda _: None)
    with pytest.raises(InvalidConfig, match="the number of devices"):
        ModelManager([service("a", degrees=(4,))], devices(2), lambda _: None)
    for wrong in (service("a"), [service("a"), "b"], 2, None):
        with pytest.raises(InvalidConfig, match=r"services: expected a list of tangram\.Service"):
            ModelManager(wrong, devices(1), lambda _: None)  # type: ignore[arg-type]
    for wrong in (2, ["cuda:0"], "cuda:0", devices(1)[0]):
        with pytest.raises(InvalidConfig, match="devices: expected a list of devices"):
            ModelManager([service("a")], wrong, lambda _: None)  # type: ignore[arg-type]
    unpickled = Service(name="a", engine=BytesEngine(load=lambda: None))
    with pytest.raises(InvalidConfig, match="pickled"):
        ModelManager([unpickled], devices(1), lambda _: None)


def test_an_engine_whose_weights_are_elsewhere_has_to_declare_its_memory() -> None:
    async def test(rig: Rig) -> None:
        raise AssertionError("entered")

    with pytest.raises(InvalidConfig, match=r"service a memory_bytes: expected its size on devices .* 60 << 30"):
        Service(name="a", engine=Elsewhere())
    named = Service(name="a", engine="tests.managers.models.test_manager:Elsewhere")
    with pytest.raises(InvalidConfig, match="service a memory_bytes: expected its size on devices"):
        run(Rig([named], devices(1)), test)


def test_preparing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(rig: Rig) -> None:
        pass

    with caplog.at_level("INFO", logger="tangram"):
        run(Rig([service("a"), service("b", 2)], devices(2)), test)
    messages = [re.sub(r"\d+\.\d", "N", record.getMessage()) for record in caplog.records if record.name == "tangram"]
    services = [
        f"{word}" for name in "ab" for word in (f"preparing service {name}", f"service {name} is prepared, after N s")
    ]
    assert messages == [*services, "starting the processes of 2 devices", "devices are ready, after N s"]


def test_an_invalid_grant_or_action_is_refused() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(InvalidAction, match="one of 'a'"):
            await rig.call("b")
        with pytest.raises(InvalidAction, match="one of 'a'"):
            rig.manager.service(["a"])  # type: ignore[arg-type]
        with pytest.raises(InvalidAction, match="one of 1"):
            await rig.call("a", (0, 1))
        with pytest.raises(InvariantError, match="names no devices"):
            await rig.call("a", (7,))
        action = Action(id="x", demand=Demand({GPU: fixed(1)}), service="a")
        grant = Grant("x", "local", (Share("gpu@local", 1, 1, (0,)),), 1)
        with pytest.raises(ManagerError, match="not HoldGrant"):
            await rig.manager.start(action, grant, HoldGrant())

    run(Rig([service("a")], devices(2)), test)


@pytest.mark.parametrize("payload", ["text", bytearray(b"x"), None])
def test_a_payload_is_bytes(payload: Any) -> None:
    with pytest.raises(InvalidAction, match="bytes"):
        Infer(payload=payload)


# ---- its engines --------------------------------------------------------------------------------------------------


def test_an_engine_named_by_its_place_is_imported_only_by_the_processes_of_devices() -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.call("a", payload=b"x")).answer == expected(5, 4096, b"x")

    engine = "tests.managers.models.bytes_engine:BytesEngine"
    named = Service(name="a", engine=engine, arguments={"seed": 5, "size": 4096})
    run(Rig([named], devices(1)), test)


def test_the_processes_of_devices_have_one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def test(rig: Rig) -> None:
        assert (await rig.call("threads", payload=b"")).answer == b"1"

    threads = Service(name="threads", engine="tests.managers.models.test_manager:Threads")
    run(Rig([threads], devices(1)), test)


class Threads(BytesEngine):
    def call(self, loaded: Any, payloads: list[bytes]) -> list[bytes]:
        return [os.environ["OMP_NUM_THREADS"].encode() for _ in payloads]


def test_large_payloads_and_answers_cross_whole() -> None:
    payload = os.urandom(5 * MIB)

    async def test(rig: Rig) -> None:
        assert (await rig.call("echo", payload=payload)).answer == payload

    echo = Service(name="echo", engine="tests.managers.models.test_manager:Echo")
    run(Rig([echo], devices(1)), test)


class Echo(BytesEngine):
    def call(self, loaded: Any, payloads: list[bytes]) -> list[bytes]:
        return list(payloads)
