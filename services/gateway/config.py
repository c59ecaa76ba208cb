"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from forge.runtime.config import Port, ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """Serves agents: OpenAI's and Anthropic's protocols over HTTP, and gRPC."""

    model_path: str = ""
    """Model directory: tokenizer.json, chat template, generation_config.json."""
    model_name: str = ""
    """Name agents call the model by; empty: the directory's name."""
    model_aliases: tuple[str, ...] = ("policy",)
    """Further names it answers to; '*' answers to any."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Longest context, prompt and answer; 0: what the model's config.json says."""
    tool_format: str = "auto"
    """How the model writes tool calls: hermes, qwen3_coder, glm, minimax_m2, kimi_k2, deepseek_v3,
    deepseek_v31, mistral, mistral_v11, llama3_json, pythonic, react, plain (none), or a package's;
    auto: as its chat template does."""
    reasoning_format: str = "auto"
    """How the model sets off reasoning: think, think_close (only the end is written),
    mistral_think, none, a package's, or two tags with a space between; auto: as its chat template
    does."""
    http_port: Port = 0
    """HTTP port; 0 takes a free one."""
    max_body_mib: Annotated[float, Meta(ge=0.001)] = 32.0
    """Largest HTTP request body."""
    max_calls: Annotated[int, Meta(ge=1)] = 4096
    """Calls in flight, over all sessions."""
    max_calls_per_session: Annotated[int, Meta(ge=1)] = 64
    """Calls in flight in one session."""
    max_sessions: Annotated[int, Meta(ge=1)] = 100_000
    """Sessions held in memory."""
    max_session_mib: Annotated[float, Meta(ge=1)] = 1024.0
    """Memory of all sessions; beyond it those longest unused leave memory, as after idle_s."""
    idle_s: Annotated[float, Meta(ge=0)] = 600.0
    """A session without a call for this time leaves memory; its next call reads the pool."""
    max_backlog_mib: Annotated[float, Meta(ge=1)] = 256.0
    """Turns not yet durable, per pool shard, before calls are refused."""
    sample_timeout_s: Annotated[float, Meta(ge=1)] = 1800.0
    """Longest time to sample one answer."""
    retry_for_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long a call waits for a router to come back."""
    pool_timeout_s: Annotated[float, Meta(ge=0.1)] = 30.0
    """Deadline of one call to the pool."""
