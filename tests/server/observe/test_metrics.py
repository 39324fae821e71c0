"""The metrics as Prometheus reads them: a strict reader of the text, and numbers that are those of the picture."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.clock import SimClock
from tangram.core.action import Action, Usage
from tangram.core.demand import CPU, Demand, cores
from tangram.core.messages import (
    Effect,
    Event,
    Finished,
    NodeChanged,
    NodeState,
    Reserve,
    Started,
    Submit,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import InvariantError
from tangram.server.observe import metrics as module
from tangram.server.observe.metrics import (
    COUNTER,
    FAMILIES,
    FAMILY_BY_NAME,
    HISTOGRAM,
    MetricsCollector,
    ReportedMetrics,
)
from tangram.server.observe.state_observer import StateObserver
from tangram.server.observe.time_breakdown import OTHER

ROOT = Path(__file__).resolve().parents[3]

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"')
ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> tuple[dict[str, str], Series]:
    """Kinds by family, and values by name and labels. Whatever the format does not allow is an assertion that fails."""
    assert text.endswith("\n") and "\n\n" not in text
    kinds: dict[str, str] = {}
    helped: list[str] = []
    series: Series = {}
    family = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in helped, "a family stands together, and once"
            helped.append(family)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family and kind in ("counter", "gauge", "histogram")
            kinds[name] = kind
        else:
            name, labels, value = read_sample(line)
            suffixes = ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
            assert name in [family + suffix for suffix in suffixes], line
            assert (name, labels) not in series, f"twice: {line}"
            series[name, labels] = value
    return kinds, series


def read_sample(line: str) -> tuple[str, tuple[tuple[str, str], ...], float]:
    matched = NAME.match(line)
    assert matched, line
    name, rest = matched[0], line[matched.end() :]
    labels: list[tuple[str, str]] = []
    if rest.startswith("{"):
        rest = rest[1:]
        while not rest.startswith("}"):
            label = LABEL.match(rest)
            assert label, line
            labels.append((label[1], re.sub(r'\\[\\"n]', lambda match: ESCAPED[match[0]], label[2])))
            rest = rest[label.end() :]
            assert rest[0] in ",}", line
            rest = rest.removeprefix(",")
        rest = rest[1:]
    assert len(labels) == len(dict(labels)), line
    assert re.fullmatch(r" (\+Inf|-?\d+(\.\d+)?(e[+-]?\d+)?)", rest), line
    return name, tuple(sorted(labels)), float(rest)


class World:
    def __init__(self) -> None:
        self.scheduler = Scheduler(policy("fcfs"), cpu_node("n0", 2, memory_gib=1))
        self.clock = SimClock()
        self.picture = StateObserver(self.scheduler, clock=self.clock, version="1.2")
        self.metrics = ReportedMetrics()
        self.collector = MetricsCollector(self.metrics, self.picture)

    def send(self, event: Event) -> list[Effect]:
        effects = self.scheduler.handle(event, self.clock.now())
        self.picture(self.clock.now(), event, effects)
        return effects

    def run(self, id: str, seconds: float, **fields: str) -> None:
        self.send(Submit(action=Action(id=id, demand=Demand({CPU: cores(1)}), **fields)))  # type: ignore[arg-type]
        self.send(Started(action=id))
        self.clock.set(self.clock.now() + seconds)
        self.send(Finished(action=id, usage=Usage(overhead_s=0.0)))

    def read(self) -> Series:
        return read(self.collector.render())[1]


def labels(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


def test_every_family_is_there_with_its_kind() -> None:
    kinds, series = read(World().collector.render())
    own = {name: kind for name, kind in kinds.items() if not name.startswith("process_")}
    assert own == {family.name: family.kind for family in FAMILIES}
    assert series["tangram_build_info", labels(version="1.2", policy="fcfs", durability="none")] == 1


def test_names_follow_the_convention() -> None:
    for family in FAMILIES:
        assert NAME.fullmatch(family.name)
        assert family.name.startswith("tangram_")
        assert family.name.endswith("_total") == (family.kind == COUNTER)
        assert "le" not in family.labels
        assert list(family.edges) == sorted(set(family.edges))
        if family.kind == HISTOGRAM:
            assert family.name.endswith("_seconds")


def test_what_settled_is_counted_by_run_status_and_class() -> None:
    world = World()
    for number, seconds in enumerate((0.5, 2.0, 2.0, 5000.0)):
        world.run(f"a{number}", seconds, run="r", task="swe", key="tests")
    series = world.read()
    assert series["tangram_actions_total", labels(run="r", status="succeeded")] == 4
    assert series["tangram_scheduler_events_total", labels(event="Submit")] == 4
    of = labels(**{"run": "r", "class": "swe/exec/tests"})
    name = "tangram_action_execution_seconds"
    buckets = {dict(where)["le"]: value for (found, where), value in series.items() if found == f"{name}_bucket"}
    assert [buckets[edge] for edge in ("0.33", "1.0", "3.3", "3300.0", "+Inf")] == [0, 1, 3, 3, 4]
    assert (series[f"{name}_count", of], series[f"{name}_sum", of]) == (4, 5004.5)


def test_histograms_rise_to_their_count() -> None:
    world = World()
    for number in range(30):
        world.run(f"a{number}", 0.003 * 2**number % 50, run=f"r{number % 3}", key=f"k{number % 2}")
    world.metrics.observe("tangram_http_request_seconds", {"route": "/v1/x"}, 1e9)
    by_series: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    series = world.read()
    for (name, where), value in series.items():
        if name.endswith("_bucket"):
            rest = tuple(item for item in where if item[0] != "le")
            by_series.setdefault((name.removesuffix("_bucket"), rest), []).append((float(dict(where)["le"]), value))
    assert len(by_series) == 4 * 6 + 1
    for (name, where), buckets in by_series.items():
        assert buckets == sorted(buckets) and buckets[-1][0] == math.inf
        assert [value for _, value in buckets] == sorted(value for _, value in buckets)
        assert buckets[-1][1] == series[f"{name}_count", where] > 0
        assert series[f"{name}_sum", where] >= 0.0


def test_gauges_are_those_of_the_scheduler() -> None:
    world = World()
    world.send(Reserve(sandbox="s", memory=256, run="r"))
    world.send(Reserve(sandbox="idle", memory=256, run="r"))
    for number in range(3):
        action = Action(id=f"a{number}", run="r", demand=Demand({CPU: cores(1)}), sandbox="s" if not number else "")
        world.send(Submit(action=action))
    series = world.read()
    assert series["tangram_actions_waiting", labels(run="r")] == 1
    assert series["tangram_actions_running", labels(run="r")] == 2
    assert series["tangram_run_share", labels(run="r")] == 1.0
    assert series["tangram_run_weight", labels(run="r")] == 1.0
    assert series["tangram_pool_waiting_actions", labels(pool="cpu@n0")] == 1
    states = {"total": 2000, "held": 2000, "spent": 0, "free": 0}
    assert {state: series["tangram_pool_units", labels(pool="cpu@n0", state=state)] for state in states} == states
    assert series["tangram_sandboxes", labels(run="r", state="active")] == 1
    assert series["tangram_sandboxes", labels(run="r", state="frozen")] == 1


def test_a_draining_node_is_reported() -> None:
    world = World()
    for state, value in ((NodeState.DRAINING, 1.0), (NodeState.UP, 0.0)):
        world.send(NodeChanged(node="n0", state=state))
        assert read(world.collector.render())[1]["tangram_node_draining", (("node", "n0"),)] == value


def test_where_the_time_went_adds_up() -> None:
    world = World()
    world.run("a", 3.0, run="r", trajectory="t")
    world.clock.set(10.0)
    world.run("b", 4.0, run="r", trajectory="t")
    spent = {where: value for (name, where), value in world.read().items() if name == "tangram_time_seconds_total"}
    assert spent[labels(run="r", part="execution")] == 7.0
    assert spent[labels(run="r", part="thinking")] == 7.0
    assert sum(spent.values()) == 14.0


@given(st.text(), st.text())
def test_label_values_are_escaped(route: str, status: str) -> None:
    world = World()
    world.metrics.count("tangram_http_requests_total", {"route": route, "status": status})
    assert world.read()["tangram_http_requests_total", labels(route=route, status=status)] == 1


def test_names_with_quotes_do_not_break_the_text() -> None:
    world = World()
    hostile = 'a"} 1\\ # HELP x'
    world.run("a", 1.0, run=hostile, key='k\\"')
    assert world.read()["tangram_actions_total", labels(run=hostile, status="succeeded")] == 1


def test_a_run_named_like_the_rest_is_counted_with_it() -> None:
    world = World()
    world.run("a", 1.0, run=OTHER)
    assert world.read()["tangram_actions_total", labels(run=OTHER, status="succeeded")] == 1


def test_requests_are_counted_by_route_and_status() -> None:
    world = World()
    for status in (200, 200, 404):
        world.metrics.on_response("/v1/actions", status, 0.02)
    world.metrics.count("tangram_refusals_total", {"limit": "requests_per_s"})
    world.metrics.set("tangram_journal_log_bytes", None, 4096)
    series = world.read()
    assert series["tangram_http_requests_total", labels(route="/v1/actions", status="200")] == 2
    assert series["tangram_http_request_seconds_count", labels(route="/v1/actions")] == 3
    assert series["tangram_refusals_total", labels(limit="requests_per_s")] == 1
    assert series["tangram_journal_log_bytes", ()] == 4096


def test_series_are_bounded_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERIES_MAX", 3)
    world = World()
    for number in range(50):
        world.metrics.on_response(f"/guess/{number}", 404, 0.0)
    value_by_label = {
        where: value for (name, where), value in world.read().items() if name == "tangram_http_requests_total"
    }
    assert len(value_by_label) == 4 and sum(value_by_label.values()) == 50
    assert value_by_label[labels(route=OTHER, status=OTHER)] == 47


def test_an_undeclared_name_or_label_is_a_bug() -> None:
    metrics = World().metrics
    for call in (
        lambda: metrics.count("tangram_nothing_total"),
        lambda: metrics.count("tangram_journal_log_bytes"),
        lambda: metrics.observe("tangram_http_request_seconds", {"path": "/"}, 1.0),
        lambda: metrics.count("tangram_refusals_total", {"limit": "x", "run": "y"}),
    ):
        with pytest.raises(InvariantError):
            call()


def test_the_process_is_measured() -> None:
    series = World().read()
    assert series["process_resident_memory_bytes", ()] > 1e6
    assert series["process_open_fds", ()] >= 1
    assert series["process_max_fds", ()] >= series["process_open_fds", ()]
    assert series["process_start_time_seconds", ()] > 1.5e9


# ---- the dashboard of Grafana ----


def expressions() -> list[str]:
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())] + [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]


def test_the_metrics_of_the_dashboard_exist() -> None:
    names = {name for expression in expressions() for name in re.findall(r"\btangram_\w+", expression)}
    known = set()
    for family in FAMILIES:
        known |= {
            family.name + suffix for suffix in (("_bucket", "_sum", "_count") if family.kind == HISTOGRAM else ("",))
        }
    assert names and names <= known
    assert len(names) >= 10


def test_the_dashboard_groups_by_labels_that_exist() -> None:
    for expression in expressions():
        families = [FAMILY_BY_NAME[re.sub(r"_(bucket|sum|count)$", "", name)] for name in
                    re.findall(r"\btangram_\w+", expression)]  # fmt: skip
        allowed = {"le", *[label for family in families for label in family.labels]}
        grouped = [label.strip() for found in re.findall(r"by \(([^)]*)\)", expression) for label in found.split(",")]
        selected = [
            label for found in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)\s*[=!]", found)
        ]
        assert set(grouped) | set(selected) <= allowed, expression


def test_the_dashboard_can_be_imported_anywhere() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    assert dashboard["id"] is None and dashboard["uid"]
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["source", "run"]
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${source}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
