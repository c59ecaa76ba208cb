"""The options of `forge queue submit`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.options import duration_s

if TYPE_CHECKING:
    from forge.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A file of tasks, and how to submit it."""

    file: Annotated[Path, typer.Argument(help="JSON Lines: an object with `payload` per task.")]
    name: Annotated[str, typer.Option(help="Name of the data set. Default: the file's name.")] = ""
    epochs: Annotated[int, typer.Option(min=0, help="Number of epochs; 0: endless.")] = 1
    seed: Annotated[int, typer.Option(help="Seed of the order within each epoch.")] = 0
    shuffle: Annotated[bool, typer.Option(help="Shuffle each epoch.")] = True
    queued: Annotated[int, typer.Option(min=1, help="Groups to keep in the queue.")] = 256
    curriculum: Annotated[
        str, typer.Option(help="module:function that chooses the next tasks.")
    ] = ""
    domain: Annotated[str, typer.Option(help="Domain of tasks without one.")] = ""
    scaffold: Annotated[str, typer.Option(help="Scaffold of tasks without one.")] = "blackbox"
    group_size: Annotated[
        int, typer.Option(min=1, help="Rollouts of tasks without group_size.")
    ] = 8
    held_out: Annotated[
        Path | None, typer.Option(help="File of held-out tasks; a task in both files is an error.")
    ] = None
    check_payloads: Annotated[
        bool,
        typer.Option(
            help="Check payloads of Forge's own domains; not those of one that a runner replaces."
        ),
    ] = True
    timeout: Annotated[
        str, typer.Option(help="Longest wait for the scheduler: 90s, 15m, 2h. Default: no limit.")
    ] = ""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        object.__setattr__(self, "name", self.name or self.file.stem)
        duration_s("timeout", self.timeout)

    @property
    def timeout_s(self) -> float:
        """`timeout` in seconds; infinite without one."""
        limit_s = duration_s("timeout", self.timeout)
        return math.inf if limit_s is None else limit_s

    @property
    def defaults(self) -> common_pb2.Task:
        """Values of fields that a line omits."""
        from forge.v1 import common_pb2

        return common_pb2.Task(
            domain=self.domain, scaffold=self.scaffold, group_size=self.group_size
        )
