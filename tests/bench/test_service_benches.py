"""Benchmarks of the shared service with sizes so small that their times mean nothing: what they count must be right."""

from __future__ import annotations

import asyncio
import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tangram.bench import BENCHES, BenchResult, dashboard, durability, http, options_of, soak
from tangram.bench.base import PRINTED, BenchRun, at_least, at_most, run_module
from tangram.bench.http import embedded_rate
from tangram.bench.other_systems import SystemUnavailable
from tangram.bench.service_process import ServiceProcess, config_text
from tangram.bench.shared_http_client import SharedHttpClient
from tangram.config import Config, parse
from tangram.core.action import Outcome, Status
from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.fake import CALLS_MAX, FakeManager
from tangram.managers.work import Exec
from tangram.runtime.wire import ActionReply, AnyWork

pytestmark = pytest.mark.slow

HTTP = http.HttpSizes(clients=4, round_s=0.2, rounds=2, singles=10, waiting=30, embedded=200, others=4)
DURABILITY = durability.DurabilitySizes(actions=40, kills=1, clients=2, at_once=4)
SOAK = soak.SoakSizes(seconds=1.0, warm_s=0.3, remembered=20, clients=1)
FAKE = {"node": {"backend": "fake", "cores": 8.0}}

GOALS = {
    "http": {
        "actions_per_s": at_least(1500.0),
        "overhead_ms_p50": at_most(10.0),
        "overhead_ms_p99": PRINTED,
        "waiting_clients": at_least(2000.0),
        "embedded_actions_per_s": at_least(10_000.0),
    },
    "durability": {
        "lost": at_most(0.0),
        "run_twice": at_most(0.0),
        "recovery_s_max": at_most(2.0),
        "lost_while_running": PRINTED,
    },
    "soak": {"rss_growth": at_most(0.05), "leaks": at_most(0.0)},
}


def _silent(share: float, text: str = "", /) -> None:
    pass


@cache
def small(name: str) -> BenchResult:
    """One run of each serves all tests that only read it."""
    if name == "http":
        return run_module(http, HTTP, processes=1)
    if name == "durability":
        return run_module(durability, DURABILITY, processes=1, backend="process")
    return run_module(soak, SOAK, processes=1, backend="process")


@pytest.mark.parametrize("name", GOALS)
def test_every_promised_metric_is_there_with_its_goal_and_a_finite_number(name: str) -> None:
    result = small(name)
    assert {metric: result.goals[metric] for metric in GOALS[name]} == GOALS[name]
    assert result.metrics.keys() >= GOALS[name].keys()
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert (result.name, result.label) == (name, "measured")
    assert result.notes and name in BENCHES


def test_full_sizes_are_those_of_the_goals() -> None:
    assert (http.FULL.clients, http.FULL.waiting, http.QUICK.waiting) == (64, 2000, 2000)
    assert (durability.FULL.actions, durability.FULL.kills, durability.QUICK.kills) == (5000, 50, 10)
    assert (soak.FULL.seconds, soak.QUICK.seconds) == (600.0, 60.0)
    assert dashboard.FULL.actions == dashboard.QUICK.actions == 10_000
    assert options_of("durability") == options_of("soak") == ("backend",)


# ---- http -----------------------------------------------------------------------------------------------------


def test_all_waiters_get_results_when_their_actions_end() -> None:
    assert small("http").metrics["waiting_clients"] == HTTP.waiting


def test_one_answer_that_fails_makes_the_number_of_waiting_clients_zero(tmp_path: Path) -> None:
    requests = itertools.count(1)

    class OneWrong(SharedHttpClient):
        """Treats the response to its third program as wrong."""

        async def run_action(self, work: AnyWork, sandbox: str, **options: Any) -> ActionReply:
            number = next(requests) if isinstance(work, Exec) else 0
            reply = await super().run_action(work, sandbox, **options)
            if number == 3:
                raise ManagerError("this is not the requested action")
            return reply

    async def main() -> tuple[int, list[str]]:
        async with ServiceProcess(tmp_path, {"node": {"backend": "fake", "cores": http.CORES}}) as service:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(http, "SharedHttpClient", OneWrong)
                return await http.clients_waiting(service.url, 8)

    waiting, problems = asyncio.run(main())
    assert waiting == 0
    assert "1 of 8 went wrong" in problems[0] and "not the requested action" in problems[0]


