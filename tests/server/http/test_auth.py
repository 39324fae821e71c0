"""Authentication: tokens, guesses, and what a browser must not do for pages of other origins."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from pathlib import Path

import aiohttp
import pytest
from tests.server.http_caller import (
    ADMIN_TOKEN,
    Answer,
    Caller,
    line,
    local_service,
    make_run,
    open_caller,
    tenants,
    token_file,
)
from tests.server.shared import config_of

from tangram.clock import SimClock
from tangram.config import RunLimits, admin_token
from tangram.config.file_checks import TOKEN_LENGTH_MAX as CONFIG_LENGTH_MAX
from tangram.errors import AdmissionRefused, InvalidAction, ManagerError
from tangram.runtime.wire import Caps, RunRequest
from tangram.server.http import auth
from tangram.server.http.auth import (
    ADMIN_PRINCIPAL,
    RESERVED_RUN_NAMES,
    TOKEN_LENGTH_MAX,
    TOKEN_PREFIX,
    WRONG_TOKENS_BURST,
    WRONG_TOKENS_PER_S,
    RunRegistry,
    TokenBucket,
    WrongTokenLimiter,
    hash_token,
)
from tangram.server.http.routes import ROUTES
from tangram.server.journal.journal import JournaledRun


class Facts:
    """A journal that may take its time."""

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes, bytes]] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def record_run(self, run: str, token_hash: bytes, record: bytes) -> None:
        await self.may_go_on.wait()
        self.written.append((run, token_hash, record))

    async def record_run_ending(self, run: str, record: bytes) -> None:
        await self.may_go_on.wait()
        self.ending = JournaledRun(name=run, token_hash=b"", record=record, ending=True)

    async def remove_run(self, run: str) -> None:
        await self.may_go_on.wait()


# ---- tokens -----------------------------------------------------------------------------------------------------


def test_a_token_is_looked_up_by_its_hash_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)

    async def main() -> None:
        facts = Facts()
        token = (await RunRegistry(facts, (), ADMIN_TOKEN).create("a", RunRequest())).token
        [(_, token_hash, record)] = facts.written
        assert token_hash == hashlib.sha256(token.encode()).digest()
        runs = RunRegistry(facts, (JournaledRun(name="a", token_hash=token_hash, record=record),), ADMIN_TOKEN)
        caller = runs.authenticate(token)
        assert caller is not None and (caller.run, caller.is_admin) == ("a", False)
        for wrong in (
            token[:-1],
            token + "x",
            token[: len(TOKEN_PREFIX)],
            token.upper(),
            ADMIN_TOKEN[:-1],
            "é",
            "\ud800",
        ):
            assert runs.authenticate(wrong) is None
            assert compared[-1][0] == hashlib.sha256(wrong.encode(errors="surrogatepass")).digest()
        assert runs.authenticate(ADMIN_TOKEN) is ADMIN_PRINCIPAL
        # The one comparison is of hashes, in constant time.
        assert compared and all(len(one) == len(other) == 32 for one, other in compared)
        assert {other for _, other in compared} == {hash_token(ADMIN_TOKEN)}

    asyncio.run(main())


def test_what_is_too_long_for_a_token_is_not_even_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        runs = RunRegistry(Facts(), (), "x" * TOKEN_LENGTH_MAX)
        assert runs.authenticate("x" * TOKEN_LENGTH_MAX) is ADMIN_PRINCIPAL
        monkeypatch.setattr(auth, "hash_token", lambda token: pytest.fail("hashed"))
        assert runs.authenticate("x" * (TOKEN_LENGTH_MAX + 1)) is None

    asyncio.run(main())


def test_every_token_that_the_config_takes_is_taken_at_the_door(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t" * CONFIG_LENGTH_MAX)
    path.chmod(0o600)
    token = admin_token(config_of(tmp_path, admin_token_file=str(path)))
    assert RunRegistry(Facts(), (), token).authenticate(token) is ADMIN_PRINCIPAL


def test_only_a_hash_of_a_token_is_kept_and_the_token_is_returned_once() -> None:
    async def main() -> None:
        facts = Facts()
        runs = RunRegistry(facts, (), ADMIN_TOKEN)
        made = await runs.create("a", RunRequest())
        assert made.token.startswith(TOKEN_PREFIX) and len(made.token) > 40
        ((_, token_hash, record),) = facts.written
        assert token_hash == hash_token(made.token) and made.token.encode() not in record
        assert [run.token for run in runs.replies()] == [""]
        assert (await runs.change("a", RunRequest(weight=2.0))).token == ""
        assert (await runs.create("b", RunRequest())).token != made.token

    asyncio.run(main())


@pytest.mark.parametrize(
    "name", [*RESERVED_RUN_NAMES, "", "-a", "A", "a/b", "a:b", "a b", "a\n", "é", "a" * 41, "..", "a.b"]
)
def test_names_of_runs_that_could_mean_something_else_are_refused(name: str) -> None:
    async def main() -> None:
        with pytest.raises(InvalidAction):
            await RunRegistry(Facts(), ()).create(name, RunRequest())

    asyncio.run(main())


def test_concurrent_requests_for_one_run_do_not_both_get_a_token() -> None:
    async def main() -> None:
        facts = Facts()
        runs = RunRegistry(facts, (), ADMIN_TOKEN)
        facts.may_go_on.clear()
        making = [asyncio.create_task(runs.create("a", RunRequest())) for _ in range(2)]
        await asyncio.sleep(0)
        facts.may_go_on.set()
        first, second = await asyncio.gather(*making, return_exceptions=True)
        assert isinstance(second, AdmissionRefused) and second.limit == "run_exists"
        assert not isinstance(first, BaseException) and runs.authenticate(first.token) is not None

    asyncio.run(main())


async def revoke(runs: RunRegistry, name: str) -> None:
    async with runs.revoking(name):
        pass


async def revoke_in_vain(runs: RunRegistry, name: str) -> None:
    async with runs.revoking(name):
        with pytest.raises(AdmissionRefused, match="being revoked"):
            await revoke(runs, name)
        raise ManagerError("something is left")


def test_a_run_that_is_revoked_while_it_is_changed_does_not_come_back() -> None:
    async def main() -> None:
        facts = Facts()
        runs = RunRegistry(facts, (), ADMIN_TOKEN)
        token = (await runs.create("a", RunRequest())).token
        facts.may_go_on.clear()
        changing = asyncio.create_task(runs.change("a", RunRequest(caps=Caps(network=True))))
        await asyncio.sleep(0)
        revoking = asyncio.create_task(revoke(runs, "a"))
        await asyncio.sleep(0)
        facts.may_go_on.set()
        await asyncio.gather(changing, revoking)
        assert runs.authenticate(token) is None and runs.replies() == []

    asyncio.run(main())


def test_a_run_that_could_not_be_ended_keeps_its_name_until_it_is_revoked_again() -> None:
    async def main() -> None:
        facts = Facts()
        runs = RunRegistry(facts, (), ADMIN_TOKEN)
        token = (await runs.create("a", RunRequest(weight=2.0))).token
        with pytest.raises(ManagerError):
            await revoke_in_vain(runs, "a")
        for each in (
            runs,
            RunRegistry(facts, [facts.ending], ADMIN_TOKEN),
        ):  # the second one is that of the next service
            assert each.ending == ["a"] and each.authenticate(token) is None
            assert [(run.name, run.weight, run.ending) for run in each.replies()] == [("a", 2.0, True)]
            with pytest.raises(AdmissionRefused) as caught:
                await each.create("a", RunRequest())
            assert caught.value.limit == "run_ending"
            with pytest.raises(InvalidAction):
                each.impersonate("a")
            await revoke(each, "a")
            assert each.replies() == []
            await each.create("a", RunRequest())

    asyncio.run(main())


def test_the_number_of_runs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "RUNS_MAX", 2)

    async def main() -> None:
        runs = RunRegistry(Facts(), ())
        for name in ("a", "b"):
            await runs.create(name, RunRequest())
        with pytest.raises(AdmissionRefused) as caught:
            await runs.create("c", RunRequest())
        assert caught.value.limit == "runs_max"

    asyncio.run(main())


# ---- guesses ----------------------------------------------------------------------------------------------------


def test_wrong_tokens_are_slowed_down_by_address() -> None:
    now = 0.0
    guesses = WrongTokenLimiter(lambda: now)
    for _ in range(int(WRONG_TOKENS_BURST)):
        assert guesses.retry_after_s("1.2.3.4") == 0.0
        guesses.record_failure("1.2.3.4")
    assert guesses.retry_after_s("1.2.3.4") > 0.0
    assert guesses.retry_after_s("4.3.2.1") == 0.0
    now += guesses.retry_after_s("1.2.3.4")
    assert guesses.retry_after_s("1.2.3.4") == 0.0


def test_the_last_addresses_of_failed_logins_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "TRACKED_ADDRESSES_MAX", 100)
    guesses = WrongTokenLimiter(lambda: 0.0)
    for number in range(1000):
        for _ in range(int(WRONG_TOKENS_BURST)):
            guesses.record_failure(str(number))
    waiting = [number for number in range(1000) if guesses.retry_after_s(str(number)) > 0.0]
    assert waiting == list(range(900, 1000))


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3.0, 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(0.5) == 0.0 and bucket.take(0.5) > 0.0
    assert bucket.take(0.4) > 0.0  # a clock that goes back gives nothing
    assert [bucket.take(100.0) for _ in range(3)] == [0.0, 0.0, 0.0] and bucket.take(100.0) > 0.0


def test_wrong_tokens_are_rate_limited_and_right_ones_from_the_same_address_are_not(tmp_path: Path) -> None:
    clock = SimClock()

    async def main() -> None:
        async with tenants(tmp_path, clock=clock) as (_, admin, a, _):
            guesser = Caller(admin.session, admin.address, "wrong")
            codes = [(await guesser.request("GET", "/v1/about")).code for _ in range(int(WRONG_TOKENS_BURST) + 1)]
            assert codes[:-1] == ["unauthorized"] * int(WRONG_TOKENS_BURST) and codes[-1] == "rate"
            refused = await guesser.request("GET", "/v1/about")
            assert (refused.status, refused.error["limit"]) == (429, "wrong_tokens")
            assert refused.headers["retry-after"] == "1"
            clock.set(clock.now() + 1.0 / WRONG_TOKENS_PER_S)
            assert [(await guesser.request("GET", "/v1/about")).code for _ in range(2)] == ["unauthorized", "rate"]
            # Many clients may share an address, behind a proxy: a valid token is accepted.
            for token in (a.token, ADMIN_TOKEN):
                assert (await Caller(admin.session, admin.address, token).request("GET", "/v1/about")).status == 200
            # Nor are other addresses held up: here, another one of this machine.
            connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
            async with aiohttp.ClientSession(connector=connector) as session:
                for token in (a.token, ADMIN_TOKEN):
                    assert (await Caller(session, a.address, token).request("GET", "/v1/about")).status == 200
                wrong = await Caller(session, a.address, "wrong").request("GET", "/v1/about")
                assert wrong.code == "unauthorized"

    asyncio.run(main())


# ---- over HTTP --------------------------------------------------------------------------------------------------


def test_no_token_and_no_right_one_are_refused_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "WRONG_TOKENS_BURST", 1e6)

    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, _):
            headers = [
                {},
                {"authorization": ""},
                {"authorization": "Bearer"},
                {"authorization": "Bearer "},
                {"authorization": f"Basic {a.token}"},
                {"authorization": a.token},
                {"authorization": f"Bearer {a.token[:-1]}"},
                {"authorization": f"Bearer {a.token} {a.token}"},
                {"authorization": f"Bearer {'x' * 20_000}"},
                {"authorization": "Bearer \xe9\xff"},
                {"cookie": f"token={a.token}"},
            ]
            anonymous = Caller(admin.session, admin.address)
            for route in ROUTES:
                if route.is_public:
                    continue
                path = route.path.replace("{id:path}", "x").replace("{id}", "x").replace("{name}", "x")
                path = path.replace("{key}", "x").replace("{run}", "x")
                for sent in headers if route.path == "/v1/about" else headers[:1]:
                    response = await anonymous.request(route.method, path, headers=sent, path="x", token=a.token)
                    assert (response.status, response.code) == (401, "unauthorized"), (route, sent)
                    assert response.headers["www-authenticate"] == "Bearer"
            assert (
                await anonymous.request("GET", "/v1/about", headers={"authorization": f"bearer  {a.token} "})
            ).status == 200

    asyncio.run(main())


def test_bytes_that_are_no_text_are_no_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (up, *_), line(up.address) as raw:
            await raw.send(b"GET /v1/about HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xff\xfe\x80\r\n\r\n")
            assert (await raw.answer())[0] == 401

    asyncio.run(main())


def test_a_revoked_token_is_refused_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, b):
            assert (await admin.request("DELETE", f"/v1/runs/{a.name}")).status == 204
            assert (await a.request("GET", "/v1/about")).code == "unauthorized"
            assert (await b.request("GET", "/v1/about")).json["run"] == b.name
        async with local_service(tmp_path, admin_token_file=str(token_file(tmp_path))) as again:
            assert (
                await Caller(again.session, again.address, a.token).request("GET", "/v1/about")
            ).code == "unauthorized"
            assert (await Caller(again.session, again.address, b.token).request("GET", "/v1/about")).status == 200

    asyncio.run(main())


def test_tokens_are_in_no_answer_no_log_and_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answers: list[Answer] = []

    async def main() -> list[str]:
        async with tenants(tmp_path, event_log=str(tmp_path / "events.jsonl")) as (_, admin, a, b):
            wrong = Caller(admin.session, admin.address, f"{a.token[:-4]}zzzz")
            await a.open()
            for caller in (a, b, admin, wrong):
                for path in ("/v1/about", "/v1/view", "/v1/runs", "/metrics", "/v1/timeline", "/v1/trace", "/nowhere"):
                    answers.append(await caller.request("GET", path))
                answers.append(await caller.request("POST", "/v1/actions", body=b"{"))
            answers.append(await a.run("it", "echo hello", trajectory="t"))
            return [a.token, b.token, ADMIN_TOKEN, wrong.token]

    tokens = asyncio.run(main())
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "token"]
    assert any(path.name == "journal.db" for path in files)
    for token in tokens:
        secret = token.removeprefix(TOKEN_PREFIX)[:20]
        assert secret not in caplog.text
        for answer in answers:
            assert secret not in str(answer)
        for path in files:
            assert secret.encode() not in path.read_bytes(), path


def test_what_the_admin_changes_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, _, _):
            for method, path, body in [
                ("POST", "/v1/runs/new", {"weight": 2.0}),
                ("PATCH", "/v1/runs/new", {"weight": 3.0}),
                ("POST", "/v1/runs/new/token", None),
                ("PUT", "/v1/quotas", {"name": "search", "concurrent": 2}),
                ("PATCH", "/v1/pools/cpu@local", {"total": 1000}),
                ("PATCH", "/v1/nodes/local", {"state": "draining"}),
                ("DELETE", "/v1/runs/new", None),
            ]:
                assert (await admin.request(method, path, body)).status < 300, path

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    for expected in [
        "run made run=new weight=2",
        "run changed run=new weight=3",
        "token renewed run=new",
        "quota set quota=search",
        "pool resized pool=cpu@local total=1000",
        "node changed node=local state=draining",
        "run revoked run=new",
    ]:
        assert expected in lines


def test_what_only_the_admin_may_do_no_run_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, _):
            requests = [
                ("GET", "/v1/runs", None),
                ("POST", "/v1/runs/mine", {}),
                ("PATCH", f"/v1/runs/{a.name}", {"weight": 100.0}),
                ("PATCH", "/v1/runs/unknown", {"weight": 100.0}),
                ("DELETE", f"/v1/runs/{a.name}", None),
                ("DELETE", "/v1/runs/unknown", None),
                ("PUT", f"/v1/weights/{a.name}", {"weight": 100.0}),
                ("PATCH", "/v1/pools/cpu@local", {"total": 0}),
                ("PATCH", "/v1/pools/nothing", {"total": 0}),
                ("PATCH", "/v1/nodes/local", {"state": "draining"}),
                ("PUT", "/v1/quotas", {"name": "mine", "concurrent": 1}),
                ("GET", "/v1/trace", None),
                ("GET", "/metrics", None),
            ]
            before = (await admin.request("GET", "/v1/runs")).json
            for method, path, record in requests:
                response = await a.request(method, path, record)
                assert (response.status, response.code) == (403, "forbidden"), path
            assert (await admin.request("GET", "/v1/runs")).json == before
            assert (await admin.request("GET", "/v1/quotas")).json == {"quotas": []}
            # What is for the admin is refused before it is looked at.
            assert (await a.request("POST", "/v1/runs/x", body=b"{no json")).code == "forbidden"

    asyncio.run(main())


# ---- an open service --------------------------------------------------------------------------------------------


ELSEWHERE = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://[::1"},
    {"host": "evil.example"},
    {"host": "evil.example:7433"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "[::1"},
    {"host": ""},
    {"host": "evil.example", "origin": "http://evil.example"},
]


def test_no_page_of_another_origin_acts_on_an_open_service(tmp_path: Path) -> None:
    """A browser sends requests of a page to any local listener, and there no token is needed."""

    async def main() -> None:
        async with local_service(tmp_path) as caller:
            record = {"id": "it", "sandbox": "box", "work": {"type": "Open", "spec": {}}}
            for headers in ELSEWHERE:
                response = await caller.request("POST", "/v1/actions", record, headers=headers)
                assert (headers, response.status, response.code) == (headers, 403, "forbidden")
                assert (await caller.request("GET", "/v1/sandboxes", headers=headers)).code == "forbidden"
            assert (await caller.request("GET", "/v1/sandboxes")).json == {"sandboxes": []}
            for host in ("localhost:1", "127.0.0.1", "[::1]:1", "127.0.0.2:1", "LOCALHOST"):
                for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
                    assert (await caller.request("GET", "/v1/about", headers=headers)).json["admin"] is True

    asyncio.run(main())


def test_a_request_with_a_token_may_come_from_any_origin(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, _, a, _):
            headers = {"host": "tangram.example", "origin": "https://dashboard.example"}
            assert (await a.request("GET", "/v1/about", headers=headers)).json["run"] == a.name

    asyncio.run(main())


def test_a_rate_limit_is_reported_in_numbers(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, limits=RunLimits(requests_per_s=10.0, requests_burst=100)) as (up, admin, *_):
            slow = await make_run(admin, "slow", {"requests_per_s": 1e-320})
            async with open_caller(up.address, slow.token) as caller:
                assert (await caller.request("GET", "/v1/about")).status == 200
                refused = await caller.request("GET", "/v1/about")
                assert refused.error["limit"] == "requests_per_s" and int(refused.headers["retry-after"]) >= 1

    asyncio.run(main())
