"""What stands behind a sampled answer, for templates of every temper."""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.conversation.continuation import (
    Render,
    TemplateRefused,
    closing,
    continuation,
    looks_back_one_answer,
)
from forge.core.conversation.messages import Message

END = "<end>"


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str, reasoning: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def simple(messages: Sequence[Message], generation_prompt: bool) -> str:
    text = "".join(f"[{m.role}]{m.reasoning}{m.content}{END}\n" for m in messages)
    return text + "[assistant]" * generation_prompt


def behind(render: Render, sampled: str, answer: Message, *following: Message) -> str | None:
    return continuation(render, [user("a")], answer, sampled, following, end_texts=(END,))


def test_repeated_answer_is_followed_by_its_end_and_the_rest() -> None:
    """The rest begins with the end-of-turn token and holds the new messages."""
    assert behind(simple, "b", said("b"), user("c")) == f"{END}\n[user]c{END}\n[assistant]"
    assert behind(simple, "b", said("b")) == f"{END}\n[assistant]"


def test_answer_trimmed_by_the_template_is_no_branch() -> None:
    """A template that trims the answer gives the same rest: the sampled tokens stay."""

    def trimming(messages: Sequence[Message], generation_prompt: bool) -> str:
        trimmed = [Message(role=m.role, content=m.content.strip()) for m in messages]
        return simple(trimmed, generation_prompt)

    rest = f"{END}\n[user]c{END}\n[assistant]"
    assert behind(trimming, " b \n", said(" b \n"), user("c")) == rest


def test_rewritten_history_is_a_branch() -> None:
    """Dropped reasoning, early or late, and renumbered messages cannot be continued."""

    def forgetful(messages: Sequence[Message], generation_prompt: bool) -> str:
        kept = [m if m is messages[-1] else said(m.content) for m in messages]
        return simple(kept, generation_prompt)

    def thoughtless(messages: Sequence[Message], generation_prompt: bool) -> str:
        return simple(
            [Message(role=m.role, content=m.content) for m in messages], generation_prompt
        )

    def renumbering(messages: Sequence[Message], generation_prompt: bool) -> str:
        return f"{len(messages)} " + simple(messages, generation_prompt)

    thought = said("b", "hm ")
    assert behind(forgetful, "hm b", thought, user("c")) is None
    assert behind(thoughtless, "hm b", thought, user("c")) is None
    assert behind(renumbering, "b", said("b"), user("c")) is None
    assert behind(simple, "hm b", thought, user("c")) is not None


def test_answer_without_an_end_token_ends_with_white_space() -> None:
    """Templates of plain text close an answer with a line break."""
    assert closing("b\n\n", (END,)) == "\n\n"
    assert closing(f"b{END}\n", (END,)) == f"{END}\n"


def test_templates_that_depend_on_earlier_messages_are_detected() -> None:
    """A template that counts messages or requires a system message cannot be rendered in part."""

    def counting(messages: Sequence[Message], generation_prompt: bool) -> str:
        text = "".join(f"[{at} {m.role}]{m.content}{END}" for at, m in enumerate(messages))
        return text + f"[{len(messages)} assistant]" * generation_prompt

    def strict(messages: Sequence[Message], generation_prompt: bool) -> str:
        if messages[0].role != "system":
            raise TemplateRefused("no system message")
        return simple(messages, generation_prompt)

    assert looks_back_one_answer(simple, simple, end_texts=(END,))
    assert not looks_back_one_answer(counting, counting, end_texts=(END,))
    assert not looks_back_one_answer(strict, strict, end_texts=(END,))
