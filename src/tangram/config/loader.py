"""Reads a config: TOML into records.

Owns the errors: each names the file, the line if it is known, the table and the key, the value and what is valid. Never
starts or creates anything. Promises that a Config is valid as a whole, and that its paths are absolute if it was loaded
from a file. Errors that only the machine can reveal are found later; `add_error_location` gives them the same
form.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import msgspec

from tangram.config.tables import Config, ConfigRoot, field_types, validated
from tangram.config.validators import Validator
from tangram.errors import InvalidConfig

CONFIG_BYTES_MAX = 1 << 20
"""The largest config file: enough for thousands of tables. A larger file is something else."""

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R", bound=ConfigRoot)


def load(path: Path) -> Config:
    """Returns the config of the service. Raises InvalidConfig."""
    return load_as(Config, path)


def parse(text: str, name: str) -> Config:
    return parse_as(Config, text, name)


def load_as(kind: type[R], path: Path) -> R:
    """Loads a file. Its paths are relative to its folder. Raises InvalidConfig."""
    config = parse_as(kind, _read_text(path), str(path))
    folder = Path(os.path.abspath(path)).parent
    for table, keys in kind.PATH_KEYS.items():
        section = getattr(config, table)
        placed = tuple(
            _with_absolute_paths(each, keys, folder) for each in (section if isinstance(section, tuple) else (section,))
        )
        config = msgspec.structs.replace(config, **{table: placed if isinstance(section, tuple) else placed[0]})
    return config


def _with_absolute_paths(record: msgspec.Struct, keys: Iterable[str], folder: Path) -> msgspec.Struct:
    paths = {key: getattr(record, key) for key in keys}
    return msgspec.structs.replace(
        record, **{key: os.path.normpath(folder / value) for key, value in paths.items() if value}
    )


def parse_as(kind: type[R], text: str, name: str) -> R:
    """Parses a text, without changing its paths. `name`: the name of the text in errors. Raises InvalidConfig."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise InvalidConfig(name, "values nested too deep", "tables and keys") from None
    except ValueError as error:
        raise _toml_error(text, name, error) from None
    return _ConfigReader(text, name, kind).read(kind, tables, ())


@contextmanager
def add_error_location(path: Path | None, overridden: Collection[str] = ()) -> Iterator[None]:
    """Adds the file and the line to InvalidConfig errors that the block raises about a config from that file.
    `overridden`: keys whose value does not come from the file."""
    try:
        yield
    except InvalidConfig as error:
        place = parse_key_path(error.field)
        if path is None or error.field in overridden or place[0] not in field_types(Config):
            raise
        try:
            line = KeyLineIndex(_read_text(path)).find(place)
        except InvalidConfig:  # the file no longer exists
            line = None
        raise InvalidConfig(
            _location_prefix(str(path), line) + error.field, error.value, error.expected
        ) from error.__cause__


