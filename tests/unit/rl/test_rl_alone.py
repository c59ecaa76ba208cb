"""`forge.rl` serves any trainer: it needs torch and transformers, and nothing of the services."""

from __future__ import annotations

import subprocess
import sys

SERVICES_OWN = ("aiohttp", "etcd3aio", "google", "grpc", "lmdb", "msgspec", "structlog", "uvloop")

IMPORT_ALL = f"""
import importlib, pkgutil, sys

for name in {SERVICES_OWN}:
    sys.modules[name] = None  # an import of it fails
import forge.rl

for module in pkgutil.walk_packages(forge.rl.__path__, "forge.rl."):
    importlib.import_module(module.name)
print("forge.rl.learner.learner" in sys.modules)
"""


def test_rl_package_imports_without_the_services_packages() -> None:
    """All its modules import where none of those packages is."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False
    )
    assert run.stdout == "True\n", run.stderr
