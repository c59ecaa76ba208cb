"""The wire formats as the model families' own templates and cards write them."""

from __future__ import annotations

import json

import pytest

from forge.core.errors import InvalidArgument
from forge.core.formats import TextDelta, get_format
from tests.support.core.format_samples import read, said

LOOK = ("look", {"at": "a"})
BAR, SPACE = "\uff5c", "\u2581"


def deepseek(text: str) -> str:
    """DeepSeek's tokens are spelt with characters that linters rightly take for mistakes."""
    for words in ("tool calls begin", "tool call begin", "tool sep", "tool call end"):
        text = text.replace(f"<|{words}|>", f"<{BAR}{words.replace(' ', SPACE)}{BAR}>")
    return text.replace("<|tool calls end|>", f"<{BAR}tool{SPACE}calls{SPACE}end{BAR}>")


WIRE = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=at>\na\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">a</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"at": "a"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "deepseek_v3": deepseek(
        "<|tool calls begin|><|tool call begin|>function<|tool sep|>look\n```json\n"
        '{"at": "a"}\n```<|tool call end|><|tool calls end|>'
    ),
    "deepseek_v31": deepseek(
        '<|tool calls begin|><|tool call begin|>look<|tool sep|>{"at": "a"}<|tool call end|>'
        "<|tool calls end|>"
    ),
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "a"}}]',
    "mistral_v11": '[TOOL_CALLS]look[ARGS]{"at": "a"}',
    "llama3_json": '{"name": "look", "parameters": {"at": "a"}}',
    "pythonic": '[look(at="a")]',
    "react": 'Action: look\nAction Input: {"at": "a"}',
}
"""One call in every format."""


@pytest.mark.parametrize("name", sorted(WIRE))
def test_published_spelling_of_a_call_is_parsed_and_written(name: str) -> None:
    """The published spelling is parsed, and `write` returns it."""
    output = get_format(name)
    answer, _ = read(output.parser(), [WIRE[name]])
    assert (answer.error, answer.content, said(answer.calls)) == ("", "", [LOOK])
    assert output.write(answer.calls) == WIRE[name]


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("hermes", WIRE["hermes"] * 2, 2),
        ("qwen3_coder", WIRE["qwen3_coder"].replace(">\na\n<", ">a<"), 1),
        ("glm", WIRE["glm"].replace("\n", ""), 1),
        ("minimax_m2", WIRE["minimax_m2"].replace("\n", ""), 1),
        ("kimi_k2", WIRE["kimi_k2"].replace("functions.", ""), 1),
        ("deepseek_v3", WIRE["deepseek_v3"] + "\n", 1),
        ("mistral", WIRE["mistral"].replace("][", "] ["), 1),
        ("mistral_v11", WIRE["mistral_v11"].replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]"), 1),
        ("mistral_v11", WIRE["mistral_v11"].replace("[ARGS]", ""), 1),
        ("mistral_v11", WIRE["mistral_v11"] * 3, 3),
        ("llama3_json", "<|python_tag|>" + WIRE["llama3_json"], 1),
        ("llama3_json", WIRE["llama3_json"].replace("parameters", "arguments"), 1),
        ("llama3_json", WIRE["llama3_json"] + "; " + WIRE["llama3_json"], 2),
        ("pythonic", f"<|python_start|>{WIRE['pythonic']}<|python_end|>", 1),
        ("pythonic", "[look(at='a'), look(at=\"a\",)]", 2),
        ("react", "Thought: hm\n" + WIRE["react"], 1),
    ],
)
def test_spelling_variants_of_calls_are_parsed(name: str, text: str, count: int) -> None:
    """White space, quotes, ids and tags may differ from the template's."""
    answer, _ = read(get_format(name).parser(), [text])
    assert (answer.error, said(answer.calls)) == ("", [LOOK] * count)


def test_white_space_around_calls_is_dropped() -> None:
    """Several blocks are several calls; other text between them is content."""
    block = WIRE["hermes"]
    answer, _ = read(get_format("hermes").parser(), [f"First.\n{block}\n{block}\nLast. "])
    assert answer.content == "First.Last. "
    assert said(answer.calls) == [LOOK] * 2


def test_call_is_returned_at_its_last_character() -> None:
    """Content streams, and a call is returned as soon as its end is parsed."""
    parser = get_format("hermes").parser()
    assert parser.feed("Hello wor") == [TextDelta(text="Hello wor")]
    assert parser.feed("ld <tool") == [TextDelta(text="ld")]
    assert parser.feed('_call>{"name": "look", "argum') == []
    (call,) = parser.feed('ents": {"at": [1, 2]}}</tool_call>\n')
    assert said([call]) == [("look", {"at": [1, 2]})]  # type: ignore[list-item]
    assert (parser.finish(), parser.error) == ([], "")


def test_call_ids_of_the_model_are_kept() -> None:
    """Kimi and Mistral read the ids of their calls again, so the ids must be their own."""
    kimi, _ = read(get_format("kimi_k2").parser(), [WIRE["kimi_k2"]])
    assert kimi.calls[0].call_id == "functions.look:0"
    text = WIRE["mistral_v11"].replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]")
    mistral, _ = read(get_format("mistral_v11").parser(), [text])
    assert mistral.calls[0].call_id == "abcdefghi"


