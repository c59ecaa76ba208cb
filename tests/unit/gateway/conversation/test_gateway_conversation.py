"""Exact tokens: prompts that continue, repeat and branch, and turns that spell them again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge.core.conversation.messages import Message, ToolCall
from forge.core.errors import InvalidArgument
from forge.core.token_columns import int32_bytes
from tests.support.gateway.conversations import LINEAR, TOOLS, Session, result, user


@pytest.mark.parametrize("family", LINEAR)
def test_next_prompt_continues_the_sampled_ids(family: str) -> None:
    """The next prompt is the last sequence, token for token, and then the new text."""
    session = Session(family)
    history = [Message(role="system", content="Be brief."), user("One?")]
    for number in range(4):
        answer = session.turn(history, f"It is {number}.", by_character=True)
        history = [*history, answer, user(f"And {number}?")]
    assert session.how == ["first", "continued", "continued", "continued"]
    for before, after in zip(session.turns, session.turns[1:], strict=False):
        assert after.parent_turn == before.turn_index
        assert after.prefix_tokens * 4 == len(session.sent[before.turn_index]) + len(
            session.sampled[before.turn_index]
        )
    session.check_record()
    assert session.text(session.sent[-1]) == session.template(history[:-2])


def test_reasoning_that_the_template_drops_makes_a_branch() -> None:
    """Qwen 3 drops the reasoning before the last question: so does the prompt."""
    session = Session("qwen3")
    first = session.turn([user("One?")], "<think>\nhm\n</think>\n\nYes.")
    assert (first.reasoning, first.content) == ("hm", "Yes.")
    history = [user("One?"), replace(first, reasoning=""), user("Two?")]
    session.turn(history, "<think>\nho\n</think>\n\nNo.")
    assert session.how == ["first", "branched"]
    assert session.text(session.sent[1]) == session.template([user("One?"), first, user("Two?")])
    assert "hm" not in session.text(session.sent[1])
    assert session.turns[1].prefix_tokens > 0
    session.check_record()


def test_reasoning_is_kept_where_the_template_keeps_it() -> None:
    """Within one tool loop Qwen 3 keeps it, although the agent did not send it back."""
    session = Session("qwen3", tools=TOOLS)
    call = (
        '<think>\nlook it up\n</think>\n\n<tool_call>\n{"name":"look","arguments":{}}\n</tool_call>'
    )
    answer = session.turn([user("One?")], call, by_character=True)
    assert answer.tool_calls[0].name == "look"
    seen = replace(answer, reasoning="", tool_calls=(replace(answer.tool_calls[0], call_id="x"),))
    session.turn([user("One?"), seen, result("42")], "<think>\nfine\n</think>\n\n42.")
    assert session.how == ["first", "continued"]
    assert "look it up" in session.text(session.sent[1])
    session.check_record()


def test_end_of_turn_is_neither_doubled_nor_missing() -> None:
    """Sampled or cut off before it, the end-of-turn token is there exactly once."""
    for ended in (True, False):
        session = Session("chatml")
        answer = session.turn([user("One?")], "Yes.", ended=ended)
        prompt = session.prompt([user("One?"), answer, user("Two?")])
        assert "Yes.<|im_end|>\n<|im_start|>user\nTwo?" in session.text(prompt.ids)
        assert prompt.draft.how == "continued"


def test_repeated_request_has_the_same_prompt() -> None:
    """It stores no new prompt ids."""
    session = Session("chatml")
    for text in ("a", "b", "a"):
        session.turn([user("One?")], text)
    assert session.how == ["first", "repeated", "repeated"]
    assert [turn.prompt_ids for turn in session.turns[1:]] == [b"", b""]
    session.check_record()


def test_call_ids_distinguish_equal_answers() -> None:
    """Two samples with the same call have different ids."""
    session = Session("chatml", tools=TOOLS)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    first = session.turn([user("One?")], call)
    session.turn([user("One?")], call, by_character=True)
    prompt = session.prompt([user("One?"), first, result("42")])
    assert prompt.ids.startswith(session.sent[0] + session.sampled[0])


def test_forced_opening_is_prompt_and_not_sampled() -> None:
    """The opening precedes the sampled tokens, now and in later prompts."""
    session = Session("chatml", tools=TOOLS)
    opening = session.model.format.opening("look")
    answer = session.turn([user("One?")], '{"at": 1}}\n</tool_call>', opening=opening)
    assert answer.tool_calls[0].arguments == '{"at": 1}'
    assert session.text(session.sent[0]).endswith(opening)
    session.turn([user("One?"), answer, result("42")], "42")
    assert session.how[1] == "continued"
    session.check_record()


def test_template_error_is_a_bad_request() -> None:
    """The agent gets the template's message."""
    session = Session("llama3", tools=TOOLS)
    calls = (ToolCall(name="a", arguments="{}"), ToolCall(name="b", arguments="{}"))
    with pytest.raises(InvalidArgument, match="single tool-calls"):
        session.prompt([user("One?"), Message(role="assistant", tool_calls=calls), result("1")])


def test_turn_with_prompt_ids_is_in_the_same_tree() -> None:
    """It shares its prefix with the chat turns, and the other way round."""
    session = Session("chatml")
    session.turn([user("One?")], "Yes.")
    given_ids = session.sent[0] + session.sampled[0] + int32_bytes([5, 6, 7])
    session.generate(given_ids, b"")
    assert (session.turns[1].parent_turn, len(session.turns[1].prompt_ids)) == (0, 12)
    session.turn([user("One?")], "No.")
    session.check_record()
    assert session.restored().turns == 3
