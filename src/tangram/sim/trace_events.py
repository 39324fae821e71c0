"""Simulations as a Chrome trace: a process for each policy, a lane for each trajectory, cores in use as a counter."""

from __future__ import annotations

from collections.abc import Mapping

from tangram.reports.trace_events import TraceEvents
from tangram.runtime.action_timeline import add_action
from tangram.sim.result import SimulationResult


def trace_of_results(results: Mapping[str, SimulationResult]) -> TraceEvents:
    """The trace of results by name. They share one time axis."""
    trace = TraceEvents()
    for name, result in results.items():
        for row in sorted(result.rows, key=lambda row: row.submitted_at):
            add_action(
                trace,
                name,
                row.trajectory,
                f"{row.kind} {row.key}".strip(),
                submitted_s=row.submitted_at,
                ended_s=row.ended_at,
                waiting_s=row.waiting_s,
                overhead_s=row.overhead_s,
                category=row.kind,
                args={"id": row.id, "status": row.status, "node": row.node, "width": row.width, "cpu_s": row.cpu_s},
            )
        for at_s, cores in result.busy:
            trace.counter(name, "cores in use", at_s=at_s, values={"cores": cores})
    return trace