def test_what_is_not_installed_is_left_out_with_the_reason() -> None:
    run = BenchRun(processes=1)

    def missing(count: int, at_once: int) -> float:
        raise SystemUnavailable("it is not installed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http, "ray_rate", missing)
        patch.setattr(http, "dask_rate", lambda count, at_once: 7.0)
        http.add_other_systems(HTTP, run)
    assert run.metrics == {"dask_tasks_per_s": 7.0}
    assert run.notes == ["ray_tasks_per_s is not measured: it is not installed."]


def test_the_embedded_job_does_all_its_actions() -> None:
    assert embedded_rate(50, 200) > 0.0


def test_more_connections_than_descriptors_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ManagerError, match="ulimit"):
        http.allow_descriptors(1 << 40)


# ---- durability -----------------------------------------------------------------------------------------------


def test_every_action_has_one_result_and_none_ran_twice() -> None:
    metrics = small("durability").metrics
    assert (metrics["lost"], metrics["run_twice"], metrics["false_success"]) == (0.0, 0.0, 0.0)
    assert small("durability").notes[0].startswith(f"{DURABILITY.actions} results")


def outcome(id: str, status: Status = Status.SUCCEEDED, reason: str = "") -> Outcome:
    return Outcome(action=id, status=status, reason=reason)


def metrics_of(clients: durability.Clients, forgotten: int = 0) -> dict[str, float]:
    run = BenchRun()
    durability.add_metrics(run, clients, forgotten, [0.5, 0.7])
    return run.metrics


@pytest.fixture
def clients(tmp_path: Path) -> durability.Clients:
    """Two actions that succeeded, of which the second is idempotent."""
    made = durability.Clients(DURABILITY, None, tmp_path, "process")  # type: ignore[arg-type]
    made.acknowledged |= {"a1", "a2"}
    made.idempotent.add("a2")
    made.outcome_by_id |= {"a1": outcome("a1"), "a2": outcome("a2")}
    made.executed_ids += ["a1", "a2"]
    return made


def test_an_acknowledged_action_without_a_result_is_lost(clients: durability.Clients) -> None:
    assert metrics_of(clients)["lost"] == 0.0
    clients.acknowledged.add("a3")
    assert metrics_of(clients)["lost"] == 1.0
    assert metrics_of(clients, forgotten=2)["lost"] == 3.0


def test_only_what_is_idempotent_may_run_twice(clients: durability.Clients) -> None:
    clients.executed_ids.append("a2")
    assert (metrics_of(clients)["run_twice"], metrics_of(clients)["run_again"]) == (0.0, 1.0)
    clients.executed_ids.append("a1")
    assert metrics_of(clients)["run_twice"] == 1.0


def test_a_success_that_never_ran_is_a_false_one(clients: durability.Clients) -> None:
    clients.executed_ids.remove("a1")
    assert metrics_of(clients)["false_success"] == 1.0
    clients.unobservable.add("a1")
    assert metrics_of(clients)["false_success"] == 0.0, "its sandbox is gone with the file that would tell"


def test_what_ran_at_a_kill_is_counted_apart(clients: durability.Clients) -> None:
    clients.outcome_by_id["a3"] = outcome("a3", Status.LOST, durability.RESTARTED_REASON)
    clients.outcome_by_id["a4"] = outcome("a4", Status.LOST, "sandbox box-7 is gone")
    metrics = metrics_of(clients)
    assert (metrics["lost"], metrics["lost_while_running"], metrics["settled_otherwise"]) == (0.0, 1.0, 1.0)
    assert clients.describe_outcome(clients.outcome_by_id["a4"]) == "lost (sandbox … is gone)"


@pytest.mark.parametrize("module", [durability, soak])
def test_a_backend_that_carries_out_nothing_is_refused(module: object) -> None:
    with pytest.raises(InvalidConfig, match="sandbox, process"):
        run_module(module, module.QUICK, processes=1, backend="fake")  # type: ignore[attr-defined]


# ---- soak -----------------------------------------------------------------------------------------------------


def test_a_short_load_of_all_kinds_leaves_nothing_and_fails_nowhere() -> None:
    result = small("soak")
    assert result.metrics["failed"] == 0.0, result.notes
    assert result.metrics["leaks"] == 0.0
    for kind in ("sandbox", "files", "quota", "cancelled", "followed", "vanished"):
        assert f"{kind} " in result.notes[0], "each kind was played"


