"""Fields of OpenAI's requests, and of similar servers, that this gateway does not use."""

from __future__ import annotations

from services.gateway.http.request_fields.parameters import Fields

_NOT_SAMPLED = "the recorded distribution would differ from the sampled one"
_ENGINE = "no engine of this release has it"
_BOOKKEEPING = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "prediction", "priority", "request_id", "cache_salt"}
    | {"guided_decoding_backend"}
)
_REFUSED = {
    "use_beam_search": (_ENGINE, ()),
    "length_penalty": (_ENGINE, (1,)),
    "allowed_token_ids": (_NOT_SAMPLED, ()),
    "bad_words": (_NOT_SAMPLED, ()),
    "logits_processors": (_NOT_SAMPLED, ()),
    "ignore_eos": ("a turn ends with the model's own stop token; use min_tokens", ()),
    "include_stop_str_in_output": ("a stop string is not a part of the answer", ()),
    "no_stop_trim": ("a stop string is not a part of the answer", ()),
    "stop_regex": ("use stop", ()),
    "skip_special_tokens": ("use return_token_ids", (True,)),
    "spaces_between_special_tokens": ("use return_token_ids", (True,)),
    "truncate_prompt_tokens": ("only agents change contexts", ()),
    "prompt_logprobs": ("log-probs are those of sampled tokens", (0,)),
    "guided_whitespace_pattern": ("white space in JSON is bounded, not chosen", ()),
    "regex": ("use guided_regex", ()),
    "ebnf": ("use guided_grammar", ()),
    "kv_transfer_params": (_ENGINE, ()),
    "vllm_xargs": (_ENGINE, ()),
    "lora_path": (_ENGINE, ()),
}

CHAT = Fields(
    harmless=_BOOKKEEPING,
    ignored={"verbosity": ()},
    refused=_REFUSED
    | {
        "add_special_tokens": ("the chat template writes all special tokens", ()),
        "documents": ("send them in messages", ()),
        "chat_template": ("prompts have the served model's template", ()),
        "include_reasoning": ("reasoning is a part of the answer", (True,)),
        "separate_reasoning": ("model.reasoning_format decides", (True,)),
        "mm_processor_kwargs": (_ENGINE, ()),
        "media_io_kwargs": (_ENGINE, ()),
        "audio": ("the model answers in text", ()),
    },
)
"""Fields of chat completions."""

COMPLETIONS = Fields(
    harmless=_BOOKKEEPING,
    refused=_REFUSED
    | {
        "best_of": ("use n, and choose", (1,)),
        "suffix": (_ENGINE, ()),
        "prompt_embeds": (_ENGINE, ()),
        "response_format": ("use chat completions, or guided_json", ({"type": "text"},)),
    },
)
"""Fields of completions."""

RESPONSES = Fields(
    harmless=_BOOKKEEPING - {"metadata", "store", "prompt_cache_key"} | {"stream_options"},
    ignored={
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "logit_bias": (),
    },
    refused=_REFUSED,
)
"""Fields of responses."""
