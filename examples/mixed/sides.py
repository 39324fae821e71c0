"""The two sides: the same agents on shared pools, and on the separate resources of today.

Owns the connections and everything that differs:

                     shared                                  as today
    search API       every call waits for its quota          calls are sent at once; rejected ones are retried
    teachers         all on a few devices, by action         a dedicated device for each
    sandboxes        scheduled by action                     the same: another connection, the same scheduler

Agents cannot distinguish the sides: they call `search`, `ask`, `execute` and `call`, and every call is measured the
same way.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from acts import Acts
from server import SearchServer
from teachers import Checkpoint, TeacherCall

import tangram
from tangram import Client, Emulated, Pool, Quota, Rate, Sandbox, Service, Status
from tangram.client.functions import Function
from tangram.client.quota_use import QuotaUse
from tangram.client.result import Timing
from tangram.core.demand import GPU
from tangram.managers.models.transformers_engine import Teacher
from tangram.sim.baselines import Baseline, PodsConfig
from tangram.sim.episode import ServiceModel

SHARED, TODAY = "shared", "as today"
API = "search"
TRIES = 4
"""Attempts of one search."""
BACKOFF_S = 0.5
"""Before the second attempt, doubled for each that follows, with random jitter."""
CORES_MAX = 2.0
"""For sandboxes and functions, on a machine that has more."""
MEMORY = "1GiB"
"""Of all sandboxes together: more than they reserve."""
SPARE_BYTES = 1 << 20
"""Device memory in addition to the weights of one teacher: a second one does not fit."""
START_S = 0.4
"""All trajectories of a run start within this time."""
TIMEOUT_S = 60.0
TOO_MANY = 429


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of both sides."""

    seed: int
    checkpoints: list[Checkpoint]
    devices: int
    """Shared by the teachers."""
    units: int
    window_s: float
    """Window of the API quota."""
    folder: Path

    @property
    def services(self) -> list[Service]:
        # One call at a time: a static service would not benefit from batching across runs.
        return [Service(name=each.name, engine=Teacher(each.path, batch_max=1)) for each in self.checkpoints]

    @property
    def device(self) -> Emulated:
        return Emulated(memory_bytes=max(each.size_bytes for each in self.checkpoints) + SPARE_BYTES)

    def recording(self, side: str) -> Path:
        return self.folder / f"{side.replace(' ', '-')}.jsonl"

    def state(self, side: str) -> Path:
        folder = self.folder / f"state-{side.replace(' ', '-')}"
        folder.mkdir(mode=0o711)
        return folder


