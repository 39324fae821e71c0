"""Tangram: action-level scheduling of the resources outside an RL training cluster."""

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
