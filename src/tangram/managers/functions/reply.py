"""The reply of an instance to one command, parsed from the output of its program.

Owns the limits of stored output. Any input takes bounded memory and ends in a reply or in the reason why it is
malformed. Creates no value of a user: it only validates its bytes and passes them to the caller.
"""

from __future__ import annotations

import msgspec

from tangram.managers.functions.program import ANSWER, BEGIN, FRAME, REPLY, TOKEN_BYTES
from tangram.managers.functions.work import ANSWER_BYTES_MAX, Failure, encode_failure, encode_value
from tangram.managers.work import KIB, MIB, ExecResult
from tangram.processes.capture import Capture
from tangram.processes.streams import STDERR, STDOUT, Output, mark_overlap

CAPTURE_BYTES_MAX = 256 * KIB
"""The captured output of each stream of a call, which explains failures."""
HEAD_BYTES_MAX = 1 * MIB
"""The limit of the record about a call: mostly a traceback, which the instance cuts."""
REPLY_BYTES_MAX = REPLY.size + HEAD_BYTES_MAX + ANSWER_BYTES_MAX


class InstanceReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of an instance to a command."""

    failure: Failure | None
    cpu_s: float
    peak_bytes: int
    keep: bool
    """Whether the instance can be called again."""
    value: bytes = b""
    """msgpack."""

    @property
    def answer(self) -> bytes:
        """The encoded answer for the caller."""
        failure = self.failure
        if failure is None:
            return encode_value(self.value)
        return encode_failure(failure.kind, failure.message, failure.traceback)


class MalformedReply(Exception):
    """The instance sent no valid reply."""


_decode = msgspec.msgpack.Decoder(InstanceReply).decode
_validate = msgspec.msgpack.Decoder(msgspec.Raw).decode


class ReplyParser:
    """Receives the output of the program, which contains marks and the reply; the rest is output of the call."""

    def __init__(self, token: str, output: Output | None) -> None:
        assert len(token) == TOKEN_BYTES
        self._begin = BEGIN + token.encode()
        self._answer = ANSWER + token.encode()
        self._output = output
        self._captures = {STDOUT: Capture(CAPTURE_BYTES_MAX), STDERR: Capture(CAPTURE_BYTES_MAX)}
        self._buffer = b""
        """The end of the output so far that may be the start of a mark."""
        self._frame = bytearray()
        """The bytes behind the mark of the answer."""
        self._frame_bytes = FRAME.size
        """The length of the frame: that of its header until the header was read."""
        self.begun = False
        """The program has accepted the command."""
        self.answered = False
        """The mark of an answer was received."""

    def feed(self, stream: int, data: bytes) -> None:
        if stream == STDERR:
            self._forward(STDERR, data)
        elif self.answered:
            self._extend_frame(data)
        else:
            self._buffer += data
            self._find_marks()

    def _find_marks(self) -> None:
        if not self.begun:
            self.begun = self._skip_to(self._begin, forward=False)
        if self.begun and self._skip_to(self._answer, forward=True):
            self.answered = True
            self._extend_frame(self._buffer)
            self._buffer = b""

    def _extend_frame(self, data: bytes) -> None:
        """Drops the bytes behind the frame."""
        room = self._frame_bytes - len(self._frame)
        self._frame += data[:room]
        if len(self._frame) == FRAME.size and self._frame_bytes == FRAME.size:
            length = FRAME.unpack(self._frame)[0]
            self._frame_bytes += length if length <= REPLY_BYTES_MAX else 0
            if self._frame_bytes > FRAME.size:
                self._extend_frame(data[room:])

    def _skip_to(self, mark: bytes, *, forward: bool) -> bool:
        """Returns whether the mark was found. Bytes before it are output if `forward`, otherwise dropped."""
        at = self._buffer.find(mark)
        end = at if at >= 0 else len(self._buffer) - mark_overlap(self._buffer, mark)
        before, self._buffer = self._buffer[:end], self._buffer[end:]
        if forward and before:
            self._forward(STDOUT, before)
        if at >= 0:
            self._buffer = self._buffer[len(mark) :]
        return at >= 0

    def _forward(self, stream: int, data: bytes) -> None:
        self._captures[stream].feed(data)
        if self._output is not None:
            self._output(stream, data)

    def end(self) -> None:
        """The stream has ended: bytes held back were not a mark."""
        if self.begun and not self.answered and self._buffer:
            self._forward(STDOUT, self._buffer)
            self._buffer = b""

    def reply(self) -> InstanceReply:
        """Raises MalformedReply."""
        if not self.answered:
            raise MalformedReply("the program wrote no reply")
        if len(self._frame) < FRAME.size:
            raise MalformedReply("the reply is cut off")
        length = FRAME.unpack_from(self._frame)[0]
        if length > REPLY_BYTES_MAX:
            raise MalformedReply(f"expected a reply of at most {REPLY_BYTES_MAX} bytes, got one of {length}")
        if len(self._frame) != FRAME.size + length:
            raise MalformedReply(f"expected a reply of {length} bytes, got {len(self._frame) - FRAME.size}")
        return decode_reply(bytes(memoryview(self._frame)[FRAME.size :]))

    @property
    def stderr(self) -> str:
        return self._captures[STDERR].text()

    def to_exec_result(self, inner: ExecResult | None) -> ExecResult:
        """The output of the call, with what the instance reports of its end."""
        out, err = self._captures[STDOUT], self._captures[STDERR]
        return ExecResult(
            stdout=out.content(),
            stderr=err.content(),
            stdout_bytes=out.total_bytes,
            stderr_bytes=err.total_bytes,
            out_of_memory=inner is not None and inner.out_of_memory,
            cpus=0 if inner is None else inner.cpus,
        )


def decode_reply(content: bytes) -> InstanceReply:
    """Raises MalformedReply."""
    if len(content) < REPLY.size:
        raise MalformedReply("the reply is cut off")
    head_bytes, value_bytes = REPLY.unpack_from(content)
    size = REPLY.size + head_bytes + value_bytes
    if head_bytes > HEAD_BYTES_MAX or value_bytes > ANSWER_BYTES_MAX or len(content) != size:
        raise MalformedReply(f"expected a reply of {head_bytes} and {value_bytes} bytes in a frame of {len(content)}")
    try:
        reply = _decode(content[REPLY.size : REPLY.size + head_bytes])
        if reply.failure is not None:
            return reply
        data = content[REPLY.size + head_bytes :]
        _validate(data)  # exactly one message
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedReply(f"the reply cannot be decoded: {error}") from None
    return msgspec.structs.replace(reply, value=data)
