"""Tenants: what one run can find out about another, which is nothing, and do to it, which is nothing either."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from tests.client.conftest import why_not
from tests.server.http_caller import Answer, Caller, Line, line, make_run, tenants

from tangram.managers.fake import FakeManager
from tangram.managers.quotas.manager import Quota
from tangram.runtime.views import HIDDEN_NAME

SECRETS = (
    "alphaville",
    "secretbox",
    "secretimage",
    "secretkey",
    "secrettask",
    "secrettraj",
    "secretaction",
    "secretfile",
)
"""Every name of run A. Run B must never receive one that it did not send itself."""


SEEN = [
    "/v1/view",
    "/v1/timeline",
    "/v1/timeline?after=0&limit=9",
    "/v1/timeline/trace-events",
    "/v1/pool-usage",
    "/v1/sandboxes",
    "/v1/actions/mine/story",
    "/v1/actions/mine-hold/story",
    "/v1/quotas",
    "/v1/services",
    "/v1/about",
    "/openapi.json",
    "/readyz",
]


async def furnish(a: Caller) -> None:
    """Run A with one of everything."""
    await a.open("secretbox")
    await a.request("PUT", "/v1/sandboxes/secretbox/files", body=b"hidden content", path="secretfile")
    done = await a.submit("secretaction-commit", {"type": "Commit", "image": "secretimage"}, sandbox="secretbox")
    assert done.json["settled"]["outcome"]["status"] == "succeeded"
    await a.request("PUT", "/v1/image-keys/secretkey", {"name": "secretimage"})
    words = {"task": "secrettask", "trajectory": "secrettraj", "key": "secretkey"}
    await a.run("secretaction-done", "echo hidden content", sandbox="secretbox", follow=True, **words)
    await a.run("secretaction", "sleep 1000", sandbox="secretbox", wait_s=0, follow=True, **words)
    await a.until("secretaction", "running")
    hold = {"pools": {"search": {"min": 1, "max": 1}}}
    await a.submit("secretaction-hold", {"type": "Hold"}, 0, demand=hold, **words)
    await a.until("secretaction-hold", "running")


def requests_naming(action: str, box: str, image: str, key: str) -> list[tuple[str, str, Any]]:
    """Every address at which something is named."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as writer:
        writer.addfile(tarfile.TarInfo("x"), io.BytesIO())
    content = {"status": 429, "headers": {"retry-after": "3600"}, "action": "x"}
    return [
        ("GET", f"/v1/actions/{action}?wait_s=0", None),
        ("GET", f"/v1/actions/{action}?wait_s=0&until=started", None),
        ("GET", f"/v1/actions/{action}/output", None),
        ("POST", f"/v1/actions/{action}/cancel", None),
        ("POST", f"/v1/actions/{action}/release", {"spent": {"search": 0}}),
        ("GET", f"/v1/actions/{action}/story", None),
        ("GET", f"/v1/sandboxes/{box}", None),
        ("GET", f"/v1/sandboxes/{box}/files?path=secretfile", None),
        ("GET", f"/v1/sandboxes/{box}/files?path=/work/secretfile", None),
        ("PUT", f"/v1/sandboxes/{box}/files?path=secretfile", b"other"),
        ("DELETE", f"/v1/sandboxes/{box}/files?path=secretfile", None),
        ("GET", f"/v1/sandboxes/{box}/list?path=.", None),
        ("GET", f"/v1/sandboxes/{box}/tree?path=.", None),
        ("PUT", f"/v1/sandboxes/{box}/tree?path=.", tar.getvalue()),
        ("DELETE", f"/v1/sandboxes/{box}", None),
        ("DELETE", f"/v1/images/{image}", None),
        ("GET", f"/v1/image-keys/{key}", None),
        ("PUT", f"/v1/image-keys/{key}", {"name": image}),
        ("PUT", "/v1/image-keys/other", {"name": image}),
        ("POST", "/v1/quotas/search/responses", content | {"action": action}),
    ]


