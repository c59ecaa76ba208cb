"""The checks of `forge doctor` on chat templates of real families."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.model.doctor import findings
from tests.support.gateway.chat_templates import FAMILIES, save_model


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "renumbered"])
def test_templates_of_families_are_stable(family: str, tmp_path: Path) -> None:
    """Those that drop earlier reasoning, or know no tools, too."""
    save_model(family, tmp_path)
    (finding,) = findings(str(tmp_path))
    assert finding["ok"], finding


def test_template_that_changes_earlier_messages_is_named(tmp_path: Path) -> None:
    """Each message begins with its number, counted from the last one."""
    save_model("renumbered", tmp_path)
    (finding,) = findings(str(tmp_path))
    assert not finding["ok"]
    assert "rewrites the history before a tool's result" in finding["text"]
    assert "chat_template.jinja" in finding["remedy"]


def test_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """The remedy names the files."""
    (finding,) = findings(str(tmp_path))
    assert "no tokenizer.json" in finding["text"] and "tokenizer.json" in finding["remedy"]
