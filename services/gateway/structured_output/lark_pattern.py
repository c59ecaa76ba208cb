"""Converts a Lark grammar without recursion to a regular expression.

An argument of a tool call is text in another syntax, for example a JSON string. There a regular
expression can be enforced, as the `pattern` of a schema, but no grammar. The expression matches the
texts that the rules derive; Lark's choice between terminals does not narrow them. Not supported:
recursive rules, `%ignore`, templates, and imports beyond `common`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from itertools import islice

from services.gateway.errors import InvalidField

MAX_DEFINITION_CHARS = 65_536
MAX_PATTERN_CHARS = 16_384

_COMMON: Mapping[str, str] = {
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Terminals of Lark's own module `common`."""
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|//[^\n]*)
      | (?P<end>(?:\r?\n)+(?![ \t]*(?:\||//|\r?\n)))
      | (?P<more>(?:\r?\n)+)
      | (?P<text>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
      | (?P<range>~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?)
      | (?P<alias>->[ ]*\w+)
      | (?P<import>%import[ ]+[\w.]+(?:[ ]*->[ ]*\w+|[ ]*\([^)\n]*\))?)
      | (?P<name>[?!]?[A-Za-z_]\w*)
      | (?P<priority>\.-?\d+)
      | (?P<mark>[:|()\[\]?*+])""",
    re.VERBOSE,
)
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")

_Tokens = deque[tuple[str, str]]


def pattern_of(definition: str, *, field: str) -> str:
    """Returns the regular expression of a grammar's rule `start`, without anchors.

    Raises `InvalidField` with the `field` for a grammar that is not supported.
    """
    if len(definition) > MAX_DEFINITION_CHARS:
        raise InvalidField(f"{field} is longer than {MAX_DEFINITION_CHARS} characters", param=field)
    try:
        return _Grammar(definition).pattern("start", ())
    except RecursionError:
        wrong = "it is nested too deeply"
    except _Unsupported as error:
        wrong = str(error)
    raise InvalidField(f"{field} cannot be enforced: {wrong}", param=field)


class _Unsupported(Exception):
    """A part of the grammar that has no regular expression."""


class _Grammar:
    """The rules of a grammar, by name."""

    def __init__(self, definition: str) -> None:
        self._rules: dict[str, _Tokens] = {}
        self._patterns: dict[str, str] = {}
        statement: _Tokens = deque()
        for token in [*_tokens(definition), ("end", "")]:
            if token[0] == "end":
                self._add(statement)
                statement = deque()
            else:
                statement.append(token)

    def pattern(self, name: str, above: tuple[str, ...]) -> str:
        """Returns the expression of a rule; `above` are the rules that contain it."""
        if name in self._patterns:
            return self._patterns[name]
        if name in above:
            raise _Unsupported(f"rule {name!r} contains itself")
        if name not in self._rules:
            raise _Unsupported(f"rule {name!r} is not defined")
        body = deque(self._rules[name])
        pattern = self._alternatives(body, (*above, name))
        if body:
            raise _Unsupported(f"{body[0][1]!r} in rule {name!r}")
        self._patterns[name] = pattern
        return pattern

    def _add(self, statement: _Tokens) -> None:
        if not statement:
            return
        kind, text = statement[0]
        if kind == "import":
            self._import(text)
            return
        name, rest = text.lstrip("?!"), deque(islice(statement, 1, None))
        if rest and rest[0][0] == "priority":
            rest.popleft()
        if kind != "name" or not rest or rest.popleft() != ("mark", ":"):
            raise _Unsupported(f"a statement that begins with {text[:40]!r}")
        self._rules[name] = rest

    def _import(self, text: str) -> None:
        path, _, alias = text.removeprefix("%import").partition("->")
        module, _, listed = path.partition("(")
        names = [part.strip() for part in listed.rstrip(") ").split(",") if part.strip()]
        if not names:
            module, _, name = module.strip().rpartition(".")
            names = [name]
        for name in names:
            if module.strip() != "common" or name not in _COMMON:
                raise _Unsupported(f"{text[:60]!r}")
            self._patterns[alias.strip() or name] = _COMMON[name]

    def _alternatives(self, tokens: _Tokens, above: tuple[str, ...]) -> str:
        """Returns the expression of `tokens` up to a closing bracket, and removes them."""
        choices = [self._sequence(tokens, above)]
        while tokens and tokens[0] == ("mark", "|"):
            tokens.popleft()
            choices.append(self._sequence(tokens, above))
        return choices[0] if len(choices) == 1 else _bounded(f"(?:{'|'.join(choices)})")

    def _sequence(self, tokens: _Tokens, above: tuple[str, ...]) -> str:
        pattern = ""
        while tokens and tokens[0][1] not in {"|", ")", "]"}:
            kind, text = tokens.popleft()
            if kind == "alias":
                continue
            part = self._atom(kind, text, tokens, above)
            while tokens and (tokens[0][0] == "range" or tokens[0][1] in {"?", "*", "+"}):
                part = f"(?:{part}){_times(tokens.popleft()[1])}"
            pattern = _bounded(pattern + part)
        return pattern

    def _atom(self, kind: str, text: str, tokens: _Tokens, above: tuple[str, ...]) -> str:
        match kind, text:
            case "text", _:
                plain = _plain(text.removesuffix("i"))
                escaped = _SPECIAL.sub(r"\\\1", plain)
                return f"(?i:{escaped})" if text.endswith("i") else escaped
            case "regex", _:
                body, _, flags = text[1:].rpartition("/")
                body = body.replace(r"\/", "/")
                flags = flags.replace("u", "").replace("l", "")
                return f"(?{flags}:{body})" if flags else f"(?:{body})"
            case "name", _:
                return f"(?:{self.pattern(text, above)})"
            case "mark", "(" | "[":
                inner = self._alternatives(tokens, above)
                if not tokens or tokens.popleft()[1] != {"(": ")", "[": "]"}[text]:
                    raise _Unsupported(f"{text!r} without its end")
                return f"(?:{inner}){'?' if text == '[' else ''}"
            case _:
                raise _Unsupported(f"{text[:40]!r}")


def _bounded(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _Unsupported(f"its expression is longer than {MAX_PATTERN_CHARS} characters")
    return pattern


def _tokens(definition: str) -> _Tokens:
    tokens: _Tokens = deque()
    at = 0
    while at < len(definition):
        found = _TOKEN.match(definition, at)
        if found is None:
            line = definition[at:].partition("\n")[0]
            raise _Unsupported(f"{line[:40]!r}")
        kind = found.lastgroup or ""
        if kind not in {"space", "more"}:
            tokens.append((kind, found[0]))
        at = found.end()
    return tokens


def _plain(quoted: str) -> str:
    """Returns the text of a Lark string."""
    escapes = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
    return re.sub(
        r"\\(.)", lambda found: escapes.get(found[1], found[1]), quoted[1:-1], flags=re.DOTALL
    )


def _times(text: str) -> str:
    if not text.startswith("~"):
        return text
    least, _, most = text[1:].replace(" ", "").partition("..")
    return f"{{{least},{most}}}" if most else f"{{{least}}}"
