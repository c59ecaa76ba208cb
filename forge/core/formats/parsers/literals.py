"""A list of calls in Python's notation, with literals as arguments: `[look(at="a", n=[1, 2])]`.

Has its own reader: a model's text can crash Python's parser, which also accepts more than literals.
Also reads JSON's `true`, `false` and `null`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from forge.core.formats.parsers.calls import MalformedCall

MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>[rRuU]?(?:'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"
        |'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"))
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<word>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    |(?P<mark>[\[\](){},=:])
    |(?P<end>\Z))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<char>.))",
    re.DOTALL,
)
_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CONSTANTS = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class Reader:
    """Reads one list of calls; raises `MalformedCall` for anything else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._kind = ""
        """Kind of the next token; "end" after the last."""
        self._token = ""
        self._advance()

    @staticmethod
    def complete(text: str) -> bool:
        """Whether `text` ends outside of a string, so that what follows may be a tag."""
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                return text[at:].lstrip()[:1] not in ("'", '"')
            if found.lastgroup == "end":
                return True
            at = found.end()
        return True

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of every call."""
        self._expect("[")
        calls = [self._call()]
        while self._accept(","):
            if self._token == "]":
                break
            calls.append(self._call())
        self._expect("]")
        if self._kind != "end":
            raise self._unexpected()
        return calls

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self._word()
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._accept(")"):
            key = self._word()
            self._expect("=")
            if key in arguments:
                raise MalformedCall(f"a call of {name[:60]} that gives {key[:60]} twice")
            arguments[key] = self._value()
            if self._token != ")":
                self._expect(",")
        return name, arguments

    def _value(self) -> Any:
        kind, token = self._kind, self._token
        if kind == "mark" and token in _CLOSING:
            return self._collection(token)
        self._advance()
        if kind == "string":
            value = _string(token)
            while self._kind == "string":
                value += _string(self._token)
                self._advance()
            return value
        if kind == "number":
            return _number(token)
        if kind == "word" and token in _CONSTANTS:
            return _CONSTANTS[token]
        raise MalformedCall(f"a tool call with {token[:40]!r} where a value is due")

    def _collection(self, opening: str) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise MalformedCall("a tool call whose arguments are nested too deeply")
        self._advance()
        values: list[Any] = []
        keys: list[str] = []
        while not self._accept(_CLOSING[opening]):
            value = self._value()
            if opening == "{":
                keys.append(value if isinstance(value, str) else json.dumps(value))
                self._expect(":")
                value = self._value()
            values.append(value)
            if self._token != _CLOSING[opening]:
                self._expect(",")
        self._depth -= 1
        return dict(zip(keys, values, strict=True)) if opening == "{" else values

    def _word(self) -> str:
        if self._kind != "word":
            raise self._unexpected()
        word = self._token
        self._advance()
        return word

    def _accept(self, mark: str) -> bool:
        if self._kind != "mark" or self._token != mark:
            return False
        self._advance()
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise self._unexpected()

    def _advance(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup is None:
            raise MalformedCall(
                f"a tool call with {self._text[self._at :].lstrip()[:20]!r} in it, no literal"
            )
        self._kind, self._token = found.lastgroup, found[found.lastgroup]
        self._at = found.end()

    def _unexpected(self) -> MalformedCall:
        if self._kind == "end":
            return MalformedCall("a list of tool calls without an end")
        return MalformedCall(f"a list of tool calls with {self._token[:40]!r} out of place")


def write_literal(value: Any) -> str:
    """A value of JSON as a Python literal."""
    match value:
        case bool() | None:
            return str(value)
        case list():
            return f"[{', '.join(map(write_literal, value))}]"
        case dict():
            pairs = (f"{write_literal(key)}: {write_literal(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case _:
            # JSON's strings and numbers are Python's.
            return json.dumps(value, ensure_ascii=False)


def _string(token: str) -> str:
    raw = token[0] in "rR"
    quoted = token[1:] if token[0] in "rRuU" else token
    width = 3 if quoted[:3] in ("'''", '"""') else 1
    inside = quoted[width:-width]
    return inside if raw else _ESCAPE.sub(_unescaped, inside)


def _unescaped(found: re.Match[str]) -> str:
    if digits := found["x"] or found["u"] or found["U"]:
        code = int(digits, 16)
        return chr(code) if code <= 0x10FFFF else found[0]
    # Python keeps the backslash before a character that needs none.
    return _CHARACTERS.get(found["char"], found["char"] if found["char"] in "\\'\"/" else found[0])


def _number(digits: str) -> int | float:
    try:
        value = int(digits)
    except ValueError:
        if len(digits) > 400:
            raise MalformedCall("a tool call with a number too long") from None
        value = 0
        real = float(digits)
        if real in (float("inf"), float("-inf")):
            raise MalformedCall(f"a tool call with a number too large: {digits}") from None
        return real
    return value