def submissions(action: str, box: str, image: str) -> list[dict[str, Any]]:
    """Work on what is named, each in the name of an action that ends at once."""
    program = {"type": "Exec", "command": "cat secretfile"}
    return [
        {"id": "try-exec", "work": program, "sandbox": box},
        {"id": "try-commit", "work": {"type": "Commit", "image": "stolen"}, "sandbox": box},
        {"id": "try-open", "work": {"type": "Open", "spec": {"image": image}}, "sandbox": "fresh"},
        {"id": action, "work": program, "sandbox": box, "run": "alphaville"},
    ]


async def send_request(caller: Caller, request: tuple[str, str, Any]) -> Answer:
    method, path, content = request
    if isinstance(content, bytes):
        return await caller.request(method, path, body=content)
    return await caller.request(method, path, content)


WAYS = [
    lambda name: name,
    lambda name: f"alphaville/{name}",
    lambda name: f"alphaville%2F{name}",
    lambda name: f"alphaville:{name}",
    lambda name: f"..%2Falphaville%2F{name}",
    lambda name: f"%2e%2e/alphaville/{name}",
    lambda name: quote(f"alphaville\\{name}"),
    lambda name: f"bogota%2F..%2Falphaville%2F{name}",
]
"""To say a name of another run."""


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_sandboxes_of_other_runs_and_missing_sandboxes_have_the_same_error(tmp_path: Path, way: int) -> None:
    async def main() -> None:
        async with tenants(tmp_path, quotas=[Quota("search", 4)]) as (_, _, a, b):
            await furnish(a)
            before = (await a.request("GET", "/v1/view")).json
            real = [WAYS[way](name) for name in ("secretaction", "secretbox", "secretimage", "secretkey")]
            made_up = [WAYS[way](name) for name in ("nosuchaction", "nosuchbox", "nosuchimage", "nosuchkey")]
            for there, nowhere in zip(requests_naming(*real), requests_naming(*made_up), strict=True):
                responses, nothing = await send_request(b, there), await send_request(b, nowhere)
                assert (responses.status, neutral(responses)) == (nothing.status, neutral(nothing)), there
                assert responses.status == 204 or responses.status >= 400 or responses.json == {"name": ""}, (
                    there,
                    responses,
                )
                assert b"hidden content" not in responses.content
            for one, other in zip(submissions(*real[:3]), submissions(*made_up[:3]), strict=True):
                responses = await b.request("POST", "/v1/actions", one, wait_s=30)
                nothing = await b.request("POST", "/v1/actions", other | {"id": f"{other['id']}-2"[-90:]}, wait_s=30)
                assert (responses.status, neutral(responses)) == (nothing.status, neutral(nothing)), one
            # And nothing has happened to it.
            after = (await a.request("GET", "/v1/view")).json
            assert (after["running_total"], after["sandboxes_total"]) == (before["running_total"], 1)
            assert (await a.request("GET", "/v1/actions/secretaction", wait_s=0)).json["state"] == "running"
            assert (await a.request("GET", "/v1/actions/secretaction-hold", wait_s=0)).json["state"] == "running"
            content = await a.request("GET", "/v1/sandboxes/secretbox/files", path="secretfile")
            assert content.content == b"hidden content"
            assert (await a.request("GET", "/v1/image-keys/secretkey")).json == {"name": "secretimage"}
            pool = next(pool for pool in after["pools"] if pool["name"] == "search")
            assert pool["total"] == 4, "advice of a run that holds nothing counted"

    asyncio.run(main())


def neutral(answer: Answer) -> bytes:
    """Without the names that were sent, of which the pairs have the same length but one letter group."""
    content = answer.content
    for one, other in (("secret", "*"), ("nosuch", "*"), ("try-exec-2", "try-exec"), ("try-commit-2", "try-commit"),
                       ("try-open-2", "try-open")):  # fmt: skip
        content = content.replace(one.encode(), other.encode())
    if answer.status == 200:  # times differ
        document = answer.json
        outcome = (document.get("settled") or {}).get("outcome")
        if outcome is not None:
            content = f"{document['state']} {outcome['status']} {outcome['reason']}".encode()
            content = content.replace(b"secret", b"*").replace(b"nosuch", b"*")
    return content.replace(b"-2", b"")


