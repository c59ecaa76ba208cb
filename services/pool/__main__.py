"""Run one pool instance: `python -m services.pool --help`."""

from forge.runtime.service import run
from services.pool.app import PoolApp
from services.pool.config import PoolConfig

if __name__ == "__main__":
    run("pool", PoolConfig, PoolApp)
