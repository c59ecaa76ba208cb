"""The engine vLLM on the event loop; vLLM computes in a process of its own.

Owns which weights are in service. New ones are checked, loaded while vLLM is paused, and tried by
their probe; tokens of a version on trial leave the engine only after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.v1.engine.exceptions import EngineDeadError

from forge.core.errors import ForgeError, ResourceExhausted, Unavailable, UnsupportedByEngines
from forge.core.named_tensor import NamedTensor
from forge.core.routes import RouteShape
from forge.core.token_columns import int32_array
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.telemetry import log
from services.inference.engines.aggregated import part
from services.inference.engines.base import ModelLimits, Piece, Probe, Prompt
from services.inference.engines.capabilities import Capabilities, Role
from services.inference.engines.grammar_masks import Grammars
from services.inference.engines.meta_model import meta_model
from services.inference.engines.metrics import REFUSED_HAND_OFFS
from services.inference.engines.model_limits import read_limits
from services.inference.engines.probes import (
    check_probe,
    check_published,
    computed_before_a_token,
    probe_ids,
)
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm import arguments, models, sampling
from services.inference.engines.vllm.abilities import capabilities_of
from services.inference.engines.vllm.cache_events import (
    REPORT_REUSED,
    CacheEvents,
    CacheFollower,
    EventSockets,
)
from services.inference.engines.vllm.exchange.expert_rows import ExpertRows
from services.inference.engines.vllm.exchange.kv_format import Layout
from services.inference.engines.vllm.hang_watch import Limits
from services.inference.engines.vllm.leg import Leg, to_piece, versions_in
from services.inference.engines.vllm.process_watch import ProcessWatch
from services.inference.engines.vllm.processes import Processes
from services.inference.engines.vllm.staging import Checkpoint, Staged, copied

_REREAD_AFTER_S = 0.05
_EXACT_TOLERANCE = 2e-4
"""Largest mean error of the probe in float32 over values published in 16 bits, in nats, on a
CPU."""


class VllmEngine:
    """An `AggregatedEngine`."""

    def __init__(
        self,
        processes: Processes,
        checkpoint: Checkpoint,
        follower: CacheFollower,
        limits: ModelLimits,
        options: EngineOptions,
        capabilities: Capabilities,
        routes: RouteShape | None,
        watch: ProcessWatch,
    ) -> None:
        self.limits = limits
        self.capabilities = capabilities
        self._routes = routes
        self.capacity = options.max_running
        self.version = 0
        self._processes = processes
        self._llm = processes.llm
        self._follower = follower
        self._cached = follower.events
        self.cache_reports = self._cached.reports
        self._timeout_s = options.request_timeout_s
        self._on_cpu = options.device == "cpu"
        self._recompute = options.recompute_on_update
        self._checkpoint = checkpoint
        self._grammars = Grammars(options.model_path, vocabulary=limits.vocabulary)
        self._end_token = _end_token(options.model_path)
        self._served: Staged | None = None
        self._loads = count()
        self._loaded = 0
        """Version of the weights in vLLM, perhaps on trial."""
        self._salt = ""
        """Marks keys and values in the prefix cache: those of other weights are not found."""
        self._refused: set[int] = set()
        self._trials: dict[int, asyncio.Future[None]] = {}
        self._update = asyncio.Lock()
        self._watch = watch

    @classmethod
    async def start(
        cls, actors: ActorSystem, options: EngineOptions, role: Role = "both"
    ) -> VllmEngine:
        """Start vLLM's process, without weights. Raises ConfigError, Unavailable if the process
        ends."""
        limits = read_limits(options.model_path, context_tokens=options.context_tokens)
        models.check_model(options.model_path, device=options.device, dtype=options.dtype)
        arguments.prepare_environment(options)
        sockets = EventSockets()
        follower = CacheFollower(sockets, CacheEvents(block_tokens=options.block_tokens))
        processes = None
        try:
            chosen = arguments.engine_arguments(options, limits, role=role, events=sockets.config())
            # Blocks the event loop while vLLM loads: its sockets belong to the loop that they are
            # made on, and the worker serves nothing before.
            processes = Processes.start(AsyncEngineArgs(**chosen))
            model = meta_model(options.model_path)
            able = capabilities_of(options, role)
            checkpoint = Checkpoint(
                model, served=processes.llm.model_config.dtype, drafts=able.drafts
            )
            await processes.prepare(checkpoint, model=options.model_path, able=able)
            routes = await processes.record_experts() if able.routed_experts else None
            able = replace(able, routed_experts=routes is not None)
            await follower.start()
        except BaseException:
            await follower.close()
            if processes is not None:
                processes.llm.shutdown()
            raise
        silence = Limits(
            silence_s=arguments.settings_of(options).silence_s,
            working_s=options.request_timeout_s,
            cpu_counts=options.device == "cpu",
        )
        watch = await ProcessWatch.start(actors, processes, silence)
        log.info("vllm_started", capabilities=able.described())
        return cls(processes, checkpoint, follower, limits, options, able, routes, watch)

    @property
    def cache_tokens(self) -> int:
        """See `Engine`: the blocks of running requests and of cached prefixes are the same."""
        cache = self._llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    async def close(self) -> None:
        """Stop vLLM's process."""
        await self._watch.close()
        self._grammars.close()
        await self._follower.close()
        self._llm.shutdown()

    async def kv_layout(self) -> Layout:
        """Return the layers of the keys and values; in the roles prefill and decode."""
        (layers,) = await self._llm.collective_rpc("forge_kv_layout")
        return tuple((name, dtype, tuple(shape)) for name, dtype, shape in layers)

    def is_of_one_load(self, leg: Leg) -> bool:
        """Whether the same weights have been loaded since the leg began: then all its keys and
        values are theirs. A request that waits in vLLM during a load reuses blocks of the older
        weights, although the new ones compute the rest."""
        return leg.salt == self._salt

    @property
    def block_tokens(self) -> int:
        """Tokens of one of vLLM's blocks."""
        return int(self._llm.vllm_config.cache_config.block_size)

    async def generate(self, prompt: Prompt, leg: Leg | None = None) -> AsyncGenerator[Piece, None]:
        """See `AggregatedEngine`. `leg`: None for a request that begins and ends here."""
        leg = leg or Leg()
        params = await self._params(prompt, leg)
        begun, collector, sampled, finished = self._loaded, None, 0, False
        leg.rows = self._expert_rows(prompt)
        try:
            collector = await self._begin(prompt, params, leg)
            # The state knows the version of each token; it stays when the request has ended.
            state = self._llm.output_processor.request_states.get(collector.request_id)
            while not finished:
                output = await self._next(collector)
                finished, leg.returned = output.finished, output.kv_transfer_params
                versions = versions_in(output.outputs[0], state, sampled)
                await self._tried(versions)
                new = len(versions)
                sampled += new
                piece = to_piece(output, prompt, versions, sampled=sampled, rows=leg.rows)
                kept = versions.count(begun) if self._recompute else new
                if kept < new:
                    if kept:
                        yield replace(piece, tokens=part(piece.tokens, 0, kept), finish=None)
                    raise self._read_again(prompt)
                if new or piece.finish:
                    yield piece
        except EngineDeadError as error:
            finished = True
            raise Unavailable(self._processes.why_ended()) from error
        finally:
            leg.close()
            if collector is not None:
                collector.close()
                if not finished:
                    await self._llm.abort(collector.request_id, internal=True)

    async def _next(self, collector: Any) -> Any:
        """Return the next output of a request."""
        output = collector.get_nowait()
        if output is None:
            with self._watch.progress.request():
                output = await collector.get()
        self._watch.progress.note()
        return output

    def _expert_rows(self, prompt: Prompt) -> ExpertRows | None:
        start = prompt.sampling.routes_from
        if self._routes is None or start is None:
            return None
        return ExpertRows(self._routes, start=start)

    async def _params(self, prompt: Prompt, leg: Leg) -> SamplingParams:
        """Return vLLM's parameters. Raises Unavailable before the first weights, and the errors of
        a grammar that does not compile or does not match the answer."""
        if not self.version:
            raise Unavailable("the engine vllm has no weights yet", retry_after_s=1.0)
        grammar = prompt.sampling.grammar
        if grammar is not None and grammar.matched_tokens:
            # vLLM's process takes it for granted that the answer matches so far.
            await self._grammars.matcher(prompt)
        return sampling.to_params(
            prompt,
            self.limits,
            end_token=self._end_token,
            first=leg.first,
            shares=self.capabilities.shares,
        )

    def _read_again(self, prompt: Prompt) -> ResourceExhausted:
        """The error of a request whose keys and values are of other weights than its next token."""
        reread = f"request {prompt.request_id} is read again by weights"
        return ResourceExhausted(f"{reread} {self._loaded}", retry_after_s=_REREAD_AFTER_S)

    async def _begin(self, prompt: Prompt, params: SamplingParams, leg: Leg) -> Any:
        ids = list(int32_array(prompt.ids))
        extra = params.extra_args or {}
        if self._cached.reports_reused:
            extra |= REPORT_REUSED
        if leg.rows is not None:
            extra |= leg.rows.extra_args()
        if leg.version not in (0, self._loaded):
            # Under the salt of these weights they would reach other requests, too.
            REFUSED_HAND_OFFS.labels("version").inc()
        elif leg.transfer:
            extra |= {"kv_transfer_params": leg.transfer}
        params.extra_args = extra or None
        leg.salt = self._salt
        inputs = TokensPrompt(prompt_token_ids=ids, cache_salt=leg.salt)
        try:
            return await self._llm.add_request(prompt.request_id, inputs, params)
        except EngineDeadError as error:
            raise Unavailable(self._processes.why_ended()) from error
        except (VLLMClientError, ValueError) as error:
            raise UnsupportedByEngines(f"the engine vllm refuses the request: {error}") from error

    async def _tried(self, versions: list[int]) -> None:
        """Wait for the trial of the newest version. Raises Unavailable if it was refused."""
        newest = max(versions, default=0)
        trial = self._trials.get(newest)
        if trial is not None:
            await asyncio.shield(trial)
        if newest in self._refused:
            raise Unavailable(f"weights {newest} were refused after they sampled a token")

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """See `Engine`. When vLLM fails in the middle of an update, its process is ended. Raises
        ResourceExhausted without memory for the copy."""
        async with self._update:
            probe_ids(probe, self.limits, version=version)
            staged = await asyncio.to_thread(self._checkpoint.stage, tensors, version=version)
            trial = self._trials[version] = asyncio.get_running_loop().create_future()
            salt = self._salt
            try:
                await self._serve(staged)
                await self._try(staged, probe)
                self._refused.discard(version)
                self._served, self.version = staged, version
                await self._log_drafts()
            except BaseException as error:
                if self._salt != salt:
                    self._refused.add(version)
                    if isinstance(error, ForgeError):
                        await self._return_to_served()
                raise
            finally:
                trial.set_result(None)
                del self._trials[version]

    async def _return_to_served(self) -> None:
        """Load the weights before those on trial again."""
        if self._served is None or self._watch.lost:
            return
        try:
            await self._serve(self._served)
        except ResourceExhausted as error:
            self._watch.end(f"vLLM has refused weights {self._loaded} and cannot return: {error}")

    async def _log_drafts(self) -> None:
        if self.capabilities.drafts:
            with self._watch.progress.update():
                found = await self._processes.call("forge_drafts")
            drafted, accepted = found[0]
            log.info("drafts_verified", drafted=drafted, accepted=accepted)

    async def _serve(self, staged: Staged) -> None:
        """Load weights between two steps; requests in flight continue under them."""
        async with copied(staged) as update:
            with self._watch.progress.update():
                await self._swap(staged, WeightTransferUpdateRequest(update_info=update))

    async def _swap(self, staged: Staged, update: WeightTransferUpdateRequest) -> None:
        llm = self._llm
        try:
            async with asyncio.timeout(self._timeout_s):
                await llm.pause_generation(mode="keep", clear_cache=False)
                # New for each load, since a refused version gives way to an older one again.
                self._loaded = staged.version
                self._salt = f"{staged.version} {next(self._loads)}"
                self._cached.begin(self._salt)
                await llm.start_weight_update()
                await llm.update_weights(update)
                await llm.finish_weight_update(weight_version=str(staged.version))
                await llm.resume_generation()
        except Exception as error:
            # Some layers may have new weights and some old ones: nothing of it may serve.
            dead = isinstance(error, EngineDeadError)
            found = self._processes.why_ended() if dead else str(error)
            failed = f"vLLM failed to load weights {staged.version}: {found}"
            log.error("vllm_update_failed", weight_version=staged.version, error=found)
            self._watch.end(failed)
            raise Unavailable(failed) from error

    async def _try(self, staged: Staged, probe: Probe | None) -> None:
        """Compute the probe by the new weights. Raises UnfitWeights, BrokenWeights,
        Unavailable if vLLM ends."""
        ids, probe = computed_before_a_token(probe, self.limits, version=staged.version)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        inputs = TokensPrompt(prompt_token_ids=list(ids), cache_salt=f"probe {staged.version}")
        name = f"probe-{staged.version}"
        outputs = self._llm.generate(inputs, params, name)
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(outputs):
                with self._watch.progress.request():
                    *_, last = [output async for output in outputs]
        except EngineDeadError as error:
            raise Unavailable(self._processes.why_ended()) from error
        except TimeoutError as error:
            late = f"vLLM has not computed the probe of weights {staged.version} in time"
            self._watch.end(late)
            raise Unavailable(late) from error
        entries = zip(ids[1:], last.prompt_logprobs[1:], strict=True)
        found = [entry[token].logprob for token, entry in entries]
        check_probe(probe, found, version=staged.version, rounded=staged.rounded)
        # Not on a GPU: errors of right weights were not measured there.
        if staged.as_published and self._on_cpu:
            check_published(probe, found, version=staged.version, tolerance=_EXACT_TOLERANCE)


def _end_token(model_path: str) -> int | None:
    """The token with which the tokenizer ends a text; None without a tokenizer."""
    if not (Path(model_path) / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    found: int | None = AutoTokenizer.from_pretrained(model_path).eos_token_id
    return found
