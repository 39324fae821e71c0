"""The trace: every event that went into a scheduler and every effect that came out, one JSON line each.

Owns the format, its reading and writing. Line 1 is a header with pools and policy; each
further line is `{"t": seconds, "seq": n, "cause": n, "message": {...}}`, where `cause` is the `seq` of the event that
an effect answers (for an event its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tangram.core.action import Action
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
    Concluded,
    Effect,
    Event,
    Evicted,
    Finished,
    NodeChanged,
    Pool,
    PoolChanged,
    Release,
    Reserve,
    Resident,
    Resize,
    Resized,
    RunChanged,
    Settle,
    Start,
    Started,
    StartFailed,
    Submit,
    Tick,
    Used,
)
from tangram.errors import InvalidInput, InvalidTrace

TRACE_FORMAT = 2

EVENTS = (
    Submit, Cancel, Started, StartFailed, Finished, Concluded, Resized, Used, Reserve, Release, Resident, Evicted,
    PoolChanged, NodeChanged, RunChanged, Tick,
)  # fmt: skip


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, InvalidInput)
"""Exceptions of decoding: malformed JSON, malformed text, invalid values."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay needs in addition to the events."""

    format: int = TRACE_FORMAT
    policy: str
    pools: tuple[Pool, ...] = ()
    limits: Limits = Limits()
    note: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    t: float
    seq: int
    cause: int
    message: Event | Effect


_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(Header)
_line_decoder = msgspec.json.Decoder(Line)


class Recorder:
    """Turns events and their effects into lines to append to a file."""

    __slots__ = ("_seq",)

    def __init__(self) -> None:
        self._seq = 0

    def header(self, header: Header) -> bytes:
        return _encoder.encode(header) + b"\n"

    def lines(self, now: float, event: Event, effects: list[Effect]) -> bytes:
        self._seq += 1
        cause = self._seq
        out = bytearray()
        for message in (event, *effects):
            if message is not event:
                self._seq += 1
            out += _encoder.encode(Line(t=now, seq=self._seq, cause=cause, message=message)) + b"\n"
        return bytes(out)


def read(lines: Iterable[bytes], name: str = "trace") -> tuple[Header, Iterator[Line]]:
    """Returns the header and the lines. Raises InvalidTrace with the number of the first malformed line."""
    numbered = enumerate(lines, start=1)
    _, first = next(numbered, (1, b""))
    try:
        header = _header_decoder.decode(first)
    except MALFORMED as error:
        raise InvalidTrace(
            f"{name}:1", _shown(first), f"a trace header as `tangram sim --record` writes it ({error})"
        ) from None
    if header.format != TRACE_FORMAT:
        raise InvalidTrace(f"{name}:1 format", header.format, f"trace format {TRACE_FORMAT}")
    return header, _lines(numbered, name)


def _lines(numbered: Iterator[tuple[int, bytes]], name: str) -> Iterator[Line]:
    for number, text in numbered:
        if not text.strip():
            continue
        try:
            yield _line_decoder.decode(text)
        except MALFORMED as error:
            raise InvalidTrace(f"{name}:{number}", _shown(text), f"a trace line ({error})") from None


def _shown(text: bytes) -> str:
    return text[:80].decode("utf-8", "replace")


def mentions(message: Event | Effect, action_id: str) -> bool:
    """Whether the message is about the action."""
    if isinstance(message, Settle):
        return message.outcome.action == action_id
    subject: Any = getattr(message, "action", None)
    if isinstance(subject, Action):
        return subject.id == action_id
    return bool(subject == action_id)


def describe(now: float, message: Event | Effect) -> str:
    """Returns the message as one readable line."""
    return f"{now:12.3f} s  {message.__struct_config__.tag:<12} {_details(message)}"


def _details(message: Event | Effect) -> str:
    if isinstance(message, Submit):
        action = message.action
        wants = ", ".join(
            f"{kind} {amounts.min}" + (f" to {amounts.max}" if amounts.max > amounts.min else "")
            for kind, amounts in action.demand.pools.items()
        )
        return f"{action.kind} {action.key} of run {action.run} requests {wants}".replace("  ", " ")
    if isinstance(message, Start):
        shares = ", ".join(f"{share.reserved} (limit {share.limit}) of {share.pool}" for share in message.grant.shares)
        return f"attempt {message.grant.attempt} with {shares}, width {message.grant.width}"
    if isinstance(message, Resize):
        return f"{message.reserved} (limit {message.limit}) of {message.pool}"
    if isinstance(message, Settle):
        outcome = message.outcome
        times = (
            f"waited {outcome.waiting_s:.3f} s, ran {outcome.execution_s:.3f} s, overhead {outcome.overhead_s:.3f} s"
        )
        return f"{outcome.status.value}: {outcome.reason or 'done'}; {times}"
    if isinstance(message, Concluded):
        action, outcome = message.action, message.outcome
        return f"{action.kind} of run {action.run} {outcome.status.value}: {outcome.reason or 'done'}"
    if isinstance(message, Finished):
        return message.lost or f"used {message.usage.cpu_s:.3f} CPU seconds"
    fields = msgspec.structs.asdict(message)
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("action", "id"))
