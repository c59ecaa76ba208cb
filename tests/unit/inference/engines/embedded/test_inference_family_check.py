"""Families of models: served exactly, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from benchmarks.support.inference.model_families import Family, families
from forge.core.errors import ConfigError
from services.inference.engines.embedded.family_check import TOLERANCE, check, examine

FAMILIES: dict[str, Family] = {one.name: one for one in families()}


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "gpt2",
        "mixtral",
        "gemma3_text",
        "gemma3",
        "qwen2, windows",
        "opt",
        "gemma2",
        "gpt_oss",
        "granite_swa",
        "deepseek_v3",
        "minicpm3",
        "gemma4_text",
        "qwen3_5_text",
        "lfm2, convolutions",
        "nemotron_h",
        "jamba",
        "kimi_linear",
        "zamba2",
        "minimax",
    ],
)
def test_served_family_is_exact(name: str) -> None:
    """Log-probs and the likeliest tokens are those of the model's own forward."""
    verdict = examine(FAMILIES[name].config())
    assert verdict.refusal == ""
    assert verdict.error is not None and verdict.error < TOLERANCE / 10
    assert verdict.greedy_equal


def test_check_counts_no_drafts() -> None:
    """The metrics of a worker are those of its requests."""
    names = ("forge_inference_drafted_tokens_total", "forge_inference_accepted_drafts_total")

    def counts() -> list[float | None]:
        return [REGISTRY.get_sample_value(name, {"head": "1"}) for name in names]

    before = counts()
    examine(FAMILIES["llama"].config())
    assert counts() == before


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("llama4_text", "differ from its own forward by"),
        ("phi3, longrope rotary", "a prompt of 3 tokens beside longer ones"),
        ("llama, dynamic rotary", "differ from its own forward by"),
        ("recurrent_gemma", "none of this model's layers"),
        ("bart", "differ from its own forward by"),
    ],
)
def test_family_that_would_be_served_wrongly_is_refused(name: str, difference: str) -> None:
    """The reason names the model and the first difference."""
    verdict = examine(FAMILIES[name].config())
    assert difference in verdict.refusal
    assert "\n" not in verdict.refusal


@pytest.mark.parametrize(
    ("name", "reason", "place"),
    [
        (
            "nemotron",
            "do not hand the engine's arguments on to their attention",
            "TypeError in modeling_nemotron.py, line ",
        ),
        (
            "deepseek_v32",
            "fail without a cache of transformers",
            "TypeError in modeling_deepseek_v32.py, line ",
        ),
        ("whisper", "gives something else than the engine asks for", "ValueError in prefill.py"),
    ],
)
def test_family_whose_code_fails_is_refused_in_plain_words(
    name: str, reason: str, place: str
) -> None:
    """The reason and the place in the code, without Python's own text."""
    refusal = examine(FAMILIES[name].config()).refusal
    assert reason in refusal
    assert refusal.endswith(")") and f"({place}" in refusal
    assert not any(text in refusal for text in ("kv_pass", "NoneType", "zip"))


def test_refusal_names_the_context_that_can_be_served(tmp_path: Path) -> None:
    """A rotary embedding that changes beyond a length is exact below it."""
    FAMILIES["phi3, longrope rotary"].config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"with context_tokens = 4096 or less it can$"):
        check(str(tmp_path), context_tokens=0)
    check(str(tmp_path), context_tokens=4096)
