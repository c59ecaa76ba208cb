"""Harmony: channels become reasoning, content and calls, in any pieces."""

from __future__ import annotations

from random import Random

import pytest

from forge.core.formats import SAMPLE_TOOLS, CallDelta, detect_format, get_format
from tests.support.core.format_samples import cut_up, read

FORMAT = get_format("harmony")
ANALYSIS = "<|channel|>analysis<|message|>I must <look>.<|end|>"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "<|end|>"}'
HEADED = '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": "a"}'
NEXT = "<|start|>assistant"

ANSWERS = [
    (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>Yes.", "Yes.", "I must <look>.", [], False),
    (f"{ANALYSIS}{NEXT}{CALL}", "", "I must <look>.", ['{"at": "<|end|>"}'], False),
    (f"{CALL}<|end|>{HEADED}", "", "", ['{"at": "<|end|>"}', '{"at": "a"}'], False),
    (
        f"<|channel|>commentary<|message|>First.<|end|>{NEXT}{CALL}",
        "First.",
        "",
        ['{"at": "<|end|>"}'],
        False,
    ),
    ("Just text, to be sure.", "Just text, to be sure.", "", [], False),
    (f"{ANALYSIS}{NEXT}", "", "I must <look>.", [], True),
    (
        "<|channel|>commentary to=functions.look<|message|>{oops",
        "<|channel|>commentary to=functions.look<|message|>{oops",
        "",
        [],
        True,
    ),
    ("<|channel|>fin", "<|channel|>fin", "", [], True),
    (f"<|channel|>final<|message|>a{'<|start|>user'}b", "a<|start|>userb", "", [], False),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls", "wrong"), ANSWERS)
def test_channels_are_split_in_any_pieces(
    text: str, content: str, reasoning: str, calls: list[str], wrong: bool
) -> None:
    """Whole, by the character, and cut anywhere."""
    random = Random(text)
    for pieces in ([text], list(text), cut_up(random, text), cut_up(random, text)):
        parser = FORMAT.parser(SAMPLE_TOOLS)
        answer, _ = read(parser, pieces)
        if content:
            assert answer.content == content
        assert answer.reasoning == reasoning
        assert [call.arguments for call in answer.calls] == calls
        assert bool(answer.error) == wrong


def test_a_header_without_an_end_is_bounded() -> None:
    """Its text becomes content, in any pieces, and the rest streams."""
    text = f"<|channel|>{'x' * 1000}"
    for pieces in ([text], list(text)):
        parser = FORMAT.parser(SAMPLE_TOOLS)
        answer, _ = read(parser, pieces)
        assert (answer.content, bool(answer.error)) == (text, True)


def test_written_calls_are_read_back() -> None:
    """Several too."""
    calls = [CallDelta(name="look", arguments='{"at": 1}'), CallDelta(name="go", arguments="{}")]
    answer, _ = read(FORMAT.parser(SAMPLE_TOOLS), [FORMAT.write(calls)])
    assert answer.calls == tuple(calls)


def test_the_format_is_detected() -> None:
    """By the call that a template writes, recipient first."""
    written = ' to=functions.look<|channel|>commentary json<|message|>{"at": "a"}'
    assert detect_format("", written) == "harmony"
    assert detect_format("<|start|>assistant<|channel|>final<|message|>") == "harmony"
