"""Settings of a process, and the values on which a cluster agrees.

Each module imports only those above it:

    service_config  the settings of every service
    reader          files, variables and flags; errors, help and the printed form
    agreed          values on which the instances of a cluster must agree
"""

from forge.runtime.settings.reader import (
    Setting,
    allowed,
    fields_of,
    load,
    settings_of,
    to_toml,
    toml,
)
from forge.runtime.settings.service_config import CLOCK_TOLERANCE_S, Port, ServiceConfig

__all__ = [
    "CLOCK_TOLERANCE_S",
    "Port",
    "ServiceConfig",
    "Setting",
    "allowed",
    "fields_of",
    "load",
    "settings_of",
    "to_toml",
    "toml",
]