def _read_text(path: Path) -> str:
    """Returns the whole file, decoded from UTF-8."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidConfig(str(path), "something else", "a file")
            content = file.read(CONFIG_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidConfig(str(path), reason, "a config file that can be read") from error
    if len(content) > CONFIG_BYTES_MAX:
        raise InvalidConfig(str(path), "more", f"at most {CONFIG_BYTES_MAX} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        invalid = content[error.start : error.start + 1]
        raise InvalidConfig(f"{path}:{line}", invalid, "text in UTF-8") from error


def _toml_error(text: str, name: str, error: ValueError) -> InvalidConfig:
    lines = text.rstrip().split("\n")
    match = re.search(r"\(at line (\d+), column \d+\)", str(error))
    if match is None and not isinstance(error, tomllib.TOMLDecodeError):
        return InvalidConfig(name, "something else", f"numbers that can be read ({error})")
    line = int(match[1]) if match is not None else len(lines)
    return InvalidConfig(f"{name}:{line}", lines[min(line, len(lines)) - 1].strip(), f"TOML ({error})")


class _ConfigReader:
    """A text with known lines."""

    def __init__(self, text: str, name: str, root: type[ConfigRoot]) -> None:
        self._lines = KeyLineIndex(text)
        self._name = name
        self._root = root

    def read(self, kind: type[S], table: object, place: KeyPath) -> S:
        if not isinstance(table, dict):
            self._fail(place, table, f"a table, as {_table_header(place)} begins one")
        takes = field_types(kind)
        for key in table:
            if key not in takes:
                self._fail_unknown_key(kind, key, place)
        values = {key: self._value(takes[key], value, (*place, key)) for key, value in table.items()}
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in values:
                self._fail(place, sorted(values), f"the key {field.name} as well")
        try:
            return kind(**values)
        except InvalidConfig as error:
            inner = parse_key_path(error.field)
            if inner[0] not in takes:  # the records of the core say the name of their type before the key
                inner = inner[1:]
            self._fail((*place, *inner), error.value, error.expected)

    def _value(self, kind: Validator | Any, value: object, place: KeyPath) -> Any:
        if isinstance(kind, Validator):
            try:
                return validated("", value, kind)
            except InvalidConfig as error:
                self._fail(place, error.value, error.expected)
        if get_origin(kind) is tuple:
            if not isinstance(value, list):
                self._fail(place, value, f"tables that begin with {_table_header((*place, 0))} each")
            return tuple(self.read(get_args(kind)[0], each, (*place, at)) for at, each in enumerate(value))
        if isinstance(kind, types.UnionType):
            kind = get_args(kind)[0]
            example = ", ".join(f"{key} = ..." for key in field_types(kind))
            if not isinstance(value, dict):
                self._fail(place, value, f"a table such as {{ {example} }}")
        if isinstance(value, list):
            self._fail(place, value, f"one table, as {_table_header(place)} begins it")
        return self.read(kind, value, place)

    # ---- errors -----------

    def _fail(self, place: KeyPath, value: object, expected: str) -> NoReturn:
        where = _location_prefix(self._name, self._lines.find(place))
        raise InvalidConfig(f"{where}{_format_key_path(place)}", value, expected) from None

    def _fail_unknown_key(self, kind: type[msgspec.Struct], key: str, place: KeyPath) -> NoReturn:
        what = "key" if place else "table"
        near = difflib.get_close_matches(key, field_types(kind), n=1)
        others = [name for name, keys in _keys_by_table(self._root).items() if key in keys]
        if near:
            hint = f"did you mean {near[0]}?"
        elif others:
            hint = f"it is a key of [{others[0]}]"
        else:
            hint = "there are " + ", ".join(field_types(kind))
        new_name = getattr(kind, "RENAMED_KEYS", {}).get(key)
        expected = f"{new_name}, which is the new name of {key}" if new_name else f"a {what} that there is ({hint})"
        where = _location_prefix(self._name, self._lines.find((*place, key)))
        field = f"{where}{_format_key_path(place)}".removesuffix(": ")
        raise InvalidConfig(field, key, expected) from None


def _location_prefix(name: str, line: int | None) -> str:
    return f"{name}: " if line is None else f"{name}:{line}: "


def parse_key_path(field: str) -> KeyPath:
    """Parses a key as errors name it: `quotas[0].tokens`."""
    names = field.replace("[", ".").replace("]", "").split(".")
    return tuple(int(each) if each.isdecimal() else each for each in names)


def _format_key_path(place: Iterable[str | int]) -> str:
    """The reverse of `parse_key_path`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).lstrip(".")


def _table_header(place: KeyPath) -> str:
    """Returns the header line of such a table."""
    names = ".".join(each for each in place if isinstance(each, str))
    return f"[[{names}]]" if isinstance(place[-1], int) else f"[{names}]"


def _keys_by_table(root: type[ConfigRoot]) -> Mapping[str, Iterable[str]]:
    return {name: field_types(kind) for name, kind in field_types(root).items() if isinstance(kind, type)}


KeyPath = tuple[str | int, ...]
"""The path to a value: names of tables and keys, and the index in an array of tables."""

_TABLE_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.-]+)\s*\]\]?\s*(?:#.*)?")
_KEY_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=")


class KeyLineIndex:
    """Finds the line of a key, which the parser of the standard library does not keep.

    Returns the line of the key, or of the header of the nearest table around it, or None if that is uncertain.
    """

    def __init__(self, text: str) -> None:
        # A multi-line string could contain lines that look like keys.
        self._line_by_key_path = {} if '"""' in text or "'''" in text else _index_key_lines(text)

    def find(self, place: KeyPath) -> int | None:
        """The line, counted from 1."""
        for length in range(len(place), 0, -1):
            line = self._line_by_key_path.get(place[:length])
            if line is not None:
                return line
        return None


def _index_key_lines(text: str) -> dict[KeyPath, int]:
    """Whether a line begins a key or a known header. Lines inside a multi-line value never do."""
    lines: dict[KeyPath, int] = {}
    count_by_table: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.split("\n"), start=1):
        head, key = _TABLE_HEADER.fullmatch(line), _KEY_ASSIGNMENT.match(line)
        if head is not None:
            names = head[2].split(".")
            if head[1] == "[[":
                table = (*_with_table_indices(names[:-1], count_by_table), names[-1])
                count_by_table[table] = count_by_table.get(table, 0) + 1
                lines.setdefault(table, number)
            table = _with_table_indices(names, count_by_table)
            lines.setdefault(table, number)
        elif key is not None:
            lines.setdefault((*table, *key[1].split(".")), number)
    return lines


def _with_table_indices(names: list[str], count_by_table: dict[KeyPath, int]) -> KeyPath:
    """Adds indices: `[quotas.tokens]` belongs to the last of the quotas."""
    place: KeyPath = ()
    for name in names:
        place = (*place, name)
        if place in count_by_table:
            place = (*place, count_by_table[place] - 1)
    return place
