"""The dispatcher: plays groups as the sample buffer admits them, and puts the results into it.

Owns which groups are in flight. It works in one of two ways, depending on the training mode: as a stream, in which a
group starts whenever the buffer has room, or in batches, in which a whole batch starts once the batch before has
ended and the engines are up to date. Never trains, and never judges staleness. Promises that every group that it starts
is put into the buffer or counted as dropped there, after `on_group_end` has recorded it. A group that cannot be written
to the sample log enters the buffer nevertheless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from tangram.cancellation import unwrap_first
from tangram.rl.buffer.records import DroppedGroup
from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.train.coordination import ChangeCondition, DispatchPause
from tangram.rl.train.step_metrics import LEFT_BEHIND_CAUSE, drop_cause
from tangram.rl.train.weight_sync import WeightSync
from tangram.rl.trajectories.trajectory import Group, GroupTicket


class Dispatcher:
    """Run `run` as a task beside the training loop. It ends by cancellation, or with an error if groups cannot be
    played."""

    def __init__(
        self,
        rollout: Rollout,
        buffer: SampleBuffer,
        tickets: Iterator[GroupTicket],
        weight_sync: WeightSync,
        pause: DispatchPause,
        changed: ChangeCondition,
        *,
        batch: int | None,
        now: Callable[[], float],
        ticket_next: int,
        on_group_end: Callable[[Group], None],
        on_dropped: Callable[[tuple[DroppedGroup, ...]], None],
    ) -> None:
        """`batch`: groups that start together; None for a stream. `changed`: notified at each change here; the
        dispatcher wakes when it is notified. `on_group_end`: records each group before it enters the buffer.
        `on_dropped`: gets the groups that the buffer drops to make room for it."""
        self.in_flight: dict[str, GroupTicket] = {}
        self.ticket_next = ticket_next
        """The number of the first ticket that was never started."""
        self._rollout = rollout
        self._buffer = buffer
        self._tickets = tickets
        self._weight_sync = weight_sync
        self._pause = pause
        self._changed = changed
        self._batch = batch or 0
        self._now = now
        self._on_group_end = on_group_end
        self._on_dropped = on_dropped
        self._lost_in_batch = 0
        """Groups of this batch that ended without members and need a replacement."""
        self._tasks: asyncio.TaskGroup | None = None

    def abandon_in_flight(self) -> None:
        """Stops all groups in flight, and replaces none.

        Called when enough groups of a batch have ended for a step, which `batch_min` makes possible: no later step
        could use the rest of the batch."""
        self._lost_in_batch = -len(self.in_flight)
        self._rollout.abort(lambda episode: episode.group in self.in_flight, cause=LEFT_BEHIND_CAUSE)

    async def run(self) -> None:
        """Raises what the generator raised, and ManagerError for a task whose groups keep ending without members."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for ticket in self._buffer.in_flight:  # of a resumed run
                    self._start_group(ticket)
                await (self._dispatch_batches() if self._batch else self._dispatch_stream())
        except BaseExceptionGroup as errors:
            raise unwrap_first(errors) from None

    async def _dispatch_stream(self) -> None:
        while True:
            while self._can_dispatch():
                self._dispatch_next()
            await self._changed.wait()

    async def _dispatch_batches(self) -> None:
        while True:
            while self.in_flight or not self._can_dispatch():
                await self._changed.wait()
            await self._weight_sync.sync()
            self._lost_in_batch = 0
            while len(self.in_flight) < self._batch and self._can_dispatch():
                self._dispatch_next()
            while self.in_flight:
                if self._lost_in_batch > 0 and self._can_dispatch():  # otherwise the batch would be short
                    self._lost_in_batch -= 1
                    self._dispatch_next()
                else:
                    await self._changed.wait()

    def _can_dispatch(self) -> bool:
        return not self._pause.is_held and self._buffer.may_start()

    def _dispatch_next(self) -> None:
        ticket = next(self._tickets)
        self.ticket_next = max(self.ticket_next, ticket.number + 1)
        self._buffer.start(ticket)
        self._start_group(ticket)

    def _start_group(self, ticket: GroupTicket) -> None:
        assert self._tasks is not None
        self.in_flight[ticket.group] = ticket
        self._tasks.create_task(self._play(ticket), name=ticket.group)

    async def _play(self, ticket: GroupTicket) -> None:
        try:
            group = await self._rollout.play(ticket)
        finally:
            del self.in_flight[ticket.group]
            self._changed.notify_all()
        self._on_group_end(group)
        if group.members:
            self._on_dropped(self._buffer.put(group, self._now()))
        else:
            self._lost_in_batch += 1
            self._buffer.drop(group.id, drop_cause(group), group)
            self._rollout.require_progress(group)
