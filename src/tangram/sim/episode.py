"""Episodes: the work that a workload brings, and the truth about it that only the simulator knows.

Owns the records between workloads and the engine. The scheduler sees an Action made of a Step, never the Step.
"""

from __future__ import annotations

import msgspec

from tangram.core.demand import Demand
from tangram.core.speedup import RIGID, Speedup


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One action to come."""

    kind: str
    """`exec`, `reward`, `search`, `fetch`, `judge`, `teacher` ..."""
    key: str = ""
    demand: Demand
    service: str = ""
    work_s: float
    """Seconds on one unit, alone, with all the CPU it can use."""
    busy: float = 1.0
    """CPU cores kept busy per unit of width; a call that waits on disk or network has little."""
    speedup: Speedup = RIGID
    """Along the elastic pool, in truth."""
    overhead_s: float = 0.0
    """Seconds of starting it and of giving its units back. It holds them meanwhile, and on CPU it is charged for using
    as much of a core as while it executes; what the others have left of the node does not change by that."""
    task: str = ""
    """Replaces the task of the episode in the class of this action, for what depends on the data set item."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The policy thinks, then these actions run side by side; the next turn follows the last of them."""

    think_s: float
    steps: tuple[Step, ...]


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory as a workload brings it."""

    id: str
    run: str
    task: str
    group: str = ""
    start_s: float = 0.0
    memory: int = 0
    """MiB of its sandbox for its whole life; 0: it has none."""
    turns: tuple[Turn, ...]


class ServiceModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model service: what it occupies and how long it takes to bring back."""

    name: str
    memory_gib: float
    """Of its weights over all devices of one copy."""
    restore_s: float
    degrees: tuple[int, ...] = (1,)
    batch_max: int = 1


class ApiModel(msgspec.Struct, frozen=True, kw_only=True):
    """An outside API that enforces its quota: excess gets a 429."""

    name: str
    concurrency: int = 0
    """Requests in flight; 0: no such limit."""
    per_window: int = 0
    window_s: float = 60.0
    bucket: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that happens outside the scheduler in one simulation."""

    name: str
    seed: int
    episodes: tuple[Episode, ...]
    services: tuple[ServiceModel, ...] = ()
    apis: tuple[ApiModel, ...] = ()
