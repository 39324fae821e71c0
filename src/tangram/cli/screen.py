"""The screen: a View of a shared service as a page of a terminal, for `tangram status`, `top` and `pool list`.

Owns how pools, the queue, runs and sandboxes look. Asks nobody. Names that users chose are shown as text, whatever is
in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from tangram.cli import show
from tangram.cli.service_client import plain
from tangram.core.demand import CORE

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from tangram.runtime.views import Part, PoolView, RunView, ServiceView, Spending, View

BAR_WIDTH, WIDE_MIN = 24, 100
"""Half of it on a terminal that is narrower."""
POOLS_SHOWN, RUNS_SHOWN, WAITING_SHOWN = 20, 12, 10
"""Each says how many more there are."""
TALL_MIN = 3
"""Rows of the queue on the smallest screen."""
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
KINDS = ("cpu", "memory", "gpu")
"""Of pools of a machine, in the order in which they are shown; then quotas, then what counts for one run."""
LAST_KINDS = ("function/", "endpoint/", "running/", "instances/")


def put(console: Console, what: RenderableType) -> None:
    """As it is: names are no markup."""
    console.print(what, markup=False, highlight=False, emoji=False)


def screen(view: View, url: str, console: Console, *, height: int | None = None) -> RenderableType:
    """All of it. With a height the queue gets the rows that are left, otherwise it is cut after WAITING_SHOWN."""
    from rich.console import Group

    fancy = console.encoding.lower().startswith("utf")
    width = BAR_WIDTH if console.width >= WIDE_MIN else BAR_WIDTH // 2
    fold = height is None  # a screen that is drawn again and again keeps its rows
    above = Group(_service(view, url), pools(view.pools, fancy=fancy, width=width), runs(view.runs, fold=fold))
    below = _sandboxes(view)
    rows = WAITING_SHOWN
    if height is not None:
        taken = sum(len(console.render_lines(part, pad=False)) for part in (above, below))
        rows = max(TALL_MIN, height - taken - 4)
    return Group(above, _queue(view, rows, fold=fold), below)


def _service(view: View, url: str) -> Text:
    from rich.text import Text

    service = view.service
    text = Text()
    text.append(f"tangram {plain(service.version)}", style="bold")
    text.append(f" at {url}  ")
    text.append(plain(service.state), style="green" if service.state == "up" else "yellow")
    text.append(f", started {_since(service, view.at)}")
    text.append(f"\npolicy {plain(service.policy)}, durability {plain(service.durability)}")
    if service.draining:
        text.append(f"\nnodes that drain: {plain(', '.join(service.draining))}", style="yellow")
    if service.recovered:
        text.append(f"\nrecovered at its start: {plain(service.recovered)}")
    text.append("\n")
    return text


def _since(service: ServiceView, now: float) -> str:
    try:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(service.began_at))
    except (ValueError, OverflowError, OSError):
        began = "?"
    return f"{began} ({duration(max(0.0, now - service.began_at))})"


# ---- pools ------------------------------------------------------------------------------------------------------


def pools(found: Iterable[PoolView], *, fancy: bool = True, width: int = BAR_WIDTH, most: int = POOLS_SHOWN) -> Table:
    table = show.table("pools")
    for head, justify in (("pool", "left"), ("in use", "left"), ("", "right"), ("waiting", "right")):
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    ordered = sorted(found, key=_place)
    for pool in ordered[:most]:
        table.add_row(*_pool(pool, fancy, width))
        if len(pool.parts) > 1 and pool.kind == "cpu":
            for part in pool.parts:
                table.add_row(*_numa(pool, part, fancy, width))
        elif pool.kind == "gpu":
            for row in _devices(pool):
                table.add_row(*row)
    if len(ordered) > most:
        table.add_row(f"and {len(ordered) - most:,} more")
    return table


def _place(pool: PoolView) -> tuple[int, str, str]:
    if pool.kind in KINDS:
        return KINDS.index(pool.kind), "", pool.node
    last = pool.kind.startswith(LAST_KINDS)
    return len(KINDS) + last, pool.kind, pool.node


def _pool(pool: PoolView, fancy: bool, width: int) -> tuple[RenderableType, ...]:
    used = pool.held + pool.spent
    part = used / pool.total if pool.total > 0 else float(used > 0)
    said = f"{amount(used, pool)} of {amount(pool.total, pool)} {unit_of(pool)}"
    if pool.window_s is not None:
        said += f" in {pool.window_s:g} s"
    return (
        plain(pool.name),
        _bar(part, fancy, width, "yellow" if pool.waiting else "cyan"),
        said,
        f"{pool.waiting:,}" if pool.waiting else "",
    )


def _numa(pool: PoolView, part: Part, fancy: bool, width: int) -> tuple[RenderableType, ...]:
    share = part.held / part.total if part.total else 0.0
    said = f"{amount(part.held, pool)} of {amount(part.total, pool)} {unit_of(pool)}"
    return f"  NUMA node {part.index}", _bar(share, fancy, width, "blue"), said, ""


def _devices(pool: PoolView) -> Iterator[tuple[str, str, str, str]]:
    """A row for neighbours that have the same model on them and are alike in use."""
    for (service, held), parts in groupby(pool.parts, key=lambda part: (part.service, bool(part.held))):
        indexes = [part.index for part in parts]
        which = f"device {indexes[0]}" if len(indexes) == 1 else f"devices {indexes[0]} to {indexes[-1]}"
        yield f"  {which}", plain(service) or "no model", "in use" if held else "idle", ""


def _bar(part: float, fancy: bool, width: int, style: str) -> Text:
    from rich.text import Text

    part = min(1.0, max(0.0, part))
    eighths = round(8 * width * part)
    if fancy:
        full = "█" * (eighths // 8) + EIGHTHS[eighths % 8]
        rest = "·" * (width - len(full))
    else:
        full = "#" * (eighths // 8)
        rest = "." * (width - len(full))
    return Text.assemble((full, style), (rest, "dim"), f" {part:4.0%}")


def unit_of(pool: PoolView) -> str:
    """What people count it in."""
    return {"milli-cores": "cores", "MiB": "GiB"}.get(pool.unit, plain(pool.unit))


def measured(units: int, pool: PoolView) -> str:
    """With what it is counted in: `1 core`, `1.5 cores`."""
    said, unit = amount(units, pool), unit_of(pool)
    return f"{said} {unit.removesuffix('s') if said == '1' else unit}"


def amount(units: int, pool: PoolView) -> str:
    if pool.unit == "milli-cores":
        return f"{units / CORE:,.1f}".removesuffix(".0")
    if pool.unit == "MiB":
        return f"{units / 1024:,.1f}".removesuffix(".0")
    return f"{units:,}"


# ---- runs -------------------------------------------------------------------------------------------------------


def runs(found: tuple[RunView, ...], *, fold: bool) -> Table:
    table = show.table("runs")
    table.expand = True
    table.add_column("run", no_wrap=True)
    for head in ("share", "weight", "waiting", "running", "sandboxes", "ACT p50", "p99"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("where its time went", overflow="ellipsis", no_wrap=not fold, ratio=1)
    ordered = sorted(found, key=lambda run: (-(run.waiting + run.running), -run.share, run.name))
    for run in ordered[:RUNS_SHOWN]:
        times = (seconds(run.act.p50_s), seconds(run.act.p99_s)) if run.act.count else ("-", "-")
        numbers = (f"{run.share:.0%}", f"{run.weight:g}", f"{run.waiting:,}", f"{run.running:,}", f"{run.sandboxes:,}")
        table.add_row(plain(run.name), *numbers, *times, spent(run.spending))
    if not found:
        table.add_row("none yet")
    elif len(ordered) > RUNS_SHOWN:
        table.add_row(f"and {len(ordered) - RUNS_SHOWN:,} more")
    return table


def spent(spending: Spending) -> str:
    """In percent, the largest first; nothing for what is none."""
    if spending.total_s <= 0.0:
        return "-"
    parts = {f"waiting for {plain(kind)}": s for kind, s in spending.waiting_s.items()}
    parts |= {
        "executing": spending.execution_s,
        "overhead": spending.overhead_s,
        "thinking": spending.thinking_s,
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    told = [f"{name} {s / spending.total_s:.0%}" for name, s in ordered if s / spending.total_s >= 0.005]
    return ", ".join(told)


# ---- the queue and sandboxes ------------------------------------------------------------------------------------


def _queue(view: View, rows: int, *, fold: bool) -> RenderableType:
    from rich.text import Text

    count = view.waiting_total
    if not view.waiting:
        return Text.assemble(("queue", "bold"), ": nothing waits\n")
    table = show.table(f"queue: {count:,} {'action waits' if count == 1 else 'actions wait'}")
    table.expand = True
    for head, justify in (("action", "left"), ("run", "left"), ("since", "right")):
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("why", overflow="ellipsis", no_wrap=not fold, ratio=1)
    for waiting in view.waiting[:rows]:
        since = seconds(max(0.0, view.now_s - waiting.since_s))
        reason = plain(waiting.reason).removeprefix(plain(waiting.id)).strip()
        table.add_row(plain(waiting.id), plain(waiting.run), since, reason)
    if count > rows:
        table.add_row(f"and {count - rows:,} more")
    return table


def _sandboxes(view: View) -> Text:
    from rich.text import Text

    from tangram.reports.formatting import several

    active = sum(box.active > 0 for box in view.sandboxes)
    shown = len(view.sandboxes)
    said = f"sandboxes: {view.sandboxes_total:,} open"
    if view.sandboxes_total:
        of = f" of the last {shown:,}" if shown < view.sandboxes_total else ""
        said += f", {active:,}{of} with an action that runs"
    instances = sum(bool(box.function) for box in view.sandboxes)
    if instances:
        said += f", {several(instances, 'instance')} of functions"
    return Text(f"{said}; actions that run: {view.running_total:,}")


# ---- numbers ----------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """Three digits that matter."""
    if value >= 99.95:
        return duration(value)
    if value >= 0.9995:
        return f"{value:.{1 if value >= 9.995 else 2}f} s"
    return f"{value * 1000.0:.{0 if value >= 0.09995 else 1}f} ms" if value else "0 s"


def duration(value: float) -> str:
    """The two largest units: `3 d 4 h`, `5 min 2 s`."""
    whole = int(value)
    units = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next((place for place, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])
