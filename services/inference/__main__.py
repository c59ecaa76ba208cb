"""Run one inference instance: `python -m services.inference --help`."""

from forge.runtime.process.startup import run
from services.inference.config import InferenceConfig


def load_app() -> type:
    """Import the service."""
    from services.inference.app import InferenceApp

    return InferenceApp


if __name__ == "__main__":
    run("inference", InferenceConfig, load_app)
