"""Context folding: what a history becomes when the model's own summary replaces it.

Owns the two pure steps of a fold, and thereby the message sequence every white-box scaffold sends
and every demonstration was written for. It does not decide when to fold, and calls no model.

    initial   = [system, user task]                      Episode.messages
    history   = initial + assistant, tool, ...           `fold_every` turns later
    request   = fold_request(history, fold_prompt)       history + {"role": "user", fold_prompt}
    summary   = what the model answers to `request`      a turn like any other: sampled, trained
    history'  = folded(initial, summary)                 initial + {"role": "user", "Summary: ..."}

A turn is one model call that is not a fold. After every `fold_every` turns whose last answer made
tool calls, and once their results are in, the scaffold folds; the turns after it extend history'.
Later folds start from `initial` again, so only what the newest summary says survives.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.agents.environments.base import Message

CONTEXT_ACTION = "fold"
"""Names the action in the `context_action` of the call that asks for the summary."""
SUMMARY_PREFIX = "Summary: "


def fold_request(messages: Sequence[Message], fold_prompt: str) -> list[Message]:
    """The history so far, followed by the request to summarise it."""
    return [*messages, {"role": "user", "content": fold_prompt}]


def folded(initial_messages: Sequence[Message], summary: str) -> list[Message]:
    """The history that stands in for all that happened: the task, and the summary of it."""
    return [*initial_messages, {"role": "user", "content": SUMMARY_PREFIX + summary.strip()}]
