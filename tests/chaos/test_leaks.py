"""Long runs: what is opened is closed, and nothing grows with the number of sandboxes and actions."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import (
    cgroup_names,
    children,
    first_processes,
    mounts_below,
    read_proc_file,
    run,
    spawner,
    until,
)

import tangram
from tangram import Status

Play = Callable[..., Any]
MIB = 1 << 20

SANDBOXES, ACTIONS, CONNECTIONS = 400, 1000, 5
"""At most: each test goes on for ENOUGH_S, which is enough to see a leak on a slow machine too."""
ENOUGH_S = 4.0
GROWTH_BYTES_MAX = 6 * MIB
"""Of memory, in one test: what a thousand actions may leave in caches."""
AT_ONCE = 8


def descriptors(pid: int) -> list[str]:
    """What a process has open, but for the control groups of open sandboxes: as many as actions ran at once in them."""
    leftovers = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            leftovers.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(name for name in leftovers if not name.endswith("/cgroup.procs"))


def is_group(pid: int, descriptor: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").endswith("/cgroup.procs")
    return False


def resident_bytes(pid: int) -> int:
    return (
        next(int(line.split()[1]) for line in read_proc_file(pid, "status").splitlines() if line.startswith("VmRSS:"))
        * 1024
    )


async def side_by_side(count: int, one: Callable[[int], Any]) -> None:
    """Run `one` repeatedly, AT_ONCE of them at the same time, for ENOUGH_S."""
    numbers = iter(range(count))
    enough = time.monotonic() + ENOUGH_S

    async def some() -> None:
        for number in numbers:
            if time.monotonic() > enough:
                return
            await one(number)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


class Footprint:
    """What this process and its spawner hold at a quiet moment."""

    def __init__(self, state: Path) -> None:
        gc.collect()
        self.state = state
        self.mine, self.spawners = descriptors(os.getpid()), descriptors(spawner())
        self.processes = children()
        self.bytes = resident_bytes(os.getpid()), resident_bytes(spawner())

    async def is_the_same(self, *, growth_bytes_max: int = GROWTH_BYTES_MAX) -> None:
        """Descriptors and processes as before, no sandbox left, and memory not much larger."""
        await until(lambda: first_processes() == [], "all sandboxes are closed")
        assert not [name for name in os.listdir(f"/proc/{spawner()}/fd") if is_group(spawner(), name)]
        await until(
            lambda: len(descriptors(spawner())) <= len(self.spawners), "the spawner has closed all that it opened"
        )
        gc.collect()
        mine = descriptors(os.getpid())
        assert len(mine) == len(self.mine), f"opened: {set(mine) - set(self.mine)}"
        assert children() == self.processes
        assert cgroup_names(self.state) == [], "control groups are left"
        assert mounts_below(self.state) == []
        (owner,) = (self.state / "owners").iterdir()
        assert list((owner / "boxes").iterdir()) == []
        grown = [
            now - before
            for now, before in zip((resident_bytes(os.getpid()), resident_bytes(spawner())), self.bytes, strict=True)
        ]
        assert max(grown) < growth_bytes_max, f"memory has grown by {grown} bytes"


def test_hundreds_of_sandboxes_leave_nothing(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async def visit(number: int) -> None:
            async with t.sandbox(memory="64MiB") as box:
                if number % 3 == 0:
                    assert (await box.exec(f"echo {number}")).stdout == f"{number}\n"
                elif number % 3 == 1:
                    await box.write("a", b"x")
                    (await box.exec("(setsid sleep 1000 &) ; sleep 1001 >/dev/null &")).check()

        await side_by_side(2 * AT_ONCE, visit)
        before = Footprint(state)
        await side_by_side(SANDBOXES, visit)
        await before.is_the_same()

    play(story)


@pytest.mark.slow
def test_a_thousand_actions_leave_nothing(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with contextlib.AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(t.sandbox(memory="64MiB")) for _ in range(AT_ONCE)]
            sessions = [box.session() for box in boxes]

            async def act(number: int) -> None:
                box, session = boxes[number % AT_ONCE], sessions[number % AT_ONCE]
                kind = number // AT_ONCE % 6
                if kind == 0 and not box_busy[number % AT_ONCE]:
                    box_busy[number % AT_ONCE] = True
                    assert (await session.exec("echo held")).stdout == "held\n"
                    box_busy[number % AT_ONCE] = False
                elif kind == 1:
                    assert (await box.exec("no-such-program")).exit_code == 127
                elif kind == 2:
                    assert await box.read("/etc/hostname") == b"sandbox\n"
                elif kind == 3:
                    (await box.exec(["sh", "-c", "exit 0"], stdin=b"x" * 1000, on_output=lambda *_: None)).check()
                else:
                    assert (await box.exec(["true"])).exit_code == 0

            box_busy = [False] * AT_ONCE
            await side_by_side(10 * AT_ONCE, act)
            gc.collect()
            counts = len(descriptors(os.getpid())), len(descriptors(spawner()))
            sizes = resident_bytes(os.getpid()), resident_bytes(spawner())
            await side_by_side(ACTIONS, act)
            gc.collect()
            assert len(descriptors(os.getpid())) == counts[0]
            await until(lambda: len(descriptors(spawner())) <= counts[1] + 2, "the spawner has closed what it opened")
            grown = resident_bytes(os.getpid()) - sizes[0], resident_bytes(spawner()) - sizes[1]
            assert max(grown) < GROWTH_BYTES_MAX, f"memory has grown by {grown} bytes"
            for session in sessions:
                await session.close()

    play(story)


def test_failures_leave_nothing_either(play: Play, state: Path, tmp_path: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async def fail(number: int) -> None:
            kind = number % 7
            with contextlib.suppress(tangram.TangramError):
                if kind == 0:
                    async with t.sandbox(image="unknown", memory="16MiB"):
                        raise AssertionError("there is no such image")
                elif kind == 1:
                    async with t.sandbox(memory="1TiB"):
                        raise AssertionError("so much memory there is not")
                elif kind == 2:
                    async with t.sandbox(memory="16MiB") as box:
                        for command in (["no-such-program"], ["/etc"], "exit 3", "kill -9 $$"):
                            assert (await box.exec(command)).exit_code != 0
                elif kind == 3:
                    async with t.sandbox(memory="16MiB") as box:
                        result = await box.exec("sleep 1000 & sleep 1000", timeout_s=0.05)
                        assert result.status in (Status.TIMED_OUT, Status.LOST)
                elif kind == 4:
                    async with t.sandbox(memory="16MiB") as box:
                        with contextlib.suppress(tangram.TangramError):
                            await box.read("missing")
                        with contextlib.suppress(tangram.TangramError):
                            await box.commit("host")
                        await box.download("missing", tmp_path / "none")
                elif kind == 5:
                    async with t.sandbox(memory="16MiB") as box:
                        action = asyncio.create_task(box.exec("sleep 1000", cpus=0.1))
                        await asyncio.sleep(0.01)
                        action.cancel()
                        await asyncio.wait({action})
                else:
                    async with t.sandbox(memory="16MiB") as box:
                        session = box.session()
                        await session.exec("exit 3")
                        await session.exec("true")

        await side_by_side(14, fail)
        before = Footprint(state)
        await side_by_side(70, fail)
        await before.is_the_same()

    play(story)


def test_connections_leave_nothing(state: Path) -> None:
    async def once() -> None:
        async with tangram.connect(state=state, cores=2, memory="1GiB") as t, t.sandbox(memory="16MiB") as box:
            (await box.exec("sleep 1000 & echo done")).check()

    run(once())
    gc.collect()
    before = descriptors(os.getpid())
    for _ in range(CONNECTIONS):
        run(once())
    gc.collect()
    assert len(descriptors(os.getpid())) == len(before), set(descriptors(os.getpid())) - set(before)
    assert cgroup_names(state) == []
