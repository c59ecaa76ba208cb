"""Calls as elements: a name, then one element per argument: Qwen 3 Coder, GLM, MiniMax M2.

The shared shape. Arguments are texts; their types come from the tool's schema (see `calls`).
Nothing is escaped, so an argument may contain tags: it ends at a closing tag before the next
element or the end of the block.

    qwen3_coder   <tool_call>
                  <function=look>
                  <parameter=at>
                  a
                  </parameter>
                  </function>
                  </tool_call>
    glm           <tool_call>look
                  <arg_key>at</arg_key>
                  <arg_value>a</arg_value>
                  </tool_call>
    minimax_m2    <minimax:tool_call>
                  <invoke name="look">
                  <parameter name="at">a</parameter>
                  </invoke>
                  </minimax:tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from forge.core.formats.base import CallDelta, NamedFirst, Parser, Tools
from forge.core.formats.parsers.blocks import Block, BlockParser
from forge.core.formats.parsers.calls import MalformedCall, call_of, typed_arguments, untyped


class XmlFormat(NamedFirst):
    """Base of the formats with elements."""

    name: str
    begin: str
    end: str
    signs: tuple[str, ...]
    takes_tools = True
    inner: tuple[str, ...] = ()
    """Openings of elements that occur only in a block."""
    argument_begin: str
    argument_end: str
    call: re.Pattern[str]
    """One call with the white space around it: groups `name` and `arguments`."""
    argument: re.Pattern[str]
    """One argument with the white space around it: groups `key` and `value`."""

    @property
    def marks(self) -> frozenset[str]:
        """Return the tags of a block."""
        return frozenset((self.begin, self.end))

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        return BlockParser(
            Block(
                open=self.begin,
                close=self.end,
                read=partial(self._read, tools),
                complete=self._complete,
                inner=self.inner,
            )
        )

    def _complete(self, body: str) -> bool:
        return body.rfind(self.argument_begin) <= body.rfind(self.argument_end)

    def _read(self, tools: Tools, body: str) -> Sequence[CallDelta]:
        calls: list[CallDelta] = []
        at = 0
        while found := self.call.match(body, at):
            name = found["name"].strip()
            pairs = self._pairs(found["arguments"])
            calls.append(call_of(name, typed_arguments(pairs, tool=name, tools=tools)))
            at = found.end()
        if not calls or body[at:].strip():
            raise MalformedCall("a tool call that is not made of its elements")
        return calls

    def _pairs(self, text: str) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        at = 0
        while found := self.argument.match(text, at):
            pairs.append((found["key"], found["value"]))
            at = found.end()
        if text[at:].strip():
            raise MalformedCall("a tool call with something else than arguments in it")
        return pairs


class Qwen3CoderFormat(XmlFormat):
    """Qwen 3 Coder, and models trained after it. A line break on each side frames a value."""

    name = "qwen3_coder"
    begin, end = "<tool_call>", "</tool_call>"
    around_name = f"{begin}\n<function=", ">\n"
    signs: tuple[str, ...] = (begin, "<function=")
    inner = ("<function=",)
    argument_begin, argument_end = "<parameter=", "</parameter>"
    call = re.compile(
        r"\s*<function=(?P<name>[^>\n]+)>(?P<arguments>.*?)</function>(?=\s*(?:<function=|\Z))\s*",
        re.DOTALL,
    )
    argument = re.compile(
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        r"(?=\s*(?:<parameter=|\Z))\s*",
        re.DOTALL,
    )

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return "\n".join(
            f"{self.begin}\n<function={call.name}>\n"
            + "".join(
                f"<parameter={key}>\n{untyped(value)}\n</parameter>\n"
                for key, value in _arguments(call)
            )
            + f"</function>\n{self.end}"
            for call in calls
        )


class GlmFormat(XmlFormat):
    """GLM 4.5 and later."""

    name = "glm"
    begin, end = "<tool_call>", "</tool_call>"
    signs: tuple[str, ...] = (begin, "<arg_key>")
    around_name = begin, "\n"
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    argument_begin, argument_end = "<arg_value>", "</arg_value>"
    call = re.compile(r"\s*(?P<name>[^<>{}\"\s]+)\s*(?P<arguments>(?:<arg_key>.*)?)\Z", re.DOTALL)
    argument = re.compile(
        r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|\Z))\s*",
        re.DOTALL,
    )

    @property
    def marks(self) -> frozenset[str]:
        """Return the tags of blocks and arguments."""
        return frozenset((self.begin, self.end, *self.inner))

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return "\n".join(
            f"{self.begin}{call.name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{untyped(value)}</arg_value>\n"
                for key, value in _arguments(call)
            )
            + self.end
            for call in calls
        )


class MiniMaxFormat(XmlFormat):
    """MiniMax M2: all calls of an answer in one block."""

    name = "minimax_m2"
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    around_name = f'{begin}\n<invoke name="', '">\n'
    signs: tuple[str, ...] = (begin,)
    inner = ("<invoke name=",)
    argument_begin, argument_end = "<parameter name=", "</parameter>"
    call = re.compile(
        r"\s*<invoke name=\"(?P<name>[^\"\n]+)\">(?P<arguments>.*?)</invoke>"
        r"(?=\s*(?:<invoke name=|\Z))\s*",
        re.DOTALL,
    )
    argument = re.compile(
        r"\s*<parameter name=\"(?P<key>[^\"\n]+)\">(?P<value>.*?)</parameter>"
        r"(?=\s*(?:<parameter name=|\Z))\s*",
        re.DOTALL,
    )

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        invocations = "".join(
            f'<invoke name="{call.name}">\n'
            + "".join(
                f'<parameter name="{key}">{untyped(value)}</parameter>\n'
                for key, value in _arguments(call)
            )
            + "</invoke>\n"
            for call in calls
        )
        return f"{self.begin}\n{invocations}{self.end}"


def _arguments(call: CallDelta) -> list[tuple[str, Any]]:
    return list(json.loads(call.arguments).items())
