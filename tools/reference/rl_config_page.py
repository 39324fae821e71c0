"""The reference page of the config of rollouts and training runs, made of its records. Owns the words around them."""

from __future__ import annotations

import inspect

import msgspec

from tangram.config.tables import kinds
from tangram.config.valid import Valid
from tangram.rl.config.rollout_settings import RewardSettings, RolloutSettings, TaskSettings
from tangram.rl.config.training_settings import TrainSettings
from tools.reference.config_page import head_of, record_of, table_of
from tools.reference.sentences import cell, sentences, wrapped

HEAD = """# The config of rollouts and training runs

`tangram train CONFIG` and `tangram rl rollout CONFIG` read the same file of TOML; a rollout takes no notice of how the
policy learns. All of it is checked before anything is played, and what is wrong is said with the file, the key, what
came and what is valid, and the line where one key alone is wrong; a key or table that is not on this page is an error.
What is not said has its default. Paths are relative to the folder of the file, and `module:name` is also looked for
there; seconds may have a point. [Play a rollout](../guides/play-a-rollout.md) uses it.

`tangram train CONFIG --set KEY=VALUE` changes a key without changing the file: `training.staleness=2`; of several
tables the one with a name, `tasks.frozenlake.weight=2`, or with a number, `engines.0.count=2`. Values are those of
TOML, and a plain word is text.
"""


def rl_config_page(note: str) -> str:
    parts = [note, HEAD, "## Before all tables\n", "| key | takes | default | means |\n|---|---|---|---|"]
    fields = {field.name: field for field in msgspec.structs.fields(TrainSettings)}
    said = sentences(RolloutSettings) | sentences(TrainSettings)
    tables = []
    for name, kind in kinds(TrainSettings).items():
        if isinstance(kind, Valid):
            default = msgspec.json.encode(fields[name].default).decode()
            parts.append("| " + " | ".join(map(cell, (f"`{name}`", kind.words, f"`{default}`", said[name]))) + " |")
        else:
            tables.append((name, kind))
    parts.append("")
    for name, kind in tables:
        several, record = record_of(kind)
        parts += _section(head_of(name, several), record, training=name not in kinds(RolloutSettings))
        if record is TaskSettings:
            parts += _section("[tasks.reward]", RewardSettings)
    return "\n".join(parts)


def _section(head: str, record: type[msgspec.Struct], *, training: bool = False) -> list[str]:
    words = inspect.cleandoc(record.__doc__ or "") + (" Of training runs alone." if training else "")
    return [f"## `{head}`\n", wrapped(words), table_of(record)]
