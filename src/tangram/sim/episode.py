"""Episodes: the work that a workload brings, and the truth about it that only the simulator knows.

Owns the records between workloads and the engine. The scheduler sees an Action made of a Step, never the Step.
"""

from __future__ import annotations

import enum

import msgspec

from tangram.core.demand import Demand
from tangram.core.messages import Pool
from tangram.core.speedup import RIGID, Speedup
from tangram.managers.quotas.manager import REQUESTS, TOKENS, Quota

BATCH_GROWTH = 0.5
"""Between a model that is bound by reading its weights (0) and one that is bound by computing (1)."""


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
    spent: dict[str, int] | None = None
    """Per kind of pool, what it really uses where it asks for an estimate, such as of tokens."""
    at_once: bool = True
    """As of its Action: its requests go out when it starts. False: at any time until it ends, as those of a program."""


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
    """Calls that it takes at once."""
    batch_growth: float = BATCH_GROWTH
    """A call in a batch of n takes n to the power of this times as long as alone: 1 is no gain, 0 costs nothing."""


class Counting(enum.Enum):
    """How an API counts what it allows in a window of time."""

    FIXED = "fixed"
    """In windows, one after the other, that begin at a time of its own."""
    SLIDING = "sliding"
    """In the seconds before each request."""
    BUCKET = "bucket"
    """As a bucket that holds so many and fills steadily."""


class ApiLimit(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that an API counts, and beyond which it refuses."""

    pool: Pool
    """As the scheduler knows it. A request counts as what it asks of this pool: with a window from when it reaches the
    API, without one while it is under way."""
    counting: Counting = Counting.FIXED
    """With a window: how the API really counts in so many seconds, whatever the scheduler believes."""
    phase_s: float = 0.0
    """When one of its fixed windows begins. Nobody tells the scheduler."""


class ApiModel(msgspec.Struct, frozen=True, kw_only=True):
    """An outside API that enforces its quota: excess gets a 429."""

    name: str
    limits: tuple[ApiLimit, ...]

    @property
    def pools(self) -> tuple[Pool, ...]:
        """What the scheduler knows of it."""
        return tuple(limit.pool for limit in self.limits)


def api_model(
    quota: Quota, *, requests: Counting = Counting.FIXED, tokens: Counting = Counting.FIXED, phase_s: float = 0.0
) -> ApiModel:
    """An API that enforces this quota and counts requests and tokens in these ways. The scheduler gets the pools that a
    live one gets."""
    counting = {f"{quota.name}/{REQUESTS}": requests, f"{quota.name}/{TOKENS}": tokens}
    limits = [
        ApiLimit(pool=pool, counting=counting.get(pool.kind, Counting.FIXED), phase_s=phase_s) for pool in quota.pools()
    ]
    return ApiModel(name=quota.name, limits=tuple(limits))


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that happens outside the scheduler in one simulation."""

    name: str
    seed: int
    episodes: tuple[Episode, ...]
    services: tuple[ServiceModel, ...] = ()
    apis: tuple[ApiModel, ...] = ()