def test_growth_is_that_of_the_last_quarter_over_the_second() -> None:
    assert soak.growth([50, 90, 100, 100, 104, 108, 110, 110]) == pytest.approx(0.1)
    assert soak.growth([7]) == 0.0


def test_whatever_is_more_than_before_is_a_leak_and_less_does_not_make_up_for_it() -> None:
    run = BenchRun()
    soak.add_metrics(
        run, [100] * 8, {"descriptors": 10, "tasks": 3, "mounts": 0}, {"descriptors": 7, "tasks": 4, "mounts": 2}
    )
    assert run.metrics["leaks"] == 3.0
    assert run.metrics["left_descriptors"] == -3.0


def test_an_orphaned_spawner_is_found_by_its_lock(tmp_path: Path) -> None:
    kept = tmp_path / "state" / "owners" / "service" / "kept"
    kept.mkdir(parents=True)
    service = soak.ServiceProcess.__new__(soak.ServiceProcess)
    assert soak.Footprint(service, tmp_path).spawners() == []
    (kept / "spawner.lock").write_text("")
    assert soak.Footprint(service, tmp_path).spawners() == [], "it has not announced itself yet"
    (kept / "spawner.lock").write_text("4711")
    assert soak.Footprint(service, tmp_path).spawners() == [4711]


# ---- dashboard ------------------------------------------------------------------------------------------------


def test_without_a_browser_nothing_is_measured_and_the_reason_is_reported() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dashboard, "find_browser", lambda: ("", "there is no Chromium (apt-get install chromium)"))
        result = run_module(dashboard, dashboard.QUICK, processes=1)
    assert result.metrics == {}
    assert result.notes == ["Nothing is measured: there is no Chromium (apt-get install chromium)."]


def test_the_dashboard_is_filled_with_the_given_number_of_actions_of_all_runs(tmp_path: Path) -> None:
    async def main() -> tuple[int, set[str]]:
        sizes = dashboard.DashboardSizes(actions=60, clients=5, runs=3)
        async with ServiceProcess(tmp_path, FAKE) as service, SharedHttpClient(service.url) as caller:
            await dashboard.fill_history(service.url, sizes, _silent)
            timeline = msgspec.json.decode(await caller.request("GET", "/v1/timeline"))
            return timeline["last"], {row[2] for row in timeline["rows"]}

    last, runs = asyncio.run(main())
    assert last == 60
    assert runs >= {"run-0", "run-1", "run-2"}


# ---- what they share ------------------------------------------------------------------------------------------


def test_a_service_that_is_killed_comes_back_on_its_port_with_its_journal(tmp_path: Path) -> None:
    async def main() -> None:
        async with ServiceProcess(tmp_path, FAKE) as service:
            async with SharedHttpClient(service.url) as caller:
                body = {"id": "kept", "sandbox": "nowhere", "work": {"type": "Close"}}  # it is never acknowledged
                assert b'"succeeded"' in await caller.request(
                    "POST", "/v1/actions?wait_s=30", msgspec.json.encode(body)
                )
            url, pid = service.url, service.pid
            service.kill()
            await service.start_and_kill(0.0)
            await service.start()
            assert service.url == url and service.pid != pid
            async with SharedHttpClient(service.url) as caller:
                assert b'"succeeded"' in await caller.request("GET", "/v1/actions/kept?wait_s=0")

    asyncio.run(main())


def test_a_service_that_does_not_start_reports_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with ServiceProcess(tmp_path, {"node": {"backend": "none"}}):
            raise AssertionError("it came up")

    with pytest.raises(ManagerError, match="backend"):
        asyncio.run(main())


def test_the_config_of_a_service_is_a_valid_one() -> None:
    text = config_text({**FAKE, "quotas": {"search": 4}}, "127.0.0.1:7433", Path("/tmp/x y/journal.db"))
    config = parse(text, "test")
    assert isinstance(config, Config)
    assert (config.node.cores, config.service.journal) == (8.0, "/tmp/x y/journal.db")
    assert [(quota.name, quota.concurrent) for quota in config.quotas] == [("search", 4)]


def test_the_fake_manager_remembers_no_more_than_its_limit() -> None:
    async def main() -> None:
        manager = FakeManager()
        for number in range(CALLS_MAX + 5):
            manager.record_call("read", str(number))
        assert len(manager.calls) == CALLS_MAX
        assert (manager.calls[0].subject, manager.calls[-1].subject) == ("5", str(CALLS_MAX + 4))

    asyncio.run(main())
