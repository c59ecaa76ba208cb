"""Wiring of a prefill or decode instance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from forge.runtime import weights
from forge.runtime.process.service import ServiceContext
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.config import InferenceConfig, KvSettings
from services.inference.engines.base import Engine, EngineOptions, KvStoreOptions
from services.inference.engines.registry import get_engine
from services.inference.worker.frozen_weights import load_frozen
from services.inference.worker.service import DecodeServicer, PrefillServicer
from services.inference.worker.weight_follower import WeightFollower

_FETCH_KV_SILENCE_S = 30.0
"""Longest silence in a fetch of keys and values; then another worker prefills the request."""
_MIB = 1 << 20


async def start_role(context: ServiceContext) -> Callable[[], Awaitable[None]]:
    """Start the engine, add its servicers, load frozen weights or follow the policy's; return the
    wait for the last request."""
    engine = await _start_engine(context)
    if context.config.weights == "frozen":
        await load_frozen(context, engine)
        return engine.idle
    follower = WeightFollower(context, engine, policy=context.config.policy)
    context.server.add_service(
        rpc.add_WeightServiceServicer_to_server,
        weights.WeightServicer(lambda: follower.weights, arriving=follower.relay.tensors),
        full_name=weights.FULL_NAME,
    )
    # Not in discovery until it has weights.
    context.ready = False
    context.keep_running(follower.run(), name="weights")
    return engine.idle


async def _start_engine(context: ServiceContext) -> Engine:
    config: InferenceConfig = context.config
    provider = get_engine(config.engine)
    options = EngineOptions(
        model_path=config.model_path,
        dtype=config.dtype,
        device=config.device,
        context_tokens=config.context_tokens,
        threads=config.torch_threads,
        block_tokens=config.kv.block_tokens,
        cache_bytes=config.kv.cache_mib * _MIB,
        kv_bytes=config.kv.mib * _MIB,
        pass_tokens=config.pass_tokens,
        max_running=config.max_running,
        kv_store=_kv_store(config.kv),
        draft_tokens=config.speculation.most_drafts,
        adaptive_drafts=config.speculation.adaptive,
        request_timeout_s=config.request_timeout_s,
    )
    context.metadata["block_tokens"] = str(config.kv.block_tokens)
    if config.role == "prefill":
        prefill = await provider.start_prefill(context.actors, options)
        context.metadata["cache_tokens"] = str(prefill.cache_tokens)
        context.metadata["stored_tokens"] = str(getattr(prefill, "stored_tokens", 0))
        context.server.add_service(
            rpc.add_PrefillServiceServicer_to_server,
            PrefillServicer(prefill),
            full_name="forge.v1.PrefillService",
        )
        return prefill
    decode = await provider.start_decode(context.actors, options)
    context.metadata["cache_tokens"] = str(decode.cache_tokens)
    context.metadata["capacity"] = str(decode.capacity)
    context.server.add_service(
        rpc.add_DecodeServiceServicer_to_server,
        DecodeServicer(decode, context.channels, silence_s=_FETCH_KV_SILENCE_S),
        full_name="forge.v1.DecodeService",
    )
    return decode


def _kv_store(kv: KvSettings) -> KvStoreOptions | None:
    if not kv.store_dir:
        return None
    return KvStoreOptions(
        directory=kv.store_dir,
        max_bytes=kv.store_mib * _MIB,
        host_bytes=kv.store_host_mib * _MIB,
        block_tokens=kv.store_block_tokens,
    )
