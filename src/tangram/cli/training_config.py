"""The config of a training run from the command line: a file, and the changes of `--set`.

Owns how `--set training.staleness=2` is parsed and applied to the tables of the file. Errors name the file
and its line, or the `--set` and the nearest existing key. Paths are absolute: those of the file are relative to its
folder, those of a `--set` to the current one.

    training.staleness=2            a key of a table
    tasks.frozenlake.weight=2       of several tables, the one with that name
    engines.0.count=2               ... or the one of that number, counted from 0; also engines[0].count
"""

from __future__ import annotations

import datetime
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from tangram.config.loader import CONFIG_BYTES_MAX, parse_as
from tangram.config.tables import ConfigRoot, field_types
from tangram.errors import InvalidConfig

R = TypeVar("R", bound=ConfigRoot)

CHANGED = "changed"
"""The internal name of the file with its `--set` changes."""
TOML_VALUE_STARTS = tuple("\"'[{")
"""A value that starts with one of these characters must be TOML; others may be plain words."""


class Setting(NamedTuple):
    """One `--set`."""

    text: str
    keys: tuple[str, ...]
    value: Any


def add_config_folders(config: Path) -> tuple[str, ...]:
    """Import custom environments from the folder of the config and the current one from now on. Returns the folders."""
    return add_import_folders(dict.fromkeys((str(config.parent.resolve()), os.getcwd())))


def add_import_folders(folders: Iterable[str]) -> tuple[str, ...]:
    """Append folders to the import path."""
    kept = tuple(folders)
    sys.path += [folder for folder in kept if folder not in sys.path]
    return kept


def load_config(kind: type[R], path: Path, changes: Sequence[str] = ()) -> R:
    """Load a config with these `key=value` changes. Raises InvalidConfig."""
    settings = [_parse_setting(text) for text in changes]
    text = _read_text(path)
    if not settings:
        return _with_absolute_paths(parse_as(kind, text, str(path)), path)
    try:
        tables = tomllib.loads(text)
        places = [_apply_setting(kind, tables, each) for each in settings]
        return _with_absolute_paths(parse_as(kind, _to_toml(tables), CHANGED), path)
    except (InvalidConfig, ValueError, RecursionError) as error:
        parse_as(kind, text, str(path))  # reports errors of the file itself first
        if not isinstance(error, InvalidConfig) or not error.field.startswith(CHANGED):
            raise
        raise _translate_error(error, settings, places) from None


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():
            actual = "no file" if not path.exists() else "a folder" if path.is_dir() else "something else"
            raise InvalidConfig(str(path), actual, "a config file, such as examples/multitask.toml")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidConfig(str(path), reason, "a config file that can be read") from error
    if len(content) > CONFIG_BYTES_MAX:
        raise InvalidConfig(str(path), f"{len(content)} bytes", f"at most {CONFIG_BYTES_MAX} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidConfig(f"{path}:{line}", content[error.start : error.start + 1], "text in UTF-8") from error


def _with_absolute_paths(config: R, path: Path) -> R:
    """Make the paths of a record absolute, relative to the folder of the file."""
    folder = Path(os.path.abspath(path)).parent

    def resolve_paths(record: Any, keys: Sequence[str]) -> Any:
        paths = {key: getattr(record, key) for key in keys}
        return msgspec.structs.replace(record, **{k: os.path.normpath(folder / v) for k, v in paths.items() if v})

    for table, keys in type(config).PATH_KEYS.items():
        section = getattr(config, table)
        changed = (
            tuple(resolve_paths(each, keys) for each in section)
            if isinstance(section, tuple)
            else resolve_paths(section, keys)
        )
        config = msgspec.structs.replace(config, **{table: changed})
    return config


# ---- one --set ------------------------------------------------------------------------------------------------------


def _parse_setting(text: str) -> Setting:
    name, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in re.sub(r"\[([^\[\]]*)\]", r".\1", name).split("."))
    if not equals or not all(keys):
        raise InvalidConfig(f"--set {text}", text, "key=value, such as training.staleness=2")
    return Setting(text, keys, _parse_value(text, value.strip()))


