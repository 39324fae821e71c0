"""What callers have at the service: actions under way, and open sandboxes.

Owns the registry and the counts per caller. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from tangram.core.action import Action, Status
from tangram.managers.functions.work import Call
from tangram.managers.work import Close, Open, SandboxSpec
from tangram.runtime.orchestrator import Settled, Ticket
from tangram.runtime.wire import AnyWork
from tangram.server.actions.output_buffer import Tail
from tangram.server.actions.tenants import space_of


class Live:
    """An action under way, as its callers see it."""

    __slots__ = (
        "action",
        "cancelled",
        "makes_box",
        "seen_s",
        "settled",
        "started",
        "tail",
        "ticket",
        "why_cancelled",
        "work",
        "work_bytes",
    )

    def __init__(self, action: Action, work: AnyWork, work_bytes: int, tail: Tail | None, now: float) -> None:
        loop = asyncio.get_running_loop()
        self.action = action
        self.work = work
        self.work_bytes = work_bytes
        """Of both, as the journal keeps them."""
        self.tail = tail
        self.ticket: Ticket | None = None
        self.started: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[Settled] = loop.create_future()
        self.cancelled = False
        """Somebody asked for that, perhaps before the orchestrator had it."""
        self.why_cancelled = ""
        """If not because its caller wants it."""
        self.makes_box = False
        """It opens a sandbox: if it does not succeed, there is none."""
        self.seen_s = now
        """When somebody last asked after it."""

    @property
    def state(self) -> str:
        if self.settled.done():
            return "settled"
        if self.ticket is None or not self.ticket.attempt:
            return "queued"
        return "starting" if self.ticket.lease is None else "running"


class Box:
    """A sandbox that a caller has."""

    __slots__ = ("active", "run", "space", "spec", "used_s")

    def __init__(self, space: str, run: str, spec: SandboxSpec, now: float) -> None:
        self.space = space
        self.run = run
        self.spec = spec
        self.active = 0
        self.used_s = now


class Lives:
    def __init__(self, now: Callable[[], float], on_boxes: Callable[[str], None]) -> None:
        """`on_boxes` is told whose sandboxes have become more or fewer."""
        self._now = now
        self._on_boxes = on_boxes
        self.actions: dict[str, Live] = {}
        """Under way, by id."""
        self.boxes: dict[str, Box] = {}
        """Open, or about to be, by name."""
        self.actions_by_space: Counter[str] = Counter()
        self.calls_by_space: Counter[str] = Counter()
        """Of functions, under way."""
        self.bytes_by_space: Counter[str] = Counter()
        """Of the work of actions under way."""
        self.boxes_by_space: Counter[str] = Counter()

    def enter(self, action: Action, work: AnyWork, work_bytes: int, tail: Tail | None) -> Live:
        live = self.actions[action.id] = Live(action, work, work_bytes, tail, self._now())
        space = space_of(action.id)
        self.actions_by_space[space] += 1
        self.calls_by_space[space] += isinstance(work, Call)
        self.bytes_by_space[space] += work_bytes
        if isinstance(work, Open) and action.sandbox not in self.boxes:
            self.enter_box(action.sandbox, action.run, work.spec)
            live.makes_box = True
        box = self.boxes.get(action.sandbox)
        if box is not None:
            box.active += 1
        return live

    def leave(self, live: Live) -> bool:
        """Whether it was there."""
        action = live.action
        if self.actions.pop(action.id, None) is None:
            return False
        space = space_of(action.id)
        self.actions_by_space[space] -= 1
        self.calls_by_space[space] -= isinstance(live.work, Call)
        self.bytes_by_space[space] -= live.work_bytes
        box = self.boxes.get(action.sandbox)
        if box is not None:
            box.active -= 1
            box.used_s = self._now()
            if _ends_box(live):
                self.leave_box(action.sandbox)
        return True

    def enter_box(self, sandbox: str, run: str, spec: SandboxSpec) -> None:
        space = space_of(sandbox)
        self.boxes[sandbox] = Box(space, run, spec, self._now())
        self.boxes_by_space[space] += 1
        self._on_boxes(space)

    def leave_box(self, sandbox: str) -> None:
        box = self.boxes.pop(sandbox, None)
        if box is not None:
            self.boxes_by_space[box.space] -= 1
            self._on_boxes(box.space)

    def of_box(self, sandbox: str) -> list[Live]:
        return [live for live in self.actions.values() if live.action.sandbox == sandbox]

    def of_space(self, space: str) -> list[Live]:
        return [live for live in self.actions.values() if space_of(live.action.id) == space]


def _ends_box(live: Live) -> bool:
    """Whether its end is that of its sandbox. One that was never begun ends none."""
    status = live.settled.result().outcome.status if live.settled.done() else Status.REFUSED
    if isinstance(live.work, Close):
        return status not in (Status.LOST, Status.REFUSED)
    return live.makes_box and status is not Status.SUCCEEDED
