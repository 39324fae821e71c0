"""Model services on devices: prepared once, restored on demand, evicted without a copy back.

A service is a model that actions call by name. Host memory holds one read-only copy of its weights. When an action is
granted devices, its service is copied onto exactly those devices, unless it is already loaded there. It stays loaded
until another service needs the memory; the least recently used service is evicted first. Each device has a process for
engines, so a model that crashes or hangs affects only the services in that process.

Engines: `torch_engine` (any module), `transformers_engine` (rewards, teachers, judges), `server_engine` (a server with
an OpenAI-compatible API that can sleep). Others are written against `engine.Engine`.
"""

from tangram.managers.models.devices import Cuda, Emulated, discover
from tangram.managers.models.manager import ModelManager
from tangram.managers.models.service import Service
from tangram.managers.models.work import Infer

__all__ = ["Cuda", "Emulated", "Infer", "ModelManager", "Service", "discover"]
