"""The model behind the stand-in, and how it draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, DynamicCache

from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour, misuse
from tests.support.inference.tensorrt_llm_fake.executor.result import Logprob
from tests.support.inference.tensorrt_llm_fake.quantized import NARROW, check_update, computed
from tests.support.inference.tensorrt_llm_fake.sampling_params import LogprobMode, SamplingParams


class Module:
    """A part of the model with the hooks of an update."""

    def __init__(self, name: str, calls: list[str], *, removed: bool = False) -> None:
        self._name = name
        self._calls = calls
        self._weights_removed = removed

    def pre_reload_weights(self) -> None:
        """Make room for weights as the checkpoint has them."""
        self._note("pre_reload_weights")

    def process_weights_after_loading(self) -> None:
        """Bring them into the kernels' layout."""
        self._note("process_weights_after_loading")

    def post_load_weights(self) -> None:
        """Derive what depends on several of them."""
        self._note("post_load_weights")

    def _note(self, call: str) -> None:
        if self._weights_removed:
            raise misuse(f"{call} of a module without weights")
        self._calls.append(f"{self._name}.{call}")


class RankModel:
    """The model of one rank: what was loaded, and on rank 0 the model that computes."""

    def __init__(self, path: Path, *, computes: bool) -> None:
        self.computes = computes
        self.generation = 0
        """Grows with each finished update."""
        self.stored: dict[str, torch.Tensor] = {}
        """All tensors as the checkpoint has them."""
        self.calls: list[str] = []
        """The hooks called since the last update, of all parts."""
        self._sent: set[str] = set()
        """Names that the update has loaded."""
        self._modules = [
            Module("layer", self.calls),
            Module("draft", self.calls, removed=True),
            Module("head", self.calls),
        ]
        self._config = AutoConfig.from_pretrained(path)
        # The stand-in restores quantized weights by itself.
        vars(self._config).pop("quantization_config", None)
        for file in sorted(path.glob("*.safetensors")):
            self.stored |= load_file(file)
        self.hf: Any = self._built() if computes else None
        self._is_stale = False

    def modules(self) -> Iterator[Any]:
        """Yield the parts; some have no hooks."""
        yield object()
        yield from self._modules

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors by the names of the checkpoint; unknown names are ignored, as by the
        library."""
        state = self.hf.state_dict() if self.computes else {}
        self._sent |= weights.keys()
        for name, tensor in weights.items():
            if name in self.stored:
                dtype = self.stored[name].dtype
                if dtype in NARROW and tensor.dtype != dtype:
                    raise misuse(f"{name} is cast from {tensor.dtype} to {dtype}")
                self.stored[name] = tensor.to(dtype, copy=True)
                if name in state and dtype not in NARROW:
                    state[name].copy_(tensor)
                else:
                    self._is_stale = self.computes

    def end_update(self) -> None:
        """Check that the update had all that quantized layers need."""
        check_update(self.stored, self._sent)
        self._sent.clear()

    def _built(self) -> Any:
        owner: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self._config)]
        model = owner.from_pretrained(
            None, config=self._config, state_dict=computed(self.stored), dtype=torch.float32
        )
        return model.eval().requires_grad_(False)

    def _renew(self) -> None:
        """Build the model again from tensors that it has under other names."""
        if self._is_stale:
            self.hf, self._is_stale = self._built(), False

    @torch.inference_mode()
    def next_logits(self, ids: list[int], cache: DynamicCache | None) -> torch.Tensor:
        """Return the logits after `ids`, computing what `cache` does not have."""
        self._renew()
        known = 0 if cache is None else int(cache.get_seq_length())
        out = self.hf(torch.tensor([ids[known:]]), past_key_values=cache, use_cache=True)
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits

    @torch.inference_mode()
    def score(self, ids: list[int]) -> list[dict[int, Logprob]]:
        """Return the log-prob of each token but the first."""
        self._renew()
        logprobs = self.hf(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return [
            {token: Logprob(float(row[token]))}
            for token, row in zip(ids[1:], logprobs, strict=True)
        ]


def draw(
    logits: torch.Tensor, params: SamplingParams, generator: torch.Generator
) -> tuple[int, dict[int, Logprob]]:
    """Return a token, and its log-probs in the order of the library: the likeliest first, the
    sampled one last unless it is among them."""
    raw = logits.log_softmax(-1)
    if params.is_greedy:
        processed = torch.full_like(raw, -torch.inf)
        processed[raw.argmax()] = 0.0
        token = int(raw.argmax())
    else:
        processed = _cut(logits / (params.temperature or 1.0), params).log_softmax(-1)
        token = int(torch.multinomial(processed.exp(), 1, generator=generator))
    if params.logprobs is None:
        return token, {}
    chosen = processed if params.mode is LogprobMode.PROCESSED else raw
    chosen = chosen + behaviour().logprob_error
    likeliest = chosen.topk(min(params.logprobs, len(chosen)))
    found = {
        int(one): Logprob(float(logprob), rank + 1)
        for rank, (logprob, one) in enumerate(zip(*likeliest, strict=True))
    }
    if token not in found:
        rank = int((chosen > chosen[token]).sum()) + 1
        found[token] = Logprob(float(chosen[token]), rank)
    return token, found


def _cut(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    logprobs = logits.log_softmax(-1)
    kept = torch.ones_like(logits, dtype=torch.bool)
    if params.top_k:
        kept &= logits >= logits.topk(min(params.top_k, len(logits))).values[-1]
    if params.min_p:
        kept &= logprobs >= logprobs.max() + torch.tensor(params.min_p).log()
    if params.top_p is not None and params.top_p < 1:
        ordered = logprobs.sort(descending=True)
        before = ordered.values.exp().cumsum(-1) - ordered.values.exp()
        kept[ordered.indices[before >= params.top_p]] = False
    return logits.masked_fill(~kept, -torch.inf)
