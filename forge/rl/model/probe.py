"""Finds by computing how a model can be trained: merged, by sequence, or not at all.

Owns the comparison of each way with the model's own forward on one sequence at a time. It compares
twice. First on a copy with small sizes (`forge.rl.model.small_config`), in fp64, with gradients
and with sequences beyond every window and threshold. Then on the model itself with a few tokens,
since its weights and code may differ from its configuration.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample, plan_trees
from forge.rl.model.capabilities import Way, forget_lengths, one_line
from forge.rl.model.policy import TreePolicy
from forge.rl.model.small_config import THRESHOLD, small_config
from forge.rl.tree.batch import build_tree_batch

UNSPLIT = 1 << 30
SMALL_BUDGETS = (UNSPLIT, 24)
"""Token budgets: one pass, and relayed in several."""
OWN_BUDGETS = (UNSPLIT, 4)
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest rounding difference of a log-prob, and of a parameter's gradient relative to its norm, by
the model's type. Even in fp64, models compute norms, softmaxes and rotary embeddings in fp32."""
ALPHABET = 12
"""Distinct tokens in the samples of a small model."""
SEED = 7


def check_policy(policy: TreePolicy) -> None:
    """Compare merged trees with the model's own forward, and set a way that equals it.

    A model that is not plain causal attention over ancestors with a plain head is then trained
    sequence by sequence, and each sample alone where states depend on the length. Raises
    `InvalidArgument` for a model that no way computes.
    """
    known = policy.unmerged
    policy.attention.settle(examine(policy), known=known)


def check_config(config: Any) -> None:
    """As `check_policy`, with a configuration of transformers and without its weights: checks a
    small model of this family. One that cannot be made small is not refused here."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(small_config(config), dtype=torch.float32)
            randomize(model)
        make_double(model.eval())
        policy = TreePolicy(model)
    except Exception:
        return
    check_policy(policy)


def examine(policy: TreePolicy) -> Way:
    """The fastest way, at most that of the policy, that equals the model's own forward.

    Raises `InvalidArgument` for a model that no way computes.
    """
    way = _on_small_copy(policy)
    with policy.exact():
        if not way.unmerged:
            reason = _difference(policy, way, _short_samples(policy.vocabulary), OWN_BUDGETS)
            if not reason:
                return way
            way = replace(way, unmerged=f"merged, {reason}")
        for one in _heads_of(way):
            reason = _difference(policy, one, _short_samples(policy.vocabulary), OWN_BUDGETS[:1])
            if not reason:
                return one
    raise InvalidArgument(f"{policy.family} cannot be trained: by sequence, {reason}")


def _heads_of(way: Way) -> list[Way]:
    """The way, and the one with the model's own head."""
    return [way] if way.own_head else [way, replace(way, own_head=True)]


def _on_small_copy(policy: TreePolicy) -> Way:
    try:
        copy = small_copy(policy.model, policy.attention.own)
    except Exception as error:
        return _unprobed(policy, f"a small copy of it cannot be built ({one_line(error)})")
    missing = kinds_of_modules(policy.model) - kinds_of_modules(copy)
    if missing:
        return _unprobed(policy, f"a small copy of it lacks {', '.join(sorted(missing))}")
    try:
        probe = SmallProbe(copy, policy)
    except Exception as error:
        return _unprobed(policy, f"a small copy of it does not run ({one_line(error)})")
    return probe.way()


def _unprobed(policy: TreePolicy, reason: str) -> Way:
    """The way that is safe without a probe of windows and lengths."""
    with policy.exact(), policy.attention.stock():
        try:
            _refuse_later_tokens(policy, policy.model, _short_samples(policy.vocabulary))
        except InvalidArgument:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"{policy.family} cannot be trained: its own forward fails: {one_line(error)}"
            ) from error
    return Way(unmerged=policy.way.unmerged or reason, separate=True)


