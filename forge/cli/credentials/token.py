"""`forge token`: issue, list and revoke tokens of people and runners.

Owns the arguments and the output; `forge.runtime.security.issued_tokens` owns the records.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.command_exit import console, finish, say
from forge.cli.connection import Connection, person
from forge.cli.options import duration_s, with_options
from forge.core.clocks import time_text
from forge.core.errors import InvalidArgument

if TYPE_CHECKING:
    from forge.runtime.security.issued_tokens import TokenRecord

token_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Issue, list and revoke the tokens of people and runners, where the cluster's key is.",
)


@token_app.command()
@with_options
def issue(
    at: Connection,
    role: Annotated[str, typer.Argument(help="viewer, operator, admin, runner or rank.")],
    subject: Annotated[str, typer.Option(help="Name of the person or host, for logs.")],
    life: Annotated[
        str,
        typer.Option(help="Lifetime: 30m, 12h or 7d. Default: admin 1h, operator 12h, others 30d."),
    ] = "",
    renewable: Annotated[
        str,
        typer.Option(help="Time in which a runner may renew it: 90d, 0s. Default: runner 366d."),
    ] = "",
    audience: Annotated[
        list[str] | None,
        typer.Option(help="Proto service that accepts it; repeatable. Default: the role's."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New file for it. Default: stdout.")] = None,
) -> None:
    """Issue a token. Its holder sets it by --token-file or FORGE_TOKEN, and needs no key.

    [dim]forge token issue runner --subject host-7 --out agents-token[/dim]
    """
    from forge.runtime.security.issued_tokens import ROLES, claims_for
    from forge.runtime.security.issued_tokens import issue as issue_token

    async def main() -> None:
        claims = claims_for(
            role,
            subject,
            life_s=duration_s("life", life),
            audience=frozenset(audience or ()) or None,
        )
        given_s = duration_s("renewable", renewable)
        renewable_s = ROLES[role].renewable_s if given_s is None else given_s
        if renewable_s and role != "runner":
            raise InvalidArgument("--renewable is for runners: issue a new token for others")
        keyring = at.keyring()
        async with at.open() as (coordinator, _):
            token = await issue_token(
                coordinator, keyring, claims, by=person(), renewable_s=renewable_s
            )
        if out is None:
            say(token)
        else:
            _write_token(out, token)
            say(f"{claims.token_id}: {out}")

    finish(main, "Interrupted.")


def _write_token(out: Path, token: str) -> None:
    from forge.runtime.files.private import write_private_file

    try:
        write_private_file(out, token + "\n")
    except OSError as error:
        raise InvalidArgument(f"--out {str(out)!r}: {error.strerror}") from None


@token_app.command("list")
@with_options
def list_tokens(at: Connection) -> None:
    """List the issued tokens: id, roles, subject, audience, expiry, issuer, state."""
    from forge.runtime.security.issued_tokens import records

    async def main() -> None:
        async with at.open() as (coordinator, _):
            issued = await records(coordinator)
        for token_id, record in sorted(issued.items(), key=lambda pair: pair[1].issued_unix_s):
            console.print(_line(token_id, record), soft_wrap=True)

    finish(main, "Interrupted.")


@token_app.command()
@with_options
def revoke(
    at: Connection, token_id: Annotated[str, typer.Argument(help="Id, see `forge token list`.")]
) -> None:
    """Revoke a token. Services refuse it within a second; an outage of etcd delays that."""
    from forge.runtime.security.issued_tokens import revoke as revoke_token

    async def main() -> None:
        if "." in token_id:
            raise InvalidArgument("revoke takes the id of a token, not the token")
        at.keyring()
        async with at.open() as (coordinator, _):
            record = await revoke_token(coordinator, token_id, by=person())
        console.print(_line(token_id, record), soft_wrap=True)

    finish(main, "Interrupted.")


def _line(token_id: str, record: TokenRecord) -> str:
    state, by = "valid", f"issued by {record.issued_by or '-'}"
    if record.revoked_unix_s:
        state, by = "revoked", f"{by}, revoked by {record.revoked_by or '-'}"
    if time.time() >= record.last_expiry_unix_s:
        state = "expired"
    return "  ".join(
        (
            token_id,
            ",".join(record.scopes) or "unrecorded",
            record.subject or "-",
            ",".join(record.audience) or "-",
            time_text(record.last_expiry_unix_s)
            + " with renewals" * bool(record.renewable_until_unix_s),
            by,
            state,
        )
    )
