"""How the process of a service starts: its settings first, then the code that it runs.

Owns this order. A wrong setting, `--help` and `--print-config` are answered before gRPC and torch
are imported, which takes seconds. The life of a process that serves: `forge.runtime.service`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from forge.core.errors import ForgeError
from forge.runtime.config import ServiceConfig, load

CANNOT_START = 2
"""Exit code of a service whose settings are wrong: the same settings give it again."""


def run(
    service: str, config_type: type[ServiceConfig], load_app: Callable[[], type[Any]]
) -> NoReturn:
    """The whole life of a service process: `python -m services.<service>`.

    `load_app` imports and returns the service's `ServiceApp`. Exit codes: 0 stopped in good order;
    1 an actor or the app failed, or something it needs to start does not answer yet; 2 it cannot
    start like this, and one line on stderr says why.
    """
    try:
        config = load(config_type, service=service, argv=sys.argv[1:], environ=os.environ)
        from forge.runtime.service import serve

        code = 1 if serve(service, config, load_app()) else 0
    except ForgeError as error:
        sys.stderr.write(f"forge {service}: {error}\n")
        code = 1 if error.retryable else CANNOT_START
    # To look for garbage in all that torch imports would take most of the process's end.
    gc.freeze()
    sys.exit(code)
