"""`--check`: the settings of a service against the files and ports of this host.

Owns the checks that all services share; a service's `__main__` has its own. Connects to nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from forge.core.errors import ConfigError, ForgeError
from forge.core.extras import extras_named
from forge.runtime.coordination import Login
from forge.runtime.process.span_export import require_tracing
from forge.runtime.rpc.bind_errors import bind_error, bind_reason, bind_remedy
from forge.runtime.security.tls import Tls
from forge.runtime.security.tokens import Keyring
from forge.runtime.settings import Port, ServiceConfig, settings_of


def problems(config: ServiceConfig, own: Iterable[Callable[[], object]]) -> list[ForgeError]:
    """Returns all problems of the settings and of this host. `own`: checks of the service."""
    return failures([config.validate, *_shared(config), *own])


def failures(checks: Iterable[Callable[[], object]]) -> list[ForgeError]:
    """Returns the errors of failed checks."""
    errors = []
    for check in checks:
        try:
            with extras_named():
                check()
        except ForgeError as error:
            errors.append(error)
    return errors


def _shared(config: ServiceConfig) -> Iterator[Callable[[], object]]:
    yield partial(_check_security, config)
    yield partial(require_tracing, config)
    for key in ("log_file", "audit_file"):
        yield partial(require_writable, key, getattr(config, key))
    if config.key_file:
        yield partial(Keyring.from_file, config.key_file)
    yield partial(Login.of, config.etcd_user, config.etcd_password_file, default_user="")
    for setting in settings_of(config).values():
        if setting.type == Port and setting.value:
            yield partial(_require_free_port, setting.key, config.host, setting.value)


def _check_security(config: ServiceConfig) -> None:
    """Read the TLS files and tokens as a service does at its start, before it connects."""
    tls = Tls(
        cert=config.tls_cert,
        key=config.tls_key,
        ca=config.tls_ca,
        client_auth=config.tls_client_auth,
        insecure=config.insecure,
    )
    tls.server_credentials(config.host)
    tls.etcd_credentials(config.etcd)


def _require_free_port(key: str, host: str, port: int) -> None:
    if (error := bind_error(host, port)) is not None:
        reason = bind_reason(error).lower()
        raise ConfigError(f"{key} = {port}: {reason} on {host}; {bind_remedy(error)}")


def require_writable(key: str, path: str) -> None:
    """Raises `ConfigError` unless this process can write the file or directory, or create it."""
    if not path:
        return
    existing = nearest_existing(Path(path))
    if existing != Path(path).absolute() and not existing.is_dir():
        raise ConfigError(f"{key} = {path!r}: {existing}: {os.strerror(errno.ENOTDIR)}")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"{key} = {path!r}: {existing}: {os.strerror(errno.EACCES)}")


def nearest_existing(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def require_model(key: str, path: str) -> None:
    """Raises `ConfigError` for a directory without a model's config.json; "" is not checked."""
    if path and not (Path(path) / "config.json").is_file():
        hint = ""
        if (Path(path) / "adapter_config.json").is_file():
            hint = ", only LoRA adapters: merge them into their base model first"
        raise ConfigError(f"{key} = {path!r} is not a model directory: it has no config.json{hint}")
