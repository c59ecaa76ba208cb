"""What `forge support-bundle` removes: secrets by value and form, texts by their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.cli.doctor.redaction import REMOVED, Redactor


def logged(row: dict[str, Any] | str, *, handles_texts: bool) -> str:
    line = row if isinstance(row, str) else json.dumps(row)
    return Redactor().log([line], handles_texts=handles_texts).rstrip("\n")


@pytest.mark.parametrize(
    "secret",
    [
        "sk-live-abcdefgh1234",
        "v1.eyJzdWIiOiJ4In0.c2lnbmF0dXJl",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.abc",
        "root:pass-word",
        "OPENAI_KEY=abcdefgh",
        "x-api-key: abcdefghijklmnop",
        "-----BEGIN EC PRIVATE KEY-----\nabc\n-----END EC PRIVATE KEY-----",
    ],
)
def test_secrets_are_removed_by_their_form(secret: str) -> None:
    """In any text, although no file of this host has them."""
    text = f"before https://{secret}@host:2379 after" if "root:" in secret else f"x {secret} y"
    assert secret not in Redactor().text(text)


def test_secrets_are_removed_by_their_value(tmp_path: Path) -> None:
    """Of variables with a secret's name, and of the files that variables name."""
    file = tmp_path / "token"
    file.write_text("kept-in-a-file\n")
    redactor = Redactor()
    redactor.add_variables(
        {"HOSTER_API_KEY": "plain-value-1", "FORGE_TOKEN_FILE": str(file), "HOME": "/home/me-too"}
    )
    text = redactor.text("plain-value-1 kept-in-a-file /home/me-too")
    assert text == f"{REMOVED} {REMOVED} /home/me-too"


def test_settings_keep_paths_and_lose_values() -> None:
    """A setting with a secret's name, and an option of a command in one."""
    toml = (
        'key_file = "/etc/forge/key"\napi_key = "abc"\ncommand = "agent --api-key=abcdefgh {x}"\n'
    )
    shown = Redactor().settings(toml)
    assert 'key_file = "/etc/forge/key"' in shown
    assert "abc" not in shown.replace("/etc/forge", "")


def test_lines_of_processes_with_texts_keep_identifiers_of_known_keys() -> None:
    """And numbers; a value that may be a part of an answer is removed, even of one word."""
    row = {"event": "rpc", "code": "OK", "s": 0.5, "service": "gateway", "answer": "MARKER"}
    shown = json.loads(logged(row, handles_texts=True))
    assert shown == {**row, "answer": "[6 characters removed]"}
    assert "MARKER" not in logged({"event": "it said MARKER", "x": ["MARKER"]}, handles_texts=True)


def test_lines_of_other_processes_lose_quotations() -> None:
    """Errors quote the value of a field."""
    row = {"event": "rpc", "error": "tag = 'MARKER is here' is too long"}
    shown = json.loads(logged(row, handles_texts=False))
    assert shown["error"] == f"tag = {REMOVED} is too long"


def test_tracebacks_keep_their_frames() -> None:
    """Without source lines and messages; other lines than JSON are counted."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/forge/x.py", line 3, in run',
        "    raise ValueError('MARKER')",
        "ValueError: MARKER",
        "MARKER",
    ]
    shown = Redactor().log(lines, handles_texts=False).splitlines()
    assert shown == [
        *("[1 lines removed]", lines[1], "[1 lines removed]", "ValueError", "[1 lines removed]")
    ]
    nested = json.loads(logged({"exception": "\n".join(lines)}, handles_texts=True))
    assert nested["exception"].splitlines() == [lines[1], "ValueError"]


def test_reasons_of_failures_keep_their_kind() -> None:
    """Behind the colon is the error of an agent, perhaps its last output. Status repeats it in the
    text of a stall and in the problems; the scheduler's log has it for each failed rollout."""
    failure = "RuntimeError: agent ended with 1: it's 'a' MARKER"
    stall = f"3 tasks were given up since the last step, the last one with: {failure}. Check it."
    row = {
        "problems": [f"No group was trained for 31 min: {stall}", "pool p at h: it is gone"],
        "scheduler": {
            "stall": {"cause": "given_up", "text": stall},
            "tombstones": [{"reason": failure, "groups": 2}, {"reason": "dropped by an operator"}],
        },
    }
    redactor = Redactor()
    shown = redactor.status(row)
    assert "MARKER" not in json.dumps(shown)
    assert shown["problems"][1] == "pool p at h: it is gone"
    assert shown["scheduler"]["stall"]["cause"] == "given_up"
    first, second = shown["scheduler"]["tombstones"]
    assert first["reason"].startswith("RuntimeError: [")
    assert second["reason"] == "dropped by an operator"
    line = json.dumps({"event": "rollout_failed", "reason": failure})
    assert "MARKER" not in Redactor().log([line], handles_texts=False)
