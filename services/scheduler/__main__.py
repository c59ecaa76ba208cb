"""Run one scheduler instance: `python -m services.scheduler --help`."""

from forge.runtime.process.startup import run
from services.scheduler.config import SchedulerConfig


def load_app() -> type:
    """Imports the app only once the settings are valid."""
    from services.scheduler.app import SchedulerApp

    return SchedulerApp


if __name__ == "__main__":
    run("scheduler", SchedulerConfig, load_app)
