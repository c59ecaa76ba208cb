"""Template variables: part of the identity of a context, and checked against the template."""

from __future__ import annotations

import json

import pytest

from forge.core.errors import InvalidArgument
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.conversations import TOOLS, Session, result, user

OFF = '{"enable_thinking":false}'
TERSE = '{"style":"Be terse."}'
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


def test_contexts_with_other_variables_share_no_node() -> None:
    """A prompt that was rendered with other variables is neither repeated nor continued."""
    session = Session("chatml", tools=TOOLS)
    session.turn([user("One?")], "Yes.")
    answer = session.turn([user("One?")], CALL, template_kwargs=TERSE)
    assert session.how == ["first", "branched"]
    assert ["Be terse." in session.text(sent) for sent in session.sent] == [False, True]
    loop = [user("One?"), answer, result("42")]
    assert session.prompt(loop).draft.how == "branched"
    session.turn(loop, "42", template_kwargs=TERSE)
    assert session.how[-1] == "continued"
    session.turn([user("One?")], "Yes.", template_kwargs=TERSE)
    assert session.how[-1] == "repeated"
    session.check_record()


def test_record_has_the_template_variables() -> None:
    """So another gateway continues the same context, and a record without them opens as before."""
    session = Session("chatml", tools=TOOLS)
    answer = session.turn([user("One?")], CALL, template_kwargs=TERSE)
    session.turn([user("One?")], "Yes.")
    first, second = (json.loads(turn.messages_json) for turn in session.turns)
    assert first["template_kwargs"] == {"style": "Be terse."}
    assert "template_kwargs" not in second
    session.conversation = session.restored()
    loop = [user("One?"), answer, result("42")]
    assert session.prompt(loop, template_kwargs=TERSE).draft.how == "continued"


def test_generation_prompt_follows_the_template_variables() -> None:
    """Whether a template opens the reasoning may depend on them."""
    render = make_model("qwen3").template_with(OFF).renderer(None)
    assert render([user("One?")], True).endswith("<think>\n\n</think>\n\n")


def test_request_variables_replace_those_of_the_token() -> None:
    """Single ones, in one spelling."""
    model = make_model("qwen3")
    assert model.template_kwargs("", "") == ""
    assert model.template_kwargs(OFF, "") == OFF
    assert model.template_kwargs(OFF, '{ "enable_thinking": true }') == '{"enable_thinking":true}'


def test_variables_of_a_token_may_be_larger_than_those_of_a_request() -> None:
    """They are those of the domain and of the task together, each within the bound."""
    large = json.dumps({"enable_thinking": "x" * 5000})
    assert make_model("qwen3").template_kwargs(large, OFF) == OFF
    assert len(make_model("qwen3").template_kwargs(large, "")) > 5000


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ('{"thinking": false}', "thinking = false: .*no such variable; it has .*enable_thinking"),
        ('{"tools": []}', "tools = "),
        ('{"add_generation_prompt": false}', "add_generation_prompt = false"),
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
        (json.dumps({"enable_thinking": "x" * 5000}), "at most 4096"),
        (json.dumps({"enable_thinking": "é" * 3000}, ensure_ascii=False), "has 6023 bytes"),
    ],
)
def test_a_variable_without_effect_is_refused(kwargs: str, says: str) -> None:
    """With its name and value, and the variables that the template has."""
    with pytest.raises(InvalidArgument, match=says):
        make_model("qwen3").template_kwargs("", kwargs)
