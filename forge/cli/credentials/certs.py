"""`forge certs`: a CA, host certificates, and the rotation of the CA.

Owns the arguments and the output. `certs_authority` owns certificates and files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forge.cli.command_exit import say

certs_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make TLS certificates of services, etcd and clients, where the CA's key is.",
)
Folder = Annotated[Path, typer.Argument(help="Directory of the CA: ca.pem and ca-key.pem.")]
_MAX_DAYS = 3650
CaDays = Annotated[int, typer.Option(min=1, max=_MAX_DAYS, help="Lifetime of the new CA.")]


@certs_app.command()
def init(folder: Folder, days: CaDays = _MAX_DAYS) -> None:
    """Make a CA. Its key, ca-key.pem, signs host certificates: keep it off the hosts."""
    from forge.cli.credentials.certs_authority import Authority

    authority = Authority.init(folder, days=days)
    say(f"{folder}: a CA until {authority.signer.not_valid_after_utc:%Y-%m-%d}")


@certs_app.command()
def issue(
    names: Annotated[
        list[str],
        typer.Argument(help="DNS names and IP addresses at which others reach the host."),
    ],
    out: Annotated[Path, typer.Option(help="Directory for the files of the host.")],
    ca: Annotated[Path, typer.Option(help="Directory of `forge certs init`.")],
    days: Annotated[int, typer.Option(min=1, max=_MAX_DAYS, help="Lifetime.")] = 365,
    common_name: Annotated[
        str,
        typer.Option(help="Subject; must not name a user in etcd. Default: the first name."),
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the files in --out; they keep their owner.")
    ] = False,
) -> None:
    """Issue a certificate for a host, as server and client, of services, etcd and commands.

    Writes tls_cert.pem, tls_key.pem and tls_ca.pem; the settings of services and the options of
    commands have these names.
    """
    from forge.cli.credentials.certs_authority import Authority

    issued = Authority.load(ca).issue(
        names, out, days=days, common_name=common_name or names[0], replace=replace
    )
    say(f"{out}: {', '.join(names)} until {issued.not_valid_after_utc:%Y-%m-%d}")


@certs_app.command()
def rotate(
    folder: Folder,
    days: CaDays = _MAX_DAYS,
    finish: Annotated[
        bool, typer.Option("--finish", help="Stop trusting the old CA: the last step.")
    ] = False,
) -> None:
    """Replace the CA without a pause.

    1. rotate: ca.pem has the new and the old CA. Copy it to every host as tls_ca.pem.
    2. issue --replace for every host, and copy the files.
    3. rotate --finish: ca.pem has the new CA alone. Copy it to every host as tls_ca.pem.
    """
    from forge.cli.credentials.certs_authority import Authority

    authority = Authority.load(folder)
    if finish:
        authority.finish_rotation()
    else:
        authority.rotate(days=days)
    say(
        f"{folder / 'ca.pem'}: the new CA; copy it to every host as tls_ca.pem"
        if finish
        else f"{folder / 'ca.pem'}: the new and the old CA; copy it to every host as tls_ca.pem, "
        "then `forge certs issue --replace` for each"
    )
