"""`forge trajectories`: the commands that read the trajectories of a running pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from forge.cli.command_exit import finish
from forge.cli.connection import Connection
from forge.cli.exports.formats import ExportOptions
from forge.cli.options import FilterOptions, Json, with_options

trajectories_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="List, show, follow and export the trajectories of a running pool; default: the newest "
    "run under .forge.",
)


@trajectories_app.command()
@with_options
def ls(
    at: Connection,
    wanted: FilterOptions,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number; 0: all.")] = 50,
    text: Annotated[
        str,
        typer.Option(
            help="Only with this text in a message; upper and lower case are equal. Reads the "
            "messages of all trajectories that match the other conditions; needs an admin's token."
        ),
    ] = "",
    json: Json = False,
) -> None:
    """List the trajectories that match all conditions.

    [dim]forge trajectories ls --domain code --min-reward 0.5 --since 2h[/dim]

    [dim]forge trajectories ls --tag eval-7 --where repository=a/b --text "permission denied"[/dim]
    """
    from forge.cli.pool.pool_reading import list_trajectories, search_trajectories

    if text:
        finish(
            lambda: search_trajectories(at, wanted.resolved(), text, limit=limit, as_json=json),
            "Interrupted.",
        )
    else:
        finish(
            lambda: list_trajectories(at, wanted.resolved(), limit=limit, as_json=json),
            "Interrupted.",
        )


@trajectories_app.command()
@with_options
def show(
    at: Connection,
    trajectory: Annotated[
        str, typer.Argument(metavar="ID", help="task:rollout:attempt, as `ls` prints it.")
    ],
    full: Annotated[
        bool, typer.Option("--full", help="Print whole messages, not their first characters.")
    ] = False,
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Add the token values that the trainer stores: for each turn its step, the "
            "importance ratios, mean entropy and advantage, clipped tokens. With --json: the "
            "values of every token.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show one trajectory as a tree of branches, with each turn's tokens, labels and rewards.

    A branch is a line of turns that continue each other. Marks side calls and turns that the agent
    excluded; domains in advantages.train_side_calls train their side calls anyway.

    [dim]forge trajectories show sums-0003:1:0 --full[/dim]
    """
    from forge.cli.pool.pool_reading import show_trajectory

    finish(
        lambda: show_trajectory(at, trajectory, full=full, with_values=values, as_json=json),
        "Interrupted.",
    )


@trajectories_app.command()
@with_options
def tail(
    at: Connection,
    wanted: FilterOptions,
    cursor: Annotated[
        list[str] | None,
        typer.Option(help="Continue after it; one per shard, as a tail prints them at its end."),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with the oldest change, not with the next.")
    ] = False,
    json: Json = False,
) -> None:
    """Print trajectories as they are sealed, abandoned or rewarded late, until Ctrl-C.

    It survives restarts of the pool, and at its end prints the cursors with which another tail
    continues without a gap.
    """
    from forge.cli.pool.pool_reading import follow_trajectories

    finish(
        lambda: follow_trajectories(
            at, wanted.resolved(), cursors=cursor or [], from_start=from_start, as_json=json
        ),
        "",
    )


@trajectories_app.command()
@with_options
def export(
    at: Connection,
    wanted: FilterOptions,
    options: ExportOptions,
    file: Annotated[Path, typer.Argument(help="New file: NAME.parquet or NAME.jsonl.")],
) -> None:
    """Write trajectories to a file: whole, as chat messages, as preference pairs or as tokens.

    Parquet and JSON Lines have the same rows; memory does not grow with their number. Without
    --state it writes sealed trajectories alone. It counts trajectories that it leaves out, and
    names damaged ones on stderr; the exit code is then 1. The file gets its name when it is
    complete.

    [dim]forge trajectories export code.parquet --domain code --since 1d[/dim]

    [dim]forge trajectories export sft.jsonl --format sft --min-reward 1[/dim]

    [dim]forge trajectories export pairs.jsonl --format preference --margin 0.5[/dim]
    """
    from forge.cli.exports.command import export_trajectories

    chosen = replace(wanted, state=wanted.state or "sealed")
    finish(
        lambda: export_trajectories(at, chosen.resolved(), file, options),
        f"Interrupted; {file} is not written.",
    )
