"""The choices of an export: its row format and the options of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer


class ExportFormat(StrEnum):
    """Unit of a row."""

    TRAJECTORIES = "trajectories"
    """A trajectory with everything that the pool has of it."""
    SFT = "sft"
    """A conversation, for supervised fine-tuning."""
    PREFERENCE = "preference"
    """Two rollouts of one task with different rewards."""
    TOKENS = "tokens"
    """A sequence of tokens with mask, log-probs, advantages and weight versions."""


class CallArguments(StrEnum):
    """Form of the arguments of tool calls in JSON Lines."""

    OBJECT = "object"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Select the rows of an export."""

    format: Annotated[
        ExportFormat,
        typer.Option(
            help="A row is: a whole trajectory; sft: a conversation, messages and tools; "
            "preference: a pair, prompt, chosen and rejected; tokens: ids, mask, log-probs, "
            "advantages, versions."
        ),
    ] = ExportFormat.TRAJECTORIES
    arguments: Annotated[
        CallArguments,
        typer.Option(
            help="Arguments of calls in sft and preference: an object, as TRL and chat templates "
            "read them, or a text of JSON, as OpenAI does. In Parquet always text."
        ),
    ] = CallArguments.OBJECT
    margin: Annotated[
        float,
        typer.Option(min=0, help="preference: smallest difference of rewards; 0: any difference."),
    ] = 0.0
    pairs_per_group: Annotated[
        int, typer.Option(min=1, help="preference: pairs of a task, the largest differences first.")
    ] = 1
