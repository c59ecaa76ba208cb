"""The installed TensorRT-LLM: found without an import, compared with its surface, then imported.

No other module imports the library, so all that it has by version is decided here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from forge.core.errors import ConfigError
from services.inference.engines.tensorrt_llm.library.surface import Feature, Surface, surface_for
from services.inference.engines.tensorrt_llm.library.surface_diff import (
    PACKAGE,
    Difference,
    Tree,
    compare,
)

INSTALL = "install it as docs/tensorrt_llm.md says, into an environment of its own"
_NAMED = 3
"""Differences in an error; `forge doctor --engine tensorrt_llm` lists all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An installed library, not imported."""

    root: Path
    version: str
    surface: Surface
    """The library's part of the surface of its version."""
    differences: Sequence[Difference]

    @property
    def features(self) -> frozenset[Feature]:
        """Features of the installed library."""
        return self.surface.features()


def find_library(root: Path | None = None) -> Found:
    """Find and parse the library, in the folder `root` or where Python finds it. Raises
    `ConfigError`."""
    root = root or _installed_root()
    tree = Tree(root)
    version = tree.version()
    if not version:
        raise ConfigError(f"{root} has no version.py with a __version__: {INSTALL}")
    differences, surface = compare(tree, surface_for(version))
    return Found(root=root, version=version, surface=surface, differences=differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The classes of the library that the adapter uses."""

    surface: Surface
    async_llm: Any
    sampling_params: Any
    disaggregated_params: Any
    logprob: Any
    processed: Any
    """LogprobMode.PROCESSED; None in a version without."""
    raw: Any
    arguments: ModuleType
    """The module with KvCacheConfig and the other configurations."""

    @property
    def features(self) -> frozenset[Feature]:
        """Features of the installed library."""
        return self.surface.features()


def load_library(found: Found) -> Library:
    """Import the library. Raises `ConfigError` for a difference to the surface, or an import that
    fails."""
    if found.differences:
        named = "; ".join(f"{one.path}: {one.text}" for one in found.differences[:_NAMED])
        more = len(found.differences) - _NAMED
        raise ConfigError(
            f"tensorrt_llm {found.version} differs from the surface {found.surface.version}: "
            f"{named}{f'; and {more} more' if more > 0 else ''}. "
            "Install a version with a surface (forge doctor --engine tensorrt_llm)"
        )
    try:
        return import_library(found.surface)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(
            f"tensorrt_llm {found.version} cannot be imported: {type(error).__name__}: {error}; "
            f"{INSTALL}"
        ) from error


def import_library(surface: Surface, *, package: str = PACKAGE) -> Library:
    """Import the classes. Raises ImportError, OSError or AttributeError."""

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"{package}.{name}")

    sampling = module("sampling_params")
    modes = getattr(sampling, "LogprobMode", None)
    has_modes = Feature.PROCESSED_LOGPROBS in surface.features()
    return Library(
        surface=surface,
        async_llm=module("_torch.async_llm").AsyncLLM,
        sampling_params=sampling.SamplingParams,
        disaggregated_params=module("disaggregated_params").DisaggregatedParams,
        logprob=module("executor.result").Logprob,
        processed=modes.PROCESSED if modes is not None and has_modes else None,
        raw=modes.RAW if modes is not None and has_modes else None,
        arguments=module("llmapi.llm_args"),
    )


def _installed_root() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"tensorrt_llm is not installed for {sys.executable}: {INSTALL}")
    return Path(spec.origin).parent
