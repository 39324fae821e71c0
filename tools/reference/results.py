"""The tables of results, from the output of `tangram bench all --json`: headlines in the README, all on a page.

Owns that page, and the text between the markers of the README. The numbers are in docs/reference/results.jsonl, one
line per benchmark.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tangram.bench import BenchResult
from tangram.bench.base import PRINTED
from tangram.errors import InvalidConfig

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

HEAD = """*Measured*: real execution on two cores. *Emulated*: real code, stated device speeds. *Simulated*:
virtual time. Both sides of a ratio run in one command on the same work; intervals are 95% over seeds. ACT is the
action completion time: from submission to the end, waiting included. See [all results and
goals](docs/reference/results.md), and [what each benchmark measures](docs/reference/benchmarks.md)."""


class Headline(NamedTuple):
    """One row of the README: `text` with the numbers of `metrics` of one benchmark filled in."""

    benchmark: str
    claim: str
    text: str
    metrics: tuple[str, ...]


HEADLINES = (
    Headline(
        "reservation", "Coding agents, real sandboxes: mean ACT against a core reserved per trajectory",
        "{} lower, p99 {}", ("act_ratio", "p99_ratio"),
    ),
    Headline("reservation", "The same agents: duration of an RL step", "{} shorter", ("step_ratio",)),
    Headline("sizing", "Cores and devices saved at the same mean ACT", "{} and {}", ("cores_saved", "devices_saved")),
    Headline(
        "ladder", "Training throughput, asynchronous against synchronous and one-off", "{} and {}",
        ("async_vs_sync", "async_vs_one_off"),
    ),
    Headline(
        "learning", "Held-out reward of three tasks trained together, {} s after the start, warm start included",
        "{}, {} and {}", ("seconds_mix", "mix_frozenlake", "mix_codefix", "mix_lookup"),
    ),
    Headline(
        "exec", "Opening a sandbox; overhead of a command in it (p50)", "{} ms; {} ms",
        ("open_ms_p50", "overhead_ms_p50"),
    ),
    Headline("http", "Journalled actions through the shared service", "{} per second", ("actions_per_s",)),
    Headline(
        "durability", "Acknowledged actions lost, or run twice, when the service is killed", "{} and {}",
        ("lost", "run_twice"),
    ),
)  # fmt: skip

RATIOS = ("_ratio", "_vs_sync", "_vs_one_off")
"""Suffixes of the metrics that are ratios of two sides."""

PAGE = """# Results

Each number is *measured* (real execution on two cores), *emulated* (real execution with stated device speeds) or
*simulated* (virtual time). All sides of a benchmark run on the same work; intervals are over seeds.
[Benchmarks](benchmarks.md) explains each metric. `tangram bench NAME` reproduces a table;
`tangram bench all --json > docs/reference/results.jsonl` and `make docs` regenerate this page.

`act_ratio` compares means, which short calls dominate; `p99_ratio` compares the p99. `weighted_act_ratio` weights every
action by its own length: below 1, long calls take longer than in pods, which is the price of faster short calls.
"""

BEST: dict[str, tuple[str, ...]] = {
    "act_ratio_": ("ceiling_ratio_",),
    "step_ratio_": ("step_ceiling_ratio_",),
    "bound_ratio_": ("bound_least_",),
}
"""The metrics with the best possible value of a goal, by the prefixes of their names."""

DIGITS_MAX = 6


def with_results(readme: str, lines: bytes) -> str:
    """The README with its headlines replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidConfig("README.md", "no markers", f"{BEGIN} and {END} around the table of results")
    return f"{before}{BEGIN}\n{HEAD}\n\n{headlines(_results(lines))}\n{END}{after}"


def headlines(results: list[BenchResult]) -> str:
    """A row for each headline whose benchmark is among the results."""
    result_by_name = {result.name: result for result in results}
    rows = ["| claim | result | command |", "|---|---|---|"]
    for row in HEADLINES:
        if result := result_by_name.get(row.benchmark):
            numbers = [_formatted(result, name) for name in row.metrics]
            first = row.claim.count("{}")
            claim, text = row.claim.format(*numbers[:first]), row.text.format(*numbers[first:])
            rows.append(f"| {claim} | {text} ({result.label}) | `tangram bench {row.benchmark}` |")
    return "\n".join(rows)


def _formatted(result: BenchResult, name: str) -> str:
    value = result.metrics[name]
    if name.endswith("_saved"):
        return f"{value:.0%}"
    if not name.endswith(RATIOS):
        return number(value)
    low, high = result.spread[name]
    return f"{number(value, 2)}× ({number(low, 2)}-{number(high, 2)})"


def results_page(note: str, lines: bytes) -> str:
    """The page of all metrics, with the settings and notes of each benchmark."""
    return "\n".join([note, PAGE, *map(_section, _results(lines))])


def _results(lines: bytes) -> list[BenchResult]:
    return [msgspec.json.decode(line, type=BenchResult) for line in lines.splitlines() if line.strip()]


def _section(result: BenchResult) -> str:
    rows = ["| metric | result | 95% interval | goal |", "|---|---|---|---|"]
    rows += [_row(result, name) for name in result.metrics]
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    parts = [f"## {result.name} ({result.label})", "\n".join(rows)]
    parts += [f"Settings: {settings}."] if settings else []
    parts += ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n\n".join(parts) + "\n"


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
    text, wanted = number(value), "printed"
    if goal.value is not None:
        wanted = f"{goal.op} {number(goal.value)}"
        if goal.is_met(value) is False:
            digits = _digits_apart(value, goal.value)
            text = number(value, digits)
            wanted += f" (missed{_best(result, name, digits)})"
    return f"| `{name}` | {text} | {spread} | {wanted} |"


def _best(result: BenchResult, name: str, digits: int) -> str:
    """The best possible value of a missed goal, if it is known."""
    best = [number(result.metrics[near], digits) for near in _related(name, BEST) if near in result.metrics]
    return f"; the best possible is {best[0]}" if best else ""


def _digits_apart(value: float, goal: float) -> int:
    """The fewest digits that distinguish a number from the goal that it misses."""
    return next((d for d in range(3, DIGITS_MAX) if number(value, d) != number(goal, d)), DIGITS_MAX)


def number(value: float, digits: int = 3) -> str:
    """The number, rounded to `digits` significant digits or to an integer."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
