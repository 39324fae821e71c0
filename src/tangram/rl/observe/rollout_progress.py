"""Progress of a rollout: counts its events, and shows them live in a terminal or as lines in a log.

The rollout calls the `on_...` methods, which never block and never raise. Names of environments and engines are printed
as text. `reports/live.py` draws the screen and decides when a line is due.

    with RolloutProgress(total_groups=64) as progress:
        progress.on_begin("chain/3/0.0", "chain")
        progress.on_stage("chain/3/0.0", Stage.GENERATE)
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from tangram.reports import terminal
from tangram.reports.formatting import duration, number, pluralize
from tangram.reports.live import LiveView
from tangram.reports.printable import escape_unprintable
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.trajectories.trajectory import Ending, Group, Stage, Trajectory

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

WINDOW_S = 10.0
"""The window of tokens per second: longer than a weight update, short enough to show one."""
SHOWN_MAX = 12
"""Tasks and engines that are listed; the others are counted."""
BAR_WIDTH = 32
UP, SUSPENDED, DEAD = "up", "suspended", "dead"


class RolloutTaskProgress(msgspec.Struct):
    """The progress of one task."""

    ended: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0

    @property
    def reward(self) -> float | None:
        """The mean of the trajectories that have a reward."""
        return self.reward_sum / self.rewarded if self.rewarded else None


class EngineProgress(msgspec.Struct):
    """The last statistics of an engine. They contain no state: a missing engine is dead, and one whose suspended time
    grew is suspended."""

    last: EngineStatistics
    state: str = UP


class RolloutProgress(LiveView):
    def __init__(
        self,
        total_groups: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(quiet=quiet, console=console, clock=clock)
        self.total_groups = total_groups
        self._lock = threading.Lock()
        """Held by the rollout and by the thread that draws."""
        self._stage_by_id: dict[str, Stage | None] = {}
        self._buffered: set[str] = set()
        self.tasks: dict[str, RolloutTaskProgress] = {}
        self.endings: Counter[Ending] = Counter()
        self.last_failure = ""
        self.groups_done = self.groups_short = self.groups_dropped = 0
        self._engines: dict[str, EngineProgress] = {}
        self._tokens = 0
        """Tokens decoded by engines; those of ended trajectories until there are statistics of engines."""
        self._rates: deque[tuple[float, int]] = deque([(self._began_at, 0)])

    # ---- events ----

    def on_begin(self, trajectory: str, task: str) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = None
            self.tasks.setdefault(task, RolloutTaskProgress())
        self.print_if_due()

    def on_stage(self, trajectory: str, stage: Stage) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = stage
        self.print_if_due()

    def on_end(self, trajectory: Trajectory) -> None:
        with self._lock:
            self._stage_by_id.pop(trajectory.id, None)
            self.endings[trajectory.ending] += 1
            task = self.tasks.setdefault(trajectory.task, RolloutTaskProgress())
            task.ended += 1
            if trajectory.reward is not None:
                self._buffered.add(trajectory.id)
                if math.isfinite(trajectory.reward):
                    task.rewarded += 1
                    task.reward_sum += trajectory.reward
            else:
                self.last_failure = f"{trajectory.id} {trajectory.ending}: {trajectory.cause or 'no cause is given'}"
            if not self._engines:
                self._add_tokens(sum(len(turn.tokens) for turn in trajectory.turns))
        self.print_if_due()

    def on_group(self, group: Group) -> None:
        with self._lock:
            self._buffered.difference_update(each.id for each in group.all_trajectories())
            if not group.members:
                self.groups_dropped += 1
            else:
                self.groups_done += 1
                self.groups_short += not group.is_complete
        self.print_if_due()

    def set_engines(self, engines: Iterable[EngineStatistics]) -> None:
        """Update the engines. Those without statistics are dead."""
        with self._lock:
            by_name = {each.name: each for each in engines}
            if by_name and not self._engines:
                self._tokens, self._rates = 0, deque([(self._clock(), 0)])
            for name, now in by_name.items():
                known = self._engines.get(name)
                before = known.last if known else EngineStatistics(name=name, decode_tokens=now.decode_tokens)
                restarted = now.decode_tokens < before.decode_tokens
                self._add_tokens(now.decode_tokens - (0 if restarted else before.decode_tokens))
                suspended = not restarted and known is not None and now.suspended_s > before.suspended_s
                self._engines[name] = EngineProgress(last=now, state=SUSPENDED if suspended else UP)
            for name, engine in self._engines.items():
                if name not in by_name:
                    engine.state = DEAD
        self.print_if_due()

    # ---- state ----

    def stage_counts(self) -> dict[str, int]:
        """Trajectories by stage; `beginning` counts those in no stage yet."""
        counts = Counter(self._stage_by_id.values())
        counts_by_stage = {"beginning": counts[None], **{stage.value: counts[stage] for stage in Stage}}
        counts_by_stage[Stage.BUFFER.value] += len(self._buffered)
        return counts_by_stage

    def engine_states(self) -> dict[str, int]:
        states = Counter(engine.state for engine in self._engines.values())
        return {state: states[state] for state in (UP, SUSPENDED, DEAD)}

    def tokens_per_s(self) -> float:
        now = self._clock()
        self._drop_old_rates(now)
        since, tokens = self._rates[0]
        return (self._tokens - tokens) / (now - since) if now > since else 0.0

    def remaining_s(self) -> float | None:
        """The remaining time at the pace so far; None until a group is done."""
        if not self.groups_done:
            return None
        left = max(0, self.total_groups - self.groups_done)
        return (self._clock() - self._began_at) / self.groups_done * left

    def _add_tokens(self, tokens: int) -> None:
        self._tokens += tokens
        self._rates.append((self._clock(), self._tokens))
        self._drop_old_rates(self._rates[-1][0])

    def _drop_old_rates(self, now: float) -> None:
        """Drop entries older than the window, except the newest of them."""
        while len(self._rates) > 1 and self._rates[1][0] <= now - WINDOW_S:
            self._rates.popleft()

    # ---- output -------------

    def line(self) -> str:
        """The progress in one line."""
        with self._lock:
            parts = [f"rollout: {self._groups_text()}, {self._ended_text()}"]
            rewards = [f"{escape_unprintable(name)} {number(task.reward, 3)}" for name, task in self._shown_tasks()]
            parts += [f"reward {', '.join(rewards)}"] if rewards else []
            under_way = [f"{name} {count}" for name, count in self.stage_counts().items() if count]
            parts += [f"in {', '.join(under_way)}"] if under_way else []
            parts += [f"{self.tokens_per_s():,.0f} tokens/s", *self._failure_texts()]
            parts += [self._engine_text()] if self._engines else []
            return "; ".join([*parts, self._time_text()])

    def render(self) -> RenderableType:
        """The screen."""
        from rich.console import Group as Rows
        from rich.text import Text

        with self._lock:
            share = min(1.0, self.groups_done / self.total_groups) if self.total_groups > 0 else 1.0
            bar = terminal.progress_bar(share, BAR_WIDTH, unicode=True)
            rows: list[RenderableType] = [
                Text.assemble(("rollout ", "bold"), *bar,
                              f" {self._groups_text()}  {self._time_text()}"),
                Text("  ".join(f"{name} {count:,}" for name, count in self.stage_counts().items())
                     + f"   {self.tokens_per_s():,.0f} tokens/s"),
                *self._task_rows(),
            ]  # fmt: skip
            if self._engines:
                rows.append(Text(self._engine_text(), style="yellow" if self.engine_states()[DEAD] else ""))
            rows += [Text(words, style="yellow", overflow="ellipsis", no_wrap=True) for words in self._failure_texts()]
            if self.last_failure:
                rows.append(
                    Text(
                        f"last: {escape_unprintable(self.last_failure)}", style="dim", overflow="ellipsis", no_wrap=True
                    )
                )
            return Rows(*rows)

    def _task_rows(self) -> list[Text]:
        from rich.text import Text

        width = max((len(escape_unprintable(name)) for name in self.tasks), default=0)
        rows = [
            Text(
                f"  {escape_unprintable(name):<{width}}  {task.ended:>6,} ended  reward {number(task.reward, 3)}",
                no_wrap=True,
            )
            for name, task in self._shown_tasks()
        ]
        more = len(self.tasks) - len(rows)
        return [*rows, Text(f"  and {more:,} more tasks")] if more > 0 else rows

    def _shown_tasks(self) -> list[tuple[str, RolloutTaskProgress]]:
        return sorted(self.tasks.items())[:SHOWN_MAX]

    def _groups_text(self) -> str:
        short = f" ({self.groups_short:,} with fewer members)" if self.groups_short else ""
        dropped = f", {self.groups_dropped:,} dropped" if self.groups_dropped else ""
        return f"{self.groups_done:,} of {pluralize(self.total_groups, 'group')}{short}{dropped}"

    def _ended_text(self) -> str:
        return f"{pluralize(sum(self.endings.values()), 'trajectory', 'trajectories')} ended"

    def _time_text(self) -> str:
        left = self.remaining_s()
        so_far = duration(self._clock() - self._began_at)
        return f"{so_far} so far" + (f", about {duration(left)} left" if left else "")

    def _failure_texts(self) -> list[str]:
        others = [f"{ending} {count:,}" for ending, count in sorted(self.endings.items()) if ending != Ending.FINISHED]
        return [f"not finished: {', '.join(others)}"] if others else []

    def _engine_text(self) -> str:
        states = ", ".join(f"{count:,} {state}" for state, count in self.engine_states().items() if count)
        each = [
            f"{escape_unprintable(name)} v{engine.last.version} " + _load(engine)
            for name, engine in sorted(self._engines.items())[:SHOWN_MAX]
        ]
        more = f", and {len(self._engines) - SHOWN_MAX:,} more" if len(self._engines) > SHOWN_MAX else ""
        return f"engines: {states} ({', '.join(each)}{more})"


def _load(engine: EngineProgress) -> str:
    return f"{engine.last.active:,}+{engine.last.waiting:,}" if engine.state == UP else engine.state
