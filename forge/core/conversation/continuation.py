"""The text that a chat template writes behind a sampled answer.

Exact tokens depend on it: which text follows the sampled ids when the agent sends more messages?
Encoding the whole rendered history again would re-tokenize the model's own text, which rarely gives
the same ids. Owns no tokenizer and no template: rendering is a function argument.

Call P the rendering of the history with a generation prompt, A the sampled text, G the history
and the answer rendered alone, and F everything rendered, generation prompt included. Then

    F = P + A + rest    the template repeats the answer as it was sampled;
    F = G + more        it repeats it in its own spelling (e.g. white space in a tool call): the
                        sampled spelling stays, rest = closing(G) + more, where closing is the text
                        behind an answer, from the end-of-turn token on.

In all other cases the template rewrites the history (drops earlier reasoning, renumbers rounds),
and the context must branch. It also branches when the template drops the reasoning already in G,
since the model was trained so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from forge.core.conversation.messages import Message, ToolCall

Render = Callable[[Sequence[Message], bool], str]
"""Returns the text of messages; with the flag, followed by the generation prompt. May raise
`TemplateRefused`."""

STUB = (Message(role="user", content="."),)
"""Replaces the whole history before an answer, for templates that depend on the answer alone."""


class TemplateRefused(Exception):
    """The template refuses these messages; the text has the reason."""


def continuation(
    render: Render,
    history: Sequence[Message],
    answer: Message,
    sampled_text: str,
    following: Sequence[Message],
    *,
    end_texts: Sequence[str],
) -> str | None:
    """Return the text behind `sampled_text`, from the end-of-turn token on; None: branch.

    `sampled_text` has no end-of-turn token; `end_texts` are the texts of those tokens.
    """
    before = render(history, True)
    everything = render([*history, answer, *following], True)
    as_sampled = before + sampled_text
    if everything.startswith(as_sampled):
        rest = everything[len(as_sampled) :]
        if rest.startswith(tuple(end_texts)):
            return rest
    closed = render([*history, answer], False)
    if not (closed.startswith(before) and everything.startswith(closed)):
        return None
    body = closed[len(before) :]
    if answer.reasoning.strip() not in body:
        return None
    return closing(body, end_texts) + everything[len(closed) :]


def closing(body: str, end_texts: Sequence[str]) -> str:
    """Return the end of an answer: from its end-of-turn token on, or its trailing white space."""
    start = max((body.rfind(text) for text in end_texts if text), default=-1)
    return body[start:] if start >= 0 else body[len(body.rstrip()) :]


def looks_back_one_answer(render: Render, stub: Render, *, end_texts: Sequence[str]) -> bool:
    """Whether `STUB` may replace the history before any answer; tests sample histories.

    If so, the cost of a continuation depends only on the new messages. `stub` renders behind the
    stub, without tools, so that a template that repeats tools behind every question shows a
    difference. Samples that the template refuses in full are skipped.
    """
    return all(
        _same_behind(render, stub, history, answer, following, end_texts)
        for history in _HISTORIES
        for answer in _ANSWERS
        for following in _FOLLOWING
    )


def _same_behind(
    render: Render,
    stub: Render,
    history: Sequence[Message],
    answer: Message,
    following: Sequence[Message],
    end_texts: Sequence[str],
) -> bool:
    try:
        full = continuation(render, history, answer, "?", following, end_texts=end_texts)
    except TemplateRefused:
        return True
    try:
        short = continuation(stub, STUB, answer, "?", following, end_texts=end_texts)
    except TemplateRefused:
        return False
    return full == short


def _user(text: str) -> Message:
    return Message(role="user", content=text)


_CALL = Message(
    role="assistant",
    tool_calls=(ToolCall(name="look", arguments='{"at": "a"}', call_id="call000a1"),),
)
_THOUGHT_CALL = Message(role="assistant", reasoning="I must look.", tool_calls=_CALL.tool_calls)
_RESULT = Message(role="tool", content="found", tool_call_id="call000a1", name="look")
_THOUGHT = Message(role="assistant", content="Yes.", reasoning="Let me see.")
_SYSTEM = Message(role="system", content="Be brief.")
_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_SYSTEM, _user("One?")),
    (_user("One?"), Message(role="assistant", content="1"), _user("Two?")),
    (_SYSTEM, _user("One?"), _THOUGHT, _user("Two?"), _CALL, _RESULT),
    (_user("One?"), _CALL, _RESULT, _THOUGHT, _user("Two?"), _THOUGHT, _user("Three?")),
    # Some templates keep the reasoning before a call only until the answer.
    (_user("One?"), _THOUGHT_CALL, _RESULT),
)
_ANSWERS = (
    Message(role="assistant", content="Fine."),
    _THOUGHT,
    _CALL,
    _THOUGHT_CALL,
)
_FOLLOWING: tuple[tuple[Message, ...], ...] = (
    (_user("Next?"),),
    (_RESULT,),
    (_RESULT, _RESULT),
    (_RESULT, _user("And?")),
    (_RESULT, _CALL, _RESULT),
)

QUESTION, TOOL_RESULT = "a question after an answer", "a tool's result"
Sample = tuple[tuple[Message, ...], Message, tuple[Message, ...]]
"""History, answer, and the messages behind it."""

SAMPLES: Mapping[str, tuple[Sample, ...]] = {
    QUESTION: (
        ((_SYSTEM, _user("One?")), Message(role="assistant", content="Fine."), _FOLLOWING[0]),
        ((_user("One?"),), Message(role="assistant", content="Fine."), _FOLLOWING[0]),
        ((_user("One?"),), _THOUGHT, _FOLLOWING[0]),
    ),
    TOOL_RESULT: tuple(
        (history, call, (_RESULT,))
        for history in ((_SYSTEM, _user("One?")), (_user("One?"),))
        for call in (_CALL, _THOUGHT_CALL)
    ),
}
"""Conversations by the kind of their last messages, for a test of a template; those of one kind
differ in what templates may refuse or drop: system messages and reasoning."""
