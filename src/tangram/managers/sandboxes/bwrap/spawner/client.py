"""The spawner's client: starts a spawner, sends it requests, and awaits its replies.

Owns the process of the spawner and the socket to it. Makes no decisions. Promises that every request gets a reply from
the spawner, or ManagerError when the spawner has ended.

The spawner of a named owner is a daemon: the next process of that name attaches to it, unless this owner ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from tangram.errors import InvalidAction, ManagerError
from tangram.managers.sandboxes.bwrap.spawner.lock import DetachedProcess, SpawnerLock
from tangram.managers.sandboxes.bwrap.spawner.protocol import FDS_MAX, PROTOCOL
from tangram.processes.isolated import isolated_argv
from tangram.processes.packet_connection import PacketConnection, PacketTooLong
from tangram.processes.packets import (
    PACKET_BYTES_MAX,
    Message,
    decode_packet,
    encode_packet,
    packet_socketpair,
    reserve_send_buffer,
)
from tangram.processes.pending_replies import PendingReplies
from tangram.processes.process_tree import SpawnedChild
from tangram.processes.streams import Stream

PROGRAM = f"{__package__}.spawner"

END_S_MAX = 5.0
"""Time limit for the end of a spawner that was stopped; then it is killed."""
EXIT_CODE_S_MAX = 1.0
"""Time limit for the exit of a spawner that has closed its socket, so that its exit code can be reported."""
ATTACH_S_MAX = 15.0
"""Time limit for the greeting of an orphaned spawner: it first kills the programs of the previous owner, which takes
seconds at most."""
LEAVE_S_MAX = 10.0
"""Time limit for freezing the sandboxes that are left behind."""


LARGE_FIELDS = {
    "exec": ("command", " with its environment; write a file and run that"),
    "file": ("path", ""),
    "open": ("sandbox", " with its environment and mounts"),
}
"""What the caller must shorten and how, by kind of request."""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Message)


class ExecFailed(Exception):
    """The program could not be executed: it does not exist, or is not executable."""

    def __init__(self, errno: int, reason: str) -> None:
        self.errno = errno
        self.reason = reason
        super().__init__(reason)


class Program:
    """A program that was started in a sandbox."""

    def __init__(self, number: int, pid: int, ended: asyncio.Future[Message]) -> None:
        self.number = number
        self.pid = pid
        """0 unless it was requested."""
        self.ended = ended

    @property
    def has_ended(self) -> bool:
        return self.ended.done()

    async def exit_code(self) -> int:
        """Negative for a signal. Raises ExecFailed if it could not be executed, ManagerError if the spawner has ended.
        One waiter only: cancelling it cancels the future."""
        return int(_check_reply(await self.ended)["code"])


class OrphanedSandbox(msgspec.Struct, frozen=True):
    """A sandbox without an owner, held by a spawner."""

    init: int
    """Pid of the sandbox's first process."""
    sessions: list[str]
    """Sessions whose shell ended with their owner, or with one before it, and whose callers have not been notified."""


class Greeting(msgspec.Struct):
    """The first message of a spawner to the next owner. Only `protocol` is the same in all versions."""

    protocol: int
    number: int
    boxes: dict[str, OrphanedSandbox]


