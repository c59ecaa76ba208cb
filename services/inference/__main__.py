"""Run one inference instance: `python -m services.inference --help`."""

from collections.abc import Callable, Iterator

from forge.runtime.process.startup import run
from services.inference.config import InferenceConfig


def load_app() -> type:
    """Import the service."""
    from services.inference.app import InferenceApp

    return InferenceApp


def host_checks(config: InferenceConfig) -> Iterator[Callable[[], object]]:
    """The model and the name of the engine."""
    from forge.runtime.process.host_check import require_model
    from services.inference.engines.registry import engine_entry

    yield lambda: require_model("model_path", config.model_path)
    yield lambda: engine_entry(config.engine)


if __name__ == "__main__":
    run("inference", InferenceConfig, load_app, host_checks)
