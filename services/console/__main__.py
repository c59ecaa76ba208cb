"""Run one console instance: `python -m services.console --help`."""

from forge.runtime.process.startup import run
from services.console.config import ConsoleConfig


def load_app() -> type:
    """Imports the app only once the settings are valid."""
    from services.console.app import ConsoleApp

    return ConsoleApp


if __name__ == "__main__":
    run("console", ConsoleConfig, load_app)
