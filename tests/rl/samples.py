"""Groups for tests of what a run saves: as small as they can be, of whatever versions."""

from __future__ import annotations

from collections.abc import Sequence

from tangram.rl.buffer.records import BufferState, WaitingGroup
from tangram.rl.runs.checkpoints import RunState
from tangram.rl.trajectories.trajectory import Ending, Group, GroupTicket, Span, Stage, Trajectory, Turn


def ticket(number: int) -> GroupTicket:
    return GroupTicket(task="lake", number=number, seed=number)


def group(number: int, *versions: int, size: int = 2, tokens: int = 1) -> Group:
    """Each member has a turn for each of the versions."""
    own = ticket(number)
    members = tuple(
        Trajectory(
            id=own.trajectory_id(member, 0),
            task=own.task,
            group=own.group,
            member=member,
            attempt=0,
            seed=own.seed,
            turns=tuple(turn(version, tokens) for version in versions),
            ending=Ending.FINISHED,
            reward=float(member),
            metrics={"moves": 3.0},
            spans=(Span(stage=Stage.RESET, began_s=0.0, ended_s=1.0),),
        )
        for member in range(size)
    )
    return Group(id=own.group, task=own.task, seed=own.seed, members=members, left_out=members[:1], wanted=size)


def turn(version: int, tokens: int = 1) -> Turn:
    return Turn(
        observation="look",
        observation_tokens=(1, 2),
        action="go",
        tokens=(3,) * tokens,
        logprobs=(-0.5,) * tokens,
        versions=(version,) * tokens,
    )


def waiting(number: int, *versions: int) -> WaitingGroup:
    return WaitingGroup(group=group(number, *versions), version=min(versions, default=0), since_s=1.0)


def run_state(
    step: int,
    *,
    waiting: Sequence[WaitingGroup] = (),
    in_flight: Sequence[int] = (),
    trained: Sequence[tuple[int, int]] = (),
    dropped: Sequence[tuple[int, int]] = (),
    ticket_next: int = 0,
) -> RunState:
    return RunState(
        version=step,
        step=step,
        ticket_next=ticket_next,
        buffer=BufferState(
            version=step,
            waiting=tuple(waiting),
            in_flight=tuple(ticket(number) for number in in_flight),
            trained=tuple(trained),
            dropped=tuple(dropped),
            dropped_by_cause={"stale": sum(last - first + 1 for first, last in dropped)} if dropped else {},
            trajectories_discarded=0,
            tokens_discarded=0,
            bytes_mean=0.0,
            puts=0,
        ),
        at_s=1.5,
    )
