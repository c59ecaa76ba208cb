"""Reasoning: its opening tag, its closing tag, and the text behind it."""

from __future__ import annotations

import pytest

from forge.core.errors import ConfigError
from forge.core.formats import (
    PlainParser,
    ReasoningFormat,
    detect_reasoning,
    get_format,
    get_reasoning,
)
from tests.support.core.format_samples import read

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def reasoning(name: str) -> ReasoningFormat:
    found = get_reasoning(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "inside", "text", "thought", "content"),
    [
        ("think", False, "\n<think>\n a b \n</think>\n\na <think> tag", "a b", "a <think> tag"),
        ("think", False, "no thought", "", "no thought"),
        ("think", False, "</think>\n\nthought is off", "", "thought is off"),
        ("think", True, "hm</think>yes", "hm", "yes"),
        ("think", True, "<think>hm</think>yes", "hm", "yes"),
        ("think", True, "</think>yes", "", "yes"),
        ("think", True, "hm, I wonder ", "hm, I wonder", ""),
        ("think_close", True, "hm</think>yes", "hm", "yes"),
        ("mistral_think", False, "[THINK]hm[/THINK]yes", "hm", "yes"),
        ("<reason> </reason>", False, "<reason>hm</reason>yes", "hm", "yes"),
    ],
)  # fmt: skip
def test_reasoning_is_separated_from_content(
    name: str, inside: bool, text: str, thought: str, content: str
) -> None:
    """White space at the tags belongs to them; only the first block is reasoning; chunks do not
    matter."""
    for pieces in ([text], list(text)):
        parser = reasoning(name).parser(PlainParser(), inside=inside)
        answer, _ = read(parser, pieces)
        assert (answer.reasoning, answer.content, answer.error) == (thought, content, "")


def test_calls_are_parsed_after_reasoning() -> None:
    """The text after the reasoning is parsed for calls, and their errors are errors of the
    answer."""
    parser = reasoning("think").parser(get_format("hermes").parser(), inside=True)
    answer, _ = read(parser, [f"hm\n</think>\n\n{CALL}"])
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("hm", "", 1)
    parser = reasoning("think").parser(get_format("hermes").parser(), inside=True)
    answer, _ = read(parser, ["hm</think></tool_call>"])
    assert "never began" in answer.error


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("think", "<|im_start|>assistant\n", False),
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("think_close", "<|im_start|>assistant\n", True),
        ("think_close", "<|im_start|>assistant\n</think>", False),
        ("mistral_think", "[/INST][THINK]", True),
    ],
)
def test_prompt_end_decides_whether_an_answer_starts_in_reasoning(
    name: str, prompt: str, inside: bool
) -> None:
    """Inside if the prompt opens the reasoning, outside if it closes it."""
    assert reasoning(name).opened_by(prompt) == inside


def test_reasoning_format_is_detected_by_template_or_name() -> None:
    """The closing tag is enough: some templates never write the opening tag."""
    assert detect_reasoning("... content.split('</think>') ...") == "think"
    assert detect_reasoning("'[THINK]' + text + '[/THINK]'") == "mistral_think"
    assert detect_reasoning("plain") == "none"
    assert get_reasoning("none") is None
    with pytest.raises(ConfigError, match="think_close"):
        get_reasoning("telepathy")
