"""Run the trainer: `python -m services.trainer --help`."""

from forge.runtime.process.startup import run
from services.trainer.config import TrainerConfig


def load_app() -> type:
    """Import the app, and torch with it, only after the settings are valid."""
    from services.trainer.app import TrainerApp

    return TrainerApp


if __name__ == "__main__":
    run("trainer", TrainerConfig, load_app)