class SmallProbe:
    """A small model, its samples, and the results of its own forward on each sample alone."""

    def __init__(self, model: Any, policy: TreePolicy) -> None:
        """`policy` has the original of `model`. Raises any error of the model's forward."""
        self.model = model
        self._policy = policy
        self.samples = long_samples(model.get_input_embeddings().weight.shape[0])
        try:
            self._reference = self._own()
        except Exception:
            # Some models have constants in fp32.
            model.to(torch.float32)
            self._reference = self._own()
        self._tolerance = TOLERANCE[model.dtype]

    def way(self) -> Way:
        """The fastest exact way. Raises `InvalidArgument` if there is none."""
        reason = self._policy.unmerged
        _refuse_later_tokens(self._policy, self.model, self.samples)
        if not reason:
            found = self.difference(Way())
            if not found:
                return Way()
            reason = f"merged, a small copy's {found}"
        for separate in (True,) if self._policy.way.separate else (False, True):
            for way in _heads_of(Way(unmerged=reason, separate=separate)):
                found = self.difference(way)
                if not found:
                    return way
        raise InvalidArgument(
            f"{self._policy.family} cannot be trained: by sequence, a small copy's {found}"
        )

    def difference(self, way: Way) -> str:
        """Difference of a way's results from the model's own forward; "" if there is none."""
        budgets = SMALL_BUDGETS if not way.unmerged else SMALL_BUDGETS[:1]
        try:
            small = self._policy.over(self.model, way)
            errors = [self._errors(small, budget) for budget in budgets]
        except Exception as error:
            return f"pass fails: {one_line(error)}"
        finally:
            with suppress(Exception):
                self.model.set_attn_implementation(self._policy.attention.own)
        loss, gradient = torch.tensor(errors).amax(0).tolist()  # NaN where there is one
        if loss <= self._tolerance and gradient <= self._tolerance:
            return ""
        return (
            f"log-probs differ from its own forward by {loss:.3g}, gradients by {gradient:.3g} "
            f"of their size"
        )

    def _errors(self, policy: TreePolicy, budget: int) -> tuple[float, float]:
        own, expected = self._reference
        self.model.zero_grad()
        differences = []
        for plan in plan_trees(self.samples, token_budget=budget):
            batch = build_tree_batch(plan, self.samples, channels=policy.channels)
            logprobs_T, _ = policy.logprobs(batch)
            own_T = torch.cat([own[index] for index in plan.samples])
            weights = [_weights(self.samples[index], own_T.dtype) for index in plan.samples]
            differences.append((logprobs_T.detach() - own_T).abs().max())
            (logprobs_T * torch.cat(weights)).sum().backward()  # type: ignore[no-untyped-call]
        error = float(torch.stack(differences).max())
        return error, relative_error(gradients_of(self.model), expected)

    def _own(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Log-probs of each sample, and the gradient of their weighted sum."""
        self.model.zero_grad()
        found = []
        for sample in self.samples:
            logprobs_T = own_logprobs(self.model, sample)
            weighed = (logprobs_T * _weights(sample, logprobs_T.dtype)).sum()
            weighed.backward()  # type: ignore[no-untyped-call]
            found.append(logprobs_T.detach())
        if not all(one.isfinite().all() for one in found):
            raise ValueError("its log-probs are not finite")
        return found, gradients_of(self.model)


@torch.no_grad()
def sight_of_later_tokens(model: Any, samples: Sequence[Sample]) -> float:
    """Change of log-probs by later tokens, at a fixed sequence length."""
    ids = array("i", max(samples, key=lambda one: one.tokens).ids)
    cut = len(ids) // 2
    turned = ids[:cut] + ids[cut:][::-1]
    first, second = (own_logprobs(model, as_sample(one))[: cut - 1] for one in (ids, turned))
    return float((first - second).abs().max())


def _refuse_later_tokens(policy: TreePolicy, model: Any, samples: Sequence[Sample]) -> None:
    """Raises `InvalidArgument` for a model that is not causal."""
    later = sight_of_later_tokens(model, samples)
    if not later <= TOLERANCE.get(model.dtype, min(TOLERANCE.values())):
        raise InvalidArgument(
            f"{policy.family} cannot be trained: a token's log-prob depends on later tokens, by "
            f"{later:.3g}, so it is not the log-prob of the distribution sampled from"
        )


def _difference(
    policy: TreePolicy, way: Way, samples: Sequence[Sample], budgets: Sequence[int]
) -> str:
    """Difference of log-probs of the model itself; "" if there is none."""
    try:
        policy.attention.use(way)
        found = float(torch.tensor([_deviation(policy, samples, one) for one in budgets]).max())
    except Exception as error:
        return f"a pass fails: {one_line(error)}"
    # bf16 weights differ by about 0.02; a model that cannot be merged differs by nats.
    if found <= TOLERANCE.get(policy.head_type, min(TOLERANCE.values())):
        return ""
    return f"log-probs differ from its own forward by {found:.3g}"


@torch.no_grad()
def _deviation(policy: TreePolicy, samples: Sequence[Sample], budget: int) -> float:
    """Largest difference from the model's own log-probs, with trees within a budget."""
    differences = []
    for plan in plan_trees(samples, token_budget=budget):
        batch = build_tree_batch(plan, samples, channels=policy.channels)
        logprobs_T, _ = policy.logprobs(batch)
        with policy.attention.stock():
            own_T = torch.cat([_own_by_policy(policy, samples[one]) for one in plan.samples])
        differences.append((logprobs_T - own_T).abs().max())
    return float(torch.stack(differences).max())


def _own_by_policy(policy: TreePolicy, sample: Sample) -> Tensor:
    return policy.run(lambda: own_logprobs(policy.model, sample))


def small_copy(model: Any, attention: str) -> Any:
    """A model of the same class with small sizes and large random weights, in fp64 on the CPU.

    Raises any error of the class with such a configuration.
    """
    config = small_config(model.config)
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        copy = type(model)(config)
        randomize(copy)
    make_double(copy)
    return copy.train(model.training)


def make_double(model: Any) -> None:
    """Convert a model to fp64."""
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels take no fp64
    model.to(torch.float64)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):  # some releases of transformers multiply it by fp32 positions
            buffer.data = buffer.to(torch.float32)