class SpawnerClient:
    """The client of one spawner, from its start to its end, or from one owner to the next."""

    def __init__(
        self,
        on_gone: Callable[[str, int], None],
        on_end: Callable[[str], None],
        kept: Path | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        """`kept`: the directory in which owners of one name find the spawner. `outlives`: whether it is left to the
        next owner, or ends with this one."""
        self._on_gone = on_gone
        """Called with a sandbox and the exit code of its first process."""
        self._on_end = on_end
        """Called with the reason when the spawner ends unexpectedly."""
        self._number = 0
        self._replies = PendingReplies[Message]()
        self._exits = PendingReplies[Message]()
        """Exit reports, by the number of the request that started the program or file work."""
        self._connection: PacketConnection | None = None
        self._process: SpawnedChild | DetachedProcess | None = None
        self._end_task: asyncio.Task[None] | None = None
        self._lock = SpawnerLock(kept) if kept is not None else None
        self._outlives = outlives

    async def start(self, filter_program: bytes, groups: list[str]) -> None:
        """`groups`: control groups that are empty when the spawner has ended."""
        if self._lock is None:
            self._process = self._launch([], cwd=os.getcwd())
            await self._begin(filter_program, groups)
            return
        lock = self._lock.acquire()
        try:
            launcher = self._launch_detached(self._lock.directory, lock)
        finally:
            os.close(lock)
        self._process = launcher
        self._process = DetachedProcess(await self._begin(filter_program, groups))
        try:
            await asyncio.wait({launcher.exited})  # it has forked the spawner
        finally:
            launcher.reap_or_abandon()

    async def _begin(self, filter_program: bytes, groups: list[str]) -> int:
        settings = {"filter": filter_program.hex(), "groups": groups, "outlives": self._outlives}
        return int((await self.request("begin", **settings))["pid"])

    def _launch_detached(self, kept: Path, lock: int) -> SpawnedChild:
        """It inherits no output stream of the owner, whose readers would otherwise wait for its end."""
        with open(kept / "spawner.log", "ab") as log:
            return self._launch([str(lock), str(kept)], keep=[lock], output=log.fileno(), cwd="/")

    def _launch(
        self, arguments: list[str], *, cwd: str, keep: Iterable[int] = (), output: int | None = None
    ) -> SpawnedChild:
        owner_end, child_end = packet_socketpair()
        self._connect(owner_end)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with child_end:
                process = SpawnedChild(
                    isolated_argv(PROGRAM, str(child_end.fileno()), *arguments),
                    # It forks into sandboxes, so of the owner's environment it gets only PATH.
                    env={"PATH": os.environ.get("PATH", os.defpath)},
                    cwd=cwd,
                    streams=(null, output, output),
                    keep=[child_end.fileno(), *keep],
                )
        finally:
            os.close(null)
        self._watch()
        return process

    def _connect(self, connection: socket.socket) -> PacketConnection:
        reserve_send_buffer(connection, 4)
        self._connection = PacketConnection(connection)
        return self._connection

    def _watch(self) -> None:
        assert self._connection is not None
        self._connection.watch(self._on_message, self._on_disconnect)

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def stop(self) -> None:
        """The end of the socket ends the spawner, and with it every sandbox. A spawner that outlives its owner ends
        when it has no sandbox; all must have been closed."""
        if self._connection is not None:
            self._disconnect("the spawner was stopped")
        process = self._process
        if process is None:
            return
        await asyncio.wait({process.exited}, timeout=END_S_MAX)
        if not process.exited.done():
            process.signal(signal.SIGKILL)
            await asyncio.wait({process.exited})
        self._close_process()

    # ---- attach and detach ----

    async def attach(self, filter_program: bytes, groups: list[str]) -> dict[str, OrphanedSandbox]:
        """Attach to the spawner that the previous owner left behind. Returns its sandboxes. Raises ManagerError if it
        cannot be used; it has ended then, and its sandboxes with it."""
        assert self._lock is not None
        try:
            async with asyncio.timeout(ATTACH_S_MAX):
                connection, self._process = await self._lock.connect()
                orphans = self._parse_greeting(await self._connect(connection).receive())
                self._watch()
                await self._begin(filter_program, groups)
            return orphans
        except BaseException as error:
            if self._connection is not None:
                self._disconnect("the spawner is not used")
            self._close_process()
            if not isinstance(error, (OSError, ManagerError)):
                raise  # it waits for another owner
            await self._lock.kill_spawner()
            if isinstance(error, ManagerError):
                raise
            raise ManagerError(f"its spawner does not respond: {str(error) or 'it hangs'}") from error

    def _parse_greeting(self, greeting: bytes) -> dict[str, OrphanedSandbox]:
        if not greeting:
            raise ManagerError("its spawner has ended")
        try:
            protocol = msgspec.json.decode(greeting, type=dict[str, Any]).get("protocol")
            if protocol != PROTOCOL:
                raise ManagerError(
                    f"its spawner belongs to another version of Tangram: protocol {protocol}, not {PROTOCOL}"
                )
            parsed = msgspec.json.decode(greeting, type=Greeting)
        except msgspec.MsgspecError as error:
            raise ManagerError(f"its spawner sent an invalid message: {error}") from error
        self._number = parsed.number
        return parsed.boxes

    async def detach(self) -> None:
        """Detach from the spawner. Returns when it has frozen all sandboxes for the next owner."""
        if self._connection is None:
            return
        with contextlib.suppress(OSError):
            async with asyncio.timeout(LEAVE_S_MAX):
                await self._connection.finish()
        self._disconnect("its sandboxes were left for the next owner")
        self._close_process()

    def _close_process(self) -> int | None:
        """Release the process of the spawner. Returns its exit code, if it is known."""
        process, self._process = self._process, None
        if isinstance(process, SpawnedChild):
            return process.reap_or_abandon()[0]
        return process.reap()[0] if process is not None else None

    def drain(self, sandbox_id: str, streams: Iterable[Stream]) -> list[Stream]:
        """Pass streams of an ended action to the spawner, which drains them beyond the life of this owner. Returns
        those that the owner must drain itself."""
        open_streams = [stream for stream in streams if stream.is_open]
        if self._lock is None or self._connection is None or not open_streams:
            return open_streams
        message = _encode({"id": self._next_number(), "do": "drain", "box": sandbox_id})
        if not self._connection.send_nowait(message, [stream.fileno() for stream in open_streams]):
            return open_streams
        for stream in open_streams:
            stream.close()
        return []

    def end_session(self, sandbox_id: str, session: str) -> None:
        """Report that the caller has been notified of the end of a session. If the socket is full it is skipped: a
        second notification by the next owner does no harm."""
        if self._lock is not None and self._connection is not None:
            message = {"id": self._next_number(), "do": "end_session", "box": sandbox_id, "session": session}
            self._connection.send_nowait(_encode(message))

    # ---- requests ----

    async def open(self, sandbox_id: str, **fields: Any) -> Message:
        return await self.request("open", box=sandbox_id, **fields)

    async def execute(
        self, sandbox_id: str, fds: list[int], *, argv: list[str], env: dict[str, str], cwd: str, groups: list[str],
        targets: tuple[int, ...] = (0, 1, 2), affinity: tuple[int, ...] = (), session: str = "",
        streams: Iterable[Stream] = (),
    ) -> Program:  # fmt: skip
        """Start a program. Returns when the command is sent; the result comes at its end. `session`: the program is
        the shell of this session; then it returns when the process id is known, and passes the ends of its
        `streams` along."""
        command = {"do": "exec", "argv": argv, "env": env, "cwd": cwd, "targets": targets, "affinity": affinity}
        if not session or self._lock is None:
            return await self._submit(sandbox_id, groups, command, fds, reports_pid=bool(session))
        held = [stream.fileno() for stream in streams]
        assert len(fds) + len(held) <= FDS_MAX
        return await self._submit(
            sandbox_id, groups, command, [*fds, *held], reports_pid=True, session=session, held=len(held)
        )

    async def file_work(self, sandbox_id: str, what: str, fds: list[int], groups: list[str], **fields: Any) -> Any:
        """Raises ExecFailed for an error inside the sandbox."""
        program = await self._submit(sandbox_id, groups, {"do": "file", "what": what, **fields}, fds)
        try:
            return _check_reply(await program.ended)["ok"]
        except asyncio.CancelledError:
            self._abandon(program.number)
            raise

    async def _submit(
        self,
        sandbox_id: str,
        groups: list[str],
        command: Message,
        fds: list[int],
        *,
        reports_pid: bool = False,
        **fields: Any,
    ) -> Program:
        number = self._next_number()
        ended = self._exits.expect(number)
        request = {
            "id": number,
            "do": command["do"],
            "box": sandbox_id,
            "groups": groups,
            "reports_pid": reports_pid,
            **fields,
        }
        data = _encode(request) + b"\n" + _encode(command)
        waiting = self._replies.expect(number) if reports_pid else None
        try:
            await self._send(command["do"], data, fds)
            pid = 0 if waiting is None else int(_check_reply(await self._first_reply(waiting, ended))["pid"])
        except BaseException:
            self._exits.discard(number)
            self._abandon(number)
            raise
        finally:
            self._replies.discard(number)
        return Program(number, pid, ended)

    async def _first_reply(self, waiting: asyncio.Future[Message], ended: asyncio.Future[Message]) -> Message:
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else ended.result()

    async def request(self, do: str, **fields: Any) -> Message:
        number = self._next_number()
        waiting = self._replies.expect(number)
        try:
            await self._send(do, _encode({"id": number, "do": do, **fields}), [])
            return _check_reply(await waiting)
        finally:
            self._replies.discard(number)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _abandon(self, number: int) -> None:
        """Kill the runner of a command whose caller was cancelled."""
        if self._connection is not None:
            message = {"id": self._next_number(), "do": "abandon", "request": number}
            self._connection.send_nowait(_encode(message))

    async def _send(self, do: str, data: bytes, fds: list[int]) -> None:
        if self._connection is None:
            raise ManagerError("the spawner is gone")
        try:
            await self._connection.send(data, fds)
        except PacketTooLong as error:
            field, advice = LARGE_FIELDS.get(do, (do, ""))
            raise InvalidAction(field, f"{error.size} bytes", f"at most {PACKET_BYTES_MAX} bytes{advice}") from None
        except OSError as error:
            why = "is gone" if self._connection is None else f"cannot be reached: {error}"
            raise ManagerError(f"the spawner {why}") from error

    # ---- replies ----

    def _on_message(self, data: bytes) -> None:
        message = _decode(data)
        if "gone" in message:
            self._on_gone(message["gone"], message["code"])
        elif "exit" in message:
            self._exits.resolve(message["exit"], message)
        else:
            self._replies.resolve(message["id"], message)

    def _on_disconnect(self) -> None:
        assert self._process is not None
        self._end_task = asyncio.get_running_loop().create_task(self._report_end(self._process))

    async def _report_end(self, process: SpawnedChild | DetachedProcess) -> None:
        await asyncio.wait({process.exited}, timeout=EXIT_CODE_S_MAX)
        if self._connection is None:
            return  # stopped meanwhile
        code = self._close_process()
        why = "the spawner has ended" if code is None else f"the spawner ended with {code}"
        self._disconnect(why)
        self._on_end(why)

    def _disconnect(self, why: str) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        for pending in (self._replies, self._exits):
            pending.fail_all(lambda: ManagerError(why))


def _encode(message: Message) -> bytes:
    """The same JSON as `encode_packet`, which takes ten times as long but accepts lone surrogates."""
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return encode_packet(message)


def _decode(data: bytes) -> Message:
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return decode_packet(data)


def _check_reply(reply: Message) -> Message:
    if "errno" in reply:
        raise ExecFailed(int(reply["errno"]), str(reply["error"]))
    if "error" in reply:
        raise ManagerError(str(reply["error"]))
    return reply
