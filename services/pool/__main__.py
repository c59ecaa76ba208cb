"""Run one pool instance: `python -m services.pool --help`."""

from collections.abc import Callable, Iterator

from forge.runtime.process.allocator import keep_freed_memory
from forge.runtime.process.startup import run
from services.pool.config import PoolConfig

KEPT_BYTES = 64 << 20
"""Freed memory that stays with the process: commits and answers of megabytes are frequent."""


def load_app() -> type:
    """Imports the service late: `--help` needs only its settings."""
    from services.pool.app import PoolApp

    return PoolApp


def host_checks(config: PoolConfig) -> Iterator[Callable[[], object]]:
    """The data directory."""
    from forge.runtime.process.host_check import require_writable

    yield lambda: require_writable("data_dir", config.data_dir)


if __name__ == "__main__":
    keep_freed_memory(KEPT_BYTES)
    run("pool", PoolConfig, load_app, host_checks)
