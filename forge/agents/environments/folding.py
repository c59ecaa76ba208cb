"""Context folding: the model's own summary replaces the history.

Owns the two pure steps of a fold, and so the messages that white-box scaffolds send and
demonstrations contain. Does not decide when to fold, and calls no model.

    initial   = [system, user task]                      Episode.messages
    history   = initial + assistant, tool, ...           `fold_every` turns later
    request   = fold_request(history, fold_prompt)       history + {"role": "user", fold_prompt}
    summary   = the model's answer to `request`          sampled and trained as any turn
    history'  = folded(initial, summary)                 initial + {"role": "user", "Summary: ..."}

Here a turn is a model call that is no fold. After every `fold_every` turns, if the last answer has
tool calls, the scaffold adds their results and folds; the next turns extend history'. Later folds
start from `initial` again, so only the newest summary survives.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.agents.environments.base import Message

CONTEXT_ACTION = "fold"
"""The `context_action` of the call for the summary."""
SUMMARY_PREFIX = "Summary: "


def fold_request(messages: Sequence[Message], fold_prompt: str) -> list[Message]:
    """Returns the history with the request for a summary at its end."""
    return [*messages, {"role": "user", "content": fold_prompt}]


def folded(initial_messages: Sequence[Message], summary: str) -> list[Message]:
    """Returns the history after a fold: the task and the summary."""
    return [*initial_messages, {"role": "user", "content": SUMMARY_PREFIX + summary.strip()}]
