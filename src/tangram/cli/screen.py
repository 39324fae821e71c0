"""The state of a shared service as a page of a terminal, for `tangram status`, `top` and `pool list`.

Owns the formatting of pools, the queue, runs and sandboxes. Never calls the service. Names chosen by users are escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from tangram.core.demand import CORE
from tangram.reports import terminal
from tangram.reports.formatting import duration, elapsed
from tangram.reports.printable import escape_unprintable
from tangram.reports.terminal import is_unicode, usage_bar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from tangram.runtime.views import PoolPart, PoolView, RunView, ServiceView, TimeBreakdown, View

BAR_WIDTH, WIDE_MIN = 24, 100
"""Width of a bar; on a screen with fewer columns than the second number, half of it."""
POOLS_SHOWN, RUNS_SHOWN, WAITING_SHOWN = 20, 12, 10
"""Rows of each list; one more line shows the number of omitted ones."""
QUEUE_ROWS_MIN = 3
"""Rows of the queue on the smallest screen."""
KINDS = ("cpu", "memory", "gpu")
"""Kinds of pools of a machine in the order in which they are shown; quotas follow, then what counts for one run."""
LAST_KINDS = ("function/", "endpoint/", "running/", "instances/")


def screen(view: View, url: str, console: Console, *, height: int | None = None) -> RenderableType:
    """The whole view. With a height the queue gets the remaining rows, otherwise WAITING_SHOWN."""
    from rich.console import Group

    unicode = is_unicode(console)
    width = BAR_WIDTH if console.width >= WIDE_MIN else BAR_WIDTH // 2
    fold = height is None  # keeps the number of rows constant when the screen is redrawn
    above = Group(_service(view, url), pools(view.pools, unicode=unicode, width=width), runs(view.runs, fold=fold))
    below = _sandboxes(view)
    rows = WAITING_SHOWN
    if height is not None:
        height_used = sum(len(console.render_lines(part, pad=False)) for part in (above, below))
        rows = max(QUEUE_ROWS_MIN, height - height_used - 4)
    return Group(above, _queue(view, rows, fold=fold), below)


def _service(view: View, url: str) -> Text:
    from rich.text import Text

    service = view.service
    text = Text()
    text.append(f"tangram {escape_unprintable(service.version)}", style="bold")
    text.append(f" at {url}  ")
    text.append(escape_unprintable(service.state), style="green" if service.state == "up" else "yellow")
    text.append(f", started {_since(service, view.at)}")
    text.append(f"\npolicy {escape_unprintable(service.policy)}, durability {escape_unprintable(service.durability)}")
    if service.draining:
        text.append(f"\ndraining nodes: {escape_unprintable(', '.join(service.draining))}", style="yellow")
    if service.recovered:
        text.append(f"\nrecovered at the start: {escape_unprintable(service.recovered)}")
    text.append("\n")
    return text


def _since(service: ServiceView, now: float) -> str:
    try:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(service.began_at))
    except (ValueError, OverflowError, OSError):
        began = "?"
    return f"{began} ({duration(max(0.0, now - service.began_at))})"


# ---- pools ------------------------------------------------------------------------------------------------------


def pools(
    pool_views: Iterable[PoolView], *, unicode: bool = True, width: int = BAR_WIDTH, most: int = POOLS_SHOWN
) -> Table:
    table = terminal.table("pools", "pool", "in use", "", "waiting", right=("", "waiting"), no_wrap=True)
    ordered = sorted(pool_views, key=_sort_key)
    for pool in ordered[:most]:
        table.add_row(*_pool(pool, unicode, width))
        if len(pool.parts) > 1 and pool.kind == "cpu":
            for part in pool.parts:
                table.add_row(*_numa(pool, part, unicode, width))
        elif pool.kind == "gpu":
            for row in _devices(pool):
                table.add_row(*row)
    if len(ordered) > most:
        table.add_row(f"and {len(ordered) - most:,} more")
    return table


def _sort_key(pool: PoolView) -> tuple[int, str, str]:
    if pool.kind in KINDS:
        return KINDS.index(pool.kind), "", pool.node
    last = pool.kind.startswith(LAST_KINDS)
    return len(KINDS) + last, pool.kind, pool.node


def _pool(pool: PoolView, unicode: bool, width: int) -> tuple[RenderableType, ...]:
    used = pool.held + pool.spent
    part = used / pool.total if pool.total > 0 else float(used > 0)
    text = f"{amount(used, pool)} of {amount(pool.total, pool)} {unit_of(pool)}"
    if pool.window_s is not None:
        text += f" in {pool.window_s:g} s"
    return (
        escape_unprintable(pool.name),
        usage_bar(part, width, "yellow" if pool.waiting else "cyan", unicode=unicode),
        text,
        f"{pool.waiting:,}" if pool.waiting else "",
    )


def _numa(pool: PoolView, part: PoolPart, unicode: bool, width: int) -> tuple[RenderableType, ...]:
    share = part.held / part.total if part.total else 0.0
    text = f"{amount(part.held, pool)} of {amount(part.total, pool)} {unit_of(pool)}"
    return f"  NUMA node {part.index}", usage_bar(share, width, "blue", unicode=unicode), text, ""


def _devices(pool: PoolView) -> Iterator[tuple[str, str, str, str]]:
    """A row for neighbouring devices with the same model and the same state."""
    for (service, held), parts in groupby(pool.parts, key=lambda part: (part.service, bool(part.held))):
        indexes = [part.index for part in parts]
        which = f"device {indexes[0]}" if len(indexes) == 1 else f"devices {indexes[0]} to {indexes[-1]}"
        yield f"  {which}", escape_unprintable(service) or "no model", "in use" if held else "idle", ""


def unit_of(pool: PoolView) -> str:
    """The unit in which a pool is shown."""
    return {"milli-cores": "cores", "MiB": "GiB"}.get(pool.unit, escape_unprintable(pool.unit))


def amount_with_unit(units: int, pool: PoolView) -> str:
    """An amount with its unit: `1 core`, `1.5 cores`."""
    text, unit = amount(units, pool), unit_of(pool)
    return f"{text} {unit.removesuffix('s') if text == '1' else unit}"


def amount(units: int, pool: PoolView) -> str:
    if pool.unit == "milli-cores":
        return f"{units / CORE:,.1f}".removesuffix(".0")
    if pool.unit == "MiB":
        return f"{units / 1024:,.1f}".removesuffix(".0")
    return f"{units:,}"


# ---- runs -------------------------------------------------------------------------------------------------------


def runs(run_views: tuple[RunView, ...], *, fold: bool) -> Table:
    table = terminal.table("runs")
    table.expand = True
    table.add_column("run", no_wrap=True)
    for head in ("share", "weight", "waiting", "running", "sandboxes", "ACT p50", "p99"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("where its time went", overflow="ellipsis", no_wrap=not fold, ratio=1)
    ordered = sorted(run_views, key=lambda run: (-(run.waiting + run.running), -run.share, run.name))
    for run in ordered[:RUNS_SHOWN]:
        times = (elapsed(run.act.p50_s), elapsed(run.act.p99_s)) if run.act.count else ("-", "-")
        numbers = (f"{run.share:.0%}", f"{run.weight:g}", f"{run.waiting:,}", f"{run.running:,}", f"{run.sandboxes:,}")
        table.add_row(escape_unprintable(run.name), *numbers, *times, time_shares(run.time_breakdown))
    if not run_views:
        table.add_row("none yet")
    elif len(ordered) > RUNS_SHOWN:
        table.add_row(f"and {len(ordered) - RUNS_SHOWN:,} more")
    return table


def time_shares(breakdown: TimeBreakdown) -> str:
    """Shares in percent, the largest first, without those below 0.5 %."""
    if breakdown.total_s <= 0.0:
        return "-"
    parts = {f"waiting for {escape_unprintable(kind)}": s for kind, s in breakdown.waiting_s.items()}
    parts |= {
        "executing": breakdown.execution_s,
        "overhead": breakdown.overhead_s,
        "thinking": breakdown.thinking_s,
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shares = [f"{name} {s / breakdown.total_s:.0%}" for name, s in ordered if s / breakdown.total_s >= 0.005]
    return ", ".join(shares)


# ---- the queue and sandboxes ------------------------------------------------------------------------------------


def _queue(view: View, rows: int, *, fold: bool) -> RenderableType:
    from rich.text import Text

    count = view.waiting_total
    if not view.waiting:
        return Text.assemble(("queue", "bold"), ": nothing waits\n")
    title = f"queue: {count:,} {'action waits' if count == 1 else 'actions wait'}"
    table = terminal.table(title, "action", "run", "since", right=("since",), no_wrap=True)
    table.expand = True
    table.add_column("why", overflow="ellipsis", no_wrap=not fold, ratio=1)
    for waiting in view.waiting[:rows]:
        since = elapsed(max(0.0, view.now_s - waiting.since_s))
        reason = escape_unprintable(waiting.reason).removeprefix(escape_unprintable(waiting.id)).strip()
        table.add_row(escape_unprintable(waiting.id), escape_unprintable(waiting.run), since, reason)
    if count > rows:
        table.add_row(f"and {count - rows:,} more")
    return table


def _sandboxes(view: View) -> Text:
    from rich.text import Text

    from tangram.reports.formatting import pluralize

    active = sum(sandbox.active > 0 for sandbox in view.sandboxes)
    shown = len(view.sandboxes)
    text = f"sandboxes: {view.sandboxes_total:,} open"
    if view.sandboxes_total:
        of = f" of the last {shown:,}" if shown < view.sandboxes_total else ""
        text += f", {active:,}{of} with a running action"
    instances = sum(bool(sandbox.function) for sandbox in view.sandboxes)
    if instances:
        text += f", {pluralize(instances, 'instance')} of functions"
    return Text(f"{text}; running actions: {view.running_total:,}")
