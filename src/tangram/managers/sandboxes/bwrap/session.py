"""A session: a shell that is held between commands, so that its directory, variables and functions stay.

Owns the shell's streams and the future of the command that it runs. The shell runs in its sandbox like any program:
what it says is believed of its own commands only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tangram.managers.sandboxes.bwrap.spawner.client import KeptStream, Program
from tangram.processes.streams import ShellStreams

if TYPE_CHECKING:
    from tangram.managers.sandboxes.bwrap.sandbox import Slot

GIVEN_AT = (10, 11)
"""The descriptors at which the shell finds its ends of the two pipes."""


class Session:
    """A held shell. Between its commands it rests where the last one ran, or in the background of its sandbox with
    what that left running."""

    def __init__(self, streams: tuple[KeptStream, KeptStream]) -> None:
        self.streams = streams
        self.program: Program | None = None
        self.width = 0
        """Of which its variables speak."""
        self.busy = False
        self.slot: Slot | None = None
        """Where it rests."""
        self._shell = ShellStreams(self._on_status)
        self._status: asyncio.Future[int] | None = None

    def argv(self, shell: str) -> list[str]:
        return [*self._shell.argv(shell)[:-2], *map(str, GIVEN_AT)]

    @property
    def given(self) -> dict[int, int]:
        """What the shell gets, by the number that it has there."""
        return dict(zip(GIVEN_AT, self._shell.given, strict=True))

    def close_given(self) -> None:
        self._shell.close_given()

    @property
    def has_ended(self) -> bool:
        return self.program is not None and self.program.has_ended

    def run(self, command: str) -> asyncio.Future[int]:
        """Hand a command over. The future is its exit code."""
        self._status = asyncio.get_running_loop().create_future()
        self._shell.send(command)
        return self._status

    def _on_status(self, status: int) -> None:
        if self._status is not None and not self._status.done():
            self._status.set_result(status)

    def close(self) -> None:
        self._shell.close()
        for stream in self.streams:
            stream.close()
