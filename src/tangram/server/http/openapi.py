"""The OpenAPI document, made of the table of routes and the records that they take and give.

Owns no words of its own but those that every address shares. Pure: the same table gives the same bytes.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tangram.runtime.wire import NAME, NAME_LENGTH_MAX, RUN, Chunk, Problem
from tangram.server.http.routes import ROUTES, Route

TITLE = "Tangram"
VERSION = "1"
REF = "#/components/schemas/{name}"

ERRORS = {
    "400": "No JSON, or no HTTP",
    "401": "No token, or a wrong one",
    "403": "Only the admin may do that",
    "404": "There is none of that name",
    "408": "The body came too slowly",
    "409": "The id is that of another action",
    "413": "The body is too large",
    "415": "The body is said to be no JSON",
    "422": "Something in it is wrong; `field`, `value` and `expected` say what",
    "429": "A limit, which `limit` names",
    "500": "A bug in Tangram",
    "502": "A sandbox, a device or a machine failed",
    "503": "The service is stopping",
}


def document() -> bytes:
    return msgspec.json.format(msgspec.json.encode(_document(), order="sorted"), indent=1)


def _document() -> dict[str, Any]:
    records = [Problem]
    for route in ROUTES:
        records += [record for record in (route.takes, route.gives) if record not in (None, bytes, str)]
    _, schemas = msgspec.json.schema_components(records, ref_template=REF)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION, "description": "Action-level scheduling of outside resources."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {"problem": _answer("Not done", Problem)},
        },
        "security": [{"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    parameters = [_part(name) for name in re.findall(r"\{(\w+)", route.path)]
    parameters += [
        {"name": each.name, "in": "query", "required": each.required, "description": each.about, "schema": each.kind}
        for each in route.query
    ]
    answers: dict[str, Any] = {str(status): _answer(route.about, route.gives) for status in (route.status, *route.also)}
    for status, about in ERRORS.items():
        answers.setdefault(status, {**_answer(about, Problem)})
    found: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.about,
        "parameters": parameters,
        "responses": answers,
    }
    if route.takes is not None:
        found["requestBody"] = {"required": True, "content": _content(route.takes)}
    if route.public:
        found["security"] = []
    return found


def _part(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": f"^{NAME.pattern}$", "maxLength": NAME_LENGTH_MAX}
    if name == "run":
        schema = {"type": "string", "pattern": f"^{RUN.pattern}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _answer(about: str, record: Any) -> dict[str, Any]:
    return {"description": about} if record is None else {"description": about, "content": _content(record)}


def _content(record: Any) -> dict[str, Any]:
    if record is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    if record is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    (schema,), _ = msgspec.json.schema_components([record], ref_template=REF)
    kind = "application/x-ndjson" if record is Chunk else "application/json"
    return {kind: {"schema": schema}}
