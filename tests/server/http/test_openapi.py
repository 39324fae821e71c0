"""The OpenAPI document: complete, and true of the service, which gets every request that the document allows."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.http_caller import ADMIN_TOKEN, local_service, token_file
from tests.server.shared import serving
from tools.reference.http_page import http_page

from tangram.config import RunLimits
from tangram.managers.quotas.manager import Quota
from tangram.runtime.wire import NAME_DESCRIPTION
from tangram.server.http.openapi import openapi_document
from tangram.server.http.responses import STATUS_BY_CODE
from tangram.server.http.routes import ROUTES

EXAMPLES_MAX = 12
"""Of each operation and each way to make them: all take less than a minute."""
DOCUMENT = msgspec.json.decode(openapi_document())


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations_of_path in DOCUMENT["paths"].items():
        for method, operation in operations_of_path.items():
            yield method.upper(), path, operation


# ---- the document -----------------------------------------------------------------------------------------------


def test_every_route_is_in_it_and_nothing_else() -> None:
    routes = {(route.method, re.sub(r":path", "", route.path)) for route in ROUTES}
    assert {(method, path) for method, path, _ in operations()} == routes
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)


def test_the_rule_for_names_is_described_in_the_document_and_on_the_page() -> None:
    submission = DOCUMENT["components"]["schemas"]["Submission"]["properties"]
    assert submission["id"]["description"] == NAME_DESCRIPTION
    rows = http_page("").partition("### Submission")[2].partition("###")[0].splitlines()
    assert f"| `id` | text: {NAME_DESCRIPTION} |  |" in rows
    assert f'| `sandbox` | text: an empty string, or {NAME_DESCRIPTION}; default `""` |  |' in rows


def test_every_reference_leads_somewhere() -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for key, value in node.items():
                if key == "mapping":
                    yield from value.values()
                yield from references(value)
        elif isinstance(node, list):
            for each in node:
                yield from references(each)

    referenced = set(references(DOCUMENT))
    assert len(referenced) > 30
    for reference in referenced:
        assert reference.startswith("#/"), reference
        node = DOCUMENT
        for part in reference[2:].split("/"):
            node = node[part.replace("~1", "/").replace("~0", "~")]


def test_parameters_of_every_path_are_declared() -> None:
    for method, path, operation in operations():
        declared = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
        assert declared == re.findall(r"\{(\w+)\}", path), (method, path)
        assert all(each["required"] for each in operation["parameters"] if each["in"] == "path")
        names = [(each["in"], each["name"]) for each in operation["parameters"]]
        assert len(set(names)) == len(names)


def test_every_refusal_is_in_it_as_a_problem() -> None:
    statuses = {str(status) for code, status in STATUS_BY_CODE.items() if code != "no_such_method"}
    for method, path, operation in operations():
        assert statuses <= set(operation["responses"]), (method, path)
        for status, answer in operation["responses"].items():
            assert answer["description"]
            if int(status) >= 400 and (path, status) != ("/readyz", "503"):
                assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}


def test_only_what_is_public_needs_no_token() -> None:
    assert DOCUMENT["security"] == [{"token": []}]
    public = {path for _, path, operation in operations() if operation.get("security") == []}
    assert public == {route.path for route in ROUTES if route.is_public} == {"/healthz", "/readyz"}


def test_the_document_is_public_at_a_service(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path, admin_token_file=str(token_file(tmp_path))) as anonymous:
            response = await anonymous.request("GET", "/openapi.json")
            assert (response.status, response.headers["content-type"]) == (200, "application/json")
            assert response.json == DOCUMENT

    asyncio.run(main())


# ---- the service, by the document -------------------------------------------------------------------------------


@contextmanager
def live(folder: Path) -> Iterator[str]:
    """The address of a service in a thread of its own."""
    address: Future[str] = Future()
    stop: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        quotas = (Quota("search", 2), Quota("llm", 1))
        limits = RunLimits(requests_per_s=1e6, requests_burst=1_000_000, body_bytes_max=1 << 20)
        options: dict[str, Any] = dict(quotas=quotas, limits=limits, event_log=str(folder / "events.jsonl"))
        async with serving(folder, admin_token_file=str(token_file(folder)), drain_s=0.0, **options) as up:
            ended = asyncio.Event()
            stop.set_result((asyncio.get_running_loop(), ended))
            address.set_result(up.address)
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        yield address.result(timeout=30)
    finally:
        loop, ended = stop.result(timeout=30)
        loop.call_soon_threadsafe(ended.set)
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_every_valid_request_of_the_document_gets_a_documented_response(tmp_path: Path) -> None:
    try:
        import schemathesis
    except ImportError:
        if os.environ.get("CI") == "true":
            pytest.fail("schemathesis is missing")
        pytest.skip("schemathesis is missing")
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    few = settings(
        max_examples=EXAMPLES_MAX,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    asked_for = 0

    def ask(case: Any) -> None:
        nonlocal asked_for
        asked_for += 1
        query = dict(case.query or {})
        if "wait_s" in query and case.operation.path.startswith("/v1/actions"):
            case.query = query | {"wait_s": "0"} if _is_number(query["wait_s"]) else query
        case.call_and_validate(checks=checks, headers={"authorization": f"Bearer {ADMIN_TOKEN}"}, timeout=60)

    with live(tmp_path) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        failures = []
        for operations_of_path in schema.get_all_operations():
            operation = operations_of_path.ok()
            takes_something = operation.body or operation.path_parameters or operation.query
            for mode in schemathesis.GenerationMode if takes_something else [schemathesis.GenerationMode.POSITIVE]:
                cases = operation.as_strategy(generation_mode=mode)
                try:
                    seed(0)(few(given(case=cases)(ask)))()
                except Exception as error:
                    failures.append(f"{operation.label} {mode}: {type(error).__name__}: {error}")
        assert not failures, "\n\n".join(failures)
        assert asked_for > 4 * len(ROUTES)


def _is_number(text: object) -> bool:
    try:
        return 0.0 <= float(str(text)) <= 60.0
    except ValueError:
        return False
