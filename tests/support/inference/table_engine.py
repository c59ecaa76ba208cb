"""An engine unlike the embedded one: it knows models whose layers add nothing, by a table.

In such a model (`last_token_model`) the last token alone determines the next one, so a test can
check the log-prob of any token under the version that it names, whatever happened before. The
engine draws from a stream, resumes nothing, and takes some time for each token. It needs no torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from forge.core.errors import Unavailable
from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_array
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import Finish, Piece, Probe, Prompt, Tokens
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.model_limits import read_limits
from services.inference.engines.provider import EngineOptions

TOKEN_S = 0.01


def holds(tokens: int) -> bool:
    """Whether an answer of so many tokens gets no further one; replaced in held workers."""
    return False


_EPSILON = 1e-6
CAPABILITIES = Capabilities(
    engine="table", roles=frozenset({"both"}), update="in_flight", draws="stream", penalties=True
)


class TableEngine:
    """An `AggregatedEngine`; penalties are declared and ignored, for tests of what moves."""

    capabilities = CAPABILITIES
    cache_tokens = 0

    def __init__(self, options: EngineOptions) -> None:
        self.limits = read_limits(options.model_path, context_tokens=options.context_tokens)
        self.capacity = options.max_running
        self.version = 0
        self._logprobs_VV: npt.NDArray[np.float64] = np.zeros((0, 0))

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        embedding_VC = _array(tensors["model.embed_tokens.weight"])
        norm_C = _array(tensors["model.norm.weight"])
        sizes_V = np.sqrt((embedding_VC**2).mean(-1, keepdims=True) + _EPSILON)
        logits_VV = (embedding_VC / sizes_V * norm_C) @ embedding_VC.T
        logits_VV -= logits_VV.max(-1, keepdims=True)
        self._logprobs_VV = logits_VV - np.log(np.exp(logits_VV).sum(-1, keepdims=True))
        self.version = version

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        if not self.version:
            raise Unavailable("the engine table has no weights yet")
        asked, ids = prompt.sampling, int32_array(prompt.ids)
        last, most = ids[-1], min(asked.max_tokens, self.limits.context_tokens - len(ids))
        stream = np.random.default_rng([asked.seed, len(ids)])
        for sampled in range(1, most + 1):
            await asyncio.sleep(TOKEN_S)
            while holds(sampled - 1):
                await asyncio.sleep(TOKEN_S)
            logprobs_V, version = self._logprobs_VV[last], self.version
            last = int((logprobs_V + stream.gumbel(size=len(logprobs_V))).argmax())
            tokens = Tokens(ids=(last,), logprobs=(logprobs_V[last],), versions=(version,))
            yield Piece(tokens=tokens, finish=Finish.LENGTH if sampled == most else None)

    async def close(self) -> None: ...


def _array(tensor: NamedTensor) -> npt.NDArray[np.float64]:
    return np.frombuffer(tensor.data, dtype="<f4").reshape(tensor.shape).astype(np.float64)


async def start_aggregated(actors: ActorSystem, options: EngineOptions) -> TableEngine:
    return TableEngine(options)


def install_engines(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Put a package with these entry points on the path of this process and of those that it
    starts from now on, which are not forked."""
    info = folder / "site" / "engines-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engines\nVersion: 1.0\n")
    entries = "".join(f"{name} = {module}\n" for name, module in modules.items())
    (info / "entry_points.txt").write_text(f"[forge.engines]\n{entries}")
    root = Path(__file__).parents[3]
    path = [str(info.parent), str(root), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.syspath_prepend(str(info.parent))
