"""Run one runner: `forge agents run --help`, or `python -m forge.agents --help`."""

import sys

from forge.agents.config import RunnerConfig
from forge.runtime.process.startup import run


def load_app() -> type:
    """Returns `RunnerApp`; imported late, so that `--help` is fast."""
    from forge.agents.app import RunnerApp

    return RunnerApp


if __name__ == "__main__":
    # `forge agents` passes its arguments on, and "run" is the only subcommand.
    if sys.argv[1:2] == ["run"]:
        del sys.argv[1]
    run("runner", RunnerConfig, load_app)
