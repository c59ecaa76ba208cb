"""Builds the parts of an embedded engine from the options of its worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from forge.core.errors import ConfigError
from forge.runtime.telemetry import log
from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.capabilities import EARLY_HAND_OFF, Capabilities
from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.decode_step import DecodeStep
from services.inference.engines.embedded.device.drafter import DeviceDrafter
from services.inference.engines.embedded.device.forward_pass import DevicePass
from services.inference.engines.embedded.device.graphs import DeviceGraphs
from services.inference.engines.embedded.device.prompt_layers import PromptLayers
from services.inference.engines.embedded.family_check import check
from services.inference.engines.embedded.kv.device_attention import (
    device_attention,
    packed_attention,
)
from services.inference.engines.embedded.kv.extents import Extents
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.kv.shared_prefixes import SharedPrefixes
from services.inference.engines.embedded.kv.slabs import Slabs
from services.inference.engines.embedded.kv.state_memory import state_rows
from services.inference.engines.embedded.kv.state_rows import StateRows
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.prefill import PrefillActor
from services.inference.engines.embedded.speculation.depth import DepthChooser
from services.inference.engines.embedded.speculation.drafter import HeadDrafter
from services.inference.engines.embedded.stored_kv import StoredKv, architecture
from services.inference.engines.kv_store.store import KvStore
from services.inference.engines.provider import EngineOptions

CAPABILITIES = Capabilities(
    engine="embedded",
    roles=frozenset({"prefill", "decode", "both"}),
    hand_offs=frozenset({"kv_blocks", EARLY_HAND_OFF}),
    shares=True,
    update="in_flight",
    recomputes=True,
    draws="positional",
    cuts=True,
    min_tokens=True,
    penalties=True,
    grammars=frozenset({"json_schema", "regex", "lark"}),
    resumes=frozenset({"grammar", "penalties"}),
    top_logprobs=20,
    routed_experts=True,
    drafts=True,
    cache_events=True,
)
_MAX_WAITING = 1024
_CPU_PASS_TOKENS = 512
"""A prompt that arrives waits for one pass, which takes long on a CPU."""
_GPU_PASS_TOKENS = 16_384
_GPU_PASS_TOKENS_BESIDE_STEPS = 4096
"""In the role both, while requests sample: they wait for one pass, too."""


def build_policy(options: EngineOptions) -> Policy:
    """Check the model and build it, without weights. Raises ConfigError."""
    if options.extra:
        raise ConfigError(f"engine_options = {dict(options.extra)}: the engine embedded has none")
    check(options.model_path, context_tokens=options.context_tokens)
    policy = Policy.build(
        options.model_path,
        dtype=options.dtype,
        device=options.device,
        context_tokens=options.context_tokens,
        draft_tokens=options.draft_tokens,
    )
    named = architecture(options.model_path, policy.kv_shape)
    fingerprint = blake2b(named, digest_size=16).digest()
    policy.kv_shape = replace(policy.kv_shape, fingerprint=fingerprint)
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of an engine of any role."""

    policy: Policy
    options: EngineOptions
    store: KvStore | None
    cache_log: CacheLog

    def prefix_cache(self, *, resumes: bool) -> KvCache:
        """Make an empty prefix cache; `resumes` as of `KvCache`."""
        return KvCache(
            self.policy.kv_shape,
            block_tokens=self.options.block_tokens,
            capacity_bytes=self.options.cache_bytes,
            listener=self.cache_log,
            resumes=resumes,
        )

    def stored_kv(self) -> StoredKv | None:
        """The store for tensors of this model; None without one."""
        return None if self.store is None else StoredKv(self.store, self.policy.kv_shape)


