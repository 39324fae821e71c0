"""What may be different in the settings of a run that is resumed.

Owns which keys give what is saved its meaning: those stay as they are. Never reads or writes a file. Promises that each
difference is either refused with its key or told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tangram.errors import InvalidConfig
from tangram.rl.config.training_settings import TrainSettings

FIXED = {
    "seed": "the numbers of groups that are saved stand for what this seed makes of them",
    "policy.checkpoint": "the weights that are saved began there",
    "policy.layers": "the weights that are saved have this shape",
    "policy.width": "the weights that are saved have this shape",
    "policy.heads": "the weights that are saved have this shape",
    "sampling.temperature": "samples that are saved were drawn so",
    "sampling.top_k": "samples that are saved were drawn so",
    "sampling.top_p": "samples that are saved were drawn so",
    "sampling.keep_ids": "samples that are saved were drawn so",
    "groups.size": "samples that are saved are groups of this size",
    "objective.kind": "samples that are saved were scored for this objective",
    "tasks": "the vocabulary of the policy is made of its tasks",
    "tasks.environment": "the vocabulary of the policy is made of its tasks",
    "tasks.options": "samples that are saved were played so",
    "tasks.reward.kind": "samples that are saved were rewarded so",
    "tasks.reward.function": "samples that are saved were rewarded so",
    "tasks.reward.service": "samples that are saved were rewarded so",
    "teachers": "samples that are saved were scored by them",
    "teachers.checkpoint": "samples that are saved were scored by it",
}
"""Keys that stay, and why. All others may change."""
LEAVES = ("options",)
"""Tables whose keys are somebody else's: they are looked at as a whole."""
NAMED = ("tasks", "engines", "teachers")
"""Tables of which there are several, each with a name of its own."""


class Change(NamedTuple):
    key: str
    """As it is written with --set; of several tables the one that is meant in brackets."""
    fixed: str
    """The key in FIXED, if it is there."""
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} became {self.after!r}"


def allowed_changes(before: TrainSettings, after: TrainSettings) -> tuple[str, ...]:
    """What is different, in words. Raises InvalidConfig, with its key, for what may not be."""
    found = tuple(changes(before, after))
    for change in found:
        if change.fixed in FIXED:
            raise _refused(change.key, change, FIXED[change.fixed])
    if (before.objective.kl > 0.0) != (after.objective.kl > 0.0):
        change = next(each for each in found if each.key == "objective.kl")
        raise _refused(change.key, change, "a reference is saved with the weights, or none is")
    contexts = [max(engine.context_max for engine in each.engines) for each in (before, after)]
    if contexts[0] != contexts[1] and not after.policy.checkpoint:
        change = Change("engines.context_max", "", *contexts)
        raise _refused(change.key, change, "the weights that are saved read so many tokens")
    return tuple(map(str, found))


def _refused(key: str, change: Change, why: str) -> InvalidConfig:
    return InvalidConfig(
        key,
        change.after,
        f"{change.before!r} as before, because {why}; or a new run that begins with the weights of this one "
        "(policy.checkpoint)",
    )


def changes(before: TrainSettings, after: TrainSettings) -> Iterator[Change]:
    """In the order of the keys. Of a table that is new or gone its name alone."""
    old, new = dict(_flat(msgspec.to_builtins(before))), dict(_flat(msgspec.to_builtins(after)))
    for key in old:
        if key in new and old[key] != new[key]:
            yield Change(*key, old[key], new[key])


def _flat(table: dict[str, Any], key: str = "", fixed: str = "") -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in table.items():
        here, rule = f"{key}{name}", f"{fixed}{name}"
        if name in NAMED and isinstance(value, list | tuple):
            labels = _labels([each["name"] for each in value])
            yield (here, rule), labels
            for label, each in zip(labels, value, strict=True):
                yield from _flat(each, f"{here}[{label}].", f"{rule}.")
        elif isinstance(value, dict) and name not in LEAVES:
            yield from _flat(value, f"{here}.", f"{rule}.")
        else:
            yield (here, rule), value


def _labels(names: list[str]) -> list[str]:
    """Each its own: engines may have the same name."""
    return [
        name if name not in names[:at] else f"{name} {names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]
