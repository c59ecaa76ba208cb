"""The part of TensorRT-LLM that the adapter uses, by version.

`surface/<version>.json` lists classes as `module:Class`, with fields and methods. An entry
`name=default` has a default that the adapter relies on; a name that ends with `?` is not verified
for this version, and is used only if the installed tree has it. `behaviours` are facts that no
signature shows. Owns the format and the features that follow; `surface_diff` compares with a tree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from importlib.resources import files
from typing import Any

from packaging.version import InvalidVersion, Version

from forge.core.errors import ConfigError

TARGET = "1.3.0rc29"
"""The oldest version with updates in flight."""
_ASYNC = "async "


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A field of a class, or a parameter of a method."""

    name: str
    default: str | None = None
    """Source text of the default that the adapter relies on; None: any, or none."""
    verified: bool = True
    """False: the version may lack it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method that the adapter calls."""

    parameters: tuple[Member, ...]
    is_async: bool = False
    verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSurface:
    """A class that the adapter uses."""

    fields: Mapping[str, Member]
    methods: Mapping[str, Method]
    verified: bool = True


class Feature(Enum):
    """An ability of the engine that not every version has."""

    PAUSE = "pause"
    """Requests in flight stop and continue around an update."""
    UPDATE_WITHOUT_DRAIN = "update_without_drain"
    """A control action runs beside requests that the engine holds."""
    UPDATE_HOOKS = "update_hooks"
    """The model loader tells begin, end and abort of an update."""
    CUDA_GRAPH_UPDATES = "cuda_graph_updates"
    """Captured graphs see updated weights."""
    PROCESSED_LOGPROBS = "processed_logprobs"
    """Log-probs of the sampled distribution at any temperature."""
    SAMPLED_LOGPROB_ALONE = "sampled_logprob_alone"
    """`logprobs=0` returns the sampled token's log-prob."""
    DISAGGREGATION = "disaggregation"
    """Hand-offs under an id of the caller."""
    CACHE_SALT = "cache_salt"
    """Cached blocks are kept apart by a salt."""
    SEEDS = "seeds"
    """Each request has random numbers of its own."""
    REJECTION_SAMPLING = "rejection_sampling"
    """Drafts do not change the sampled distribution."""
    CUDA_GRAPHS = "cuda_graphs"
    """CUDA graphs can be configured."""
    PROBE = "probe"
    """Log-probs of given tokens: new weights are compared with the trainer before they serve."""


_LLM = "tensorrt_llm._torch.async_llm:AsyncLLM"
_ARGS = "tensorrt_llm.llmapi.llm_args"
_SAMPLING = "tensorrt_llm.sampling_params"
_LOADER = "tensorrt_llm._torch.pyexecutor.model_loader:ModelLoader"
_EXECUTOR = "tensorrt_llm._torch.pyexecutor.py_executor:PyExecutor"
_EXTENSION = "tensorrt_llm.llmapi.rlhf_utils:WorkerExtension"
_DISAGGREGATED = "tensorrt_llm.disaggregated_params:DisaggregatedParams"

