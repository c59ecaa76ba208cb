"""Heads that draft: losses by hand, exact on merged trees, and no business of the policy's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from forge.core import prefix_tree
from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.rl.config import (
    LearnerConfig,
    MtpConfig,
    MtpLoss,
    ObjectiveConfig,
    OptimizerConfig,
)
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy
from forge.rl.mtp import training
from forge.rl.mtp.heads import MtpHeads
from forge.rl.mtp.losses import acceptance, topk_kl, total_variation
from forge.rl.tree.states import TreeStates
from tests.support.rl.forests import KINDS, forest
from tests.support.rl.models import CAP, SHAPE, gradients, make_sample, tiny_model, wide_norms

HEADS, TOP_K = 2, 3
WAYS = {"whole": 1 << 30, "split": 24, "relayed": 5}


def log(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64).log()


def test_topk_kl_equals_values_by_hand() -> None:
    """The likeliest token by itself, all others as one outcome."""
    loss = topk_kl(log(0.5, 0.3, 0.2), log(0.4, 0.1, 0.5), top_k=1)
    assert float(loss) == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))


def test_topk_kl_over_the_whole_vocabulary_is_the_kl() -> None:
    """With the whole vocabulary in the top there is no rest."""
    p, q = (torch.randn(5, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expected = (p.exp() * (p - q)).sum(-1)
    assert torch.allclose(topk_kl(p, q, top_k=7), expected)
    assert torch.allclose(topk_kl(p, q, top_k=99), expected)


def test_draft_rejection_rate_is_the_total_variation() -> None:
    """.4 + .1 + .2 are accepted; the rest, .3, is the distance."""
    p, q = log(0.5, 0.3, 0.2), log(0.4, 0.1, 0.5)
    assert float(acceptance(p, q)) == pytest.approx(0.7)
    assert float(total_variation(p, q)) == pytest.approx(0.3)


def learner(
    model: Any, budget: int = 1 << 30, *, optimizer: OptimizerConfig | None = None, **settings: Any
) -> Learner:
    config = LearnerConfig(
        token_budget=budget,
        optimizer=optimizer or OptimizerConfig(),
        objective=ObjectiveConfig(ratio_cap=CAP),
        mtp=MtpConfig(**{"heads": HEADS, "top_k": TOP_K, **settings}),
    )
    one = Learner(TreePolicy(model), config)
    if one.mtp is not None:
        one.mtp.heads.to(next(model.parameters()).dtype)
    return one


def one_at_a_time(
    model: Any, heads: MtpHeads, samples: Sequence[Sample], loss: MtpLoss
) -> tuple[float, dict[str, Tensor], list[float]]:
    """Mean loss, gradients and acceptance, through the model's own attention."""
    model.set_attn_implementation("sdpa" if hasattr(model.config, "num_attention_heads") else None)
    heads.zero_grad()
    total, accepted, counts = torch.zeros((), dtype=torch.float64), [0.0] * HEADS, [0] * HEADS
    tokens = sum(one.trained_tokens for one in samples)
    for one in samples:
        ids_L = torch.tensor(array("i", one.ids))
        with torch.no_grad():
            states_LC = model.base_model(input_ids=ids_L[None], use_cache=False).last_hidden_state
            states_LC, embedded_LC = states_LC[0], model.get_input_embeddings()(ids_L)
            logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
            weight_VC = model.get_output_embeddings().weight.detach()
        for index, head in enumerate(heads):
            # Row r is the token index + 1 + r: one token is lost per head.
            states_LC = head(states_LC[:-1], embedded_LC[index + 1 :])
            for place in (p for span in one.trained for p in range(*span)):
                row = place - 1 - (index + 1)
                if row < 0:
                    continue
                p = (logits_LV[place - 1] / one.temperature).log_softmax(-1)[None]
                normed = head.out_norm(states_LC[row])  # type: ignore[operator]
                q = (weight_VC @ normed / one.temperature).log_softmax(-1)
                q = q[None]
                if loss == "topk_kl":
                    total = total + topk_kl(p, q, top_k=TOP_K)[0]
                elif loss == "tv":
                    total = total + total_variation(p, q)[0]
                else:
                    total = total - q[0, ids_L[place]]
                accepted[index] += float(acceptance(p, q.detach()))
                counts[index] += 1
    (total / (tokens * HEADS)).backward()
    means = [value / max(1, count) for value, count in zip(accepted, counts, strict=True)]
    return float(total.detach()), gradients(heads), means


