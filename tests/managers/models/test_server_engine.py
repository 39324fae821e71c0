"""The engine for servers, against a small server that implements the contract of sleep mode."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.managers.models.bytes_engine import expected
from tests.managers.models.conftest import SIZE, Rig, devices, run, service, until
from tests.managers.models.late_clock import LateClock

from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.managers.models import Service
from tangram.managers.models.server_engine import ServerEngine
from tangram.processes.process_tree import read_process

PROGRAM = Path(__file__).with_name("sleepy_server.py")
MEMORY = 10 * SIZE


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        """Without the numbers of processes."""
        return [line.split()[0] if line.startswith("start") else line for line in self.words()]

    def words(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.words() if line.startswith("start")]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "log")
    yield made
    assert [pid for pid in made.pids() if (process := read_process(pid)) is not None and process.is_alive] == []


def server(
    log: Log, degrees: tuple[int, ...] = (1,), *, name: str = "judge", fault: str = "", **options: Any
) -> Service:
    command = (sys.executable, str(PROGRAM), "{port}", str(log.path), *filter(None, [fault]))
    engine = ServerEngine(command, **{"start_s_max": 60.0, **options})
    return Service(name=name, engine=engine, degrees=degrees, memory_bytes=MEMORY)


def prompt(text: str) -> bytes:
    return json.dumps({"prompt": text}).encode()


async def infer_text(rig: Rig, text: str, chunk: tuple[int, ...] = (0,), name: str = "judge") -> dict[str, Any]:
    ended = await rig.call(name, chunk, prompt(text))
    assert ended.lost == ""
    document: dict[str, Any] = json.loads(ended.answer)
    return document


def test_a_server_is_started_once_then_woken_and_put_to_sleep_for_other_services(log: Log) -> None:
    async def test(rig: Rig) -> None:
        first = await infer_text(rig, "a")
        assert first["text"] == "A"
        for _ in range(2):
            assert (await rig.call("other", payload=b"x")).answer == expected(2, SIZE, b"x")
            assert (await infer_text(rig, "b"))["pid"] == first["pid"]
        assert log.lines() == ["start", "sleep 1", "wake_up", "sleep 1", "wake_up"]
        assert rig.residency_changes()[:5] == ["+judge 0", "-judge 0", "+other 0", "-other 0", "+judge 0"]

    run(Rig([server(log), service("other", 2)], devices(1, memory_bytes=MEMORY)), test)


def test_two_servers_that_do_not_fit_together_alternate_by_sleeping_and_waking(log: Log, tmp_path: Path) -> None:
    other = Log(tmp_path / "other")

    async def test(rig: Rig) -> None:
        pids = set()
        for _ in range(3):
            pids |= {(await infer_text(rig, "a"))["pid"], (await infer_text(rig, "b", name="second"))["pid"]}
        assert len(pids) == 2
        assert log.lines() == ["start", "sleep 1", "wake_up", "sleep 1", "wake_up", "sleep 1"]
        assert other.lines() == ["start", "sleep 1", "wake_up", "sleep 1", "wake_up"]

    run(Rig([server(log), server(other, name="second")], devices(1, memory_bytes=MEMORY)), test)


def is_gone(pid: int) -> bool:
    return (process := read_process(pid)) is None or not process.is_alive


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("unhealthy", r"was not healthy within \d+ s"),
        ("sleepless", "has no sleep mode: 404 to GET /is_sleeping; .* --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"),
        ("garbled", "responded to GET /is_sleeping with '<html>'; expected"),
        ("drowsy", r"did not wake up within \d+ s"),
    ],
)
def test_a_server_whose_load_fails_is_killed_and_the_next_service_has_the_device(
    log: Log, fault: str, complaint: str
) -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(ManagerError, match=complaint):
            await rig.call("judge", payload=prompt("a"))
        [pid] = log.pids()
        assert is_gone(pid)
        assert 0 in rig.manager.process_ids(), "and the process of the device lives on"
        assert (await rig.call("other", payload=b"x")).answer == expected(2, SIZE, b"x")

    judge = server(log, fault=fault)
    judge.engine._clock = LateClock(log.path, "asked")  # type: ignore[attr-defined]  # noqa: SLF001 - users need no other clock
    run(Rig([judge, service("other", 2)], devices(1, memory_bytes=MEMORY)), test)


def test_the_memory_of_a_server_has_to_be_declared() -> None:
    with pytest.raises(InvalidConfig, match=r"memory_bytes: expected its size on devices .* such as 60 << 30"):
        Service(name="judge", engine=ServerEngine(("vllm",)))


def test_every_chunk_has_a_server_that_sees_its_devices_alone(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    async def test(rig: Rig) -> None:
        assert [(await infer_text(rig, "a", chunk))["devices"] for chunk in ((1,), (0, 1))] == ["1", "0,1"]
        assert len(log.pids()) == 2

    run(Rig([server(log, degrees=(1, 2))], devices(2, memory_bytes=2 * MEMORY)), test)


def test_requests_of_a_batch_are_sent_in_parallel(log: Log) -> None:
    async def test(rig: Rig) -> None:
        calls = [rig.call("judge", (0,), prompt(text), batch="lead") for text in ("pair1", "pair2", "x")]
        assert [json.loads(ended.answer)["text"] for ended in await asyncio.gather(*calls)] == ["PAIR1", "PAIR2", "X"]

    run(Rig([server(log)], devices(1, memory_bytes=MEMORY)), test)


def test_the_status_of_a_response_decides_whether_the_caller_or_the_service_failed(log: Log) -> None:
    async def test(rig: Rig) -> None:
        assert (await infer_text(rig, "a"))["text"] == "A"
        lease = await rig.start("judge", payload=prompt("wrong"))
        with pytest.raises(InvalidAction, match="400: no such parameter"):
            await lease.wait()
        for status in (413, 422):
            with pytest.raises(InvalidAction, match=f"{status}: as you like"):
                await rig.call("judge", payload=prompt(str(status)))
        assert "the server responded 500: out of luck" in (await rig.call("judge", payload=prompt("broken"))).lost
        for status in (429, 503):
            assert (
                f"the server responded {status}: as you like"
                in (await rig.call("judge", payload=prompt(str(status)))).lost
            )
        assert (await infer_text(rig, "a"))["text"] == "A"
        for status in (401, 404):
            ended = await rig.call("judge", payload=prompt(str(status)))
            assert "the service is misconfigured" in ended.lost
            assert f"responded to POST /v1/completions with {status}: as you like" in ended.lost
        assert (await infer_text(rig, "a"))["text"] == "A"

    run(Rig([server(log)], devices(1, memory_bytes=MEMORY)), test)


def test_a_server_that_crashes_loses_its_call_and_is_started_for_the_next(log: Log) -> None:
    async def test(rig: Rig) -> None:
        assert "it ended with code 3" in (await rig.call("judge", payload=prompt("crash"))).lost
        assert (await infer_text(rig, "a"))["text"] == "A"
        os.kill(log.pids()[-1], signal.SIGKILL)
        await until(lambda: (found := read_process(log.pids()[1])) is None or not found.is_alive)
        assert (await infer_text(rig, "b"))["text"] == "B"
        assert log.lines() == ["start", "start", "start"]

    run(Rig([server(log)], devices(1, memory_bytes=MEMORY)), test)


def test_a_call_that_is_stopped_hangs_up_and_the_server_stays(log: Log) -> None:
    async def test(rig: Rig) -> None:
        payloads = (prompt("wait"), prompt("wait"))
        leases = await asyncio.gather(*(rig.start("judge", payload=payload, batch="lead") for payload in payloads))
        await until(lambda: log.lines().count("waiting") == 2)
        await asyncio.gather(*(lease.stop() for lease in leases))
        await until(lambda: log.lines().count("hung up") == 2)
        assert (await infer_text(rig, "a"))["text"] == "A"
        assert len(log.pids()) == 1

    run(Rig([server(log)], devices(1, memory_bytes=MEMORY)), test)


def test_a_server_that_does_not_go_to_sleep_is_killed(log: Log) -> None:
    async def test(rig: Rig) -> None:
        await infer_text(rig, "lazy")
        assert (await rig.call("other", payload=b"x")).answer == expected(2, SIZE, b"x")
        assert (await infer_text(rig, "a"))["text"] == "A"
        assert log.lines() == ["start", "start"]

    run(Rig([server(log), service("other", 2)], devices(1, memory_bytes=MEMORY)), test)


def test_the_server_of_a_process_that_is_killed_ends_with_it(log: Log) -> None:
    async def test(rig: Rig) -> None:
        await infer_text(rig, "a")
        os.kill(rig.manager.process_ids()[0], signal.SIGKILL)
        await until(lambda: (found := read_process(log.pids()[0])) is None or not found.is_alive)
        assert (await infer_text(rig, "b"))["text"] == "B"

    run(Rig([server(log)], devices(1, memory_bytes=MEMORY)), test)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_that_runs_elsewhere_is_woken_and_put_to_sleep_and_outlives_us(log: Log) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def test(rig: Rig) -> None:
        await infer_text(rig, "a")
        await rig.call("other")
        await infer_text(rig, "b")
        assert log.lines() == ["start", "sleep 1", "wake_up"]

    engine = ServerEngine(url=f"http://127.0.0.{{degree}}:{port}")
    elsewhere = Service(name="judge", engine=engine, memory_bytes=MEMORY)
    with subprocess.Popen([sys.executable, str(PROGRAM), str(port), str(log.path)]) as process:
        try:
            asyncio.run(until(lambda: answers(port)))
            run(Rig([elsewhere, service("other", 2)], devices(1, memory_bytes=MEMORY)), test)
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ((sys.executable, "-c", "raise SystemExit(4)"), "the server ended with code 4"),
        (("no-such-server",), "does not exist"),
    ],
)
def test_a_server_that_cannot_be_started_is_an_error(command: tuple[str, ...], complaint: str) -> None:
    async def test(rig: Rig) -> None:
        await rig.call("judge", payload=prompt("a"))

    judge = Service(name="judge", engine=ServerEngine(command, start_s_max=60.0), memory_bytes=MEMORY)
    with pytest.raises(ManagerError, match=complaint):
        run(Rig([judge], devices(1, memory_bytes=MEMORY)), test)


def test_a_server_has_either_a_command_or_an_url() -> None:
    for arguments in ({}, {"command": ("x",), "url": "http://x"}):
        with pytest.raises(InvalidConfig, match="either"):
            ServerEngine(**arguments)
