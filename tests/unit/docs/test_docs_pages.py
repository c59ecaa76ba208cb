"""Pages of the site that are made from source."""

from __future__ import annotations

import re

from docs.hooks import api, commands, protos, settings
from forge.agents.config import RunnerConfig
from forge.runtime.settings import settings_of
from forge.v1 import pool_pb2, scheduler_pb2
from services.scheduler.config import SchedulerConfig


def test_every_setting_has_its_default_bounds_and_meaning() -> None:
    """A setting is one row; an inherited default that a service changes is shown there again."""
    text = settings.page().text
    for config in (SchedulerConfig(), RunnerConfig()):
        for key, setting in settings_of(config).items():
            assert f"| `{key}` | `" in text
            assert setting.text, f"{key} has no meaning"
    row = "| `port` | `0` | a whole number from 0 to 65535 | Port of gRPC; 0 takes a free one. |"
    assert text.count(row) == 1
    trainer = text.partition("## Trainer")[2]
    assert "| `drain_s` | `600.0` | a number from 0 to 3600 |" in trainer


def test_every_rpc_is_documented_with_its_comment() -> None:
    """The pages of the protos have each RPC, message and field."""
    texts = {page.path: page.text for page in protos.pages()}
    for module in (pool_pb2, scheduler_pb2):
        name = module.DESCRIPTOR.name.rpartition("/")[2].removesuffix(".proto")
        text = texts[f"reference/protos/{name}.md"]
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                comment = text.partition(f"### {method.name}\n")[2].split("```")[2]
                assert len(comment.split()) > 3, f"{method.full_name} has no comment"
        for message in module.DESCRIPTOR.message_types_by_name.values():
            section = text.partition(f"### {message.name}\n")[2]
            for field in message.fields:
                assert f"| `{field.name}` | {field.number} |" in section


def test_every_command_is_documented_with_its_options() -> None:
    """Commands of groups too; an option has its default and meaning."""
    text = commands.page().text
    for command in (
        "forge run",
        "forge trajectories ls",
        "forge queue submit",
        "forge model export",
    ):
        assert f"## {command}\n" in text
    assert "| `--seed` | `0` | Seed of weights, tasks and their order. |" in text


def test_page_of_commands_has_code_in_place_of_the_terminals_markup() -> None:
    """`--help` shows commands in bold, and examples dim, by tags that Markdown does not know."""
    text = commands.page().text
    assert not re.search(r"\[/?(bold|dim)\]", text)
    assert "the findings of `forge doctor`" in text
    assert "the file forge-&lt;service>:" in text, "a browser hides an unknown tag"
    assert "| \\[https://]host:port, separated by commas. |" in text


def test_every_module_of_the_library_has_a_section() -> None:
    """Links to a file of the library lead to its section in the page of its package."""
    texts = {page.path: page.text for page in api.pages()}
    for file, place in api.places():
        path, _, section = place.partition("#")
        module = file.removesuffix(".py").replace("/", ".")
        assert f"## {section}\n\n::: {module}\n" in texts[path]
