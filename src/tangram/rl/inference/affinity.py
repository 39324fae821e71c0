"""Hardware affinity: which hardware class generates the tokens of which task, and why.

Owns the known classes, the default class of each role, and the binding of tasks to classes. Never starts, routes or
measures. `explain` computes a binding from settings before anything is started. Promises that a class without engines
is rejected or reported as a fallback, never ignored.

Compute-bound work (prefill of long contexts, training) belongs on hardware with much compute for its price,
bandwidth-bound work (decoding) on hardware with much memory bandwidth for its price.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from tangram.errors import InvalidConfig
from tangram.reports.terminal import text_table
from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.sim.serving_model import H20, H800, Gpu

COMPUTE, BANDWIDTH = "compute", "bandwidth"
DEFAULT = "default"
"""The name for all tasks that are not listed."""
ANY = ""
"""No preferred class: the least loaded engine is chosen."""


HARDWARE_BY_CLASS: Mapping[str, Gpu] = {COMPUTE: H800, BANDWIDTH: H20}
"""The device that represents a class, with published numbers and price."""
CLASS_BY_DEVICE: Mapping[str, str] = {gpu.name: hardware for hardware, gpu in HARDWARE_BY_CLASS.items()}

GENERATION_CLASS = BANDWIDTH
"""The default class of generation."""


# ---- the binding --------------------------------------------------------------------------------------------------


class TaskBinding(msgspec.Struct, frozen=True, kw_only=True):
    """Where one task goes."""

    task: str
    wanted: str
    """The preferred class; empty: any."""
    used: str
    """The classes that serve it, joined by `+`."""
    why: str
    engines: tuple[str, ...]
    """Engines that serve it."""
    falls_back: bool = False
    """It is not served by its preferred class."""
    fallback: tuple[str, ...] = ()
    """The fallback classes when the preferred one fails."""
    output_is_trainable: bool = msgspec.field(default=True, name="trains")
    """Whether its tokens can be trained on."""


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The binding of all tasks, with reasons."""

    tasks: tuple[TaskBinding, ...]
    engines: Mapping[str, tuple[str, ...]]
    """By class."""

    def task(self, name: str) -> TaskBinding:
        """Raises KeyError."""
        return {bound.task: bound for bound in self.tasks}[name]

    def lines(self) -> list[str]:
        """As text."""
        rows = [(name, f"{len(engines)}", ", ".join(engines)) for name, engines in self.engines.items()]
        lines = text_table([("class", "engines", "names"), *rows])
        lines += ["", *text_table([("task", "served by", "why"), *(_binding_row(bound) for bound in self.tasks)])]
        for bound in self.tasks:
            if bound.falls_back:
                lines.append(f"! {bound.task} falls back: it prefers {bound.wanted}, {bound.used} serves it")
            if not bound.output_is_trainable:
                lines.append(f"! {bound.task}: the output of {bound.used} cannot be trained on, only evaluated")
        return lines


def _binding_row(bound: TaskBinding) -> tuple[str, str, str]:
    then = f"; if it fails: {', '.join(bound.fallback)}" if bound.fallback and not bound.falls_back else ""
    return bound.task, bound.used or "any", bound.why + then


# ---- choosing -----------------------------------------------------------------------------------------------------


class EngineLike(Protocol):
    """The properties of an engine that determine the choice of classes."""

    @property
    def name(self) -> str: ...
    @property
    def hardware(self) -> str: ...
    @property
    def output_is_trainable(self) -> bool: ...


T = TypeVar("T", bound=EngineLike)


class PlannedEngine(msgspec.Struct, frozen=True):
    """An engine that does not exist yet."""

    name: str
    hardware: str
    output_is_trainable: bool = True


def preferred_class(affinity: Mapping[str, str], task: str) -> str:
    """The class that a task prefers."""
    return affinity.get(task, affinity.get(DEFAULT, ANY))


def preferred_engines(engines: Sequence[T], preferred: str) -> list[T]:
    """Engines of the preferred class. Without a preference: engines for training, if there are any. Tokens of an
    evaluation-only engine are useless to a trainer, so it serves only tasks that prefer its class."""
    if preferred != ANY:
        return [engine for engine in engines if engine.hardware == preferred]
    return _trainable_if(engines, any(engine.output_is_trainable for engine in engines))


