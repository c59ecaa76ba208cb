"""Formats by name, by template, and from other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from forge.core import entry_points
from forge.core.errors import ConfigError
from forge.core.formats import (
    SAMPLE_CALL,
    CallDelta,
    collect,
    detect_format,
    detect_reasoning,
    get_format,
    get_reasoning,
)
from forge.core.formats.hermes import HermesFormat
from forge.core.formats.think import ReasoningFormat
from tests.support.core.format_samples import CALLING


class ShoutingFormat(HermesFormat):
    """Another package's format."""

    name = "shouting"
    signs: tuple[str, ...] = ("TOOL!",)


SHOUTED = ReasoningFormat(name="shouted", open="HM!", close="AHA!")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds one of each."""
    entries = {
        "forge.formats": [EntryPoint("shouting", f"{__name__}:ShoutingFormat", "forge.formats")],
        "forge.reasoning": [EntryPoint("shouted", f"{__name__}:SHOUTED", "forge.reasoning")],
    }
    monkeypatch.setattr(entry_points, "entry_points", lambda *, group: entries[group])


@pytest.mark.parametrize("name", CALLING)
def test_format_is_detected_from_a_rendered_call(name: str) -> None:
    """The call that a template renders is parsed by its own format and by no other."""
    call = CallDelta(name=SAMPLE_CALL.name, arguments=SAMPLE_CALL.arguments)
    assert detect_format("", get_format(name).write([call])) == name


@pytest.mark.parametrize("name", sorted({*CALLING} - {"pythonic", "hermes_compact"}))
def test_format_is_detected_from_template_text(name: str) -> None:
    """Where a template renders no call, text that all templates of a format contain decides."""
    output = get_format(name)
    assert output.signs
    assert detect_format(" ".join(output.signs) + " {tools}") == name


@pytest.mark.parametrize("gap", ["", "\n"])
def test_compact_calls_are_read_as_hermes_reads_them(gap: str) -> None:
    """`hermes_compact` differs in what it writes, never in what it reads."""
    text = f'Well.<tool_call>{gap}{{"name": "look", "arguments": {{"at": "a"}}}}{gap}</tool_call>'
    whole, broken = (text, text[:-20])
    for said in (whole, broken, text + "<tool_call>"):
        answers = []
        for name in ("hermes", "hermes_compact"):
            parser = get_format(name).parser()
            answers.append(collect([*parser.feed(said), *parser.finish()], parser.error))
        assert answers[0] == answers[1]
    assert get_format("hermes").marks == get_format("hermes_compact").marks


def test_spelling_of_a_call_decides_between_formats_that_read_it() -> None:
    """A required call begins as the model writes calls; an unknown spelling has the first one."""
    calls = {
        name: get_format(name).write([CallDelta(name="look", arguments='{"at": "a"}')])
        for name in ("hermes", "hermes_compact")
    }
    assert calls["hermes_compact"] == (
        '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
    )
    assert [detect_format("", written) for written in calls.values()] == list(calls)
    assert detect_format("", calls["hermes"].replace("\n", "\n\n")) == "hermes"


def test_template_without_tools_has_the_plain_format() -> None:
    """A template that knows no tools has no tool calls."""
    assert detect_format("{{ messages }}", "something else") == "plain"


def test_unknown_format_name_lists_the_known_formats() -> None:
    """In one line."""
    with pytest.raises(ConfigError, match=r"'morse'.*hermes.*qwen3_coder"):
        get_format("morse")


@pytest.mark.usefixtures("added")
def test_packages_add_formats() -> None:
    """An entry point adds a format by name and to detection, before the built-in formats."""
    assert get_format("shouting").name == "shouting"
    assert detect_format("TOOL! <tool_call>") == "shouting"
    assert get_reasoning("shouted") is SHOUTED
    assert detect_reasoning("... AHA! ...") == "shouted"


def test_entry_point_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, without a traceback."""
    broken = EntryPoint("broken", "no_such_module:Format", "forge.formats")
    monkeypatch.setattr(entry_points, "entry_points", lambda *, group: [broken])
    with pytest.raises(ConfigError, match=r"forge\.formats 'broken'.*no_such_module"):
        get_format("broken")
