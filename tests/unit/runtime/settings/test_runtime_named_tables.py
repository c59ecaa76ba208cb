"""Settings that are tables by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from forge.core.errors import ConfigError
from forge.runtime.settings import ServiceConfig, load, settings_of, to_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """One shelf."""

    kind: Literal["wire", "stone"]
    """Its material."""
    width_cm: Annotated[int, Meta(ge=1)] = 40
    """Its width."""
    labels: tuple[str, ...] = ()
    """Its labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RackConfig(ServiceConfig):
    """Holds."""

    shelves: Mapping[str, Shelf] = field(default_factory=dict)
    """Its shelves."""


SHELVES = {
    "top": Shelf(kind="wire"),
    "gpt-4.1": Shelf(kind="stone", width_cm=3, labels=("a", "b")),
}


def rack(*argv: str) -> RackConfig:
    return load(RackConfig, service="rack", argv=argv, environ={})


def test_tables_are_read_from_a_file_and_as_json(tmp_path: Path) -> None:
    """A name may have hyphens and dots; the printed settings are read back."""
    file = tmp_path / "rack.toml"
    file.write_text(
        '[shelves.top]\nkind = "wire"\n'
        '[shelves."gpt-4.1"]\nkind = "stone"\nwidth_cm = 3\nlabels = ["a", "b"]\n'
    )
    config = rack("--config", str(file))
    assert config.shelves == SHELVES
    file.write_text(to_toml(config))
    assert rack("--config", str(file)).shelves == SHELVES
    assert rack("--shelves", '{"top": {"kind": "wire"}}').shelves == {"top": Shelf(kind="wire")}
    assert rack().shelves == {}
    assert "each with kind, width_cm, labels" in to_toml(RackConfig())
    assert settings_of(config)["shelves"].value == SHELVES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"top": {"kind": "wood"}}', "shelves.top.kind = 'wood' is not allowed: one of wire, st"),
        ('{"top": {}}', "shelves.top.kind is missing: one of wire, stone"),
        (
            '{"top": {"kind": "wire", "kid": 1}}',
            "no setting shelves.top.kid = 1; did you mean shelves.top.kind (one of wire, stone)?",
        ),
        (
            '{"top": {"kind": "wire", "width_cm": 0}}',
            "shelves.top.width_cm = 0 is not allowed: a whole number of at least 1",
        ),
        ('{"top": 1}', "is not allowed: tables [shelves.NAME]"),
        ("[1]", "is not allowed: tables [shelves.NAME]"),
        ("{", "shelves = '{' is not allowed: tables [shelves.NAME]: Input data was trunc"),
        ('{"a":' * 5000, "is not allowed: tables [shelves.NAME]: "),
    ],
)
def test_wrong_field_of_a_table_is_named(text: str, message: str) -> None:
    """With its table, its value and what is allowed, on one line."""
    with pytest.raises(ConfigError) as caught:
        rack("--shelves", text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--shelves: ")
    assert "\n" not in str(caught.value)
