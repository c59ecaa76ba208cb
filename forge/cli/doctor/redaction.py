"""Removes secrets and texts of agents from the parts of a support bundle.

A secret is found by its value, if a file or a variable of this host has it, and by its form. Texts
of agents are removed by kind of line: log lines of processes that handle texts keep only a few keys
and their numbers; lines of others lose quotations, which repeat the value of a field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forge.core.errors import ForgeError

REMOVED = "[removed]"
MIN_SECRET = 6
"""Characters of the shortest value that is removed wherever it appears."""
_SECRET_NAME = re.compile(
    r"(^|[_.\-])(key|api_?key|token|secret|password|passwd|credentials?)s?$", re.I
)
_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY$", re.I)
_FORMS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    # A token of Forge, of JWT form, and an API key.
    re.compile(r"\bv1\.[\w-]{8,}\.[\w-]{8,}"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(r"\b(?:sk|hf|ghp|xox[abp])[-_][\w-]{8,}"),
    re.compile(r"(?i)(?<=bearer )\S{6,}"),
    # user:password@ of an address, or a token in its place.
    re.compile(r"(?<=://)[^/\s@\"']+(?=@)"),
    re.compile(r"(?i)\b[\w-]*(?:key|token)\s*:\s*[\w.-]{16,}"),
    re.compile(r"(?i)(?<=[?&])(?:key|token|access_token|api_key|password)=[^&\s\"']+"),
    re.compile(r"(?i)(?<=--)(?:\w+-)*(?:key|token|secret|password)[= ](?![/.])[^\s\"',]{6,}"),
    re.compile(r"(?i)\b\w*(?:key|token|secret|password)=(?![/.])[^\s\"',]{6,}"),
)
_SETTING = re.compile(r'^(?P<name>[\w.]+) = (?P<value>".+"|\[.+\])$', re.M)
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`")
_IDENTIFIER = re.compile(r"[\w.:/@+=,%\-\[\]<>]{1,200}", re.ASCII)
_FRAME = re.compile(r'^\s*File "[^"\n]+", line \d+(, in [\w<>.]+)?$')
_ERROR_TYPE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning))\b")
_KEPT_KEYS = frozenset(
    {"timestamp", "level", "logger", "service", "instance", "event", "method", "code", "kind"}
    | {"address", "pool_shard", "part", "signal", "etcd", "cluster", "metrics", "path"}
    | {"trajectory_id", "subject"}
)
"""Keys whose identifiers stay in the lines of every process."""
_LONGEST_TEXT = 300
_LONGEST_KIND = 80
"""Characters of a reason before its colon."""


class Redactor:
    """Knows the secrets of this host."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()

    def add(self, *values: str) -> None:
        """Remove these values too; very short ones would remove parts of words."""
        self._secrets |= {one.strip() for one in values if len(one.strip()) >= MIN_SECRET}

    def add_file(self, path: str | Path) -> None:
        """Remove the lines of a file with secrets; a file that cannot be read shows nothing."""
        try:
            self.add(*Path(path).read_text(errors="replace").splitlines())
        except OSError:
            return

    def add_variables(self, environ: Mapping[str, str]) -> None:
        """Remove the values of variables with a secret's name, and of files that they name."""
        for name, value in environ.items():
            if name.upper().endswith("_FILE"):
                if _SECRET_VARIABLE.search(name.upper().removesuffix("_FILE")):
                    self.add_file(value)
            elif _SECRET_VARIABLE.search(name):
                self.add(value)

    def text(self, text: str) -> str:
        """Returns the text without secrets."""
        # The longest first: one may contain another.
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, REMOVED)
        for form in _FORMS:
            text = form.sub(REMOVED, text)
        return text

    def settings(self, toml: str) -> str:
        """Returns printed settings without secrets. Paths of files stay."""

        def shown(found: re.Match[str]) -> str:
            if _SECRET_NAME.search(found["name"]):
                return f'{found["name"]} = "{REMOVED}"'
            return found[0]

        return self.text(_SETTING.sub(shown, toml))

    def status(self, row: Mapping[str, Any]) -> Any:
        """Returns the JSON of `forge status`. The reasons of failures are removed wherever it
        repeats them, and from all later parts."""
        scheduler = row.get("scheduler") or {}
        texts = [one.get("reason", "") for one in scheduler.get("tombstones", ())]
        texts.append((scheduler.get("stall") or {}).get("text", ""))
        self.add(*(text.partition(": ")[2] for text in texts))
        return self.answers(row)

    def answers(self, row: Any) -> Any:
        """Returns the JSON of an answer without secrets, quotations, and reasons of failures."""
        match row:
            case dict():
                return {key: self._answer(key, value) for key, value in row.items()}
            case list():
                return [self.answers(one) for one in row]
            case str():
                return _QUOTED.sub(REMOVED, self.text(row))
        return row

    def _answer(self, key: str, value: Any) -> Any:
        if key == "reason" and isinstance(value, str):
            return self.answers(_kind_of(value))
        return self.answers(value)

    def log(self, lines: Iterable[str], *, handles_texts: bool) -> str:
        """Returns log lines without secrets and texts; other lines than JSON are counted."""
        shown, dropped = [], 0
        for line in lines:
            kept = self._line(line, handles_texts=handles_texts)
            if kept is None:
                dropped += 1
                continue
            if dropped:
                shown.append(f"[{dropped} lines removed]")
            shown.append(kept)
            dropped = 0
        if dropped:
            shown.append(f"[{dropped} lines removed]")
        return "".join(f"{line}\n" for line in shown)

    def _line(self, line: str, *, handles_texts: bool) -> str | None:
        try:
            row = json.loads(line) if line.lstrip().startswith("{") else None
        except ValueError:
            row = None
        if not isinstance(row, dict):
            return _traceback_line(line)
        kept = {
            key: self._logged(key, value, handles_texts=handles_texts) for key, value in row.items()
        }
        return json.dumps(kept)

    def _logged(self, key: str, value: Any, *, handles_texts: bool) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if key == "exception" and isinstance(value, str):
            frames = [_traceback_line(line) for line in value.splitlines()]
            return "\n".join(one for one in frames if one is not None)
        if not isinstance(value, str):
            if handles_texts:
                return REMOVED
            return self.answers(value)
        if key in _KEPT_KEYS and _IDENTIFIER.fullmatch(value):
            return self.text(value)
        if handles_texts:
            return _removed(value)
        value = _kind_of(value) if key == "reason" else value
        return _QUOTED.sub(REMOVED, self.text(value))[:_LONGEST_TEXT]


def _kind_of(reason: str) -> str:
    """Returns a reason without the text behind its colon: the error of an agent, a tool or a reward
    function, perhaps with the last output of a program."""
    head, colon, tail = reason.partition(": ")
    if len(head) > _LONGEST_KIND:
        return _removed(reason)
    return f"{head}{colon}{_removed(tail)}" if colon else reason


def _removed(text: str) -> str:
    return f"[{len(text)} characters removed]"


def _traceback_line(line: str) -> str | None:
    """Returns a line of a traceback without source and message; None for another line."""
    if _FRAME.match(line):
        return line.rstrip()
    found = _ERROR_TYPE.match(line)
    return found["type"] if found else None


def describe(error: BaseException) -> str:
    """Returns why a part is missing."""
    return str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