@torch.no_grad()
def randomize(model: Any) -> None:
    """Draw weights so large that scores, caps and gates leave their linear range."""
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(torch.randn_like(embedding))


def kinds_of_modules(model: Any) -> set[str]:
    """The transformers classes in a model, each with the traits that distinguish its modules:
    switches, names, and which sizes exist."""
    found = set()
    for module in model.modules():
        # The class of a sharded layer is made at run time, of torch's and its own.
        kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
        if not kind.__module__.startswith("transformers."):
            continue
        traits = [
            f"{name}={_trait(value)}"
            for name, value in sorted(vars(module).items())
            if not name.startswith("_") and name not in ("training", "gradient_checkpointing")
            if value is None or isinstance(value, (bool, str, int))
        ]
        found.add(f"{kind.__name__}({', '.join(traits)})")
    return found


def _trait(value: Any) -> str:
    return "number" if type(value) is int else str(value)


def own_logprobs(model: Any, sample: Sample) -> Tensor:
    """Log-probs of all tokens but the first, by the model's own forward on this sequence alone."""
    ids_L = torch.frombuffer(bytearray(sample.ids), dtype=torch.int32).long().to(model.device)
    forget_lengths(model)
    with torch.autocast(model.device.type, enabled=False):
        logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
    wide: Tensor = logits_LV[:-1].to(torch.promote_types(logits_LV.dtype, torch.float32))
    return wide.log_softmax(-1).gather(-1, ids_L[1:, None])[:, 0]


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient."""
    named = model.named_parameters()
    return {name: one.grad.clone() for name, one in named if one.grad is not None}


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of a parameter's gradient, relative to its norm.

    The norm is at least a thousandth of the largest, for gradients that are zero up to rounding.
    """
    floor = 1e-3 * max(float(one.norm()) for one in expected.values())
    worst = 0.0
    for name in actual.keys() | expected.keys():
        one, other = actual.get(name), expected.get(name)
        size = float(other.norm()) if other is not None else 0.0
        apart = torch.zeros(()) if other is None else other
        error = float(((0.0 if one is None else one) - apart).norm()) / max(size, floor)
        worst = max(worst, error) if error == error else float("inf")
    return worst


def _weights(sample: Sample, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(sample.advantages), dtype=torch.float32).to(dtype)


def long_samples(vocabulary: int) -> list[Sample]:
    """Samples of up to 50 tokens, in a tree with nested forks. Two samples are prefixes of another;
    the shorter is below every threshold. Tokens recur."""
    rng = Random(SEED)
    low, high = (3, min(vocabulary, 64) - 4) if vocabulary > 16 else (0, vocabulary)
    alphabet = rng.sample(range(low, high), min(ALPHABET, high - low))

    def ids(count: int) -> list[int]:
        return rng.choices(alphabet, k=count)

    prompt = ids(20)
    first = prompt + ids(30)
    leaves = [first, first[:34], first[:40] + ids(5), prompt + ids(6), prompt[:8] + ids(14)]
    return [as_sample(one, rng) for one in [*leaves, first[: THRESHOLD - 4]]]


def _short_samples(vocabulary: int) -> list[Sample]:
    """Samples of few tokens, to keep a pass of the whole model short."""
    ids = [[3, 5, 7, 11, 13, 17], [3, 5, 7, 19, 23], [3, 5, 29, 31], [3, 5, 29, 31, 2]]
    return [as_sample([token % vocabulary for token in one]) for one in ids]


def as_sample(ids: Sequence[int], rng: Random | None = None) -> Sample:
    """A sample whose tokens are all trained but the first."""
    count = len(ids) - 1
    advantages = [rng.uniform(-1, 1) if rng else 0.0 for _ in range(count)]
    return Sample(
        ids=array("i", ids).tobytes(),
        trained=((1, len(ids)),),
        behavior_logprobs=bytes(4 * count),
        weight_versions=bytes(4 * count),
        advantages=array("f", advantages).tobytes(),
    )
