"""Run one scheduler instance: `python -m services.scheduler --help`."""

from forge.runtime.service import run
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig

if __name__ == "__main__":
    run("scheduler", SchedulerConfig, SchedulerApp)
