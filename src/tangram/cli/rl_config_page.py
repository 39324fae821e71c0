"""The reference page of the config of a rollout, made of its records. Owns the words around the tables."""

from __future__ import annotations

import inspect

import msgspec

from tangram.cli.config_page import head_of, record_of, table_of
from tangram.cli.sentences import cell, sentences, wrapped
from tangram.config.tables import kinds
from tangram.config.valid import Valid
from tangram.rl.settings import RewardSettings, RolloutSettings

HEAD = """# The config of a rollout

`tangram rl rollout CONFIG` reads a file of TOML. All of it is checked before anything is played, and what is wrong is
said with the file, the key, what came and what is valid, and the line where one key alone is wrong; a key or table that
is not on this page is an error. What is not said has its default. Paths are relative to the folder of the file, and
`module:name` is also looked for there; seconds may have a point.
[Play a rollout](../guides/play-a-rollout.md) uses it.
"""


def rl_config_page(note: str) -> str:
    parts = [note, HEAD, "## Before all tables\n", "| key | takes | default | means |\n|---|---|---|---|"]
    fields = {field.name: field for field in msgspec.structs.fields(RolloutSettings)}
    tables = []
    for name, kind in kinds(RolloutSettings).items():
        if isinstance(kind, Valid):
            default = msgspec.json.encode(fields[name].default).decode()
            cells = (f"`{name}`", kind.words, f"`{default}`", sentences(RolloutSettings)[name])
            parts.append("| " + " | ".join(map(cell, cells)) + " |")
        else:
            tables.append((name, kind))
    parts.append("")
    for name, kind in tables:
        several, record = record_of(kind)
        parts.append(f"## `{head_of(name, several)}`\n")
        parts.append(wrapped(inspect.cleandoc(record.__doc__ or "")))
        parts.append(table_of(record))
    parts.append("## `[tasks.reward]`\n")
    parts.append(wrapped(inspect.cleandoc(RewardSettings.__doc__ or "")))
    parts.append(table_of(RewardSettings))
    return "\n".join(parts)