class Side:
    """The interface of agents."""

    def __init__(
        self,
        name: str,
        *,
        client: Client,
        teachers: Client,
        server: SearchServer,
        http: aiohttp.ClientSession,
        devices: int,
        quotas: dict[str, int],
        on_action: Callable[[], None],
        seed: int,
    ) -> None:
        self.name = name
        self.client = client
        """For sandboxes and functions."""
        self.server = server
        self.devices = devices
        self.quotas = quotas
        """Quota units of a searching command, in addition to its cores."""
        self.acts = Acts()
        self.teacher_calls: list[TeacherCall] = []
        self._teachers = teachers
        self._http = http
        self._on_action = on_action
        self._chance = random.Random(seed)

    # ---- searching ----

    async def search(self, query: str, run: str, trajectory: str) -> str | None:
        """Return the search result; None if all attempts are rejected."""
        began = time.monotonic()
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2.0 ** (attempt - 1) * self._chance.uniform(0.5, 1.0))
            async with self._turn(run, trajectory) as use:
                sent = time.monotonic()
                status, text = await self._get(query, use)
            if status != TOO_MANY:
                break
        timing = Timing(waiting_s=sent - began, overhead_s=0.0, execution_s=0.0)
        self._add(run, "search", trajectory, began, timing, lost=status == TOO_MANY)
        return None if status == TOO_MANY else text

    def _turn(self, run: str, trajectory: str) -> AbstractAsyncContextManager[QuotaUse | None]:
        if not self.quotas:
            return nullcontext()
        return self.client.quota(API, run=run, trajectory=trajectory)

    async def _get(self, query: str, use: QuotaUse | None) -> tuple[int, str]:
        async with self._http.get(f"{self.server.url}/search", params={"q": query}) as response:
            text = await response.text()
            if use is not None:
                use.report_response(response.status, response.headers)
            if response.status != TOO_MANY:
                response.raise_for_status()
            return response.status, text

    # ---- the rest ----

    async def ask(self, teacher: str, tokens: tuple[int, ...], run: str, trajectory: str) -> list[float]:
        """Return log-probabilities of the tokens, each given all before it."""
        began = time.monotonic()
        answer = await self._teachers.infer(
            teacher, {"token_ids": tokens}, run=run, trajectory=trajectory, timeout_s=TIMEOUT_S
        )
        self._add(run, "teacher", trajectory, began, answer.timing, lost=not answer.ok)
        logprobs: list[float] = answer.json()["logprobs"]
        self.teacher_calls.append(TeacherCall(teacher, tokens, tuple(logprobs)))
        return logprobs

    async def execute(
        self,
        sandbox: Sandbox,
        command: tuple[str, ...],
        run: str,
        trajectory: str,
        *,
        lost_code: int = 0,
        **options: Any,
    ) -> str:
        """Return the output of a command; empty if it exits with `lost_code`, which reports a rejection."""
        began = time.monotonic()
        result = await sandbox.exec(command, **options)
        lost = result.status is not Status.SUCCEEDED or bool(lost_code and result.exit_code == lost_code)
        self._add(run, options.get("key", ""), trajectory, began, result.timing, lost=lost)
        return "" if lost and result.status is Status.SUCCEEDED else result.check().stdout

    async def call(self, function: Function[..., float], given: tuple[Any, ...], run: str, trajectory: str) -> float:
        began = time.monotonic()
        result = await self.client.try_call(function, *given, run=run, trajectory=trajectory)
        self._add(run, "reward", trajectory, began, result.timing, lost=result.kind == "lost")
        value: float = result.check()
        return value

    def _add(self, run: str, kind: str, trajectory: str, began: float, timing: Timing, *, lost: bool) -> None:
        self.acts.add(run, kind, trajectory, began, timing, lost)
        self._on_action()

    async def warm(self, teachers: list[str]) -> None:
        """Call each teacher once, so that no side pays for first-time costs."""
        for teacher in teachers:
            (await self._teachers.infer(teacher, {"token_ids": [1, 2]}, run="warm", timeout_s=TIMEOUT_S)).check()


# ---- opening them -----------------------------------------------------------------------------------------------


def cores() -> float:
    return min(CORES_MAX, float(len(os.sched_getaffinity(0))))


@asynccontextmanager
async def shared(setting: Setting, on_action: Callable[[], None]) -> AsyncIterator[Side]:
    """One connection with all pools: cores, the quota of the API, and a few devices for all teachers."""
    quota = Quota(API, requests=Rate(setting.units, setting.window_s))
    connection = tangram.connect(
        cores=cores(),
        memory=MEMORY,
        quotas=[quota],
        services=setting.services,
        devices=[setting.device] * setting.devices,
        state=setting.state(SHARED),
        record=setting.recording(SHARED),
    )
    server = SearchServer(setting.units, setting.window_s, setting.seed)
    async with server, aiohttp.ClientSession() as http, connection as t:
        yield Side(
            SHARED, client=t, teachers=t, server=server, http=http, devices=setting.devices, quotas={API: 1},
            on_action=on_action, seed=setting.seed,
        )  # fmt: skip


@asynccontextmanager
async def as_today(setting: Setting, on_action: Callable[[], None]) -> AsyncIterator[Side]:
    """Sandboxes on one connection, a device for each teacher, and an API without client-side quota."""
    count = len(setting.checkpoints)
    sandboxes = tangram.connect(cores=cores(), memory=MEMORY, state=setting.state(TODAY))
    fixed = tangram.connect(
        backend="process",
        services=setting.services,
        devices=[setting.device] * count,
        decider=_static(setting.checkpoints),
        record=setting.recording(TODAY),
    )
    server = SearchServer(setting.units, setting.window_s, setting.seed)
    async with server, aiohttp.ClientSession() as http, sandboxes as t, fixed as teachers:
        yield Side(
            TODAY, client=t, teachers=teachers, server=server, http=http, devices=count, quotas={},
            on_action=on_action, seed=setting.seed,
        )  # fmt: skip


def _static(checkpoints: list[Checkpoint]) -> Baseline:
    """Every service has a dedicated device; calls queue there in order of arrival."""
    services = tuple(
        ServiceModel(name=each.name, memory_gib=each.size_bytes / (1 << 30), restore_s=0.0) for each in checkpoints
    )
    pools = (Pool(kind=GPU, node="local", total=len(checkpoints)),)
    return Baseline(pools, services, PodsConfig(devices_per_service=1))
