"""Episodes: the work of a workload, including ground truth that only the simulator sees.

Owns the records between workloads and the engine. The scheduler gets an Action made from a SimStep, never the SimStep.
"""

from __future__ import annotations

import enum

import msgspec

from tangram.core.demand import Demand
from tangram.core.messages import Pool
from tangram.core.speedup import RIGID, Speedup
from tangram.managers.quotas.manager import REQUESTS, TOKENS, Quota

BATCH_GROWTH = 0.5
"""The default growth lies between a model bound by reading its weights (0) and one bound by compute (1)."""


class SimStep(msgspec.Struct, frozen=True, kw_only=True):
    """One future action."""

    kind: str
    """`exec`, `reward`, `search`, `fetch`, `judge`, `teacher` ..."""
    key: str = ""
    demand: Demand
    service: str = ""
    work_s: float
    """Seconds alone on one unit, with all the CPU it can use."""
    busy: float = 1.0
    """CPU cores kept busy per unit of width; low for a call that waits on disk or network."""
    speedup: Speedup = RIGID
    """The true speed-up along the elastic pool."""
    overhead_s: float = 0.0
    """Seconds to start it and to return its units, during which it holds them. On CPU the same share of a core is
    charged as during execution; the CPU share of other actions on the node does not change."""
    task: str = ""
    """Replaces the task of the episode in the class of this action, where its duration depends on the data set item."""
    spent: dict[str, int] | None = None
    """Actual use by kind of pool where the demand is an estimate, such as of tokens."""
    at_once: bool = True
    """As in Action: requests are sent when it starts. False: at any time until it ends, as those of a program."""


class SimTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The policy thinks, then these actions run concurrently; the next turn follows the last of them."""

    think_s: float
    steps: tuple[SimStep, ...]


class SimEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a workload."""

    id: str
    run: str
    task: str
    group: str = ""
    start_s: float = 0.0
    memory: int = 0
    """MiB of its sandbox during its whole life; 0: no sandbox."""
    turns: tuple[SimTurn, ...]


class ServiceModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model service: its size and its restore time."""

    name: str
    memory_gib: float
    """Weights over all devices of one copy."""
    restore_s: float
    degrees: tuple[int, ...] = (1,)
    batch_max: int = 1
    """Calls that it serves at once."""
    batch_growth: float = BATCH_GROWTH
    """A call in a batch of n takes n to this power times as long as alone: 1 means no gain, 0 no cost."""


class Counting(enum.Enum):
    """How an API counts requests in a time window."""

    FIXED = "fixed"
    """Consecutive windows whose start the API chooses."""
    SLIDING = "sliding"
    """The seconds before each request."""
    BUCKET = "bucket"
    """A token bucket that refills steadily."""


class ApiLimit(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity that an API counts, and its limit."""

    pool: Pool
    """The pool as the scheduler sees it. A request counts with its demand of this pool: with a window from when it
    reaches the API, without one while it is in progress."""
    counting: Counting = Counting.FIXED
    """With a window: how the API really counts, independent of the scheduler's assumption."""
    phase_s: float = 0.0
    """Start of its fixed windows; unknown to the scheduler."""


class ApiModel(msgspec.Struct, frozen=True, kw_only=True):
    """An external API that enforces its quota: excess requests get a 429."""

    name: str
    limits: tuple[ApiLimit, ...]

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools that the scheduler sees."""
        return tuple(limit.pool for limit in self.limits)


def api_model(
    quota: Quota, *, requests: Counting = Counting.FIXED, tokens: Counting = Counting.FIXED, phase_s: float = 0.0
) -> ApiModel:
    """Return an API that enforces this quota and counts requests and tokens in these ways. The scheduler gets the pools
    of a live API."""
    counting = {f"{quota.name}/{REQUESTS}": requests, f"{quota.name}/{TOKENS}": tokens}
    limits = [
        ApiLimit(pool=pool, counting=counting.get(pool.kind, Counting.FIXED), phase_s=phase_s) for pool in quota.pools()
    ]
    return ApiModel(name=quota.name, limits=tuple(limits))


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that happens outside the scheduler in one simulation."""

    name: str
    seed: int
    episodes: tuple[SimEpisode, ...]
    services: tuple[ServiceModel, ...] = ()
    apis: tuple[ApiModel, ...] = ()
