"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model, through PEFT.

Owns inserting adapters, merging them for publication, the reference policy (the base without
adapters) and the file layout, which is PEFT's:
`PeftModel.from_pretrained(model, checkpoint / "adapter")`. PEFT is an optional package, imported
only here and only when adapters are configured.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.core.errors import ConfigError
from forge.rl.model.policy import TreePolicy
from forge.rl.numerics import wide_modules
from forge.rl.parallel.sharding import as_sharded, local
from forge.rl.parallel.world import whole
from forge.rl.tree.batch import TreeBatch
from services.trainer.model.full_weights import OWN_DIRECTORY, Trainee, own_tensors, tied_names
from services.trainer.setting_tables import LoraSettings

ADAPTER_DIRECTORY = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"

_ADAPTER = "default"
_CONFIG_FILE = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_SAMPLED_ELEMENTS = 4096
_FUSED_OUTPUT = "out_proj"
_FUSED_OUTPUTS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types of models whose kernels on a GPU read the weight of this layer themselves."""
ALL_LINEAR = "all-linear"


class LoraTrainee(Trainee):
    """A frozen model with trained adapters."""

    adapter_file: ClassVar[str] = f"{ADAPTER_DIRECTORY}/{ADAPTER_FILE}"

    def __init__(self, model: Any, settings: LoraSettings, *, model_path: Path) -> None:
        """Raises `ConfigError` without PEFT, and for invalid targets."""
        self._shapes = {name: one.shape for name, one in own_tensors(model).items()}
        self._tied = tied_names(model)
        self._alpha = settings.alpha
        self._config = inject(model, settings, model_path)
        super().__init__(model)
        self._layers: dict[str, Any] = {
            f"{name}.weight": layer
            for name, layer in model.named_modules()
            if _ADAPTER in getattr(layer, "lora_A", {})
        }

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Give adapters their first values, the same in every world, and note the base."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers.values():
            down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
            first = torch.empty(down.shape, dtype=down.dtype)
            torch.nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
            local(down).copy_(local(as_sharded(first, down)))
            local(up).zero_()
        plain = base_tensors(self.model)
        self.base = _fingerprint({name: plain[name] for name in self._shapes})

    @torch.no_grad()
    def published(self) -> Iterator[tuple[str, Tensor]]:
        """The merged weights W + alpha/rank B A, in the float32 of the master weights."""
        plain = base_tensors(self.model)
        for name in self._shapes:
            layer = self._layers.get(name)
            if layer is None:
                yield name, plain[name]
            else:
                yield name, whole(plain[name]) + _delta(layer)

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `Trainee`."""
        return _disabled(list(self._layers.values()))

    def check(self, shapes: Mapping[str, Sequence[int]], *, base: str, source: Path) -> None:
        """Raises `ConfigError` also for adapters of another scale: they are another policy."""
        super().check(shapes, base=base, source=source)
        alpha = json.loads((source.parent / _CONFIG_FILE).read_text(encoding="utf-8"))["lora_alpha"]
        if alpha != self._alpha:
            raise ConfigError(
                f"{source} has adapters with lora.alpha = {alpha}; this run has {self._alpha}. "
                f"{OWN_DIRECTORY}"
            )

    def base_reference(self, policy: TreePolicy) -> BaseReference:
        """The base model as a reference; `policy` has the model with adapters."""
        return BaseReference(policy, list(self._layers.values()))

    def tied_names(self) -> dict[str, list[str]]:
        """Further names of published tensors, by the published name."""
        return self._tied

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole published tensors, by name, in order."""
        return self._shapes

    def master(self) -> dict[str, Tensor]:
        """The adapters, under PEFT's names."""
        return {
            _PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if f".{_ADAPTER}." in name
        }

    def sidecars(self) -> Mapping[str, str]:
        """PEFT's description of the adapters, by file name."""
        return {f"{ADAPTER_DIRECTORY}/{_CONFIG_FILE}": self._config}


