"""Failures of a model: which callers see each one, what is lost, what is not, and that it works again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.managers.models.bytes_engine import BytesEngine, expected
from tests.managers.models.conftest import SIZE, Flag, Rig, devices, own_children, run, service, until

from tangram.clock import SimClock
from tangram.core.action import Action
from tangram.core.demand import GPU, Demand, fixed
from tangram.core.messages import Grant, Share
from tangram.errors import AdmissionRefused, InvalidAction, InvariantError, ManagerError
from tangram.managers.models import Infer, Service
from tangram.managers.models import batch_lease as turns_module
from tangram.managers.models import manager as manager_module
from tangram.managers.models.batch_lease import InferLease
from tangram.managers.models.device_process import DeviceProcess, DeviceProcessNotReady
from tangram.processes.process_tree import read_process


async def answers(rig: Rig, name: str, seed: int, chunk: tuple[int, ...] = (0,)) -> None:
    ended = await rig.call(name, chunk, b"x")
    assert (ended.lost, ended.answer) == ("", expected(seed, SIZE, b"x"))


# ---- loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [(1,), (2,)])
def test_a_load_that_fails_halfway_leaves_nothing_and_evicts_only_what_it_must(
    flag: Flag, degrees: tuple[int, ...]
) -> None:
    chunk = tuple(range(degrees[0]))

    async def test(rig: Rig) -> None:
        await answers(rig, "old", 1)
        flag.raise_it()
        with pytest.raises(ManagerError, match=r"broken cannot be loaded on devices .* bytes each: RuntimeError: load"):
            await rig.call("broken", chunk)
        assert rig.residency_changes() == ["+old 0"]
        assert rig.manager.statistics().device_bytes == (SIZE, 0)
        await answers(rig, "old", 1)
        flag.lower()
        await answers(rig, "broken", 2, chunk)
        assert len(rig.manager.process_ids()) == 2

    services = [service("old", 1), service("broken", 2, degrees=degrees, load=f"raise:{flag}")]
    run(Rig(services, devices(2, memory_bytes=2 * SIZE)), test)


def test_a_load_that_evicted_services_and_fails_costs_only_those_services(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "old", 1)
        await answers(rig, "kept", 2)
        flag.raise_it()
        with pytest.raises(ManagerError, match="load fails"):
            await rig.call("broken")
        assert rig.residency_changes() == ["+old 0", "+kept 0", "-old 0"]
        assert rig.manager.statistics().device_bytes == (SIZE,)
        await answers(rig, "kept", 2)
        await answers(rig, "old", 1)
        assert rig.residency_changes()[3:] == ["+old 0"]

    services = [service("old", 1), service("kept", 2), service("broken", 3, load=f"raise:{flag}")]
    run(Rig(services, devices(1, memory_bytes=2 * SIZE)), test)


def test_a_load_that_fails_between_two_devices_leaves_nothing_on_the_first(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        flag.raise_it()
        with pytest.raises(ManagerError, match=rf"device 1 has 0 of its {SIZE} bytes free, and {SIZE // 2} are needed"):
            await rig.call("wide", (0, 1))
        assert rig.manager.statistics().device_bytes == (0, 0)
        assert rig.residency_changes() == []
        await answers(rig, "old", 1)
        flag.lower()
        await answers(rig, "wide", 2, (0, 1))

    services = [service("old", 1), service("wide", 2, degrees=(2,), hoard=str(flag))]
    run(Rig(services, devices(2, memory_bytes=SIZE)), test)


def test_a_load_that_needs_more_than_declared_fails_with_the_sizes_and_leaves_nothing() -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "old", 1)
        wanted = (
            f"which it needs {SIZE} bytes each: device 0 has 0 of its {2 * SIZE} bytes free, and {1 << 40} are needed"
        )
        with pytest.raises(ManagerError, match=wanted):
            await rig.call("greedy")
        assert rig.residency_changes() == ["+old 0"]
        assert rig.manager.statistics().device_bytes == (SIZE,)
        await answers(rig, "old", 1)

    run(Rig([service("old", 1), service("greedy", 2, greedy="yes")], devices(1, memory_bytes=2 * SIZE)), test)


def test_all_of_a_batch_hear_of_a_load_that_failed(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        flag.raise_it()
        ends = await asyncio.gather(*(rig.call("a", batch="lead") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(end, ManagerError) and "load fails" in str(end) for end in ends)
        assert rig.manager.statistics().loads == 0
        flag.lower()
        await answers(rig, "a", 1)

    run(Rig([service("a", load=f"raise:{flag}", batch_max=4)], devices(1)), test)


def test_a_process_that_dies_during_a_load_is_started_again_at_the_next_use(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "old", 1)
        flag.raise_it()
        with pytest.raises(ManagerError, match="the process of device 0: it ended with signal 9"):
            await rig.call("broken")
        assert rig.residency_changes() == ["+old 0", "-old 0"]
        assert rig.manager.statistics().device_bytes == (0,)
        flag.lower()
        await answers(rig, "broken", 2)

    run(Rig([service("old", 1), service("broken", 2, load=f"crash:{flag}")], devices(1)), test)


def test_a_load_that_hangs_is_ended_after_its_time(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        flag.raise_it()
        with pytest.raises(ManagerError, match=r"took longer than 5\.0 s"):
            await rig.call("broken")
        flag.lower()
        await answers(rig, "broken", 1)

    broken = Service(name="broken", engine=BytesEngine(size=SIZE, load=f"hang:{flag}"), load_s_max=5.0)
    run(Rig([broken], devices(1)), test)


def test_a_cancelled_caller_leaves_a_load_and_the_next_caller_uses_it(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        slow = await rig.start("a", (0,), f"slow:{flag}".encode())
        await until(flag.is_up)
        waiting = asyncio.create_task(rig.call("b"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        flag.lower()
        await slow.wait()
        await answers(rig, "b", 2)

    run(Rig([service("a", 1), service("b", 2)], devices(1)), test)


# ---- calls --------------------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_loses_its_call_and_its_residents_and_nothing_else(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "b", 2, (1,))
        await answers(rig, "b", 2, (0,))
        lease = await rig.start("a", (0,), f"wait:{flag}".encode())
        await until(flag.is_up)
        before = rig.manager.process_ids()
        os.kill(before[0], signal.SIGKILL)
        ended = await lease.wait()
        assert "service a was lost during the call: the process of device 0: it ended with signal 9" in ended.lost
        assert rig.residency_changes() == ["+b 1", "+b 0", "+a 0", "-b 0", "-a 0"]
        assert rig.manager.process_ids() == {1: before[1]}
        await answers(rig, "b", 2, (1,))
        await answers(rig, "a", 1, (0,))
        assert rig.residency_changes()[5:] == ["+a 0"]
        assert rig.manager.process_ids()[1] == before[1] != rig.manager.process_ids()[0]

    run(Rig([service("a", 1), service("b", 2)], devices(2)), test)


def test_a_process_that_is_killed_between_calls_is_reported_and_replaced() -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "a", 1)
        os.kill(rig.manager.process_ids()[0], signal.SIGKILL)
        await until(lambda: rig.residency_changes() == ["+a 0", "-a 0"])
        await answers(rig, "a", 1)

    run(Rig([service("a")], devices(1)), test)


def test_a_call_right_after_a_kill_is_not_lost_because_it_had_not_begun() -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "a", 1)
        for _ in range(5):
            for pid in rig.manager.process_ids().values():
                os.kill(pid, signal.SIGKILL)
            try:
                await answers(rig, "a", 1)
            except ManagerError as error:  # it ended in the middle of being loaded again
                assert "signal 9" in str(error)  # noqa: PT017

    run(Rig([service("a")], devices(1)), test)


def test_a_model_that_crashes_takes_its_batch_along_and_the_next_call_works() -> None:
    async def test(rig: Rig) -> None:
        ends = await asyncio.gather(rig.call("a", payload=b"crash", batch="l"), rig.call("a", payload=b"x", batch="l"))
        assert all("signal 9" in ended.lost for ended in ends)
        await answers(rig, "a", 1)

    run(Rig([service("a", batch_max=2)], devices(1)), test)


def test_calls_queued_behind_a_crash_are_served_by_the_next_process() -> None:
    async def test(rig: Rig) -> None:
        ends = await asyncio.gather(*(rig.call("a", payload=p, batch="l") for p in (b"x", b"crash", b"y")))
        assert [bool(ended.lost) for ended in ends] == [False, True, False]
        assert ends[2].answer == expected(1, SIZE, b"y")
        assert rig.residency_changes() == ["+a 0", "-a 0", "+a 0"]

    run(Rig([service("a", batch_max=1)], devices(1)), test)


def test_an_engine_that_raises_is_our_failure_and_the_service_stays() -> None:
    async def test(rig: Rig) -> None:
        ended = await rig.call("a", payload=b"raise")
        error = r"service a failed: RuntimeError: no such token \(bytes_engine\.py, line \d+, in misbehave\)"
        assert re.fullmatch(error, ended.lost)
        await answers(rig, "a", 1)
        assert rig.residency_changes() == ["+a 0"]

    run(Rig([service("a")], devices(1)), test)


def test_a_payload_that_the_engine_finds_wrong_is_the_fault_of_its_caller() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(5):  # and does not count against the service
            lease = await rig.start("a", payload=b"bad")
            with pytest.raises(InvalidAction, match="payload: expected a payload that is good, got 'bad'"):
                await lease.wait()
        await answers(rig, "a", 1)

    run(Rig([service("a")], devices(1)), test)


def test_a_payload_that_breaks_a_batch_breaks_only_its_own_call() -> None:
    async def test(rig: Rig) -> None:
        payloads = [b"x", b"raise", b"y", b"bad"]
        leases = await asyncio.gather(*(rig.start("a", payload=payload, batch="lead") for payload in payloads))
        ends = await asyncio.gather(*(lease.wait() for lease in leases), return_exceptions=True)
        x, raised, y, bad = ends
        assert isinstance(bad, InvalidAction)
        assert not isinstance(x, BaseException) and not isinstance(y, BaseException)
        assert not isinstance(raised, BaseException)
        assert (x.answer, y.answer) == (expected(1, SIZE, b"x"), expected(1, SIZE, b"y"))
        assert "no such token" in raised.lost

    run(Rig([service("a", batch_max=8)], devices(1)), test)


def test_what_must_not_be_repeated_is_not_called_again_when_its_batch_fails(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def test(rig: Rig) -> None:
        payloads = {b"x": True, b"raise": True, b"once": False, b"y": True}
        starts = (rig.start("a", payload=p, batch="lead", idempotent=again) for p, again in payloads.items())
        leases = await asyncio.gather(*starts)
        x, raised, once, y = [await lease.wait() for lease in leases]
        assert "service a failed together with 3 others: RuntimeError: no such token" in once.lost
        assert "service a failed: RuntimeError: no such token" in raised.lost
        assert (x.answer, y.answer) == (expected(1, SIZE, b"x"), expected(1, SIZE, b"y"))
        assert log.read_text().split() == ["x", "raise", "once", "y", "x", "raise", "y"]

    run(Rig([service("a", batch_max=8, calls=str(log))], devices(1)), test)


def test_a_batch_of_what_must_not_be_repeated_counts_once_when_it_fails() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            await asyncio.gather(*(rig.call("a", payload=b"raise", batch="lead", idempotent=False) for _ in range(4)))
        with pytest.raises(AdmissionRefused, match="no such token"):
            await rig.call("a", payload=b"x")

    run(Rig([service("a", batch_max=4)], devices(1), circuit_pause_s=3600.0), test)


def test_what_was_lost_with_a_batch_is_made_again_alone() -> None:
    """Else one that kills its process each time takes the others along each time."""

    async def test(rig: Rig) -> None:
        payloads = {"k": b"crash", "i": b"x"}
        for attempt in (1, 2):
            killer, other = await asyncio.gather(
                *(rig.call("a", payload=p, batch="l", again=id_, attempt=attempt) for id_, p in payloads.items())
            )
            assert killer.lost and bool(other.lost) == (attempt == 1)
        assert other.answer == expected(1, SIZE, b"x")

    run(Rig([service("a", batch_max=2)], devices(1)), test)


def test_an_engine_that_returns_too_few_answers_is_detected() -> None:
    async def test(rig: Rig) -> None:
        ended = await rig.call("a", payload=b"few")
        assert "gave 0 answers to 1 payloads" in ended.lost
        await answers(rig, "a", 1)

    run(Rig([service("a", batch_max=4)], devices(1)), test)


# ---- stopping -----------------------------------------------------------------------------------------------------


def test_a_call_that_can_be_interrupted_is_stopped_without_losing_the_service(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        lease = await rig.start("a", payload=f"wait:{flag}".encode())
        await until(flag.is_up)
        before = rig.manager.process_ids()
        await lease.stop()
        ended = await lease.wait()
        assert (ended.lost, ended.answer) == ("", b"")
        assert rig.manager.process_ids() == before
        await answers(rig, "a", 1)
        assert rig.residency_changes() == ["+a 0"]

    run(Rig([service("a")], devices(1)), test)


def test_a_call_that_hangs_is_killed_with_the_process_of_its_device(
    flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "STOP_GRACE_S", 0.1)

    async def test(rig: Rig) -> None:
        lease = await rig.start("a", payload=f"stubborn:{flag}".encode())
        await until(flag.is_up)
        pid = rig.manager.process_ids()[0]
        await lease.stop()
        assert (await lease.wait()).lost == ""
        assert read_process(pid) is None
        assert rig.residency_changes() == ["+a 0", "-a 0"]
        await answers(rig, "a", 1)

    run(Rig([service("a")], devices(1)), test)


def test_stopping_one_call_of_a_batch_leaves_the_rest_alone(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        payloads = [f"slow:{flag}".encode(), b"x", b"y"]
        lead, rider, other = await asyncio.gather(*(rig.start("a", payload=p, batch="lead") for p in payloads))
        await until(flag.is_up)
        await rider.stop()
        assert (await rider.wait()).answer == b""
        await lead.stop()
        assert not other.ended.done()
        flag.lower()
        assert (await other.wait()).answer == expected(1, SIZE, b"y", batch=3)

    run(Rig([service("a", batch_max=3)], devices(1)), test)


def test_a_batch_of_which_all_are_stopped_is_interrupted(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        payloads = [f"wait:{flag}".encode(), b"x"]
        leases = await asyncio.gather(*(rig.start("a", payload=p, batch="lead") for p in payloads))
        await until(flag.is_up)
        await asyncio.gather(*(lease.stop() for lease in leases))
        assert [(await lease.wait()).lost for lease in leases] == ["", ""]
        await answers(rig, "a", 1)

    run(Rig([service("a", batch_max=2)], devices(1)), test)


def test_a_call_that_raises_while_it_is_stopped_does_not_cost_the_process(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        lease = await rig.start("a", payload=f"lingers:{flag}".encode())
        before = rig.manager.process_ids()
        await until(flag.is_up)  # the traceback is printed, in which nothing can be raised
        flag.lower()
        await until(flag.is_up)  # the reason is put into words
        stopping = asyncio.create_task(lease.stop())
        await asyncio.sleep(0.1)  # the interrupt is there
        flag.lower()
        await stopping
        assert (await lease.wait()).answer == b""
        await answers(rig, "a", 1)
        assert rig.manager.process_ids() == before

    run(Rig([service("a")], devices(1)), test)


def test_what_was_stopped_is_not_called_again_when_its_batch_fails(tmp_path: Path, flag: Flag) -> None:
    log = tmp_path / "log"

    async def test(rig: Rig) -> None:
        payloads = [f"turned:{flag}".encode(), b"x"]
        leases = await asyncio.gather(*(rig.start("a", payload=p, batch="lead") for p in payloads))
        await until(flag.is_up)
        await asyncio.gather(*(lease.stop() for lease in leases))
        assert [(await lease.wait()).lost for lease in leases] == ["", ""]
        assert log.read_text().split() == [f"turned:{flag}", "x"]
        await answers(rig, "a", 1)

    run(Rig([service("a", batch_max=2, calls=str(log))], devices(1)), test)


def test_a_call_that_waits_for_its_batch_is_stopped_at_once(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        payloads = [f"slow:{flag}".encode(), b"x"]
        first, second = await asyncio.gather(*(rig.start("a", payload=p, batch="lead") for p in payloads))
        await until(flag.is_up)
        await second.stop()
        await second.stop()
        assert (await second.wait()).answer == b""
        flag.lower()
        assert (await first.wait()).lost == ""

    run(Rig([service("a", batch_max=1)], devices(1)), test)


def test_a_stop_that_comes_after_the_end_does_nothing() -> None:
    async def test(rig: Rig) -> None:
        lease = await rig.start("a", payload=b"x")
        ended = await lease.wait()
        await lease.stop()
        assert await lease.wait() == ended
        await answers(rig, "a", 1)

    run(Rig([service("a")], devices(1)), test)


def test_interrupts_never_hit_the_call_behind_the_one_that_was_meant() -> None:
    async def test(rig: Rig) -> None:
        for number in range(60):
            lease = await rig.start("a", payload=b"x")
            if number % 3:
                await asyncio.sleep(0.0003 * (number % 5))
            stopping = asyncio.create_task(lease.stop())
            ended = await lease.wait()
            assert ended.lost == ""
            await stopping
            await answers(rig, "a", 1)
        assert rig.residency_changes() == ["+a 0"]

    run(Rig([service("a")], devices(1)), test)


# ---- evicting -----------------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_let_go_of_device_memory_loses_its_process() -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "keeps", 1)
        before = rig.manager.process_ids()
        await answers(rig, "b", 2)
        assert rig.residency_changes() == ["+keeps 0", "-keeps 0", "+b 0"]
        assert rig.manager.process_ids() != before
        assert rig.manager.statistics().device_bytes == (SIZE,)

    services = [service("keeps", 1, keep="yes"), service("b", 2)]
    run(Rig(services, devices(1, memory_bytes=SIZE)), test)


def test_an_unload_that_raises_frees_the_memory_all_the_same(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "a", 1)
        await answers(rig, "b", 2)
        assert rig.residency_changes() == ["+a 0", "-a 0", "+b 0"]

    run(Rig([service("a", 1, unload="raise"), service("b", 2)], devices(1, memory_bytes=SIZE)), test)


def test_an_unload_that_hangs_loses_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "UNLOAD_S_MAX", 0.2)

    async def test(rig: Rig) -> None:
        await answers(rig, "a", 1)
        await answers(rig, "b", 2)
        assert rig.residency_changes() == ["+a 0", "-a 0", "+b 0"]

    run(Rig([service("a", 1, unload="hang"), service("b", 2)], devices(1, memory_bytes=SIZE)), test)


# ---- failing again and again --------------------------------------------------------------------------------------


def test_a_service_that_keeps_failing_is_refused_until_a_trial_works(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        flag.raise_it()
        for _ in range(3):
            with pytest.raises(ManagerError, match="load fails"):
                await rig.call("a")
        with pytest.raises(AdmissionRefused, match="service a failed 3 times in a row"):
            await rig.call("a")
        await rig.manager.restore("a", (0,))
        await answers(rig, "b", 2)
        clock.set(3600.0)
        with pytest.raises(ManagerError, match="load fails"):
            await rig.call("a")
        with pytest.raises(AdmissionRefused):
            await rig.call("a")
        clock.set(7200.0)
        flag.lower()
        await answers(rig, "a", 1)
        await answers(rig, "a", 1)

    clock = SimClock()
    services = [service("a", 1, load=f"raise:{flag}"), service("b", 2)]
    run(Rig(services, devices(1), circuit_pause_s=3600.0, clock=clock), test)


def test_crashes_of_calls_count_as_well_and_one_batch_counts_once() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(2):
            await asyncio.gather(*(rig.call("a", payload=b"crash", batch="l") for _ in range(4)))
        assert (await rig.call("a", payload=b"crash")).lost
        with pytest.raises(AdmissionRefused, match="signal 9"):
            await rig.call("a")

    run(Rig([service("a", batch_max=4)], devices(1), circuit_pause_s=3600.0), test)


def test_a_payload_that_kills_the_process_opens_the_circuit_only_after_three_actions() -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "a", 1)
        for action in ("one", "two", "three"):
            for attempt in (1, 2, 3) if action != "three" else (1,):
                assert (await rig.call("a", payload=b"crash", again=action, attempt=attempt)).lost
        with pytest.raises(AdmissionRefused, match="failed 3 times in a row"):
            await rig.call("a", payload=b"x")

    run(Rig([service("a")], devices(1), circuit_pause_s=3600.0), test)


def test_a_process_that_does_not_get_ready_counts_against_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(process: DeviceProcess, hello: object, descriptors: object) -> None:
        raise DeviceProcessNotReady(f"{process.name} did not get ready")

    async def test(rig: Rig) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceProcess, "open", never)
            os.kill(rig.manager.process_ids()[0], signal.SIGKILL)
            await until(lambda: not rig.manager.process_ids())
            for _ in range(4):
                with pytest.raises(ManagerError, match="device 0 did not get ready"):
                    await rig.start("a")
        await answers(rig, "a", 1)

    run(Rig([service("a")], devices(1)), test)


def test_loads_that_fail_count_once_for_each_action(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        flag.raise_it()
        for action in ("one", "two", "three"):
            for attempt in (1, 2, 3) if action != "three" else (1,):
                with pytest.raises(ManagerError, match="load fails"):
                    await rig.call("a", again=action, attempt=attempt)
        with pytest.raises(AdmissionRefused, match="load fails"):
            await rig.call("a")

    run(Rig([service("a", load=f"raise:{flag}")], devices(1), circuit_pause_s=3600.0), test)


def test_a_service_that_worked_is_reloaded_after_three_actions_that_raised() -> None:
    async def test(rig: Rig) -> None:
        await answers(rig, "a", 1)
        for _ in range(2):
            assert "no such token" in (await rig.call("a", payload=b"raise")).lost
        assert rig.residency_changes() == ["+a 0"]
        assert "no such token" in (await rig.call("a", payload=b"raise")).lost
        await until(lambda: rig.residency_changes() == ["+a 0", "-a 0"])
        for _ in range(10):
            assert "no such token" in (await rig.call("a", payload=b"raise")).lost
        await answers(rig, "a", 1)
        assert rig.residency_changes() == ["+a 0", "-a 0", "+a 0"], "a fresh load that did not help is not repeated"

    run(Rig([service("a")], devices(1), circuit_pause_s=3600.0), test)


def test_calls_behind_the_third_that_raised_are_served_by_the_reloaded_service() -> None:
    async def test(rig: Rig) -> None:
        payloads = [b"x", b"raise", b"raise", b"raise", b"y"]
        ends = await asyncio.gather(*(rig.call("a", payload=payload, batch="lead") for payload in payloads))
        assert [bool(ended.lost) for ended in ends] == [False, True, True, True, False]
        assert rig.residency_changes() == ["+a 0", "-a 0", "+a 0"]
        assert rig.manager.statistics().calls == 5

    run(Rig([service("a")], devices(1)), test)


def test_a_failed_restore_is_an_error_and_leaves_nothing(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        flag.raise_it()
        with pytest.raises(ManagerError, match="load fails"):
            await rig.manager.restore("a", (0,))
        assert rig.residency_changes() == ["-a 0"]
        flag.lower()
        await answers(rig, "a", 1)

    run(Rig([service("a", load=f"raise:{flag}")], devices(1)), test)


# ---- beginning and end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["raise", "crash"])
def test_a_service_that_cannot_be_prepared_is_an_error_and_leaves_nothing(fault: str) -> None:
    async def test(rig: Rig) -> None:
        raise AssertionError("entered")

    with pytest.raises(ManagerError, match="service a cannot be prepared") as caught:
        run(Rig([service("a", prepare=fault)], devices(1)), test)
    assert not caught.value.retry
    assert own_children() == []


@pytest.mark.parametrize("engine", ["no_such_module:Engine", "json:loads", "tests.managers.models.conftest:DEADLINE_S"])
def test_an_invalid_engine_is_detected_at_the_start(engine: str) -> None:
    async def test(rig: Rig) -> None:
        raise AssertionError("entered")

    with pytest.raises(ManagerError, match="service a cannot be prepared"):
        run(Rig([Service(name="a", engine=engine)], devices(1)), test)
    assert own_children() == []


def test_what_runs_when_the_manager_ends_is_lost_and_nothing_is_left(flag: Flag) -> None:
    leases: list[InferLease] = []

    async def test(rig: Rig) -> None:
        leases.append(await rig.start("a", payload=f"stubborn:{flag}".encode()))
        await until(flag.is_up)

    rig = Rig([service("a")], devices(2))
    run(rig, test)
    assert "was closed" in leases[0].ended.result().lost
    assert rig.residency_changes() == ["+a 0"]


def test_nothing_starts_in_a_manager_that_has_ended() -> None:
    async def main() -> None:
        rig = Rig([service("a")], devices(1))
        async with rig.manager:
            await answers(rig, "a", 1)
        with pytest.raises(ManagerError, match="was closed"):
            await rig.call("a")

    asyncio.run(main())


def test_processes_of_devices_die_with_a_manager_that_is_killed(flag: Flag) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from tests.managers.models.conftest import Rig, devices, service

        async def main():
            rig = Rig([service("a")], devices(2))
            async with rig.manager:
                await rig.start("a", payload=b"stubborn:{flag}")
                while not __import__("os").path.exists("{flag}"):
                    await asyncio.sleep(0.01)
                print(*rig.manager.process_ids().values(), flush=True)
                await asyncio.sleep(3600)

        asyncio.run(main())
    """)
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, text=True) as killed:
        assert killed.stdout is not None
        pids = [int(word) for word in killed.stdout.readline().split()]
        killed.kill()
    assert len(pids) == 2

    def gone(pid: int) -> bool:
        process = read_process(pid)
        return process is None or not process.is_alive

    asyncio.run(until(lambda: all(gone(pid) for pid in pids)))


