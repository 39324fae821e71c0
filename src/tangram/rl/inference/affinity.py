"""Affinity: which class of hardware writes the tokens of which task, and why.

Owns the classes that are known, the default by role, and the binding of tasks to classes. Never starts, routes or
measures anything: a gateway follows a binding, `explain` makes one of settings before anything is started. Promises
that a class nobody has is either refused or visibly replaced, never silently.

Compute-bound work (reading long contexts, training) belongs on hardware with much compute for its price,
bandwidth-bound work (writing) on hardware with much memory bandwidth for its price.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import EngineSettings, RolloutSettings
from tangram.sim import serving_model
from tangram.sim.serving_model import Gpu

COMPUTE, BANDWIDTH = "compute", "bandwidth"
DEFAULT = "default"
"""The task that stands for all that are not named."""
ANY = ""
"""No class is preferred: the engine with the least to do is taken."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a class, as its vendor and its price say."""

    name: str
    hardware: str
    """The class that it stands for."""
    tflops: float
    """Dense, 16 bits."""
    memory_gb: float
    bandwidth_tb_s: float
    cost: float
    """Per hour, in units of the cheapest."""


def _published(device: Gpu, hardware: str) -> Hardware:
    return Hardware(
        name=device.name,
        hardware=hardware,
        tflops=device.flops / 1e12,
        memory_gb=device.memory_bytes / 1e9,
        bandwidth_tb_s=device.bandwidth / 1e12,
        cost=device.cost,
    )


H800 = _published(serving_model.H800, COMPUTE)
H20 = _published(serving_model.H20, BANDWIDTH)
PUBLISHED: Mapping[str, Hardware] = {each.hardware: each for each in (H800, H20)}
"""By class."""
CLASS_BY_DEVICE: Mapping[str, str] = {each.name: each.hardware for each in PUBLISHED.values()}

CLASS_BY_ROLE: Mapping[str, str] = {
    "training": COMPUTE,
    "generation": BANDWIDTH,
    "environment": "cpu",
    "reward": "gpu",
}
"""Where each role goes if nobody says otherwise."""


# ---- the binding --------------------------------------------------------------------------------------------------


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Where one task goes."""

    task: str
    wanted: str
    """The class that it prefers; empty: any."""
    used: str
    """The class that serves it now; of several, joined by `+`."""
    why: str
    engines: tuple[str, ...]
    """That serve it now."""
    falls_back: bool = False
    """It is not served by the class that it prefers."""
    fallback: tuple[str, ...] = ()
    """The classes that take over when the preferred one fails."""
    trains: bool = True
    """Whether what is written for it may be trained on."""


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Which task goes where and why."""

    tasks: tuple[Bound, ...]
    engines: Mapping[str, tuple[str, ...]]
    """By class."""

    def task(self, name: str) -> Bound:
        """Raises KeyError."""
        return {bound.task: bound for bound in self.tasks}[name]

    def lines(self) -> list[str]:
        """For a reader."""
        rows = [(name, f"{len(engines)}", ", ".join(engines)) for name, engines in self.engines.items()]
        found = _table([("class", "engines", "names"), *rows])
        found += ["", *_table([("task", "served by", "why"), *(_row(bound) for bound in self.tasks)])]
        for bound in self.tasks:
            if bound.falls_back:
                found.append(f"! {bound.task} falls back: it prefers {bound.wanted}, {bound.used} serves it")
            if not bound.trains:
                found.append(f"! {bound.task}: what {bound.used} writes cannot be trained on, only evaluated")
        return found


def _row(bound: Bound) -> tuple[str, str, str]:
    then = f"; if it fails: {', '.join(bound.fallback)}" if bound.fallback and not bound.falls_back else ""
    return bound.task, bound.used or "any", bound.why + then


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# ---- choosing -----------------------------------------------------------------------------------------------------


class Offered(Protocol):
    """An engine, as far as a choice of classes has to know it."""

    @property
    def name(self) -> str: ...
    @property
    def hardware(self) -> str: ...
    @property
    def trains(self) -> bool: ...


T = TypeVar("T", bound=Offered)


class Planned(msgspec.Struct, frozen=True):
    """An engine that is not there yet."""

    name: str
    hardware: str
    trains: bool = True


def wanted(affinity: Mapping[str, str], task: str) -> str:
    """The class that a task prefers."""
    return affinity.get(task, affinity.get(DEFAULT, ANY))


def first_choice(offers: Sequence[T], preferred: str) -> list[T]:
    """Engines of the preferred class. If any will do: those that train, if there are such; what an engine writes that
    cannot train is lost on a trainer, so it serves only who asks for its class."""
    if preferred != ANY:
        return [offer for offer in offers if offer.hardware == preferred]
    return _same_use(offers, any(offer.trains for offer in offers))


