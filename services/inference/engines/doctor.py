"""`python -m services.inference.engines.doctor NAME`: the findings of one engine, one JSON a line.

`forge doctor --engine NAME` runs it, perhaps with the Python of the engine's own environment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from forge.core.errors import ConfigError
from services.inference.engines.provider import EngineFinding
from services.inference.engines.registry import get_engine


def findings(name: str, model_path: str = "") -> Iterator[EngineFinding]:
    """Yield the findings of an engine; one that has no checks says so."""
    try:
        examine = getattr(get_engine(name), "examine", None)
    except ConfigError as error:
        yield EngineFinding(ok=False, text=f"engine {name}", remedy=str(error))
        return
    if examine is None:
        yield EngineFinding(ok=True, text=f"engine {name} is registered, and has no checks")
        return
    yield from examine(model_path)


def main() -> None:
    """Print each finding as soon as it is known."""
    parser = argparse.ArgumentParser(prog="services.inference.engines.doctor")
    parser.add_argument("name")
    parser.add_argument("--model", default="")
    arguments = parser.parse_args()
    for finding in findings(arguments.name, arguments.model):
        print(json.dumps(asdict(finding)), flush=True)


if __name__ == "__main__":
    main()
