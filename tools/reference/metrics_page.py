"""The reference page of the metrics, generated from `tangram.server.observe.metrics.FAMILIES`.

Owns the text around the tables.
"""

from __future__ import annotations

from prometheus_client import ProcessCollector

from tangram.server.observe.accounts import CLASSES_MAX, RUNS_MAX
from tangram.server.observe.metrics import FAMILIES, HISTOGRAM, SERIES_MAX, MetricFamily
from tangram.server.observe.time_breakdown import OTHER

HEAD = f"""# Metrics

`GET /metrics` of the shared service, with the admin token, returns the text format of Prometheus, version 0.0.4.
`deploy/grafana-dashboard.json` is a Grafana dashboard of these metrics: import it and choose the data source.

Times are seconds, sizes bytes. Counters restart at 0 with the service; a histogram has `_bucket`, `_sum` and
`_count`. Callers choose the labels `run` and `class`, so their number is limited: {RUNS_MAX} runs and {CLASSES_MAX}
classes have their own series, the rest are counted together as `{OTHER}`. A class is `task/kind/key`; for a run with
many tasks it is `*/kind/key`. A run or class that was not active for an hour may lose its series to another. Other
labels have at most {SERIES_MAX} series together. [Where does the time go](../guides/where-does-the-time-go.md)
explains the parts of `tangram_time_seconds_total`.
"""

GROUPS = {
    "Actions": ("tangram_build", "tangram_action", "tangram_time"),
    "Pools, runs and sandboxes": ("tangram_pool", "tangram_node", "tangram_run", "tangram_sandboxes"),
    "The service": ("tangram_refusals", "tangram_scheduler", "tangram_http", "tangram_journal"),
    "The process": ("process_",),
}


def metrics_page(note: str) -> str:
    parts = [note, HEAD]
    known = (*FAMILIES, *_process_families())
    shown: list[MetricFamily] = []
    for title, starts in GROUPS.items():
        families = [family for family in known if family.name.startswith(starts)]
        shown += families
        parts.append(f"## {title}\n")
        parts.append(
            "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *map(_row, families)]) + "\n"
        )
    assert sorted(family.name for family in shown) == sorted(family.name for family in known)
    parts.append("## Buckets\n")
    parts.append("The upper ends of the buckets, in seconds; the last one has no end.\n")
    by_edges: dict[tuple[float, ...], list[str]] = {}
    for family in FAMILIES:
        if family.kind == HISTOGRAM:
            by_edges.setdefault(family.edges, []).append(f"`{family.name}`")
    rows = [f"| {', '.join(names)} | {', '.join(f'{edge:g}' for edge in edges)} |" for edges, names in by_edges.items()]
    parts.append("\n".join(["| metrics | upper ends |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _process_families() -> list[MetricFamily]:
    """Returns the metrics that `prometheus_client` adds on systems with /proc."""
    metrics = ProcessCollector(registry=None).collect()
    return [
        MetricFamily(f"{m.name}_total" if m.type == "counter" else m.name, m.type, m.documentation) for m in metrics
    ]


def _row(family: MetricFamily) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help} |"
