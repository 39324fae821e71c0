"""Devices: which teacher was on which device, and its calls, from the recording of a side.

Reads the recording and nothing else. Times count from the start of the step.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from acts import RUNS, Act

from tangram.core.messages import Evicted, Finished, Grant, Resident, Settle, Start, Submit
from tangram.runtime.trace_recorder import open_trace

GPU_POOL = "gpu@"


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher on a device."""

    device: int
    teacher: str
    since_s: float
    until_s: float


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call, from its grant to its end."""

    device: int
    teacher: str
    run: str
    since_s: float
    until_s: float
    restore_s: float
    """Time to restore the teacher; 0 if it was resident."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    devices: int
    stays: list[Stay]
    calls: list[Call]
    restores: int
    """During the step."""

    def busy_share(self, step_s: float) -> float:
        return sum(call.until_s - call.since_s for call in self.calls) / (self.devices * step_s)


def read(recording: Path, acts: list[Act], *, devices: int, step_s: float) -> Timeline:
    """Read the recording. `acts` are all acts of that side. Its first teacher call is the first one recorded, which
    aligns the clocks."""
    with open_trace(recording) as (_, lines):
        messages = [(line.t, line.message) for line in lines]
    submitted = next(
        t
        for t, message in messages
        if isinstance(message, Submit) and message.action.kind == "infer" and message.action.run in RUNS
    )
    begin = submitted - min(act.began_s for act in acts if act.kind == "teacher")
    stays: list[Stay] = []
    calls: list[Call] = []
    there: dict[int, tuple[str, float]] = {}
    running: dict[str, tuple[float, Start]] = {}
    restores = 0
    ended: dict[str, float] = {}
    for t, message in messages:
        now = t - begin
        if isinstance(message, Resident):
            there[message.devices[0]] = message.service, now
            restores += now >= 0.0
        elif isinstance(message, Evicted):
            teacher, since = there.pop(message.devices[0])
            stays.append(Stay(device=message.devices[0], teacher=teacher, since_s=since, until_s=now))
        elif isinstance(message, Start) and message.action.kind == "infer":
            running[message.action.id] = now, message
        elif isinstance(message, Finished):
            ended[message.action] = now
        elif isinstance(message, Settle) and message.outcome.action in running:
            since, start = running.pop(message.outcome.action)
            if start.action.run in RUNS:
                calls.append(
                    Call(
                        device=_device(start.grant),
                        teacher=start.action.service,
                        run=start.action.run,
                        since_s=since,
                        until_s=ended.get(message.outcome.action, now),
                        restore_s=message.outcome.overhead_s,
                    )
                )
    stays += [
        Stay(device=device, teacher=teacher, since_s=since, until_s=step_s)
        for device, (teacher, since) in there.items()
    ]
    stays = [stay for stay in stays if stay.until_s > 0.0 and stay.since_s < step_s]
    return Timeline(devices=devices, stays=stays, calls=calls, restores=restores)


def _device(grant: Grant) -> int:
    [share] = [share for share in grant.shares if share.pool.startswith(GPU_POOL)]
    return share.cells[0]
