"""Processes of an action: found again and ended, though no engine knows them.

An engine starts programs and cannot stop them. Owns every signal to what runs in a container. Where this process sees
the container's processes and may signal them, that is done from outside; else by a script inside the container, which
finds only what still carries the token of the action.

From outside, a process of the container belongs to an action if it carries its token in the environment that it was
executed with; or, carrying none that was ever given out, descends from one that belongs, or is in the session of one;
or is an orphan without any trace that came into being while nothing but the action was started. Promises that nothing
outside the container is signalled, and nothing that another action started. The limit of it: an orphan without any
trace stays if several actions ran at once, and a leftover of an earlier action that forks such an orphan loses it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection

from tangram.errors import ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.sandboxes.cgroups.groups import Group
from tangram.managers.sandboxes.docker.container import Claim, Container
from tangram.managers.sandboxes.docker.output_framing import TOKEN
from tangram.managers.sandboxes.docker.programs import Programs
from tangram.processes.process_tree import Process, look_up, send

LOOK_S, LOOK_S_MAX = 0.002, 0.05
"""Between two looks at processes that should end: at first, and after some time."""
KILL_WAIT_S = 10.0
"""For killed processes to be gone. One that the kernel holds in the middle of a system call may take longer."""
KILL_ROUNDS_FREE = 3
"""After so many, the container stands still while its processes are counted: some fork faster than we look."""
ENVIRONMENT_BYTES_MAX = 1 << 21
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

KILL_SCRIPT = r"""
for d in /proc/[0-9]*; do
  if tr '\000' '\n' <"$d/environ" 2>/dev/null | grep -qx -e "TANGRAM_ACTION=$2" -e "TANGRAM_ACTION=$3"; then
    kill "-$1" "${d#/proc/}" 2>/dev/null
    echo "${d#/proc/}"
  fi
done
exit 0
"""
"""Arguments: a signal, and the tokens of an action and of its session. Prints those that it found."""


def now_ticks() -> int:
    """As the kernel counts the start of processes."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)


async def end_all(
    container: Container, programs: Programs, claim: Claim, began_ticks: int, session_token: str = ""
) -> None:
    """Ask all processes of the action to end, and kill them after a while. Returns when none is left."""
    group = container.meter.group
    if group is not None and os.geteuid() == 0:
        await _end_seen(container, group, claim, began_ticks, session_token)
    else:
        await _end_unseen(container, programs, claim.token, session_token or claim.token)


# ---- from outside -------------------------------------------------------------------------------------------------


async def _end_seen(container: Container, group: Group, claim: Claim, began_ticks: int, session_token: str) -> None:
    tokens = {claim.token, session_token} - {""}

    asked: set[tuple[int, int]] = set()

    def find_and_ask() -> list[Process]:
        """Each is asked once: some programs take a second time as a reason to hurry."""
        found = belonging(group, container.tokens, tokens, began_ticks if claim.alone else None)
        for process in found:
            if (process.pid, process.started) not in asked:
                asked.add((process.pid, process.started))
                send(process, signal.SIGTERM)
        return found

    def find_and_kill() -> list[Process]:
        found = belonging(group, container.tokens, tokens, began_ticks if claim.alone else None)
        for process in found:
            send(process, signal.SIGKILL)
        return found

    await _until_none(lambda: asyncio.to_thread(find_and_ask), STOP_GRACE_S, container)
    give_up, rounds, pause_s = time.monotonic() + KILL_WAIT_S, 0, LOOK_S
    while not container.gone.done():
        rounds += 1
        if rounds <= KILL_ROUNDS_FREE:
            left = await asyncio.to_thread(find_and_kill)
        else:
            async with container.still():
                left = await asyncio.to_thread(find_and_kill)
        if not left:
            return
        if time.monotonic() > give_up:
            raise ManagerError(f"processes {[process.pid for process in left[:8]]} of a container could not be killed")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S_MAX)


async def _until_none(look: Callable[[], Awaitable[object]], seconds: float, container: Container) -> None:
    give_up, pause_s = time.monotonic() + seconds, LOOK_S
    while time.monotonic() < give_up and not container.gone.done() and await look():
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S_MAX)


def belonging(group: Group, known: Collection[str], wanted: Collection[str], strays_since: int | None) -> list[Process]:
    """The living processes of the container that belong to one of the wanted tokens."""
    table = {pid: process for pid in group.processes() if (process := look_up(pid)) is not None}
    token_by_pid = {pid: token if (token := _token(pid)) in known else "" for pid in table}
    _hand_down(table, token_by_pid)
    found = []
    for pid, process in table.items():
        token = token_by_pid[pid]
        stray = not token and strays_since is not None and process.started >= strays_since
        if process.living and (token in wanted or stray):
            found.append(process)
    return found


def _hand_down(table: dict[int, Process], token_by_pid: dict[int, str]) -> None:
    """Who has no token gets that of its parent, or that of the first process of its session."""
    changed = True
    while changed:
        changed = False
        for pid, process in table.items():
            if not token_by_pid[pid]:
                token = token_by_pid.get(process.parent) or token_by_pid.get(process.session)
                if token:
                    token_by_pid[pid] = token
                    changed = True


def _token(pid: int) -> str:
    start = f"{TOKEN}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            environment = file.read(ENVIRONMENT_BYTES_MAX)
    except OSError:
        return ""
    for variable in environment.split(b"\0"):
        if variable.startswith(start):
            return variable[len(start) :].decode(errors="replace")
    return ""


# ---- from inside --------------------------------------------------------------------------------------------------


async def _end_unseen(container: Container, programs: Programs, token: str, session_token: str) -> None:
    async def ask(name: str) -> bytes:
        if container.gone.done():
            return b""
        answer = await programs.ask(container, KILL_SCRIPT, name, token, session_token)
        if answer.code != 0:
            raise ManagerError(f"a stopped action cannot be ended: its image needs sh, tr and grep: {answer.stderr}")
        return answer.stdout

    if await ask("TERM"):
        await _until_none(lambda: ask("0"), STOP_GRACE_S, container)
    give_up = time.monotonic() + KILL_WAIT_S
    while left := await ask("KILL"):
        if time.monotonic() > give_up:
            raise ManagerError(f"processes {left.split()[:8]!r} of a container could not be killed")
        await asyncio.sleep(LOOK_S)
