"""An inference engine in one file: transformers' own forward, one request at a time.

    [project.entry-points."forge.engines"]
    my_engine = "my_package.engine"

and `engine = "my_engine"` in the worker's settings. docs/engines.md goes through it. It computes
each token from the whole context again, so it is as slow as it is short.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forge.core.errors import Unavailable
from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_array
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import BrokenWeights, Finish, Piece, Probe, Prompt, Tokens
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.model_limits import read_limits
from services.inference.engines.probes import check_probe, probe_ids
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensor_bytes import is_finite
from services.inference.engines.weight_checks import check_tensor, match_names


class ExampleEngine:
    """An `AggregatedEngine`: reads and samples in one call."""

    # What is not declared here is refused before it reaches `generate`.
    capabilities = Capabilities(
        engine="example", roles=frozenset({"both"}), update="in_flight", draws="positional"
    )
    cache_tokens = 0

    def __init__(self, options: EngineOptions) -> None:
        self.limits = read_limits(options.model_path, context_tokens=options.context_tokens)
        self.capacity = options.max_running
        self.version = 0
        self._model = _model(options.model_path)
        self._spare = _model(options.model_path)
        self._slots = asyncio.Semaphore(options.max_running)
        self._device = asyncio.Lock()

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """Fill the spare model and try it; only then serve it."""
        await asyncio.to_thread(self._fill, tensors, version)
        ids = probe_ids(probe, self.limits, version=version)
        logprobs_NV = (await self._compute(self._spare, ids)).log_softmax(-1)
        found = [float(row[token]) for row, token in zip(logprobs_NV, ids[1:], strict=False)]
        rounded = any(one.dtype in ("bfloat16", "float16") for one in tensors.values())
        check_probe(probe, found, version=version, rounded=rounded)
        self._model, self._spare = self._spare, self._model
        self.version = version

    def _fill(self, tensors: Mapping[str, NamedTensor], version: int) -> None:
        """Check everything, then copy. Raises UnfitWeights, BrokenWeights."""
        names: dict[torch.Tensor, list[str]] = {}
        for name, weight in self._spare.state_dict(keep_vars=True).items():
            names.setdefault(weight, []).append(name)
        for name, weight in zip(
            match_names(list(names.values()), tensors, version=version), names, strict=True
        ):
            new = check_tensor(
                tensors[name], shape=weight.shape, dtype=weight.dtype, version=version
            )
            if not is_finite(new):
                raise BrokenWeights(f"weights {version}: {name} has NaN or infinity")
            weight.data.copy_(new)

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        """Sample token by token; closing the iterator ends the request."""
        if not self.version:
            raise Unavailable("the engine example has no weights yet")
        asked, ids = prompt.sampling, list(int32_array(prompt.ids))
        most = min(asked.max_tokens, self.limits.context_tokens - len(ids))
        async with self._slots:
            for sampled in range(1, most + 1):
                # Both together: a swap in between would give the token a wrong version.
                model, version = self._model, self.version
                logits_V = (await self._compute(model, ids))[-1]
                token, logprob = _draw(logits_V, asked.temperature, asked.seed, len(ids))
                ids.append(token)
                finish = Finish.LENGTH if sampled == most else None
                if token in asked.stop_ids:
                    finish = Finish.STOP
                yield Piece(
                    tokens=Tokens(ids=(token,), logprobs=(logprob,), versions=(version,)),
                    finish=finish,
                )
                if finish:
                    return

    async def _compute(self, model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
        async with self._device:
            return await asyncio.to_thread(_logits, model, ids)

    async def close(self) -> None:
        """Nothing runs without a request."""


def _model(path: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    found: torch.nn.Module = model.eval().requires_grad_(False)
    return found


@torch.inference_mode()
def _logits(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return found


def _draw(
    logits_V: torch.Tensor, temperature: float, seed: int, position: int
) -> tuple[int, float]:
    """Return a token and its log-prob. Seed and position alone determine the noise."""
    if temperature == 0:
        return int(logits_V.argmax()), 0.0
    logprobs_V = (logits_V / temperature).log_softmax(-1)
    noise = torch.Generator().manual_seed((seed * 1_000_003 + position) % (1 << 63))
    uniform_V = torch.rand(len(logprobs_V), generator=noise).clamp_min(1e-20)
    token = int((logprobs_V - (-uniform_V.log()).log()).argmax())
    return token, float(logprobs_V[token])


async def start_aggregated(actors: ActorSystem, options: EngineOptions) -> ExampleEngine:
    """The function of the entry point."""
    return await asyncio.to_thread(ExampleEngine, options)