def _parse_value(text: str, value: str) -> Any:
    """Parse a value as TOML; a plain word is text."""
    try:
        read = tomllib.loads(f"value = {value}")
        if set(read) == {"value"}:
            return read["value"]
    except (ValueError, RecursionError):
        pass
    if not value or value.startswith(TOML_VALUE_STARTS) or not value.isprintable():
        raise InvalidConfig(f"--set {text}", value, 'a value as TOML has it, such as 2, true, "text" or [1, 2]')
    return value


def _apply_setting(kind: type[ConfigRoot], tables: dict[str, Any], setting: Setting) -> str:
    """Puts a setting into the tables. Returns its place as shown in errors."""
    place = ""
    table: Any = tables
    takes: Any = kind
    *path, last = setting.keys
    for key in path:
        place, table, takes = _descend(setting, place, table, takes, key)
    if not isinstance(table, dict):
        raise InvalidConfig(f"--set {setting.text}", last, f"no more keys: {place} is a value")
    if get_origin(_kind_of(takes, last)) is tuple:
        many = f"{'.'.join(setting.keys)}.NAME.KEY=VALUE, as there are several such tables"
        raise InvalidConfig(f"--set {setting.text}", last, many)
    table[last] = setting.value
    return f"{place}.{last}".lstrip(".")


def _descend(setting: Setting, place: str, table: Any, takes: Any, key: str) -> tuple[str, Any, Any]:
    """The table or value at the next key."""
    if isinstance(table, list):
        index = _table_index(setting, place, table, key)
        return f"{place}[{index}]", table[index], get_args(takes)[0] if get_origin(takes) is tuple else None
    if not isinstance(table, dict):
        raise InvalidConfig(f"--set {setting.text}", key, f"no more keys: {place} is a value")
    below = _kind_of(takes, key)
    if key not in table:
        # Tables that the file does not contain have their default number.
        several = get_origin(below) is tuple
        table[key] = [{} for _ in _default(takes, key)] if several else {}
    return f"{place}.{key}".lstrip("."), table[key], below


def _kind_of(takes: Any, key: str) -> Any:
    known = isinstance(takes, type) and issubclass(takes, msgspec.Struct)
    return field_types(takes).get(key) if known else None


def _default(takes: Any, key: str) -> Sequence[Any]:
    for field in msgspec.structs.fields(takes):
        if field.name == key and isinstance(field.default, tuple):
            return field.default
    return ()


def _table_index(setting: Setting, place: str, table: list[Any], key: str) -> int:
    names = [each.get("name") if isinstance(each, dict) else None for each in table]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(table):
        return int(key)
    known = [str(name) for name in names if name is not None]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}" if known else "none has a name"
    if not table:
        raise InvalidConfig(f"--set {setting.text}", key, f"a table that the config has: there is no [[{place}]] in it")
    count = f"0 to {len(table) - 1}" if len(table) > 1 else "0: there is one"
    raise InvalidConfig(
        f"--set {setting.text}", key, f"the name of one of [[{place}]] ({hint}), or its number ({count})"
    )


# ---- errors --------------------------------------------------------------------------------------------------


def _translate_error(error: InvalidConfig, settings: Sequence[Setting], places: Sequence[str]) -> InvalidConfig:
    """The error with its `--set`: the one of its key, else those of its table, else all."""
    field = error.field.removeprefix(CHANGED).removeprefix(": ")
    pairs = list(zip(settings, map(_key_path, places), strict=True))
    for key in (_key_path(f"{field}.{error.value}"), _key_path(field)):  # the first unknown key
        matching = [each for each, path in pairs if path == key[: len(path)]] or [
            each for each, path in pairs if path[: len(key)] == key and key
        ]
        if matching:
            break
    named = " ".join(f"--set {each.text}" for each in matching or settings)
    return InvalidConfig(named if len(matching) == 1 else f"{named}: {field}", error.value, error.expected)


def _key_path(place: str) -> tuple[str, ...]:
    return tuple(key for key in place.replace("[", ".").replace("]", "").split(".") if key)


# ---- back to TOML, for the reader of configs ------------------------------------------------------------------------


def _to_toml(tables: dict[str, Any]) -> str:
    return "".join(f"{_toml_string(key)} = {_toml_value(value)}\n" for key, value in tables.items())


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _toml_string(value)
        case dict():
            return "{" + ", ".join(f"{_toml_string(key)} = {_toml_value(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case datetime.date() | datetime.time():
            return value.isoformat()
    return repr(value)


def _toml_string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
