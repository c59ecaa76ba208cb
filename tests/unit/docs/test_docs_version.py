"""The pages that install Forge name the version of pyproject.toml."""

from __future__ import annotations

import re
import tomllib

import pytest

from docs.hooks.page import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("page", ["docs/deploy.md", "deploy/README.md"])
def test_first_release_of_a_page_is_the_version_of_the_repository(page: str) -> None:
    """`forge deploy` starts /opt/forge/VERSION, so the directory must have this name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"python3 -m venv /opt/forge/([0-9]\S*)", text) == [VERSION]
    for named in re.findall(r"/opt/forge/([0-9][\w.]*)/bin", text):
        assert named == VERSION or named in text.partition("## Upgrade")[2]
