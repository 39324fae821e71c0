"""The config of the shared service: a TOML file as typed records.

`load` and `parse` read and check it, `require_files` checks the files that it names. `add_error_location` adds the line
to errors that are found later. docs/reference/config.md, generated from these records, lists every key.
"""

from tangram.config.file_checks import admin_token, require_files
from tangram.config.loader import add_error_location, load, parse
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
    "add_error_location",
    "require_files",
]
