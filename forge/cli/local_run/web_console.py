"""`forge console`: serves the web console beside a running system.

The console is a process of its own (`python -m services.console`). Owns its arguments and address.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge.cli.command_exit import say
from forge.cli.connection import Connection
from forge.cli.local_run.plot import read_steps
from forge.cli.rundir import RunDirectory
from forge.core.errors import ConfigError
from forge.runtime.process.ports import free_ports

PORT = 7800
"""Port of the page, if it is free."""


def serve_console(
    at: Connection,
    *,
    host: str,
    port: int | None,
    model_path: str,
    compare: Sequence[Path] = (),
) -> None:
    """Replaces this process with the console of a system. Raises `ConfigError` without a key and
    for a port in use, `NotFound` and `InvalidArgument` for a run to compare without steps."""
    for run in compare:
        read_steps(run)
    if at.key_file is None:
        raise ConfigError("forge console needs --key-file: the console verifies tokens with it")
    if port is not None and not _is_free(host, port):
        raise ConfigError(
            f"--port {port}: another process listens there on {host}; choose another, or leave "
            "--port out"
        )
    chosen = free_port(host) if port is None else port
    settings = {
        "etcd": at.etcd,
        "cluster": at.cluster,
        "key_file": str(at.key_file),
        "host": host,
        "http.port": str(chosen),
        "model_path": model_path or _model_of(at),
        "compare": ",".join(str(run.resolve()) for run in compare),
        "log_level": "warning",
        "tls_ca": at.tls_ca,
        "tls_cert": at.tls_cert,
        "tls_key": at.tls_key,
        "etcd_user": at.etcd_user,
        "etcd_password_file": at.etcd_password_file,
        "insecure": "true" if at.insecure else "",
        "accept_unsigned": "true" if at.accept_unsigned else "",
    }
    say(f"Console of {at.cluster}: {address(host, chosen, tls=bool(at.tls_cert))} (Ctrl-C ends it)")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "services.console", *_flags(settings)])


def address(host: str, port: int, *, tls: bool = False) -> str:
    """Returns the address of the page."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}/"


def free_port(host: str) -> int:
    """Returns the usual port, or another if that is in use."""
    return PORT if _is_free(host, PORT) else free_ports(1)[0]


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            # The console names another problem itself, such as a foreign address.
            return error.errno != errno.EADDRINUSE
    return True


def _model_of(at: Connection) -> str:
    """The model of a run, whose tokenizer shows the texts of tokens; "" for another system."""
    state = RunDirectory(at.run_dir).load() if at.run_dir else None
    return state.model_path if state else ""


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [f"--{key.replace('_', '-')}={value}" for key, value in settings.items() if value]
