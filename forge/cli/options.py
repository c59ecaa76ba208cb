"""Shared options of commands.

Owns the options of a trajectory filter and of a connection, and the conversion of all shared ones.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli.connection import Connection, newest_run_directory, of_run
from forge.cli.local_run.run_options import Root
from forge.core.errors import InvalidArgument
from forge.runtime.security.bearer import bearer_of

if TYPE_CHECKING:
    from forge.v1 import common_pb2, pool_pb2

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]

TlsCert = Annotated[
    str, typer.Option(envvar="FORGE_TLS_CERT", help="PEM certificate chain of this host.")
]
TlsKey = Annotated[str, typer.Option(envvar="FORGE_TLS_KEY", help="PEM private key of --tls-cert.")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="FORGE_INSECURE",
        help="Allow plain TCP beyond the loopback interface.",
    ),
]

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """Name a running system. The variables are those of the services' settings."""

    run_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of a running run. Default: the newest one."),
    ] = None
    root: Root = Path(".forge")
    etcd: Annotated[
        str,
        typer.Option(
            envvar="FORGE_ETCD", help="host:port[,host:port]: etcd of a system that is not a run."
        ),
    ] = ""
    cluster: Annotated[
        str, typer.Option(envvar="FORGE_CLUSTER", help="With --etcd: name of the cluster.")
    ] = "default"
    key_file: Annotated[
        Path | None,
        # Not read by every command that has the option.
        typer.Option(
            envvar="FORGE_KEY_FILE",
            readable=False,
            help="With --etcd: file with the cluster's key.",
        ),
    ] = None
    token_file: Annotated[
        str,
        typer.Option(
            envvar="FORGE_TOKEN_FILE",
            help="File with an issued token, instead of the key; or FORGE_TOKEN.",
        ),
    ] = ""
    tls_ca: Annotated[
        str,
        typer.Option(
            envvar="FORGE_TLS_CA", help="With --etcd: PEM certificates that verify its hosts."
        ),
    ] = ""
    tls_cert: TlsCert = ""
    tls_key: TlsKey = ""
    insecure: Insecure = False
    accept_unsigned: Annotated[
        bool,
        typer.Option(
            "--accept-unsigned",
            envvar="FORGE_ACCEPT_UNSIGNED",
            help="Show services of a release without signatures.",
        ),
    ] = False
    etcd_user: Annotated[
        str,
        typer.Option(
            envvar="FORGE_ETCD_USER", help="With --etcd: user in etcd. Default: <cluster>.operator."
        ),
    ] = ""
    etcd_password_file: Annotated[
        str, typer.Option(envvar="FORGE_ETCD_PASSWORD_FILE", help="File with its password.")
    ] = ""

    @property
    def named(self) -> bool:
        """False for the newest run."""
        return bool(self.run_dir or self.etcd)

    def resolved(self) -> Connection:
        """Returns the connection. Raises `InvalidArgument`."""
        if self.run_dir or not self.etcd:
            return of_run(self.run_dir or newest_run_directory(self.root))
        bearer = None if self.key_file else bearer_of(self.token_file)
        if self.key_file is None and bearer is None:
            raise InvalidArgument("--etcd needs --key-file, or --token-file of `forge token issue`")
        return Connection(
            etcd=self.etcd,
            cluster=self.cluster,
            key_file=self.key_file,
            bearer=bearer,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            insecure=self.insecure,
            accept_unsigned=self.accept_unsigned,
            etcd_user=self.etcd_user,
            etcd_password_file=self.etcd_password_file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """Select trajectories."""

    domain: Annotated[str, typer.Option(help="Only this domain.")] = ""
    state: Annotated[str, typer.Option(help="open, sealed or abandoned. Default: any.")] = ""
    min_reward: Annotated[
        float | None, typer.Option(help="Smallest sum of outcome rewards, inclusive.")
    ] = None
    max_reward: Annotated[float | None, typer.Option(help="Largest sum, inclusive.")] = None
    reward: Annotated[str, typer.Option(help="Sum the rewards of this name instead.")] = ""
    min_version: Annotated[
        int | None, typer.Option(help="At least one token has this weight version or a later one.")
    ] = None
    max_version: Annotated[
        int | None, typer.Option(help="At least one token has this weight version or an earlier.")
    ] = None
    since: Annotated[
        str, typer.Option(help="Closed since 90s, 15m, 2h or 7d ago, or since 2026-01-31T12:00.")
    ] = ""
    until: Annotated[str, typer.Option(help="Closed before; same forms as --since.")] = ""
    task: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this task; may be repeated.")
    ] = None
    tag: Annotated[str, typer.Option(help="Only tasks with this tag.")] = ""
    scaffold: Annotated[str, typer.Option(help="Only tasks of this scaffold.")] = ""
    user: Annotated[str, typer.Option(help="Only tasks of this user.")] = ""
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Only tasks with this fact in `metadata`; may be repeated."
        ),
    ] = None

    def resolved(self) -> pool_pb2.TrajectoryFilter:
        """Returns the filter. Raises `InvalidArgument`."""
        from forge.client.stored.filters import check_filter
        from forge.v1 import pool_pb2

        now_unix_s = time.time()
        wanted = pool_pb2.TrajectoryFilter(
            domain=self.domain,
            state=_state(self.state),
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            reward_name=self.reward,
            min_weight_version=self.min_version,
            max_weight_version=self.max_version,
            closed_from_unix_s=moment("since", self.since, now_unix_s=now_unix_s),
            closed_before_unix_s=moment("until", self.until, now_unix_s=now_unix_s),
            task_ids=self.task or (),
            tag=self.tag,
            scaffold=self.scaffold,
            user=self.user,
            metadata=dict(map(_fact, self.where or ())),
        )
        return check_filter(wanted, _OPTIONS)