def prefill_actor(
    parts: EngineParts, cache: KvCache, *, beside_steps: bool = False
) -> PrefillActor:
    """The actor that reads prompts; `beside_steps`: passes alternate with decode steps."""
    options, policy = parts.options, parts.policy
    fitting = _CPU_PASS_TOKENS if policy.device.type == "cpu" else _GPU_PASS_TOKENS
    packed = packed_attention(policy.kv_shape)
    actor = PrefillActor(
        policy,
        cache,
        parts.stored_kv(),
        block_tokens=options.block_tokens,
        pass_tokens=options.pass_tokens or fitting,
        threads=options.threads,
        packed=packed,
        layers=PromptLayers(policy, packed) if policy.device.type == "cuda" else None,
    )
    if beside_steps and not options.pass_tokens:
        actor.beside_tokens = min(fitting, _GPU_PASS_TOKENS_BESIDE_STEPS)
    return actor


def decode_actor(
    parts: EngineParts, cache: KvCache, *, kv_bytes: int, resumes: bool
) -> DecodeActor:
    """The actor that samples; `kv_bytes` for running sequences and shared prefixes. `resumes`: it
    also keeps states for prompts that continue its answers. Raises ConfigError without memory for
    one sequence."""
    options, shape = parts.options, parts.policy.kv_shape
    most = running_limit(parts, kv_bytes=kv_bytes, resumes=resumes)
    states = None
    if shape.states is not None:
        block_tokens = options.block_tokens if resumes else 0
        states = StateRows(shape.states, shape.device, rows=most, block_tokens=block_tokens)
        kv_bytes -= states.bytes
    return DecodeActor(
        _decode_step(parts, cache, states, kv_bytes),
        cache,
        parts.stored_kv(),
        max_running=most,
        max_waiting=_MAX_WAITING,
        threads=options.threads,
        recompute=options.recompute_on_update,
    )


def _decode_step(
    parts: EngineParts, cache: KvCache, states: StateRows | None, kv_bytes: int
) -> DecodeStep:
    options, policy = parts.options, parts.policy
    shape, context_tokens = policy.kv_shape, policy.limits.context_tokens
    depth = DepthChooser(options.draft_tokens, adaptive=options.adaptive_drafts)
    # The pass over extents has no recurrent layers.
    attend = device_attention(shape) if states is None else None
    if attend is None:
        slabs: Slabs[Any] = Slabs(shape, context_tokens=context_tokens, capacity_bytes=kv_bytes)
        prefixes = _prefixes(policy, cache, slabs)
        return DecodeStep(policy, slabs, prefixes, HeadDrafter(policy), depth, states=states)
    extents: Extents[Any] = Extents(shape, context_tokens=context_tokens, capacity_bytes=kv_bytes)
    graphs = DeviceGraphs(policy.device)
    device_pass = DevicePass(policy, extents, attend, graphs)
    drafter = DeviceDrafter(policy, graphs)
    return DecodeStep(policy, extents, None, drafter, depth, device_pass=device_pass)


def running_limit(parts: EngineParts, *, kv_bytes: int, resumes: bool) -> int:
    """Most requests that sample at the same time; arguments are those of `decode_actor`. Raises
    ConfigError without memory for the states of one."""
    shape = parts.policy.kv_shape
    if shape.states is None:
        return parts.options.max_running
    rows = state_rows(shape, kv_bytes, copies=2 if resumes else 1)
    if not rows:
        raise ConfigError(
            f"kv.mib: {kv_bytes >> 20} MiB for running requests have no room for the recurrent "
            f"states of one request, {shape.state_bytes >> 20} MiB, and its keys and values"
        )
    return min(parts.options.max_running, rows)


def _prefixes(policy: Policy, cache: KvCache, running: Slabs[Any]) -> SharedPrefixes | None:
    """Return None on a GPU, and for models with a sliding window: neither can merge two reads."""
    if policy.device.type != "cpu" or policy.kv_shape.windowed:
        return None
    return SharedPrefixes(
        policy.kv_shape,
        cache,
        context_tokens=policy.limits.context_tokens,
        running=running,
    )


def kv_store(options: EngineOptions, policy: Policy) -> KvStore | None:
    """The KV store of the options, if there is one and the model has keys and values alone."""
    if options.kv_store is None:
        return None
    if policy.kv_shape.states is not None:
        log.warning("kv_store_not_used", reason="the model's recurrent layers have states")
        return None
    return KvStore(options.kv_store, token_bytes=StoredKv.token_bytes(policy.kv_shape))
