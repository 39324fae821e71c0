"""The table of results in the README, made of what `tangram bench all --json` printed.

Owns the words between the markers. The numbers live in docs/reference/results.jsonl, one benchmark a line.
"""

from __future__ import annotations

import msgspec

from tangram.bench import BenchResult
from tangram.errors import InvalidConfig

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

HEAD = """Each number is *measured* (real execution) or *simulated* (virtual time), over at least ten seeds, with all
sides in one run on the same work. `tangram bench NAME` reproduces a row; `tangram bench all --json >
docs/reference/results.jsonl` and `make docs` write this table anew.
[Benchmarks](docs/reference/benchmarks.md) says what each one means."""


def with_results(readme: str, lines: bytes) -> str:
    """The README with its table made anew."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidConfig("README.md", "no markers", f"{BEGIN} and {END} around the table of results")
    results = [msgspec.json.decode(line, type=BenchResult) for line in lines.splitlines() if line.strip()]
    return f"{before}{BEGIN}\n{HEAD}\n\n{table(results)}\n{END}{after}"


def table(results: list[BenchResult]) -> str:
    """One row for each metric that has a goal."""
    rows = ["| benchmark | metric | result | 95 % | goal |", "|---|---|---|---|---|"]
    for result in results:
        for name, goal in result.goals.items():
            if name not in result.metrics:
                continue
            low, high = result.spread.get(name, (None, None))
            spread = f"{number(low)} to {number(high)}" if low is not None and high is not None else ""
            wanted = "printed" if goal.value is None else f"{goal.op} {number(goal.value)}"
            if goal.value is not None and goal.met(result.metrics[name]) is False:
                wanted += " (missed)"
            label = f"`{result.name}` ({result.label})"
            rows.append(f"| {label} | `{name}` | {number(result.metrics[name])} | {spread} | {wanted} |")
    return "\n".join(rows)


def number(value: float) -> str:
    """Three digits where they mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
