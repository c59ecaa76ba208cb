"""`python -m services.inference.engines.doctor NAME`: the findings of one engine, one JSON a line.

`forge doctor --engine NAME` runs it, perhaps with the Python of the engine's own environment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from forge.core.errors import ConfigError
from forge.runtime.process.host_check import require_model
from services.inference.engines.provider import EngineFinding
from services.inference.engines.registry import check_model, get_engine


def findings(name: str, model_path: str = "") -> Iterator[EngineFinding]:
    """Yield the findings of an engine; one that has no checks says so."""
    try:
        engine = get_engine(name)
    except ConfigError as error:
        yield EngineFinding(ok=False, text=f"engine {name}", remedy=str(error))
        return
    if (examine := getattr(engine, "examine", None)) is not None:
        yield from examine(model_path)
        return
    yield EngineFinding(ok=True, text=f"engine {name} is registered")
    if model_path:
        yield _model(name, model_path)


def _model(name: str, model_path: str) -> EngineFinding:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        require_model("--model", model_path)
        checked = check_model(name, model_path, context_tokens=0, device=device, dtype="auto")
    except ConfigError as error:
        return EngineFinding(ok=False, text=str(error), remedy="Choose another engine or model.")
    if not checked:
        text = f"not run: engine {name} has no check of models"
        return EngineFinding(ok=True, text=text, was_run=False)
    return EngineFinding(ok=True, text=f"engine {name} serves {model_path} on {device}")


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
