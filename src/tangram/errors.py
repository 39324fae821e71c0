"""Every exception of Tangram, and whose fault each one is.

TangramError
├── InvalidInput          the caller: a field is wrong; names the field, the value and what would be valid
│   ├── InvalidAction     ... in an action or its demand
│   ├── InvalidConfig     ... in a config, a pool or a command-line option
│   └── InvalidTrace      ... in a trace file; names the line
├── AdmissionRefused      a limit: names it, its value and what to do
├── ManagerError          the world: a machine, a process, a network
└── InvariantError        us: a bug in Tangram; carries the story of what led there
"""

from __future__ import annotations


class TangramError(Exception):
    """Root of the tree: `except TangramError` catches all that Tangram raises on purpose."""


class InvalidInput(TangramError):
    """The caller gave something that cannot be meant. Nothing was changed."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{field}: expected {expected}, got {value!r}")


class InvalidAction(InvalidInput):
    """An action or its demand is malformed."""


class InvalidConfig(InvalidInput):
    """A config, a pool or an option is malformed."""


class InvalidTrace(InvalidInput):
    """A trace file is malformed; `field` names the file and line."""


class AdmissionRefused(TangramError):
    """A named limit kept an action out."""

    def __init__(self, limit: str, reason: str) -> None:
        self.limit = limit
        self.reason = reason
        super().__init__(reason)


class ManagerError(TangramError):
    """The world failed: a process, a machine or a network."""


class InvariantError(TangramError):
    """A bug in Tangram. The message ends with the story of the action it concerns."""

    def __init__(self, what: str, story: list[str] | None = None) -> None:
        self.what = what
        self.story = story or []
        lines = [what, *(f"    {line}" for line in self.story)]
        super().__init__("\n".join(lines))