def check(family: str, samples: list[Sample], budget: int, loss: MtpLoss) -> None:
    with wide_norms():
        model = tiny_model(family, torch.float64)
        one = learner(model, budget, loss=loss)
        assert one.mtp is not None
        one.accumulate(one.plan(samples))
        found, stats, totals = gradients(one.mtp.heads), one.mtp.stats(), one.mtp._totals_KN
        expected_loss, expected, accepted = one_at_a_time(model, one.mtp.heads, samples, loss)
    assert float(totals[:, 0].sum()) == pytest.approx(expected_loss, rel=1e-9)
    assert stats.acceptance == pytest.approx(accepted, rel=1e-9)
    assert found.keys() == expected.keys()
    scale = max(float(one.norm()) for one in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-10 * scale, name


@pytest.fixture(params=WAYS)
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A token budget, under which trees are split rather than relayed where both are possible."""
    if request.param == "split":
        monkeypatch.setattr(prefix_tree, "RELAY_COST", 1e9)
    return WAYS[request.param]


@pytest.mark.parametrize("kind", KINDS)
def test_draft_heads_are_exact_on_merged_trees(kind: str, budget: int) -> None:
    """Loss, gradients and acceptance equal those of one sample at a time, for any tree."""
    check("qwen3", forest(kind), budget, "topk_kl")


@pytest.mark.parametrize("loss", get_args(MtpLoss))
@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "mamba"])
def test_every_draft_head_loss_is_exact(family: str, loss: MtpLoss) -> None:
    """With windows, experts and recurrent models; several children are several targets."""
    check(family, forest("duplicate") + forest("forked"), WAYS["whole"], loss)


def models() -> dict[str, Any]:
    """Whose logits are made in different ways."""
    shape = {**SHAPE, "head_dim": 4}
    soft = Gemma2Config(
        **shape,
        attn_logit_softcapping=None,
        final_logit_softcapping=0.5,
        layer_types=["full_attention"] * 2,
    )
    divided = GraniteConfig(**SHAPE, logits_scaling=3.0)
    return {
        "plain": tiny_model("qwen3", torch.float32),
        "soft-capped": Gemma2ForCausalLM(soft),
        "divided": GraniteForCausalLM(divided),
        "by sequence": tiny_model("llama4", torch.float32),
        "biased": biased(),
    }


def biased() -> Any:
    """Its head has a bias that is not zero."""
    model = PhiForCausalLM(PhiConfig(**SHAPE))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


@pytest.mark.parametrize("which", ["plain", "soft-capped", "divided", "by sequence", "biased"])
def test_draft_head_target_is_the_policys_distribution(which: str) -> None:
    """The target has the log-probs that the policy gives to the tokens."""
    policy = TreePolicy(models()[which])
    check_policy(policy)
    policy.states = TreeStates()
    (tree,) = Learner(policy, LearnerConfig()).plan(forest("temperatures")).trees
    logprobs_T, _ = policy.logprobs(tree)
    head = tree.layout.head
    states_RC = policy.states.whole[head.places_R]
    all_RV = policy.distributions(states_RC, head.temperatures_R)
    found_T = all_RV[head.rows_E, head.targets_E][tree.edges_T]
    assert torch.allclose(found_T, logprobs_T, atol=1e-5)
    assert bool(policy.unmerged) == (which == "by sequence")


def test_chunked_rows_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows whose logits are held at once."""
    monkeypatch.setattr(training, "CHUNK_ELEMENTS", 13 * training.COPIES_HELD * 2)
    check("qwen3", forest("think_stripped"), WAYS["whole"], "cross_entropy")


@pytest.mark.parametrize("budget", [1 << 30, 24])
def test_draft_heads_do_not_change_the_policy(budget: int) -> None:
    """Its gradient, its clipped update and its random numbers are the same to the bit."""
    samples = forest("forked")
    found: list[dict[str, Tensor]] = []
    for heads in (0, HEADS):
        torch.manual_seed(5)
        model = tiny_model("llama", torch.float32)
        torch.manual_seed(5)
        optimizer = OptimizerConfig(grad_clip=1e-3, learning_rate=1e-2)
        one = learner(model, budget, optimizer=optimizer, heads=heads)
        one.accumulate(one.plan(samples))
        of = gradients(model)
        one.step(one.plan(samples), weight_version=1)
        found.append({**of, **model.state_dict(), "draw": torch.rand(3)})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("loss", get_args(MtpLoss))
def test_draft_heads_learn(loss: MtpLoss) -> None:
    """The loss falls and acceptance rises, with a fixed policy."""
    rng = Random(1)
    samples = []
    for _ in range(8):
        ids = [rng.randrange(13) for _ in range(24)]
        samples.append(make_sample(ids, (4, 24), rng=rng))
    one = learner(
        tiny_model("qwen3", torch.float32),
        optimizer=OptimizerConfig(learning_rate=0.0),
        loss=loss,
        learning_rate=3e-3,
        top_k=4,
    )
    plan = one.plan(samples)
    results = [one.step(plan, weight_version=1) for _ in range(40)]
    assert all(not result.skipped for result in results)
    for before, after in zip(results[0].mtp.losses, results[-1].mtp.losses, strict=True):
        assert after < 0.7 * before
    if loss != "cross_entropy":  # random targets tell nothing about the policy
        for before, after in zip(
            results[0].mtp.acceptance, results[-1].mtp.acceptance, strict=True
        ):
            assert after > before + 0.1


def updated(update_tokens: int, *, batches: int, budget: int = 1 << 30) -> tuple[Learner, Any]:
    """A learner after some updates of its heads alone, and the statistics of the last batch."""
    optimizer = OptimizerConfig(learning_rate=0.0)
    settings: dict[str, Any] = {"learning_rate": 3e-3, "top_k": 4, "update_tokens": update_tokens}
    torch.manual_seed(3)
    one = learner(tiny_model("qwen3", torch.float32), budget, optimizer=optimizer, **settings)
    plan = one.plan(forest("forked") + forest("think_stripped"))
    for _ in range(batches):
        result = one.step(plan, weight_version=1)
    return one, result.mtp


def test_one_update_on_a_whole_tree_is_that_on_the_batch() -> None:
    """Where an update may have all contexts of the only tree."""
    whole, expected = updated(0, batches=2)
    part, found = updated(1 << 20, batches=2)
    assert whole.mtp is not None and part.mtp is not None
    tensors = part.mtp.heads.named_tensors()
    for name, tensor in whole.mtp.heads.named_tensors().items():
        assert torch.allclose(tensors[name], tensor, atol=1e-6), name
    assert found == expected


@pytest.mark.parametrize("budget", WAYS.values())
def test_each_context_is_in_one_update_of_a_batch(budget: int) -> None:
    """The drafts of all updates are those of one update with the whole batch."""
    _, expected = updated(0, batches=1, budget=budget)
    _, found = updated(7, batches=1, budget=budget)
    assert found.drafts == expected.drafts


def test_several_updates_with_a_batch_teach_more() -> None:
    """The same batches, the same number of computed contexts."""
    _, once = updated(0, batches=4)
    _, often = updated(7, batches=4)
    assert all(a < 0.95 * b for a, b in zip(often.losses, once.losses, strict=True))


def test_restored_draft_head_takes_the_same_step() -> None:
    """Heads and their moments are in the learner's state."""
    samples = forest("linear")
    first = learner(tiny_model("qwen3", torch.float32))
    first.step(first.plan(samples), weight_version=1)
    second = learner(tiny_model("qwen3", torch.float32))
    second.policy.model.load_state_dict(first.policy.model.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    for one in (first, second):
        one.step(one.plan(samples), weight_version=2)
    assert first.mtp is not None and second.mtp is not None
    tensors = second.mtp.heads.named_tensors()
    assert all(
        torch.equal(tensors[name], tensor)
        for name, tensor in first.mtp.heads.named_tensors().items()
    )


def test_draft_heads_can_be_added_and_removed_at_any_checkpoint() -> None:
    """A state without heads leaves new ones unchanged; a state with heads is refused without
    them."""
    without, with_heads = (learner(tiny_model("qwen3", torch.float32), heads=n) for n in (0, 1))
    with_heads.load_state_dict(without.state_dict())
    without.load_state_dict(with_heads.state_dict())
    assert without.mtp is None


def test_draft_heads_of_another_shape_are_refused() -> None:
    """The message names a tensor and both shapes."""
    heads = MtpHeads(1, channels=4, embedding_channels=4)
    other = MtpHeads(2, channels=4, embedding_channels=4)
    with pytest.raises(InvalidArgument, match=r"mtp\.1\..*not there"):
        heads.load_tensors(other.named_tensors())


def test_draft_heads_of_a_bfloat16_backbone_are_float32() -> None:
    """Under autocast the heads stay in float32 and still get a gradient."""
    model = tiny_model("qwen3", torch.float32)
    policy = TreePolicy(model, autocast=torch.bfloat16)
    one = Learner(policy, LearnerConfig(mtp=MtpConfig(heads=1)))
    result = one.step(one.plan(forest("forked")), weight_version=1)
    assert not result.skipped and math.isfinite(result.mtp.losses[0])
    assert one.mtp is not None
    assert all(p.dtype == torch.float32 for p in one.mtp.heads.parameters())
