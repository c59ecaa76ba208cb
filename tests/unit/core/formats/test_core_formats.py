"""What holds for every format: pieces do not matter, nothing is swallowed, calls come back."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.formats import Parser, ThinkParser, get_format
from tests.support.core.format_samples import CALLING, cut_up, read, said, some_calls, some_mess

seeds = given(seed=st.integers(0, 2**32 - 1))
quick = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("name", CALLING)
@seeds
@quick
def test_parser_result_does_not_depend_on_chunks(name: str, seed: int) -> None:
    """In one piece, in any pieces or by the character: the same deltas, calls and error."""
    output, random = get_format(name), Random(seed)
    text = some_mess(random, output)

    def parsers() -> list[Parser]:
        return [
            output.parser(),
            ThinkParser(output.parser(), inside=False),
            ThinkParser(output.parser(), inside=True),
        ]

    pieces = cut_up(random, text)
    for whole, in_pieces, characters in zip(parsers(), parsers(), parsers(), strict=True):
        expected = read(whole, [text])
        assert read(in_pieces, pieces) == expected
        assert read(characters, list(text)) == expected


@pytest.mark.parametrize("name", CALLING)
@seeds
@quick
def test_parser_loses_no_text(name: str, seed: int) -> None:
    """Without a call the content is the whole text; with calls it is the text around them."""
    output = get_format(name)
    text = some_mess(Random(seed), output)
    answer, _ = read(output.parser(), [text])
    if not answer.calls:
        assert answer.content == text
    remaining = iter(re.sub(r"\s", "", text))
    assert all(char in remaining for char in re.sub(r"\s", "", answer.content))


@pytest.mark.parametrize("name", CALLING)
@seeds
@quick
def test_written_calls_are_read_back(name: str, seed: int) -> None:
    """Names, order and argument values survive, also if they contain tags of the format."""
    output = get_format(name)
    calls, tools = some_calls(Random(seed), output)
    answer, _ = read(output.parser(tools), [output.write(calls)])
    assert (answer.error, answer.content) == ("", "")
    assert said(answer.calls) == said(calls)


@pytest.mark.parametrize("name", CALLING)
@seeds
@quick
def test_truncated_calls_are_returned_as_text_with_an_error(name: str, seed: int) -> None:
    """The complete calls before them are returned as calls."""
    output, random = get_format(name), Random(seed)
    calls, tools = some_calls(random, output)
    text = output.write(calls)
    opening = output.opening(calls[0].name).rstrip()
    assert text.startswith(opening)
    shorter = text[: random.randrange(len(opening), len(text.rstrip()))]
    answer, _ = read(output.parser(tools), [shorter])
    assert said(answer.calls) == said(calls)[: len(answer.calls)]
    if not answer.calls:
        assert answer.content == shorter
        assert answer.error


@pytest.mark.parametrize("name", CALLING)
@seeds
@quick
def test_forced_call_is_parsed_with_its_opening(name: str, seed: int) -> None:
    """The opening and the sampled rest are one well-formed call."""
    output = get_format(name)
    calls, tools = some_calls(Random(seed), output)
    text = output.write(calls)
    for opening in (output.opening(calls[0].name), output.opening(None)):
        if text.startswith(opening):
            answer, _ = read(output.parser(tools), [opening, text[len(opening) :]])
            assert said(answer.calls) == said(calls)


@pytest.mark.parametrize("name", CALLING)
def test_content_streams_before_calls(name: str) -> None:
    """Text is streamed at once, in every format."""
    parser = get_format(name).parser()
    _, deltas = read(parser, [])
    assert deltas == []
    parser = get_format(name).parser()
    assert [delta.text for delta in parser.feed("Hello")] == ["Hello"]  # type: ignore[union-attr]
    assert [delta.text for delta in parser.feed(" wor")] == [" wor"]  # type: ignore[union-attr]
