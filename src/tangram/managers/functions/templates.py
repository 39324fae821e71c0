"""A template process, seen from its owner: started, asked for instances, ended.

Owns the process and its control socket. Promises that every instance that it was asked for is told to be gone, by the
template or, when that is gone itself, here; and that nothing of them is left when `close` has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from tangram.errors import ManagerError
from tangram.managers.functions.instance import Garbled, Gone, Instance, Reply
from tangram.managers.functions.template import MESSAGE_BYTES_MAX
from tangram.managers.functions.work import ANSWER_BYTES_MAX, Failure, FunctionSpec
from tangram.managers.work import KIB
from tangram.processes.capture import Capture
from tangram.processes.process_tree import ACTION_MARK, Census, Child, Kin
from tangram.processes.streams import STDERR, STDOUT, Stream, standard_input
from tangram.processes.width import told

PROGRAM = Path(__file__).with_name("template.py")
IMPORT_S_MAX = 300.0
"""Until a function has been imported. A cold disk may take long; one that waits for something waits for ever."""
CLOSE_S = 15.0
"""For a template to end everything below it."""
CAPTURE_BYTES_MAX = 64 * KIB
"""Of what importing prints."""


class FunctionBroken(Exception):
    """The function cannot be called at all: its own fault."""

    def __init__(self, failure: Failure, stdout: bytes = b"", stderr: bytes = b"") -> None:
        self.failure = failure
        self.stdout = stdout
        self.stderr = stderr
        super().__init__(failure.message)


class FromTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a template says. One of the first four is there."""

    ready: bool = False
    failed: Failure | None = None
    begun: int | None = None
    gone: int | None = None
    forks: bool = True
    pid: int = 0


_decode, _decode_gone = msgspec.json.Decoder(FromTemplate).decode, msgspec.json.Decoder(Gone).decode
_encode = msgspec.json.Encoder().encode


