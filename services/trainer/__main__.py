"""Run the trainer: `python -m services.trainer --help`."""

from forge.runtime.service import run
from services.trainer.app import TrainerApp
from services.trainer.config import TrainerConfig

if __name__ == "__main__":
    run("trainer", TrainerConfig, TrainerApp)
