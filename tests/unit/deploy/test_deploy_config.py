"""The configuration files shipped for hosts are accepted by the services they are for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from forge.runtime.settings import ServiceConfig, load

FILES = sorted((Path(__file__).parents[3] / "deploy" / "config").glob("*.toml"))


def config_type(service: str) -> type[ServiceConfig]:
    module = "forge.agents" if service == "agents" else f"services.{service}"
    types = [
        value
        for value in vars(importlib.import_module(f"{module}.config")).values()
        if isinstance(value, type)
        and issubclass(value, ServiceConfig)
        and value is not ServiceConfig
    ]
    assert len(types) == 1, types
    return types[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_config_is_accepted(file: Path) -> None:
    """A key that a service no longer knows breaks this test before it breaks a host."""
    config = load(
        config_type(file.stem), service=file.stem, argv=["--config", str(file)], environ={}
    )
    key = "" if file.stem == "agents" else "/etc/forge/key"
    assert config.key_file == key
    assert getattr(config, "token_file", "") == ("" if key else "/etc/forge/agents-token")


def test_every_service_has_a_config_file() -> None:
    """Seven kinds of process, seven files."""
    stems = {file.stem for file in FILES}
    assert stems == {"agents", "console", "gateway", "inference", "pool", "scheduler", "trainer"}
