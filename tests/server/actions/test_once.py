"""Once: a submission that is sent again is the same action, and a client gets its result, whatever happens between."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.server.http_caller import (
    ADMIN_TOKEN,
    DEADLINE_S,
    Answer,
    Caller,
    line,
    local_service,
    open_caller,
    tenants,
    token_file,
    until,
)
from tests.server.shared import serving

from tangram.client import remote_connection, remote_transport
from tangram.client.client import Client, connect
from tangram.errors import InvalidConfig, ManagerError, TangramError
from tangram.managers.fake import FakeManager
from tangram.managers.work import Exec
from tangram.server.serve import RunningServer


def commands(up: RunningServer) -> list[str]:
    """The commands that the manager ran, in order."""
    manager = up.action_service.orchestrator.any_manager
    assert isinstance(manager, FakeManager)
    return [str(call.detail.command) for call in manager.calls if isinstance(call.detail, Exec)]


# ---- the same again ---------------------------------------------------------------------------------------------


def test_the_same_submission_fifty_times_at_once_is_one_action(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as up, open_caller(up.address) as caller:
            await caller.open()
            results = await asyncio.gather(*[caller.run("it", "sleep 0.2; echo once") for _ in range(50)])
            assert {answer.status for answer in results} == {200}
            assert len({answer.content for answer in results}) == 1
            assert commands(up) == ["sleep 0.2; echo once"]

    asyncio.run(main())


def test_the_same_id_with_other_content_is_a_conflict_and_runs_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as up, open_caller(up.address) as caller:
            await caller.open()
            await caller.run("live", "sleep 1000", wait_s=0)
            await caller.run("done", "echo one")
            for id in ("live", "done"):
                for other in (
                    await caller.run(id, "echo two", wait_s=0),
                    await caller.run(id, "echo one", wait_s=0, timeout_s=5.0),
                    await caller.submit(id, {"type": "Close"}, 0, sandbox="box"),
                ):
                    assert (other.status, other.code, other.error["field"]) == (409, "conflict", "id")
            assert commands(up) == ["sleep 1000", "echo one"]

    asyncio.run(main())


def test_a_submission_that_is_repeated_after_its_end_is_answered_with_its_result(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as up, open_caller(up.address) as caller:
            await caller.open()
            first = await caller.run("it", "echo once")
            again = [await caller.run("it", "echo once") for _ in range(3)]
            looked = await caller.request("GET", "/v1/actions/it")
            assert {answer.content for answer in (*again, looked)} == {first.content}
            assert len(commands(up)) == 1

    asyncio.run(main())


def test_after_a_result_was_acknowledged_it_may_be_deleted_but_nothing_runs_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as up, open_caller(up.address) as caller:
            await caller.open()
            await caller.run("it", "echo once")
            for _ in range(2):
                assert (await caller.request("POST", "/v1/acknowledge", {"actions": ["it", "never"]})).status == 204
            await up.action_service.journal.compact()
            response = await caller.request("GET", "/v1/actions/it", wait_s=0)
            assert response.status == 200 or response.code == "not_found"
            assert len(commands(up)) == 1

    asyncio.run(main())


def test_what_is_under_way_cannot_be_acknowledged_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            await caller.open()
            await caller.run("it", "sleep 2; echo once", wait_s=0)
            assert (await caller.request("POST", "/v1/acknowledge", {"actions": ["it"]})).status == 204
            assert (await caller.request("GET", "/v1/actions/it")).json["settled"]["executed"]["stdout"] == "b25jZQo="

    asyncio.run(main())


def test_a_lost_response_is_fetched_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as up, open_caller(up.address) as caller:
            await caller.open()
            for number in range(10):
                record = {
                    "id": f"lost-{number}",
                    "sandbox": "box",
                    "work": {"type": "Exec", "command": f"echo {number}"},
                }
                body = msgspec.json.encode(record)
                head = b"POST /v1/actions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
                async with line(up.address) as raw:
                    await raw.send(head + body)
                again = await caller.run(f"lost-{number}", f"echo {number}")
                assert again.json["settled"]["outcome"]["status"] == "succeeded"
            assert sorted(commands(up)) == sorted(f"echo {number}" for number in range(10))

    asyncio.run(main())


def test_results_outlive_the_service_and_belong_to_their_run(tmp_path: Path) -> None:
    async def main() -> tuple[Answer, list[Caller]]:
        async with tenants(tmp_path) as (_, _, a, b):
            await a.open()
            return await a.run("it", "echo once"), [a, b]

    async def later(first: Answer, callers: list[Caller]) -> None:
        async with (
            serving(tmp_path, admin_token_file=str(token_file(tmp_path))) as up,
            open_caller(up.address) as caller,
        ):
            a, b = (Caller(caller.session, up.address, each.token) for each in callers)
            assert (await a.request("GET", "/v1/actions/it")).content == first.content
            assert (await a.run("it", "echo once")).content == first.content
            assert (await a.run("it", "echo other")).code == "conflict"
            assert (await b.request("GET", "/v1/actions/it", wait_s=0)).code == "not_found"
            assert commands(up) == []

    asyncio.run(later(*asyncio.run(main())))


# ---- the client, whatever happens between -----------------------------------------------------------------------


class Between:
    """A way to a service that can be cut."""

    def __init__(self) -> None:
        self.target = ""
        self.address = ""
        self.cut_after: Callable[[bytes], bool] = lambda sent: False
        """Asked with all that a client has sent on a connection: whether to cut it here."""
        self.lose_answers = 0
        """The given number of responses is lost on the way back."""
        self.cuts = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(self.target)
        try:
            there = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:
            writer.close()
            return
        back = asyncio.create_task(self._back(there[0], writer))
        self.tasks.add(back)
        back.add_done_callback(self.tasks.discard)
        with contextlib.suppress(OSError):
            sent = b""
            while data := await reader.read(1 << 16):
                sent += data
                there[1].write(data)
                await there[1].drain()
                if self.cut_after(sent):
                    self.cuts += 1
                    break
        there[1].close()
        writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.lose_answers and b'"settled"' in data:
                    self.lose_answers -= 1
                    self.cuts += 1
                    break
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def between() -> AsyncIterator[Between]:
    way = Between()
    server = await asyncio.start_server(way.carry, "127.0.0.1", 0)
    way.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        server.close()
        await until(lambda: not way.tasks)


CUTS: dict[str, Callable[[bytes], bool]] = {
    "when it has been sent": lambda sent: b'"once"' in sent,
    "in its headers": lambda sent: b"POST /v1/actions" in sent,
    "when it is asked for": lambda sent: b"GET /v1/actions/" in sent,
    "when its output is followed": lambda sent: b"/output" in sent,
}


@pytest.mark.parametrize("what", CUTS)
def test_a_connection_that_is_cut_in_any_phase_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(remote_transport, "LONG_POLL_S", 0.2)  # so that there are several requests

    async def main() -> None:
        async with serving(tmp_path) as up, between() as way:
            way.target = up.address
            async with connect(way.address) as client, client.sandbox() as box:
                way.cut_after = lambda sent: way.cuts < 3 and CUTS[what](sent)
                received: list[bytes] = []
                result = await box.exec("sleep 2; echo once", on_output=lambda stream, data: received.append(data)) \
                    if what == "when its output is followed" else await box.exec("sleep 2; echo once")  # fmt: skip
                assert result.stdout == "once\n"
                assert not received or b"".join(received) == b"once\n"
            assert way.cuts == 3 or what == "when it has been sent"
            assert commands(up) == ["sleep 2; echo once"]

    asyncio.run(main())


def test_lost_responses_are_requested_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as up, between() as way:
            way.target = up.address
            async with connect(way.address) as client, client.sandbox() as box:
                way.lose_answers = 3
                assert (await box.exec("echo once")).stdout == "once\n"
            assert way.cuts == 3 and commands(up) == ["echo once"]

    asyncio.run(main())


def test_a_service_that_is_restarted_between_brings_what_was_submitted_before(tmp_path: Path) -> None:
    async def opened_and_used(client: Client) -> str:
        async with client.sandbox() as box:
            return (await box.exec("echo once")).stdout

    async def main() -> None:
        async with between() as way:
            client = connect(way.address)
            async with serving(tmp_path, drain_s=0.0) as up, open_caller(up.address) as admin:
                way.target = up.address
                await client.__aenter__()
                await admin.request("PATCH", "/v1/pools/cpu@local", {"total": 0})  # so that it waits
                using = asyncio.create_task(opened_and_used(client))
                await until(lambda: up.action_service.orchestrator.decider.queue.waiting > 0)  # type: ignore[attr-defined]
            async with serving(tmp_path) as up:
                way.target = up.address
                try:
                    async with asyncio.timeout(DEADLINE_S):
                        assert await using == "once\n"
                finally:
                    using.cancel()
                    await client.__aexit__(None, None, None)

    asyncio.run(main())


# ---- what is no service -----------------------------------------------------------------------------------------


@asynccontextmanager
async def impostor(answer: bytes) -> AsyncIterator[str]:
    """Returns this for every request."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def http(status: str, body: bytes, kind: str = "text/html") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


