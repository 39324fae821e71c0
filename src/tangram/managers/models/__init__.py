"""Model services on devices: prepared once, restored on demand, evicted without a copy back.

A service is a model that actions call by name. Its weights lie in host memory, once, and nobody can change them. When
an action is granted devices, its service is copied onto exactly those, unless it is there already; it stays until
others need the room, and then the least recently used goes. Each device has a process in which engines run, so that a
model that crashes or hangs takes nothing along but what it held.

Engines: `torch_engine` (any module), `transformers_engine` (rewards, teachers, judges), `server_engine` (a server with
an OpenAI-compatible API that can sleep). Others are written against `engine.Engine`.
"""

from tangram.managers.models.devices import Cuda, Emulated, discover
from tangram.managers.models.manager import ModelManager
from tangram.managers.models.service import Service
from tangram.managers.models.work import Infer

__all__ = ["Cuda", "Emulated", "Infer", "ModelManager", "Service", "discover"]
