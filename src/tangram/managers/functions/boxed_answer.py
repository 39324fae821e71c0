"""What a call in a sandbox says, read by its owner: nothing of it is believed more than a tenant may say of itself.

Owns the bounds of what is kept. Promises that whatever comes, in whatever pieces, takes bounded memory, that it ends in
an answer or in the reason why it is none, and that no value of a tenant is ever built here: its bytes are only walked
over, and go to whoever called.
"""

from __future__ import annotations

import msgspec

from tangram.managers.functions.boxed_program import ANSWER, BEGIN, FRAME, TOKEN_BYTES
from tangram.managers.functions.instance import CAPTURE_BYTES_MAX, HEAD_BYTES_MAX, Reply
from tangram.managers.functions.template import REPLY
from tangram.managers.functions.work import ANSWER_BYTES_MAX, failed, returned
from tangram.managers.work import Executed
from tangram.processes.capture import Capture
from tangram.processes.streams import STDERR, STDOUT, Output

REPLY_BYTES_MAX = REPLY.size + HEAD_BYTES_MAX + ANSWER_BYTES_MAX

_decode = msgspec.msgpack.Decoder(Reply).decode
_walk = msgspec.msgpack.Decoder(msgspec.Raw).decode


class Garbled(Exception):
    """What came is no answer."""


class Listener:
    """Takes what a call writes: apart from the marks, it is output."""

    def __init__(self, token: str, output: Output | None) -> None:
        assert len(token) == TOKEN_BYTES
        self._begin = BEGIN + token.encode()
        self._answer = ANSWER + token.encode()
        self._output = output
        self._captures = {STDOUT: Capture(CAPTURE_BYTES_MAX), STDERR: Capture(CAPTURE_BYTES_MAX)}
        self._held = b""
        """Of the output: what may be the beginning of a mark."""
        self._frame = bytearray()
        """Behind the mark of the answer."""
        self._frame_bytes = FRAME.size
        """As many as it has, as far as is known."""
        self.begun = False
        """The program inside has taken the call."""
        self.answered = False
        """The mark of an answer has come."""

    def feed(self, stream: int, data: bytes) -> None:
        if stream == STDERR:
            self._hand_on(STDERR, data)
        elif self.answered:
            self._take(data)
        else:
            self._held += data
            self._look()

    def _look(self) -> None:
        if not self.begun:
            self.begun = self._skip_to(self._begin, keep=False)
        if self.begun and self._skip_to(self._answer, keep=True):
            self.answered = True
            self._take(self._held)
            self._held = b""

    def _take(self, data: bytes) -> None:
        """Of the frame. What comes behind it belongs to nobody."""
        room = self._frame_bytes - len(self._frame)
        self._frame += data[:room]
        if len(self._frame) == FRAME.size and self._frame_bytes == FRAME.size:
            length = FRAME.unpack(self._frame)[0]
            self._frame_bytes += length if length <= REPLY_BYTES_MAX else 0
            if self._frame_bytes > FRAME.size:
                self._take(data[room:])

    def _skip_to(self, mark: bytes, *, keep: bool) -> bool:
        """Whether the mark was found. What stands before it is output, or of nobody."""
        at = self._held.find(mark)
        end = at if at >= 0 else len(self._held) - _overlap(self._held, mark)
        before, self._held = self._held[:end], self._held[end:]
        if keep and before:
            self._hand_on(STDOUT, before)
        if at >= 0:
            self._held = self._held[len(mark) :]
        return at >= 0

    def _hand_on(self, stream: int, data: bytes) -> None:
        self._captures[stream].feed(data)
        if self._output is not None:
            self._output(stream, data)

    def end(self) -> None:
        """Nothing more comes: what was held back was no mark."""
        if self.begun and not self.answered and self._held:
            self._hand_on(STDOUT, self._held)
            self._held = b""

    def reply(self) -> Reply:
        """Raises Garbled."""
        if not self.answered:
            raise Garbled("there was no answer")
        if len(self._frame) < FRAME.size:
            raise Garbled("the answer is cut off")
        length = FRAME.unpack_from(self._frame)[0]
        if len(self._frame) != FRAME.size + length:
            raise Garbled(f"of an answer of {length} bytes came {len(self._frame) - FRAME.size}")
        return reply_of(bytes(memoryview(self._frame)[FRAME.size :]))

    @property
    def stderr(self) -> str:
        return self._captures[STDERR].text()

    def executed(self, inner: Executed | None) -> Executed:
        out, err = self._captures[STDOUT], self._captures[STDERR]
        return Executed(
            stdout=out.content(),
            stderr=err.content(),
            stdout_bytes=out.total_bytes,
            stderr_bytes=err.total_bytes,
            out_of_memory=inner is not None and inner.out_of_memory,
            cpus=0 if inner is None else inner.cpus,
        )


def reply_of(content: bytes) -> Reply:
    """Raises Garbled."""
    if len(content) < REPLY.size:
        raise Garbled("the answer is cut off")
    head, value = REPLY.unpack_from(content)
    if head > HEAD_BYTES_MAX or value > ANSWER_BYTES_MAX or len(content) != REPLY.size + head + value:
        raise Garbled(f"an answer of {head} and {value} bytes in {len(content)}")
    try:
        reply = _decode(content[REPLY.size : REPLY.size + head])
        if reply.failure is not None:
            return reply
        found = content[REPLY.size + head :]
        _walk(found)  # one message from its beginning to its end
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Garbled(f"the answer cannot be read: {error}") from None
    return msgspec.structs.replace(reply, value=found)


def answer_of(reply: Reply) -> bytes:
    """For whoever called."""
    failure = reply.failure
    return returned(reply.value) if failure is None else failed(failure.kind, failure.message, failure.traceback)


def _overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of the data may be the beginning of the mark."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if mark.startswith(data[-size:]):
            return size
    return 0