def compatible(offers: Sequence[T], preferred: str) -> list[T]:
    """Engines of other classes that may take over: if those of the preferred class train, or there are none, only such
    as train."""
    own = [offer for offer in offers if offer.hardware == preferred]
    others = [offer for offer in offers if offer.hardware != preferred]
    needed = any(offer.trains for offer in own or others)
    return _same_use(others, needed)


def _same_use(offers: Sequence[T], trains: bool) -> list[T]:
    return [offer for offer in offers if offer.trains or not trains]


def bind(affinity: Mapping[str, str], tasks: Iterable[str], offers: Sequence[T], *, healthy: set[str]) -> Binding:
    """`healthy`: names of the engines that serve now."""
    engines: dict[str, tuple[str, ...]] = {}
    for offer in offers:
        engines[offer.hardware] = (*engines.get(offer.hardware, ()), offer.name)
    names = dict.fromkeys((*tasks, *(task for task in affinity if task != DEFAULT), DEFAULT))
    return Binding(tasks=tuple(_bound(affinity, task, offers, healthy) for task in names), engines=engines)


def _bound(affinity: Mapping[str, str], task: str, offers: Sequence[T], healthy: set[str]) -> Bound:
    preferred = wanted(affinity, task)
    own = first_choice(offers, preferred)
    others = compatible(offers, preferred) if preferred != ANY else []
    serving = [offer for offer in own if offer.name in healthy]
    falls_back = not serving and preferred != ANY
    if falls_back:
        serving = [offer for offer in others if offer.name in healthy]
    return Bound(
        task=task,
        wanted=preferred,
        used="+".join(dict.fromkeys(offer.hardware for offer in serving)),
        why=_why(affinity, task, preferred, has_own=bool(own), falls_back=falls_back, served=bool(serving)),
        engines=tuple(offer.name for offer in serving),
        falls_back=falls_back,
        fallback=tuple(dict.fromkeys(offer.hardware for offer in others)),
        trains=bool(serving) and all(offer.trains for offer in serving),
    )


def _why(
    affinity: Mapping[str, str], task: str, preferred: str, *, has_own: bool, falls_back: bool, served: bool
) -> str:
    if preferred == ANY:
        return "no preference: the engine with the least to do"
    told = "its affinity" if task in affinity and task != DEFAULT else "the default of generation"
    if not falls_back:
        return f"{told} is {preferred}"
    lack = f"no engine of class {preferred} serves" if has_own else f"there is no engine of class {preferred}"
    return f"{told} is {preferred}, but {lack}" + ("" if served else ", and no other either")


# ---- of settings --------------------------------------------------------------------------------------------------


def affinity_of(settings: RolloutSettings) -> dict[str, str]:
    """What a gateway routes by. Raises InvalidConfig for a class that nobody has or knows."""
    classes = list(dict.fromkeys(engine.hardware for engine in settings.engines))
    usual = CLASS_BY_ROLE["generation"]
    found = {DEFAULT: usual if usual in classes else ANY}
    for task in settings.tasks:
        if task.affinity:
            found[task.name] = resolved(task.affinity, classes, key=f"tasks.{task.name}.affinity")
    return found


def resolved(name: str, classes: Sequence[str], *, key: str) -> str:
    """A class, of its own name or that of a device: H800 is of class `compute` where no engine is called after it.
    Raises InvalidConfig for what no engine has and nobody knows: that is a slip, and a fallback would hide it."""
    if name in classes:
        return name
    known = CLASS_BY_DEVICE.get(name, name)
    if known in classes or known in PUBLISHED:
        return known
    near = difflib.get_close_matches(name, [*classes, *PUBLISHED], n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise InvalidConfig(key, name, f"a class that an engine has, which are {', '.join(classes)}{hint}")


def explain(settings: RolloutSettings) -> Binding:
    """What will be bound where, if all engines start. Starts nothing. Raises InvalidConfig."""
    if not settings.engines:
        raise InvalidConfig("engines", [], "at least one table [[engines]]: without an engine nothing is written")
    offers = [Planned(name, engine.hardware) for engine in settings.engines for name in engine_names(engine)]
    names = [offer.name for offer in offers]
    if len(set(names)) != len(names):
        raise InvalidConfig("engines.name", names, "a name of its own for each table [[engines]]")
    tasks = [task.name for task in settings.tasks]
    return bind(affinity_of(settings), tasks, offers, healthy=set(names))


def engine_names(engine: EngineSettings) -> list[str]:
    """What the engines of a table are called: as it says, and if they are several, numbered."""
    return [engine.name] if engine.count == 1 else [f"{engine.name}-{number}" for number in range(engine.count)]
