"""Every family of models is trained exactly, in whichever way, or refused: never silently wrong.

The whole table is `make families`; here are those of which each had a way to be wrong.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import families as command
from benchmarks.support.inference import finished_rows
from benchmarks.support.inference.finished_rows import FinishedRows, Row
from benchmarks.support.inference.model_families import (
    NEEDED,
    VARIANTS,
    Family,
    Finding,
    deep_samples,
    errors_of,
    short_samples,
)
from benchmarks.support.inference.model_families import build as build_family
from forge.core.errors import InvalidArgument
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.model.capabilities import Way
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy, kinds_of_modules, own_logprobs, small_copy
from forge.rl.tree.separate_samples import separated
from forge.rl.tree.states import TreeStates
from services.inference.engines.embedded.family_check import Verdict
from tests.support.rl.forests import KINDS, forest
from tests.support.rl.models import SHAPE, tiny_model
from tests.support.suite.matrix import usual

NAMED = {one.name: one for one in VARIANTS}
WAYS = {
    "llama": "merged",
    "gpt2": "merged",
    "mixtral, windows": "merged",
    "llama, yarn rotary": "merged",
    "gemma4_text": "merged",
    "gemma2": "merged",
    "deepseek_v3": "merged",
    "gpt_oss": "merged",
    "mimo_v2_flash": "merged",
    "llama, dynamic rotary": "alone",
    "phi3, longrope rotary": "alone",
    "doge": "alone",
    "qwen2_moe, windows": "by sequence",
    "phimoe, windows": "by sequence",
    "nanochat": "merged",
    "gemma3n_text": "merged",
    "qwen3_5_text": "merged",
    "nemotron_h": "merged",
    "jamba": "merged",
    "mamba": "merged",
    "falcon_mamba": "merged",
    "llama4_text": "by sequence",
    "llama4_text, full attention": "by sequence",
    "phi": "merged",
    "recurrent_gemma": "alone",
    "minimax": "merged",
}


def family(name: str) -> Family:
    return NAMED.get(name, Family(name=name, model_type=name, settings=NEEDED.get(name, {})))


@pytest.mark.parametrize("name", usual(WAYS, "llama", "gemma2", "jamba", "doge", "phi"))
def test_model_family_is_trained_exactly(name: str) -> None:
    """Merged or by sequence as expected; loss and gradients equal those of each sample alone,
    beyond every window and threshold."""
    policy = TreePolicy(build_family(family(name)))
    check_policy(policy)
    alone = "alone" if policy.way.separate else "by sequence"
    assert max(errors_of(policy, deep_samples(policy.model))) <= 1e-5
    assert (alone if policy.unmerged else "merged") == WAYS[name], policy.unmerged


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("falcon_h1", {"lm_head_multiplier": 0.3}),
        ("hyperclovax", {"logits_scaling": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("gemma2", {"final_logit_softcapping": 0.7}),
    ],
)
def test_changed_logits_keep_trees_merged(name: str, settings: dict[str, Any]) -> None:
    """Factors, divisors and caps other than the defaults."""
    changed = family(name)
    policy = TreePolicy(build_family(replace(changed, small=settings)))
    check_policy(policy)
    assert policy.way == Way()


def test_head_that_does_more_computes_all_logits_by_itself() -> None:
    """A change of the logits that no setting tells; the states that a critic reads stay those of
    the head's input."""

    class ShiftedForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *places: Any, **named: Any) -> Any:
            output = super().forward(*places, **named)
            output.logits = output.logits + 0.3 * output.logits.square()
            return output

    torch.manual_seed(0)
    policy = TreePolicy(ShiftedForCausalLM(LlamaConfig(**SHAPE)))
    check_policy(policy)
    assert policy.way.own_head and not policy.way.separate
    assert "log-probs differ" in policy.unmerged
    assert max(errors_of(policy, deep_samples(policy.model))) <= 1e-3


def test_model_that_attends_later_tokens_is_refused() -> None:
    """Its log-probs are not those that an engine samples from; the line names the family."""
    with pytest.raises(InvalidArgument, match=r"^BertLMHeadModel cannot be trained: .* later tok"):
        check_policy(TreePolicy(build_family(family("bert"))))


