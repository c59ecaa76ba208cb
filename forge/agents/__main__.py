"""Run one runner: `forge agents run --help`, or `python -m forge.agents --help`."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

from forge.agents.config import RunnerConfig
from forge.runtime.process.startup import run
from forge.runtime.security.bearer import Bearer


def load_app() -> type:
    """Returns `RunnerApp`; imported late, so that `--help` is fast."""
    from forge.agents.app import RunnerApp

    return RunnerApp


def host_checks(config: RunnerConfig) -> Iterator[Callable[[], object]]:
    """The token, the program, and everything that a setting names for import."""
    # It imports gRPC, which only `--check` needs.
    from forge.runtime.process.host_check import require_writable

    if config.token_file and not config.key_file:
        yield partial(Bearer, file=config.token_file)
        yield partial(require_writable, "token_state_file", config.token_state_file)
    if config.command or config.scaffolds or config.domains or config.reward_functions:
        # Late import: it takes half a second.
        from forge.agents.app import plugin_checks

        yield from plugin_checks(config)


if __name__ == "__main__":
    # `forge agents` passes its arguments on, and "run" is the only subcommand.
    if sys.argv[1:2] == ["run"]:
        del sys.argv[1]
    elif sys.argv[1:] and not sys.argv[1].startswith("-"):
        print(
            f"forge agents: no such command {sys.argv[1]!r}; use forge agents run", file=sys.stderr
        )
        sys.exit(2)
    run("runner", RunnerConfig, load_app, host_checks)
