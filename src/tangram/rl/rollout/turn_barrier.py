"""The turn barrier: synchronises all episodes at each turn, as a rollout in batches of turns does.

It is a baseline. All episodes in flight generate their turn as one batch, all environments step when the whole batch is
generated, and the next batch begins when the slowest environment has responded. An episode that starts delays the
others until it arrives; one that has ended delays none. Rewards are computed when all episodes have been played.
"""

from __future__ import annotations

import asyncio


class TurnBarrier:
    """Opens when all joined episodes have arrived."""

    def __init__(self) -> None:
        self._joined: set[str] = set()
        self._arrived: dict[str, asyncio.Future[None]] = {}
        self._check_scheduled = False
        self._empty = asyncio.Event()
        self._empty.set()

    def join(self, episode: str) -> None:
        assert episode not in self._joined, f"{episode} joined twice"
        self._joined.add(episode)
        self._empty.clear()

    def leave(self, episode: str) -> None:
        self._joined.discard(episode)
        self._arrived.pop(episode, None)
        self._schedule_check()

    async def wait_until_empty(self) -> None:
        """Blocks until no episode is joined."""
        await self._empty.wait()

    async def arrive(self, episode: str) -> None:
        """Blocks until all joined episodes have arrived."""
        assert episode in self._joined and episode not in self._arrived, f"{episode} is not under way"
        arrival = self._arrived[episode] = asyncio.get_running_loop().create_future()
        self._schedule_check()
        try:
            await arrival
        finally:
            if self._arrived.get(episode) is arrival:
                del self._arrived[episode]

    def _schedule_check(self) -> None:
        """Deferred to the next iteration of the event loop: episodes that begin now may not all have joined yet."""
        if not self._check_scheduled:
            self._check_scheduled = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._check_scheduled = False
        if not self._joined:
            self._empty.set()
        if len(self._arrived) < len(self._joined):
            return
        arrival, self._arrived = self._arrived, {}
        for future in arrival.values():
            if not future.done():
                future.set_result(None)