def test_a_name_of_one_run_is_free_for_all_other_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, quotas=[Quota("search", 4)]) as (_, _, a, b):
            await furnish(a)
            await b.open("secretbox")
            response = await b.run("secretaction", "echo mine", sandbox="secretbox")
            assert response.json["settled"]["executed"]["stdout"] == "bWluZQo="
            assert (await b.request("GET", "/v1/sandboxes/secretbox/list", path=".")).json == {"entries": []}
            assert (await b.request("DELETE", "/v1/sandboxes/secretbox")).status == 204
            assert (
                await b.request("POST", "/v1/acknowledge", {"actions": ["secretaction", "secretaction-done"]})
            ).status == 204
            assert (await a.request("GET", "/v1/sandboxes/secretbox")).json["name"] == "secretbox"
            assert (await a.request("GET", "/v1/actions/secretaction-done", wait_s=0)).json["state"] == "settled"
            assert (await a.request("GET", "/v1/actions/secretaction", wait_s=0)).json["state"] == "running"

    asyncio.run(main())


def test_a_run_sees_that_other_runs_hold_units_but_none_of_their_names(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, quotas=[Quota("search", 1)], cores=2.0) as (_, admin, a, b):
            await admin.request("PATCH", f"/v1/runs/{a.name}", {"caps": {"running_max": 3}})
            await furnish(a)
            await b.open()
            whole = {"pools": {"cpu": {"min": 2000, "max": 2000}}}
            await a.run("secretaction-hog", "sleep 1000", sandbox="secretbox", wait_s=0, demand=whole)
            await b.run("mine", "sleep 1000", wait_s=0, demand=whole)
            hold = {"pools": {"search": {"min": 1, "max": 1}}}
            await b.submit("mine-hold", {"type": "Hold"}, 0, demand=hold)
            for path in SEEN:
                response = await b.request("GET", path)
                assert response.status == 200
                for secret in SECRETS:
                    assert secret not in response.content.decode(), (path, secret)
            view = (await b.request("GET", "/v1/view")).json
            holders = [holder for pool in view["pools"] for holder in pool["holders"]]
            assert {holder["run"] for holder in holders} == {HIDDEN_NAME, b.name}
            assert all(holder["id"] == HIDDEN_NAME for holder in holders if holder["run"] == HIDDEN_NAME)
            assert {run["name"] for run in view["runs"]} == {HIDDEN_NAME, b.name}
            assert all(action["run"] == b.name for action in (*view["running"], *view["waiting"]))
            everything = (await admin.request("GET", "/v1/view")).content.decode()
            assert a.name in everything and "secretbox" in everything

    asyncio.run(main())


@pytest.mark.parametrize("backend", ["fake", "process", "sandbox"])
def test_error_messages_name_nothing_of_other_runs(tmp_path: Path, backend: str) -> None:
    """An image that is forgotten before the sandbox is made of it: the store could say which ones it has."""
    reason = why_not() if backend == "sandbox" else ""
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)

    async def main() -> None:
        async with tenants(tmp_path, {"running_max": 1}, backend=backend) as (_, _, a, b):
            await a.open("secretbox")
            await a.submit("c", {"type": "Commit", "image": "secretimage"}, sandbox="secretbox")
            await b.open()
            await b.submit("c", {"type": "Commit", "image": "mine"}, sandbox="box")
            await b.run("first", "sleep 1000", wait_s=0)
            await b.until("first", "running")
            await b.submit("late", {"type": "Open", "spec": {"image": "mine"}}, 0, sandbox="late")
            assert (await b.request("DELETE", "/v1/images/mine")).status == 204
            await b.request("POST", "/v1/actions/first/cancel")
            response = await b.request("GET", "/v1/actions/late", wait_s=30)
            ended = response.json["settled"]
            assert ended["outcome"]["status"] != "succeeded" and "mine" in response.content.decode()
            for secret in SECRETS:
                assert secret not in response.content.decode()

    asyncio.run(main())