def test_events_are_published_in_order_and_completely() -> None:
    """Many services, few devices, several at once, some killed: the events describe what is loaded."""

    async def test(rig: Rig) -> None:
        async def client(number: int, chunk: tuple[int, ...]) -> None:
            for step in range(12):
                name = f"s{(number + step * 5) % 6}"
                try:
                    ended = await rig.call(name, chunk, b"x")
                except ManagerError as error:
                    assert "signal 9" in str(error)  # noqa: PT017
                    continue
                assert ended.answer == expected(int(name[1:]), 64 << 10, b"x") or "signal 9" in ended.lost
                if step == 6 and number == 0:
                    os.kill(rig.manager.process_ids()[0], signal.SIGKILL)

        await asyncio.gather(client(0, (0,)), client(1, (1,)), client(2, (2, 3)), client(3, (0, 1)))
        there: dict[str, None] = {}
        for word in rig.residency_changes():
            if word[0] == "+":
                assert word[1:] not in there
                there[word[1:]] = None
            else:
                del there[word[1:]]
        residents = rig.manager.statistics().residents
        assert sorted(there) == sorted(f"{p.service} {','.join(map(str, p.devices))}" for p in residents)

    services = [service(f"s{n}", n, size=64 << 10, degrees=(1, 2)) for n in range(6)]
    run(Rig(services, devices(4, memory_bytes=150 << 10)), test)


def test_the_grant_of_another_node_is_a_bug_that_is_caught() -> None:
    async def test(rig: Rig) -> None:
        action = Action(id="x", demand=Demand({GPU: fixed(1)}), service="a")
        grant = Grant("x", "far", (Share("gpu@far", 1, 1, (0,)),), 1)
        with pytest.raises(InvariantError, match="names no devices of local"):
            await rig.manager.start(action, grant, Infer(payload=b""))

    run(Rig([service("a")], devices(1)), test)
