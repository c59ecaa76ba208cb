"""Run one gateway instance: `python -m services.gateway --help`."""

from collections.abc import Callable, Iterator
from functools import partial

from forge.runtime.process.startup import run
from services.gateway.config import GatewayConfig


def load_app() -> type:
    """Returns `GatewayApp`; imported late, so that `--help` is fast."""
    from services.gateway.app import GatewayApp

    return GatewayApp


def host_checks(config: GatewayConfig) -> Iterator[Callable[[], object]]:
    """The models, the names of formats, and the keys of external APIs."""
    from forge.core.formats.registry import get_format, get_reasoning
    from forge.runtime.process.host_check import require_model
    from services.gateway.external.key_file import read_key

    yield lambda: require_model("model_path", config.model_path)
    if config.model.tool_format != "auto":
        yield lambda: get_format(config.model.tool_format)
    if config.model.reasoning_format != "auto":
        yield lambda: get_reasoning(config.model.reasoning_format)
    for name, model in config.models.items():
        key = f"models.{name}"
        yield partial(require_model, f"{key}.model_path", model.model_path)
        yield partial(read_key, key, model.key_file)


if __name__ == "__main__":
    run("gateway", GatewayConfig, load_app, host_checks)
