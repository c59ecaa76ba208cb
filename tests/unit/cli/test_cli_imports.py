"""The modules that a command loads before it knows its arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from forge.cli.main import app
try:
    app(sys.argv[1:])
finally:
    print("LOADED", *{name.partition(".")[0] for name in sys.modules})
"""
HEAVY = {
    *("torch", "transformers", "numpy", "matplotlib", "aiohttp", "asyncio", "uvloop", "ssl"),
    *("grpc", "google", "etcd3aio", "structlog", "prometheus_client", "msgspec", "psutil"),
}


@pytest.mark.parametrize("words", ["", "run", "queue", "pool", "token", "model", "queue submit"])
def test_help_imports_no_slow_module(words: str) -> None:
    """Help needs the arguments alone: no gRPC, protobuf, etcd client, torch or asyncio."""
    argv = [sys.executable, "-c", PROGRAM, *words.split(), "--help"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    loaded = ended.stdout.rpartition("LOADED")[2].split()
    assert "typer" in loaded
    assert HEAVY & set(loaded) == set()
