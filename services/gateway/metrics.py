"""Metrics of the gateway."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge, histogram

REQUESTS = counter(
    "forge_gateway_requests_total",
    "Calls by surface and HTTP or gRPC status.",
    ["surface", "status"],
)
REFUSED = counter(
    "forge_gateway_refused_total",
    "Refusals by limit: calls, session_calls, tenant_calls, tenant_rate, tenant_size, bodies, "
    "session_bodies, connections, address_connections, header_timeout, body_timeout, "
    "write_timeout.",
    ["limit"],
)
TURNS = counter("forge_gateway_turns_total", "Turns recorded, by finish reason.", ["finish"])
OTHER_TURNS = counter(
    "forge_gateway_other_model_turns_total",
    "Recorded answers of other models than the policy, by name.",
    ["model"],
)
OTHER_TOKENS = counter(
    "forge_gateway_other_model_tokens_total",
    "Tokens of the answers of other models than the policy, by the count of their engine or API.",
    ["model"],
)
OTHER_FAILURES = counter(
    "forge_gateway_external_failures_total",
    "Failed calls of external APIs, by model and reason: refused_key, rate_limit, refused, failed, "
    "unreachable, timeout, cut, too_large, busy.",
    ["model", "reason"],
)
CONTEXTS = counter(
    "forge_gateway_contexts_total",
    "Prompts by relation to earlier turns: continued = extends one, repeated = same messages as "
    "one, branched = extends none, first = no earlier turn, given = token ids in the request.",
    ["how"],
)
PROMPT_TOKENS = counter(
    "forge_gateway_prompt_tokens_total",
    "Prompt tokens, new or shared with an earlier turn.",
    ["kind"],
)
SHARED_TOKENS, NEW_TOKENS = PROMPT_TOKENS.labels("shared"), PROMPT_TOKENS.labels("new")
SAMPLED_TOKENS = counter("forge_gateway_sampled_tokens_total", "Tokens sampled and recorded.")
MALFORMED = counter(
    "forge_gateway_malformed_answers_total", "Answers with a tool call that did not parse."
)
REFUSED_TURNS = counter(
    "forge_gateway_refused_turns_total",
    "Turns that the pool refused permanently; their sessions cannot be sealed.",
)
CONTESTED_TURNS = counter(
    "forge_gateway_contested_turns_total",
    "Turns that got a new index, because another gateway had used the first one.",
)
UNENFORCED = counter(
    "forge_gateway_unenforced_strict_total",
    "Calls with strict tools, in a call syntax whose arguments no grammar can enforce.",
)
IMAGES = counter(
    "forge_gateway_images_total",
    "Images in requests: placeholder (a text stands for it in a recorded turn) or refused.",
    ["outcome"],
)
REPLACED_SURROGATES = counter(
    "forge_gateway_replaced_surrogates_total",
    "Lone surrogates in request bodies, replaced by U+FFFD.",
)
SAMPLING_CHANGES = counter(
    "forge_gateway_sampling_changes_total",
    "Sampling parameters in requests that the session's sampling policy replaced.",
    ["policy", "parameter"],
)
OMITTED_TOOLS = counter(
    "forge_gateway_omitted_tools_total",
    "Hosted tools that the gateway left out of requests, by type.",
    ["type"],
)
IGNORED_PARAMETERS = counter(
    "forge_gateway_ignored_parameters_total",
    "Request fields without effect, which the header X-Forge-Ignored lists; unknown: fields that "
    "the API does not have.",
    ["field"],
)
UPSTREAM_RETRIES = counter(
    "forge_gateway_upstream_retries_total", "Answers sampled again on another router."
)
SESSIONS = gauge("forge_gateway_sessions", "Sessions in memory.")
SESSION_BYTES = gauge("forge_gateway_session_bytes", "Approximate memory of all sessions.")
REBUILT = counter("forge_gateway_sessions_rebuilt_total", "Sessions rebuilt from the pool.")
CONNECTIONS = gauge("forge_gateway_connections", "Open HTTP connections.")
SHARED_CONNECTIONS = counter(
    "forge_gateway_shared_port_connections_total",
    "Connections to the shared port: kept, handed_over, received, or unknown (no session token).",
    ["result"],
)
BODY_BYTES = gauge("forge_gateway_body_bytes", "HTTP request bodies in memory.")
CALLS = gauge("forge_gateway_calls_in_flight", "Model calls in flight.")
BACKLOG = gauge(
    "forge_gateway_backlog_bytes",
    "Size of the turns that are not yet durable, by pool shard.",
    ["pool_shard"],
)
PREPARE_SECONDS = histogram(
    "forge_gateway_prepare_seconds",
    "Time from a decoded request to its prompt ids: context tree, template, tokenizer.",
)
