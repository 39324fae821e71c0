"""What a sample takes in memory: an estimate that depends on its contents alone.

Owns the arithmetic; pure. Tokens are tuples of Python numbers, and those are large: 40 bytes for a log-probability.
Promises to be within a factor of 1.5 of what CPython takes for a group that was decoded or drawn token by token. Where
records share numbers or texts, as those of a script do, it is too high.
"""

from __future__ import annotations

from collections.abc import Sequence

from tangram.rl.rollout.records import Group, Trajectory, Turn

POINTER = 8
NUMBER = 32
"""A float or an int: 24 and 28 bytes, in blocks of 16."""
SMALL_MAX = 256
"""Ints up to this are there once for all."""
TUPLE = 56
TEXT = 64
"""Without its letters."""
TURN, SPAN, TRAJECTORY, GROUP = 192, 192, 512, 256
"""The record itself, with the numbers and the short texts that each has of its own."""
METRIC = 128
"""Its name, its value and its place in the dict."""


def group_bytes(group: Group) -> int:
    return GROUP + sum(POINTER + trajectory_bytes(each) for each in group.all())


def trajectory_bytes(trajectory: Trajectory) -> int:
    taught = trajectory.teacher_logprobs
    return (
        TRAJECTORY
        + sum(POINTER + turn_bytes(turn) for turn in trajectory.turns)
        + sum(POINTER + SPAN + _text(span.failed) + _text(span.waited_for) for span in trajectory.spans)
        + METRIC * len(trajectory.metrics)
        + (_floats(len(taught)) if taught is not None else 0)
        + _text(trajectory.observation)
        + _text(trajectory.cause)
    )


def turn_bytes(turn: Turn) -> int:
    return (
        TURN
        + _text(turn.observation)
        + _text(turn.action)
        + _ints(turn.observation_tokens)
        + _ints(turn.tokens)
        + _ints(turn.versions)
        + _floats(len(turn.logprobs))
        + (TUPLE + sum(POINTER + _ints(ids) for ids in turn.kept) if turn.kept is not None else 0)
    )


def _floats(count: int) -> int:
    return TUPLE + (POINTER + NUMBER) * count


def _ints(numbers: Sequence[int]) -> int:
    # SMALL_MAX < number, for each; a comparison without a frame of its own, as there are many.
    return TUPLE + POINTER * len(numbers) + NUMBER * sum(map(SMALL_MAX.__lt__, numbers))


def _text(text: str) -> int:
    if not text:
        return 0
    return TEXT + len(text) * (1 if text.isascii() else 2 if ord(max(text)) < 0x10000 else 4)
