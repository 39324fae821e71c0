"""In-flight groups: groups that are played concurrently, and ended groups that were not taken yet.

Owns the order in which tickets start and groups are returned: a group is ready when it ends. Never evaluates a group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from tangram.errors import ManagerError
from tangram.rl.rollout.group_runner import GroupRunner
from tangram.rl.trajectories.trajectory import Ending, Group, GroupTicket


class InFlightGroups:
    """`begin` groups one by one, or `refill` up to the limits; `take` them as they end; `stop` and `drain` at last."""

    def __init__(
        self,
        tickets: Iterable[GroupTicket],
        tasks: asyncio.TaskGroup,
        make_runner: Callable[[GroupTicket], GroupRunner],
        *,
        on_group_end: Callable[[Group], None],
        on_error: Callable[[Exception], None],
        playing_max: int = 0,
        outstanding_max: int = 0,
    ) -> None:
        """`on_error` is called with errors that prevent playing groups. `playing_max`, `outstanding_max`: how many
        groups
        `refill` plays at once, and how many may be in flight or ready. A group that ends is replaced within these
        limits; with 0, groups start only by `begin`."""
        self._on_group_end = on_group_end
        self._on_error = on_error
        self._playing_max, self._outstanding_max = playing_max, outstanding_max
        self._tickets = iter(tickets)
        self._tasks = tasks
        self._make_runner = make_runner
        self._playing: dict[int, GroupRunner] = {}
        self._begun_count = 0
        self._ready: deque[Group | Exception] = deque()
        self._changed = asyncio.Event()
        self._exhausted = False
        """No more tickets, or stopped."""

    @property
    def playing(self) -> int:
        return len(self._playing)

    @property
    def ready(self) -> int:
        return len(self._ready)

    def begin(self) -> bool:
        """Starts the next group. Returns False if there is no other ticket, or after `stop`."""
        ticket = next(self._tickets, None) if not self._exhausted else None
        if ticket is None:
            self._exhausted = True
            return False
        runner = self._make_runner(ticket)
        self._begun_count += 1
        self._playing[self._begun_count] = runner
        task = self._tasks.create_task(self._play(runner), name=ticket.group)
        task.add_done_callback(partial(self._on_task_done, self._begun_count))
        return True

    def refill(self) -> None:
        """Starts groups up to the limits."""
        while self.playing < self._playing_max and self.playing + self.ready < self._outstanding_max:
            if not self.begin():
                return

    async def take(self) -> Group | None:
        """Returns the next group that ends; None if none is in flight or ready. Raises what kept a group from being
        played."""
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
        """Ends all groups in flight without members."""
        self._exhausted = True
        for runner in list(self._playing.values()):
            runner.stop(ending, cause)

    async def drain(self) -> tuple[Group, ...]:
        """Blocks until all groups have ended, and returns those that were not taken. Raises no error of a group."""
        while self._playing:
            self._changed.clear()
            await self._changed.wait()
        return tuple(group for group in self._ready if isinstance(group, Group))

    async def _play(self, runner: GroupRunner) -> Group | Exception:
        try:
            group = await runner.play()
            self._on_group_end(group)
            return group
        except Exception as error:
            self._on_error(error)
            return error

    def _on_task_done(self, number: int, task: asyncio.Task[Group | Exception]) -> None:
        runner = self._playing.pop(number)
        self._ready.append(
            ManagerError(f"{runner.ticket.group}: the rollout was cancelled") if task.cancelled() else task.result()
        )
        try:
            self.refill()
        except Exception as error:
            self._ready.append(error)
        self._changed.set()
