"""Reading a config: TOML into records.

Owns the errors: each names the file, the line where it is known, the table and the key, what came and what is valid.
Never starts or makes anything. Promises that a Config that is handed out is valid as a whole, and that its paths are
absolute if it was loaded from a file. What only the machine can tell of a value is found later; `placed` gives it the
same form.
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

from tangram.config.tables import Config, Root, checked, kinds
from tangram.config.valid import Valid
from tangram.errors import InvalidConfig

CONFIG_BYTES_MAX = 1 << 20
"""Of a file: thousands of tables. Something else was meant by a larger one."""

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R", bound=Root)


def load(path: Path) -> Config:
    """The config of the service. Raises InvalidConfig."""
    return load_as(Config, path)


def parse(text: str, name: str) -> Config:
    return parse_as(Config, text, name)


def load_as(kind: type[R], path: Path) -> R:
    """What a file says. Its paths are relative to its folder. Raises InvalidConfig."""
    config = parse_as(kind, _text_of(path), str(path))
    folder = Path(os.path.abspath(path)).parent
    for table, keys in kind.PATHS.items():
        found = getattr(config, table)
        placed = tuple(_absolute(each, keys, folder) for each in (found if isinstance(found, tuple) else (found,)))
        config = msgspec.structs.replace(config, **{table: placed if isinstance(found, tuple) else placed[0]})
    return config


def _absolute(record: msgspec.Struct, keys: Iterable[str], folder: Path) -> msgspec.Struct:
    said = {key: getattr(record, key) for key in keys}
    return msgspec.structs.replace(
        record, **{key: os.path.normpath(folder / value) for key, value in said.items() if value}
    )


def parse_as(kind: type[R], text: str, name: str) -> R:
    """What a text says, its paths as they stand. `name` is what errors call it. Raises InvalidConfig."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise InvalidConfig(name, "values nested too deep", "tables and keys") from None
    except ValueError as error:
        raise _not_toml(text, name, error) from None
    return _Reading(text, name, kind).read(kind, tables, ())


@contextmanager
def placed(path: Path | None, overridden: Collection[str] = ()) -> Iterator[None]:
    """What is found wrong inside, in a config that was loaded from that file, is said with the file and the line.
    `overridden`: keys of which the value came from elsewhere."""
    try:
        yield
    except InvalidConfig as error:
        place = place_of(error.field)
        if path is None or error.field in overridden or place[0] not in kinds(Config):
            raise
        try:
            line = Lines(_text_of(path)).of(place)
        except InvalidConfig:  # the file is gone by now
            line = None
        raise InvalidConfig(_where(str(path), line) + error.field, error.value, error.expected) from error.__cause__


