"""The reference page of the config of rollouts and training runs, made of its records. Owns the words around them."""

from __future__ import annotations

import inspect

import msgspec

from tangram.config.tables import field_types
from tangram.config.validators import Validator
from tangram.rl.config.rollout_settings import RewardSettings, RolloutSettings, TaskSettings
from tangram.rl.config.training_settings import TrainSettings
from tools.reference.config_page import head_of, record_of, table_of
from tools.reference.sentences import cell, sentences, wrapped

HEAD = """# The config of rollouts and training runs

`tangram train CONFIG` and `tangram rl rollout CONFIG` read the same TOML file; a rollout ignores the keys of training.
The whole file is validated before anything is played: an error names the file, the key, the value and the valid values,
and the line if a single key is invalid; a key or table that is not on this page is an error. Omitted keys have their
defaults. Paths are relative to the folder of the file, where `module:name` is also looked up; seconds may have a
fraction. [Play a rollout](../guides/play-a-rollout.md) uses it.

`tangram train CONFIG --set KEY=VALUE` changes a key without changing the file: `training.staleness=2`. For an array of
tables, KEY contains the name, `tasks.frozenlake.weight=2`, or the index, `engines.0.count=2`. Values are TOML, and a
plain word is text.
"""


def rl_config_page(note: str) -> str:
    parts = [note, HEAD, "## Before all tables\n", "| key | takes | default | means |\n|---|---|---|---|"]
    fields = {field.name: field for field in msgspec.structs.fields(TrainSettings)}
    descriptions = sentences(RolloutSettings) | sentences(TrainSettings)
    tables = []
    for name, kind in field_types(TrainSettings).items():
        if isinstance(kind, Validator):
            default = msgspec.json.encode(fields[name].default).decode()
            parts.append(
                "| " + " | ".join(map(cell, (f"`{name}`", kind.expected, f"`{default}`", descriptions[name]))) + " |"
            )
        else:
            tables.append((name, kind))
    parts.append("")
    for name, kind in tables:
        several, record = record_of(kind)
        parts += _section(head_of(name, several), record, training=name not in field_types(RolloutSettings))
        if record is TaskSettings:
            parts += _section("[tasks.reward]", RewardSettings)
    return "\n".join(parts)


def _section(head: str, record: type[msgspec.Struct], *, training: bool = False) -> list[str]:
    words = inspect.cleandoc(record.__doc__ or "") + (" Only for training runs." if training else "")
    return [f"## `{head}`\n", wrapped(words), table_of(record)]