def test_model_with_a_failing_forward_is_refused() -> None:
    """One line names the family and the error."""

    class BrokenForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *_: Any, **__: Any) -> Any:
            raise KeyError("no such expert")

    policy = TreePolicy(BrokenForCausalLM(LlamaConfig(**SHAPE)))
    with pytest.raises(InvalidArgument, match=r"^BrokenForCausalLM cannot be trained: .*KeyError"):
        check_policy(policy)


def test_error_in_a_merged_pass_falls_back_to_training_by_sequence() -> None:
    """For any exception of the model's code."""

    class PickyForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *places: Any, **named: Any) -> Any:
            return super().forward(*places, **named)

    model = PickyForCausalLM(LlamaConfig(**SHAPE))
    model.model.layers[1].self_attn.switched_on = "elsewhere"
    policy = TreePolicy(model)
    check_policy(policy)
    assert "lacks LlamaAttention" in policy.unmerged and policy.way.separate


def test_model_unlike_its_small_copy_is_not_merged() -> None:
    """The probe has not tested a layer that no small copy has."""
    model = tiny_model("gemma3", torch.float32)
    assert kinds_of_modules(model) == kinds_of_modules(small_copy(model, "sdpa"))
    model.model.layers[0].self_attn.is_sliding = None
    assert kinds_of_modules(model) != kinds_of_modules(small_copy(model, "sdpa"))


