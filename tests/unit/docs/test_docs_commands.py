"""Commands, files and units of the pages, as an operator copies them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.main import app
from tests.support.deploy.inventories import TWO_HOSTS, rendered

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy/README.md"]
OF_CLUSTERS = [
    ROOT / "docs/deploy.md",
    *(page for page in PAGES if page.parent.name == "runbooks"),
]
_BLOCK = re.compile(r"^ *```sh[^\n]*\n(.*?)^ *```$", re.M | re.S)
_END = re.compile(r"\s(?:\|\||&&|[|;&>])(?:\s|$)|;|\n")
_FORGE = re.compile(r"(?:\S*bin/)?forge|forge\.cli\.main")
_PATH = re.compile(r"/etc/forge/[A-Za-z0-9@._/-]*[A-Za-z0-9]")
WRITTEN_ON_HOSTS = {
    # By `forge deploy install` and `apply`.
    *("/etc/forge/deploy", "/etc/forge/deploy.new", "/etc/forge/deploy.changes"),
    # By an operator, for as long as a restore takes.
    *("/etc/forge/trainer@1.env", "/etc/forge/pool-replica@s0.env"),
}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command `forge` in the blocks of a page, without the program."""
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in _END.split(block.replace("\\\n", " ")):
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue
            for number, word in enumerate(words):
                if _FORGE.fullmatch(word) and words[0] not in ("cd", "mkdir"):
                    yield words[number + 1 :]
                    break


def fault(program: Any, words: list[str]) -> str:
    """What the program does not know of a command."""
    command = program
    for word in words:
        commands_of = getattr(command, "commands", None)
        if commands_of is None or word.startswith("-"):
            break
        if word not in commands_of:
            return f"no command {word}"
        command = commands_of[word]
    if command.context_settings.get("ignore_unknown_options"):
        return ""
    words = words[: words.index("--")] if "--" in words else words
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    asked = {word.partition("=")[0] for word in words if word.startswith("--")}
    return ", ".join(sorted(asked - known - {"--help"}))


def test_every_command_of_the_pages_exists() -> None:
    """With each of its options."""
    found = [(page, words) for page in PAGES for words in commands(page)]
    assert len(found) > 50
    program = typer.main.get_command(app)
    wrong = [
        f"{page.relative_to(ROOT)}: forge {' '.join(words)}: {reason}"
        for page, words in found
        if (reason := fault(program, words))
    ]
    assert wrong == []


def test_files_and_units_of_the_pages_are_those_of_a_rendered_cluster(tmp_path: Path) -> None:
    """An operator of a cluster from one file finds every file that a run-book reads."""
    rendered(TWO_HOSTS, tmp_path)
    manifests = rendered_hosts(tmp_path).values()
    paths = {one.path for manifest in manifests for one in manifest.files}
    paths |= {str(parent) for path in paths for parent in Path(path).parents}
    text = "\n".join(page.read_text(encoding="utf-8") for page in OF_CLUSTERS)
    found = set(_PATH.findall(text))
    assert len(found) > 10
    assert sorted(found - paths - WRITTEN_ON_HOSTS) == []
