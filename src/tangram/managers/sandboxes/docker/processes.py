"""The processes of an action in a container: found and ended without the engine.

An engine starts programs and cannot stop them. Owns every signal to processes in a container. If this process can see
and signal them, it does so from outside; otherwise a script inside the container does, which finds only processes that
still have the token of the action in their environment.

From outside, a process of the container belongs to an action if it was executed with its token in the environment; or,
without any known token, descends from one that belongs, or is in the session of one; or is an orphan without any trace
that was created while no other action ran. Promises that nothing outside the container is signalled, and no process of
another action. Limitation: an orphan without any trace survives if several actions ran at once, and a background
process of an earlier action that forks such an orphan loses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection

from tangram.errors import ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.sandboxes.cgroups.groups import Cgroup
from tangram.managers.sandboxes.docker.container import Claim, Container
from tangram.managers.sandboxes.docker.output_framing import TOKEN_VARIABLE
from tangram.managers.sandboxes.docker.programs import Programs
from tangram.processes.process_tree import (
    TICKS_PER_S,
    Process,
    poll_until_none,
    read_environment,
    read_process,
    send_signal,
)

KILL_WAIT_S = 10.0
"""Time limit for the end of killed processes. One in an uninterruptible system call may take longer."""
KILL_ROUNDS_UNPAUSED = 3
"""Rounds after which the container is paused while its processes are counted: some fork faster than they are found."""

KILL_SCRIPT = r"""
for d in /proc/[0-9]*; do
  if tr '\000' '\n' <"$d/environ" 2>/dev/null | grep -qx -e "TANGRAM_ACTION=$2" -e "TANGRAM_ACTION=$3"; then
    kill "-$1" "${d#/proc/}" 2>/dev/null
    echo "${d#/proc/}"
  fi
done
exit 0
"""
"""Arguments: a signal, and the tokens of an action and of its session. Prints the process ids that it found."""


def now_ticks() -> int:
    """The current time in the unit of process start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)


async def stop_processes(
    container: Container, programs: Programs, claim: Claim, began_ticks: int, session_token: str = ""
) -> None:
    """Terminate all processes of the action, and kill them after STOP_GRACE_S. Returns when none is left."""
    group = container.meter.group
    if group is not None and os.geteuid() == 0:
        await _stop_from_outside(container, group, claim, began_ticks, session_token)
    else:
        await _stop_from_inside(container, programs, claim.token, session_token or claim.token)


# ---- from outside ---------------------------------------------------------------------------------------------------


async def _stop_from_outside(
    container: Container, group: Cgroup, claim: Claim, began_ticks: int, session_token: str
) -> None:
    tokens = {claim.token, session_token} - {""}

    signalled: set[tuple[int, int]] = set()
    rounds = 0

    def find_and_signal(number: int) -> list[Process]:
        """SIGTERM once each: some programs abort their clean-up on a second one."""
        processes = find_processes(group, container.tokens, tokens, began_ticks if claim.is_alone else None)
        for process in processes:
            if number == signal.SIGKILL or (process.pid, process.started) not in signalled:
                signalled.add((process.pid, process.started))
                send_signal(process, number)
        return processes

    async def terminate() -> list[Process]:
        return [] if container.gone.done() else await asyncio.to_thread(find_and_signal, signal.SIGTERM)

    async def kill() -> list[Process]:
        nonlocal rounds
        rounds += 1
        if container.gone.done():
            return []
        async with container.paused() if rounds > KILL_ROUNDS_UNPAUSED else contextlib.nullcontext():
            return await asyncio.to_thread(find_and_signal, signal.SIGKILL)

    await poll_until_none(terminate, STOP_GRACE_S)
    if left := await poll_until_none(kill, KILL_WAIT_S):
        raise ManagerError(f"processes {[process.pid for process in left[:8]]} of a container could not be killed")


def find_processes(
    group: Cgroup, known: Collection[str], requested: Collection[str], strays_since: int | None
) -> list[Process]:
    """The living processes of the container that belong to one of the wanted tokens."""
    table = {pid: process for pid in group.processes() if (process := read_process(pid)) is not None}
    token_by_pid = {pid: token if (token := _read_token(pid)) in known else "" for pid in table}
    _inherit_tokens(table, token_by_pid)
    processes = []
    for pid, process in table.items():
        token = token_by_pid[pid]
        stray = not token and strays_since is not None and process.started >= strays_since
        if process.is_alive and (token in requested or stray):
            processes.append(process)
    return processes


def _inherit_tokens(table: dict[int, Process], token_by_pid: dict[int, str]) -> None:
    """A process without a token gets that of its parent, or that of the first process of its session."""
    changed = True
    while changed:
        changed = False
        for pid, process in table.items():
            if not token_by_pid[pid]:
                token = token_by_pid.get(process.parent) or token_by_pid.get(process.session)
                if token:
                    token_by_pid[pid] = token
                    changed = True


def _read_token(pid: int) -> str:
    start = f"{TOKEN_VARIABLE}=".encode()
    try:
        environment = read_environment(pid)
    except OSError:
        return ""
    for variable in environment:
        if variable.startswith(start):
            return variable[len(start) :].decode(errors="replace")
    return ""


# ---- from inside ----------------------------------------------------------------------------------------------------


async def _stop_from_inside(container: Container, programs: Programs, token: str, session_token: str) -> None:
    async def run_kill_script(name: str) -> bytes:
        if container.gone.done():
            return b""
        result = await programs.run_script(container, KILL_SCRIPT, name, token, session_token)
        if result.code != 0:
            raise ManagerError(f"a stopped action cannot be ended: its image needs sh, tr and grep: {result.stderr}")
        return result.stdout

    if await run_kill_script("TERM"):
        await poll_until_none(lambda: run_kill_script("0"), STOP_GRACE_S)
    if left := await poll_until_none(lambda: run_kill_script("KILL"), KILL_WAIT_S):
        raise ManagerError(f"processes {left.split()[:8]!r} of a container could not be killed")
