"""Run the trainer: `python -m services.trainer --help`."""

from forge.runtime.startup import run
from services.trainer.config import TrainerConfig


def load_app() -> type:
    from services.trainer.app import TrainerApp

    return TrainerApp


if __name__ == "__main__":
    run("trainer", TrainerConfig, load_app)
