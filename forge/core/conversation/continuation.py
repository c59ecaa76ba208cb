"""What a chat template writes behind an answer that the model sampled.

Owns the question on which exact tokens rest: given the ids of a prompt and what was sampled from
it, which text follows when the agent comes back with more messages? Rendering the whole history
again and encoding it would re-tokenize the model's own words, which rarely gives its ids back.
Owns no tokenizer and no template: rendering is a function passed in.

Call P the rendering of the history with a generation prompt, A the sampled text, G the history
and the answer rendered alone, and F everything rendered, generation prompt included. Then

    F = P + A + rest    the template repeats the answer as it was sampled;
    F = G + more        it repeats it in its own spelling (white space in a tool call, say): the
                        sampled spelling stays, rest = closing(G) + more, where closing is what
                        stands behind an answer, from the end-of-turn token on.

In any other case the template rewrites history once there is more of it (drops earlier
reasoning, numbers rounds anew), and the context has to branch. So it does when the template
drops the reasoning in G already: that is its author's decision, and what it was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.core.conversation.messages import Message, ToolCall

Render = Callable[[Sequence[Message], bool], str]
"""Text of messages; with the flag, followed by the generation prompt. May raise `TemplateRefused`,
which is for messages that the template does not take."""

STUB = (Message(role="user", content="."),)
"""Stands for the whole history before an answer, for templates that do not look back further."""


class TemplateRefused(Exception):
    """The template does not take these messages; the text says why."""


def continuation(
    render: Render,
    history: Sequence[Message],
    answer: Message,
    sampled_text: str,
    following: Sequence[Message],
    *,
    end_texts: Sequence[str],
) -> str | None:
    """The text behind `sampled_text`, from the end-of-turn token on; None calls for a branch.

    `sampled_text` is without the end-of-turn token, `end_texts` are the spellings of those.
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
    """What stands behind an answer: from its end-of-turn token on, or the white space there."""
    start = max((body.rfind(text) for text in end_texts if text), default=-1)
    return body[start:] if start >= 0 else body[len(body.rstrip()) :]


def looks_back_one_answer(render: Render, stub: Render, *, end_texts: Sequence[str]) -> bool:
    """Whether `STUB` may stand for the history of every answer: tried out on sample histories.

    If so, following up costs only what is new, however long the session. `stub` renders behind
    the stub: without tools, where a template that repeats them behind every question must be seen
    to do so. Samples that the template refuses either way prove nothing and are passed over.
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
    # What is thought before a call may stay until there is an answer, and go then.
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
