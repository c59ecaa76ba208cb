"""Streaming parsers of what models write: the pieces do not matter, and nothing is swallowed."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge.core.errors import ConfigError, InvalidArgument
from forge.core.formats import (
    Answer,
    Delta,
    Parser,
    PlainParser,
    TextDelta,
    ThinkParser,
    collect,
    detect_format,
    get_format,
)
from forge.core.formats.hermes import HermesParser

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'

pieces = st.lists(
    st.one_of(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", CALL, "<", "tool_"]
        ),
        st.text('ab{}<>/ \n"', max_size=5),
    ),
    max_size=8,
)


def read(parser: Parser, pieces: list[str]) -> tuple[Answer, list[Delta]]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    return collect(deltas, parser.error), deltas


def parsers() -> list[Parser]:
    return [
        PlainParser(),
        HermesParser(),
        ThinkParser(HermesParser(), inside=False),
        ThinkParser(HermesParser(), inside=True),
    ]


@given(pieces)
@example(["<think>", "a", "</think>", "\n", CALL])
def test_pieces_do_not_matter(text: list[str]) -> None:
    """Fed whole, in these pieces or by the character, the answer is the same."""
    whole = "".join(text)
    for ways in zip(parsers(), parsers(), parsers(), strict=True):
        answers = [
            read(parser, fed)[0]
            for parser, fed in zip(ways, ([whole], text, list(whole)), strict=True)
        ]
        assert answers[0] == answers[1] == answers[2]


@given(pieces)
def test_nothing_is_swallowed(text: list[str]) -> None:
    """But for white space, every character is content or part of a call that was read."""
    answer, _ = read(HermesParser(), ["".join(text)])
    given_chars, content, call = (
        re.sub(r"\s", "", part) for part in ("".join(text), answer.content, CALL)
    )
    assert len(content) + len(answer.calls) * len(call) == len(given_chars)
    remaining = iter(given_chars)
    assert all(char in remaining for char in content)


def test_text_streams_before_and_calls_come_whole() -> None:
    """Text is passed on at once, though a tag might begin; a call comes when its end is seen."""
    parser = HermesParser()
    assert parser.feed("Hello") == [TextDelta(text="Hello")]
    assert parser.feed(" wor") == [TextDelta(text=" wor")]
    assert parser.feed("ld <tool") == [TextDelta(text="ld")]
    assert parser.feed('_call>{"name": "look", "argum') == []
    (call,) = parser.feed('ents": {"at": [1, 2]}}</tool_call>\n')
    assert call == collect([call], "").calls[0]
    assert parser.finish() == []
    assert parser.error == ""


def test_parallel_calls_and_text_around_them() -> None:
    """Several blocks are several calls; white space around them is nobody's content."""
    answer, _ = read(HermesParser(), [f"First.\n{CALL}\n{CALL}\nLast. "])
    assert answer.content == "First.Last. "
    assert [json.loads(call.arguments) for call in answer.calls] == [{"at": "a"}] * 2
    assert answer.error == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "a"</tool_call>', "not JSON"),
        ("<tool_call>[1]</tool_call>", "not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "without a name"),
        ('<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "object of arguments"),
        ('<tool_call>{"name": "a", "arguments": {}}', "without an end"),
        ("</tool_call> oops", "never began"),
        ("<tool_call>" + "[" * 10_000 + "</tool_call>", "not JSON"),
    ],
)
def test_malformed_calls_are_flagged_text(text: str, error: str) -> None:
    """What does not parse is content to the last character, and says why."""
    answer, _ = read(HermesParser(), [text])
    assert answer.content == text
    assert answer.calls == ()
    assert error in answer.error


def test_half_surrogates_stay_escaped() -> None:
    """An escape that is no character can be passed on in arguments, but is no name."""
    answer, _ = read(
        HermesParser(), ['<tool_call>{"name": "a", "arguments": {"é": "\\ud83d"}}</tool_call>']
    )
    assert answer.calls[0].arguments.encode() == b'{"\\u00e9": "\\ud83d"}'
    answer, _ = read(
        HermesParser(), ['<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>']
    )
    assert "without a name" in answer.error


def test_reasoning_is_separated() -> None:
    """White space at the tags belongs to the tags; tags further on are text."""
    answer, _ = read(
        ThinkParser(HermesParser(), inside=False),
        ["\n<think>\n a b \n</think>\n\nSo: <think> is a tag"],
    )
    assert (answer.reasoning, answer.content) == ("a b", "So: <think> is a tag")


def test_reasoning_opened_by_the_template_needs_no_tag() -> None:
    """Where the prompt ends with the tag, the answer starts inside, and may end there."""
    answer, _ = read(ThinkParser(PlainParser(), inside=True), ["hm</think>yes"])
    assert (answer.reasoning, answer.content) == ("hm", "yes")
    answer, _ = read(ThinkParser(PlainParser(), inside=True), ["hm, I wonder "])
    assert (answer.reasoning, answer.content) == ("hm, I wonder", "")


def test_formats_are_found_by_name_and_by_template() -> None:
    """An unknown name lists the known ones; a template shows what it asks for."""
    assert get_format(detect_format("... <tool_call> ...")).name == "hermes"
    assert get_format(detect_format("...")).name == "plain"
    with pytest.raises(ConfigError, match="hermes"):
        get_format("morse")


def test_forced_call_parses_with_what_follows() -> None:
    """The opening and a model's continuation are one well-formed call."""
    opening = get_format("hermes").opening("look")
    answer, _ = read(HermesParser(), [opening, '{"at": 1}}\n</tool_call>'])
    assert (answer.calls[0].name, answer.calls[0].arguments) == ("look", '{"at": 1}')
    with pytest.raises(InvalidArgument):
        get_format("plain").opening(None)