def base_name(name: str) -> str:
    """Name without adapters of a tensor of a model with them; "" for an adapter."""
    return "" if ".lora_" in name else name.replace(".base_layer.", ".")


def base_tensors(model: Any) -> dict[str, Tensor]:
    """Like `own_tensors` before adapters were inserted, if there are any."""
    named = {base_name(name): one for name, one in own_tensors(model).items()}
    return {name: one for name, one in named.items() if name}


class BaseReference:
    """A reference policy without a copy of the model: it switches the adapters off."""

    def __init__(self, policy: TreePolicy, layers: Sequence[Any]) -> None:
        self._policy = policy
        self._layers = layers

    def logprobs(self, batch: TreeBatch, *, passes: int = 0) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies under the frozen weights, without dropout."""
        with _disabled(self._layers):
            return self._policy.without_replay().logprobs(batch, passes=passes)


@contextmanager
def _disabled(layers: Sequence[Any]) -> Iterator[None]:
    """Context in which layers compute without their adapters."""
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _delta(layer: Any) -> Tensor:
    """alpha/rank B A. PEFT's own product has no sharded factors."""
    down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    if not isinstance(up, DTensor):
        delta: Tensor = layer.get_delta_weight(_ADAPTER)
        return delta
    return whole(up) @ whole(down) * float(layer.scaling[_ADAPTER])


def inject(model: Any, settings: LoraSettings, model_path: Path) -> str:
    """Insert adapters into the model and freeze the rest; returns PEFT's description of them.

    Raises `ConfigError` without PEFT, and for targets that the model does not have.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"lora.rank = {settings.rank} needs the package peft: pip install 'forge-rl[lora]'"
        ) from error
    targets = list(settings.targets)
    described: dict[str, Any] = {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        "exclude_modules": _excluded(model, targets) or None,
        "base_model_name_or_path": str(model_path),
        "task_type": "CAUSAL_LM",
    }
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    try:
        if any(one.ndim > 2 for one in model.parameters()):
            described["target_modules"] = _linear_targets(model, described)
        config = LoraConfig(**described)
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"lora.targets = {targets}: {error}") from error
    if (model.get_output_embeddings(), model.get_input_embeddings()) != (head, embedding):
        raise ConfigError(
            f"lora.targets = {targets} is not allowed: embedding and head cannot have adapters"
        )
    written = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return json.dumps(written, indent=2, default=str)


def _excluded(model: Any, targets: Sequence[str]) -> list[str]:
    """Linear layers that cannot have adapters: routers, whose results are no product alone, and of
    all layers those that PEFT refuses."""
    routers = {id(one) for one in wide_modules(model)} - {id(model.get_output_embeddings())}
    names = [name for name, one in model.named_modules() if id(one) in routers]
    if targets == [ALL_LINEAR] and model.config.model_type in _FUSED_OUTPUTS:
        names.append(_FUSED_OUTPUT)
    return names


def _linear_targets(model: Any, described: Mapping[str, Any]) -> Any:
    """The targets that are linear layers. PEFT takes names of layers that hub files have per expert
    (`down_proj`), or a router, for stacked parameters, which get no adapters here. Raises
    `ValueError` if such a name was asked for."""
    from peft import LoraConfig, inject_adapter_in_model

    with torch.device("meta"):
        outline = type(model)(model.config)
    config = LoraConfig(**described)
    with warnings.catch_warnings(action="ignore"):  # on ranks of parameters that are not there
        inject_adapter_in_model(config, outline, low_cpu_mem_usage=True)
    asked = described["target_modules"]
    if not config.target_parameters:
        return asked
    if asked != ALL_LINEAR:
        raise ValueError(
            f"{', '.join(sorted(config.target_parameters))} of its experts and routers cannot have "
            f"adapters; targets of this model are {', '.join(sorted(config.target_modules))}"
        )
    return sorted(config.target_modules)


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Digest of names, shapes and a sample of each tensor: it distinguishes trainings of one model
    and is quick for many gigabytes. Ranks gather divided ones."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        flat = whole(tensor.detach()).reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
