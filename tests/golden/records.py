"""Examples and shapes of records, made of their types: what a format holds, without any name of Python in it.

`example` fills every field of a record, so that a field which is renamed, removed or reordered changes its encoding.
`shape` describes a type by the names that are written: fields, tags and the values of enums.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import Demand, cores, fixed
from tangram.core.messages import Concluded, Evicted, Pool, PoolChanged, Resident, Window
from tangram.core.speedup import PowerLaw
from tangram.managers.functions.work import EndpointSpec, FunctionSpec, Post
from tangram.managers.models.work import Infer
from tangram.managers.work import Commit, Exec, SandboxSpec

ACTION = Action(
    id="run-a:act-1", demand=Demand({"cpu": cores(1, 4), "search": fixed(1)}, PowerLaw(0.5)), run="run-a",
    task="codefix", trajectory="codefix/0/0.0", sandbox="run-a:box", kind="exec", key="tests", service="judge",
    duration_s=2.5, timeout_s=60.0, deadline_s=600.0, priority=1, idempotent=True, at_once=False,
)  # fmt: skip
OUTCOME = Outcome(
    action=ACTION.id, status=Status.SUCCEEDED, reason="done", waiting_s=0.5, execution_s=2.0, overhead_s=0.25,
    usage=Usage(cpu_s=1.5, throttled_s=0.125, starved_s=0.25, memory_peak_bytes=4096, overhead_s=0.25,
                spent={"search": 1}),
    attempts=1,
)  # fmt: skip
SPEC = SandboxSpec(
    image="python", memory_bytes=256 << 20, disk_bytes=64 << 20, processes_max=64, open_files_max=256, network=True,
    user="root", env={"COLOUR": "blue"},
)  # fmt: skip
FUNCTION = FunctionSpec(
    name="score-1", pickled=b"by value", paths=("modules",), cpu_units=500, memory_bytes=64 << 20, max_instances=4,
    idle_s=10.0, retries=1, processes_max=8,
)  # fmt: skip
ENDPOINT = EndpointSpec(
    name="judge",
    url="http://judge.invalid/score",
    max_concurrency=4,
    timeout_s=10.0,
    retries=2,
    headers={"X-Team": "a"},
)
EXAMPLES: dict[type, Any] = {
    Action: ACTION,
    Outcome: OUTCOME,
    Demand: ACTION.demand,
    SandboxSpec: SPEC,
    FunctionSpec: FUNCTION,
    EndpointSpec: ENDPOINT,
    Exec: Exec(command="python -V", cwd="src", env={"A": "b"}, stdin=b"in", capture_bytes_max=1024),
    Post: Post(endpoint=ENDPOINT, body=b"[1]", key="key-1"),
    Commit: Commit(image="fixed"),
    Infer: Infer(payload=b"prompt"),
    Concluded: Concluded(action=ACTION, outcome=OUTCOME),
    Resident: Resident(service="judge", node="local", devices=(0, 1), batch_max=4),
    Evicted: Evicted(service="judge", node="local", devices=(0, 1)),
    PoolChanged: PoolChanged(
        pool=Pool(kind="search", total=10, window=Window(seconds=1.0, sliding=True, arrival_s=0.5), private=True)
    ),
}
"""Records whose fields restrict each other."""


def example(record: type) -> Any:
    """An instance with a value in every field; the same one each time."""
    if record in EXAMPLES:
        return EXAMPLES[record]
    info = inspect.type_info(record)
    assert isinstance(info, inspect.StructType), record
    values = {field.encode_name: _value(field.type, field.encode_name) for field in info.fields}
    return msgspec.convert(list(values.values()) if info.array_like else values | _tagged(record), record)


def _tagged(record: type) -> dict[str, str]:
    tag = record.__struct_config__.tag
    return {record.__struct_config__.tag_field: tag} if tag is not None else {}


def _value(kind: inspect.Type, name: str) -> Any:
    match kind:
        case inspect.Metadata():
            return _value(kind.type, name)
        case inspect.StructType():
            return example(kind.cls)
        case inspect.UnionType():
            return _value(next(each for each in kind.types if not isinstance(each, inspect.NoneType)), name)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.EnumType():
            return next(iter(kind.cls))
        case inspect.ListType() | inspect.VarTupleType():
            return [_value(kind.item_type, name)]
        case inspect.TupleType():
            return [_value(each, name) for each in kind.item_types]
        case inspect.DictType():
            return {_value(kind.key_type, "key"): _value(kind.value_type, name)}
        case inspect.IntType():
            return max(kind.ge or 0, (kind.gt or 0) + 1)
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return b"bytes"
    return name


# ---- shapes ---------------------------------------------------------------------------------------------------------

PLAIN = {str: "text", int: "integer", float: "number", bool: "flag", bytes: "bytes", type(None): "null"}


def shape(kind: Any) -> Any:
    """JSON that names every field, tag and enum value below a type. Defaults and limits are no part of it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return shape(args[0])
    if origin in (typing.Union, types.UnionType):
        return _one_of(args)
    if origin is typing.Literal:
        return " | ".join(map(repr, args))
    if origin in (list, tuple):
        parts = [each for each in args if each is not ...]
        return [shape(each) for each in parts]
    if origin is not None and args:  # dict, Mapping
        return {"*": shape(args[-1])}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _fields(kind)
    if isinstance(kind, type) and hasattr(kind, "__members__"):
        return " | ".join(repr(each.value) for each in kind)
    return PLAIN.get(kind, "anything")


def _one_of(kinds: tuple[Any, ...]) -> Any:
    tagged = {tag: shape(each) for each in kinds if (tag := _tag(each)) is not None}
    others = [shape(each) for each in kinds if _tag(each) is None]
    if tagged:
        field = next(each.__struct_config__.tag_field for each in kinds if _tag(each) is not None)
        others.insert(0, {f"by {field}": dict(sorted(tagged.items()))})
    others.sort(key=lambda each: (each == "null", str(each)))
    return others[0] if len(others) == 1 else {"one of": others}


def _tag(kind: Any) -> str | None:
    return kind.__struct_config__.tag if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    fields = {each.encode_name: shape(hints[each.name]) for each in msgspec.structs.fields(kind)}
    return {"array of": fields} if kind.__struct_config__.array_like else fields
