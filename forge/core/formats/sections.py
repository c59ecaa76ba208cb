"""Sections of calls with JSON arguments, between tokens: DeepSeek and Kimi.

The shared shape: one section at the end of the answer with all calls; each call has a text with its
name, then its JSON, then a closing text.

    deepseek_v3    <|tool calls begin|><|tool call begin|>function<|tool sep|>look
                   ```json
                   {"at": "a"}
                   ```<|tool call end|><|tool calls end|>
    deepseek_v31   <|tool calls begin|><|tool call begin|>look<|tool sep|>{"at": "a"}
                   <|tool call end|><|tool calls end|>
    kimi_k2        <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0
                   <|tool_call_argument_begin|>{"at": "a"}<|tool_call_end|>
                   <|tool_calls_section_end|>

The last two have no line breaks between tokens. DeepSeek's tokens have other characters for bars
and spaces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forge.core.formats.base import CallDelta, NamedFirst, Parser, Tools
from forge.core.formats.parsers.blocks import Block, BlockParser
from forge.core.formats.parsers.calls import MalformedCall, call_of, outside_strings, read_json_at


class SectionFormat(NamedFirst):
    """Base of the formats with sections."""

    name: str
    begin: str
    end: str
    call_begin: str
    separator: str
    call_end: str
    signs: tuple[str, ...]
    takes_tools = True
    before: re.Pattern[str]
    """Text before the arguments of a call: groups `name` and optionally `id`."""
    behind: re.Pattern[str]

    @property
    def marks(self) -> frozenset[str]:
        """Return all tags."""
        return frozenset((self.begin, self.end, self.call_begin, self.separator, self.call_end))

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        return BlockParser(
            Block(
                open=self.begin,
                close=self.end,
                read=self._read,
                complete=outside_strings,
                inner=(self.call_begin, self.separator, self.call_end),
            )
        )

    def _read(self, body: str) -> Sequence[CallDelta]:
        calls: list[CallDelta] = []
        at = 0
        while before := self.before.match(body, at):
            arguments, at = read_json_at(body, before.end())
            behind = self.behind.match(body, at)
            if behind is None:
                raise MalformedCall("a tool call with something behind its arguments")
            at = behind.end()
            call_id = before.groupdict().get("id") or ""
            calls.append(call_of(before["name"], arguments, call_id=call_id))
        if not calls or at < len(body):
            raise MalformedCall("a section of tool calls with something else in it")
        return calls


def _token(words: str) -> str:
    """A token as DeepSeek spells it: full-width bars, and U+2581 for spaces."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


class DeepSeekV31Format(SectionFormat):
    """DeepSeek V3.1."""

    name = "deepseek_v31"
    begin, end = _token("tool calls begin"), _token("tool calls end")
    call_begin, call_end = _token("tool call begin"), _token("tool call end")
    separator = _token("tool sep")
    around_name = begin + call_begin, separator
    signs: tuple[str, ...] = (separator,)
    before = re.compile(rf"\s*{call_begin}(?P<name>[^<\n]+){separator}")
    behind = re.compile(rf"\s*{call_end}\s*")

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        inside = "".join(
            f"{self.call_begin}{call.name}{self.separator}{call.arguments}{self.call_end}"
            for call in calls
        )
        return self.begin + inside + self.end


class DeepSeekV3Format(DeepSeekV31Format):
    """DeepSeek V3 and R1."""

    name = "deepseek_v3"
    around_name = "function".join(DeepSeekV31Format.around_name), "\n```json\n"
    signs: tuple[str, ...] = (DeepSeekV31Format.separator, "```json")
    before = re.compile(
        rf"\s*{DeepSeekV31Format.call_begin}function{DeepSeekV31Format.separator}"
        r"(?P<name>[^\n]+)\n```json\n"
    )
    behind = re.compile(rf"\s*```\s*{DeepSeekV31Format.call_end}\s*")

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        inside = "\n".join(
            f"{self.call_begin}function{self.separator}{call.name}\n```json\n{call.arguments}\n```"
            + self.call_end
            for call in calls
        )
        return self.begin + inside + self.end


class KimiFormat(SectionFormat):
    """Kimi K2. Its calls have ids, which name the function: the model sees them again."""

    name = "kimi_k2"
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_begin, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    around_name = f"{begin}{call_begin}functions.", f":0{separator}"
    signs: tuple[str, ...] = (call_begin,)
    before = re.compile(
        rf"\s*{re.escape(call_begin)}\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^<\s]+?)(?::\d+)?)\s*"
        rf"{re.escape(separator)}"
    )
    behind = re.compile(rf"\s*{re.escape(call_end)}\s*")

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        inside = "".join(
            f"{self.call_begin}{call.call_id or f'functions.{call.name}:{at}'}{self.separator}"
            f"{call.arguments}{self.call_end}"
            for at, call in enumerate(calls)
        )
        return self.begin + inside + self.end
