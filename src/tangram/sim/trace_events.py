"""Simulations as a Chrome trace: a process for each policy, a lane for each trajectory, cores in use as a counter."""

from __future__ import annotations

from collections.abc import Mapping

from tangram.reports.trace_events import Phase, TraceEvents
from tangram.sim.result import ActionRow, SimulationResult


def trace_of_results(results: Mapping[str, SimulationResult]) -> TraceEvents:
    """The trace of results by name. They share one time axis."""
    trace = TraceEvents()
    for name, result in results.items():
        for row in sorted(result.rows, key=lambda row: row.submitted_at):
            _add_action(trace, name, row)
        for at_s, cores in result.busy:
            trace.counter(name, "cores in use", at_s=at_s, values={"cores": cores})
    return trace


def _add_action(trace: TraceEvents, process: str, row: ActionRow) -> None:
    started = row.ended_at - row.execution_s
    granted = started - row.overhead_s
    trace.complete(
        trace.lane(process, row.trajectory),
        f"{row.kind} {row.key}".strip(),
        since_s=row.submitted_at,
        until_s=row.ended_at,
        category=row.kind,
        args={"id": row.id, "status": row.status, "node": row.node, "width": row.width, "cpu_s": row.cpu_s},
        phases=(
            Phase("waiting", row.submitted_at, granted),
            Phase("overhead", granted, started),
            Phase("executing", started, row.ended_at),
        ),
    )
