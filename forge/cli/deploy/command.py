"""`forge deploy`: arguments and output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.command_exit import console, say
from forge.core.errors import InvalidArgument

if TYPE_CHECKING:
    from forge.cli.deploy.render import Report

deploy_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make a cluster of systemd hosts from one inventory file.",
)
Out = Annotated[Path, typer.Option(help="Directory of `forge deploy render`.")]


@deploy_app.command()
def init(
    file: Annotated[Path, typer.Argument(help="New file.")] = Path("cluster.toml"),
) -> None:
    """Write an example of an inventory, with every key and its meaning."""
    example = Path(__file__).with_name("example.toml").read_text()
    try:
        with file.open("x") as new:
            new.write(example)
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from None
    say(f"{file}: name your hosts, then forge deploy render --inventory {file} --out rendered")


@deploy_app.command()
def render(
    inventory: Annotated[Path, typer.Option(help="File of `forge deploy init`.")],
    out: Annotated[
        Path, typer.Option(help="Directory for the hosts' files and the cluster's secrets.")
    ],
    rotate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT", help="Replace all certificates, or all tokens; may be repeated."
        ),
    ] = None,
) -> None:
    """Make units, settings, certificates, passwords and tokens of every host.

    Repeat it after a change of the inventory, after an upgrade of Forge, and once a month: what is
    sound stays, certificates that expire soon are replaced. --out has the key of the CA and of the
    cluster; keep it on one trusted computer.
    """
    from importlib import metadata

    from forge.cli.deploy.render import render as write
    from forge.cli.deploy.secrets import ROTATED
    from forge.core.extras import DISTRIBUTION

    for one in rotate or ():
        if one not in ROTATED:
            raise InvalidArgument(f"--rotate {one!r} must be one of {', '.join(ROTATED)}")
    try:
        text = inventory.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--inventory {str(inventory)!r}: {error}") from None
    report = write(
        text,
        out,
        source=str(inventory),
        release=metadata.version(DISTRIBUTION),
        rotate=rotate or (),
    )
    _show(report)


def _show(report: Report) -> None:
    for line in report.secrets:
        say(line)
    for host, changed in report.changed.items():
        files = report.files.get(host, 0)
        say(f"{host}: {files} files, {len(changed)} changed")
        for path in changed[:8]:
            console.print(f"    {path}", markup=False, soft_wrap=True)
        if changed[8:]:
            say(f"    and {len(changed) - 8} more")
    if missing := report.inventory.missing():
        say(f"no host runs: {', '.join(missing)}")
