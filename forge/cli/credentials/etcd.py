"""`forge etcd`: users, roles and permissions of a cluster in etcd.

Owns the arguments and the output; `forge.runtime.coordination.etcd_roles` owns the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forge.cli.command_exit import console, finish, say
from forge.cli.options import Insecure, TlsCert, TlsKey

etcd_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Show and apply the users, roles and permissions of a cluster in etcd.",
)
Cluster = Annotated[str, typer.Option(envvar="FORGE_CLUSTER", help="Name of the cluster.")]


@etcd_app.command()
def roles(cluster: Cluster = "default") -> None:
    """Print the keys that the role of each service reads and writes."""
    from forge.runtime.coordination.etcd_roles import ROLES, etcd_user

    for service, role in ROLES.items():
        for verb, keys in (("reads", role.reads), ("writes", role.writes)):
            for key in keys:
                path = f"/forge/{cluster}/{key}"
                shown = f"{path}*" if path.endswith("/") else path
                console.print(f"{etcd_user(cluster, service)} {verb} {shown}", soft_wrap=True)


@etcd_app.command()
def apply(
    passwords: Annotated[
        Path, typer.Argument(help="Directory of password files, one a user; made if absent.")
    ],
    endpoints: Annotated[
        str,
        typer.Option(
            "--etcd", envvar="FORGE_ETCD", help="\\[https://]host:port, separated by commas."
        ),
    ] = "127.0.0.1:2379",
    cluster: Cluster = "default",
    runner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Host whose runners get a separate user, CLUSTER.runner@HOST, that cannot write "
            "entries of other runners; may be repeated.",
        ),
    ] = None,
    tls_ca: Annotated[
        str, typer.Option(envvar="FORGE_TLS_CA", help="PEM certificates that verify etcd.")
    ] = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    insecure: Insecure = False,
) -> None:
    """Make the users and roles of a cluster, then enable authentication.

    Repeat it after an upgrade: it prints and applies the differences. The directory gets the
    password of etcd's root, and for each service the file forge-<service>: its etcd_password_file.
    A new password replaces a file's content, and is in force after the next [bold]apply[/bold].
    """
    from forge.runtime.coordination.etcd_users import apply_roles
    from forge.runtime.security.tls import Tls

    async def main() -> None:
        tls = Tls(cert=tls_cert, key=tls_key, ca=tls_ca, insecure=insecure)
        changes = await apply_roles(
            endpoints,
            cluster=cluster,
            credentials=tls.etcd_credentials(endpoints),
            directory=passwords,
            runners=runner or (),
        )
        for change in changes or ["nothing to change"]:
            say(change)

    finish(main, "Interrupted.")