def fallback_engines(engines: Sequence[T], preferred: str) -> list[T]:
    """Engines of other classes that may take over; only engines for training if the preferred ones are, or if there are
    none."""
    preferred_ones = [engine for engine in engines if engine.hardware == preferred]
    others = [engine for engine in engines if engine.hardware != preferred]
    needed = any(engine.output_is_trainable for engine in preferred_ones or others)
    return _trainable_if(others, needed)


def _trainable_if(engines: Sequence[T], output_is_trainable: bool) -> list[T]:
    return [engine for engine in engines if engine.output_is_trainable or not output_is_trainable]


def bind(affinity: Mapping[str, str], tasks: Iterable[str], engines: Sequence[T]) -> Binding:
    """The binding if all engines serve."""
    names_by_class: dict[str, tuple[str, ...]] = {}
    for engine in engines:
        names_by_class[engine.hardware] = (*names_by_class.get(engine.hardware, ()), engine.name)
    tasks = dict.fromkeys((*tasks, *(task for task in affinity if task != DEFAULT), DEFAULT))
    return Binding(tasks=tuple(_bind_task(affinity, task, engines) for task in tasks), engines=names_by_class)


def _bind_task(affinity: Mapping[str, str], task: str, engines: Sequence[T]) -> TaskBinding:
    preferred = preferred_class(affinity, task)
    preferred_ones = preferred_engines(engines, preferred)
    others = fallback_engines(engines, preferred) if preferred != ANY else []
    serving = preferred_ones or others
    falls_back = not preferred_ones
    return TaskBinding(
        task=task,
        wanted=preferred,
        used="+".join(dict.fromkeys(engine.hardware for engine in serving)),
        why=_reason(affinity, task, preferred, falls_back=falls_back),
        engines=tuple(engine.name for engine in serving),
        falls_back=falls_back,
        fallback=tuple(dict.fromkeys(engine.hardware for engine in others)),
        output_is_trainable=all(engine.output_is_trainable for engine in serving),
    )


def _reason(affinity: Mapping[str, str], task: str, preferred: str, *, falls_back: bool) -> str:
    if preferred == ANY:
        return "no preference: the least loaded engine"
    source = "its affinity" if task in affinity and task != DEFAULT else "the default of generation"
    return f"{source} is {preferred}" + (f", but there is no engine of class {preferred}" if falls_back else "")


# ---- from settings ------------------------------------------------------------------------------------------------


def affinity_of(settings: RolloutSettings) -> dict[str, str]:
    """The binding that a router follows. Raises InvalidConfig for an unknown class without engines."""
    classes = list(dict.fromkeys(engine.hardware for engine in settings.engines))
    classes_by_task = {DEFAULT: GENERATION_CLASS if GENERATION_CLASS in classes else ANY}
    for task in settings.tasks:
        if task.affinity:
            classes_by_task[task.name] = resolve_class(task.affinity, classes, key=f"tasks.{task.name}.affinity")
    return classes_by_task


def resolve_class(name: str, classes: Sequence[str], *, key: str) -> str:
    """Resolves a class name or device name: H800 is class `compute` unless an engine has that name as its class. Raises
    InvalidConfig for unknown names without engines: a fallback would hide a typo."""
    if name in classes:
        return name
    known = CLASS_BY_DEVICE.get(name, name)
    if known in classes or known in HARDWARE_BY_CLASS:
        return known
    near = difflib.get_close_matches(name, [*classes, *HARDWARE_BY_CLASS], n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise InvalidConfig(key, name, f"a class that an engine has, which are {', '.join(classes)}{hint}")


def explain(settings: RolloutSettings) -> Binding:
    """The binding if all engines start. Starts nothing. Raises InvalidConfig."""
    if not settings.engines:
        raise InvalidConfig("engines", [], "at least one table [[engines]]: without an engine no tokens are generated")
    engines = [
        PlannedEngine(table.engine_name(number), table.hardware)
        for table in settings.engines
        for number in range(table.count)
    ]
    names = [engine.name for engine in engines]
    if len(set(names)) != len(names):
        raise InvalidConfig("engines.name", names, "a name of its own for each table [[engines]]")
    tasks = [task.name for task in settings.tasks]
    return bind(affinity_of(settings), tasks, engines)
