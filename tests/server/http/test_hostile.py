"""Hostile clients: too large, too slow, too many, and archives that would rather be somewhere else."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from tests.client.conftest import why_not
from tests.server.http_caller import Caller, Line, line, local_service, open_ports, tenants, until

from tangram.config import RunLimits
from tangram.managers.fake import FakeManager
from tangram.server.http import bodies, listener

HOST = b"host: 127.0.0.1\r\n"
SMALL = RunLimits(body_bytes_max=2 << 20, file_bytes_max=1 << 20)


async def is_well(caller: Caller) -> None:
    """Others are served."""
    assert (await caller.request("GET", "/v1/about")).status == 200


# ---- too large --------------------------------------------------------------------------------------------------


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path, limits=SMALL) as caller:
            await caller.open()
            for head, limit in (
                (b"POST /v1/actions", b"body_bytes_max"),
                (b"PUT /v1/sandboxes/box/files?path=x", b"file_bytes_max"),
                (b"PUT /v1/sandboxes/box/tree?path=x", b"file_bytes_max"),
                (b"POST /v1/images", b"file_bytes_max"),
            ):
                async with line(caller.address) as raw:
                    await raw.send(head + b" HTTP/1.1\r\n" + HOST + b"content-length: 99999999999999\r\n\r\n")
                    status, body = await raw.answer()  # without a byte of the body
                    fault = msgspec.json.decode(body)["error"]
                    assert (status, fault["code"], fault["limit"].encode()) == (413, "too_large", limit)
            await is_well(caller)

    asyncio.run(main())


def test_a_body_without_a_length_is_cut_off_at_the_limit(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path, limits=SMALL) as caller:
            await caller.open()
            for head, limit in (
                (b"POST /v1/actions", b"body_bytes_max"),
                (b"PUT /v1/sandboxes/box/files?path=x", b"file_bytes_max"),
                (b"PUT /v1/sandboxes/box/tree?path=x", b"file_bytes_max"),
                (b"POST /v1/images", b"file_bytes_max"),
            ):
                async with line(caller.address) as raw:
                    await raw.send(head + b" HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n")
                    sending = asyncio.create_task(without_end(raw, b"10000\r\n" + b"x" * 0x10000 + b"\r\n"))
                    status, body = await raw.answer()
                    fault = msgspec.json.decode(body)["error"]
                    assert (status, fault["code"], fault["limit"].encode()) == (413, "too_large", limit)
                    sending.cancel()
            assert (await caller.request("GET", "/v1/sandboxes/box/list", path=".")).json == {"entries": []}
            await is_well(caller)

    asyncio.run(main())


async def without_end(raw: Line, piece: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await raw.send(piece)


HEADS = {
    "one header": b"x: " + b"y" * (1 << 20),
    "many headers": b"x: y\r\n" * 100_000,
    "the address": b"",
    "a trailer": b"",
    "a chunk": b"",
}


@pytest.mark.parametrize("what", HEADS)
def test_headers_without_end_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    ports = open_ports(monkeypatch)

    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw:
            begin, piece = b"GET /healthz HTTP/1.1\r\n" + HOST, HEADS[what]
            if what == "the address":
                begin, piece = b"GET /", b"x" * 10_000
            elif what in ("a trailer", "a chunk"):
                begin = b"POST /v1/actions HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
                begin += b"1\r\nx\r\n0\r\nx: " if what == "a trailer" else b"1;x="
                piece = b"y" * 10_000
            await raw.send(begin)
            await until(lambda: raw.port in ports)
            await without_end(raw, piece)
            await until(lambda: raw.port not in ports)
            await is_well(caller)

    asyncio.run(main())


# ---- too slow ---------------------------------------------------------------------------------------------------


def test_a_client_that_sends_its_headers_too_slowly_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 2.0)

    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as silent, line(caller.address) as slow:

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    for byte in b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 10_000:
                        await slow.send(bytes([byte]))
                        await asyncio.sleep(0.01)

            dripping = asyncio.create_task(drip())
            await is_well(caller)
            await silent.ended()
            await slow.ended()
            await is_well(caller)
            dripping.cancel()

    asyncio.run(main())


def test_blank_lines_do_not_keep_a_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KEEP_ALIVE_S", 1.0)
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 1.0)

    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as first, line(caller.address) as later:
            await first.send(b"\r\n\r\n")
            await later.send(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
            assert (await later.answer())[0] == 200
            await later.send(b"\r\n\r\n")
            assert await first.ended() == await later.ended() == b""

    asyncio.run(main())


def test_a_connection_that_is_used_again_and_again_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 2.0)

    async def main() -> None:
        async with local_service(tmp_path) as caller:
            await caller.open()
            await caller.run("it", "sleep 1000", wait_s=0)
            async with line(caller.address) as raw:
                for _ in range(3):  # each answer comes later than headers may take
                    await raw.send(b"GET /v1/actions/it?wait_s=2.5 HTTP/1.1\r\n" + HOST + b"\r\n")
                    status, body = await raw.answer()
                    assert (status, msgspec.json.decode(body)["state"]) == (200, "running")

    asyncio.run(main())


@pytest.mark.parametrize(
    "head",
    [b"POST /v1/actions", b"PUT /v1/sandboxes/box/files?path=x", b"PUT /v1/sandboxes/box/tree?path=x"],
    ids=["record", "file", "tree"],
)
def test_a_body_that_comes_slowly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 2.0)
    monkeypatch.setattr(bodies, "SPOOL_BYTES", 1)  # each piece goes to the disk, where time passes as well

    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw:
            await caller.open()
            await raw.send(head + b" HTTP/1.1\r\n" + HOST + b"content-length: 100000\r\n\r\n")

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        await raw.send(b"x")
                        await asyncio.sleep(0.005)

            dripping = asyncio.create_task(drip())
            status, body = await raw.answer()
            fault = msgspec.json.decode(body)["error"]
            assert (status, fault["code"], fault["retry"]) == (408, "too_slow", True)
            dripping.cancel()
            await is_well(caller)
            assert (await caller.request("GET", "/v1/sandboxes/box/list", path=".")).json == {"entries": []}

    asyncio.run(main())


def test_a_client_that_sends_on_after_its_response_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LINGER_TIMEOUT_S", 0.3)
    ports = open_ports(monkeypatch)

    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw, line(caller.address) as silent:
            for each in (raw, silent):
                await each.send(b"POST /nowhere HTTP/1.1\r\n" + HOST + b"content-length: 999999999\r\n\r\nx")
                assert (await each.answer())[0] == 404
            await silent.send(b"x")
            await without_end(raw, b"x" * 1000)
            await silent.ended()
            await until(lambda: not {raw.port, silent.port} & ports)
            await is_well(caller)

    asyncio.run(main())


def test_a_client_that_sends_the_rest_of_its_body_in_time_keeps_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw:
            for _ in range(3):
                await raw.send(b"POST /nowhere HTTP/1.1\r\n" + HOST + b"content-length: 200000\r\n\r\n")
                assert (await raw.answer())[0] == 404
                await raw.send(b"x" * 200_000)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["files", "tree"])
def test_a_client_that_does_not_read_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(listener, "SEND_TIMEOUT_S", 0.3)
    ports = open_ports(monkeypatch)

    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw, line(caller.address) as closing:
            await caller.open()
            content = io.BytesIO(b"x" * (32 << 20))
            assert (await caller.request("PUT", "/v1/sandboxes/box/files", body=content, path="large")).status == 204
            for each, more in ((raw, b""), (closing, b"connection: close\r\n")):
                each.stop_reading()
                ask = b"GET /v1/sandboxes/box/%s?path=large HTTP/1.1\r\n" % path.encode()
                await each.send(ask + HOST + more + b"\r\n")
            await is_well(caller)
            await until(lambda: not {raw.port, closing.port} & ports)
            await is_well(caller)

    asyncio.run(main())


def test_many_idle_connections_delay_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KEEP_ALIVE_S", 1.0)
    ports = open_ports(monkeypatch)

    async def main() -> None:
        async with local_service(tmp_path) as caller, contextlib.AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(line(caller.address)) for _ in range(200)]
            for each in lines:
                await each.send(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
                assert (await each.answer())[0] == 200
            await caller.open()
            assert (await caller.run("it", "echo hello")).json["state"] == "settled"
            await until(lambda: not {each.port for each in lines} & ports)

    asyncio.run(main())


# ---- too many ---------------------------------------------------------------------------------------------------


def test_slow_uploads_of_one_run_hold_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "UPLOADS_PER_TENANT_MAX", 2)
    begun = 0
    pieces = bodies.body_chunks

    def counting(*args: object) -> AsyncIterator[bytes]:
        nonlocal begun
        begun += 1
        return pieces(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bodies, "body_chunks", counting)

    async def main() -> None:
        async with tenants(tmp_path) as (up, _, a, b), contextlib.AsyncExitStack() as stack:
            await a.open()
            await b.open()
            nonlocal begun
            begun = 0
            for number in range(6):
                raw = await stack.enter_async_context(line(up.address))
                head = f"PUT /v1/sandboxes/box/files?path=f{number} HTTP/1.1\r\nauthorization: Bearer {a.token}\r\n"
                await raw.send(head.encode() + HOST + b"content-length: 1000\r\n\r\nx")
            await until(lambda: begun == 2)
            written = await b.request("PUT", "/v1/sandboxes/box/files", body=b"b", path="f")
            assert written.status == 204
            assert begun == 3, "a third one of a is read although two are under way"

    asyncio.run(main())


# ---- archives ---------------------------------------------------------------------------------------------------


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o777
    info.devmajor, info.devminor = 1, 3
    return info, content


def out_of(place: Path) -> dict[str, bytes]:
    """Archives that would write at a place outside of the sandbox, each by another way."""
    up, absolute = f"{'../' * 40}{str(place).lstrip('/')}", str(place)
    evil = b"evil"
    return {
        "absolute": tar_of(member(absolute, content=evil)),
        "up": tar_of(member(up, content=evil)),
        "up inside": tar_of(member(f"x/y/../../{up}", content=evil)),
        "link to a directory": tar_of(
            member("l", tarfile.SYMTYPE, str(place.parent)), member(f"l/{place.name}", content=evil)
        ),
        "relative link": tar_of(
            member("l", tarfile.SYMTYPE, f"{'../' * 40}{str(place.parent).lstrip('/')}"),
            member(f"l/{place.name}", content=evil),
        ),
        "link to a file": tar_of(member("l", tarfile.SYMTYPE, absolute), member("l", content=evil)),
        "hard link": tar_of(member("l", tarfile.LNKTYPE, absolute), member("l", content=evil)),
        "hard link up": tar_of(member("l", tarfile.LNKTYPE, up), member("l", content=evil)),
    }


BACKENDS = ["process", "sandbox"]


def require(backend: str) -> None:
    reason = why_not() if backend == "sandbox" else ""
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_archive_writes_outside_of_its_sandbox(tmp_path: Path, backend: str) -> None:
    require(backend)
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    victim = outside / "victim"
    victim.write_bytes(b"untouched")
    victim.chmod(0o666)

    async def main() -> None:
        async with local_service(tmp_path / "service", backend=backend) as caller:
            await caller.open()
            for place in (victim, outside / "fresh"):
                for what, tar in out_of(place).items():
                    response = await caller.request("PUT", "/v1/sandboxes/box/tree", body=tar, path=".")
                    assert response.status == 204 or response.code == "file_failed", (what, response)
                    assert victim.read_bytes() == b"untouched" and list(outside.iterdir()) == [victim], what
            await is_well(caller)

    asyncio.run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_device_comes_of_an_archive(tmp_path: Path, backend: str) -> None:
    require(backend)

    async def main() -> None:
        async with local_service(tmp_path, backend=backend) as caller:
            await caller.open()
            for number, kind in enumerate((tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)):
                tar = tar_of(member(f"special{number}", kind))
                response = await caller.request("PUT", "/v1/sandboxes/box/tree", body=tar, path=".")
                assert response.status == 204 or response.code == "file_failed"
            ended = (await caller.run("look", "find . -type b -o -type c")).json["settled"]["executed"]
            assert (ended["exit_code"], ended["stdout"]) == (0, "")
            for place in ("files", "tree"):  # a pipe without a writer blocks no request
                response = await caller.request("GET", f"/v1/sandboxes/box/{place}", path="special2")
                assert response.status == 200 or response.code == "file_failed"

    asyncio.run(main())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("junk", [b"", b"no tar", b"\x1f\x8b" + b"\0" * 100, b"\0" * 10240, tar_of(member("x"))[:300]])
def test_an_invalid_archive_is_reported_as_such(tmp_path: Path, backend: str, junk: bytes) -> None:
    require(backend)

    async def main() -> None:
        async with local_service(tmp_path, backend=backend) as caller:
            await caller.open()
            response = await caller.request("PUT", "/v1/sandboxes/box/tree", body=junk, path=".")
            assert response.status == 204 or response.code == "file_failed", response
            assert (await caller.request("GET", "/v1/sandboxes/box/list", path=".")).json == {"entries": []}

    asyncio.run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_invalid_image_error_names_the_upload_and_not_a_file_of_the_service(tmp_path: Path, backend: str) -> None:
    require(backend)

    async def main() -> None:
        async with local_service(tmp_path, backend=backend) as caller:
            for body in (b"no image", tar_of(member("x", content=b"no image either"))):
                response = await caller.request("POST", "/v1/images", body=body)
                assert response.code == ("invalid_config" if backend == "sandbox" else "manager_failed")
                assert (
                    "the upload" in response.error["message"] and tempfile.gettempdir() not in response.content.decode()
                )

    asyncio.run(main())


def test_an_archive_larger_than_the_disk_of_its_sandbox_is_refused_there(tmp_path: Path) -> None:
    require("sandbox")

    async def main() -> None:
        async with local_service(tmp_path, backend="sandbox") as caller:
            await caller.open(disk_bytes=4 << 20)
            for what, tar in (
                ("bytes", tar_of(member("large", content=b"x" * (16 << 20)))),
                ("entries", tar_of(*(member(f"d{number}", tarfile.DIRTYPE) for number in range(30_000)))),
            ):
                response = await caller.request("PUT", "/v1/sandboxes/box/tree", body=io.BytesIO(tar), path=".")
                assert response.status == 204 or response.code == "file_failed", (what, response)
                if what == "bytes":
                    assert response.code == "file_failed"
            whole = await caller.request("PUT", "/v1/sandboxes/box/files", body=io.BytesIO(b"x" * (16 << 20)), path="f")
            assert whole.code == "file_failed"
            assert (await caller.run("it", "rm -rf d*; echo hello")).json["settled"]["executed"]["exit_code"] == 0
            await is_well(caller)

    asyncio.run(main())


PATHS: dict[str, Callable[[Path], str]] = {
    "absolute": lambda secret: str(secret),
    "up": lambda secret: f"{'../' * 40}{str(secret).lstrip('/')}",
    "up from a directory": lambda secret: f"d/{'../' * 40}{str(secret).lstrip('/')}",
    "by a link": lambda secret: "link",
    "through a link": lambda secret: "dir/secret",
    "by /proc": lambda secret: f"/proc/self/root{secret}",
    "by the first process": lambda secret: f"/proc/1/root{secret}",
    "by the directory of the service": lambda secret: f"/proc/{os.getpid()}/root{secret}",
}


@pytest.mark.parametrize("what", PATHS)
def test_no_path_leads_out_of_a_sandbox(tmp_path: Path, what: str) -> None:
    require("sandbox")
    secret = tmp_path / "secret"
    secret.write_bytes(b"hidden content")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)

    async def main() -> None:
        async with local_service(tmp_path / "service", backend="sandbox") as caller:
            await caller.open()
            await caller.run("links", f"mkdir d; ln -s {secret} link; ln -s {tmp_path} dir")
            path = PATHS[what](secret)
            for method, place, body in (
                ("GET", "files", None),
                ("GET", "list", None),
                ("GET", "tree", None),
                ("PUT", "files", b"evil"),
                ("PUT", "tree", tar_of(member("x", content=b"evil"))),
                ("DELETE", "files", None),
            ):
                response = await caller.request(method, f"/v1/sandboxes/box/{place}", body=body, path=path)
                assert b"hidden content" not in response.content
                assert response.status < 500, response
            assert secret.read_bytes() == b"hidden content"
            assert sorted(os.listdir(tmp_path)) == ["secret", "service"]

    asyncio.run(main())


def test_paths_that_are_none_are_refused_in_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path, backend="process") as caller:
            await caller.open()
            for path in ("", "a%00b", "a%0d%0ab", "%ff%fe", "x" * 5000, "/".join(["d"] * 3000), "\\..\\x"):
                for method, place in (("GET", "files"), ("GET", "list"), ("GET", "tree"), ("DELETE", "files")):
                    response = await caller.request(method, f"/v1/sandboxes/box/{place}?path={path}")
                    assert response.code in ("invalid_action", "file_failed"), (path[:20], response)
                    assert set(response.headers) == {"content-type", "content-length"}
            for query in ("", "?path=a&path=b"):
                assert (await caller.request("GET", f"/v1/sandboxes/box/files{query}")).code == "invalid_action"

    asyncio.run(main())


def test_a_call_of_nonsense_is_the_fault_of_its_caller_alone(tmp_path: Path) -> None:
    require("sandbox")

    async def main() -> None:
        async with local_service(tmp_path, backend="sandbox") as caller:
            await caller.open()
            for number, paths in enumerate(
                (["/python3" + "9" * 5000 + ".zip"], ["/python3" + "9" * 4000 + ".zip"], [])
            ):
                function = {"name": f"f{number}", "pickled": "AAAA", "paths": paths}
                work = {"type": "Call", "function": function, "arguments": "AAAA"}
                response = await caller.submit(f"call-{number}", work)
                assert response.status in (200, 422), response
            assert (await caller.run("it", "echo hello")).json["settled"]["outcome"]["status"] == "succeeded"

    asyncio.run(main())


# ---- going away -------------------------------------------------------------------------------------------------


def test_disconnecting_at_any_moment_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = open_ports(monkeypatch)

    async def main() -> None:
        async with local_service(tmp_path) as caller:
            await caller.open()
            await caller.run("long", "sleep 1000", wait_s=0, follow=True)
            body = b'{"id":"lost","sandbox":"box","work":{"type":"Exec","command":"echo hello"}}'
            whole = b"POST /v1/actions?wait_s=5 HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % len(body) + body
            moments = [b"", b"P", whole[:20], whole[:80], whole[:-1], whole,
                       b"GET /v1/actions/long?wait_s=60 HTTP/1.1\r\n" + HOST + b"\r\n",
                       b"GET /v1/actions/long/output HTTP/1.1\r\n" + HOST + b"\r\n",
                       b"PUT /v1/sandboxes/box/files?path=x HTTP/1.1\r\n" + HOST + b"content-length: 10\r\n\r\n12345",
                       b"GET /v1/view HTTP/1.1\r\n" + HOST + b"\r\n"]  # fmt: skip
            for sent in moments:
                for is_rude in (False, True):
                    async with line(caller.address) as raw:
                        await raw.send(sent)
                        await until(lambda raw=raw: raw.port in ports)  # type: ignore[misc]
                        if is_rude:
                            raw.writer.transport.abort()
            assert (await caller.request("GET", "/v1/actions/lost", wait_s=30)).json["state"] == "settled"
            assert (await caller.request("GET", "/v1/sandboxes/box/list", path=".")).json == {"entries": []}
            await caller.request("POST", "/v1/actions/long/cancel")
            await is_well(caller)

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_service_that_stops_disconnects_clients_that_do_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GRACEFUL_SHUTDOWN_S", 1.0)
    ports = open_ports(monkeypatch)

    async def main() -> None:
        async with local_service(tmp_path, drain_s=0.0) as caller, line(caller.address) as raw:
            await caller.open()
            content = io.BytesIO(b"x" * (32 << 20))
            await caller.request("PUT", "/v1/sandboxes/box/files", body=content, path="large")
            raw.stop_reading()
            await raw.send(b"GET /v1/sandboxes/box/files?path=large HTTP/1.1\r\n" + HOST + b"\r\n")
            await until(lambda: raw.port in ports)

    asyncio.run(main())


def test_refused_requests_do_not_reach_the_manager(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, limits=SMALL) as (up, _, a, _):
            await a.open()
            manager = up.action_service.orchestrator.any_manager
            assert isinstance(manager, FakeManager)
            before = len(manager.calls)
            await a.request("PUT", "/v1/sandboxes/box/files", body=io.BytesIO(b"x" * (2 << 20)), path="f")
            await a.request("PUT", "/v1/sandboxes/box/tree", body=io.BytesIO(b"x" * (2 << 20)), path="f")
            await a.request("POST", "/v1/images", body=io.BytesIO(b"x" * (2 << 20)))
            await a.request("GET", "/v1/sandboxes/nobox/files", path="f")
            await a.request("PUT", "/v1/sandboxes/nobox/files", body=b"x", path="f")
            assert len(manager.calls) == before

    asyncio.run(main())
