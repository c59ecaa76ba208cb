"""Starts the TensorRT-LLM engine on its stand-in, in any role."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.engine import TensorRtLlm
from services.inference.engines.tensorrt_llm.library.library import Library, import_library
from services.inference.engines.tensorrt_llm.library.surface import TARGET, load_surface
from tests.contract.engines import Pair, published, reference
from tests.support.inference import tensorrt_llm_fake

PACKAGE = "tests.support.inference.tensorrt_llm_fake"
OLD = "1.2.1"
BLOCK_TOKENS = 8


def library(version: str = TARGET) -> Library:
    """The stand-in behind the surface of a version; it has all of the target's, and of the older
    one what is verified."""
    surface = load_surface(version)
    return import_library(surface if version == TARGET else surface.verified(), package=PACKAGE)


def install_stand_in(folder: Path) -> Path:
    """Copy the stand-in to `folder` under the library's own name; return the directory for
    sys.path."""
    site = folder / "site"
    shutil.copytree(Path(tensorrt_llm_fake.__file__).parent, site / "tensorrt_llm")
    for file in site.rglob("*.py"):
        file.write_text(file.read_text().replace(PACKAGE, "tensorrt_llm"))
    return site


def options(model_path: Path, **changed: Any) -> EngineOptions:
    """Options for the tiny models of the contract; keywords of TensorRtLlmSettings go there."""
    own = {name: changed.pop(name) for name in list(changed) if name in _SETTINGS}
    defaults: dict[str, Any] = {
        "device": "cuda",
        "block_tokens": BLOCK_TOKENS,
        "request_timeout_s": 600.0,
        "settings": TensorRtLlmSettings(**({"update_bucket_mib": 1} | own)),
    }
    return EngineOptions(model_path=str(model_path), **(defaults | changed))


_SETTINGS = set(TensorRtLlmSettings.__dataclass_fields__)


@asynccontextmanager
async def started(
    model_path: Path, role: Role, *, version: str = TARGET, **changed: Any
) -> AsyncIterator[TensorRtLlm]:
    """One engine of one role, without weights."""
    system = ActorSystem("tensorrt_llm")
    engine = await TensorRtLlm.start(system, options(model_path, **changed), library(version), role)
    try:
        yield engine
    finally:
        await engine.close()
        await system.stop()


def core_of(engine: TensorRtLlm) -> Any:
    """The stand-in's executor behind an engine."""
    return engine._llm.engine.core


def both(engine: TensorRtLlm) -> Pair:
    """An engine of the role both, as the contract's tests use one."""
    return Pair(prefill=engine, decode=engine)


async def load(*loaded: TensorRtLlm, seed: int = 0, version: int = 1) -> None:
    """Load the Qwen3-type model with the weights of a seed."""
    for engine in loaded:
        await engine.load(published(reference("qwen3", seed=seed)), version=version)
