"""When two messages are the same message."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.conversation.messages import (
    Message,
    ToolCall,
    agree,
    canonical_json,
    from_openai,
    normal_role,
    same,
    to_openai,
)
from forge.core.errors import InvalidArgument

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.text(max_size=10),
    reasoning=st.text(max_size=5),
    tool_calls=st.lists(
        st.builds(ToolCall, name=st.text(max_size=4), arguments=values.map(json.dumps)), max_size=2
    ).map(tuple),
    tool_call_id=st.text(max_size=4),
    name=st.text(max_size=4),
)


def call(arguments: str, call_id: str = "") -> Message:
    return Message(
        role="assistant",
        tool_calls=(ToolCall(name="look", arguments=arguments, call_id=call_id),),
    )


@given(values)
def test_json_spelling_does_not_matter(value: object) -> None:
    """Key order, white space and escapes leave the canonical text as it is."""
    spellings = [
        json.dumps(value),
        json.dumps(value, indent=3, ensure_ascii=False),
        json.dumps(value, sort_keys=True, separators=(",", ":")),
    ]
    assert len({canonical_json(text) for text in spellings}) == 1


@pytest.mark.parametrize(
    ("left", "right"), [("1.0", "1"), ("", "{}"), (' {"a":1e2} ', '{"a": 100}'), (" no ", "no")]
)
def test_equal_values_have_one_spelling(left: str, right: str) -> None:
    """1.0 is 1, a missing value is an empty object, and text that is not JSON is trimmed."""
    assert canonical_json(left) == canonical_json(right)


def test_json_nested_beyond_any_parser_is_text() -> None:
    """It is compared as text, and nothing is raised."""
    assert canonical_json("[" * 100_000) == "[" * 100_000


def test_call_ids_do_not_affect_agreement() -> None:
    """Agents invent their own ids."""
    assert call("{}", "a").key == call("{}", "b").key
    result = Message(role="tool", content="x", tool_call_id="a")
    assert result.key == replace(result, tool_call_id="b").key


def test_white_space_is_trimmed_from_answers_only() -> None:
    """White space at the ends of a question is part of it."""
    assert (
        Message(role="assistant", content=" a\n").key == Message(role="assistant", content="a").key
    )
    assert Message(role="user", content=" a\n").key != Message(role="user", content="a").key


def test_reasoning_agrees_unless_both_sides_differ() -> None:
    """Dropped reasoning is no edit; changed reasoning is an edit."""
    thought = Message(role="assistant", content="a", reasoning="hm")
    assert agree(thought, replace(thought, reasoning=""))
    assert agree(thought, replace(thought, reasoning=" hm\n"))
    assert not agree(thought, replace(thought, reasoning="ho"))


def test_added_assistant_name_is_no_edit() -> None:
    """A framework may add an assistant's name later; a different name is another speaker."""
    said = Message(role="assistant", content="a")
    named = replace(said, name="planner")
    assert same(said, named)
    assert not same(named, replace(said, name="critic"))
    asked = Message(role="user", content="a")
    assert not same(asked, replace(asked, name="planner"))


@given(messages)
def test_openai_form_is_read_back(message: Message) -> None:
    """`from_openai` reads everything that `to_openai` writes."""
    assert from_openai(json.loads(json.dumps(to_openai(message)))) == message


def test_unknown_roles_are_refused() -> None:
    """Aliases are resolved; the error names any other role."""
    assert (normal_role("developer"), normal_role("function")) == ("system", "tool")
    with pytest.raises(InvalidArgument, match="king"):
        normal_role("king")
