"""Keys: which key of a config a manager means by what it finds wrong.

Owns the translation. Managers know nothing of configs: they name what they were given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tangram.config import Config
from tangram.errors import InvalidConfig

_OF_NODE = {"cores": "node.cores", "memory_bytes": "node.memory"}
_OF_SERVICE = re.compile(r"service (.+) (engine|arguments|degrees|memory_bytes|load_s_max|call_s_max|at degree \d+)")


@contextmanager
def as_keys(config: Config) -> Iterator[None]:
    """What managers find wrong inside is said of the key that they were made of."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(_key(config, error.field), error.value, error.expected) from error.__cause__


def _key(config: Config, field: str) -> str:
    found = _OF_SERVICE.fullmatch(field)
    numbers = [number for number, service in enumerate(config.services) if found and service.name == found[1]]
    if found is None or not numbers:
        return _OF_NODE.get(field, field)
    return f"services[{numbers[0]}].{'degrees' if found[2].startswith('at ') else found[2]}"
