"""The turn barrier: episodes that wait for each other, as a rollout in batches of turns does.

It is there to be compared with. All episodes in play write their turn as one batch, all environments take their step
when the whole batch is written, and the next batch begins when the slowest of them has answered. An episode that begins
anew holds up the others until it is back; one that is over holds up nobody. Rewards are asked for when all have been
played.
"""

from __future__ import annotations

import asyncio


class TurnBarrier:
    """Opens when all who joined have arrived."""

    def __init__(self) -> None:
        self._joined: set[str] = set()
        self._arrived: dict[str, asyncio.Future[None]] = {}
        self._looking = False
        self._empty = asyncio.Event()
        self._empty.set()

    def join(self, episode: str) -> None:
        assert episode not in self._joined, f"{episode} joined twice"
        self._joined.add(episode)
        self._empty.clear()

    def leave(self, episode: str) -> None:
        self._joined.discard(episode)
        self._arrived.pop(episode, None)
        self._look_soon()

    async def all_played(self) -> None:
        """Until nobody is under way any more."""
        await self._empty.wait()

    async def arrive(self, episode: str) -> None:
        """Until all others are here."""
        assert episode in self._joined and episode not in self._arrived, f"{episode} is not under way"
        here = self._arrived[episode] = asyncio.get_running_loop().create_future()
        self._look_soon()
        try:
            await here
        finally:
            if self._arrived.get(episode) is here:
                del self._arrived[episode]

    def _look_soon(self) -> None:
        """Not at once: episodes that begin at this moment have not all joined yet."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if not self._joined:
            self._empty.set()
        if len(self._arrived) < len(self._joined):
            return
        here, self._arrived = self._arrived, {}
        for each in here.values():
            if not each.done():
                each.set_result(None)
