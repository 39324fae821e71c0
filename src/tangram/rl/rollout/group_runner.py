"""A band: the members of one group while they are played.

Owns which attempts a group makes, which of them it keeps, and what becomes of it when it loses some. The first `size`
that have a reward are kept and the others stopped. Members that were played besides take the place of those that are
lost; when there are none left, the rule of the settings decides; nobody takes the place of one that was lost before its
first turn for a reason that stays. A member that grows too old is lost too, be it in play
or kept already. Promises that every episode that it began has ended when `play` is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.rollout.episode import Episode
from tangram.rl.rollout.records import STOPPED, Ending, Group, Span, Stage, Ticket, Trajectory

MakeEpisode = Callable[[Ticket, int, int], Episode]
"""Of a member and an attempt."""


class Band:
    def __init__(self, ticket: Ticket, settings: GroupSettings, make: MakeEpisode, now: Callable[[], float]) -> None:
        self.ticket = ticket
        self._settings = settings
        self._make = make
        self._now = now
        """Seconds since the rollout began."""
        self._members: asyncio.TaskGroup | None = None
        self._playing: dict[str, Episode] = {}
        self._kept: list[Trajectory] = []
        self._left_out: list[Trajectory] = []
        self._refills = 0
        self._over = False
        """Nothing is kept or begun any more."""
        self._cause = ""
        self.failed = False
        """It was given up by what its members did: not because it was stopped, or they were."""
        self.hopeless = True
        """All that it lost failed before their first turn, for a reason that stays."""
        self._raised: Exception | None = None

    async def play(self) -> Group:
        """Raises what a generator raised."""
        try:
            async with asyncio.TaskGroup() as self._members:
                for member in range(self._settings.size + self._settings.members_extra):
                    self._begin(member, 0)
        finally:
            for episode in list(self._playing.values()):
                episode.never_played()
        assert not self._playing, f"{self.ticket.group} has members under way: {sorted(self._playing)}"
        if self._raised is not None:
            raise self._raised
        return self._group()

    def stop(self, ending: Ending, cause: str) -> None:
        """The group is not needed any more: it ends without members. Once it has all its members, nothing."""
        if not self._over:
            self._drop_all(cause, ending, cause)

    def expire(self, stale: Callable[[Episode | Trajectory], bool], cause: str) -> int:
        """These members are lost: those in play are stopped, those that had ended are left out. How many. Once the
        group has all its members, nothing: then it is as old as it is."""
        if self._over:
            return 0
        playing = [each for each in self._playing.values() if stale(each)]
        ended = [each for each in self._kept if stale(each)]
        for episode in playing:
            episode.stop(Ending.STALE, cause)
        for record in ended:
            if self._over:  # given up, with all that it had
                break
            self._kept.remove(record)
            self._left_out.append(record)
            # With nobody in play it is ending in this moment, and none can begin.
            self._lost(record, f"{Ending.STALE}, {cause}", again=bool(self._playing), ours=True)
        return len(playing) + len(ended)

    # ---- members ----

    def _begin(self, member: int, attempt: int) -> None:
        assert self._members is not None
        episode = self._make(self.ticket, member, attempt)
        self._playing[episode.id] = episode
        if self._over:  # stopped before it began
            episode.stop(Ending.CANCELLED, self._cause)
        self._members.create_task(self._member(episode), name=episode.id)

    async def _member(self, episode: Episode) -> None:
        try:
            record = await episode.play()
        except Exception as error:
            self._raised = self._raised or error
            self._give_up(str(error))
        else:
            self._ended(episode, record)
        finally:
            self._playing.pop(episode.id, None)

    def _ended(self, episode: Episode, record: Trajectory) -> None:
        del self._playing[record.id]
        if self._over or not record.ending.rewarded:
            self._left_out.append(record)
            if not self._over:
                stopped = record.ending in STOPPED and not episode.given_up
                again = (not stopped or record.ending is Ending.STALE) and not episode.hopeless
                self.hopeless = self.hopeless and episode.hopeless
                self._lost(record, f"{record.ending}, {record.cause}", again=again, ours=stopped)
            return
        self._kept.append(record)
        if len(self._kept) == self._settings.size:
            self._over = True
            self._stop_all(Ending.CANCELLED, "enough others of its group ended before it")

    def _lost(self, record: Trajectory, why: str, *, again: bool, ours: bool) -> None:
        """`again`: another attempt is wanted; not of what somebody cancelled, as nobody needs it, nor of what is
        hopeless. `ours`: it did not fail, but was stopped."""
        settings = self._settings
        possible = len(self._kept) + len(self._playing)
        if possible >= settings.size:
            return
        cause = f"{record.id}: {why}"
        if settings.on_loss == "drop":
            self._give_up(cause, failed=not ours)
        elif settings.on_loss == "refill" and again and self._refills < settings.refills_max:
            self._refills += 1
            self._begin(record.member, record.attempt + 1)
        elif possible < settings.size_min:
            self._give_up(cause, failed=not ours)
        else:
            self._cause = cause

    def _give_up(self, cause: str, *, failed: bool = False) -> None:
        self.failed = failed
        self._drop_all(cause, Ending.CANCELLED, f"its group was given up: {cause}")

    def _drop_all(self, cause: str, ending: Ending, cause_of_members: str) -> None:
        self._over, self._cause = True, cause
        self._left_out += self._kept
        self._kept = []
        self._stop_all(ending, cause_of_members)

    def _stop_all(self, ending: Ending, cause: str) -> None:
        for episode in list(self._playing.values()):
            episode.stop(ending, cause)

    # ---- the group ----

    def _group(self) -> Group:
        whole = len(self._kept) == self._settings.size
        return Group(
            id=self.ticket.group,
            task=self.ticket.task,
            seed=self.ticket.seed,
            members=tuple(self._waited(each) for each in sorted(self._kept, key=lambda each: each.member)),
            left_out=tuple(self._left_out),
            wanted=self._settings.size,
            cause="" if whole else self._cause,
        )

    def _waited(self, record: Trajectory) -> Trajectory:
        """With what it waited for its siblings."""
        now_s = self._now()
        waiting_s = now_s - record.ended_s
        if waiting_s <= 0.0:
            return record
        span = Span(
            stage=Stage.BUFFER,
            began_s=record.ended_s,
            ended_s=now_s,
            waiting_s=waiting_s,
            waited_for=f"others of {record.group}",
        )
        return msgspec.structs.replace(record, spans=(*record.spans, span))