def _text_of(path: Path) -> str:
    """The file whole, in UTF-8."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe that nobody writes would wait for ever
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
        wrong = content[error.start : error.start + 1]
        raise InvalidConfig(f"{path}:{line}", wrong, "text in UTF-8") from error


def _not_toml(text: str, name: str, error: ValueError) -> InvalidConfig:
    lines = text.rstrip().split("\n")
    found = re.search(r"\(at line (\d+), column \d+\)", str(error))
    if found is None and not isinstance(error, tomllib.TOMLDecodeError):
        return InvalidConfig(name, "something else", f"numbers that can be read ({error})")
    line = int(found[1]) if found is not None else len(lines)
    return InvalidConfig(f"{name}:{line}", lines[min(line, len(lines)) - 1].strip(), f"TOML ({error})")


class _Reading:
    """One text, of which the lines are known."""

    def __init__(self, text: str, name: str, whole: type[Root]) -> None:
        self._lines = Lines(text)
        self._name = name
        self._whole = whole

    def read(self, kind: type[S], table: object, place: Place) -> S:
        if not isinstance(table, dict):
            self._wrong(place, table, f"a table, as {_head(place)} begins one")
        takes = kinds(kind)
        for key in table:
            if key not in takes:
                self._unknown(kind, key, place)
        values = {key: self._value(takes[key], value, (*place, key)) for key, value in table.items()}
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in values:
                self._wrong(place, sorted(values), f"the key {field.name} as well")
        try:
            return kind(**values)
        except InvalidConfig as error:
            inner = place_of(error.field)
            if inner[0] not in takes:  # the records of the core say the name of their type before the key
                inner = inner[1:]
            self._wrong((*place, *inner), error.value, error.expected)

    def _value(self, kind: Valid | Any, value: object, place: Place) -> Any:
        if isinstance(kind, Valid):
            try:
                return checked("", value, kind)
            except InvalidConfig as error:
                self._wrong(place, error.value, error.expected)
        if get_origin(kind) is tuple:
            if not isinstance(value, list):
                self._wrong(place, value, f"tables that begin with {_head((*place, 0))} each")
            return tuple(self.read(get_args(kind)[0], each, (*place, at)) for at, each in enumerate(value))
        if isinstance(kind, types.UnionType):
            kind = get_args(kind)[0]
            example = ", ".join(f"{key} = ..." for key in kinds(kind))
            if not isinstance(value, dict):
                self._wrong(place, value, f"a table such as {{ {example} }}")
        if isinstance(value, list):
            self._wrong(place, value, f"one table, as {_head(place)} begins it")
        return self.read(kind, value, place)

    # ---- what is wrong ----

    def _wrong(self, place: Place, value: object, expected: str) -> NoReturn:
        where = _where(self._name, self._lines.of(place))
        raise InvalidConfig(f"{where}{_shown(place)}", value, expected) from None

    def _unknown(self, kind: type[msgspec.Struct], key: str, place: Place) -> NoReturn:
        what = "key" if place else "table"
        near = difflib.get_close_matches(key, kinds(kind), n=1)
        others = [name for name, keys in _keys_by_table(self._whole).items() if key in keys]
        if near:
            hint = f"did you mean {near[0]}?"
        elif others:
            hint = f"it is a key of [{others[0]}]"
        else:
            hint = "there are " + ", ".join(kinds(kind))
        where = _where(self._name, self._lines.of((*place, key)))
        field = f"{where}{_shown(place)}".removesuffix(": ")
        raise InvalidConfig(field, key, f"a {what} that there is ({hint})") from None


def _where(name: str, line: int | None) -> str:
    return f"{name}: " if line is None else f"{name}:{line}: "


def place_of(field: str) -> Place:
    """Of a key as errors name it: `quotas[0].tokens`."""
    names = field.replace("[", ".").replace("]", "").split(".")
    return tuple(int(each) if each.isdecimal() else each for each in names)


def _shown(place: Iterable[str | int]) -> str:
    """The reverse of `place_of`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).lstrip(".")


def _head(place: Place) -> str:
    """How a file begins such a table."""
    names = ".".join(each for each in place if isinstance(each, str))
    return f"[[{names}]]" if isinstance(place[-1], int) else f"[{names}]"


def _keys_by_table(whole: type[Root]) -> Mapping[str, Iterable[str]]:
    return {name: kinds(kind) for name, kind in kinds(whole).items() if isinstance(kind, type)}


Place = tuple[str | int, ...]
"""The way to a value: names of tables and keys, and the numbers of tables of which there are several."""

_HEAD = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.-]+)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=")


class Lines:
    """Finds the line of a key, which the parser of the standard library does not keep.

    A line that is returned holds the key, or the head of the nearest table around it; if that is uncertain, the result
    is None.
    """

    def __init__(self, text: str) -> None:
        # A text of several lines could look like anything.
        self._found = {} if '"""' in text or "'''" in text else _found(text)

    def of(self, place: Place) -> int | None:
        """Counted from 1."""
        for length in range(len(place), 0, -1):
            line = self._found.get(place[:length])
            if line is not None:
                return line
        return None


def _found(text: str) -> dict[Place, int]:
    """Values that go over several lines never begin one with a bare key and `=`, nor are they a head that is known."""
    found: dict[Place, int] = {}
    count_by_table: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.split("\n"), start=1):
        head, key = _HEAD.fullmatch(line), _KEY.match(line)
        if head is not None:
            names = head[2].split(".")
            if head[1] == "[[":
                table = (*_numbered(names[:-1], count_by_table), names[-1])
                count_by_table[table] = count_by_table.get(table, 0) + 1
                found.setdefault(table, number)
            table = _numbered(names, count_by_table)
            found.setdefault(table, number)
        elif key is not None:
            found.setdefault((*table, *key[1].split(".")), number)
    return found


def _numbered(names: list[str], count_by_table: dict[Place, int]) -> Place:
    """`[quotas.tokens]` belongs to the last of the quotas."""
    place: Place = ()
    for name in names:
        place = (*place, name)
        if place in count_by_table:
            place = (*place, count_by_table[place] - 1)
    return place
