"""The config of a training run as the command line gives it: a file, and what `--set` says otherwise.

Owns how `--set training.staleness=2` is read and put into the tables of the file. Promises that what is wrong with the
file is said of the file, with its line, and what is wrong with a `--set` of that one, with the nearest key that there
is; and that paths are absolute: those of the file from its folder, as everywhere, those of a `--set` too.

    training.staleness=2            a key of a table
    tasks.frozenlake.weight=2       of several tables, the one with that name
    engines.0.count=2               ... or the one of that number, counted from 0; engines[0].count as well
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

from tangram.config.reading import CONFIG_BYTES_MAX, parse_as
from tangram.config.tables import Root, kinds
from tangram.errors import InvalidConfig

R = TypeVar("R", bound=Root)

CHANGED = "changed"
"""What the file is called inside while it is read with what was set."""
BEGINS_TOML = tuple("\"'[{")
"""What begins so is no plain word: if it is not TOML, it is a slip."""


class Setting(NamedTuple):
    """One `--set`."""

    text: str
    keys: tuple[str, ...]
    value: Any


def look_beside(config: Path) -> tuple[str, ...]:
    """Environments of one's own mostly lie beside a config, or where the command is called: there they are looked for
    from now on. The folders, for whoever comes later."""
    return look_in(dict.fromkeys((str(config.parent.resolve()), os.getcwd())))


def look_in(folders: Iterable[str]) -> tuple[str, ...]:
    """For modules, after all other places."""
    found = tuple(folders)
    sys.path += [folder for folder in found if folder not in sys.path]
    return found


def load_with(kind: type[R], path: Path, changes: Sequence[str] = ()) -> R:
    """What a file says, changed by these `key=value`. Raises InvalidConfig."""
    settings = [_setting(text) for text in changes]
    text = _text_of(path)
    if not settings:
        return _absolute(parse_as(kind, text, str(path)), path)
    try:
        tables = tomllib.loads(text)
        places = [_put(kind, tables, each) for each in settings]
        return _absolute(parse_as(kind, _toml(tables), CHANGED), path)
    except (InvalidConfig, ValueError, RecursionError) as error:
        parse_as(kind, text, str(path))  # what is wrong with the file itself comes first
        if not isinstance(error, InvalidConfig) or not error.field.startswith(CHANGED):
            raise
        raise _blamed(error, settings, places) from None


def _text_of(path: Path) -> str:
    try:
        if not path.is_file():
            found = "no file" if not path.exists() else "a folder" if path.is_dir() else "something else"
            raise InvalidConfig(str(path), found, "a config file, such as examples/multitask.toml")
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


def _absolute(config: R, path: Path) -> R:
    """With the paths of the file made absolute."""
    folder = Path(os.path.abspath(path)).parent

    def of(record: Any, keys: Sequence[str]) -> Any:
        said = {key: getattr(record, key) for key in keys}
        return msgspec.structs.replace(record, **{k: os.path.normpath(folder / v) for k, v in said.items() if v})

    for table, keys in type(config).PATHS.items():
        found = getattr(config, table)
        changed = tuple(of(each, keys) for each in found) if isinstance(found, tuple) else of(found, keys)
        config = msgspec.structs.replace(config, **{table: changed})
    return config


# ---- one --set ------------------------------------------------------------------------------------------------------


def _setting(text: str) -> Setting:
    name, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in re.sub(r"\[([^\[\]]*)\]", r".\1", name).split("."))
    if not equals or not all(keys):
        raise InvalidConfig(f"--set {text}", text, "key=value, such as training.staleness=2")
    return Setting(text, keys, _value(text, value.strip()))


def _value(text: str, value: str) -> Any:
    """As TOML has it; a plain word is text."""
    try:
        read = tomllib.loads(f"value = {value}")
        if set(read) == {"value"}:
            return read["value"]
    except (ValueError, RecursionError):
        pass
    if not value or value.startswith(BEGINS_TOML) or not value.isprintable():
        raise InvalidConfig(f"--set {text}", value, 'a value as TOML has it, such as 2, true, "text" or [1, 2]')
    return value


def _put(kind: type[Root], tables: dict[str, Any], setting: Setting) -> str:
    """Into the tables. Returns the place as errors name it."""
    place = ""
    there: Any = tables
    takes: Any = kind
    *way, last = setting.keys
    for key in way:
        place, there, takes = _step(setting, place, there, takes, key)
    if not isinstance(there, dict):
        raise InvalidConfig(f"--set {setting.text}", last, f"no more keys: {place} is a value")
    if get_origin(_kind_of(takes, last)) is tuple:
        many = f"{'.'.join(setting.keys)}.NAME.KEY=VALUE, as there are several such tables"
        raise InvalidConfig(f"--set {setting.text}", last, many)
    there[last] = setting.value
    return f"{place}.{last}".lstrip(".")


def _step(setting: Setting, place: str, there: Any, takes: Any, key: str) -> tuple[str, Any, Any]:
    """One key further."""
    if isinstance(there, list):
        index = _which(setting, place, there, key)
        return f"{place}[{index}]", there[index], get_args(takes)[0] if get_origin(takes) is tuple else None
    if not isinstance(there, dict):
        raise InvalidConfig(f"--set {setting.text}", key, f"no more keys: {place} is a value")
    below = _kind_of(takes, key)
    if key not in there:
        # Of tables that the file does not have, there are as many as there are without it.
        several = get_origin(below) is tuple
        there[key] = [{} for _ in _default(takes, key)] if several else {}
    return f"{place}.{key}".lstrip("."), there[key], below


def _kind_of(takes: Any, key: str) -> Any:
    known = isinstance(takes, type) and issubclass(takes, msgspec.Struct)
    return kinds(takes).get(key) if known else None


def _default(takes: Any, key: str) -> Sequence[Any]:
    for field in msgspec.structs.fields(takes):
        if field.name == key and isinstance(field.default, tuple):
            return field.default
    return ()


def _which(setting: Setting, place: str, there: list[Any], key: str) -> int:
    names = [each.get("name") if isinstance(each, dict) else None for each in there]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(there):
        return int(key)
    known = [str(name) for name in names if name is not None]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}" if known else "none has a name"
    if not there:
        raise InvalidConfig(f"--set {setting.text}", key, f"a table that the config has: there is no [[{place}]] in it")
    count = f"0 to {len(there) - 1}" if len(there) > 1 else "0: there is one"
    raise InvalidConfig(
        f"--set {setting.text}", key, f"the name of one of [[{place}]] ({hint}), or its number ({count})"
    )


# ---- what is wrong --------------------------------------------------------------------------------------------------


def _blamed(error: InvalidConfig, settings: Sequence[Setting], places: Sequence[str]) -> InvalidConfig:
    """The same, of the `--set` that it is about: the one of its key, else those of its table, else all."""
    field = error.field.removeprefix(CHANGED).removeprefix(": ")
    pairs = list(zip(settings, map(_way, places), strict=True))
    for key in (_way(f"{field}.{error.value}"), _way(field)):  # the first of a key that there is not
        meant = [each for each, way in pairs if way == key[: len(way)]] or [
            each for each, way in pairs if way[: len(key)] == key and key
        ]
        if meant:
            break
    named = " ".join(f"--set {each.text}" for each in meant or settings)
    return InvalidConfig(named if len(meant) == 1 else f"{named}: {field}", error.value, error.expected)


def _way(place: str) -> tuple[str, ...]:
    return tuple(key for key in place.replace("[", ".").replace("]", "").split(".") if key)


# ---- back to TOML, for the reader of configs ------------------------------------------------------------------------


def _toml(tables: dict[str, Any]) -> str:
    return "".join(f"{_text(key)} = {_inline(value)}\n" for key, value in tables.items())


def _inline(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case dict():
            return "{" + ", ".join(f"{_text(key)} = {_inline(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_inline, value)) + "]"
        case datetime.date() | datetime.time():
            return value.isoformat()
    return repr(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
