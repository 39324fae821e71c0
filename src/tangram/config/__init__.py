"""The config of the shared service: a TOML file as typed records.

`load` and `parse` read and check all of it, `require_files` the files that it names; `placed` adds the line to what is
found wrong later. docs/reference/config.md lists every key, made of these records.
"""

from tangram.config.files import admin_token, require_files
from tangram.config.reading import load, parse, placed
from tangram.config.tables import (
    Config,
    DeviceConfig,
    ModelConfig,
    NodeConfig,
    QuotaConfig,
    RateConfig,
    RunLimits,
    ServiceConfig,
)

__all__ = [
    "Config",
    "DeviceConfig",
    "ModelConfig",
    "NodeConfig",
    "QuotaConfig",
    "RateConfig",
    "RunLimits",
    "ServiceConfig",
    "admin_token",
    "load",
    "parse",
    "placed",
    "require_files",
]
