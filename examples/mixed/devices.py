"""Devices: which teacher lay on which device and when it was called there, read from the recording of a side.

Owns the reading. Times count from the beginning of the step. Never looks at anything but the recording.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from acts import RUNS, Act

from tangram.core.messages import Evicted, Finished, Grant, Resident, Settle, Start, Submit
from tangram.runtime.trace_recorder import opened

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
    """What it took to have the teacher there; nothing if it was there."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    devices: int
    stays: list[Stay]
    calls: list[Call]
    restores: int
    """During the step."""

    def busy_share(self, step_s: float) -> float:
        return sum(call.until_s - call.since_s for call in self.calls) / (self.devices * step_s)


def read(recording: Path, acts: list[Act], *, devices: int, step_s: float) -> Timeline:
    """`acts`: all of that side. Its first call of a teacher is the first that is recorded, which sets the clocks."""
    with opened(recording) as (_, lines):
        told = [(line.t, line.message) for line in lines]
    submitted = next(
        t for t, said in told if isinstance(said, Submit) and said.action.kind == "infer" and said.action.run in RUNS
    )
    begin = submitted - min(act.began_s for act in acts if act.kind == "teacher")
    stays: list[Stay] = []
    calls: list[Call] = []
    there: dict[int, tuple[str, float]] = {}
    running: dict[str, tuple[float, Start]] = {}
    restores = 0
    ended: dict[str, float] = {}
    for t, said in told:
        now = t - begin
        if isinstance(said, Resident):
            there[said.devices[0]] = said.service, now
            restores += now >= 0.0
        elif isinstance(said, Evicted):
            teacher, since = there.pop(said.devices[0])
            stays.append(Stay(device=said.devices[0], teacher=teacher, since_s=since, until_s=now))
        elif isinstance(said, Start) and said.action.kind == "infer":
            running[said.action.id] = now, said
        elif isinstance(said, Finished):
            ended[said.action] = now
        elif isinstance(said, Settle) and said.outcome.action in running:
            since, start = running.pop(said.outcome.action)
            if start.action.run in RUNS:
                calls.append(
                    Call(
                        device=_device(start.grant),
                        teacher=start.action.service,
                        run=start.action.run,
                        since_s=since,
                        until_s=ended.get(said.outcome.action, now),
                        restore_s=said.outcome.overhead_s,
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
