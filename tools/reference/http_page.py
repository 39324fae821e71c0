"""The reference page of the HTTP API, generated from the route table and the records of requests and responses.

Owns the text around them. The docstring of a field describes it.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from tools.reference.sentences import cell, sentences, wrapped

HEAD = """# The HTTP API

`tangram serve` serves the routes below; the [client](../guides/from-embedded-to-shared.md) uses nothing else. `GET
/openapi.json` returns them as an OpenAPI document.

**Authentication.** Every request except those marked *public* needs `Authorization: Bearer TOKEN`: the token of a run
or of the admin. A service on loopback without an admin token treats requests without a token as the admin's. All
names are relative to the caller's run and cannot be used by another run.

**Records** are JSON; bytes in them are base64. Unknown fields are rejected. Fields without a default are required.

**Idempotency.** The caller chooses the `id` of a submission, which is its idempotency key: a submission that is sent
again is the same action, and the response is its state or result. The same id with other content is a `conflict`. A
result is kept until `POST /v1/acknowledge` confirms it, or for `service.results_keep_s`. A run whose unacknowledged
results exceed `limits.results_bytes_max` can submit nothing more until it acknowledges some.

**Waiting.** With `wait_s` a request returns when the action has settled, or after that time, at most 60 seconds. A
client that was disconnected repeats the request.

```sh
curl -s $TANGRAM_URL/v1/actions -H "Authorization: Bearer $TANGRAM_TOKEN" \\
  -d '{"id": "open-1", "sandbox": "box", "work": {"type": "Open", "spec": {"memory_bytes": 268435456}}}'
curl -s $TANGRAM_URL/v1/actions -H "Authorization: Bearer $TANGRAM_TOKEN" \\
  -d '{"id": "tests-1", "sandbox": "box", "work": {"type": "Exec", "command": "python3 -m pytest -q"}}'
```

## Errors

A response with status 400 or above is `{"error": {...}}`, an [ErrorRecord](#errorrecord). Its `code` is stable across
versions:

| code | status |
|---|---|
"""

OWN = "tangram."


def http_page(note: str) -> str:
    from tangram.runtime.error_records import ErrorRecord
    from tangram.server.http.responses import STATUS_BY_CODE
    from tangram.server.http.routes import ROUTES

    parts = [note, HEAD + "\n".join(f"| `{code}` | {status} |" for code, status in STATUS_BY_CODE.items()) + "\n"]
    parts.append("## Routes\n")
    rows = ["| route | request | response | meaning |", "|---|---|---|---|"]
    for route in ROUTES:
        query = f"?{'&'.join(each.name for each in route.query)}" if route.query else ""
        path = re.sub(r":path", "", route.path) + query
        about = route.summary + (" *(public)*" if route.is_public else "")
        request, response = _shown(route.request_type), _shown(route.response_type)
        rows.append(f"| `{route.method} {path}` | {request} | {response} | {cell(about)} |")
    parts.append("\n".join(rows) + "\n")
    parts.append("### Query parameters\n")
    queries = {each.name: each for route in ROUTES for each in route.query}
    rows = ["| parameter | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{name}` | {_default(each.schema)} | {cell(each.description)} |" for name, each in sorted(queries.items())
    ]
    rows.append("| `run` | | for the admin: the run to which names in the request belong |")
    parts.append("\n".join(rows) + "\n")
    parts.append("## Records\n")
    roots = [each for route in ROUTES for each in (route.request_type, route.response_type) if _is_record(each)]
    parts += [_record(each) for each in _reached([ErrorRecord, *roots])]
    return "\n".join(parts)


def _default(schema: dict[str, Any]) -> str:
    return f"`{schema['default']}`" if "default" in schema else ""


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _shown(kind: Any) -> str:
    if kind is None:
        return ""
    return f"[{kind.__name__}](#{kind.__name__.lower()})" if _is_record(kind) else {bytes: "bytes", str: "text"}[kind]


def _reached(roots: list[Any]) -> Iterator[type[msgspec.Struct]]:
    """Returns records by name, including the records of their fields."""
    records: dict[str, type[msgspec.Struct]] = {}
    pending = list(roots)
    while pending:
        kind = pending.pop()
        if _is_record(kind) and kind.__name__ not in records:
            records[kind.__name__] = kind
            pending += get_type_hints(kind).values()
        else:
            pending += get_args(kind)
    yield from (records[name] for name in sorted(records))


def _record(kind: type[msgspec.Struct]) -> str:
    hints, descriptions = get_type_hints(kind, include_extras=True), sentences(kind)
    about = (kind.__doc__ or "").split("\n\n")[0]
    if about.startswith(f"{kind.__name__}("):
        about = ""
    lines = [f"### {kind.__name__}\n"]
    if about:
        lines.append(wrapped(" ".join(about.split())))
    tag = kind.__struct_config__.tag
    rows = ["| field | type | meaning |", "|---|---|---|"]
    if tag is not None:
        rows.append(f'| `type` | `"{tag}"` | |')
    if kind.__struct_config__.array_like:
        lines.append("An array, with its fields in this order.\n")
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else f"; default `{_json(field)}`"
        kept = cell(descriptions.get(field.name, ""))
        rows.append(f"| `{field.encode_name}` | {_type(hints[field.name])}{default} | {kept} |")
    lines.append("\n".join(rows) + "\n" if len(rows) > 2 else "No fields.\n")
    return "\n".join(lines)


def _json(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(value).decode()


def _type(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        descriptions = [each.description for each in get_args(kind)[1:] if getattr(each, "description", None)]
        return ": ".join([_type(get_args(kind)[0]), *descriptions])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in get_args(kind))
    if origin is typing.Literal:
        return " or ".join(f"`{msgspec.json.encode(each).decode()}`" for each in get_args(kind))
    if origin in (list, tuple):
        return f"list of {_type(get_args(kind)[0])}"
    if origin is dict:
        return f"object of {_type(get_args(kind)[1])}"
    if kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if isinstance(kind, type) and hasattr(kind, "__members__"):
        return " or ".join(f'`"{each.value}"`' for each in kind)  # type: ignore[attr-defined]
    return {str: "text", int: "integer", float: "number", bool: "true or false", bytes: "base64"}.get(kind, "anything")
