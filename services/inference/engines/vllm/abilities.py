"""Capabilities that the engine vllm declares."""

from __future__ import annotations

from dataclasses import replace

from services.inference.engines.capabilities import Capabilities, Role
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm import arguments

CAPABILITIES = Capabilities(
    engine="vllm",
    roles=frozenset({"prefill", "decode", "both"}),
    update="in_flight",
    recomputes=True,
    draws="stream",
    cuts=True,
    min_tokens=True,
    penalties=True,
    grammars=frozenset({"json_schema", "regex", "lark"}),
    top_logprobs=arguments.MOST_TOP_LOGPROBS,
    cache_events=True,
    shares=True,
    resumes=frozenset({"grammar", "penalties"}),
    routed_experts=True,
)
"""Capabilities for a mixture of experts on a CPU, without drafts, in the role both; see
`capabilities_of`."""


def capabilities_of(options: EngineOptions, role: Role) -> Capabilities:
    """Return the abilities with these options."""
    if arguments.drafts(options):
        # Without the orders of `answer_logits` decode cannot begin with the token of prefill.
        able = replace(
            CAPABILITIES,
            shares=False,
            resumes=frozenset(),
            roles=frozenset({"both"}),
            drafts=arguments.settings_of(options).draft_tokens > 0,
        )
    else:
        able = CAPABILITIES
    able = replace(
        able,
        cache_events=arguments.caches_prefixes(options),
        routed_experts=arguments.records_experts(options, role),
    )
    if role == "both":
        return able
    return replace(able, hand_offs=frozenset({f"vllm_{arguments.settings_of(options).hand_off}"}))
