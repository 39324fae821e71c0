"""Settings that may differ when a run is resumed.

Owns the keys that define the meaning of stored data, which must not change. Never reads or writes a file. Promises that
each difference is either refused with its key, or reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tangram.errors import InvalidConfig
from tangram.rl.config.training_settings import TrainSettings

FIXED_KEYS = {
    "seed": "saved group numbers belong to this seed",
    "policy.checkpoint": "the saved weights began there",
    "policy.layers": "the saved weights have this shape",
    "policy.width": "the saved weights have this shape",
    "policy.heads": "the saved weights have this shape",
    "sampling.temperature": "saved samples were drawn with it",
    "sampling.top_k": "saved samples were drawn with it",
    "sampling.top_p": "saved samples were drawn with it",
    "sampling.keep_ids": "saved samples were drawn with it",
    "groups.size": "saved samples are groups of this size",
    "objective.kind": "saved samples were scored for this objective",
    "tasks": "the vocabulary of the policy is made of its tasks",
    "tasks.environment": "the vocabulary of the policy is made of its tasks",
    "tasks.options": "saved samples were played with them",
    "tasks.reward.kind": "saved samples were rewarded by it",
    "tasks.reward.function": "saved samples were rewarded by it",
    "tasks.reward.service": "saved samples were rewarded by it",
    "teachers": "saved samples were scored by them",
    "teachers.checkpoint": "saved samples were scored by it",
}
"""Keys that cannot change, with the reason. All others may change."""
OPAQUE_TABLES = ("options",)
"""Tables with user-defined keys, compared as a whole."""
NAMED_TABLES = ("tasks", "engines", "teachers")
"""Array tables whose elements have names."""


class SettingChange(NamedTuple):
    key: str
    """The key as in --set; with the element of an array table in brackets."""
    fixed_key: str
    """The key to look up in FIXED_KEYS."""
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} became {self.after!r}"


def require_allowed_changes(before: TrainSettings, after: TrainSettings) -> tuple[str, ...]:
    """Returns the differences as text. Raises InvalidConfig, with its key, for one that is not allowed."""
    differences = tuple(changes(before, after))
    for change in differences:
        if change.fixed_key in FIXED_KEYS:
            raise _refusal(change.key, change, FIXED_KEYS[change.fixed_key])
    if (before.objective.kl > 0.0) != (after.objective.kl > 0.0):
        change = next(each for each in differences if each.key == "objective.kl")
        raise _refusal(change.key, change, "a reference is saved with the weights only if kl is above 0")
    contexts = [max(engine.context_max for engine in each.engines) for each in (before, after)]
    if contexts[0] != contexts[1] and not after.policy.checkpoint:
        change = SettingChange("engines.context_max", "", *contexts)
        raise _refusal(change.key, change, "the saved weights have this context")
    return tuple(map(str, differences))


def _refusal(key: str, change: SettingChange, reason: str) -> InvalidConfig:
    return InvalidConfig(
        key,
        change.after,
        f"{change.before!r} as before, because {reason}; or a new run that starts with the weights of this one "
        "(policy.checkpoint)",
    )


def changes(before: TrainSettings, after: TrainSettings) -> Iterator[SettingChange]:
    """In the order of the keys. For an added or removed table its name only."""
    old, new = dict(_flat(_as_configured(before))), dict(_flat(_as_configured(after)))
    for key in old:
        if key in new and old[key] != new[key]:
            yield SettingChange(*key, old[key], new[key])


def _as_configured(value: Any) -> Any:
    """Tables with the keys of the config, some of which are stored under former names."""
    if isinstance(value, msgspec.Struct):
        return {key: _as_configured(each) for key, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, list | tuple):
        return [_as_configured(each) for each in value]
    return value


def _flat(table: dict[str, Any], key: str = "", fixed: str = "") -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in table.items():
        path, rule = f"{key}{name}", f"{fixed}{name}"
        if name in NAMED_TABLES and isinstance(value, list | tuple):
            labels = _labels([each["name"] for each in value])
            yield (path, rule), labels
            for label, each in zip(labels, value, strict=True):
                yield from _flat(each, f"{path}[{label}].", f"{rule}.")
        elif isinstance(value, dict) and name not in OPAQUE_TABLES:
            yield from _flat(value, f"{path}.", f"{rule}.")
        else:
            yield (path, rule), value


def _labels(names: list[str]) -> list[str]:
    """Returns distinct labels: engines may have the same name."""
    return [
        name if name not in names[:at] else f"{name} {names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]