class Template:
    def __init__(self, spec: FunctionSpec, census: Census, on_end: Callable[[Template], None]) -> None:
        """Raises OSError if the process cannot be started. `on_end` is told when it is of no more use."""
        self._spec = spec
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[bool] = self._loop.create_future()
        """Whether it forks. Raises FunctionBroken or ManagerError."""
        self._instances: dict[int, Instance] = {}
        self._numbers = 0
        self._ahead: deque[tuple[bytes, list[int]]] = deque()
        mark = f"function-{secrets.token_hex(8)}."
        self._kin = Kin(census, ACTION_MARK, mark)
        self._streams = (Stream(STDOUT), Stream(STDERR))
        self._captures = (Capture(CAPTURE_BYTES_MAX), Capture(CAPTURE_BYTES_MAX))
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._ended = False
        self._told_end = False
        try:
            self._child = self._launch(its, mark)
        except BaseException:
            self._socket.close()
            for stream in self._streams:
                stream.close()
            raise
        finally:
            its.close()
        self._loop.add_reader(self._socket, self._read)
        self._child.exited.add_done_callback(lambda _: self._on_exit())
        self._late = self._loop.call_later(IMPORT_S_MAX, self._on_late)

    def _launch(self, its: socket.socket, mark: str) -> Child:
        fields = ("name", "module", "qualname", "pickled", "memory_bytes", "processes_max")
        said = {field: getattr(self._spec, field) for field in fields}
        said |= {"paths": list(self._spec.paths), "answer_bytes_max": ANSWER_BYTES_MAX}
        for stream, capture in zip(self._streams, self._captures, strict=True):
            stream.begin(capture, None)
        source = standard_input(pickle.dumps(said))
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Child(
                [sys.executable, "-P", str(PROGRAM), str(its.fileno()), str(source), str(os.getpid())],
                env=told(self._spec.cpu_units, dict(os.environ)) | {ACTION_MARK: mark},
                cwd=os.getcwd(),
                streams=(null, self._streams[0].writer, self._streams[1].writer),
                keep=(its.fileno(), source),
            )
        finally:
            os.close(source)
            os.close(null)
            for stream in self._streams:
                stream.close_writer()

    # ---- instances ----

    def begin(self) -> Instance:
        """An instance on its way: it is ready, or gone, soon."""
        self._numbers += 1
        instance = Instance(self._numbers)
        self._instances[instance.number] = instance
        self._send({"do": "begin", "id": instance.number}, instance)
        return instance

    def end(self, instance: Instance, grace_s: float) -> None:
        """Ask it to end, and kill it after that time; at once if it is 0."""
        if not instance.gone.done():
            self._send({"do": "end", "id": instance.number, "grace_s": grace_s})

    def _send(self, message: dict[str, object], instance: Instance | None = None) -> None:
        if self._ended:
            return
        self._ahead.append((_encode(message), [] if instance is None else instance.given))
        self._write()

    def _write(self) -> None:
        try:
            while self._ahead:
                socket.send_fds(self._socket, [self._ahead[0][0]], self._ahead[0][1])
                self._ahead.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._ahead.clear()  # it is gone, and its end tells of all instances
        self._loop.remove_writer(self._socket)

    # ---- what it says ----

    def _read(self) -> None:
        while not self._ended:
            try:
                data = self._socket.recv(2 * MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._socket)  # its end follows
                return
            try:
                self._on_message(_decode(data), data)
            except msgspec.MsgspecError:
                self._loop.remove_reader(self._socket)
                self._child_signal(signal.SIGKILL)  # its module wrote to a descriptor that is not its own

    def _on_message(self, message: FromTemplate, data: bytes) -> None:
        if message.gone is not None:
            if (instance := self._instances.pop(message.gone, None)) is not None:
                instance.end_of_life(_decode_gone(data))
        elif message.begun is not None:
            if (instance := self._instances.get(message.begun)) is not None:
                self._on_begun(instance, message.pid)
        elif not self.ready.done():
            self._on_imported(message)

    def _on_imported(self, message: FromTemplate) -> None:
        self._late.cancel()
        if message.failed is not None:
            self._break(message.failed)
        else:
            self._forks = message.forks
            self.ready.set_result(message.forks)

    def _break(self, failure: Failure) -> None:
        for stream in self._streams:
            stream.end()
        out, err = self._captures
        self.ready.set_exception(FunctionBroken(failure, out.content(), err.content()))
        self.ready.exception()  # taken note of: whoever waited may have gone
        self._tell_end()

    def _on_begun(self, instance: Instance, pid: int) -> None:
        instance.pid = pid
        instance.close_given()
        if instance.ready.done():
            return
        if self._forks:
            instance.ready.set_result(None)
        else:
            instance.listen(None)
            instance.expect(lambda reply: self._on_greeting(instance, reply))

    def _on_greeting(self, instance: Instance, reply: Reply | Garbled) -> None:
        """Of an instance that has imported for itself."""
        if isinstance(reply, Reply):
            instance.cpu_s += reply.cpu_s
        if instance.ready.done():
            return
        if isinstance(reply, Garbled):
            instance.ready.set_exception(ManagerError(f"an instance of {self._spec.name} said {reply}"))
        elif reply.failure is not None:
            wrote = instance.executed()
            instance.ready.set_exception(FunctionBroken(reply.failure, wrote.stdout, wrote.stderr))
        else:
            instance.ready.set_result(None)

    def _on_late(self) -> None:
        if not self.ready.done():
            said = f"{self._spec.name} was not imported within {IMPORT_S_MAX:g} s"
            self._break(Failure(kind="import", message=said))
            self._child_signal(signal.SIGKILL)

    # ---- its end ----

    def _on_exit(self) -> None:
        """Whatever it still said is read first."""
        self._read()
        if not self.ready.done():
            self._late.cancel()
            error = ManagerError(f"the template of {self._spec.name} ended while it imported: {self._said()}")
            self.ready.set_exception(error)
            self.ready.exception()
        self._tell_end()

    def _tell_end(self) -> None:
        if not self._told_end:
            self._told_end = True
            self._on_end(self)

    def _said(self) -> str:
        for stream in self._streams:
            stream.end()
        return self._captures[1].text().strip()[-1000:] or "it said nothing"

    async def close(self) -> None:
        """End it and all its instances. Done once."""
        self._told_end = True
        self._late.cancel()
        if not self.ready.done():
            self.ready.set_exception(ManagerError(f"the template of {self._spec.name} was ended"))
            self.ready.exception()
            self._child_signal(signal.SIGKILL)  # an import that does not return reads no socket
        if not self._ended:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._child.exited}, timeout=CLOSE_S)
        if not self._child.exited.done():
            self._child_signal(signal.SIGKILL)
            await asyncio.wait({self._child.exited})
        self._detach()
        code, _ = self._child.reap()
        why = f"the template of {self._spec.name} ended with {code}"
        try:
            if code != 0:
                await self._kin.kill()  # nobody was left to end the others
        finally:
            for instance in self._instances.values():
                instance.end_of_life(Gone(gone=instance.number, error=why))
            self._instances.clear()

    def _child_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.signal(number)

    def _detach(self) -> None:
        if not self._ended:
            self._read()
            self._ended = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            for stream in self._streams:
                stream.close()
