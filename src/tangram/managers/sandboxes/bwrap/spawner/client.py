"""Spawning: the owner's side of the spawner's socket.

Owns the process of the spawner and the matching of its replies to those who wait. Decides nothing. Promises that every
request is answered: by the spawner, or by ManagerError when it is gone.

The spawner of an owner with a name is nobody's child. It is left to the next process of that name, which attaches to
it, unless this one says that nothing is to outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from tangram.errors import InvalidAction, ManagerError
from tangram.managers.sandboxes.bwrap.spawner.lock import Apart, Keeping
from tangram.managers.sandboxes.bwrap.spawner.spawner import (
    FDS_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    SO_SNDBUFFORCE,
    Message,
)
from tangram.processes.streams import Stream

_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode

PROGRAM = Path(__file__).with_name("spawner.py")
SEND_RETRY_S = 0.001
"""Between attempts to send while the spawner has not yet read what came before."""

END_S_MAX = 5.0
"""Until a spawner has ended that was told to; then it is killed."""
ATTACH_S_MAX = 15.0
"""Until a spawner that was left behind answers: it kills first what the last owner had running, which takes seconds at
most."""
LEAVE_S_MAX = 10.0
"""Until everything stands still that is left behind."""


class ExecFailed(Exception):
    """The program could not be executed: there is none of that name, or it may not be."""

    def __init__(self, errno: int, reason: str) -> None:
        self.errno = errno
        self.reason = reason
        super().__init__(reason)


class Program:
    """A program on its way in a sandbox."""

    def __init__(self, number: int, pid: int, ended: asyncio.Future[Message]) -> None:
        self.number = number
        self.pid = pid
        """0 if nobody asked."""
        self.ended = ended

    @property
    def has_ended(self) -> bool:
        return self.ended.done()

    async def exit_code(self) -> int:
        """Negative for a signal. Raises ExecFailed if it could not be executed, ManagerError if the spawner is gone.
        For one who waits: whoever is cancelled here is the last to ask."""
        return int(_checked(await self.ended)["code"])


class KeptStream(Stream):
    """A stream that can be handed over."""

    def fileno(self) -> int:
        return self._fd


class Left(msgspec.Struct, frozen=True):
    """What a spawner says of a sandbox that was left with it."""

    init: int
    """Its first process."""
    sessions: list[str]
    """Those whose shell ended with their owner, or with one before it, and whose callers do not know it."""


class Greeting(msgspec.Struct):
    """What a spawner says to the next owner. Only `protocol` is the same in all versions."""

    protocol: int
    number: int
    boxes: dict[str, Left]


class Spawning:
    """One spawner, from start to end, or from one owner to the next."""

    def __init__(
        self,
        on_gone: Callable[[str, int], None],
        on_end: Callable[[str], None],
        kept: Path | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        """`kept`: the directory in which owners of one name look for the spawner. `outlives`: whether it is left to the
        next one, or ends with this one."""
        self._on_gone = on_gone
        """Told the sandbox and the code with which its first process ended."""
        self._on_end = on_end
        """Told why the spawner itself is gone, which no one asked for."""
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._exits: dict[int, asyncio.Future[Message]] = {}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | Apart | None = None
        self._keeping = Keeping(kept) if kept is not None else None
        self._outlives = outlives

    async def start(self, filter_program: bytes, groups: list[str]) -> None:
        """`groups`: control groups of which nothing is left when the spawner has ended."""
        if self._keeping is None:
            # A process group of its own: Ctrl-C in a terminal is for the owner, who then ends the spawner.
            self._launch([], process_group=0)
            await self._begin(filter_program, groups)
            return
        lock = self._keeping.lock()
        try:
            first = self._launch_apart(self._keeping.directory, lock)
        finally:
            os.close(lock)
        self._process = Apart(await self._begin(filter_program, groups))
        await asyncio.to_thread(first.wait)  # it has forked the spawner and ended

    async def _begin(self, filter_program: bytes, groups: list[str]) -> int:
        said = {"filter": filter_program.hex(), "groups": groups, "outlives": self._outlives}
        return int((await self.request("begin", **said))["pid"])

    def _launch_apart(self, kept: Path, lock: int) -> subprocess.Popen[bytes]:
        """It has nothing of the owner: whoever waits for the end of the owner's output sees it."""
        with open(kept / "spawner.log", "ab") as log:
            return self._launch(
                [str(lock), str(kept)], pass_fds=[lock], stdout=log, stderr=log, cwd="/", start_new_session=True
            )

    def _launch(self, words: list[str], *, pass_fds: Iterable[int] = (), **options: Any) -> subprocess.Popen[bytes]:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._take(mine)
        with its:
            words = [sys.executable, "-I", "-S", str(PROGRAM), str(its.fileno()), *words]
            # As it forks into sandboxes, it knows nothing of the owner's environment but where programs are.
            env = {"PATH": os.environ.get("PATH", os.defpath)}
            self._process = process = subprocess.Popen(
                words, pass_fds=[its.fileno(), *pass_fds], stdin=subprocess.DEVNULL, env=env, **options
            )
        asyncio.get_running_loop().add_reader(mine, self._on_readable)
        return process

    def _take(self, mine: socket.socket) -> None:
        mine.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4 * MESSAGE_BYTES_MAX)
        mine.setblocking(False)
        self._socket = mine

    async def stop(self) -> None:
        """The end of the socket ends the spawner, and with it every sandbox. One that outlives its owner ends when it
        has none, which it must not have any more."""
        if self._socket is None or self._process is None:
            return
        self._detach("the spawner was stopped")
        process = self._process
        try:
            await asyncio.to_thread(process.wait, END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        self._forget_process()

    # ---- from one owner to the next ----

    async def attach(self, filter_program: bytes, groups: list[str]) -> dict[str, Left]:
        """To the spawner that the last owner left behind. Returns the sandboxes that it has. Raises ManagerError if it
        cannot be used; it has ended then, and its sandboxes with it."""
        assert self._keeping is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ATTACH_S_MAX):
                connection, self._process = await self._keeping.connect()
                self._take(connection)
                left = self._greeted(await loop.sock_recv(connection, MESSAGE_BYTES_MAX))
                loop.add_reader(connection, self._on_readable)
                await self._begin(filter_program, groups)
            return left
        except BaseException as error:
            if self._socket is not None:
                self._detach("the spawner is not used")
            self._forget_process()
            if not isinstance(error, (OSError, ManagerError)):
                raise  # it waits for another owner
            await self._keeping.end()
            if isinstance(error, ManagerError):
                raise
            raise ManagerError(f"the spawner that held it does not answer: {str(error) or 'it hangs'}") from error

    def _greeted(self, greeting: bytes) -> dict[str, Left]:
        if not greeting:
            raise ManagerError("the spawner that held it has ended")
        try:
            protocol = msgspec.json.decode(greeting, type=dict[str, Any]).get("protocol")
            if protocol != PROTOCOL:
                raise ManagerError(
                    f"the spawner that held it is of another version of Tangram: protocol {protocol}, not {PROTOCOL}"
                )
            found = msgspec.json.decode(greeting, type=Greeting)
        except msgspec.MsgspecError as error:
            raise ManagerError(f"the spawner that held it cannot be understood: {error}") from error
        self._number = found.number
        return found.boxes

    async def leave(self) -> None:
        """Let go of the spawner. Returns when it has made everything stand still for the next owner."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LEAVE_S_MAX):
                self._socket.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(self._socket, MESSAGE_BYTES_MAX):
                    pass  # nobody waits for it any more
        self._detach("its sandboxes were left for the next owner")
        self._forget_process()

    def _forget_process(self) -> None:
        if isinstance(self._process, Apart):
            self._process.close()
        self._process = None

    def drain(self, box: str, streams: Iterable[KeptStream]) -> list[KeptStream]:
        """Have the spawner read streams that nobody wants any more: they are not to end with this owner. Returns those
        that the owner has to read itself."""
        found = [stream for stream in streams if stream.open]
        if self._keeping is None or self._socket is None or not found:
            return found
        message = _encode({"id": self._next(), "do": "drain", "box": box})
        try:
            socket.send_fds(self._socket, [message], [stream.fileno() for stream in found])
        except OSError:  # it has much to read, or is gone
            return found
        for stream in found:
            stream.close()
        return []

    def session_over(self, box: str, session: str) -> None:
        """Its caller is being told: the next owner need not. Told twice is better than never, so this waits for no
        room in the socket."""
        if self._keeping is not None and self._socket is not None:
            message = {"id": self._next(), "do": "over", "box": box, "session": session}
            with contextlib.suppress(OSError):
                self._socket.send(_encode(message))

    # ---- requests ----

    async def open(self, box: str, **fields: Any) -> Message:
        return await self.request("open", box=box, **fields)

    async def execute(
        self, box: str, fds: list[int], *, argv: list[str], env: dict[str, str], cwd: str, groups: list[str],
        targets: tuple[int, ...] = (0, 1, 2), affinity: tuple[int, ...] = (), session: str = "",
        streams: Iterable[KeptStream] = (),
    ) -> Program:  # fmt: skip
        """Have a program executed: it is on its way then, and what comes of it is told at its end. `session`: that of
        the shell which it is; it is waited for until it is known which process it is, and who reads its `streams`."""
        order = {"do": "exec", "argv": argv, "env": env, "cwd": cwd, "targets": targets, "affinity": affinity}
        if not session or self._keeping is None:
            return await self._give(box, groups, order, fds, told=bool(session))
        held = [stream.fileno() for stream in streams]
        assert len(fds) + len(held) <= FDS_MAX
        return await self._give(box, groups, order, [*fds, *held], told=True, session=session, held=len(held))

    async def file_work(self, box: str, what: str, fds: list[int], groups: list[str], **fields: Any) -> Any:
        """Raises ExecFailed for what the sandbox refused."""
        program = await self._give(box, groups, {"do": "file", "what": what, **fields}, fds)
        try:
            return _checked(await program.ended)["ok"]
        except asyncio.CancelledError:
            self._abandon(program.number)
            raise

    async def _give(
        self, box: str, groups: list[str], order: Message, fds: list[int], *, told: bool = False, **fields: Any
    ) -> Program:
        number = self._next()
        ended: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._exits[number] = ended
        request = {"id": number, "do": order["do"], "box": box, "groups": groups, "told": told, **fields}
        data = _encode(request) + b"\n" + _encode(order)
        waiting = self._expect(number) if told else None
        try:
            await self._send(data, fds)
            pid = 0 if waiting is None else int(_checked(await self._first(waiting, ended))["pid"])
        except BaseException:
            self._exits.pop(number, None)
            self._abandon(number)
            raise
        finally:
            self._waiting.pop(number, None)
        return Program(number, pid, ended)

    async def _first(self, waiting: asyncio.Future[Message], ended: asyncio.Future[Message]) -> Message:
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else ended.result()

    async def request(self, do: str, **fields: Any) -> Message:
        """Something for the spawner itself."""
        number = self._next()
        waiting = self._expect(number)
        try:
            await self._send(_encode({"id": number, "do": do, **fields}), [])
            return _checked(await waiting)
        finally:
            self._waiting.pop(number, None)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _expect(self, number: int) -> asyncio.Future[Message]:
        waiting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        return waiting

    def _abandon(self, number: int) -> None:
        """Nobody waits for this order any more: whoever carries it out is killed."""
        if self._socket is not None:
            message = {"id": self._next(), "do": "abandon", "order": number}
            with contextlib.suppress(OSError):
                self._socket.send(_encode(message))

    async def _send(self, data: bytes, fds: list[int]) -> None:
        if len(data) > MESSAGE_BYTES_MAX:
            limit = f"at most {MESSAGE_BYTES_MAX} bytes with its environment; write a file and run that"
            raise InvalidAction("command", f"{len(data)} bytes", limit)
        while True:
            if self._socket is None:
                raise ManagerError("the spawner is gone")
            try:
                socket.send_fds(self._socket, [data], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(SEND_RETRY_S)
            except OSError as error:
                raise ManagerError(f"the spawner cannot be reached: {error}") from error

    # ---- replies ----

    def _on_readable(self) -> None:
        assert self._socket is not None
        while self._socket is not None:
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._ended_by_itself()
                return
            self._on_message(_decode(data))

    def _on_message(self, message: Message) -> None:
        if "gone" in message:
            self._on_gone(message["gone"], message["code"])
        elif "exit" in message:
            ended = self._exits.pop(message["exit"], None)
            if ended is not None and not ended.done():
                ended.set_result(message)
        else:
            waiting = self._waiting.get(message["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    def _ended_by_itself(self) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        why = "the spawner has ended" if code is None else f"the spawner ended with {code}"
        self._detach(why)
        self._forget_process()
        self._on_end(why)

    def _detach(self, why: str) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ManagerError(why))
        for ended in self._exits.values():
            if not ended.done():
                ended.set_exception(ManagerError(why))
                ended.exception()  # taken note of: whoever waited may have gone
        self._exits.clear()


def _checked(reply: Message) -> Message:
    if "errno" in reply:
        raise ExecFailed(int(reply["errno"]), str(reply["error"]))
    if "error" in reply:
        raise ManagerError(str(reply["error"]))
    return reply
