"""Functions: stateless Python callables, such as rewards, in instances that scale from zero to a limit and back.

    client ── Call ──▶ FunctionManager ── Host (one per function) ── template process ── fork ──▶ instances
    client ── Post ──▶ EndpointManager ── HTTP ──▶ a function that somebody else runs

A template imports its function once; an instance is a fork of it, serves one call at a time, and ends when it has been
idle. Nothing is isolated: a function is the user's own code.
"""

from tangram.managers.functions.endpoint import EndpointManager
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call, EndpointSpec, FunctionSpec, Post

__all__ = ["Call", "EndpointManager", "EndpointSpec", "FunctionManager", "FunctionSpec", "Post"]
