"""The grammar of a turn, and its judgement of texts."""

from __future__ import annotations

import asyncio
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from forge.grammar.answer_grammar import LIMITS, Kind, source
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.chat_model import ChatModel
from services.gateway.structured_output.turn_grammar import check, turn_grammar
from tests.support.gateway.chat_templates import make_tokenizer


def request(**fields: Any) -> TurnRequest:
    given = {"sampling": common_pb2.SamplingParams(), "arrived": Moment.now()}
    return TurnRequest(**{**given, **fields})


def grammar_of(
    model: ChatModel, asked: TurnRequest, *, opening: str = "", inside: bool = False
) -> common_pb2.Grammar | None:
    asyncio.run(check(asked))
    return turn_grammar(model, asked, opening=opening, inside=inside)


class Judge:
    """What a grammar makes of texts."""

    def __init__(self, family: str, grammar: common_pb2.Grammar | None) -> None:
        assert grammar is not None
        tokenizer = make_tokenizer(family)
        self._tokenizer = LLTokenizer(
            tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id
        )
        kind: Kind = grammar.WhichOneof("kind") or "lark"
        text = source(kind, getattr(grammar, kind), lenient=grammar.lenient)
        self._matcher = LLMatcher(self._tokenizer, text, limits=LIMITS, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def __call__(self, text: str) -> str:
        """ "whole", "begun" or "wrong"."""
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer.tokenize_str(text)
        if matcher.try_consume_tokens(ids) < len(ids):
            return "wrong"
        return "whole" if matcher.is_accepting() else "begun"
