"""The door: whatever is wrong with a request is answered in JSON with a code that stays, and changes nothing."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.http_caller import (
    ADMIN_TOKEN,
    Caller,
    line,
    local_service,
    make_run,
    open_caller,
    tenants,
    token_file,
)
from tests.server.shared import config_of, serving

from tangram.cli.serve import FORMAT, OneLineFormatter
from tangram.client.client import connect
from tangram.clock import SimClock
from tangram.config import RunLimits
from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.quotas.manager import Quota
from tangram.runtime.wire import NAME_LENGTH_MAX
from tangram.server.http.responses import STATUS_BY_CODE

JSON = {"content-type": "application/json"}


async def unchanged(caller: Caller) -> None:
    """Nothing was made and nothing is under way."""
    view = (await caller.request("GET", "/v1/view")).json
    assert (view["waiting_total"], view["running_total"], view["sandboxes_total"]) == (0, 0, 0)
    assert (await caller.request("GET", "/v1/timeline")).json["rows"] == []
    assert (await caller.request("GET", "/v1/runs")).json == {"runs": []}
    assert (await caller.request("GET", "/v1/quotas")).json == {"quotas": []}


# ---- bodies that are none ---------------------------------------------------------------------------------------

WORK = b'"sandbox":"box","work":{"type":"Open","spec":{}}'
BODIES = {
    "empty": (b"", "invalid_json"),
    "no JSON": (b"{", "invalid_json"),
    "blanks": (b" \r\n\t", "invalid_json"),
    "two": (b'{"id":"x",%s}{}' % WORK, "invalid_json"),
    "trailing comma": (b'{"id":"x",%s,}' % WORK, "invalid_json"),
    "single quotes": (b"{'id':'x'}", "invalid_json"),
    "comment": (b'{"id":"x" /* */,%s}' % WORK, "invalid_json"),
    "NaN": (b'{"id":"x","timeout_s":NaN,%s}' % WORK, "invalid_json"),
    "Infinity": (b'{"id":"x","timeout_s":Infinity,%s}' % WORK, "invalid_json"),
    "minus Infinity": (b'{"id":"x","timeout_s":-Infinity,%s}' % WORK, "invalid_json"),
    "no number": (b'{"id":"x","timeout_s":1e999,%s}' % WORK, "invalid_action"),
    "negative": (b'{"id":"x","timeout_s":-1,%s}' % WORK, "invalid_action"),
    "zero": (b'{"id":"x","timeout_s":0,%s}' % WORK, "invalid_action"),
    "huge whole number": (b'{"id":"x","priority":%s,%s}' % (b"9" * 4000, WORK), "invalid_action"),
    "huge units": (
        b'{"id":"x","demand":{"pools":{"cpu":{"min":1,"max":%s}}},%s}' % (b"9" * 40, WORK),
        "invalid_action",
    ),
    "huge memory": (
        b'{"id":"x","sandbox":"b","work":{"type":"Open","spec":{"memory_bytes":%s}}}' % (b"9" * 30),
        "invalid_action",
    ),
    "no text": (b'{"id":"\xff",%s}' % WORK, "invalid_json"),
    "UTF-16": ('{"id":"x"}'.encode("utf-16"), "invalid_json"),
    "lone surrogate": (b'{"id":"x","key":"\\ud800",%s}' % WORK, "invalid_json"),
    "NUL in text": (b'{"id":"x","key":"a\\u0000b",%s}' % WORK, "invalid_action"),
    "new line in text": (b'{"id":"x","key":"a\\nb",%s}' % WORK, "invalid_action"),
    "new line after a name": (b'{"id":"x\\n",%s}' % WORK, "invalid_action"),
    "an array": (b"[]", "invalid_action"),
    "a number": (b"1", "invalid_action"),
    "null": (b"null", "invalid_action"),
    "deep arrays": (b"[" * 500_000, "invalid_action"),
    "deep objects": (b'{"id":' * 200_000, "invalid_action"),
    "deep in an unknown field": (b'{"x":' + b"[" * 500_000, "invalid_action"),
    "unknown field": (b'{"id":"x","idd":"y",%s}' % WORK, "invalid_action"),
    "unknown inner field": (b'{"id":"x","sandbox":"b","work":{"type":"Open","spec":{"root":true}}}', "invalid_action"),
    "unknown work": (b'{"id":"x","sandbox":"b","work":{"type":"Prepare","spec":{}}}', "invalid_action"),
    "no work": (b'{"id":"x"}', "invalid_action"),
    "no id": (b"{%s}" % WORK, "invalid_action"),
    "wrong type": (b'{"id":7,%s}' % WORK, "invalid_action"),
    "number as text": (b'{"id":"x","timeout_s":"5",%s}' % WORK, "invalid_action"),
    "no base64": (b'{"id":"x","sandbox":"b","work":{"type":"Exec","command":"c","stdin":"*"}}', "invalid_action"),
    "no pool": (b'{"id":"x","demand":{"pools":{"nope":{"min":1,"max":1}}},%s}' % WORK, "invalid_action"),
}


def test_a_body_that_is_wrong_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for what, (body, code) in BODIES.items():
                response = await caller.request("POST", "/v1/actions", body=io.BytesIO(body), headers=JSON)
                assert (what, response.code) == (what, code)
                assert response.status == STATUS_BY_CODE[response.code] and len(response.content) < 4000
            await unchanged(caller)

    asyncio.run(main())


NAMED = f"1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' or '-', the first not '.' or '-'"
FIELDS = {
    b'{"id":"a b",%s}' % WORK: f"id: expected {NAMED}, got 'a b'",
    b'{"id":"x","sandbox":"/","work":{"type":"Close"}}': f"sandbox: expected an empty string, or {NAMED}, got '/'",
    b'{"id":"%s",%s}' % (b"y" * 101, WORK): "id: expected `str` of length <= 100, got 'yyy",
    b'{"id":7,%s}' % WORK: "id: expected `str`, got `int`",
    b'{"id":"x","idd":"y",%s}' % WORK: "idd: expected no field of this name, got 'y'",
    b'{"id":"x"}': "work: expected this required field, got none",
    b'{"id":"x","sandbox":"b","work":{"type":"Open","spec":{"root":true}}}': "work.spec.root: expected no field",
    b'{"id":"x","work":{"type":"No"}}': (
        "work.type: expected one of 'Call', 'Close', 'Commit', 'Exec', 'Hold', 'Infer', 'Open', 'Post', got 'No'"
    ),
    b'{"id":"x","priority":1000,%s}' % WORK: "priority: expected `int` <= 100, got 1000",
    b'{"id":"a b"%s,%s}' % (b" " * (64 << 10), WORK): f"id: expected {NAMED}, got something else",
    b"[]": "body: expected `object`, got `array`",
}


def test_an_error_names_the_field_of_the_body_and_what_it_takes(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for body, says in FIELDS.items():
                error = (await caller.request("POST", "/v1/actions", body=body, headers=JSON)).error
                assert error["message"].startswith(says) and error["field"] == says.partition(":")[0]
            error = (await caller.request("POST", "/v1/acknowledge", {"actions": ["x", "/"]})).error
            assert error["message"] == f"actions[1]: expected {NAMED}, got '/'"
            error = (await caller.request("PATCH", "/v1/nodes/local", {"state": "asleep"})).error
            assert error["message"] == "state: expected one of 'draining', 'up', got 'asleep'"

    asyncio.run(main())


RECORDS = [
    ("POST", "/v1/acknowledge"),
    ("POST", "/v1/actions/x/release"),
    ("PUT", "/v1/image-keys/x"),
    ("PUT", "/v1/quotas"),
    ("POST", "/v1/quotas/x/responses"),
    ("POST", "/v1/runs/x"),
    ("PUT", "/v1/weights/x"),
    ("PATCH", "/v1/pools/cpu@local"),
    ("PATCH", "/v1/nodes/local"),
]


def test_so_is_it_at_every_other_address(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for method, path in RECORDS:
                await refuses(caller, method, path)
            await unchanged(caller)

    async def refuses(caller: Caller, method: str, path: str) -> None:
        for body, code in (
            (b"", "invalid_json"),
            (b"{", "invalid_json"),
            (b"\xff", "invalid_json"),
            (b"[]", "invalid_action"),
            (b'{"what":1}', "invalid_action"),
            (b"[" * 100_000, "invalid_action"),
            (b'{"total":%s,"weight":1e999}' % (b"9" * 100), "invalid_action"),
        ):
            response = await caller.request(method, path, body=body, headers=JSON)
            assert response.code == code, (body[:20], response)
        response = await caller.request(method, path, body=b"{}", headers={"content-type": "text/plain"})
        assert response.code == "wrong_content_type"

    asyncio.run(main())


@pytest.mark.parametrize("caps", ['{"sandboxes_max":%d}', '{"waiting_max":%d}', '{"running_max":%d}'])
def test_caps_that_cannot_be_kept_are_refused(tmp_path: Path, caps: str) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for number in (10**30, 1 << 53, 0, -1):
                body = b'{"caps":%s}' % (caps % number).encode()
                assert (await caller.request("POST", "/v1/runs/x", body=body, headers=JSON)).code == "invalid_action"
            await unchanged(caller)

    asyncio.run(main())


def test_of_a_key_that_is_there_twice_the_last_one_counts(tmp_path: Path) -> None:
    """One parser reads all of it, so no check of the first one was bypassed."""

    async def main() -> None:
        async with local_service(tmp_path) as caller:
            response = await caller.request(
                "POST", "/v1/actions", body=b'{"id":"one","id":"two",%s}' % WORK, headers=JSON
            )
            assert response.json["id"] == "two"
            assert (await caller.request("GET", "/v1/actions/one", wait_s=0)).code == "not_found"

    asyncio.run(main())


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/xml", "multipart/form-data; boundary=x", "application/jsonp", ";"]
)
def test_a_body_without_the_json_content_type_is_refused(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            body = b'{"id":"x",%s}' % WORK
            response = await caller.request("POST", "/v1/actions", body=body, headers={"content-type": kind})
            assert (response.status, response.code) == (415, "wrong_content_type")
            await unchanged(caller)

    asyncio.run(main())


def test_an_error_is_never_as_large_as_what_was_wrong(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            long = "x" * 1_000_000
            work = {"type": "Exec", "command": "true"}
            for record in (
                {"id": long},
                {"id": "x", long: 1},
                {"id": "x", "sandbox": "b", "work": work | {"env": {long: "a\0b"}}},
                {"id": "x", "sandbox": "b", "work": work | {"env": {f"{long}=": "y"}}},
                {"id": "x", "sandbox": "b", "work": work | {"command": long + "\0"}},
                {"id": "x", "sandbox": "b", "work": work, "demand": {"pools": {long: {"min": 1, "max": 1}}}},
                {"id": "x", "sandbox": "b", "work": {"type": "Open", "spec": {"image": long}}},
            ):
                response = await caller.request("POST", "/v1/actions", record)
                assert response.status == 422 and len(response.content) < 10_000, response.content[:200]

    asyncio.run(main())


# ---- addresses, methods, queries --------------------------------------------------------------------------------


NOWHERE = ["/nowhere", "/v1", "/v1/", "/v1/about/", "/v1/actions/", "//v1/about", "/v1//about", "/V1/about",
           "/v1/about%2F", "/v1/..%2fv1/about", "/dashboard/../../../etc/passwd", "/dashboard/..%2f..%2fapi.py",
           "/dashboard/%00", "/%2e%2e/%2e%2e/etc/passwd", "/dashboard/", "/etc/passwd", "/v1/about%00",
           "/v1/about%0d%0aset-cookie:x=1"]  # fmt: skip


def test_an_unknown_path_is_not_found_without_a_redirect(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for path in NOWHERE:
                response = await caller.request("GET", path, headers={"x-forwarded-host": "evil.example"})
                assert (path, response.status, response.code) == (path, 404, "not_found")
                assert "location" not in response.headers and "set-cookie" not in response.headers

    asyncio.run(main())


def test_a_wrong_method_gets_the_allowed_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for method, path, allowed in (
                ("DELETE", "/v1/actions", "POST"),
                ("GET", "/v1/acknowledge", "POST"),
                ("PATCH", "/v1/sandboxes/x/files", "DELETE, GET, HEAD, PUT"),
                ("PUT", "/v1/runs/x", "DELETE, PATCH, POST"),
                ("OPTIONS", "/v1/about", "GET, HEAD"),
                ("TRACE", "/healthz", "GET, HEAD"),
                ("POST", "/openapi.json", "GET, HEAD"),
            ):
                response = await caller.request(method, path)
                assert (response.status, response.code, response.headers["allow"]) == (
                    405,
                    "no_such_method",
                    allowed,
                ), path
            await unchanged(caller)

    asyncio.run(main())


BAD_NAMES = ["%2e%2e", ".", "..%2fx", "x%2fy", "%00", "x%00", "x%0a", "x%0d%0ay", "%5c..%5cx", "x%5cy", "%c3%a9", "%ff",
             "x%20y", "-x", ".x", "x:y", "%e2%80%ae", "x" * 101, "x%2f..%2fetc%2fpasswd", "%252e%252e"]  # fmt: skip


def test_names_in_paths_reach_only_the_named_object(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            requests: list[tuple[str, str, Any]] = [
                ("GET", "/v1/actions/{}", None),
                ("GET", "/v1/actions/{}/output", None),
                ("POST", "/v1/actions/{}/cancel", None),
                ("POST", "/v1/actions/{}/release", {}),
                ("GET", "/v1/actions/{}/story", None),
                ("GET", "/v1/sandboxes/{}", None),
                ("DELETE", "/v1/sandboxes/{}", None),
                ("GET", "/v1/sandboxes/{}/files", None),
                ("PUT", "/v1/sandboxes/{}/files", {}),
                ("DELETE", "/v1/sandboxes/{}/files", None),
                ("GET", "/v1/sandboxes/{}/list", None),
                ("GET", "/v1/sandboxes/{}/tree", None),
                ("PUT", "/v1/sandboxes/{}/tree", {}),
                ("DELETE", "/v1/images/{}", None),
                ("GET", "/v1/image-keys/{}", None),
                ("PUT", "/v1/image-keys/{}", {"name": "host"}),
                ("POST", "/v1/runs/{}", {}),
                ("PATCH", "/v1/runs/{}", {}),
                ("DELETE", "/v1/runs/{}", None),
                ("PUT", "/v1/weights/{}", {"weight": 1.0}),
                ("PATCH", "/v1/pools/{}", {"total": 1}),
                ("PATCH", "/v1/nodes/{}", {"state": "up"}),
            ]
            for name, (method, path, record) in itertools.product(BAD_NAMES, requests):
                response = await caller.request(method, path.format(name), record, path="x", wait_s=0)
                assert response.code in ("invalid_action", "not_found", "no_such_method"), (
                    method,
                    path,
                    name,
                    response,
                )
                assert len(response.headers) == len({*response.headers} & {"content-type", "content-length", "allow"})
            await unchanged(caller)

    asyncio.run(main())


QUERIES = ["wait_s=x", "wait_s=-1", "wait_s=61", "wait_s=nan", "wait_s=inf", "wait_s=1&wait_s=2", "wait_s=",
           "until=never", "wait_s=1e400", "wait_s=%00", f"wait_s={'9' * 5000}",
           "until=started&until=settled"]  # fmt: skip
NUMBERS = ["-1", "x", "1.5", "١", "0x10", "9" * 5000, "", "1e3", "+1", " 1", "9007199254740993"]


def test_words_of_a_query_that_are_wrong_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for query in QUERIES:
                response = await caller.request("GET", f"/v1/actions/x?{query}")
                assert response.code == "invalid_action" and response.error["field"] in ("wait_s", "until"), query
            for number in NUMBERS:
                assert (await caller.request("GET", "/v1/timeline", after=number)).code == "invalid_action", number
                assert (await caller.request("GET", "/v1/timeline", limit=number)).code == "invalid_action", number

    asyncio.run(main())


# ---- bytes that are no HTTP -------------------------------------------------------------------------------------


NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,
    b"GET / HTTP/9.9\r\n\r\n",
    b"HELLO\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
    b"GET / HTTP/1.1\r\nno header\r\n\r\n",
    b"POST /v1/actions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n123456",
    b"POST /v1/actions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/actions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
]


def test_what_is_no_http_is_refused_in_json_and_cut_off(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller:
            for sent in NO_HTTP:
                async with line(caller.address) as raw:
                    await raw.send(sent)
                    status, body = await raw.answer()
                    assert (sent, status, msgspec.json.decode(body)["error"]["code"]) == (sent, 400, "invalid_http")
                    assert await raw.ended() == b""
            await unchanged(caller)

    asyncio.run(main())


def test_what_is_no_http_is_logged_once_with_its_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw:
            await raw.send(NO_HTTP[0])
            await raw.ended()

    asyncio.run(main())
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert messages == ["malformed request address='127.0.0.1'"]


def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw:
            paths = [b"/healthz", b"/nowhere", b"/readyz", b"/healthz"] * 50
            await raw.send(b"".join(b"GET %s HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % path for path in paths))
            statuses = [(await raw.answer())[0] for _ in paths]
            assert statuses == [200, 404, 200, 200] * 50

    asyncio.run(main())


def test_a_request_to_upgrade_is_answered_in_this_protocol(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with local_service(tmp_path) as caller, line(caller.address) as raw:
            upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n"
            await raw.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n%s\r\n" % upgrade)
            assert (await raw.answer())[0] == 200

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# ---- logs -------------------------------------------------------------------------------------------------------

FORGED = "2026-01-01 00:00:00 ERROR tangram.server all tokens are void"


def test_no_request_can_inject_a_line_into_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with local_service(tmp_path) as caller:
            await caller.open()
            await caller.request("GET", f"/v1/actions/x%0a{FORGED.replace(' ', '%20')}")
            await caller.request("GET", f"/v1/sandboxes/box/files?path=x%0a{FORGED.replace(' ', '%20')}")
            await caller.request("GET", f"/v1/sandboxes/box/files?path=x%e2%80%a8{FORGED.replace(' ', '%20')}")
            await caller.run("it", f"echo '\n{FORGED}'; nosuch\n{FORGED}")
            await caller.request(
                "GET", "/v1/about", headers={"x-forwarded-for": FORGED, "authorization": f"Bearer {FORGED}"}
            )
            await caller.submit("z", {"type": "Exec", "command": "x", "cwd": f"\n{FORGED}"}, sandbox="box")

    asyncio.run(main())
    wrong = [record for record in caplog.records if "wrong token" in record.getMessage()]
    assert wrong and all("'" in record.getMessage() for record in wrong), "an address is quoted: it may be anything"
    shown = "\n".join(OneLineFormatter(FORMAT).format(record) for record in caplog.records)
    assert not [said for said in shown.splitlines() if said.startswith(FORGED)]


def test_a_record_of_the_log_is_one_line_whatever_is_in_it() -> None:
    for text in ("a\nb", "a\rb", "a\u2028b", "a\x85b", "a\x1b[2Jb", "a\0b", "a\u202eb", "a\x0bb\x0cc"):
        record = logging.LogRecord("tangram", logging.INFO, "", 0, "said %s", (text,), None)
        shown = OneLineFormatter(FORMAT).format(record)
        assert len(shown.splitlines()) == 1 and shown.isprintable()


# ---- limits, by their names -------------------------------------------------------------------------------------


def test_limits_of_a_run_are_refused_by_their_names(tmp_path: Path) -> None:
    async def main() -> None:
        limits = RunLimits(body_bytes_max=2 << 20, file_bytes_max=2048, sandboxes_max=2, waiting_max=3)
        async with tenants(tmp_path, limits=limits, quotas=[Quota("search", 1)]) as (_, _, a, b):
            await a.open("box")
            await a.open("other")
            third = await a.submit("open-3", {"type": "Open", "spec": {}}, sandbox="third")
            assert (third.status, third.code, third.error["limit"]) == (429, "refused", "sandboxes_max")
            network = await b.submit("n", {"type": "Open", "spec": {"network": True}}, sandbox="n")
            assert (network.code, network.error["limit"]) == ("refused", "network")
            work = {"type": "Exec", "command": "true", "capture_bytes_max": (2 << 20) + 1}
            capture = await a.submit("c", work, sandbox="box")
            assert (capture.code, capture.error["limit"]) == ("refused", "capture_bytes_max")
            large = await a.request("POST", "/v1/actions", body=io.BytesIO(b"x" * (3 << 20)), headers=JSON)
            assert (large.status, large.code, large.error["limit"]) == (413, "too_large", "body_bytes_max")
            for path in ("files", "tree"):
                file = await a.request("PUT", f"/v1/sandboxes/box/{path}", body=b"x" * 2049, path="f")
                assert (file.status, file.code, file.error["limit"]) == (413, "too_large", "file_bytes_max")
            image = await a.request("POST", "/v1/images", body=b"x" * 2049)
            assert image.error["limit"] == "file_bytes_max"
            for number in range(3):
                assert (await a.run(f"wait-{number}", "sleep 1000", wait_s=0)).status == 202
            fourth = await a.run("wait-4", "true", wait_s=0)
            assert (fourth.status, fourth.code, fourth.error["limit"]) == (429, "refused", "waiting_max")
            # What is under way already is no new one, and others have their own.
            assert (await a.run("wait-0", "sleep 1000", wait_s=0)).status == 202
            await b.open()
            assert (await b.run("it", "true")).status == 200
            for number in range(3):
                await a.request("POST", f"/v1/actions/wait-{number}/cancel")
                await a.until(f"wait-{number}", "settled")
            assert (await a.run("wait-4", "true")).status == 200

    asyncio.run(main())


def test_the_images_of_a_run_are_limited_and_one_may_be_built_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, limits=RunLimits(images_max=2), backend="fake") as (_, _, a, b):
            first = (await a.request("POST", "/v1/images", body=b"tar")).json["name"]
            await a.open()
            assert (await a.submit("c", {"type": "Commit", "image": "mine"}, sandbox="box")).status == 200
            more = await a.request("POST", "/v1/images", body=b"another")
            assert (more.status, more.code, more.error["limit"]) == (429, "refused", "images_max")
            other = await a.submit("d", {"type": "Commit", "image": "other"}, sandbox="box")
            assert (other.code, other.error["limit"]) == ("refused", "images_max")
            assert (await a.submit("e", {"type": "Commit", "image": "mine"}, sandbox="box")).status == 200
            assert (await b.request("POST", "/v1/images", body=b"another")).status == 200
            assert (await a.request("DELETE", f"/v1/images/{first}")).status == 204
            assert (await a.submit("f", {"type": "Commit", "image": "other"}, sandbox="box")).status == 200

    asyncio.run(main())


def test_no_image_is_committed_as_host_which_sandboxes_would_not_be_opened_from(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, _, a, _):
            await a.open()
            refused = await a.submit("c", {"type": "Commit", "image": "host"}, sandbox="box")
            assert (refused.status, refused.error["field"]) == (422, "image")
            assert "another name: 'host' always means this machine" in refused.error["message"]

    asyncio.run(main())


def test_limits_that_the_admin_gave_a_run_are_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, {"sandboxes_max": 1, "waiting_max": 1, "network": True}) as (_, admin, a, _):
            await a.open("box", network=True)
            more = await a.submit("two", {"type": "Open", "spec": {}}, sandbox="two")
            assert more.error["limit"] == "sandboxes_max"
            await a.run("one", "sleep 1000", wait_s=0)
            assert (await a.run("two", "true")).error["limit"] == "waiting_max"
            changed = await admin.request("PATCH", f"/v1/runs/{a.name}", {"caps": {"waiting_max": 5}})
            assert changed.status == 200
            assert (await a.run("two", "true")).status == 200

    asyncio.run(main())


def test_too_many_waiting_requests_get_a_retry_after(tmp_path: Path) -> None:
    async def main() -> None:
        limits = RunLimits(requests_per_s=1000.0, requests_burst=1000)
        async with tenants(tmp_path, limits=limits, clock=SimClock()) as (_, admin, _, b):
            slow = await make_run(admin, "slow", {"requests_per_s": 0.01})
            first, *refused = [await slow.request("GET", "/v1/about") for _ in range(20)]
            assert first.status == 200
            for each in refused:
                assert (each.status, each.code, each.error["limit"]) == (429, "rate", "requests_per_s")
                assert each.error["retry"] is True and each.headers["retry-after"] == "100"
            assert (await b.request("GET", "/v1/about")).status == 200

    asyncio.run(main())


def test_what_runs_beyond_its_cap_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, {"running_max": 1}) as (_, _, a, b):
            await a.open()
            await b.open()
            await a.run("first", "sleep 1000", wait_s=0)
            await a.until("first", "running")
            assert (await a.run("second", "echo two", wait_s=0)).json["state"] == "queued"
            assert (await b.run("other", "echo b")).json["state"] == "settled"
            assert (await a.request("GET", "/v1/actions/second", wait_s=0)).json["state"] == "queued"
            await a.request("POST", "/v1/actions/first/cancel")
            ended = (await a.request("GET", "/v1/actions/second", wait_s=30)).json["settled"]
            assert ended["outcome"]["status"] == "succeeded"

    asyncio.run(main())


def test_connections_have_a_limit_that_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, limits=RunLimits(connections_max=3)) as up:
            async with line(up.address) as one, line(up.address) as two, line(up.address) as three:
                for each in (one, two, three):
                    await each.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert (await each.answer())[0] == 200
                async with line(up.address) as fourth:
                    status, body = await fourth.answer()
                    fault = msgspec.json.decode(body)["error"]
                    assert (status, fault["code"], fault["limit"]) == (429, "rate", "connections_max")
                    assert await fourth.ended() == b""
            async with open_caller(up.address) as caller:
                for _ in range(100):  # as soon as those have gone
                    try:
                        response = await caller.request("GET", "/healthz")
                    except OSError:
                        continue
                    if response.status == 200:
                        break
                assert response.status == 200

    asyncio.run(main())


# ---- listening --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7433", "tangram.example:7433", "[2001:db8::1]:1"])
def test_a_public_address_requires_a_token(tmp_path: Path, listen: str) -> None:
    with pytest.raises(InvalidConfig, match="admin_token_file"):
        config_of(tmp_path, listen=listen)
    config_of(tmp_path, listen=listen, admin_token_file=str(token_file(tmp_path)))


def test_on_a_public_address_every_request_needs_the_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, listen="0.0.0.0:0", admin_token_file=str(token_file(tmp_path))) as up:
            address = up.address.replace("0.0.0.0", "127.0.0.1")
            async with open_caller(address) as anonymous:
                assert (await anonymous.request("GET", "/v1/about")).code == "unauthorized"
                assert (await anonymous.request("GET", "/healthz")).status == 200
            async with open_caller(address, ADMIN_TOKEN) as admin:
                assert (await admin.request("GET", "/v1/about")).json["admin"] is True

    asyncio.run(main())


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing")
    pem, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(pem)],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    key.chmod(0o600)
    return {"tls_certificate": str(pem), "tls_key": str(key)}


def test_over_tls_only_clients_that_trust_the_certificate_connect(tmp_path: Path, certificate: dict[str, str]) -> None:
    async def main() -> None:
        async with serving(tmp_path, admin_token_file=str(token_file(tmp_path)), **certificate) as up:
            assert up.address.startswith("https://")
            trusting = connect(up.address, token=ADMIN_TOKEN, ca=certificate["tls_certificate"])
            async with trusting as client, client.sandbox() as box:
                assert (await box.exec("echo hello")).stdout == "hello\n"
            with pytest.raises(InvalidConfig, match="certificate"):
                async with connect(up.address, token=ADMIN_TOKEN):
                    pass

    asyncio.run(main())


def test_plain_http_at_a_port_of_tls_fails_cleanly(
    tmp_path: Path, certificate: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(tmp_path, **certificate) as up:
            plain = up.address.replace("https://", "http://")
            async with line(plain) as raw:
                await raw.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"HTTP/1.1 200" not in await raw.ended()
            with pytest.raises(ManagerError, match="if it speaks TLS, use an address with https://"):
                async with connect(plain):
                    pass
            trust = ssl.create_default_context(cafile=certificate["tls_certificate"])
            async with line(up.address, ssl=trust) as secure:
                await secure.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await secure.answer())[0] == 200

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
