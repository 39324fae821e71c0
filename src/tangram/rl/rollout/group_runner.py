"""The group runner: plays the members of one group.

Owns the attempts of a group, the choice of members, and the reaction to lost ones. Keeps the first `size` members with
a reward and stops the others (early termination). Redundant members replace lost ones; when none are left, `on_loss` of
the settings decides. A member that failed before its first turn for a permanent reason is not replaced. A stale member
is discarded, whether it is in flight or already kept. Promises that all of its episodes have ended when `play` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.rollout.episode import Episode
from tangram.rl.trajectories.trajectory import STOP_ENDINGS, Ending, Group, GroupTicket, Span, Stage, Trajectory

MakeEpisode = Callable[[GroupTicket, int, int], Episode]
"""Makes the episode of a ticket, member and attempt."""


class GroupRunner:
    def __init__(
        self, ticket: GroupTicket, settings: GroupSettings, make: MakeEpisode, now: Callable[[], float]
    ) -> None:
        self.ticket = ticket
        self._settings = settings
        self._make = make
        self._now = now
        """Seconds since the rollout began."""
        self._task_group: asyncio.TaskGroup | None = None
        self._playing: dict[str, Episode] = {}
        self._kept: list[Trajectory] = []
        self._left_out: list[Trajectory] = []
        self._refills = 0
        self._is_over = False
        """The group ends: it starts and keeps no further members."""
        self._cause = ""
        self.failed = False
        """The group was dropped because of failures of its members, not because it or they were stopped."""
        self.failed_permanently = True
        """All lost members failed before their first turn for a permanent reason."""
        self._error: Exception | None = None

    async def play(self) -> Group:
        """Raises exceptions of the generator."""
        try:
            async with asyncio.TaskGroup() as self._task_group:
                for member in range(self._settings.size + self._settings.members_extra):
                    self._begin(member, 0)
        finally:
            for episode in list(self._playing.values()):
                episode.end_unplayed()
        assert not self._playing, f"{self.ticket.group} has members under way: {sorted(self._playing)}"
        if self._error is not None:
            raise self._error
        return self._make_group()

    def stop(self, ending: Ending, cause: str) -> None:
        """Ends the group without members. No effect once it has all its members."""
        if not self._is_over:
            self._drop_all(cause, ending, cause)

    def discard(self, stale: Callable[[Episode | Trajectory], bool], cause: str) -> int:
        """Discards stale members: stops those in flight, removes those that had ended. Returns their number. No effect
        once the group has all its members."""
        if self._is_over:
            return 0
        playing = [episode for episode in self._playing.values() if stale(episode)]
        ended = [trajectory for trajectory in self._kept if stale(trajectory)]
        for episode in playing:
            episode.stop(Ending.STALE, cause)
        for record in ended:
            if self._is_over:  # the group was dropped, with all members that it had
                break
            self._kept.remove(record)
            self._left_out.append(record)
            # With no member in flight the task group is about to end, so no replacement can start.
            self._on_member_dropped(record, f"{Ending.STALE}, {cause}", retry=bool(self._playing), was_stopped=True)
        return len(playing) + len(ended)

    # ---- members ----

    def _begin(self, member: int, attempt: int) -> None:
        assert self._task_group is not None
        episode = self._make(self.ticket, member, attempt)
        self._playing[episode.id] = episode
        if self._is_over:  # stopped before it began
            episode.stop(Ending.CANCELLED, self._cause)
        self._task_group.create_task(self._play_member(episode), name=episode.id)

    async def _play_member(self, episode: Episode) -> None:
        try:
            record = await episode.play()
        except Exception as error:
            self._error = self._error or error
            self._drop_group(str(error))
        else:
            self._on_member_end(episode, record)
        finally:
            self._playing.pop(episode.id, None)

    def _on_member_end(self, episode: Episode, record: Trajectory) -> None:
        del self._playing[record.id]
        if self._is_over or not record.ending.is_rewarded:
            self._left_out.append(record)
            if not self._is_over:
                stopped = record.ending in STOP_ENDINGS and not episode.was_abandoned
                retry = (not stopped or record.ending is Ending.STALE) and not episode.failed_permanently
                self.failed_permanently = self.failed_permanently and episode.failed_permanently
                self._on_member_dropped(record, f"{record.ending}, {record.cause}", retry=retry, was_stopped=stopped)
            return
        self._kept.append(record)
        if len(self._kept) == self._settings.size:
            self._is_over = True
            self._stop_all(Ending.CANCELLED, "enough others of its group ended before it")

    def _on_member_dropped(self, record: Trajectory, reason: str, *, retry: bool, was_stopped: bool) -> None:
        """Replaces a member or drops the group, as the settings say. `retry`: another attempt may help. `was_stopped`:
        the member was stopped, rather than failed."""
        settings = self._settings
        possible = len(self._kept) + len(self._playing)
        if possible >= settings.size:
            return
        cause = f"{record.id}: {reason}"
        if settings.on_loss == "drop":
            self._drop_group(cause, failed=not was_stopped)
        elif settings.on_loss == "refill" and retry and self._refills < settings.refills_max:
            self._refills += 1
            self._begin(record.member, record.attempt + 1)
        elif possible < settings.size_min:
            self._drop_group(cause, failed=not was_stopped)
        else:
            self._cause = cause

    def _drop_group(self, cause: str, *, failed: bool = False) -> None:
        self.failed = failed
        self._drop_all(cause, Ending.CANCELLED, f"its group was dropped: {cause}")

    def _drop_all(self, cause: str, ending: Ending, cause_of_members: str) -> None:
        self._is_over, self._cause = True, cause
        self._left_out += self._kept
        self._kept = []
        self._stop_all(ending, cause_of_members)

    def _stop_all(self, ending: Ending, cause: str) -> None:
        for episode in list(self._playing.values()):
            episode.stop(ending, cause)

    # ---- the group ----

    def _make_group(self) -> Group:
        is_complete = len(self._kept) == self._settings.size
        return Group(
            id=self.ticket.group,
            task=self.ticket.task,
            seed=self.ticket.seed,
            members=tuple(
                self._with_wait_span(trajectory)
                for trajectory in sorted(self._kept, key=lambda trajectory: trajectory.member)
            ),
            left_out=tuple(self._left_out),
            wanted=self._settings.size,
            cause="" if is_complete else self._cause,
        )

    def _with_wait_span(self, record: Trajectory) -> Trajectory:
        """Adds the time that it waited for its siblings."""
        now = self._now()
        waiting_s = now - record.ended_s
        if waiting_s <= 0.0:
            return record
        span = Span(
            stage=Stage.BUFFER,
            began_s=record.ended_s,
            ended_s=now,
            waiting_s=waiting_s,
            waited_for=f"others of {record.group}",
        )
        return msgspec.structs.replace(record, spans=(*record.spans, span))
