"""Run one pool instance: `python -m services.pool --help`."""

from forge.runtime.process.allocator import keep_freed_memory
from forge.runtime.process.startup import run
from services.pool.config import PoolConfig

KEPT_BYTES = 64 << 20
"""Freed memory that stays with the process: commits and answers of megabytes are frequent."""


def load_app() -> type:
    """Imports the service late: `--help` needs only its settings."""
    from services.pool.app import PoolApp

    return PoolApp


if __name__ == "__main__":
    keep_freed_memory(KEPT_BYTES)
    run("pool", PoolConfig, load_app)
