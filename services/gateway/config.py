"""Settings of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from forge.core.errors import InvalidArgument
from forge.runtime.settings import Port, ServiceConfig
from forge.runtime.settings.agreed import agreed_model, agreed_settings, agreed_template
from services.gateway.named_models import NamedModel, check_models

ImageSetting = Literal["placeholder", "refuse", "pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model as agents see it."""

    name: str = ""
    """Name of the model for agents; empty: the name of its directory."""
    aliases: tuple[str, ...] = ("policy",)
    """Other names that requests may use; '*': any name."""
    tool_format: str = "auto"
    """Format of the model's tool calls: hermes, hermes_compact, qwen3_coder, glm, minimax_m2,
    kimi_k2, deepseek_v3, deepseek_v31, mistral, mistral_v11, llama3_json, pythonic, react, harmony,
    plain (none), or a package's; auto: detected from the chat template."""
    reasoning_format: str = "auto"
    """Format of the model's reasoning: think, think_close (only the end tag is written),
    mistral_think, none, a package's, or two tags with a space between; auto: detected from the chat
    template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The HTTP listener."""

    port: Port = 0
    """HTTP port; 0 takes a free one."""
    shared_port: Port = 0
    """Port that all gateways of this host share, for agents with one fixed address; a gateway hands
    each connection to the process of its session. Only without TLS. 0: none."""
    max_body_mib: Annotated[float, Meta(ge=0.001)] = 32.0
    """Largest HTTP request body."""
    max_bodies_mib: Annotated[float, Meta(ge=1)] = 4096.0
    """Size of all request bodies in memory; above it requests get 429. A body stays in memory until
    its request ends."""
    max_session_bodies_mib: Annotated[float, Meta(ge=1)] = 256.0
    """Size of the request bodies of one session in memory; above it its requests get 429."""
    images: ImageSetting = "placeholder"
    """Treatment of images in messages: placeholder (a text with type and size stands for each),
    refuse (400), pass (to the engine; none serves images yet)."""
    web_search: Literal["omit", "refuse"] = "omit"
    """Treatment of the hosted tool web_search in Responses requests, which cannot run here:
    omit (a response header and a metric say so), refuse (400)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """Limits of each tenant, the user of a task; every gateway counts for itself."""

    max_calls: Annotated[int, Meta(ge=0)] = 0
    """Model calls in flight of one tenant; 0: no limit of its own."""
    max_calls_of: Mapping[str, Annotated[int, Meta(ge=1)]] = field(default_factory=dict)
    """max_calls of single tenants, by user."""
    calls_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Model calls per second of one tenant; 0: no limit."""
    calls_per_s_of: Mapping[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """calls_per_s of single tenants, by user."""
    burst_calls: Annotated[int, Meta(ge=1)] = 100
    """Model calls that a tenant may begin at once after a pause."""
    max_request_mib: Annotated[float, Meta(ge=0)] = 0.0
    """Largest request of one tenant; 0: no limit of its own."""
    max_request_mib_of: Mapping[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """max_request_mib of single tenants, by user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """The connections of the HTTP listener."""

    max_connections: Annotated[int, Meta(ge=1)] = 16_384
    """Open connections; further ones get 503."""
    max_per_address: Annotated[int, Meta(ge=1)] = 8192
    """Open connections of one peer address; all agents behind one proxy share its address."""
    header_timeout_s: Annotated[float, Meta(ge=0.1)] = 30.0
    """Longest time to receive a request header, also the first one of a connection."""
    body_timeout_s: Annotated[float, Meta(ge=0.1)] = 120.0
    """Longest time to receive a request body; then 408."""
    write_timeout_s: Annotated[float, Meta(ge=0.1)] = 600.0
    """Longest time in which a client takes no byte of an answer that waits for it; then its
    connection ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Model calls in flight."""

    max_calls: Annotated[int, Meta(ge=1)] = 4096
    """Model calls in flight, over all sessions."""
    max_calls_per_session: Annotated[int, Meta(ge=1)] = 64
    """Model calls in flight in one session."""
    encode_threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Threads that render and tokenize long prompts; a session uses one at a time, and tenants take
    turns."""
    sample_timeout_s: Annotated[float, Meta(ge=1)] = 1800.0
    """Longest time to sample one answer."""
    retry_for_s: Annotated[float, Meta(ge=0)] = 120.0
    """Time for which a call waits for a router and retries on others: long enough for a router to
    start again. Keep it below router.worker_wait_s, after which a router finds no worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBounds:
    """Bounds of sampling parameters for sessions with the policy bound."""

    min_temperature: Annotated[float, Meta(gt=0, le=100)] = 0.5
    """Least temperature; a greedy answer cannot be trained."""
    max_temperature: Annotated[float, Meta(gt=0, le=100)] = 1.5
    """Highest temperature."""
    min_top_p: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Least top_p."""
    min_top_k: Annotated[int, Meta(ge=1)] = 20
    """Least top_k, if a request sets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsSettings:
    """Sessions in memory."""

    max_sessions: Annotated[int, Meta(ge=1)] = 100_000
    """Sessions in memory."""
    max_session_mib: Annotated[float, Meta(ge=1)] = 1024.0
    """Memory of all sessions; above it the least recently used sessions leave memory."""
    idle_s: Annotated[float, Meta(ge=0)] = 600.0
    """Idle time after which a session leaves memory; its next call rebuilds it from the pool."""
    max_backlog_mib: Annotated[float, Meta(ge=1)] = 256.0
    """Largest size of the turns of one pool shard that are not yet durable; above it the gateway
    refuses calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """Serves agents: OpenAI's and Anthropic's protocols over HTTP, and gRPC."""

    model_path: str = ""
    """Model directory: tokenizer.json, chat template, generation_config.json."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Longest context, prompt and answer; 0: the value in the model's config.json."""
    pool_timeout_s: Annotated[float, Meta(ge=0.1)] = 30.0
    """Deadline of one call to the pool."""
    pool_wait_s: Annotated[float, Meta(ge=0)] = 2.0
    """Longest wait of a call for a pool shard that no instance serves. If the shard served this
    gateway within the last pool_timeout_s, the call waits that long instead: the shard may
    restart."""
    record_experts: bool = False
    """Record the experts that a mixture of experts chose for each token, for the trainer's
    routing_replay. Each new token of a turn takes layers x experts per token bytes."""
    models: Mapping[str, NamedModel] = field(default_factory=dict)
    """Other models than the policy, by name: [models.NAME]; docs/models.md has examples."""
    model: ModelSettings = field(default_factory=ModelSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    calls: CallSettings = field(default_factory=CallSettings)
    sampling: SamplingBounds = field(default_factory=SamplingBounds)
    tenants: TenantSettings = field(default_factory=TenantSettings)
    sessions: SessionsSettings = field(default_factory=SessionsSettings)

    def validate(self) -> None:
        """Raises `InvalidArgument` for bounds that exclude every temperature, and wrong models."""
        check_models(self.models, (*filter(None, (self.model.name,)), *self.model.aliases))
        low, high = self.sampling.min_temperature, self.sampling.max_temperature
        if low > high:
            raise InvalidArgument(
                f"sampling.min_temperature = {low} is above sampling.max_temperature = {high}"
            )

    def agreed(self) -> Mapping[str, str]:
        """Agents may call any gateway: all serve the same models in one way."""
        values = (
            agreed_settings("gateway", self, "context_tokens", "model", "sampling")
            | agreed_template("gateway", self.model_path)
            | agreed_model(self.model_path)
        )
        for name, model in self.models.items():
            # Files may have another path on each host.
            plain = replace(model, model_path="", key_file="")
            values[f"gateway/models.{name}"] = msgspec.json.encode(plain).decode()
            if model.served_here:
                path = model.model_path or self.model_path
                values |= agreed_model(path, scope=model.group or name)
        return values