IMPOSTORS = {
    "HTML": http("200 OK", b"<html>hello</html>"),
    "other JSON": http("200 OK", b'{"hello": 1}', "application/json"),
    "a proxy": http("502 Bad Gateway", b"<html>nginx</html>"),
    "not there": http("404 Not Found", b"<html>nothing</html>"),
    "elsewhere": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    "no HTTP": b"220 smtp.example ESMTP\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("what", IMPOSTORS)
def test_a_server_of_another_kind_is_reported_in_one_sentence(what: str) -> None:
    async def main() -> None:
        async with impostor(IMPOSTORS[what]) as address:
            with pytest.raises(ManagerError) as caught:
                async with connect(address, token="secret-token"):
                    pass
            assert address in str(caught.value) and "secret-token" not in str(caught.value)

    asyncio.run(main())


def test_a_proxy_that_has_lost_its_service_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_connection, "RETRY_S_MAX", 0.1)

    async def main() -> None:
        async with serving(tmp_path) as up, impostor(IMPOSTORS["a proxy"]) as proxy, between() as way:
            way.target = up.address
            async with connect(way.address) as client, client.sandbox() as box:
                running = asyncio.create_task(_exec(box.exec("sleep 0.3; echo once")))
                await until(lambda: commands(up) == ["sleep 0.3; echo once"])
                way.target = proxy
                way.cut_after = lambda sent: True
                later = asyncio.create_task(_exec(box.exec("echo two")))
                await until(lambda: way.cuts > 2)
                way.target, way.cut_after = up.address, lambda sent: False
                assert [await running, await later] == ["once\n", "two\n"]

    async def _exec(doing: Awaitable[object]) -> str:
        return str((await doing).stdout)  # type: ignore[attr-defined]

    asyncio.run(main())


def test_a_wrong_token_is_reported_at_once_without_retries(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, admin_token_file=str(token_file(tmp_path))) as up:
            for token in ("", "wrong", ADMIN_TOKEN[:-1]):
                with pytest.raises(TangramError, match="token") as caught:
                    async with connect(up.address, token=token):
                        pass
                assert not token or token not in str(caught.value)

    asyncio.run(main())


def test_wrong_addresses_are_reported_as_wrong() -> None:
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ManagerError, match="no service responds"):
            async with connect(address):
                pass
        for wrong in ("ftp://127.0.0.1:1", "http://", "http://127.0.0.1:99999999", "nonsense://x"):
            with pytest.raises((InvalidConfig, ManagerError)):
                async with connect(wrong):
                    pass

    asyncio.run(main())
