"""The spawner: a small process of its own that starts programs inside sandboxes, and does file work there.

It is run by its path, without site-packages, and imports only the standard library: a fork of it costs a fraction of a
fork of the process that owns it. All that its forks need is imported before the first of them: inside a sandbox, the
sandbox would choose what an import finds. Owns the processes of all sandboxes; what its forks do on their way is in
`forked`. Decides nothing: it does what the messages on its socket say, one reply each, and tells when a program has
ended. Promises that whatever it started dies with it, that it dies with its owner (an end of the socket kills every
sandbox), and that nothing which a sandbox does or says brings it down.

The spawner of an owner with a name outlives it, if that owner says so. Without an owner it kills what actions run in,
lets the rest stand still, and waits on a socket in the directory of the owner for the next one. Without a sandbox it
does not wait.

A program starts as a *runner*: a fork that has entered the namespaces of its sandbox, closed everything, dropped every
privilege and taken on the filter of system calls, and then waits for one order. The spawner forks a sandbox's next
runner as soon as the last one got its order, so that the next order finds it ready; for how many sandboxes is bounded
by SPARES_MAX. A runner is put into the control groups of its action before it gets its order, and shares nothing with
the spawner but the streams that come with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import importlib.util
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

PROTOCOL = 2
"""Of the messages between owner and spawner. Another number whenever an owner of before could be misunderstood."""

MESSAGE_BYTES_MAX = 1 << 18
"""Of one request. The owner refuses longer ones."""
ANSWER_BYTES_MAX = 1 << 17
"""Of what a runner answers, such as a listing."""
SPARES_MAX = 64
"""Runners that wait for an order. Each costs about half a megabyte; those of the sandboxes used last are kept."""
LOOK_S = 0.0003
"""How often the first process of a sandbox that is being made is looked at."""
FDS_MAX = 8
"""Of one request."""
NUDGE_S = 0.2
"""How often a runner that has its order is told to go on: a program in its sandbox may have stopped it."""
EXECUTE_S_MAX = 120.0
"""Until a runner has become its program. Then it is killed: somebody in its sandbox stops it again and again."""

SO_SNDBUFFORCE = 32

DRAINED_MAX = 64
"""Streams of one sandbox that are read though nobody wants them. The oldest are closed."""
DRAIN_BYTES = 1 << 16
SOCKET = "socket"
"""Where the next owner finds the spawner, in the directory that it was given."""
Message = dict[str, Any]


def _beside(name: str) -> ModuleType:
    """A module that stands beside this file. It is not looked for anywhere else."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from tangram.managers.sandboxes.bwrap.spawner import child, orphan_cleanup
else:  # it is run by its path, so there is no package around it
    child, orphan_cleanup = _beside("child"), _beside("orphan_cleanup")


class Runner:
    """A process inside a sandbox that waits for its order."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self.box: Box | None = None
        """Where it carries out an order."""
        self.number = 0
        """Of the request that it carries out; 0: it is spare."""
        self.executes = False
        """Whether it is to become a program."""
        self.ordered_s = 0.0
        """When it got its order."""
        self.said: bytes | None = None
        """All that came from it before its channel ended."""
        self.code: int | None = None


class Box:
    """One sandbox: its first process, whose namespaces the others join, and the process that holds it."""

    def __init__(self, name: str, holder: int, init: int, request: Message) -> None:
        self.name = name
        self.holder = holder
        self.init = init
        self.init_fd = os.pidfd_open(init)
        self.holder_fd = os.pidfd_open(holder)
        self.uid: int = request["uid"]
        self.rlimits: dict[str, int] = request["rlimits"]
        self.has_user_namespace = _namespace(init, "user") != _namespace(os.getpid(), "user")
        self.spare: Runner | None = None
        self.closing = False
        """It was told to end. Then nothing in it may stand still: what does cannot die."""
        self.sessions: dict[str, list[int]] = {}
        """Those that got a shell of which the owner has not said that it is over, by the caller's word. So whoever
        loses its shell at the same moment as its owner is not forgotten, whichever of the two is noticed first. With
        each, the other ends of the shell's streams: what it leaves running can write there when the owner is gone."""
        self.drained: OrderedDict[int, None] = OrderedDict()
        self._joins: dict[str, int] = {}

    def kill(self) -> None:
        """The kernel kills everything in a process namespace whose first process ends."""
        self.closing = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)

    def join(self, pid: int, groups: list[str]) -> None:
        """Put a process into control groups, through files that stay open: a sandbox uses the same few again."""
        for path in groups:
            fd = self._joins.get(path)
            if fd is None:
                fd = self._joins[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, b"%d" % pid)

    def forget_joins(self) -> None:
        for fd in self._joins.values():
            os.close(fd)
        self._joins = {}

    def end_session(self, name: str) -> None:
        for fd in self.sessions.pop(name, ()):
            os.close(fd)

    def forget(self) -> None:
        self.forget_joins()
        for name in list(self.sessions):
            self.end_session(name)
        os.close(self.init_fd)
        os.close(self.holder_fd)


