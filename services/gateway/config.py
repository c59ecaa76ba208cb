"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from forge.runtime.config import ServiceConfig, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """Serves agents: OpenAI's and Anthropic's protocols over HTTP, and gRPC."""

    model_path: str = setting(
        "", help="model directory: tokenizer.json, chat template, generation_config.json"
    )
    model_name: str = setting("", help="name agents call the model by; empty: the directory's name")
    model_aliases: tuple[str, ...] = setting(
        ("policy",), help="further names it answers to; '*' answers to any"
    )
    context_tokens: int = setting(
        0,
        help="longest context, prompt and answer; 0: what the model's config.json says",
        minimum=0,
    )
    tool_format: str = setting(
        "auto",
        help="how the model writes tool calls: hermes, qwen3_coder, glm, minimax_m2, kimi_k2, "
        "deepseek_v3, deepseek_v31, mistral, mistral_v11, llama3_json, pythonic, react, plain "
        "(none), or a package's; auto: as its chat template does",
    )
    reasoning_format: str = setting(
        "auto",
        help="how the model sets off reasoning: think, think_close (only the end is written), "
        "mistral_think, none, a package's, or two tags with a space between; auto: as its chat "
        "template does",
    )
    http_port: int = setting(0, help="HTTP port; 0 takes a free one", minimum=0, maximum=65535)
    max_body_mib: float = setting(32.0, help="largest HTTP request body", minimum=0.001)
    max_calls: int = setting(4096, help="calls in flight, over all sessions", minimum=1)
    max_calls_per_session: int = setting(64, help="calls in flight in one session", minimum=1)
    max_sessions: int = setting(100_000, help="sessions held in memory", minimum=1)
    max_session_mib: float = setting(
        1024.0,
        help="sessions held in memory, by size; the longest unused leave, as after idle_s",
        minimum=1,
    )
    idle_s: float = setting(
        600.0, help="a session unused for so long leaves memory; the pool brings it back", minimum=0
    )
    max_backlog_mib: float = setting(
        256.0, help="turns not yet durable, per pool shard, before calls are refused", minimum=1
    )
    sample_timeout_s: float = setting(1800.0, help="longest time to sample one answer", minimum=1)
    retry_for_s: float = setting(
        30.0, help="how long a call waits for a router to come back", minimum=0
    )
    pool_timeout_s: float = setting(30.0, help="deadline of one call to the pool", minimum=0.1)
