"""A session: a shell that is held between commands, so that its directory, variables and functions stay.

Owns the protocol with that shell and the descriptors for it. The shell runs in its sandbox like any program: what it
says is believed of its own commands only.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os

from tangram.managers.cpu.spawning import Program
from tangram.managers.cpu.streams import Stream

COMMANDS, STATUSES = 8, 9
"""Descriptors of a held shell: where commands come in, each ended by NUL, and where their exit codes go out."""
COMMAND_PIPE_BYTES = 1 << 18
"""A command must fit into the pipe, so that handing it over never waits."""
HELD_SHELL = f"""\
while IFS= read -r -d '' -u {COMMANDS} __tangram; do
    eval "$__tangram" {COMMANDS}<&- {STATUSES}>&-
    printf '%d\\n' "$?" >&{STATUSES}
done
"""
"""What a held shell runs. `eval` in the shell itself: its directory, variables and functions stay."""
NOT_A_NUMBER = 126
"""The exit code of a command whose own words stood where its exit code belongs."""


class Session:
    """A held shell: between its commands it rests in the background of its sandbox."""

    def __init__(self, program: Program, streams: tuple[Stream, Stream], commands: int, statuses: int) -> None:
        self.program = program
        self.streams = streams
        self.width = 0
        """Of which its variables speak."""
        self.busy = False
        self._commands = commands
        self._statuses = statuses
        self._status: asyncio.Future[int] | None = None
        os.set_blocking(statuses, False)
        os.set_blocking(commands, False)
        asyncio.get_running_loop().add_reader(statuses, self._on_status)

    def run(self, command: str) -> asyncio.Future[int]:
        """Raises OSError if the shell does not take it: it has ended, or has never read what it was given before."""
        self._status = asyncio.get_running_loop().create_future()
        data = command.encode() + b"\0"
        if os.write(self._commands, data) < len(data):
            raise BlockingIOError(errno.EAGAIN, "the shell does not read its commands")
        return self._status

    def _on_status(self) -> None:
        try:
            data = os.read(self._statuses, 4096)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._statuses)
        elif self._status is not None and not self._status.done():
            # What a program wrote there itself is no number; it can deceive only whoever reads its own result.
            words = data.split()
            self._status.set_result(int(words[-1]) if words and words[-1].isdigit() else NOT_A_NUMBER)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._statuses)
        os.close(self._statuses)
        os.close(self._commands)
        for stream in self.streams:
            stream.close()


class ShellPipes:
    """The two pipes of a shell that is about to be started."""

    def __init__(self) -> None:
        self.commands_read, self.commands = os.pipe2(os.O_CLOEXEC)
        self.statuses, self.statuses_write = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self.commands, fcntl.F_SETPIPE_SZ, COMMAND_PIPE_BYTES)

    @property
    def given(self) -> dict[int, int]:
        """What the shell gets, by the number that it has there."""
        return {COMMANDS: self.commands_read, STATUSES: self.statuses_write}

    def close_given(self) -> None:
        os.close(self.commands_read)
        os.close(self.statuses_write)

    def close_kept(self) -> None:
        os.close(self.commands)
        os.close(self.statuses)
