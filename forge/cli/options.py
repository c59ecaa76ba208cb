"""Shared options of commands.

Owns the options of a trajectory filter and of a connection, and the conversion of all shared ones.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forge.cli.command_exit import fail
from forge.cli.connection import Connection, newest_run, of_run
from forge.cli.run_options import RunOptions, stack_options
from forge.cli.submission import Submission
from forge.core.errors import ForgeError, InvalidArgument
from forge.runtime.bearer import bearer_of
from forge.v1 import common_pb2, pool_pb2

_AGO = re.compile(r"([0-9.]+)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def connection(
    *,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of a running run. Default: the newest one."),
    ] = None,
    root: Annotated[Path, typer.Option(help="Directory of runs.", envvar="FORGE_ROOT")] = Path(
        ".forge"
    ),
    etcd: Annotated[
        str, typer.Option(help="host:port[,host:port]: etcd of a system that is not a run.")
    ] = "",
    cluster: Annotated[str, typer.Option(help="With --etcd: name of the cluster.")] = "default",
    key_file: Annotated[
        Path | None, typer.Option(help="With --etcd: file with the cluster's key.")
    ] = None,
    token_file: Annotated[
        str, typer.Option(help="File with an issued token, in place of the key; or FORGE_TOKEN.")
    ] = "",
    tls_ca: Annotated[
        str, typer.Option(help="With --etcd: PEM certificates that verify its hosts.")
    ] = "",
    tls_cert: Annotated[str, typer.Option(help="PEM certificate chain of this host.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM private key of --tls-cert.")] = "",
) -> Connection:
    """Returns the connection of the options. Raises `InvalidArgument`."""
    if not etcd:
        return newest_run(root) if run_dir is None else of_run(run_dir)
    bearer = None if key_file else bearer_of(token_file)
    if key_file is None and bearer is None:
        raise InvalidArgument("--etcd needs --key-file, or --token-file of `forge token issue`")
    return Connection(
        etcd=etcd,
        cluster=cluster,
        key_file=key_file,
        bearer=bearer,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )


def trajectory_filter(
    *,
    domain: Annotated[str, typer.Option(help="Only this domain.")] = "",
    state: Annotated[str, typer.Option(help="open, sealed or abandoned. Default: any.")] = "",
    min_reward: Annotated[
        float | None, typer.Option(help="Smallest sum of outcome rewards, inclusive.")
    ] = None,
    max_reward: Annotated[float | None, typer.Option(help="Largest sum, inclusive.")] = None,
    reward: Annotated[str, typer.Option(help="Sum the rewards of this name instead.")] = "",
    min_version: Annotated[
        int | None, typer.Option(help="At least one token has this weight version or a later one.")
    ] = None,
    max_version: Annotated[
        int | None, typer.Option(help="At least one token has this weight version or an earlier.")
    ] = None,
    since: Annotated[
        str, typer.Option(help="Closed since 90s, 15m, 2h or 7d ago, or since 2026-01-31T12:00.")
    ] = "",
    until: Annotated[str, typer.Option(help="Closed before; same forms as --since.")] = "",
) -> pool_pb2.TrajectoryFilter:
    """Returns the filter of the options. Raises `InvalidArgument`."""
    now_unix_s = time.time()
    return pool_pb2.TrajectoryFilter(
        domain=domain,
        state=_state(state),
        min_reward=min_reward,
        max_reward=max_reward,
        reward_name=reward,
        min_weight_version=min_version,
        max_weight_version=max_version,
        closed_from_unix_s=moment("since", since, now_unix_s=now_unix_s),
        closed_before_unix_s=moment("until", until, now_unix_s=now_unix_s),
    )


def _state(name: str) -> common_pb2.TrajectoryState.ValueType:
    names = {"": "UNSPECIFIED", "open": "OPEN", "sealed": "SEALED", "abandoned": "ABANDONED"}
    if name not in names:
        raise InvalidArgument(f"--state {name!r} must be open, sealed or abandoned")
    return common_pb2.TrajectoryState.Value(f"TRAJECTORY_STATE_{names[name]}")


def moment(option: str, text: str, *, now_unix_s: float) -> float | None:
    """Returns the Unix time of "2h" (ago) or of an ISO date, by default local; None for ""."""
    if not text:
        return None
    ago = _AGO.fullmatch(text)
    try:
        if ago is not None:
            return now_unix_s - float(ago[1]) * _UNIT_S[ago[2]]
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise InvalidArgument(
            f"--{option} {text!r} must be a time ago like 90s, 15m, 2h or 7d, or a date like "
            "2026-01-31T12:00"
        ) from None


def _found_later(**options: Any) -> Callable[[], Connection]:
    return partial(connection, **options)


_found_later.__signature__ = inspect.signature(connection, eval_str=True)  # type: ignore[attr-defined]


def _if_named(*, run_dir: Path | None, etcd: str, **options: Any) -> Connection | None:
    if run_dir is None and not etcd:
        return None
    return connection(run_dir=run_dir, etcd=etcd, **options)


_OF_CONNECTION = inspect.signature(connection, eval_str=True)
_if_named.__signature__ = _OF_CONNECTION.replace(  # type: ignore[attr-defined]
    parameters=[one for name, one in _OF_CONNECTION.parameters.items() if name != "root"]
)

_SOURCES: dict[str, Callable[..., Any]] = {
    "at": connection,
    "find": _found_later,
    "named": _if_named,
    "wanted": trajectory_filter,
    "options": RunOptions,
    "stack": stack_options,
    "submission": Submission,
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: options replace its parameters. Options of a connection replace `at`,
    `find` (connects on demand) or `named` (None without options); those of a filter, `wanted`;
    those of a run, `options`, or `stack` without a campaign; those of a data set, `submission`."""
    declared = inspect.signature(command, eval_str=True).parameters
    sources = {name: make for name, make in _SOURCES.items() if name in declared}
    options = {
        name: inspect.signature(make, eval_str=True).parameters for name, make in sources.items()
    }

    def run(**given: Any) -> None:
        try:
            made = {
                name: make(**{option: given.pop(option) for option in options[name]})
                for name, make in sources.items()
            }
        except ForgeError as error:
            fail(error)
        command(**made, **given)

    parameters = [one for name, one in declared.items() if name not in sources]
    # Options of the filter come before options of the connection.
    for name in reversed(sources):
        parameters += options[name].values()
    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in keyword_only}
    return run
