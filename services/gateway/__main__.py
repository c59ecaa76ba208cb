"""Run one gateway instance: `python -m services.gateway --help`."""

from collections.abc import Callable, Iterator

from forge.runtime.process.startup import run
from services.gateway.config import GatewayConfig


def load_app() -> type:
    """Returns `GatewayApp`; imported late, so that `--help` is fast."""
    from services.gateway.app import GatewayApp

    return GatewayApp


def host_checks(config: GatewayConfig) -> Iterator[Callable[[], object]]:
    """The model and the names of formats."""
    from forge.core.formats.registry import get_format, get_reasoning
    from forge.runtime.process.host_check import require_model

    yield lambda: require_model("model_path", config.model_path)
    if config.model.tool_format != "auto":
        yield lambda: get_format(config.model.tool_format)
    if config.model.reasoning_format != "auto":
        yield lambda: get_reasoning(config.model.reasoning_format)


if __name__ == "__main__":
    run("gateway", GatewayConfig, load_app, host_checks)
