"""Run one inference instance: `python -m services.inference --help`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from forge.rl.device import device_of
from forge.runtime.process.startup import run
from services.inference.config import InferenceConfig


def load_app() -> type:
    """Import the service."""
    from services.inference.app import InferenceApp

    return InferenceApp


def host_checks(config: InferenceConfig) -> Iterator[Callable[[], object]]:
    """The model and the name of the engine."""
    from forge.runtime.process.host_check import require_model, require_writable
    from services.inference.engines.registry import engine_entry

    yield lambda: require_model("model_path", config.model_path)
    yield lambda: engine_entry(config.engine)
    if config.role != "router":
        yield lambda: require_writable("kv.store_dir", config.kv.store_dir)
    if config.role != "router" and config.device != "cpu":
        yield partial(device_of, config.device)
    if config.role != "router" and (Path(config.model_path) / "config.json").is_file():
        yield lambda: _check_engine(config)


def _check_engine(config: InferenceConfig) -> None:
    """Ask the engine whether it can serve the model."""
    from services.inference.engines.registry import check_model
    from services.inference.worker.engine_dtype import engine_dtype

    check_model(
        config.engine,
        config.model_path,
        context_tokens=config.context_tokens,
        device=config.device,
        dtype=engine_dtype(config.dtype, device=config.device),
    )


if __name__ == "__main__":
    run("inference", InferenceConfig, load_app, host_checks)