def _namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


class Spawner:
    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener
        """Where the next owner comes to. None: there is none after the first."""
        self._outlives = False
        """Whether sandboxes are left to the next owner, or end with the present one."""
        self._owner: socket.socket | None = None
        self._owner_died = -1
        self._leaving: socket.socket | None = None
        """Of an owner that is gone: closed when everything stands still."""
        self._halt_by_s = 0.0
        self._number = 0
        """Of the last request: the next owner goes on from there, so nothing is taken for an answer to it."""
        self._at_work: dict[int, Runner | None] = {}
        """Processes that do something for the owner: runners with an order and what they became, else None."""
        self._boxes: dict[str, Box] = {}
        self._selector = selectors.DefaultSelector()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._groups: list[str] = []
        """The control groups of the owner: whoever is in one of them ends with the spawner."""
        self._filter: ctypes.Array[ctypes.c_char] | None = None
        self._program: ctypes.Array[ctypes.c_char] | None = None
        self._wanted: OrderedDict[str, None] = OrderedDict()
        """Sandboxes whose next runner is to be forked when nothing else is to be done."""
        self._spares: OrderedDict[str, None] = OrderedDict()
        """Sandboxes that have a spare runner, the longest unused first."""
        self._becoming: dict[int, Callable[[], None]] = {}
        """First processes that are not yet what they are to be, with what to do then."""
        self._ordered: dict[int, Runner] = {}
        """Runners that have an order and have not yet become its program or answered, by the number of the request."""
        self._nudged_s = 0.0

    def serve(self, owner: socket.socket) -> None:
        try:
            self._attend(owner)
            while True:
                idle = NUDGE_S if self._ordered else None
                timeout = 0.0 if self._wanted else LOOK_S if self._becoming else idle
                if self._leaving is not None:
                    timeout = orphan_cleanup.END_PAUSE_S
                ready = self._selector.select(timeout)
                for key, _ in ready:
                    key.data(key.fileobj)
                if self._becoming:
                    self._look()
                elif not ready and self._wanted:
                    self._fork_spare(self._wanted.popitem()[0])
                if self._ordered:
                    self._nudge()
                if self._owner is None:
                    self._stand_by()
        except EOFError:
            pass
        finally:
            for box in self._boxes.values():
                box.kill()
            orphan_cleanup.end_all(self._groups)

    # ---- owners ----

    def _attend(self, owner: socket.socket) -> None:
        """It gives the orders from now on, until its connection ends or its process does: a fork of it may have the
        connection too."""
        pid, user, _ = struct.unpack("3i", owner.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            if user != os.geteuid():
                raise ProcessLookupError(errno.ESRCH, "no owner of ours")
            self._owner_died = os.pidfd_open(pid)
        except ProcessLookupError:
            owner.close()
            return
        self._owner = owner
        self._selector.register(owner, selectors.EVENT_READ, self._on_request)
        self._selector.register(self._owner_died, selectors.EVENT_READ, self._on_death)

    def _on_death(self, _: object) -> None:
        if self._owner is not None:
            self._lose_owner()

    def _lose_owner(self) -> None:
        if self._listener is None or not self._outlives:
            raise EOFError
        assert self._owner is not None and self._leaving is None
        self._selector.unregister(self._owner)
        self._selector.unregister(self._owner_died)
        os.close(self._owner_died)
        self._owner, self._leaving = None, self._owner
        self._wanted.clear()
        self._halt_by_s = time.monotonic() + orphan_cleanup.END_S_MAX
        for box in self._boxes.values():
            for name, held in box.sessions.items():  # their shells are killed, if they have not ended
                self._read_away(box, held)
                box.sessions[name] = []

    def _stand_by(self) -> None:
        """Without an owner: until everything stands still, and then until the next one comes."""
        if self._leaving is not None:
            if not self._has_halted():
                return
            self._leaving.close()
            self._leaving = None
            if self._boxes and self._listener is not None:
                self._selector.register(self._listener, selectors.EVENT_READ, self._on_next_owner)
        if not self._boxes:
            raise EOFError

    def _has_halted(self) -> bool:
        """One round of killing what works for the owner that is gone. A sandbox in which that does not succeed in time
        is killed as a whole: nothing may run without an owner. Who is killed and hangs in the kernel runs no more, and
        is not waited for without end: the others have to be adopted."""
        for pid, runner in self._at_work.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if runner is not None and runner.box is not None:
                orphan_cleanup.let_die(pid, self._groups, runner.box.name)
        busy = orphan_cleanup.halt(self._groups, {name for name, box in self._boxes.items() if not box.closing})
        late_s = time.monotonic() - self._halt_by_s
        if late_s > 0.0:
            working = {runner.box.name for runner in self._at_work.values() if runner is not None and runner.box}
            for name in (busy | working) & set(self._boxes):
                self._boxes[name].kill()
        return not (busy or self._at_work) or late_s > orphan_cleanup.END_S_MAX

    def _on_next_owner(self, _: object) -> None:
        """It is told first which sandboxes there are, so that it can tell whether they are what it knows of."""
        assert self._listener is not None
        self._attend(self._listener.accept()[0])
        if self._owner is not None:
            self._selector.unregister(self._listener)
            self._owner.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4 * MESSAGE_BYTES_MAX)
            boxes = {name: {"init": box.init, "sessions": sorted(box.sessions)} for name, box in self._boxes.items()}
            self._send({"protocol": PROTOCOL, "number": self._number, "boxes": boxes})

    # ---- messages ----

    def _on_request(self, _: object) -> None:
        if self._owner is None:
            return  # its process ended at the same moment
        try:
            data, fds, flags, _ = socket.recv_fds(self._owner, MESSAGE_BYTES_MAX, FDS_MAX)
        except ConnectionResetError:  # it died with replies unread
            data = b""
        if not data:
            self._lose_owner()
            return
        if flags & socket.MSG_TRUNC:
            raise RuntimeError("a message longer than MESSAGE_BYTES_MAX came; the owner must refuse it")
        head, _, order = data.partition(b"\n")
        request: Message = json.loads(head)
        self._number = request["id"]
        try:
            if order:
                self._order(request, order, fds)
            else:
                _REQUESTS[request["do"]](self, request, fds)
        except (OSError, child.StepFailed) as error:
            self._send({"exit" if order else "id": request["id"], "error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def _reply(self, number: int, **fields: Any) -> None:
        self._send({"id": number, **fields})

    def _send(self, message: Message) -> None:
        if self._owner is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # that it is gone is what is read next
                self._owner.send(json.dumps(message).encode())

    def _collect(self, fd: int, then: Callable[[bytes], None], into: bytearray | None = None) -> None:
        """Read a pipe of a child to its end without waiting for it."""
        chunks = bytearray() if into is None else into

        def more(_: object) -> None:
            try:
                data = os.read(fd, MESSAGE_BYTES_MAX)
            except ConnectionResetError:
                return  # it ended with its order unread; what it said before comes with the next read
            if data:
                if len(chunks) < ANSWER_BYTES_MAX:
                    chunks.extend(data)
                return
            self._selector.unregister(fd)
            os.close(fd)
            then(bytes(chunks))

        self._selector.register(fd, selectors.EVENT_READ, more)

    def _watch(self, pid: int, then: Callable[[int], None]) -> None:
        """Call `then(exit code)` when a child has ended; a signal is a negative code."""
        fd = os.pidfd_open(pid)

        def ended(_: object) -> None:
            self._selector.unregister(fd)
            os.close(fd)
            _, status = os.waitpid(pid, 0)
            self._at_work.pop(pid, None)
            then(os.waitstatus_to_exitcode(status))

        self._selector.register(fd, selectors.EVENT_READ, ended)

    def _begin(self, request: Message, fds: list[int]) -> None:
        """Every program from now on runs under this filter: instructions of classic BPF, hexadecimal."""
        self._groups = request["groups"]
        self._outlives = request["outlives"]
        code = bytes.fromhex(request["filter"])
        self._filter = ctypes.create_string_buffer(code, len(code))
        packed = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self._filter))
        self._program = ctypes.create_string_buffer(packed, len(packed))
        self._reply(request["id"], pid=os.getpid())

    # ---- sandboxes ----

    def _open(self, request: Message, fds: list[int]) -> None:
        """Mount what the sandbox sees in a namespace of its own, so that the mounts vanish with it, and start its first
        process there. It is open when that process has become the given program."""
        status_read, status, info_read, info = (*os.pipe(), *os.pipe())
        spawner = os.getpid()
        pid = os.fork()
        if pid == 0:
            assert self._filter is not None, "the filter comes before the first sandbox"
            child.become_holder(request, self._filter.raw, status, info, spawner)
        os.close(status)
        os.close(info)
        self._at_work[pid] = None
        said = bytearray()
        name, number = request["box"], request["id"]

        told = bytearray()

        def has_begun(_: object) -> None:
            """It comes in pieces, and others hold the pipe too: the closing brace is the end."""
            data = os.read(info_read, 4096)
            told.extend(data)
            if data and not told.endswith(b"}\n"):
                return
            self._selector.unregister(info_read)
            os.close(info_read)
            if data:
                init = int(json.loads(told)["child-pid"])
                self._becoming[init] = lambda: is_ready(init)

        def is_ready(init: int) -> None:
            self._boxes[name] = Box(name, pid, init, request)
            self._at_work.pop(pid, None)
            self._want_spare(name)
            self._reply(number, holder=pid, init=init)

        def ended(code: int) -> None:
            box = self._boxes.pop(name, None)
            if box is not None:
                self._read_no_more(box, 0)
                box.forget()
                self._wanted.pop(name, None)
                self._send({"gone": name, "code": code})
            else:
                why = said.decode(errors="replace").strip()
                self._reply(number, error=why or f"its first process ended with {code} before it was ready")

        self._selector.register(info_read, selectors.EVENT_READ, has_begun)
        # Its words first, its end afterwards: nothing else holds that pipe once it is gone.
        self._collect(status_read, lambda text: self._watch(pid, ended), into=said)

    def _look(self) -> None:
        """bubblewrap tells the process id before the sandbox is made; what the process executes tells when it is."""
        for init, then in list(self._becoming.items()):
            try:
                path = os.readlink(f"/proc/{init}/exe")
            except OSError:
                del self._becoming[init]  # it has ended; so has its holder, which is watched
                continue
            if os.path.basename(path) != "bwrap":
                del self._becoming[init]
                with contextlib.suppress(OSError):  # as above
                    then()

    def _close(self, request: Message, fds: list[int]) -> None:
        box = self._boxes.get(request["box"])
        if box is not None:
            box.kill()
        self._reply(request["id"])

    def _copy(self, request: Message, fds: list[int]) -> None:
        """Copy a directory that only the holder of a sandbox sees to one that all see."""
        box = self._box(request["box"])
        status_read, status = os.pipe()
        spawner = os.getpid()
        pid = os.fork()
        if pid == 0:
            child.become_copy(box.holder_fd, request["source"], request["target"], status, spawner)
        os.close(status)
        self._at_work[pid] = None
        said = bytearray()

        def ended(code: int) -> None:
            why = {} if code == 0 else {"error": said.decode(errors="replace").strip() or f"cp ended with {code}"}
            self._reply(request["id"], **why)

        self._collect(status_read, lambda text: self._watch(pid, ended), into=said)

    def _box(self, name: str) -> Box:
        box = self._boxes.get(name)
        if box is None:
            raise ProcessLookupError(errno.ESRCH, f"sandbox {name} is gone")
        return box

    def _drain(self, request: Message, fds: list[int]) -> None:
        """Streams that nobody wants any more, of actions that have ended: the owner has let go of them."""
        box = self._boxes.get(request["box"])
        if box is not None:
            self._read_away(box, [os.dup(fd) for fd in fds])

    def _read_away(self, box: Box, fds: list[int]) -> None:
        """So that whoever was left running and writes there neither waits nor dies."""

        def more(fd: int) -> None:
            with contextlib.suppress(BlockingIOError):
                if not os.read(fd, DRAIN_BYTES):
                    del box.drained[fd]
                    self._selector.unregister(fd)
                    os.close(fd)

        for fd in fds:
            box.drained[fd] = None
            self._selector.register(fd, selectors.EVENT_READ, more)
        self._read_no_more(box, DRAINED_MAX)

    def _read_no_more(self, box: Box, most: int) -> None:
        while len(box.drained) > most:
            fd, _ = box.drained.popitem(last=False)
            self._selector.unregister(fd)
            os.close(fd)

    def _over(self, request: Message, fds: list[int]) -> None:
        """The caller of this session is told that its shell is no more."""
        box = self._boxes.get(request["box"])
        if box is not None:
            box.end_session(request["session"])

    # ---- runners ----

    def _order(self, request: Message, order: bytes, fds: list[int]) -> None:
        """Have a runner carry out an order, which is handed on as it came. `exit` tells what came of it; who wants to
        know who carries it out is told that first."""
        box = self._box(request["box"])
        groups = request["groups"]
        held = fds[len(fds) - request.get("held", 0) :]
        fds = fds[: len(fds) - len(held)]
        runner = self._take_runner(box)
        try:
            _hand_over(runner, box, groups, order, fds)
        except GONE:
            # The spare was killed, as anything in the sandbox may be. A new one is tried once.
            runner.channel.close()
            runner = self._fork_runner(box)
            try:
                _hand_over(runner, box, groups, order, fds)
            except GONE:
                with runner.channel:
                    raise ChildProcessError(_answer(_last_words(runner.channel))["error"]) from None
        runner.number = request["id"]
        runner.executes = request["do"] == "exec"
        runner.ordered_s = time.monotonic()
        runner.box = box
        if held:
            box.end_session(request["session"])
            box.sessions[request["session"]] = [os.dup(fd) for fd in held]
        self._ordered[runner.number] = runner
        self._at_work[runner.pid] = runner
        os.kill(runner.pid, signal.SIGCONT)
        if request["told"]:
            self._reply(runner.number, pid=runner.pid)
        self._want_spare(box.name)
        self._collect(runner.channel.detach(), functools.partial(self._heard, runner))

    def _nudge(self) -> None:
        now = time.monotonic()
        if now - self._nudged_s < NUDGE_S:
            return
        self._nudged_s = now
        for runner in self._ordered.values():
            late = runner.executes and now - runner.ordered_s > EXECUTE_S_MAX
            with contextlib.suppress(ProcessLookupError):  # its end is about to be noticed
                os.kill(runner.pid, signal.SIGKILL if late else signal.SIGCONT)

    def _abandon(self, request: Message, fds: list[int]) -> None:
        """Nobody waits any more for what this runner does."""
        runner = self._ordered.get(request["order"])
        if runner is not None:
            os.kill(runner.pid, signal.SIGKILL)
        self._reply(request["id"])

    def _heard(self, runner: Runner, text: bytes) -> None:
        """All that it says on its channel. Of a program silence is the sign of success: exec has closed the channel."""
        self._ordered.pop(runner.number, None)
        runner.said = text
        self._conclude(runner)

    def _runner_ended(self, box: Box, runner: Runner, code: int) -> None:
        if box.spare is runner:
            box.spare = None
            self._spares.pop(box.name, None)
            runner.channel.close()
        elif runner.number:
            runner.code = code
            self._conclude(runner)

    def _conclude(self, runner: Runner) -> None:
        """Its last words and its end are noticed in either order."""
        if runner.said is None or runner.code is None:
            return
        if runner.executes and not runner.said:
            self._send({"exit": runner.number, "code": runner.code})
        else:
            self._send({"exit": runner.number, **_answer(runner.said)})

    def _want_spare(self, name: str) -> None:
        self._wanted[name] = None
        while len(self._wanted) > SPARES_MAX:
            self._wanted.popitem(last=False)

    def _fork_spare(self, name: str) -> None:
        box = self._boxes.get(name)
        if box is None or box.spare is not None:
            return
        try:
            box.spare = self._fork_runner(box)
        except (OSError, child.StepFailed):
            return  # whoever needs one tries again, and hears why it fails
        self._spares[name] = None
        if len(self._spares) > SPARES_MAX:
            oldest = self._boxes[self._spares.popitem(last=False)[0]]
            assert oldest.spare is not None
            oldest.forget_joins()
            oldest.spare.channel.close()  # it sees the end and goes
            oldest.spare = None

    def _take_runner(self, box: Box) -> Runner:
        runner, box.spare = box.spare, None
        if runner is None:
            return self._fork_runner(box)
        del self._spares[box.name]
        return runner

    def _fork_runner(self, box: Box) -> Runner:
        """Fork a child into the process namespace of a sandbox. The spawner itself stays where it is."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 2 * MESSAGE_BYTES_MAX)
        pid = -1
        try:
            child.call("joining the processes", child.libc.setns(box.init_fd, child.CLONE_NEWPID))
            try:
                pid = os.fork()
            finally:
                if pid != 0:
                    child.libc.setns(self._own_pids, child.CLONE_NEWPID)
        except BaseException:
            mine.close()
            raise
        finally:
            if pid != 0:
                its.close()
        if pid == 0:
            assert self._program is not None
            child.become_runner(its.detach(), box, self._program, ORDERS, MESSAGE_BYTES_MAX, FDS_MAX)
        runner = Runner(pid, mine)
        self._watch(pid, lambda code: self._runner_ended(box, runner, code))
        return runner


GONE = (ProcessLookupError, BrokenPipeError, ConnectionResetError)
"""What says that a runner has ended before it could get its order."""


def _hand_over(runner: Runner, box: Box, groups: list[str], order: bytes, fds: list[int]) -> None:
    box.join(runner.pid, groups)
    socket.send_fds(runner.channel, [order], fds)


def _last_words(channel: socket.socket) -> bytes:
    channel.setblocking(False)
    try:
        return channel.recv(ANSWER_BYTES_MAX)
    except OSError:
        return b""


def _answer(text: bytes) -> Message:
    """What a runner said. It stood inside a sandbox: only what an answer may hold is taken from it."""
    if not text:
        return {"error": "it was killed"}
    try:
        said = json.loads(text)
        if "ok" in said:
            return {"ok": said["ok"]}
        number = {"errno": int(said["errno"])} if "errno" in said else {}
        return {"error": str(said["error"]), **number}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {"error": "its answer makes no sense"}


ORDERS: child.Orders = {"exec": child.execute, "file": _beside("file_worker").carry_out}
"""Of a runner."""

_REQUESTS: dict[str, Callable[[Spawner, Message, list[int]], None]] = {
    "begin": Spawner._begin,
    "open": Spawner._open,
    "close": Spawner._close,
    "copy": Spawner._copy,
    "abandon": Spawner._abandon,
    "drain": Spawner._drain,
    "over": Spawner._over,
}


def main() -> None:
    """`python -I -S spawner.py FD [LOCK DIRECTORY]`: the descriptor of a SOCK_SEQPACKET socket whose other end the
    owner holds. For an owner with a name also that of a locked file, which is held for as long as the spawner lives,
    and the directory where the next owner looks for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, child.DESCRIPTORS_MAX), most))
    owner, *lock = [_moved_up(int(word)) for word in sys.argv[1:3]]
    for low in range(3, child.LOW_FDS):  # taken, so that no descriptor of ours is in the way of those of children
        with contextlib.suppress(OSError):
            os.fstat(low)
            continue
        os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    listener = _outlive(lock[0], sys.argv[3]) if lock else None
    gc.freeze()  # a collection would write to every page that forks share
    Spawner(listener).serve(socket.socket(fileno=owner))


def _moved_up(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, child.LOW_FDS)
    os.close(fd)
    return moved


def _outlive(lock: int, directory: str) -> socket.socket:
    """Be nobody's child, and be found: `lock` says who we are, and the socket is where we are spoken to."""
    if os.fork() != 0:
        os._exit(0)
    os.ftruncate(lock, 0)
    os.write(lock, b"%d" % os.getpid())
    os.chdir(directory)  # the path of a socket may have 107 bytes, and that of a directory many more
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(SOCKET)
    listener.listen()
    os.chdir("/")
    return listener


if __name__ == "__main__":
    main()
