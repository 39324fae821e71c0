"""The work of a model service: one payload in, one answer out.

Owns the record. The caller and the engine of the service define what the bytes mean.
"""

from __future__ import annotations

from tangram.errors import InvalidAction
from tangram.managers.work import MIB, Work

PAYLOAD_BYTES_MAX = 256 * MIB
"""Size limit of a payload and of an answer: each is one message on a socket. Pass the path of larger data."""


class Infer(Work, frozen=True, kw_only=True, tag="Infer"):
    """Call the service that the action names. The answer is in `LeaseResult.answer`."""

    payload: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.payload, bytes):
            raise InvalidAction(
                "payload", type(self.payload).__name__, "bytes, as the engine of the service takes them"
            )
        if len(self.payload) > PAYLOAD_BYTES_MAX:
            raise InvalidAction("payload", f"{len(self.payload)} bytes", f"at most {PAYLOAD_BYTES_MAX} bytes")
