"""Tangram: action-level scheduling of the resources outside an RL training cluster.

Public names are imported when they are first used. Importing any module of the package runs this file first, in every
child process too, and most children use neither the client nor the scheduler.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tangram.client.client import Client, connect
    from tangram.client.functions import CallResult, endpoint, function
    from tangram.client.models import Inference
    from tangram.client.result import Result
    from tangram.client.sandbox import Image, Sandbox
    from tangram.client.sync import connect_sync
    from tangram.core.action import Action, Outcome, Status
    from tangram.core.demand import Amounts, Demand, between, cores, fixed, learned, one_of
    from tangram.core.limits import Limits
    from tangram.core.messages import Pool, cpu_node
    from tangram.core.policies import policy
    from tangram.core.scheduler import Scheduler
    from tangram.core.speedup import Amdahl, PowerLaw, Table
    from tangram.errors import TangramError
    from tangram.managers.models import Emulated, Service
    from tangram.managers.quotas.manager import Quota, Rate

__all__ = [
    "Action",
    "Amdahl",
    "Amounts",
    "CallResult",
    "Client",
    "Demand",
    "Emulated",
    "Image",
    "Inference",
    "Limits",
    "Outcome",
    "Pool",
    "PowerLaw",
    "Quota",
    "Rate",
    "Result",
    "Sandbox",
    "Scheduler",
    "Service",
    "Status",
    "Table",
    "TangramError",
    "between",
    "connect",
    "connect_sync",
    "cores",
    "cpu_node",
    "endpoint",
    "fixed",
    "function",
    "learned",
    "one_of",
    "policy",
]

_NAMES_BY_MODULE = {
    "tangram.client.client": ("Client", "connect"),
    "tangram.client.functions": ("CallResult", "endpoint", "function"),
    "tangram.client.models": ("Inference",),
    "tangram.client.result": ("Result",),
    "tangram.client.sandbox": ("Image", "Sandbox"),
    "tangram.client.sync": ("connect_sync",),
    "tangram.core.action": ("Action", "Outcome", "Status"),
    "tangram.core.demand": ("Amounts", "Demand", "between", "cores", "fixed", "learned", "one_of"),
    "tangram.core.limits": ("Limits",),
    "tangram.core.messages": ("Pool", "cpu_node"),
    "tangram.core.policies": ("policy",),
    "tangram.core.scheduler": ("Scheduler",),
    "tangram.core.speedup": ("Amdahl", "PowerLaw", "Table"),
    "tangram.errors": ("TangramError",),
    "tangram.managers.models": ("Emulated", "Service"),
    "tangram.managers.quotas.manager": ("Quota", "Rate"),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_BY_NAME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "import_module"})