MALFORMED = [
    ("hermes", '<tool_call>{"name": "a"</tool_call>', "not JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", "not a JSON object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "without a name"),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "object of arguments"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "too large"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}}', "without an end"),
    ("hermes", "</tool_call> oops", "never began"),
    ("hermes", "<tool_call>" + "[" * 10_000 + "</tool_call>", "not JSON"),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', "without a name"),
    ("qwen3_coder", "<function=look>\n</function>", "never began"),
    ("qwen3_coder", "<tool_call>look</tool_call>", "its elements"),
    ("qwen3_coder", "<tool_call><function=a>at=1</function></tool_call>", "else than arguments"),
    (
        "qwen3_coder",
        "<tool_call><function=a><parameter=x>1</parameter><parameter=x>2</parameter></function>"
        "</tool_call>",
        "twice",
    ),
    ("glm", '<tool_call>{"name":"look","arguments":{}}</tool_call>', "its elements"),
    ("glm", "<tool_call>look\n<arg_key>at</arg_key>\n</tool_call>", "else than arguments"),
    ("minimax_m2", '<invoke name="look">', "never began"),
    ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>", "its elements"),
    ("kimi_k2", WIRE["kimi_k2"].replace("<|tool_calls_section_begin|>", ""), "never began"),
    ("kimi_k2", WIRE["kimi_k2"].replace('"a"}', '"a"'), "not JSON"),
    ("kimi_k2", WIRE["kimi_k2"].replace('"a"}', '"a"} and'), "behind its arguments"),
    ("deepseek_v31", WIRE["deepseek_v3"], "not JSON"),
    ("deepseek_v3", WIRE["deepseek_v31"], "something else"),
    ("mistral", '[TOOL_CALLS]{"name": "look", "arguments": {}}', "not a JSON array"),
    ("mistral", WIRE["mistral"] + " Done.", "behind its JSON"),
    ("mistral_v11", "[TOOL_CALLS]look", "not a name and arguments"),
    ("llama3_json", '{"name": "look", "parameters": {"at"', "not JSON"),
    ("llama3_json", "<|python_tag|>print(1)", "not JSON"),
    ("llama3_json", "Well. <|python_tag|>", "nothing behind"),
    ("pythonic", "[look(at=a)]", "where a value is due"),
    ("pythonic", '[look(at="a")', "without an end"),
    ("pythonic", "[look(at=1, at=2)]", "twice"),
    ("pythonic", "[look(at=$)]", "no literal"),
    ("pythonic", "[look(at=" + "[" * 1000 + "]" * 1000 + ")]", "too deeply"),
    ("pythonic", "[look(at=" + "9" * 5000 + ")]", "too long"),
    ("react", "Action: look\nObservation: fine", "without an action input"),
    ("react", WIRE["react"] + "\nObservation: fine", "made up"),
    ("react", "Thought: x\nAction Input: {}", "never began"),
]


@pytest.mark.parametrize(("name", "text", "error"), MALFORMED)
def test_malformed_calls_are_returned_as_text_with_an_error(
    name: str, text: str, error: str
) -> None:
    """The whole text is content, and the error gives the reason."""
    answer, _ = read(get_format(name).parser(), [text])
    assert (answer.content, answer.calls) == (text, ())
    assert error in answer.error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "Ada", "born": 1815}'),
        ("llama3_json", "{x | x > 0} is a set"),
        ("llama3_json", "  "),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[a link](https://example.org)"),
        ("react", "Thought: I know.\nFinal Answer: 42"),
        ("plain", WIRE["hermes"]),
    ],
)
def test_content_that_only_resembles_a_call_is_no_error(name: str, text: str) -> None:
    """Requested JSON, a list or a final answer is content without an error."""
    answer, _ = read(get_format(name).parser(), [text])
    assert (answer.content, answer.error, answer.calls) == (text, "", ())


def test_half_surrogates_stay_escaped() -> None:
    """An escape without a character can be passed on in arguments."""
    answer, _ = read(
        get_format("hermes").parser(),
        ['<tool_call>{"name": "a", "arguments": {"é": "\\ud83d"}}</tool_call>'],
    )
    assert answer.calls[0].arguments.encode() == b'{"\\u00e9": "\\ud83d"}'


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a\\nb\\x41\\u00e9\\U0001f642"', "a\nbAé🙂"),
        ("'''two\nlines'''", "two\nlines"),
        ("r'\\d'", "\\d"),
        ('"\\d"', "\\d"),
        ('"a" "b"', "ab"),
        ("-1.5e3", -1500.0),
        ("(1, None, true)", [1, None, True]),
        ("{'a': {1: []}}", {"a": {"1": []}}),
    ],
)
def test_python_literals_are_parsed_as_python_does(literal: str, value: object) -> None:
    """Strings in any quotes, escapes, tuples, dictionaries, and JSON's constants."""
    answer, _ = read(get_format("pythonic").parser(), [f"[look(at={literal})]"])
    assert said(answer.calls) == [("look", {"at": value})]


def test_calls_cannot_be_forced_without_a_format() -> None:
    """A model without tools cannot be forced to call one."""
    with pytest.raises(InvalidArgument, match="knows no tools"):
        get_format("plain").opening(None)
    assert get_format("plain").write([]) == ""
    with pytest.raises(InvalidArgument, match="knows no tools"):
        get_format("plain").write(read(get_format("hermes").parser(), [WIRE["hermes"]])[0].calls)


def test_arguments_are_json_in_every_format() -> None:
    """Agents get a JSON object in the gateway's spelling."""
    for name, text in WIRE.items():
        answer, _ = read(get_format(name).parser(), [text])
        assert answer.calls[0].arguments == json.dumps(LOOK[1])