_NEEDS: Mapping[Feature, tuple[str, ...]] = {
    Feature.PAUSE: (
        f"{_LLM}.pause_generation",
        f"{_LLM}.resume_generation",
        # It is what the pause calls on each rank, where our extension takes the place of theirs.
        f"{_EXTENSION}.wait_for_engine_idle",
    ),
    Feature.UPDATE_WITHOUT_DRAIN: (f"{_EXECUTOR}.control_action.drain",),
    Feature.UPDATE_HOOKS: (
        f"{_LOADER}.begin_update_weights",
        f"{_LOADER}.finalize_update_weights",
        f"{_LOADER}.abort_update_weights",
    ),
    Feature.CUDA_GRAPH_UPDATES: ("updates_fit_cuda_graphs",),
    Feature.PROCESSED_LOGPROBS: (
        f"{_SAMPLING}:SamplingParams.logprobs_mode",
        f"{_SAMPLING}:LogprobMode.PROCESSED",
    ),
    Feature.SAMPLED_LOGPROB_ALONE: ("logprobs_zero_is_sampled",),
    Feature.DISAGGREGATION: (
        f"{_DISAGGREGATED}.disagg_request_id",
        f"{_DISAGGREGATED}.first_gen_log_probs",
    ),
    Feature.CACHE_SALT: (f"{_LLM}.generate_async.cache_salt",),
    Feature.SEEDS: ("seed_per_request",),
    Feature.REJECTION_SAMPLING: (
        f"{_ARGS}:MTPDecodingConfig.max_draft_len",
        f"{_ARGS}:MTPDecodingConfig.use_rejection_sampling",
    ),
    Feature.CUDA_GRAPHS: (
        f"{_ARGS}:CudaGraphConfig.max_batch_size",
        f"{_ARGS}:TorchLlmArgs.cuda_graph_config",
    ),
    Feature.PROBE: (
        f"{_SAMPLING}:SamplingParams.prompt_logprobs",
        "tensorrt_llm.executor.result:CompletionOutput.prompt_logprobs",
    ),
}
"""Needs of each feature: paths of `Surface.paths`, or behaviours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """The part of one version that the adapter uses."""

    version: str
    pythons: tuple[str, ...]
    classes: Mapping[str, ClassSurface]
    """By `module:Class`."""
    behaviours: frozenset[str]
    absent: frozenset[str] = frozenset()
    """Paths that the installed tree lacks."""

    def paths(self) -> frozenset[str]:
        """Return the names that exist, unverified or not: `module:Class[.member[.parameter]]`."""
        found = set()
        for owner, surface in self.classes.items():
            found.add(owner)
            found |= {f"{owner}.{name}" for name in surface.fields}
            for name, method in surface.methods.items():
                found.add(f"{owner}.{name}")
                found |= {f"{owner}.{name}.{one.name}" for one in method.parameters}
        return frozenset(path for path in found if not _is_within(path, self.absent))

    def verified(self) -> Surface:
        """Return the surface without the entries that are not verified for this version."""
        return replace(self, absent=self.absent | self._unverified())

    def features(self) -> frozenset[Feature]:
        """Return the features whose needs are all there."""
        there = self.paths() | self.behaviours
        return frozenset(one for one, needs in _NEEDS.items() if there.issuperset(needs))

    def missing(self, feature: Feature) -> tuple[str, ...]:
        """Return the missing needs of a feature."""
        there = self.paths() | self.behaviours
        return tuple(need for need in _NEEDS[feature] if need not in there)

    def _unverified(self) -> frozenset[str]:
        found = set()
        for owner, surface in self.classes.items():
            if not surface.verified:
                found.add(owner)
            found |= {f"{owner}.{one.name}" for one in surface.fields.values() if not one.verified}
            for name, method in surface.methods.items():
                if not method.verified:
                    found.add(f"{owner}.{name}")
                unverified = (one for one in method.parameters if not one.verified)
                found |= {f"{owner}.{name}.{one.name}" for one in unverified}
        return frozenset(found)


def known_versions() -> tuple[str, ...]:
    """Return the versions with a surface, oldest first."""
    folder = files(__package__) / "surface"
    names = (file.name.removesuffix(".json") for file in folder.iterdir())
    return tuple(sorted(names, key=Version))


def load_surface(version: str) -> Surface:
    """Read the surface of a known version."""
    file = files(__package__) / "surface" / f"{version}.json"
    return read_surface(json.loads(file.read_text(encoding="utf-8")))


def surface_for(installed: str) -> Surface:
    """Return the newest surface that is not newer than the installed version. Raises `ConfigError`
    for a version before all surfaces."""
    try:
        found = Version(installed)
    except InvalidVersion:
        raise ConfigError(f"tensorrt_llm {installed!r} is not a version") from None
    known = known_versions()
    fitting = [one for one in known if Version(one) <= found]
    if not fitting:
        raise ConfigError(
            f"tensorrt_llm {installed} is older than {known[0]}, the oldest that is supported; "
            f"install {TARGET} or newer (docs/tensorrt_llm.md)"
        )
    return load_surface(fitting[-1])


def read_surface(stored: Mapping[str, Any]) -> Surface:
    """Decode a surface."""
    classes = {}
    for key, one in stored["classes"].items():
        owner, verified = _verified(key)
        members = [_member(text) for text in one.get("fields", ())]
        classes[owner] = ClassSurface(
            fields={member.name: member for member in members},
            methods=dict(_method(key, value) for key, value in one.get("methods", {}).items()),
            verified=verified,
        )
    return Surface(
        version=stored["version"],
        pythons=tuple(stored["pythons"]),
        classes=classes,
        behaviours=frozenset(stored["behaviours"]),
    )


def _method(key: str, parameters: list[str]) -> tuple[str, Method]:
    name, verified = _verified(key.removeprefix(_ASYNC))
    return name, Method(
        parameters=tuple(_member(text) for text in parameters),
        is_async=key.startswith(_ASYNC),
        verified=verified,
    )


def _member(text: str) -> Member:
    text, verified = _verified(text)
    name, equals, default = text.partition("=")
    return Member(name=name, default=default if equals else None, verified=verified)


def _verified(text: str) -> tuple[str, bool]:
    return text.removesuffix("?"), not text.endswith("?")


def _is_within(path: str, owners: frozenset[str]) -> bool:
    """Whether `path` or an owner of it is in `owners`."""
    return any(path == one or path.startswith(f"{one}.") for one in owners)
