"""Run one gateway instance: `python -m services.gateway --help`."""

from forge.runtime.service import run
from services.gateway.app import GatewayApp
from services.gateway.config import GatewayConfig

if __name__ == "__main__":
    run("gateway", GatewayConfig, GatewayApp)
