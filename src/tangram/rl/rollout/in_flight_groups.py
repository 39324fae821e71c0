"""A flight: groups that are in play together, and those of them that have ended and are not taken yet.

Owns the order in which tickets are begun and groups handed out: a group is ready the moment it ends, whichever it is.
Never judges a group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from tangram.errors import ManagerError
from tangram.rl.rollout.group_runner import Band
from tangram.rl.rollout.records import Ending, Group, Ticket


class Flight:
    """`begin` as many as wanted, `take` them as they end; `stop` at last, and `land` to see what was left."""

    def __init__(
        self,
        tickets: Iterable[Ticket],
        tasks: asyncio.TaskGroup,
        make: Callable[[Ticket], Band],
        ended: Callable[[Group], None],
        broke: Callable[[Exception], None],
    ) -> None:
        """`ended`: told each group that does; `broke`: told what keeps groups from being played."""
        self.on_end: Callable[[], object] | None = None
        """Called when a group has ended and another may begin."""
        self._told = ended
        self._broke = broke
        self._tickets = iter(tickets)
        self._tasks = tasks
        self._make = make
        self._playing: dict[int, Band] = {}
        self._begun = 0
        self._ready: deque[Group | Exception] = deque()
        self._changed = asyncio.Event()
        self._stopped = False

    @property
    def playing(self) -> int:
        return len(self._playing)

    @property
    def ready(self) -> int:
        return len(self._ready)

    def begin(self) -> bool:
        """Whether there was another ticket, and the flight goes on."""
        ticket = next(self._tickets, None) if not self._stopped else None
        if ticket is None:
            return False
        band = self._make(ticket)
        self._begun += 1
        self._playing[self._begun] = band
        task = self._tasks.create_task(self._play(band), name=ticket.group)
        task.add_done_callback(partial(self._ended, self._begun))
        return True

    async def take(self) -> Group | None:
        """The next that ends; None if there is none to wait for. Raises what kept a group from being played."""
        while not self._ready and self._playing:
            self._changed.clear()
            await self._changed.wait()
        if not self._ready:
            return None
        group = self._ready.popleft()
        if isinstance(group, Exception):
            raise group
        return group

    def stop(self, ending: Ending, cause: str) -> None:
        """All that are in play end, without members."""
        self._stopped = True
        for band in list(self._playing.values()):
            band.stop(ending, cause)

    async def land(self) -> tuple[Group, ...]:
        """Those that were not taken, once all have ended. What kept one from being played is not raised again."""
        while self._playing:
            self._changed.clear()
            await self._changed.wait()
        return tuple(group for group in self._ready if isinstance(group, Group))

    async def _play(self, band: Band) -> Group | Exception:
        try:
            group = await band.play()
            self._told(group)
            return group
        except Exception as error:
            self._broke(error)
            return error

    def _ended(self, number: int, task: asyncio.Task[Group | Exception]) -> None:
        band = self._playing.pop(number)
        self._ready.append(
            ManagerError(f"{band.ticket.group}: the rollout was cancelled") if task.cancelled() else task.result()
        )
        if self.on_end is not None:
            try:
                self.on_end()
            except Exception as error:
                self._ready.append(error)
        self._changed.set()