def test_a_run_that_ends_takes_everything_along_and_leaves_other_runs_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, quotas=[Quota("search", 4)]) as (_, admin, a, b):
            await furnish(a)
            await b.open()
            await b.run("mine", "echo b")
            await b.submit("c", {"type": "Commit", "image": "mine"}, sandbox="box")
            assert (await admin.request("DELETE", f"/v1/runs/{a.name}")).status == 204
            view = (await admin.request("GET", "/v1/view")).json
            assert [box["run"] for box in view["sandboxes"]] == [b.name] and view["running_total"] == 0
            again = (await admin.request("POST", f"/v1/runs/{a.name}", {})).json["token"]
            other = Caller(a.session, a.address, again, a.name)
            for request in requests_naming("secretaction", "secretbox", "secretimage", "secretkey"):
                response = await send_request(other, request)
                assert response.status == 204 or response.status >= 400 or response.json == {"name": ""}, request
            assert (await other.request("GET", "/v1/actions/secretaction-done", wait_s=0)).code == "not_found"
            assert (await b.request("GET", "/v1/actions/mine", wait_s=0)).json["state"] == "settled"
            assert (await b.request("DELETE", "/v1/images/mine")).status == 204

    asyncio.run(main())


UNDER_WAY = {
    "an opening": ("POST", "/v1/actions", {"id": "o", "sandbox": "late", "work": {"type": "Open", "spec": {}}}),
    "a program": ("POST", "/v1/actions", {"id": "e", "sandbox": "box", "work": {"type": "Exec", "command": "true"}}),
    "an image": ("POST", "/v1/images", b"the bytes of an image"),
    "the key of an image": ("PUT", "/v1/image-keys/late", {"name": "host"}),
    "a file": ("PUT", "/v1/sandboxes/box/files?path=late", b"the bytes of a file"),
    "a tree": ("PUT", "/v1/sandboxes/box/tree?path=.", b"the bytes of a tree"),
    "what has arrived": ("POST", "/v1/acknowledge", {"actions": ["open-box"]}),
    "the end of a hold": ("POST", "/v1/actions/h/release", {"spent": None}),
    "what an API said": ("POST", "/v1/quotas/search/responses", {"status": 429, "action": "h"}),
}
"""Requests with a body, of a run that has a sandbox `box`."""


async def begin(raw: Line, token: str, method: str, path: str, body: bytes) -> None:
    """All of a request but the end of its body. Returns when the service reads it, which answers in order."""
    head = f"host: 127.0.0.1\r\nauthorization: Bearer {token}\r\n"
    await raw.send(f"GET /v1/about HTTP/1.1\r\n{head}\r\n".encode())
    assert (await raw.answer())[0] == 200
    length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
    await raw.send(f"{method} {path} HTTP/1.1\r\n{head}{length}".encode())
    assert b" 100 " in await raw.reader.readuntil(b"\r\n\r\n")  # sent when the body is read
    await raw.send(body[:5])


@pytest.mark.parametrize("what", UNDER_WAY)
@pytest.mark.parametrize("again", [False, True], ids=["revoked", "made again"])
def test_what_is_under_way_when_its_run_is_revoked_comes_to_nothing(tmp_path: Path, what: str, again: bool) -> None:
    method, path, content = UNDER_WAY[what]
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)

    async def main() -> None:
        async with tenants(tmp_path, quotas=[Quota("search", 4)]) as (up, admin, a, _), line(up.address) as raw:
            await a.open()
            await begin(raw, a.token, method, path, body)
            assert (await admin.request("DELETE", f"/v1/runs/{a.name}")).status == 204
            other = await make_run(admin, a.name) if again else None
            if other is not None:
                await other.open()
            await raw.send(body[5:])
            status, response = await raw.answer()
            unknown = await Caller(a.session, a.address, "tgr_unknown").request("GET", "/v1/about")
            assert (status, response) == (401, unknown.content)
            other = other or await make_run(admin, a.name)
            shown = (await other.request("GET", "/v1/sandboxes")).json["sandboxes"]
            assert [box["name"] for box in shown] == (["box"] if again else [])
            for id in ("o", "e"):
                assert (await other.request("GET", f"/v1/actions/{id}", wait_s=0)).code == "not_found"
            if again:
                assert (await other.request("GET", "/v1/sandboxes/box/list", path=".")).json == {"entries": []}
            assert (await other.request("GET", "/v1/image-keys/late")).json == {"name": ""}
            refused = await other.submit("x", {"type": "Open", "spec": {"image": "none"}}, sandbox="x")
            assert refused.error["expected"] == "one of 'host'"

    asyncio.run(main())


