"""Functions: stateless Python callables, such as rewards, in instances that scale from zero to a limit and back.

    client ── Call ──▶ FunctionManager ── Host (one per function) ── template process ── fork ──▶ instances
    client ── Call ──▶ BoxedFunctionManager ── BoxedHost (one per function of a run) ── sandboxes
    client ── Post ──▶ EndpointManager ── HTTP ──▶ a function that somebody else runs

A template imports its function once; an instance is a fork of it, serves one call at a time, and ends when it has been
idle. FunctionManager isolates nothing: a function is the user's own code. Functions of tenants of a shared service are
for BoxedFunctionManager, which runs each in sandboxes of its own.
"""

from tangram.managers.functions.boxed import BoxedFunctionManager
from tangram.managers.functions.endpoint import EndpointManager
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call, EndpointSpec, FunctionSpec, Post

__all__ = ["BoxedFunctionManager", "Call", "EndpointManager", "EndpointSpec", "FunctionManager", "FunctionSpec", "Post"]
