"""`python -m services.gateway.model.doctor MODEL`: checks of a chat template, one JSON a line.

`forge doctor --model` runs it. A stable template repeats earlier messages unchanged before new
ones: then a turn continues the tokens of the turn before, and a trajectory is one branch. Many
templates drop earlier reasoning at a new question; in a loop of tool calls they have to be stable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge.core.conversation.continuation import (
    QUESTION,
    SAMPLES,
    TOOL_RESULT,
    Sample,
    TemplateRefused,
    continuation,
)
from forge.core.errors import ConfigError
from forge.core.formats import SAMPLE_TOOLS, Tools
from services.gateway.model.chat_model import ChatModel

_BRANCHES = (
    "Each such turn is a branch: encoded, sampled and trained with the whole history again. Put a "
    "chat_template.jinja that keeps earlier messages unchanged into the directory."
)


def findings(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of each finding about the model in a directory."""
    try:
        model = ChatModel.load(path)
    except ConfigError as error:
        remedy = "Name a directory with tokenizer.json, config.json and a chat template."
        yield {"ok": False, "text": str(error), "remedy": remedy}
        return
    except (OSError, ValueError, TypeError) as error:
        remedy = "Copy the tokenizer's files again."
        yield {"ok": False, "text": f"model {path}: {error}", "remedy": remedy}
        return
    tools, question = (_continues(model, SAMPLES[kind]) for kind in (TOOL_RESULT, QUESTION))
    ok = tools or (tools is None and question is not False)
    text = f"chat template of {path}: "
    if not ok:
        text += f"rewrites the history before {TOOL_RESULT if tools is False else QUESTION}"
        yield {"ok": False, "text": text, "remedy": _BRANCHES}
        return
    text += "stable" if question else f"stable, but for {QUESTION}, which begins a branch"
    if "strftime_now" in model.chat_template:
        text += "; it has the date, so a conversation branches at midnight"
    if not model.template.looks_back_one_answer:
        text += "; each turn renders the whole history"
    yield {"ok": True, "text": text}


def _continues(model: ChatModel, samples: Sequence[Sample]) -> bool | None:
    """Whether a turn continues the one before, in one of the samples, with or without tools; None
    if the template refuses all."""
    results = [
        _continued(model, sample, tools) for sample in samples for tools in (SAMPLE_TOOLS, None)
    ]
    known = [result for result in results if result is not None]
    return any(known) if known else None


def _continued(model: ChatModel, sample: Sample, tools: Tools | None) -> bool | None:
    history, answer, following = sample
    render = model.template.renderer(tools)
    try:
        text = continuation(
            render, history, answer, answer.content, following, end_texts=model.end_texts
        )
    except TemplateRefused:
        return None
    return text is not None


def main() -> None:
    """Print each finding."""
    for finding in findings(sys.argv[1]):
        print(json.dumps(finding), flush=True)


if __name__ == "__main__":
    main()
