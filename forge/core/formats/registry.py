"""Formats by name, and the detection of a chat template's format.

Another package adds a format with an entry point: in the group `forge.formats` it names an
`OutputFormat` class, in `forge.reasoning` a `ReasoningFormat`.

A template's format is the one that reads a call back from the template's own text, and of several
built-in ones the one that writes the call as the template does. For templates without a call, the
search is for the signs that every template of a format has. Formats of packages come first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from forge.core.conversation.messages import ToolCall
from forge.core.entry_points import installed, load_entry_point
from forge.core.errors import ConfigError
from forge.core.formats.base import CallDelta, OutputFormat, Tools, collect
from forge.core.formats.harmony import HarmonyFormat
from forge.core.formats.hermes import HermesCompactFormat, HermesFormat
from forge.core.formats.llama import LlamaJsonFormat, PythonicFormat
from forge.core.formats.mistral import MistralFormat, MistralV11Format
from forge.core.formats.plain import PlainFormat
from forge.core.formats.react import ReActFormat
from forge.core.formats.sections import DeepSeekV3Format, DeepSeekV31Format, KimiFormat
from forge.core.formats.think import MISTRAL_THINK, THINK, THINK_CLOSE, ReasoningFormat
from forge.core.formats.xml import GlmFormat, MiniMaxFormat, Qwen3CoderFormat

FORMATS_GROUP = "forge.formats"
REASONING_GROUP = "forge.reasoning"
NO_REASONING = "none"

# The order of the search for signs: special formats first.
BUILT_IN: dict[str, Callable[[], OutputFormat]] = {
    "minimax_m2": MiniMaxFormat,
    "kimi_k2": KimiFormat,
    "deepseek_v3": DeepSeekV3Format,
    "deepseek_v31": DeepSeekV31Format,
    "mistral_v11": MistralV11Format,
    "mistral": MistralFormat,
    "qwen3_coder": Qwen3CoderFormat,
    "glm": GlmFormat,
    "hermes": HermesFormat,
    "hermes_compact": HermesCompactFormat,
    "pythonic": PythonicFormat,
    "llama3_json": LlamaJsonFormat,
    "react": ReActFormat,
    "plain": PlainFormat,
}
CHANNELS: dict[str, Callable[[], OutputFormat]] = {"harmony": HarmonyFormat}
"""Formats whose parsers read complete answers, reasoning too."""
BUILT_IN_REASONING = {
    reasoning.name: reasoning for reasoning in (THINK, THINK_CLOSE, MISTRAL_THINK)
}

SAMPLE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    },
)
SAMPLE_CALL = ToolCall(name="look", arguments='{"at": "a"}', call_id="call000a1")
"""A call that templates render; all templates accept its id."""


def get_format(name: str) -> OutputFormat:
    """Return the format `name`. Raises `ConfigError` with the known names."""
    built_in = BUILT_IN | CHANNELS
    if name in built_in:
        return built_in[name]()
    added = installed(FORMATS_GROUP)
    if name in added:
        made: OutputFormat = load_entry_point(added[name])()
        return made
    raise ConfigError(f"tool format {name!r} is unknown; there are {sorted({*built_in, *added})}")


def detect_format(template: str, written: str = "") -> str:
    """Return the name of a chat template's format.

    `written` is `SAMPLE_CALL` as the template writes it; "" if it writes none.
    """
    readers = [output for output in _all_formats() if written and _reads(output, written)]
    if readers:
        # A required call begins with the text of its format: a model knows no other spelling.
        writers = [output for output in readers if _writes(output, written)]
        built_in = readers[0].name in BUILT_IN
        return (writers or readers if built_in else readers)[0].name
    for output in _all_formats():
        if output.signs and all(sign in template for sign in output.signs):
            return output.name
    return PlainFormat.name


def get_reasoning(name: str) -> ReasoningFormat | None:
    """Return the reasoning format `name`, or one of two tags with a space between.

    None for "none". Raises `ConfigError` with the known names.
    """
    if name == NO_REASONING:
        return None
    if name in BUILT_IN_REASONING:
        return BUILT_IN_REASONING[name]
    match name.split():
        case [opening, closing]:
            return ReasoningFormat(name=name, open=opening, close=closing)
    added = installed(REASONING_GROUP)
    if name in added:
        made: ReasoningFormat = load_entry_point(added[name])
        return made
    known = sorted({NO_REASONING, *BUILT_IN_REASONING, *added})
    raise ConfigError(
        f"reasoning format {name!r} is unknown; there are {known}, or two tags with a space between"
    )


def detect_reasoning(template: str) -> str:
    """Return the name of the reasoning format whose closing tag a chat template has."""
    if all(sign in template for sign in HarmonyFormat.signs):
        return NO_REASONING
    added = (load_entry_point(entry) for entry in installed(REASONING_GROUP).values())
    for reasoning in (*added, THINK, MISTRAL_THINK):
        if reasoning.close in template:
            return str(reasoning.name)
    return NO_REASONING


def _all_formats() -> Iterator[OutputFormat]:
    for entry in installed(FORMATS_GROUP).values():
        yield load_entry_point(entry)()
    for make in (*CHANNELS.values(), *BUILT_IN.values()):
        yield make()


def _reads(output: OutputFormat, written: str) -> bool:
    parser = output.parser(SAMPLE_TOOLS)
    answer = collect([*parser.feed(written), *parser.finish()], parser.error)
    return (
        not answer.error
        and not answer.content.strip()
        and [(call.name, json.loads(call.arguments)) for call in answer.calls]
        == [(SAMPLE_CALL.name, json.loads(SAMPLE_CALL.arguments))]
    )


def _writes(output: OutputFormat, written: str) -> bool:
    call = CallDelta(
        name=SAMPLE_CALL.name, arguments=SAMPLE_CALL.arguments, call_id=SAMPLE_CALL.call_id
    )
    return output.write([call]).strip() == written.strip()
