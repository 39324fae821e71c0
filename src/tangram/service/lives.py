"""What callers have at the service: actions under way, and open sandboxes.

Owns the registry and the counts per caller. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from tangram.core.action import Action, Status
from tangram.managers.work import Close, Open, SandboxSpec
from tangram.service.orchestrator import Settled, Ticket
from tangram.service.tail import Tail
from tangram.service.translate import space_of
from tangram.service.wire import AnyWork


class Live:
    """An action under way, as its callers see it."""

    __slots__ = (
        "action",
        "cancelled",
        "makes_box",
        "revoked",
        "seen_s",
        "settled",
        "started",
        "tail",
        "ticket",
        "work",
    )

    def __init__(self, action: Action, work: AnyWork, tail: Tail | None, now: float) -> None:
        loop = asyncio.get_running_loop()
        self.action = action
        self.work = work
        self.tail = tail
        self.ticket: Ticket | None = None
        self.started: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[Settled] = loop.create_future()
        self.cancelled = False
        """Somebody asked for that, perhaps before the orchestrator had it."""
        self.revoked = False
        """Its run was revoked while it was under way."""
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
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.actions: dict[str, Live] = {}
        """Under way, by id."""
        self.boxes: dict[str, Box] = {}
        """Open, or about to be, by name."""
        self.actions_by_space: Counter[str] = Counter()
        self.boxes_by_space: Counter[str] = Counter()

    def enter(self, action: Action, work: AnyWork, tail: Tail | None) -> Live:
        live = self.actions[action.id] = Live(action, work, tail, self._now())
        self.actions_by_space[space_of(action.id)] += 1
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
        self.actions_by_space[space_of(action.id)] -= 1
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

    def leave_box(self, sandbox: str) -> None:
        box = self.boxes.pop(sandbox, None)
        if box is not None:
            self.boxes_by_space[box.space] -= 1

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
