"""The verbs that talk to a shared service, against real ones on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.conftest import Answer
from tests.server.process import Process
from tests.server.shared import serving

import tangram
from tangram.managers.quotas.manager import Quota
from tangram.runtime.views import PoolPart, PoolView, View
from tangram.server.serve import RunningServer

COMMAND = str(Path(sys.executable).with_name("tangram"))
ADMIN = "the-token-of-the-admin-in-these-tests"
LIMIT_S = 60.0

Cli = Callable[..., Answer]


@pytest.fixture(autouse=True)
def _no_service_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TANGRAM_URL", "TANGRAM_TOKEN"):
        monkeypatch.delenv(name, raising=False)


class Served:
    """A service in a thread, and what a test wants of it."""

    def __init__(self, up: RunningServer, loop: asyncio.AbstractEventLoop, cli: Cli, admin: Path) -> None:
        self.url = up.address
        self.up = up
        self._loop = loop
        self._cli = cli
        self.admin = admin

    def __call__(self, *words: object) -> Answer:
        """A verb, as the admin."""
        return self._cli(*words, "--url", self.url, "--token-file", self.admin)

    def as_run(self, token: str, *words: object) -> Answer:
        return self._cli(*words, "--url", self.url, "--token", token)

    def token(self, run: str, *options: object) -> str:
        done = self("token", "create", run, *options)
        assert done.code == 0, done.err
        return done.out.strip()

    def view(self) -> View:
        return msgspec.json.decode(self("status", "--json").out, type=View)

    def until(self, true_of: Callable[[View], object]) -> View:
        end = time.monotonic() + LIMIT_S
        while not true_of(view := self.view()):
            assert time.monotonic() < end, view
            time.sleep(0.02)
        return view


@contextmanager
def served(folder: Path, cli: Cli, **options: Any) -> Iterator[Served]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    admin = folder / "admin"
    admin.write_text(ADMIN + "\n")
    admin.chmod(0o600)
    options = dict(backend="process", cores=2.0, admin_token_file=str(admin)) | options
    ready: list[tuple[RunningServer, asyncio.AbstractEventLoop]] = []
    failed: list[BaseException] = []
    notified = threading.Event()

    async def life() -> None:
        async with serving(folder, **options) as up:
            ready.append((up, asyncio.get_running_loop()))
            notified.set()
            await up.stop.wait()

    def run() -> None:
        try:
            asyncio.run(life())
        except BaseException as error:
            failed.append(error)
        finally:
            notified.set()

    thread = threading.Thread(target=run)
    thread.start()
    notified.wait(LIMIT_S)
    try:
        assert ready, failed
        up, loop = ready[0]
        yield Served(up, loop, cli, admin)
    finally:
        if ready:
            with contextlib.suppress(RuntimeError):
                ready[0][1].call_soon_threadsafe(ready[0][0].stop.set)
        thread.join(LIMIT_S)
    assert not failed and not thread.is_alive()


@pytest.fixture
def service(tmp_path: Path, cli: Cli) -> Iterator[Served]:
    with served(tmp_path / "service", cli, event_log=str(tmp_path / "service" / "events.jsonl")) as served_at:
        yield served_at


@contextmanager
def busy(url: str, token: str, count: int, **options: Any) -> Iterator[Any]:
    """The given number of commands of one core that run or wait in a sandbox until the block ends."""
    with tangram.connect_sync(url, token=token) as client, client.sandbox(memory="64MiB", trajectory="busy") as box:

        def one() -> None:
            with contextlib.suppress(tangram.TangramError, RuntimeError):
                box.exec("sleep 60", cpus=1, **options)

        threads = [threading.Thread(target=one) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield box
        finally:
            _end_all(url, token)
            for thread in threads:
                thread.join(LIMIT_S)


def _end_all(url: str, token: str) -> None:
    """Cancel what the run has under way."""
    import urllib.request

    def ask(method: str, path: str) -> bytes:
        request = urllib.request.Request(url + path, method=method, headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.read()

    end = time.monotonic() + LIMIT_S
    while True:
        view = msgspec.json.decode(ask("GET", "/v1/view"), type=View)
        live = [each.id for each in (*view.waiting, *view.running)]
        if not live:
            return
        assert time.monotonic() < end, live
        for id in live:
            ask("POST", f"/v1/actions/{id.partition('/')[2]}/cancel")
        time.sleep(0.02)


# ---- status, where, story ---------------------------------------------------------------------------------------


def test_status_shows_pools_queue_runs_and_sandboxes(service: Served) -> None:
    token = service.token("math")
    with busy(service.url, token, 3):
        service.until(lambda view: view.waiting_total == 1 and view.running_total == 2)
        done = service("status")
        one = service.as_run(token, "status")
    assert done.code == 0 and done.err == ""
    for words in (
        service.url,
        " up, started ",
        "policy adaptive",
        "durability process",
        "cpu@local",
        "2 of 2 cores",
        "100%",
    ):
        assert words in done.out
    for words in ("memory@local", "queue: 1 action waits", "waits for 1 core of cpu@local", "sandboxes: 1 open"):
        assert words in done.out
    row = next(line.split() for line in done.out.splitlines() if line.split()[:1] == ["math"])
    assert row[:6] == ["math", "100%", "1", "1", "2", "1"]
    assert "queue: 1 action waits" in one.out


def test_status_shows_cores_by_numa_node_and_the_models_on_devices(service: Served, cli: Cli) -> None:
    view = service.view()
    halves = (PoolPart(index=0, total=32_000, held=32_000), PoolPart(index=1, total=32_000, held=8_000))
    cpu = msgspec.structs.replace(view.pools[0], total=64_000, held=40_000, free=24_000, parts=halves)
    devices = [PoolPart(index=at, total=1, held=int(at < 2), service="reward" if at < 3 else "") for at in range(4)]
    gpu = PoolView(
        name="gpu@local", kind="gpu", node="local", unit="devices", total=4, held=2, spent=0, free=2, waiting=0,
        parts=tuple(devices),
    )  # fmt: skip
    body = msgspec.json.encode(msgspec.structs.replace(view, pools=(gpu, cpu)))
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as url:
        done = cli("status", "--url", url)
    rows = [" ".join(line.split()) for line in done.out.splitlines()]
    at = next(place for place, row in enumerate(rows) if row.startswith("cpu@local"))
    assert [re.sub("[█▏▎▍▌▋▊▉·]+ ", "", row) for row in rows[at : at + 7]] == [
        "cpu@local 62% 40 of 64 cores",
        "NUMA node 0 100% 32 of 32 cores",
        "NUMA node 1 25% 8 of 32 cores",
        "gpu@local 50% 2 of 4 devices",
        "devices 0 to 1 reward in use",
        "device 2 reward idle",
        "device 3 no model idle",
    ]


def test_a_run_sees_in_status_that_other_runs_hold_units_but_not_which(service: Served) -> None:
    mine, other = service.token("mine"), service.token("other")
    with busy(service.url, other, 2, key="secret-key"):
        service.until(lambda view: view.running_total == 2)
        done = service.as_run(mine, "status")
        shown = service.as_run(mine, "status", "--json")
    assert "2 of 2 cores" in done.out and "another run" in done.out
    for words in ("secret-key", "other/", '"other"'):
        assert words not in done.out + shown.out


def test_names_from_elsewhere_cannot_steer_a_terminal(service: Served, cli: Cli) -> None:
    """Any content that a service, or an impostor, puts into them."""
    token = service.token("math")
    with busy(service.url, token, 3):
        view = service.until(lambda view: view.waiting_total == 1 and view.runs)
    hostile = "\x1b]0;owned\x07\x1b[2J[bold]\n"
    wild = msgspec.structs.replace(
        view,
        service=msgspec.structs.replace(view.service, policy=hostile, recovered=hostile),
        pools=tuple(msgspec.structs.replace(pool, name=hostile, unit=hostile) for pool in view.pools),
        runs=tuple(msgspec.structs.replace(run, name=hostile) for run in view.runs),
        waiting=tuple(msgspec.structs.replace(one, id=hostile, run=hostile, reason=hostile) for one in view.waiting),
    )
    body = msgspec.json.encode(wild)
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as url:
        shown = [cli(*words, "--url", url) for words in (("status",), ("where",), ("pool", "list"), ("top",))]
    for done in shown:
        assert done.code == 0 and "\x1b" not in done.out and "\x07" not in done.out
        assert "\\x1b]0;owned\\x07" in done.out and "[bold]" in done.out


def test_where_the_time_went_adds_up(service: Served) -> None:
    assert "no run has been active" in service("where").out
    token = service.token("math")
    with tangram.connect_sync(service.url, token=token) as client, client.sandbox(memory="64MiB") as box:
        for _ in range(3):
            box.exec("true").check()
    document = service("where", "--json").json
    shares = document[0]["shares"]
    parts = [*shares["waiting"].values(), shares["execution"], shares["overhead"], shares["thinking"]]
    assert document[0]["run"] == "math" and sum(parts) == pytest.approx(1.0)
    done = service("where")
    assert done.code == 0
    for words in ("math", "thinking", "executing", "overhead", "%"):
        assert words in done.out


def test_only_its_run_and_the_admin_can_read_the_story_of_an_action(service: Served) -> None:
    mine, other = service.token("mine"), service.token("other")
    with tangram.connect_sync(service.url, token=mine) as client, client.sandbox(memory="64MiB") as box:
        box.exec("true", key="hello").check()
    lines = _timeline(service, mine)
    id = next(row[1] for row in lines if row[4].endswith("hello"))
    for done in (service("story", id), service.as_run(mine, "story", id.partition("/")[2])):
        assert done.code == 0
        for words in ("submitted", "granted", "started", "succeeded"):
            assert words in done.out
    assert service("story", id, "--json").json["status"] == "succeeded"
    for answer in (service.as_run(other, "story", id), service("story", "mine/none"), service("story", "../view")):
        assert answer.code == 2 and answer.err.startswith("tangram: there is no action ")
    assert "the admin names the run too: RUN/some-id" in service("story", "some-id").err


def _timeline(service: Served, token: str) -> list[list[Any]]:
    import urllib.request

    request = urllib.request.Request(service.url + "/v1/timeline", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)["rows"]


# ---- tokens -----------------------------------------------------------------------------------------------------


def test_create_prints_the_token_alone_and_it_is_that_of_the_run(service: Served) -> None:
    done = service("token", "create", "math", "--weight", 2, "--sandboxes", 3, "--no-network")
    assert done.code == 0 and re.fullmatch(r"tgr_[\w-]{43}\n", done.out)
    assert "run math is created" in done.err and done.out.strip() not in done.err
    assert service.as_run(done.out.strip(), "status").code == 0
    listed = service("token", "list", "--json").json
    assert [run["name"] for run in listed] == ["math"] and "token" not in listed[0]
    assert listed[0]["caps"] == {"sandboxes_max": 3, "network": False} and listed[0]["weight"] == 2.0
    row = next(line.split() for line in service("token", "list").out.splitlines() if line.split()[:1] == ["math"])
    assert row[:7] == ["math", "2", "3", "-", "-", "-", "no"]
    again = service("token", "create", "math")
    assert again.code == 2 and "tangram token renew math" in again.err and again.out == ""


def test_change_changes_only_what_is_given(service: Served) -> None:
    token = service.token(
        "math", "--weight", 2, "--sandboxes", 3, "--waiting", 50, "--requests-per-s", 200, "--network"
    )
    assert service("token", "change", "math", "--running", 4).code == 0
    first = service("token", "list", "--json").json[0]
    assert first["weight"] == 2.0
    assert first["caps"] == {
        "sandboxes_max": 3, "waiting_max": 50, "running_max": 4, "requests_per_s": 200.0, "network": True,
    }  # fmt: skip
    done = service("token", "change", "math", "--weight", 0.5, "--sandboxes", 0, "--no-network", "--json")
    assert done.json["weight"] == 0.5
    assert done.json["caps"] == {"waiting_max": 50, "running_max": 4, "requests_per_s": 200.0, "network": False}
    assert service.as_run(token, "status").code == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("create", "Bad!"), "run: expected 1 to 40 characters of a-z"),
        (
            ("create", "Bad/Name"),
            "run: expected 1 to 40 characters of a-z, 0-9 and '-', the first not '-', got 'Bad/Name'",
        ),
        (("renew", "Bad/Name"), "run: expected 1 to 40 characters of a-z"),
        (("revoke", "Bad/Name", "--yes"), "run: expected 1 to 40 characters of a-z"),
        (("create", "a", "--weight", 0), "weight: expected a number above 0"),
        (("create", "a", "--weight", "nan"), "weight: expected a number above 0"),
        (("create", "a", "--sandboxes", -1), "sandboxes: expected"),
        (("change", "math"), "at least one change"),
        (("change", "none", "--weight", 2), "run: expected a run that has a token"),
        (("revoke", "none", "--yes"), "run: expected the name of a run that has a token"),
        (("revoke", "math"), "--yes"),
    ],
)
def test_a_token_verb_that_cannot_be_meant_is_one_line(service: Served, words: tuple, complaint: str) -> None:
    token = service.token("math")
    done = service("token", *words)
    assert (done.code, done.out) == (2, "") and complaint in done.err and done.err.count("\n") == 1
    assert service.as_run(token, "status").code == 0  # nothing happened to it


def test_a_revoked_token_is_no_longer_taken(service: Served) -> None:
    token = service.token("math")
    with tangram.connect_sync(service.url, token=token) as client:
        client.sandbox(memory="64MiB").__enter__()
        assert service.view().sandboxes_total == 1
        assert service("token", "revoke", "math", "--yes").code == 0
        assert service.view().sandboxes_total == 0
    done = service.as_run(token, "status")
    assert done.code == 2 and "rejects this token" in done.err
    assert "no run has a token" in service("token", "list").out


def test_a_revoked_run_leaves_no_empty_one_behind(service: Served) -> None:
    token = service.token("math")
    with tangram.connect_sync(service.url, token=token) as client, client.sandbox(memory="64MiB") as box:
        box.exec("true").check()
    assert [run.name for run in service.view().runs] == ["math"]
    assert service("token", "revoke", "math", "--yes").code == 0
    assert service.view().runs == ()


def test_on_a_terminal_revoke_prompts_first(service: Served) -> None:
    token = service.token("math")
    words = ("token", "revoke", "math", "--url", service.url, "--token-file", str(service.admin))
    with Terminal(*words) as terminal:
        terminal.until("Revoke math?")
        terminal.type("n\n")
        assert terminal.ended() == 1
    assert "It has no actions or sandboxes." in terminal.text
    assert service.as_run(token, "status").code == 0
    with Terminal(*words) as terminal:
        terminal.until("Revoke math?")
        terminal.type("y\n")
        assert terminal.ended() == 0
    assert service.as_run(token, "status").code == 2


# ---- pools ------------------------------------------------------------------------------------------------------


def test_pools_are_resized_in_cores_and_sizes_for_people(tmp_path: Path, cli: Cli) -> None:
    options = dict(backend="fake", cores=4.0, memory=8 << 30, quotas=[Quota("search", 4)])
    with served(tmp_path, cli, **options) as service:
        done = service("pool", "resize", "cpu@local", "2.5")
        assert (done.code, done.out) == (0, "cpu@local: 2.5 cores, was 4\n")
        assert service("pool", "resize", "memory@local", "6GiB", "--json").json["total"] == 6 * 1024
        totals = {pool["name"]: pool["total"] for pool in service("pool", "list", "--json").json}
        assert totals == {"cpu@local": 2500, "memory@local": 6144, "search": 4}
        assert "0 of 2.5 cores" in service("pool", "list").out
        for words, complaint in (
            (("cpu@local", "12"), "size of cpu@local: expected at most 4 cores, got '12'"),
            (("memory@local", "12GiB"), "size of memory@local: expected at most 8 GiB, got '12GiB'"),
            (("search", "3"), "search cannot be resized; these can: cpu@local, memory@local"),
            (("cpu@local", "many"), "a number of cores"),
            (("memory@local", "64"), "a size with its unit, such as 64GiB"),
            (("disk@local", "1"), "pool: expected one of cpu@local, memory@local"),
        ):
            wrong = service("pool", "resize", *words)
            assert wrong.code == 2 and complaint in wrong.err and wrong.err.count("\n") == 1


def test_a_pool_without_anything_left_is_warned_of(tmp_path: Path, cli: Cli) -> None:
    with served(tmp_path, cli, backend="fake", cores=4.0) as service:
        assert service("pool", "resize", "cpu@local", "1").err == ""
        done = service("pool", "resize", "cpu@local", "0")
    assert (done.code, done.out) == (0, "cpu@local: 0 cores, was 1\n")
    assert "cpu@local has no units left to grant" in done.err and "lost after scheduler.stranded_s" in done.err


def test_a_run_gets_another_token(service: Served) -> None:
    first = service("token", "create", "renewed").out.strip()
    second = service("token", "renew", "renewed")
    assert second.code == 0 and second.out.strip().startswith("tgr_") and second.out.strip() != first
    assert service.as_run(first, "status").code == 2
    assert service.as_run(second.out.strip(), "status").code == 0
    assert service("token", "renew", "unknown").code == 2
    service("token", "revoke", "renewed", "--yes")


def test_a_drained_node_takes_no_new_sandbox_until_it_is_taken_up_again(service: Served) -> None:
    token = service.token("math")
    opened = threading.Event()
    with busy(service.url, token, 1) as box, tangram.connect_sync(service.url, token=token) as client:

        def another() -> None:
            with client.sandbox(memory="64MiB"):
                opened.set()

        service.until(lambda view: view.running_total == 1)
        done = service("pool", "drain", "local")
        assert done.code == 0 and "local is draining" in done.out
        assert "draining nodes: local" in service("status").out
        assert "it has 1 sandbox, and 1 action runs there" in done.out
        thread = threading.Thread(target=another)
        thread.start()
        service.until(lambda view: view.waiting_total == 1)
        assert box.exec("echo goes on").stdout == "goes on\n" and not opened.is_set()
        assert "local is up" in service("pool", "undrain", "local").out
        thread.join(LIMIT_S)
        assert opened.is_set()
    assert service("pool", "undrain", "local", "--json").json == {
        "node": "local", "state": "up", "running": 0, "sandboxes": 0,
    }  # fmt: skip
    wrong = service("pool", "drain", "elsewhere")
    assert wrong.code == 2 and "node: expected one of local, got 'elsewhere'" in wrong.err


# ---- what can go wrong ------------------------------------------------------------------------------------------


VERBS = (
    ("status",), ("top", "--once"), ("where",), ("story", "a"), ("token", "list"), ("token", "create", "x"),
    ("token", "revoke", "x", "--yes"), ("pool", "list"), ("pool", "resize", "cpu@local", "1"), ("pool", "drain", "n"),
)  # fmt: skip


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_without_a_service_each_verb_prints_where_it_looked_and_what_to_do(cli: Cli, words: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nothing listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = cli(*words, "--url", url)
    assert (done.code, done.out) == (2, "")
    assert f"no service responds at {url} (Connection refused)" in done.err and "`tangram serve`" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_help_of_each_verb_has_an_example(cli: Cli, words: tuple[str, ...]) -> None:
    verb = words[:2] if words[0] in ("token", "pool") else words[:1]
    done = cli(*verb, "--help")
    assert done.code == 0 and "Example" in done.out and f"tangram {' '.join(verb)}" in done.out


def test_a_missing_permission_is_one_line(service: Served, cli: Cli, tmp_path: Path) -> None:
    token = service.token("math")
    cases = (
        (cli("status", "--url", service.url), "requires a token"),
        (service.as_run("tgr_wrong", "status"), "rejects this token"),
        (service.as_run(token, "token", "list"), "only the admin may do this, and the token is that of a run"),
        (service.as_run(token, "pool", "drain", "local"), "only the admin may do this"),
        (service.as_run(token, "trace", "export", tmp_path / "x.jsonl"), "only the admin may do this"),
    )
    for done, complaint in cases:
        assert (done.code, done.out) == (2, "") and complaint in done.err and done.err.count("\n") == 1
        assert "tgr_" not in done.err
    assert not (tmp_path / "x.jsonl").exists()


def test_an_address_with_a_path_is_answered_with_the_one_without(service: Served, cli: Cli) -> None:
    for words in (("status",), ("story", "math/1"), ("pool", "drain", "local"), ("trace", "export", "none.jsonl")):
        done = cli(*words, "--url", f"{service.url}/foo/", "--token-file", service.admin)
        assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
        assert f"{service.url}/foo has a path: is {service.url} the address of the service?" in done.err


def test_the_address_and_the_token_come_from_the_environment(
    service: Served, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_URL", service.url + "/")
    monkeypatch.setenv("TANGRAM_TOKEN", service.token("math"))
    assert cli("status").code == 0
    assert cli("token", "list").code == 2
    assert cli("token", "list", "--token-file", service.admin).code == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--url", "localhost:7433"), "url: expected an address such as"),
        (("--url", "http://user:pass@localhost"), "url: expected an address such as"),
        (("--url", "http://"), "url: expected an address such as"),
        (("--token", "two words"), "--token is not a token"),
        (("--token", "a\nb"), "--token is not a token"),
        (("--token", ""), "--token is not a token"),
        (("--token", "a", "--token-file", "b"), "either --token or --token-file"),
        (("--token-file", "/none/there"), "a file that can be read"),
        (("--ca", "/none/there", "--url", "https://127.0.0.1:1"), "ca: expected a file of certificates"),
    ],
)
def test_an_option_that_cannot_be_meant_is_one_line(cli: Cli, words: tuple[str, ...], complaint: str) -> None:
    done = cli("status", *words)
    assert (done.code, done.out) == (2, "") and complaint in done.err and done.err.count("\n") == 1
    assert "two words" not in done.err


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("openssl is missing")
        pytest.skip("openssl is missing")
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", made],
        check=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    key.chmod(0o600)
    return made, key


def test_an_unknown_certificate_is_refused_unless_ca_names_it(
    tmp_path: Path, cli: Cli, certificate: tuple[Path, Path]
) -> None:
    made, key = certificate
    secured = dict(tls_certificate=str(made), tls_key=str(key))
    with served(tmp_path / "service", cli, backend="fake", **secured) as service:
        assert service.url.startswith("https://")
        done = service("status")
        assert done.code == 2 and "is not trusted" in done.err and "give --ca FILE" in done.err
        assert done.err.count("\n") == 1
        assert service("status", "--ca", made).code == 0
        plain = cli("status", "--url", service.url.replace("https", "http"), "--token", ADMIN)
        assert plain.code == 2 and "if it speaks TLS, use an address with https://" in plain.err


def test_https_to_a_service_without_tls_is_reported_as_such(service: Served, cli: Cli) -> None:
    done = cli("status", "--url", service.url.replace("http", "https"), "--token", ADMIN)
    assert done.code == 2 and "does not speak TLS" in done.err and done.err.count("\n") == 1


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server of another kind, with the same response to every request."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT_S)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", "is --url the address of the service?"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", "is not a service of this version of Tangram"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "is not a service of"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "answered 503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "closed the connection during its response"),
        (b"SSH-2.0-OpenSSH\r\n", "closed the connection during its response"),
        (b'HTTP/1.1 422 No\r\ncontent-length: 52\r\n\r\n{"error":{"code":"failed","message":"\\u001b[31mred"}}', "red"),
    ],
)  # fmt: skip
def test_an_unreadable_response_is_one_clear_line(cli: Cli, answer: bytes, complaint: str) -> None:
    with answering(answer) as url:
        done = cli("status", "--url", url, "--token", "tgr_secret")
    assert (done.code, done.out) == (2, "") and complaint in done.err and done.err.count("\n") == 1
    assert "tgr_secret" not in done.err and "\x1b" not in done.err


# ---- traces -----------------------------------------------------------------------------------------------------


async def _work(url: str, token: str, trajectories: int, turns: int) -> None:
    async def trajectory(client: tangram.Client, number: int) -> None:
        async with client.sandbox(memory="32MiB", trajectory=f"t{number}", task="coding") as box:
            for turn in range(turns):
                cpus = (None, 1, (1, 2))[turn % 3]
                (await box.exec("true", cpus=cpus, key="quick")).check()
            async with client.quota("search", trajectory=f"t{number}"):
                pass

    async with tangram.connect(url, token=token) as client:
        await asyncio.gather(*(trajectory(client, number) for number in range(trajectories)))


def test_an_export_while_actions_are_under_way_is_simulated_and_planned(tmp_path: Path, cli: Cli) -> None:
    """Two runs that name their trajectories alike, one of them capped; 300 actions and a few that are not done."""
    options = dict(event_log=str(tmp_path / "service" / "events.jsonl"), quotas=[Quota("search", 4)])
    file = tmp_path / "live.jsonl"
    with served(tmp_path / "service", cli, **options) as service:
        tokens = [service.token("math"), service.token("code", "--running", 1)]
        threads = [threading.Thread(target=lambda t=t: asyncio.run(_work(service.url, t, 6, 22))) for t in tokens]
        for thread in threads:
            thread.start()
        service.until(lambda view: view.running_total and sum(sum(r.settled.values()) for r in view.runs) > 50)
        early = service("trace", "export", tmp_path / "early.jsonl", "--json").json
        for thread in threads:
            thread.join(LIMIT_S)
        with busy(service.url, tokens[0], 2):
            service.until(lambda view: view.running_total == 2)
            done = service("trace", "export", file)
    assert early["lines"] == len((tmp_path / "early.jsonl").read_bytes().splitlines())
    assert done.code == 0
    for words in ("live.jsonl", "tangram sim --trace", "tangram plan --trace"):
        assert words in done.out
    assert list(tmp_path.glob("*.partial")) == []
    for path in (tmp_path / "early.jsonl", file):
        assert cli("trace", "replay", path).out.startswith("the same: ")
    shown = cli("trace", "show", file, "--json").json
    assert {run["run"]: run["trajectories"] for run in shown["runs"]} == {"math": 7, "code": 6}
    assert sum(run["actions"] for run in shown["runs"]) >= 300 and shown["unsettled"] == 2
    sim = cli("sim", "--trace", file, "--policies", "pods:0.5,adaptive", "--workers", 1, "--json")
    assert sim.code == 0, sim.err
    for name, result in sim.json["comparisons"][0]["policies"].items():
        assert (result["mean"]["trajectories"], result["mean"]["failed"]) == (13, 0), name
    planned = cli("plan", "--trace", file, "--workers", 1, "--json")
    assert planned.code == 0, planned.err


def test_a_trace_that_breaks_off_leaves_what_was_there(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "live.jsonl"
    file.write_text("before")
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * 500) as url:
        done = cli("trace", "export", file, "--url", url)
    assert (done.code, done.out) == (2, "") and "closed the connection during its response" in done.err
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_service_without_a_trace_names_the_missing_config_key(tmp_path: Path, cli: Cli) -> None:
    with served(tmp_path / "service", cli, backend="fake") as service:
        done = service("trace", "export", tmp_path / "live.jsonl")
        folder = service("trace", "export", tmp_path)
    assert done.code == 2 and "service.event_log" in done.err and not (tmp_path / "live.jsonl").exists()
    assert folder.code == 2 and "it is a folder" in folder.err


# ---- top --------------------------------------------------------------------------------------------------------


class Terminal:
    """The command on a terminal of 40 lines and 120 columns."""

    def __init__(self, *words: str, **env: str) -> None:
        self._words = words
        self._env = {**os.environ, "TERM": "xterm", "LANG": "C.UTF-8", "LINES": "40", "COLUMNS": "120", **env}
        self.text = ""

    def __enter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        try:
            self.process = subprocess.Popen(
                [COMMAND, *self._words], stdin=slave, stdout=slave, stderr=slave, env=self._env, start_new_session=True
            )
        finally:
            os.close(slave)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)
        os.close(self._master)

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._master], [], [], wait_s)[0]:
            return True
        try:
            self.text += os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            return False
        return True

    def until(self, words: str, *, after: int = 0) -> int:
        """Until they are shown."""
        end = time.monotonic() + LIMIT_S
        while words not in self.text[after:]:
            assert time.monotonic() < end and self._read(0.1), self.text[after:]
        return len(self.text)

    def until_frame(self, true_of: Callable[[str], bool]) -> None:
        """Until the screen, as it was drawn last, is like that."""
        end = time.monotonic() + LIMIT_S
        while not true_of(self.text.rpartition("\x1b[H")[2]):
            assert time.monotonic() < end and self._read(0.1), self.text.rpartition("\x1b[H")[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ended(self) -> int:
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            self._read(0.05)
        while select.select([self._master], [], [], 0.0)[0] and self._read(0.0):
            pass
        return self.process.returncode


SHOW_CURSOR, LEAVE_SCREEN = "\x1b[?25h", "\x1b[?1049l"


def test_top_waits_for_a_service_that_restarts_and_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    with Process(tmp_path / "service", backend="fake") as service:
        with Terminal("top", "--every", "0.1", "--url", service.url) as terminal:
            terminal.until_frame(lambda frame: "sandboxes: 0 open" in frame and "waiting for" not in frame)
            service.kill()
            terminal.until_frame(lambda frame: "waiting for the service" in frame and "last state:" in frame)
            service.start()
            terminal.until_frame(lambda frame: "sandboxes: 0 open" in frame and "waiting for" not in frame)
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.ended() == 0
        assert terminal.text.rstrip().endswith(LEAVE_SCREEN) and SHOW_CURSOR in terminal.text
        assert "Traceback" not in terminal.text


def test_top_starts_before_its_service_and_gives_the_screen_back_on_sigterm() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Terminal("top", "--every", "0.1", "--url", url) as terminal:
            terminal.until("(Connection refused)")
            terminal.process.send_signal(signal.SIGTERM)
            assert terminal.ended() == 128 + signal.SIGTERM
    assert LEAVE_SCREEN in terminal.text and "Traceback" not in terminal.text


def test_top_ends_with_one_line_when_it_is_not_let_in(service: Served) -> None:
    with Terminal("top", "--url", service.url, "--token", "tgr_wrong") as terminal:
        assert terminal.ended() == 2
    assert "rejects this token" in terminal.text.rpartition(LEAVE_SCREEN)[2]


def test_without_a_terminal_or_with_once_top_prints_one_frame(service: Served) -> None:
    for done in (service("top"), service("top", "--once")):
        assert done.code == 0 and done.out.count("cpu@local") == 1 and "\x1b" not in done.out
    wrong = service("top", "--every", 0)
    assert wrong.code == 2 and "every: expected seconds from 0.1" in wrong.err
