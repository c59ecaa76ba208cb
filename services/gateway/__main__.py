"""Run one gateway instance: `python -m services.gateway --help`."""

from forge.runtime.process.startup import run
from services.gateway.config import GatewayConfig


def load_app() -> type:
    """Returns `GatewayApp`; imported late, so that `--help` is fast."""
    from services.gateway.app import GatewayApp

    return GatewayApp


if __name__ == "__main__":
    run("gateway", GatewayConfig, load_app)
