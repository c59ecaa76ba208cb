"""Start of a service process: reads its settings, then imports its code.

A wrong setting, `--help` and `--print-config` end the process before it imports gRPC and torch,
which takes seconds. Not here: the life of a serving process (`forge.runtime.process.service`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from forge.core.errors import ConfigError, ForgeError
from forge.core.extras import extras_named
from forge.runtime.settings.reader import C, load

CANNOT_START = 2
"""Exit code for wrong settings; a restart with the same settings gives it again."""


def run(
    service: str,
    config_type: type[C],
    load_app: Callable[[], type[Any]],
    host_checks: Callable[[C], Iterable[Callable[[], object]]] = lambda _: (),
    on_error: Callable[[str], None] = lambda _: None,
) -> NoReturn:
    """Run a service process to its end: `python -m services.<service>`.

    `load_app` imports and returns the service's `ServiceApp`; `host_checks` returns checks for
    `--check`, each raises `ForgeError`; `on_error` gets the cause of exit codes 1 and 2. Exit
    codes: 0 after a drain; 1 an actor or the app failed, or a dependency did not answer at the
    start; 2 the settings are wrong, and stderr has a line for each cause.
    """
    _stay_in_release()
    # As SIGTERM: until the service has handlers, a signal ends the process at once, without words.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def problems(config: C) -> list[ForgeError]:
        # It imports gRPC, which only `--check` needs.
        from forge.runtime.process import host_check

        return host_check.problems(config, host_checks(config))

    try:
        config = load(
            config_type,
            service=service,
            argv=sys.argv[1:],
            environ=os.environ,
            host_problems=problems,
        )
        with extras_named(service):
            from forge.runtime.process.service import serve

            failure = serve(service, config, load_app())
            if isinstance(failure, ConfigError):
                # A fault that a custom loss shows at its first batch: a restart would end the same.
                raise failure
            code = 0 if failure is None else 1
            if failure is not None:
                on_error(f"{type(failure).__name__}: {failure}")
    except ForgeError as error:
        on_error(str(error))
        for line in str(error).splitlines():
            sys.stderr.write(f"forge {service}: {line}\n")
        code = 1 if error.retryable else CANNOT_START
    # A collection over all modules of torch would take most of the exit.
    gc.freeze()
    sys.exit(code)


def _stay_in_release() -> None:
    """Restart the program from its real directory if it was started through a symbolic link.

    A process imports some modules late. After an upgrade has changed the link, they must still
    come from the release that the process was started with.
    """
    release = Path(sys.prefix).resolve()
    if sys.prefix != sys.base_prefix and str(release) != sys.prefix:
        python = str(release / "bin" / Path(sys.executable).name)
        os.execv(python, [python, *sys.orig_argv[1:]])
