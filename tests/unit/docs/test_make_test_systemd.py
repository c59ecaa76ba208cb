"""`make test-systemd` installs packages again only if others would be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.systemd.packages import digest_of_packages

ROOT = Path(__file__).parents[3]
STOCK = "systemd,python3"
COMMANDS = 'apt-get install -y python3-venv   # of Debian\npip install ".[all]"  # or one extra\n'
PROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def digest(
    *,
    stock: str = STOCK,
    commands: str = COMMANDS,
    project: str = PROJECT,
    constraints: str = CONSTRAINTS,
) -> str:
    return digest_of_packages(
        stock=stock, commands=commands, project=project, constraints=constraints
    )


def test_settings_of_tools_and_comments_choose_no_package() -> None:
    """Import contracts, rules of ruff, the version, comments: the packages of before serve."""
    contract = '\n[[tool.importlinter.contracts]]\nname = "Rooms of a new package"\n'
    tools = PROJECT.replace("line-length = 100", "line-length = 99") + contract
    version = PROJECT.replace('\nversion = "', '\nversion = "9')
    reworded = COMMANDS.replace("# of Debian", "# from Debian's mirror")
    assert PROJECT not in (tools, version) and reworded != COMMANDS
    for same in (
        digest(project=tools),
        digest(project=version),
        digest(commands=reworded),
        digest(constraints="# One more comment.\n\n" + CONSTRAINTS),
    ):
        assert same == digest()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"grpcio>=1.80"', '"grpcio>=1.81"'),
        ('pool = ["isal>=1.7"', 'pool = ["isal>=1.8"'),
        ('requires = ["setuptools>=77"]', 'requires = ["setuptools>=78"]'),
        ('requires-python = ">=3.11"', 'requires-python = ">=3.12"'),
    ],
)
def test_dependencies_of_the_project_choose_packages(before: str, after: str) -> None:
    """A requirement of the project, of an extra or of the build."""
    assert before in PROJECT
    assert digest(project=PROJECT.replace(before, after)) != digest()


def test_commands_and_constraints_choose_packages() -> None:
    """Another version, another Debian package, another extra."""
    assert digest(stock=f"{STOCK},rsync") != digest()
    assert digest(commands=COMMANDS.replace("all", "gateway")) != digest()
    assert digest(constraints=CONSTRAINTS.replace("torch==", "torch==9")) != digest()
