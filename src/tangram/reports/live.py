"""Live screens: what a command shows while it runs, and how it ends.

Owns the refresh, the fallback to plain lines where there is no terminal, and the end by Ctrl-C or SIGTERM. A screen is
drawn by its own thread, so it continues when the work hangs, and for the size that the terminal has at that moment.
Promises that the terminal is restored however the work ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

DRAWS_PER_S = 4.0
LINE_EVERY_S = 10.0


class LiveView:
    """Base of views of running work: a screen on a terminal, otherwise a line now and then; a last line at the end.

    Subclasses implement `render` and `line`; both are called by other threads than the work's.

    Args:
        quiet: print nothing.
        console: default: stderr.
        background_lines: print lines from a thread, also while nothing happens; otherwise `print_if_due` prints them.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_every_s: float = LINE_EVERY_S,
        background_lines: bool = False,
    ) -> None:
        self.console = console
        """None until the view starts, unless given."""
        self._quiet = quiet
        self._clock = clock
        self._line_every_s = line_every_s
        self._background_lines = background_lines
        self._began_at = self._printed_at = clock()
        self._live: Live | None = None
        self._printer: threading.Thread | None = None
        self._ended = threading.Event()

    def render(self) -> RenderableType:
        """The screen."""
        raise NotImplementedError

    def line(self) -> str:
        """The state in one line."""
        raise NotImplementedError

    @property
    def is_on_screen(self) -> bool:
        return self._live is not None

    @property
    def has_last_line(self) -> bool:
        """Whether a line is printed at the end."""
        return True

    def __enter__(self) -> Self:
        self._began_at = self._printed_at = self._clock()
        if self._quiet:
            return self
        from rich.console import Console
        from rich.live import Live

        self.console = self.console or Console(stderr=True)
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self.render,
                console=self.console,
                refresh_per_second=DRAWS_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        elif self._background_lines:
            self._printer = threading.Thread(target=self._print_lines, name="live-view", daemon=True)
            self._printer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._ended.set()
        if self._printer is not None:
            self._printer.join()
            self._printer = None
        if not self._quiet and self.has_last_line:
            self.print_line(self.line())

    def print_if_due(self) -> None:
        """Print a line if there is no screen and the last line is old enough."""
        if self._quiet or self._live is not None or self.console is None or self._background_lines:
            return
        if self._clock() - self._printed_at >= self._line_every_s:
            self.print_line(self.line())

    def print_line(self, text: str) -> None:
        """Print above the screen. The caller must not hold a lock that `render` takes: drawing holds the console."""
        assert self.console is not None
        self._printed_at = self._clock()
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _print_lines(self) -> None:
        while not self._ended.wait(self._line_every_s):
            self.print_line(self.line())


# ---- full screens -----------------------------------------------------------------------------------------------


@contextmanager
def full_screen(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """A function that replaces the whole screen; the previous content returns at the end."""
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(frame, refresh=True)


async def run_until_signal(work: Coroutine[Any, Any, Any]) -> int:
    """Run `work` until SIGINT or SIGTERM, cancel it, and return the signal. Raises what `work` raises."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    running = asyncio.ensure_future(work)
    try:
        await asyncio.wait({running, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            return signalled.result()
        await running
        return 0
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        for number in numbers:
            loop.remove_signal_handler(number)


# ---- progress bars and spinners ----------------------------------------------------------------------------------


class ProgressCallback(Protocol):
    """Called with the work done, all work, and optionally what is being done."""

    def __call__(self, done: float, total: int, doing: str = "", /) -> None: ...


@contextmanager
def progress(title: str, unit: str = "simulations") -> Iterator[ProgressCallback | None]:
    """A callback that draws a bar on stderr; None if stderr is no terminal. The bar disappears at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, done="")

        def report(done: float, total: int, doing: str = "", /) -> None:
            text = f"{int(done)} of {total} {unit}" if unit else doing or f"{100.0 * done / total:.0f} %"
            bar.update(task, completed=done, total=total, done=text)

        yield report


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Shows on stderr that something is under way; nothing if stderr is no terminal. It disappears at the end."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
