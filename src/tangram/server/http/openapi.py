"""The OpenAPI document, generated from the route table and its records.

Pure: the same table gives the same bytes.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tangram.runtime.wire import NAME, NAME_LENGTH_MAX, RUN, ErrorResponse, OutputChunk
from tangram.server.http.routes import ROUTES, Route

TITLE = "Tangram"
VERSION = "1"
REF = "#/components/schemas/{name}"

ERRORS = {
    "400": "Malformed JSON or HTTP",
    "401": "Missing or wrong token",
    "403": "Only the admin may do this",
    "404": "There is no object of that name",
    "408": "The body arrived too slowly",
    "409": "Another action has this id",
    "413": "The body is too large",
    "415": "The content type is not JSON",
    "422": "Invalid request; see `field`, `value` and `expected`",
    "429": "A limit was reached, named by `limit`",
    "500": "A bug in Tangram",
    "502": "A sandbox, a device or a machine failed",
    "503": "The service is stopping",
}


def openapi_document() -> bytes:
    return msgspec.json.format(msgspec.json.encode(_build_document(), order="sorted"), indent=1)


def _build_document() -> dict[str, Any]:
    records = [ErrorResponse]
    for route in ROUTES:
        records += [record for record in (route.request_type, route.response_type) if record not in (None, bytes, str)]
    _, schemas = msgspec.json.schema_components(records, ref_template=REF)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION, "description": "Action-level scheduling of external resources."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {"problem": _response("Not done", ErrorResponse)},
        },
        "security": [{"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)", route.path)]
    parameters += [
        {
            "name": parameter.name,
            "in": "query",
            "required": parameter.required,
            "description": parameter.description,
            "schema": parameter.schema,
        }
        for parameter in route.query
    ]
    responses: dict[str, Any] = {
        str(status): _response(route.summary, route.response_type) for status in (route.status, *route.other_statuses)
    }
    for status, about in ERRORS.items():
        responses.setdefault(status, {**_response(about, ErrorResponse)})
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "parameters": parameters,
        "responses": responses,
    }
    if route.request_type is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.request_type)}
    if route.is_public:
        operation["security"] = []
    return operation


def _path_parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": f"^{NAME.pattern}$", "maxLength": NAME_LENGTH_MAX}
    if name == "run":
        schema = {"type": "string", "pattern": f"^{RUN.pattern}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _response(about: str, record: Any) -> dict[str, Any]:
    return {"description": about} if record is None else {"description": about, "content": _content(record)}


def _content(record: Any) -> dict[str, Any]:
    if record is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    if record is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    (schema,), _ = msgspec.json.schema_components([record], ref_template=REF)
    kind = "application/x-ndjson" if record is OutputChunk else "application/json"
    return {kind: {"schema": schema}}
