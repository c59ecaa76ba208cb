"""gpt-oss's format over a conversation: sampled ids continue in a tool loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge.core.errors import InvalidArgument
from forge.core.token_columns import int32_bytes
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.structured_output.turn_grammar import turn_grammar
from services.gateway.turns.answer_parser import turn_parser
from tests.support.gateway.chat_templates import make_model, make_tokenizer
from tests.support.gateway.conversations import TOOLS, Session, result, user

THOUGHT = "<|channel|>analysis<|message|>look<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"a"}<|call|>'


def test_the_model_is_recognized_by_its_template() -> None:
    """Format, reasoning in the answer's channels, and the effort as a variable."""
    model = make_model("harmony")
    assert (model.format.name, model.reasoning) == ("harmony", None)
    assert "reasoning_effort" in model.template_variables


def test_a_tool_loop_continues_the_sampled_ids() -> None:
    """In the model's spelling of the call, not the template's; after the final answer the
    template drops the analysis, so the next question is a branch."""
    session = Session("harmony", tools=TOOLS)
    call = session.turn([user("One?")], THOUGHT + CALL, ended=False)
    assert (call.reasoning, call.tool_calls[0].arguments) == ("look", '{"at": "a"}')
    loop = [user("One?"), replace(call, reasoning=""), result("42")]
    said = session.turn(loop, "<|channel|>final<|message|>42.")
    assert said.content == "42."
    assert session.how == ["first", "continued"]
    assert THOUGHT + CALL + "<|start|>functions.look to=assistant" in session.text(session.sent[1])
    session.turn([*loop, said, user("Two?")], "<|channel|>final<|message|>No.")
    assert session.how[2] == "branched"
    assert "analysis" not in session.text(session.sent[2]).partition("42.")[2]
    session.check_record()


def test_a_response_format_is_refused() -> None:
    """It would force an answer without channels."""
    request = TurnRequest(
        messages=[user("hi")],
        sampling=common_pb2.SamplingParams(grammar=common_pb2.Grammar(regex="a")),
        arrived=Moment(at_s=0.0, unix_s=0.0),
    )
    with pytest.raises(InvalidArgument, match=r"harmony.*channels"):
        turn_grammar(make_model("harmony"), request, opening="", inside=False)


def test_answers_without_tools_are_parsed() -> None:
    """Channels are no content, whatever the tools."""
    model, tokenizer = make_model("harmony"), make_tokenizer("harmony")
    request = TurnRequest(
        messages=[user("hi")],
        sampling=common_pb2.SamplingParams(),
        arrived=Moment(at_s=0.0, unix_s=0.0),
    )
    parser = turn_parser(model, request, opening="", inside=False)
    ids = int32_bytes(tokenizer.encode(f"{THOUGHT}<|channel|>final<|message|>Hi.<|return|>"))
    parser.feed(common_pb2.SampledTokens(ids=ids, logprobs=ids, weight_versions=ids))
    parser.finish()
    assert (parser.message().content, parser.message().reasoning) == ("Hi.", "look")
