"""Wiring of a prefill or decode instance, or of one that does both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from forge.runtime import weights
from forge.runtime.process.drain import serve_drain
from forge.runtime.process.gpu_watch import watch_gpus
from forge.runtime.process.service import ServiceContext
from forge.runtime.weights.bulk import BulkServer
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.config import InferenceConfig, KvSettings
from services.inference.engines.base import (
    CacheReports,
    DecodeEngine,
    Engine,
    PrefillEngine,
)
from services.inference.engines.provider import EngineOptions, KvStoreOptions
from services.inference.engines.registry import start_both, start_decode, start_prefill
from services.inference.worker.broken_answers import note_broken
from services.inference.worker.engine_dtype import computed_type, engine_dtype
from services.inference.worker.service import CacheServicer, DecodeServicer, PrefillServicer
from services.inference.worker.weights.follower import WeightFollower
from services.inference.worker.weights.frozen_weights import load_frozen
from services.inference.worker.worker_stream import WorkerServicer

_FETCH_KV_SILENCE_S = 30.0
"""Longest silence in a fetch of keys and values; then another worker prefills the request."""
_LANDING_SHARE = 1 / 8
"""Memory for prompts that arrive while they are computed, as a share of kv.mib; on top of it."""
_MIB = 1 << 20


async def start_role(context: ServiceContext) -> Callable[[], Awaitable[None]]:
    """Start the engine, add its servicers, load frozen weights or follow the policy's; return the
    wait for the last request."""
    watch_gpus(context, device=context.config.device)
    engine, stream = await _start_engine(context)
    context.metadata["capabilities"] = engine.capabilities.encode()
    _report_cache(context, engine)
    serve_drain(context, running=lambda: engine.status().running)
    if context.config.weights == "frozen":
        await load_frozen(context, engine)
        return partial(_drain, engine, stream)
    follower = WeightFollower(context, engine, policy=context.config.policy)
    bulk = BulkServer(context.security, context.config.bulk, host=context.config.host)
    context.undo.callback(bulk.close)
    context.server.add_service(
        rpc.add_WeightServiceServicer_to_server,
        weights.WeightServicer(lambda: follower.weights, arriving=follower.relay, bulk=bulk),
        full_name=weights.FULL_NAME,
    )
    # Not in discovery until it has weights.
    context.ready = False
    context.keep_running(follower.run(), name="weights")
    return partial(_drain, engine, stream)


async def _drain(engine: Engine, stream: WorkerServicer) -> None:
    """Serve routers that do not know yet that this worker leaves, until none has work for it."""
    try:
        await engine.idle()
    finally:
        stream.drain()


async def _start_engine(context: ServiceContext) -> tuple[Engine, WorkerServicer]:
    config: InferenceConfig = context.config
    options = EngineOptions(
        model_path=config.model_path,
        dtype=engine_dtype(config.dtype, device=config.device),
        device=config.device,
        context_tokens=config.context_tokens,
        threads=config.torch_threads,
        block_tokens=config.kv.block_tokens,
        cache_bytes=config.kv.cache_mib * _MIB,
        kv_bytes=config.kv.mib * _MIB,
        pass_tokens=config.pass_tokens,
        max_running=config.max_running,
        kv_store=_kv_store(config.kv),
        recompute_on_update=config.kv.on_update == "recompute",
        draft_tokens=config.speculation.most_drafts,
        adaptive_drafts=config.speculation.adaptive,
        request_timeout_s=config.request_timeout_s,
        settings=getattr(config, config.engine, None),
        extra=config.options_of_engine(),
    )
    context.metadata["dtype"] = computed_type(
        config.dtype, device=config.device, model_path=config.model_path
    )
    context.metadata["block_tokens"] = str(config.kv.block_tokens)
    if config.role == "both":
        both = await start_both(config.engine, context.actors, options)
        context.metadata["role"] = "both"
        context.metadata["prefills_in_decode"] = "1"
        reads = _serve_prefill(context, both)
        samples = _serve_decode(context, both, local=both)
        return both, _serve_stream(context, prefill=reads, decode=samples)
    if config.role == "prefill":
        prefill = await start_prefill(config.engine, context.actors, options)
        return prefill, _serve_stream(context, prefill=_serve_prefill(context, prefill))
    decode = await start_decode(config.engine, context.actors, options)
    return decode, _serve_stream(context, decode=_serve_decode(context, decode))


def _serve_stream(
    context: ServiceContext,
    *,
    prefill: PrefillServicer | None = None,
    decode: DecodeServicer | None = None,
) -> WorkerServicer:
    context.metadata["worker_stream"] = "1"
    servicer = WorkerServicer(prefill=prefill, decode=decode)
    context.server.add_service(
        rpc.add_WorkerServiceServicer_to_server, servicer, full_name="forge.v1.WorkerService"
    )
    return servicer


def _report_cache(context: ServiceContext, engine: Engine) -> None:
    reports: CacheReports | None = getattr(engine, "cache_reports", None)
    if reports is not None:
        context.metadata["cache_reports"] = "1"
        context.server.add_service(
            rpc.add_CacheServiceServicer_to_server,
            CacheServicer(reports),
            full_name="forge.v1.CacheService",
        )


def _serve_prefill(context: ServiceContext, engine: PrefillEngine) -> PrefillServicer:
    context.metadata["cache_tokens"] = str(engine.cache_tokens)
    context.metadata["stored_tokens"] = str(getattr(engine, "stored_tokens", 0))
    servicer = PrefillServicer(engine, on_broken=partial(note_broken, context))
    context.server.add_service(
        rpc.add_PrefillServiceServicer_to_server, servicer, full_name="forge.v1.PrefillService"
    )
    return servicer


def _serve_decode(
    context: ServiceContext, engine: DecodeEngine, *, local: PrefillEngine | None = None
) -> DecodeServicer:
    context.metadata["cache_tokens"] = str(engine.cache_tokens)
    context.metadata["capacity"] = str(engine.capacity)
    servicer = DecodeServicer(
        engine,
        context.channels,
        silence_s=_FETCH_KV_SILENCE_S,
        landing_bytes=int(context.config.kv.mib * _MIB * _LANDING_SHARE),
        local=local,
        on_broken=partial(note_broken, context),
    )
    context.server.add_service(
        rpc.add_DecodeServiceServicer_to_server, servicer, full_name="forge.v1.DecodeService"
    )
    return servicer


def _kv_store(kv: KvSettings) -> KvStoreOptions | None:
    if not kv.store_dir:
        return None
    return KvStoreOptions(
        directory=kv.store_dir,
        max_bytes=kv.store_mib * _MIB,
        host_bytes=kv.store_host_mib * _MIB,
        block_tokens=kv.store_block_tokens,
    )
