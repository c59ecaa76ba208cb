"""What a service's process imports before it has read its settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forge.cli.presets import PROCESSES

SLOW = {"torch", "transformers", "grpc", "etcd3aio", "lmdb", "aiohttp", "numpy"}
"""Packages that take long to import."""


@pytest.mark.parametrize("module", sorted({*PROCESSES.values()}))
def test_settings_are_read_before_slow_imports(module: str) -> None:
    """`--print-config` of a service imports none of its slow packages."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "--print-config"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "lease_ttl_s" in ended.stdout
    assert "forge.runtime.config" in imported and not imported & SLOW
