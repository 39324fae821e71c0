"""Spawning: the owner's side of the spawner's socket.

Owns the process of the spawner and the matching of its replies to those who wait. Decides nothing. Promises that every
request is answered: by the spawner, or by ManagerError when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tangram.errors import InvalidAction, ManagerError
from tangram.managers.cpu.spawner import MESSAGE_BYTES_MAX, SO_SNDBUFFORCE, Message

_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode

PROGRAM = Path(__file__).with_name("spawner.py")
SEND_RETRY_S = 0.001
"""Between attempts to send while the spawner has not yet read what came before."""


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


class Spawning:
    """One spawner, from start to end."""

    def __init__(self, on_gone: Callable[[str, int], None], on_end: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        """Told the sandbox and the code with which its first process ended."""
        self._on_end = on_end
        """Told why the spawner itself is gone, which no one asked for."""
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._exits: dict[int, asyncio.Future[Message]] = {}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, filter_program: bytes, groups: list[str]) -> None:
        """`groups`: control groups of which nothing is left when the spawner has ended."""
        self._launch()
        await self.request("begin", filter=filter_program.hex(), groups=groups)

    def _launch(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4 * MESSAGE_BYTES_MAX)
        mine.setblocking(False)
        self._socket = mine
        with its:
            words = [sys.executable, "-I", "-S", str(PROGRAM), str(its.fileno())]
            # A process group of its own: Ctrl-C in a terminal is for the owner, who then ends the spawner. As it forks
            # into sandboxes, it knows nothing of the owner's environment but where programs are.
            env = {"PATH": os.environ.get("PATH", os.defpath)}
            self._process = subprocess.Popen(
                words, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, process_group=0, env=env
            )
        asyncio.get_running_loop().add_reader(mine, self._on_readable)

    async def stop(self) -> None:
        """The end of the socket ends the spawner, and with it every sandbox."""
        if self._socket is None or self._process is None:
            return
        self._detach("the spawner was stopped")
        process = self._process
        try:
            await asyncio.to_thread(process.wait, 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    # ---- requests ----

    async def open(self, box: str, **fields: Any) -> Message:
        return await self.request("open", box=box, **fields)

    async def execute(
        self, box: str, fds: list[int], *, argv: list[str], env: dict[str, str], cwd: str, groups: list[str],
        targets: tuple[int, ...] = (0, 1, 2), affinity: tuple[int, ...] = (), told: bool = False,
    ) -> Program:  # fmt: skip
        """Have a program executed: it is on its way then, and what comes of it is told at its end. `told`: wait until
        it is known which process it is."""
        order = {"do": "exec", "argv": argv, "env": env, "cwd": cwd, "targets": targets, "affinity": affinity}
        return await self._give(box, groups, order, fds, told=told)

    async def file_work(self, box: str, what: str, fds: list[int], groups: list[str], **fields: Any) -> Any:
        """Raises ExecFailed for what the sandbox refused."""
        program = await self._give(box, groups, {"do": "file", "what": what, **fields}, fds)
        try:
            return _checked(await program.ended)["ok"]
        except asyncio.CancelledError:
            self._abandon(program.number)
            raise

    async def _give(
        self, box: str, groups: list[str], order: Message, fds: list[int], *, told: bool = False
    ) -> Program:
        number = self._next()
        ended: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._exits[number] = ended
        request = {"id": number, "do": order["do"], "box": box, "groups": groups, "told": told}
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
        why = f"the spawner ended with {self._process.returncode}"
        self._detach(why)
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
