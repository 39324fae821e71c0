"""Feeding: plays groups as a sample buffer admits them, and puts what they bring into it.

Owns which groups are in play. Two ways, which are all that the modes of training differ in here: a stream, in which a
group begins whenever there is room, and waves, in which a whole batch begins once the one before it has ended and the
engines are up to date. Never trains, and never judges how old a group is. Promises that every group that it began is
put into the buffer or counted as lost there, and written down before: what is in the buffer is in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from tangram.rl.buffer.sample_buffer import Dropped, SampleBuffer
from tangram.rl.rollout.records import Group, Ticket
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.train.step_metrics import LEFT_BEHIND_CAUSE, lost_by


class Bell:
    """Rings for all who wait at that moment."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def heard(self, timeout_s: float | None = None) -> None:
        """Until it rings, or the time is over."""
        if timeout_s is None:
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._event.wait()
        except TimeoutError:
            pass


class Feeder:
    """`run` it as a task beside the training; it ends only by being cancelled, or by what keeps groups from being
    played."""

    def __init__(
        self,
        rollout: Rollout,
        buffer: SampleBuffer,
        tickets: Iterator[Ticket],
        *,
        wave: int | None,
        bell: Bell,
        now: Callable[[], float],
        up_to_date: Callable[[], Awaitable[None]],
        ended: Callable[[Group], None],
        dropped: Callable[[tuple[Dropped, ...]], None],
    ) -> None:
        """`wave`: groups that begin together; None: a stream. `bell`: rung at each change here, and by whoever
        changes the buffer. `up_to_date`: until the engines have the newest weights. `ended`: writes down each group
        before it goes into the buffer. `dropped`: told what had to leave the buffer for it."""
        self.buffer = buffer
        self.playing: dict[str, Ticket] = {}
        self._rollout = rollout
        self._tickets = tickets
        self._wave = wave or 0
        self._bell = bell
        self._now = now
        self._up_to_date = up_to_date
        self._ended = ended
        self._dropped = dropped
        self._lost = 0
        """Groups of this wave that ended without members, and are to be made up for."""
        self._holds = 0
        self._tasks: asyncio.TaskGroup | None = None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nothing begins inside."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._bell.ring()

    def leave_behind(self) -> None:
        """What is in play is of no use any more, and what of it was lost is not made up for."""
        self._lost = -len(self.playing)
        self._rollout.abort(lambda episode: episode.group in self.playing, cause=LEFT_BEHIND_CAUSE)

    async def run(self) -> None:
        """Raises what a generator raised, and ManagerError for a task that brings nothing again and again."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for ticket in self.buffer.in_flight:  # of a run that was resumed
                    self._begin(ticket)
                await (self._in_waves() if self._wave else self._in_a_stream())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _in_a_stream(self) -> None:
        while True:
            while self._may_begin():
                self._begin_next()
            await self._bell.heard()

    async def _in_waves(self) -> None:
        while True:
            while self.playing or not self._may_begin():
                await self._bell.heard()
            await self._up_to_date()
            self._lost = 0
            while len(self.playing) < self._wave and self._may_begin():
                self._begin_next()
            while self.playing:
                if self._lost > 0 and self._may_begin():  # a batch would be short by it
                    self._lost -= 1
                    self._begin_next()
                else:
                    await self._bell.heard()

    def _may_begin(self) -> bool:
        return not self._holds and self.buffer.may_start()

    def _begin_next(self) -> None:
        ticket = next(self._tickets)
        self.buffer.start(ticket)
        self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        assert self._tasks is not None
        self.playing[ticket.group] = ticket
        self._tasks.create_task(self._play(ticket), name=ticket.group)

    async def _play(self, ticket: Ticket) -> None:
        try:
            group = await self._rollout.play(ticket)
        finally:
            del self.playing[ticket.group]
            self._bell.ring()
        self._ended(group)
        if group.members:
            self._dropped(self.buffer.put(group, self._now()))
        else:
            self._lost += 1
            self.buffer.lose(group.id, lost_by(group), group)
            self._rollout.require_fruit(group)
