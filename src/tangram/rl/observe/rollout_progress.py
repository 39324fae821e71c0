"""Progress: how far a rollout is, live in a terminal, or as plain lines in a log.

Owns the counting and the look. Is told what happens by calls and asks nobody; never waits, never raises for what it is
told. On a terminal the screen is drawn four times a second by a thread of its own, so it goes on when the rollout
hangs; elsewhere a line is written at most every ten seconds, when something happens, and one at the end. Whatever an
environment or an engine is called, it cannot steer the terminal.

    with RolloutProgress(total_groups=64) as progress:
        progress.began("chain/3/0.0", "chain")
        progress.stage("chain/3/0.0", Stage.GENERATE)
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from tangram.reports.printable import plain
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.rollout.records import Ending, Group, Stage, Trajectory

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

DRAWS_PER_S = 4.0
LINE_EVERY_S = 10.0
WINDOW_S = 10.0
"""Over which tokens per second are counted: longer than an update of weights, short enough to see one."""
SHOWN_MAX = 12
"""Tasks, engines; the rest are counted."""
BAR_WIDTH = 32
UP, SUSPENDED, DEAD = "up", "suspended", "dead"


class TaskSoFar:
    """Of one task."""

    def __init__(self) -> None:
        self.ended = self.rewarded = 0
        self.reward_sum = 0.0

    @property
    def reward(self) -> float | None:
        """The mean of those that have one."""
        return self.reward_sum / self.rewarded if self.rewarded else None


class EngineSoFar(msgspec.Struct):
    """Of one engine, as it was told last. EngineStatistics say no state: one that is missing is dead, and one whose
    suspended time grew is suspended."""

    last: EngineStatistics
    state: str = UP


class RolloutProgress:
    def __init__(
        self,
        total_groups: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_groups = total_groups
        self._quiet = quiet
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        """Between the rollout and the thread that draws."""
        self._began_s = self._told_s = clock()
        self._live: Live | None = None
        self._stage_by_id: dict[str, Stage | None] = {}
        self._buffered: set[str] = set()
        self.tasks: dict[str, TaskSoFar] = {}
        self.endings: Counter[Ending] = Counter()
        self.last_trouble = ""
        self.groups_done = self.groups_short = self.groups_dropped = 0
        self._engines: dict[str, EngineSoFar] = {}
        self._tokens = 0
        """That engines have written; of ended trajectories, while no engine told anything."""
        self._rates: deque[tuple[float, int]] = deque([(self._began_s, 0)])

    # ---- what it is told ----

    def began(self, trajectory: str, task: str) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = None
            self.tasks.setdefault(task, TaskSoFar())
        self._tell()

    def stage(self, trajectory: str, stage: Stage) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = stage
        self._tell()

    def ended(self, trajectory: Trajectory) -> None:
        with self._lock:
            self._stage_by_id.pop(trajectory.id, None)
            self.endings[trajectory.ending] += 1
            task = self.tasks.setdefault(trajectory.task, TaskSoFar())
            task.ended += 1
            if trajectory.reward is not None:
                self._buffered.add(trajectory.id)
                if math.isfinite(trajectory.reward):
                    task.rewarded += 1
                    task.reward_sum += trajectory.reward
            else:
                self.last_trouble = f"{trajectory.id} {trajectory.ending}: {trajectory.cause or 'no cause is given'}"
            if not self._engines:
                self._wrote(sum(len(turn.tokens) for turn in trajectory.turns))
        self._tell()

    def group(self, group: Group) -> None:
        with self._lock:
            self._buffered.difference_update(each.id for each in group.all())
            if not group.members:
                self.groups_dropped += 1
            else:
                self.groups_done += 1
                self.groups_short += not group.whole
        self._tell()

    def engines(self, engines: Iterable[EngineStatistics], dead: Collection[str] = ()) -> None:
        """`dead`: the names of those that do not serve, as whoever keeps them knows; those that are missing do not."""
        with self._lock:
            told = {each.name: each for each in engines}
            if told and not self._engines:
                self._tokens, self._rates = 0, deque([(self._clock(), 0)])
            for name, now in told.items():
                known = self._engines.get(name)
                before = known.last if known else EngineStatistics(name=name, decode_tokens=now.decode_tokens)
                restarted = now.decode_tokens < before.decode_tokens
                self._wrote(now.decode_tokens - (0 if restarted else before.decode_tokens))
                suspended = not restarted and known is not None and now.suspended_s > before.suspended_s
                self._engines[name] = EngineSoFar(last=now, state=SUSPENDED if suspended else UP)
            for name, engine in self._engines.items():
                if name not in told or name in dead:
                    engine.state = DEAD
        self._tell()

    # ---- what it knows ----

    def in_stages(self) -> dict[str, int]:
        """How many trajectories are where; `beginning` are those that are in none yet."""
        counts = Counter(self._stage_by_id.values())
        found = {"beginning": counts[None], **{stage.value: counts[stage] for stage in Stage}}
        found[Stage.BUFFER.value] += len(self._buffered)
        return found

    def engine_states(self) -> dict[str, int]:
        states = Counter(engine.state for engine in self._engines.values())
        return {state: states[state] for state in (UP, SUSPENDED, DEAD)}

    def tokens_per_s(self) -> float:
        now = self._clock()
        self._forget(now)
        since, tokens = self._rates[0]
        return (self._tokens - tokens) / (now - since) if now > since else 0.0

    def left_s(self) -> float | None:
        """At the pace so far; None while nothing is done."""
        if not self.groups_done:
            return None
        left = max(0, self.total_groups - self.groups_done)
        return (self._clock() - self._began_s) / self.groups_done * left

    def _wrote(self, tokens: int) -> None:
        self._tokens += tokens
        self._rates.append((self._clock(), self._tokens))
        self._forget(self._rates[-1][0])

    def _forget(self, now: float) -> None:
        """What is older than the window, except for the last of it."""
        while len(self._rates) > 1 and self._rates[1][0] <= now - WINDOW_S:
            self._rates.popleft()

    # ---- how it is shown ----

    def __enter__(self) -> RolloutProgress:
        self._began_s = self._told_s = self._clock()
        if not self._quiet:
            from rich.console import Console
            from rich.live import Live

            self._console = self._console or Console(stderr=True)
            if self._console.is_terminal:
                self._live = Live(
                    get_renderable=self.render,
                    console=self._console,
                    refresh_per_second=DRAWS_PER_S,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if not self._quiet:
            self._put_line()

    def _tell(self) -> None:
        if self._quiet or self._live is not None or self._console is None:
            return
        if self._clock() - self._told_s >= LINE_EVERY_S:
            self._put_line()

    def _put_line(self) -> None:
        assert self._console is not None
        self._told_s = self._clock()
        self._console.print(self.line(), markup=False, highlight=False, emoji=False, soft_wrap=True)

    def line(self) -> str:
        """All of it in one."""
        with self._lock:
            parts = [f"rollout: {self._groups_words()}, {_several(sum(self.endings.values()), 'trajectory')} ended"]
            rewards = [f"{plain(name)} {_number(task.reward)}" for name, task in self._shown_tasks()]
            parts += [f"reward {', '.join(rewards)}"] if rewards else []
            under_way = [f"{name} {count}" for name, count in self.in_stages().items() if count]
            parts += [f"in {', '.join(under_way)}"] if under_way else []
            parts += [f"{self.tokens_per_s():,.0f} tokens/s", *self._trouble_words()]
            parts += [self._engine_words()] if self._engines else []
            return "; ".join([*parts, self._time_words()])

    def render(self) -> RenderableType:
        """The screen."""
        from rich.console import Group as Rows
        from rich.text import Text

        with self._lock:
            share = min(1.0, self.groups_done / self.total_groups) if self.total_groups > 0 else 1.0
            full = round(BAR_WIDTH * share)
            rows: list[RenderableType] = [
                Text.assemble(("rollout ", "bold"), ("━" * full, "green"), ("━" * (BAR_WIDTH - full), "dim"),
                              f" {self._groups_words()}  {self._time_words()}"),
                Text("  ".join(f"{name} {count:,}" for name, count in self.in_stages().items())
                     + f"   {self.tokens_per_s():,.0f} tokens/s"),
                *self._task_rows(),
            ]  # fmt: skip
            if self._engines:
                rows.append(Text(self._engine_words(), style="yellow" if self.engine_states()[DEAD] else ""))
            rows += [Text(words, style="yellow", overflow="ellipsis", no_wrap=True) for words in self._trouble_words()]
            if self.last_trouble:
                rows.append(Text(f"last: {plain(self.last_trouble)}", style="dim", overflow="ellipsis", no_wrap=True))
            return Rows(*rows)

    def _task_rows(self) -> list[Text]:
        from rich.text import Text

        width = max((len(plain(name)) for name in self.tasks), default=0)
        rows = [
            Text(f"  {plain(name):<{width}}  {task.ended:>6,} ended  reward {_number(task.reward)}", no_wrap=True)
            for name, task in self._shown_tasks()
        ]
        more = len(self.tasks) - len(rows)
        return [*rows, Text(f"  and {more:,} more tasks")] if more > 0 else rows

    def _shown_tasks(self) -> list[tuple[str, TaskSoFar]]:
        return sorted(self.tasks.items())[:SHOWN_MAX]

    def _groups_words(self) -> str:
        short = f" ({self.groups_short:,} with fewer members)" if self.groups_short else ""
        dropped = f", {self.groups_dropped:,} dropped" if self.groups_dropped else ""
        return f"{self.groups_done:,} of {_several(self.total_groups, 'group')}{short}{dropped}"

    def _time_words(self) -> str:
        left = self.left_s()
        so_far = duration(self._clock() - self._began_s)
        return f"{so_far} so far" + (f", about {duration(left)} left" if left else "")

    def _trouble_words(self) -> list[str]:
        others = [f"{ending} {count:,}" for ending, count in sorted(self.endings.items()) if ending != Ending.FINISHED]
        return [f"not finished: {', '.join(others)}"] if others else []

    def _engine_words(self) -> str:
        states = ", ".join(f"{count:,} {state}" for state, count in self.engine_states().items() if count)
        each = [
            f"{plain(name)} v{engine.last.version} " + _load(engine)
            for name, engine in sorted(self._engines.items())[:SHOWN_MAX]
        ]
        more = f", and {len(self._engines) - SHOWN_MAX:,} more" if len(self._engines) > SHOWN_MAX else ""
        return f"engines: {states} ({', '.join(each)}{more})"


def _load(engine: EngineSoFar) -> str:
    return f"{engine.last.active:,}+{engine.last.waiting:,}" if engine.state == UP else engine.state


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _several(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def duration(seconds: float) -> str:
    """The two largest units: `5 min 2 s`."""
    whole = int(seconds)
    units = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next((place for place, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])