_OPTIONS = {
    "domain": "--domain",
    "state": "--state",
    "min_reward": "--min-reward",
    "max_reward": "--max-reward",
    "min_weight_version": "--min-version",
    "max_weight_version": "--max-version",
    "closed_from_unix_s": "--since",
    "closed_before_unix_s": "--until",
    "task_ids": "--task",
    "metadata": "--where",
}
"""Options by field of the filter, for errors."""


def _fact(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidArgument(f"--where {text!r} must be KEY=VALUE")
    return key, value


def _state(name: str) -> common_pb2.TrajectoryState.ValueType:
    from forge.v1 import common_pb2

    names = {"": "UNSPECIFIED", "open": "OPEN", "sealed": "SEALED", "abandoned": "ABANDONED"}
    if name not in names:
        raise InvalidArgument(f"--state {name!r} must be open, sealed or abandoned")
    return common_pb2.TrajectoryState.Value(f"TRAJECTORY_STATE_{names[name]}")


def moment(option: str, text: str, *, now_unix_s: float) -> float | None:
    """Returns the Unix time of "2h" (ago) or of an ISO date, by default local; None for ""."""
    if not text or _DURATION.fullmatch(text):
        ago_s = duration_s(option, text)
        return None if ago_s is None else now_unix_s - ago_s
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise InvalidArgument(
            f"--{option} {text!r} must be a time ago like 90s, 15m, 2h or 7d, or a date like "
            "2026-01-31T12:00"
        ) from None


def duration_s(option: str, text: str) -> float | None:
    """Returns the seconds of "90s", "15m", "2h" or "7d"; None for "". Raises `InvalidArgument`."""
    if not text:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"--{option} {text!r} must be a time like 90s, 15m, 2h or 7d")
    return float(match[1]) * _UNIT_S[match[2]]


def with_options(
    command: Callable[..., None], *, omit: Collection[str] = ()
) -> Callable[..., None]:
    """Decorates a command: the fields of a dataclass replace the parameter of its type, as options;
    those of `SystemOptions` a `Connection`. `omit`: fields that are no options of this command."""
    declared = inspect.signature(command, eval_str=True).parameters
    types: dict[str, Any] = {
        name: SystemOptions if one.annotation is Connection else one.annotation
        for name, one in declared.items()
    }
    options = {
        name: [
            field
            for field in inspect.signature(kind, eval_str=True).parameters.values()
            if field.name not in omit
        ]
        for name, kind in types.items()
        if isinstance(kind, type) and is_dataclass(kind)
    }

    def run(**given: Any) -> None:
        for name, fields in options.items():
            made: Any = types[name](**{field.name: given.pop(field.name) for field in fields})
            given[name] = made.resolved() if declared[name].annotation is Connection else made
        command(**given)

    parameters = [one for name, one in declared.items() if name not in options]
    # Options of the filter come before options of the connection.
    for fields in reversed(options.values()):
        parameters += fields
    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in keyword_only}
    return run
