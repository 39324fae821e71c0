"""Memory of a sample, estimated from its contents alone.

For a group that was decoded, or sampled token by token, the estimate is within a factor of 1.5 of what CPython uses; it
is too high where records share numbers or strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from tangram.rl.trajectories.trajectory import Group, Trajectory, Turn

POINTER_BYTES = 8
NUMBER_BYTES = 32
"""A float or an int: 24 and 28 bytes, in blocks of 16."""
SMALL_INT_MAX = 256
"""CPython caches integers up to this."""
TUPLE_BYTES = 56
TEXT_BYTES = 64
"""An empty string."""
TURN_BYTES, SPAN_BYTES, TRAJECTORY_BYTES, GROUP_BYTES = 192, 192, 512, 256
"""The record itself, with its own numbers and short strings."""
METRIC_BYTES = 128
"""Its name, its value and its slot in the dict."""


def group_bytes(group: Group) -> int:
    return GROUP_BYTES + sum(POINTER_BYTES + trajectory_bytes(each) for each in group.all_trajectories())


def trajectory_bytes(trajectory: Trajectory) -> int:
    teacher_logprobs = trajectory.teacher_logprobs
    return (
        TRAJECTORY_BYTES
        + sum(POINTER_BYTES + turn_bytes(turn) for turn in trajectory.turns)
        + sum(POINTER_BYTES + SPAN_BYTES + _text(span.failed) + _text(span.waited_for) for span in trajectory.spans)
        + METRIC_BYTES * len(trajectory.metrics)
        + (_floats(len(teacher_logprobs)) if teacher_logprobs is not None else 0)
        + _text(trajectory.observation)
        + _text(trajectory.cause)
    )


def turn_bytes(turn: Turn) -> int:
    return (
        TURN_BYTES
        + _text(turn.observation)
        + _text(turn.action)
        + _ints(turn.observation_tokens)
        + _ints(turn.tokens)
        + _ints(turn.versions)
        + _floats(len(turn.logprobs))
        + (TUPLE_BYTES + sum(POINTER_BYTES + _ints(ids) for ids in turn.kept) if turn.kept is not None else 0)
    )


def _floats(count: int) -> int:
    return TUPLE_BYTES + (POINTER_BYTES + NUMBER_BYTES) * count


def _ints(numbers: Sequence[int]) -> int:
    # SMALL_INT_MAX < number, for each; written without a Python frame per number because there are many.
    return TUPLE_BYTES + POINTER_BYTES * len(numbers) + NUMBER_BYTES * sum(map(SMALL_INT_MAX.__lt__, numbers))


def _text(text: str) -> int:
    if not text:
        return 0
    return TEXT_BYTES + len(text) * (1 if text.isascii() else 2 if ord(max(text)) < 0x10000 else 4)
