"""The tables of results, made of what `tangram bench all --json` printed: those with a goal in the README, all of them
on a page of their own.

Owns that page, and the words between the markers of the README. The numbers live in docs/reference/results.jsonl, one
benchmark a line.
"""

from __future__ import annotations

import msgspec

from tangram.bench import BenchResult
from tangram.bench.base import PRINTED
from tangram.errors import InvalidConfig

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

HEAD = """Each number is *measured* (real execution on two cores), *emulated* (likewise, with device speeds that are
stated) or *simulated* (virtual time), with all sides in one run on the same work; an interval is over seeds.
`tangram bench NAME` reproduces a row.
[Benchmarks](docs/reference/benchmarks.md) says what each one means, and [all results](docs/reference/results.md) has
what is printed beside these."""

PAGE = """# Results

Each number is *measured* (real execution on two cores), *emulated* (likewise, with device speeds that are stated) or
*simulated* (virtual time), with all sides in one run on the same work; an interval is over seeds.
[Benchmarks](benchmarks.md) says what each one means. `tangram bench NAME` reproduces a table;
`tangram bench all --json > docs/reference/results.jsonl` and `make docs` write this page anew.
"""

TAIL = """`act_ratio` is of the mean, which short calls make; `p99_ratio` is of the p99. `weighted_act_ratio` counts
every action by its own length: where it is below 1, long calls take longer than in pods, so they pay for the short
ones."""

BESIDE: dict[str, tuple[str, ...]] = {"act_ratio_": ("p99_ratio_", "weighted_act_ratio_")}
"""Which metrics a mean must not be read without; the number of cores follows each name."""

BEST: dict[str, tuple[str, ...]] = {
    "act_ratio_": ("ceiling_ratio_",),
    "step_ratio_": ("step_ceiling_ratio_",),
    "bound_ratio_": ("bound_least_",),
}
"""Which metric says the best that could be reached at all."""

DIGITS_MAX = 6


def with_results(readme: str, lines: bytes) -> str:
    """The README with its table made anew."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidConfig("README.md", "no markers", f"{BEGIN} and {END} around the table of results")
    return f"{before}{BEGIN}\n{HEAD}\n\n{table(_results(lines))}\n\n{TAIL}\n{END}{after}"


def results_page(note: str, lines: bytes) -> str:
    """All that was printed, with the settings and notes of each benchmark."""
    return "\n".join([note, PAGE, *map(_section, _results(lines))])


def _results(lines: bytes) -> list[BenchResult]:
    return [msgspec.json.decode(line, type=BenchResult) for line in lines.splitlines() if line.strip()]


def _section(result: BenchResult) -> str:
    rows = ["| metric | result | 95 % | goal |", "|---|---|---|---|"]
    rows += [_row(result, name) for name in result.metrics]
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    parts = [f"## {result.name} ({result.label})", "\n".join(rows)]
    parts += [f"Settings: {settings}."] if settings else []
    parts += ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n\n".join(parts) + "\n"


def table(results: list[BenchResult]) -> str:
    """One row for each metric that has a goal to be met, followed by those that belong beside it."""
    rows = ["| benchmark | metric | result | 95 % | goal |", "|---|---|---|---|---|"]
    for result in results:
        goals = [name for name, goal in result.goals.items() if goal.value is not None]
        names = [near for name in goals for near in (name, *_related(name, BESIDE))]
        label = f"| `{result.name}` ({result.label}) "
        rows += [label + _row(result, name) for name in names if name in result.metrics]
    return "\n".join(rows)


def _related(name: str, families: dict[str, tuple[str, ...]]) -> list[str]:
    """`step_ceiling_ratio_64` for `step_ratio_64`."""
    return [
        near + name.removeprefix(family)
        for family, nears in families.items()
        if name.startswith(family)
        for near in nears
    ]


def _row(result: BenchResult, name: str) -> str:
    value, goal = result.metrics[name], result.goals.get(name, PRINTED)
    low, high = result.spread.get(name, (None, None))
    spread = f"{number(low)} to {number(high)}" if low is not None and high is not None else ""
    told, wanted = number(value), "printed"
    if goal.value is not None:
        wanted = f"{goal.op} {number(goal.value)}"
        if goal.met(value) is False:
            digits = _digits_apart(value, goal.value)
            told = number(value, digits)
            wanted += f" (missed{_best(result, name, digits)})"
    return f"| `{name}` | {told} | {spread} | {wanted} |"


def _best(result: BenchResult, name: str, digits: int) -> str:
    """How near anything could come to a goal that was missed, where that is known."""
    best = [number(result.metrics[near], digits) for near in _related(name, BEST) if near in result.metrics]
    return f"; the best possible is {best[0]}" if best else ""


def _digits_apart(value: float, goal: float) -> int:
    """As many digits as it takes for a number that misses its goal to look different from it."""
    return next((d for d in range(3, DIGITS_MAX) if number(value, d) != number(goal, d)), DIGITS_MAX)


def number(value: float, digits: int = 3) -> str:
    """Three digits where they mean something."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
