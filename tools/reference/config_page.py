"""The reference page of the config, generated from its records.

Owns the text around the tables and the values of the example. Everything else comes from `tangram.config`: keys, their
types and defaults, and the docstrings of the fields.
"""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec

from tangram.config import Config, RateConfig
from tangram.config.tables import field_types
from tangram.config.validators import SIZE, SIZE_OR_0, Validator
from tools.reference.sentences import cell, sentences, wrapped

HEAD = """# The config file

`tangram serve --config FILE` reads a TOML file and validates all of it before anything starts. An error names the file,
the line, the key, the value and the valid values; a key or a table that is not on this page is an error. Omitted keys
have their defaults: an empty file serves this machine to its local users.

- **Paths** are relative to the folder of the file.
- **Sizes** are numbers of bytes, or written as "512MB" (powers of 1000) or "512MiB" (powers of 1024).
- **Seconds** may have a fraction.
- Runs and their tokens are not in the file: the admin creates them while the service runs.
"""

SCHEDULER = "Limits of the scheduler, over all runs. [Limits](limits.md) describes them."

MORE = {
    "quotas": """`requests` and `tokens` are tables themselves:
{rates}
[Stay under an API quota](../guides/stay-under-an-api-quota.md) describes their use.""",
    "services": """Built-in engines: `tangram.managers.models.torch_engine:TorchEngine`; `RewardModel`, `Teacher`
and `Judge` of `tangram.managers.models.transformers_engine`; and
`tangram.managers.models.server_engine:ServerEngine`. [Bring your own
engine](../guides/bring-your-own-engine.md#built-in-engines) describes them.""",
}

EXAMPLE_HEAD = """## An example with every key

Lines without `#` contain the defaults, so the file is equivalent to an empty one. Uncomment and change lines with `#`
directly before a key or a table.
"""

EXAMPLES: dict[str, Any] = {
    "node.cores": 6.0,
    "node.memory": "24GiB",
    "quotas.name": "search",
    "quotas.concurrent": 8,
    "quotas.requests": {"units": 100, "seconds": 60.0},
    "quotas.tokens": {"units": 90_000, "seconds": 60.0},
    "services.name": "judge",
    "services.engine": "tangram.managers.models.transformers_engine:Judge",
    "services.arguments": {"model": "/models/judge", "dtype": "bfloat16"},
    "devices.kind": "emulated",
    "devices.memory_bytes": "8GiB",
}
"""Values for keys without a default."""


def config_page(note: str) -> str:
    parts = [note, HEAD]
    for name, kind in field_types(Config).items():
        several, record = record_of(kind)
        parts.append(f"## `{head_of(name, several)}`\n")
        parts.append(wrapped(SCHEDULER if name == "scheduler" else inspect.cleandoc(record.__doc__ or "")))
        parts.append(table_of(record))
        if name in MORE:
            parts.append(MORE[name].replace("{rates}", "\n" + table_of(RateConfig)) + "\n")
    parts += [EXAMPLE_HEAD, f"```toml\n{example()}```\n"]
    return "\n".join(parts)


def example() -> str:
    """Returns a file with every key, at its default if it has one."""
    lines = []
    for name, kind in field_types(Config).items():
        several, record = record_of(kind)
        off = "#" if several else ""
        lines += [f"{off}{head_of(name, several)}"]
        for field in msgspec.structs.fields(record):
            lines += [f"# {line}" for line in textwrap.wrap(sentences(record)[field.name], 110)]
            value = EXAMPLES.get(f"{name}.{field.name}", _default(field))
            mark = "#" if several or not _has_value(field) else ""
            lines.append(f"{mark}{field.name} = {_toml(value, field_types(record)[field.name])}")
        lines.append("")
    return "\n".join(lines)


def record_of(kind: Any) -> tuple[bool, type[msgspec.Struct]]:
    return (True, get_args(kind)[0]) if get_origin(kind) is tuple else (False, kind)


def head_of(name: str, several: bool) -> str:
    return f"[[{name}]]" if several else f"[{name}]"


def table_of(record: type[msgspec.Struct]) -> str:
    """Returns the keys of a table as Markdown."""
    return "\n".join(["| key | takes | default | means |", "|---|---|---|---|", *_rows(record)]) + "\n"


def _rows(record: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(record):
        kind = field_types(record)[field.name]
        takes = kind.expected if isinstance(kind, Validator) else "a table, see below"
        if field.required:
            default = "required"
        elif not _has_value(field) or isinstance(_default(field), msgspec.Struct):
            default = ""
        else:
            default = f"`{_toml(_default(field), kind)}`"
        cells = (f"`{field.name}`", takes, default, sentences(record)[field.name])
        yield "| " + " | ".join(map(cell, cells)) + " |"


def _has_value(field: Any) -> bool:
    return not field.required and _default(field) is not None


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def _toml(value: Any, kind: Any) -> str:
    """Returns the value in the syntax of the file."""
    if isinstance(kind, types.UnionType) or isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each, None)}" for key, each in value.items()) + "}"
    if kind in (SIZE, SIZE_OR_0) and type(value) is int:
        return _size(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return f"{value:_}"


def _size(size: int) -> str:
    """Returns the size in the largest unit that divides it."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f'"{size // 1024**power}{unit}"'
    return str(size)
