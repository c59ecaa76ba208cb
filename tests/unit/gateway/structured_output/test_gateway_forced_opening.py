"""The beginning of a required call ends between two tokens, for every format and tokenizer."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from forge.core.formats import CallDelta, get_format
from forge.core.formats.registry import CHANNELS
from forge.core.token_columns import int32_array
from forge.grammar.answer_grammar import LIMITS, source
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.chat_template import ASKED
from services.gateway.structured_output.forced_opening import opening_of
from services.gateway.structured_output.turn_grammar import turn_grammar
from services.trainer.starting_weights.tiny_model.tokenizer import build_tokenizer
from tests.support.core.format_samples import CALLING
from tests.support.gateway.chat_templates import CHATML, make_tokenizer

FORMATS = [*CALLING, *CHANNELS]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "look": [{}, {"at": "a"}, {"at": "(x)"}, {"deep": 3}, {"at": "b", "deep": 12}],
    "get_weather": [{}, {"city": "Rome"}],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "additionalProperties": False,
            },
        },
    }
    for name, properties in {
        "look": {"at": {"type": "string"}, "deep": {"type": "integer"}},
        "get_weather": {"city": {"type": "string"}},
    }.items()
]


def request(required: str, tools: list[dict[str, Any]] = TOOLS) -> TurnRequest:
    return TurnRequest(
        tools=tools,
        required_tool=required,
        sampling=common_pb2.SamplingParams(),
        arrived=Moment(at_s=0.0, unix_s=0.0),
    )


def calls_of(name: str) -> dict[str, list[str]]:
    """Calls as the format writes them, by tool."""
    output = get_format(name)
    return {
        tool: [output.write([CallDelta(name=tool, arguments=json.dumps(one))]) for one in arguments]
        for tool, arguments in ARGUMENTS.items()
    }


def texts() -> list[str]:
    """What a model of each format has read."""
    return [text for name in FORMATS for texts in calls_of(name).values() for text in texts]


def trained(backend: Tokenizer, trainer: trainers.Trainer) -> PreTrainedTokenizerFast:
    backend.train_from_iterator(texts() * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
        chat_template=CHATML.strip(),
    )


def across_words() -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges over words, signs and spaces: tokens end nearly anywhere."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return trained(backend, trainer)


def sentence_pieces() -> PreTrainedTokenizerFast:
    """A unigram model, whose boundaries depend on the whole word."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    return with_tags(trained(backend, trainer))


def with_tags(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tags of all formats become tokens."""
    tags = sorted({tag for name in FORMATS for tag in get_format(name).marks})
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return tokenizer


TOKENIZERS = {
    "words": lambda: make_tokenizer("chatml"),
    "tags": lambda: with_tags(make_tokenizer.__wrapped__("chatml")),
    "across words": across_words,
    "sentence pieces": sentence_pieces,
    "tiny": lambda: build_tokenizer(texts() * 4),
}


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return TOKENIZERS[kind]()


@functools.cache
def matched_by(kind: str) -> LLTokenizer:
    return from_tokenizer(tokenizer_of(kind))


@functools.cache
def model_of(name: str, kind: str) -> ChatModel:
    tokenizer = tokenizer_of(kind)
    return ChatModel(
        tokenizer,
        name=f"{name} {kind}",
        context_tokens=4096,
        stop_ids={tokenizer.eos_token_id},
        tool_format=name,
        reasoning_format="none",
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_has_the_tokens_of_its_whole_text(name: str, kind: str) -> None:
    """Those in the prompt are the first of the whole call, whatever its arguments are, and the
    grammar allows its others."""
    model = model_of(name, kind)
    before = model.template.rendered(ASKED, None, generation_prompt=True)
    for required in ("", "look"):
        asked = request(required)
        opening = opening_of(model, asked)
        prompt = model.encode(before + opening)
        grammar = turn_grammar(model, asked, opening=opening, inside=False)
        assert grammar is not None
        limited = source("lark", grammar.lark)
        for tool, calls in calls_of(name).items():
            for call in calls if required in ("", tool) else []:
                # Without an opening, the tokens of the prompt are the template's alone.
                ids = model.encode(before + call) if opening else prompt + model.encode(call)
                assert ids.startswith(prompt), (call, opening)
                matcher = LLMatcher(matched_by(kind), limited, limits=LIMITS)
                rest = list(int32_array(ids[len(prompt) :]))
                assert matcher.try_consume_tokens(rest) == len(rest), (call, opening)
                assert matcher.is_accepting() or matcher.is_stopped(), (call, opening)


def test_as_much_as_possible_is_in_the_prompt() -> None:
    """Where the opening ends with a token, all of it; else up to the last token before its end."""
    whole = get_format("hermes").opening("look")
    assert opening_of(model_of("hermes", "tags"), request("")) == get_format("hermes").opening(None)
    cut = opening_of(model_of("hermes", "tiny"), request("look"))
    assert cut == whole.removesuffix('": ')


def test_an_opening_is_forced_whole_without_rules_for_arguments() -> None:
    """The grammar requires what the prompt lacks of it, and leaves the rest free: tags too."""
    schema = {"type": "object", "additionalProperties": True}
    free = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    model = model_of("glm", "across words")
    asked = request("look", free)
    opening, whole = opening_of(model, asked), model.format.opening("look")
    assert opening != whole
    grammar = turn_grammar(model, asked, opening=opening, inside=False)
    assert grammar is not None
    text = source("lark", grammar.lark)
    rest = whole.removeprefix(opening)
    matcher = LLMatcher(matched_by("across words"), text, limits=LIMITS)
    assert matcher.try_consume_tokens(list(int32_array(model.encode("?")))) == 0
    matcher = LLMatcher(matched_by("across words"), text, limits=LIMITS)
    ids = list(int32_array(model.encode(f"{rest}?</tool_call>")))
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_an_opening_that_is_cut_to_nothing_begins_no_reasoning() -> None:
    """The grammar forces the call at once, and none of the reasoning that the template begins."""
    model = ChatModel(
        tokenizer_of("across words"),
        name="reasoning",
        context_tokens=4096,
        stop_ids={tokenizer_of("across words").eos_token_id},
        tool_format="hermes",
        reasoning_format="think",
    )
    grammar = turn_grammar(model, request("look"), opening="", inside=False)
    assert grammar is not None
    assert "think" not in grammar.lark
    assert grammar.lark.splitlines()[1] == "start: body"
