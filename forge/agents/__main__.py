"""Run one runner: `python -m forge.agents --help`."""

from forge.agents.app import RunnerApp
from forge.agents.config import RunnerConfig
from forge.runtime.service import run

if __name__ == "__main__":
    run("runner", RunnerConfig, RunnerApp)