@pytest.mark.parametrize("kind", KINDS)
def test_separated_samples_equal_the_merged_ones(kind: str) -> None:
    """Columns stay, and every trained token has the log-prob that it has in the merged tree; each
    sample's tokens have states."""
    samples = forest(kind)
    model = tiny_model("qwen3", torch.float64)
    merged = TreePolicy(model)
    alone = merged.over(model, Way(unmerged="for the test", separate=True))
    (tree,) = plan_batch(samples, token_budget=1 << 30, channels=merged.channels).trees
    apart = separated(tree)
    assert apart.tokens == sum(len(one) // 4 for one in {one.ids for one in samples})
    assert float(apart.layout.weights_L.sum()) == sum(one.tokens for one in samples)
    assert torch.equal(separated(apart).edges_T, apart.edges_T)
    alone.states = TreeStates()
    found_T, _ = alone.logprobs(tree)
    assert alone.states.whole.shape[0] == apart.tokens
    merged.attention.use(Way())
    for batch in (tree, apart):
        assert torch.allclose(merged.logprobs(batch)[0], found_T, atol=1e-6)


def test_long_rotary_embedding_forgets_longer_sequences() -> None:
    """A short sequence has the short factors again after a long one."""
    longrope = family("phi3, longrope rotary")
    parameters = longrope.settings["rope_parameters"]
    always_short = parameters | {"long_factor": parameters["short_factor"]}
    plain = replace(longrope, settings=longrope.settings | {"rope_parameters": always_short})
    model, expected = build_family(longrope), build_family(plain)
    short, long = short_samples(model)[0], deep_samples(model)[0]
    own_logprobs(model, long)
    assert torch.equal(own_logprobs(model, short), own_logprobs(expected, short))
    assert not torch.equal(own_logprobs(model, long), own_logprobs(expected, long))


def test_dynamic_rotary_embedding_forgets_longer_sequences() -> None:
    """The same tree gives the same log-probs after any earlier one."""
    policy = TreePolicy(build_family(family("llama, dynamic rotary")))
    samples = deep_samples(policy.model)
    plans = [
        plan_batch(some, token_budget=1 << 30, channels=policy.channels)
        for some in (samples[2:3], samples)
    ]
    short, everything = (plan.trees[0] for plan in plans)
    before = policy.logprobs(short)[0].detach()
    policy.logprobs(everything)
    assert torch.equal(policy.logprobs(short)[0].detach(), before)


@pytest.mark.parametrize("exact", [True, False])
def test_families_command_fails_for_a_wrongly_trained_family(
    exact: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 1, and the page and the numbers are written all the same."""
    finding = Finding(way="merged", errors=(0.0, 1e-7, 0.0, 0.5), exact=exact)
    monkeypatch.setattr(command, "examine", lambda _: finding)
    page, numbers = tmp_path / "page.md", tmp_path / "numbers.json"
    argv = ["families", "--only", "llama", "--markdown", str(page), "--json", str(numbers)]
    argv += ["--finished", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", argv)
    assert command.main() == int(not exact)
    assert "| llama | merged | 0.0e+00 | 1.0e-07 | 0.0e+00 | 5.0e-01 | yes | " in page.read_text()
    assert json.loads(numbers.read_text())["llama.served"] == 1.0
    assert json.loads(numbers.read_text())["llama.grad_err_beyond"] == 0.5


@pytest.mark.parametrize(
    ("verdict", "code", "cells"),
    [
        (Verdict(error=1e-6, greedy_equal=True), 0, "yes | 1.0e-06 | equal"),
        (Verdict(error=1e-6, greedy_equal=False), 1, "yes | 1.0e-06 | UNLIKE"),
        (Verdict(refusal="no", error=4.0, greedy_equal=False), 0, "refused |  | "),
    ],
)
def test_families_command_fails_on_unlike_greedy_answers(
    verdict: Verdict, code: int, cells: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a family that is served; a refused one gives no wrong answer. The page has a column."""
    monkeypatch.setattr(command, "examine", lambda _: Finding(way="alone", errors=(0.0,) * 4))
    monkeypatch.setattr(command, "serve", lambda _: verdict)
    page = tmp_path / "page.md"
    argv = ["families", "--only", "llama", "--markdown", str(page)]
    monkeypatch.setattr(sys, "argv", [*argv, "--finished", str(tmp_path / "rows.jsonl")])
    assert command.main() == code
    assert f" | {cells} |" in page.read_text()


def test_families_command_continues_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second run computes only the row that the first one did not finish, whose line is cut,
    and writes the page that a single run would have written."""
    computed = []

    def examine(family: Family) -> Finding:
        computed.append(family.name)
        if computed == ["gemma", "gpt2"]:
            raise KeyboardInterrupt
        return Finding(way="alone", reason="a | b", errors=(0.0, 1e-7, 0.0, 0.5))

    monkeypatch.setattr(command, "examine", examine)
    monkeypatch.setattr(command, "serve", lambda family: Verdict(error=1e-6, greedy_equal=True))
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    argv = ["families", "--only", "gemma", "gpt2", "--finished", str(rows), "--markdown", str(page)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(KeyboardInterrupt):
        command.main()
    with rows.open("a") as file:
        file.write('\n{"key": "cut')
    assert command.main() == 0
    assert computed == ["gemma", "gpt2", "gpt2"]
    continued = page.read_text()
    rows.unlink()
    assert command.main() == 0
    assert computed[3:] == ["gemma", "gpt2"]
    assert page.read_text() == continued


def test_rows_of_other_code_are_computed_again(tmp_path: Path) -> None:
    """A key is of the code and the versions."""
    row = Row(trained=Finding(way="merged", errors=(0.0,) * 4), served=Verdict(refusal="no"))
    path = tmp_path / "rows.jsonl"
    FinishedRows(path, key="one").add("llama", row)
    assert FinishedRows(path, key="one").get("llama") == row
    assert FinishedRows(path, key="two").get("llama") is None


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_key_of_rows_changes_with_code_and_versions(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One changed byte of one file, or one other version, makes another key."""
    source = tmp_path / "forge/rl/model/policy.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1\n")
    monkeypatch.setattr(finished_rows, "_REPOSITORY", tmp_path)
    first = finished_rows.key_of_code()
    source.write_text("a = 2\n")
    second = finished_rows.key_of_code()
    monkeypatch.setattr(getattr(finished_rows, library), "__version__", "0.1")
    assert len({first, second, finished_rows.key_of_code()}) == 3


def test_capped_scores_are_compared_with_an_attention_that_has_caps() -> None:
    """As transformers before 5.18 load Gemma 2: with SDPA, which ignores them."""
    model = tiny_model("gemma2", torch.float32)
    model.config._attn_implementation = "sdpa"
    policy = TreePolicy(model)
    check_policy(policy)
    assert policy.attention.own == "eager"
    assert not policy.unmerged