def test_an_image_that_is_being_added_when_its_run_is_revoked_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding, go_on = asyncio.Event(), asyncio.Event()
    add_image = FakeManager.add_image

    async def slowly(self: FakeManager, source: str) -> str:
        adding.set()
        await go_on.wait()
        return await add_image(self, source)

    monkeypatch.setattr(FakeManager, "add_image", slowly)

    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, b):
            added = asyncio.create_task(a.request("POST", "/v1/images", body=b"tar"))
            await adding.wait()
            assert (await admin.request("DELETE", f"/v1/runs/{a.name}")).status == 204
            other = await make_run(admin, a.name)
            go_on.set()
            assert (await added).code == "unauthorized"
            name = (await b.request("POST", "/v1/images", body=b"tar")).json["name"]
            await b.open("from-image", image=name)
            refused = await other.submit("o", {"type": "Open", "spec": {"image": name}}, sandbox="box")
            assert refused.error["field"] == "sandbox.image"

    asyncio.run(main())


def test_equal_images_of_two_runs_are_two_names_and_either_may_go_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path, backend="fake") as (_, _, a, b):
            for caller in (a, b):
                added = await caller.request("POST", "/v1/images", body=b"tar")
                name = added.json["name"]
                assert name.startswith("image-")
                assert (await caller.request("PUT", "/v1/image-keys/base", {"name": name})).status == 204
                assert (await caller.request("GET", "/v1/image-keys/base")).json == {"name": name}
                await caller.open("from-image", image=name)
                shown = (await caller.request("GET", "/v1/sandboxes")).content.decode()
                others = {a.name, b.name} - {caller.name}
                assert not [other for other in others if other in shown]
            assert (await a.request("DELETE", f"/v1/images/{name}")).status == 404, "that is a name of b"
            assert (await b.request("DELETE", f"/v1/images/{name}")).status == 204

    asyncio.run(main())


def test_the_admin_sees_the_sandboxes_of_all_runs_or_of_the_one_that_it_names(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, b):
            await a.open("one")
            await b.open("other")

            async def shown(**query: str) -> list[str]:
                return sorted(
                    box["name"] for box in (await admin.request("GET", "/v1/sandboxes", **query)).json["sandboxes"]
                )

            assert await shown() == [f"{a.name}/one", f"{b.name}/other"]
            assert await shown(run=a.name) == ["one"]

    asyncio.run(main())


def test_a_run_whose_name_is_a_prefix_of_another_is_separate(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, _):
            await a.open("box")
            await a.run("it", "echo hidden content")
            for name in ("alpha", "alphaville-2", "a", "ville"):
                made = (await admin.request("POST", f"/v1/runs/{name}", {})).json
                caller = Caller(a.session, a.address, made["token"], name)
                tails = [a.name.removeprefix(name), "ville/it", "-2/it", "it", "ville%2Fit"]
                for action, path in itertools.product(tails, ("", "/story", "/output")):
                    response = await caller.request("GET", f"/v1/actions/{action or 'x'}{path}", wait_s=0)
                    assert response.status in (404, 422) and b"hidden" not in response.content
                assert (await caller.request("GET", "/v1/sandboxes")).json == {"sandboxes": []}
                assert (await caller.request("GET", "/v1/timeline")).json["rows"] == []

    asyncio.run(main())
