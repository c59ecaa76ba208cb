"""Ways to get the gradient of the same samples: merged, and as trainers without merging do it.

All compute logits for the trained tokens alone, in fp32, and the same loss. What merging shares and
what a way computes again is all that differs; attention is torch's for every one of them.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

from benchmarks.support.training.tree_workloads import VOCABULARY
from benchmarks.support.training.trl_peer import bare_trainer, collated, fuse_head
from forge.core.prefix_tree import Node, Sample, TreePlan, plan_trees
from forge.core.token_columns import common_tokens
from forge.rl.attention.tree_attention import TREE_ATTENTION
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.learner import Learner
from forge.rl.losses.objectives import cispo_loss
from forge.rl.losses.stats import TokenStats
from forge.rl.model.policy import TreePolicy
from forge.rl.tree.batch import build_tree_batch

RATIO_CAP = 5.0
UNSPLIT = 1 << 40
GROUPED_ATTENTION = "bench_prefix_grouper"
COMPARED_ELEMENTS = 1 << 26
"""Most elements of a gradient that is compared: a large model's are sampled evenly."""
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
}
"""Shapes of Qwen 3; the first two have 28 layers, all have 8 key/value heads of 128."""
SHAPE_OF_ALL = {"num_hidden_layers": 28, "num_key_value_heads": 8, "vocab_size": 151936}
PEERS = Path(__file__).parents[3] / ".venv-peers"


class Bench:
    """One model, and the ways to get its gradient."""

    def __init__(
        self,
        *,
        hidden: int = 0,
        layers: int = 0,
        shape: str = "",
        device: str = "cpu",
        autocast: torch.dtype | None = None,
    ) -> None:
        """A model of `hidden` channels and `layers`, or one of `SHAPES`, with random weights."""
        torch.manual_seed(0)
        self.device = torch.device(device)
        self._autocast = autocast
        self.is_narrow = autocast is not None
        self.config = _config_of(shape) if shape else _small_config(hidden, layers)
        with self.device:
            self.model: Any = Qwen3ForCausalLM(copy.deepcopy(self.config))
        if autocast is not None:  # as published, and as files have them
            for one in self.model.parameters():
                one.data.copy_(one.data.to(autocast))
        self.learner = Learner(
            TreePolicy(self.model, autocast=autocast),
            LearnerConfig(objective=ObjectiveConfig(ratio_cap=RATIO_CAP), token_budget=UNSPLIT),
        )

    def tree(self, samples: Sequence[Sample], *, budget: int = UNSPLIT) -> tuple[float, BatchPlan]:
        """Merged; relayed or split beyond a budget."""
        self.learner.budget.tokens = budget
        plan = self.learner.plan(samples)
        loss, _ = self.learner.accumulate(plan)
        return loss, plan

    def varlen(self, samples: Sequence[Sample], budget: int) -> float:
        """Packed without merging, in passes of at most `budget` tokens."""
        return self.learner.accumulate(self.packed(samples, budget))[0]

    def packed(self, samples: Sequence[Sample], budget: int) -> BatchPlan:
        """The plan of that."""
        channels = self.learner.policy.channels
        trees = tuple(
            build_tree_batch(unmerged(pack), pack, channels=channels)
            for pack in packs_of(samples, budget, padded=False)
        )
        return BatchPlan(trees=trees, plan_s=0.0)

    def trajectories(self, rollouts: Sequence[Sequence[Sample]]) -> float:
        """Each trajectory merged by itself, nothing shared between those of a group."""
        channels = self.learner.policy.channels
        trees = tuple(
            build_tree_batch(plan, rollout, channels=channels)
            for rollout in rollouts
            for plan in plan_trees(rollout, token_budget=UNSPLIT)
        )
        return self.learner.accumulate(BatchPlan(trees=trees, plan_s=0.0))[0]

    def per_request(self, samples: Sequence[Sample]) -> float:
        """One at a time, as transformers does it."""
        total = 0.0
        count = sum(one.trained_tokens for one in samples)
        with self._stock("sdpa"):
            for one in samples:
                ids_L = _ids(one).to(self.device)
                ((start, end),) = one.trained
                hidden_LC = self._hidden(input_ids=ids_L[None])[0]
                logits_TV = self.model.lm_head(hidden_LC[start - 1 : end - 1])
                total += _backward(logits_TV, ids_L[start:end], [one], count)
        return total

    def padded(self, samples: Sequence[Sample], budget: int) -> float:
        """Batches of sequences padded to the longest, of at most `budget` tokens with padding."""
        total = 0.0
        count = sum(one.trained_tokens for one in samples)
        with self._stock("sdpa"):
            for pack in packs_of(samples, budget, padded=True):
                width = max(one.tokens for one in pack)
                ids_BL = torch.zeros(len(pack), width, dtype=torch.long)
                real_BL = torch.zeros(len(pack), width, dtype=torch.long)
                rows, targets = [], []
                for index, one in enumerate(pack):
                    ids_L = _ids(one)
                    ids_BL[index, : len(ids_L)], real_BL[index, : len(ids_L)] = ids_L, 1
                    ((start, end),) = one.trained
                    rows.append(torch.arange(start - 1, end - 1) + index * width)
                    targets.append(ids_L[start:end])
                hidden_BLC = self._hidden(
                    input_ids=ids_BL.to(self.device), attention_mask=real_BL.to(self.device)
                )
                places = torch.cat(rows).to(self.device)
                logits_TV = self.model.lm_head(hidden_BLC.flatten(0, 1)[places])
                total += _backward(logits_TV, torch.cat(targets).to(self.device), pack, count)
        return total

    def _hidden(self, **inputs: Tensor) -> Tensor:
        """Hidden states of the stock backbone, in fp32: the input of its head."""
        with self._autocasting():
            states: Tensor = self.model.base_model(use_cache=False, **inputs).last_hidden_state
        return states.float()

    def _autocasting(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, dtype=self._autocast, enabled=self._autocast is not None
        )

    def trl(self, samples: Sequence[Sample], budget: int) -> float:
        """TRL's GRPO step with its CISPO loss: prompts padded on the left, answers on the right, in
        batches of at most `budget` tokens with padding."""
        self._peer.zero_grad()
        count = torch.tensor(sum(one.trained_tokens for one in samples))
        total = 0.0
        for pack in packs_of(samples, budget, padded=True):
            inputs = {name: x.to(self.device) for name, x in collated(pack, count).items()}
            with self._autocasting():
                loss = self._trainer._compute_loss(self._peer, inputs)
            loss.backward()
            total += float(loss.detach())
        return total

    @cached_property
    def _peer(self) -> Any:
        """The model with TRL's head."""
        model = copy.deepcopy(self.model)
        model.set_attn_implementation("sdpa")
        fuse_head(model)
        return model

    @cached_property
    def _trainer(self) -> Any:
        options = {"loss_type": "cispo", "epsilon_high": RATIO_CAP}
        with TemporaryDirectory() as folder:
            return bare_trainer(self._peer, Path(folder), options=options, answers=2, longest=512)

    def prefix_grouper(self, samples: Sequence[Sample]) -> float:
        """The peer of that name, on a prompt with its answers in one row."""
        prompt = common_tokens(samples[0].ids, samples[1].ids)
        answers = [_ids(one)[prompt:] for one in samples]
        lengths = [len(answer) for answer in answers]
        grouper = load_prefix_grouper()([[prompt, *lengths]])
        ids_L = torch.cat([_ids(samples[0])[:prompt], *answers])
        places = [torch.arange(prompt), *(torch.arange(prompt, prompt + n) for n in lengths)]
        starts = [prompt + sum(lengths[:index]) for index in range(len(lengths))]
        rows = [
            torch.cat([torch.tensor([prompt - 1]), torch.arange(start, start + length - 1)])
            for start, length in zip(starts, lengths, strict=True)
        ]
        with self._stock(GROUPED_ATTENTION):
            hidden_LC = self.model.base_model(
                input_ids=ids_L[None],
                position_ids=torch.cat(places)[None],
                use_cache=False,
                grouper=grouper,
                mask=_suffix_mask(prompt, max(lengths)),
            ).last_hidden_state[0]
            logits_TV = self.model.lm_head(hidden_LC[torch.cat(rows)])
            count = sum(one.trained_tokens for one in samples)
            return _backward(logits_TV, torch.cat(answers), samples, count)

    def gradients(self) -> Tensor:
        """A copy of all of them in one vector, or of every n-th element of a large model."""
        grads = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        every = -(-sum(one.numel() for one in grads) // COMPARED_ELEMENTS)
        return torch.cat([one[::every] for one in grads])

    def step_bytes(self, plan: BatchPlan, *, trained_tokens: int = 0) -> int:
        """`peak_bytes` of a batch's gradient; plans are made ahead of it, on the host.

        `trained_tokens` is how many its batch has besides: of each a step holds what its metrics
        need, until it ends.
        """
        stats: list[TokenStats] = []
        peak = self.peak_bytes(lambda: stats.extend(self.learner.accumulate(plan)[1]))
        held = sum(
            column.element_size() * column.numel()
            for one in stats
            for column in (one.logprobs, one.entropy, one.clipped, one.gradient_size)
        )
        return peak + held * trained_tokens // plan.trained_tokens

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Most that the allocator has handed out at once in `run`, beside what there was before.

        Activations, logits, gradients of the weights and all that is passing; not the weights.
        """
        self.model.zero_grad()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            return int(torch.cuda.max_memory_allocated() - before)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as watched:
            run()
        assert watched.profiler is not None and watched.profiler.kineto_results is not None
        events = watched.profiler.kineto_results.events()
        changes = sorted(
            ((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"),
            key=lambda change: change[0],
        )
        return int(max(accumulate(size for _, size in changes)))

    def flops(self, tokens: int, pairs: int, rows: int) -> float:
        """Forward and backward: 6 per weight and token, 12 per pair and channel, the head's."""
        config = self.model.config
        backbone = sum(p.numel() for p in self.model.model.layers.parameters())
        head = 6 * rows * config.vocab_size * config.hidden_size
        attention = 12 * pairs * self.learner.policy.channels * config.num_hidden_layers
        return float(6 * backbone * tokens + attention + head)

    @contextmanager
    def _stock(self, attention: str) -> Iterator[None]:
        self.model.zero_grad()
        self.model.set_attn_implementation(attention)
        try:
            yield
        finally:
            self.model.set_attn_implementation(TREE_ATTENTION)


def _small_config(hidden: int, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )


def _config_of(shape: str) -> Qwen3Config:
    sizes: dict[str, Any] = SHAPE_OF_ALL | SHAPES[shape]
    return Qwen3Config(**sizes, head_dim=128, tie_word_embeddings=True)


def packs_of(samples: Sequence[Sample], budget: int, *, padded: bool) -> list[list[Sample]]:
    """Consecutive samples, as many as fit."""
    packs: list[list[Sample]] = [[]]
    for one in samples:
        grown = [*packs[-1], one]
        tokens = sum(each.tokens for each in grown)
        if padded:
            tokens = len(grown) * max(each.tokens for each in grown)
        if packs[-1] and tokens > budget:
            packs.append([])
        packs[-1].append(one)
    return packs


def unmerged(samples: Sequence[Sample]) -> TreePlan:
    """A plan in which every sample is a root of its own."""
    nodes, trained = [], []
    start = 0
    for one in samples:
        end = start + one.tokens
        nodes.append(Node(start, end, end, 0, -1))
        trained.append(tuple((start + low, start + high) for low, high in one.trained))
        start = end
    return TreePlan(
        ids=b"".join(one.ids for one in samples),
        nodes=tuple(nodes),
        samples=tuple(range(len(samples))),
        trained=tuple(trained),
        lasts=tuple(node.end - 1 for node in nodes),
        parts=((0, start),),
    )


def has_prefix_grouper() -> bool:
    """Whether `make bench-peers` installed it."""
    return _prefix_grouper_file() is not None


def load_prefix_grouper() -> Any:
    """Its class, with its attention made known to transformers. It needs nothing but torch."""
    if "prefix_grouper" not in sys.modules:
        place = _prefix_grouper_file()
        assert place is not None
        spec = importlib.util.spec_from_file_location(
            "prefix_grouper", place, submodule_search_locations=[str(place.parent)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["prefix_grouper"] = module
        spec.loader.exec_module(module)
        AttentionInterface.register(GROUPED_ATTENTION, _grouped_attention)
        AttentionMaskInterface.register(GROUPED_ATTENTION, lambda *_, **__: None)
    return sys.modules["prefix_grouper"].PrefixGrouper


def _prefix_grouper_file() -> Path | None:
    found = sorted(PEERS.glob("lib/python*/site-packages/prefix_grouper/__init__.py"))
    return found[0] if found else None


def _grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    grouper: Any,
    mask: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        whole = q.shape[2] == k.shape[2]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if whole else mask, is_causal=whole, scale=scaling,
            enable_gqa=True,
        ).transpose(1, 2)  # fmt: skip

    return grouper.forward(attend, query, key, value), None


def _suffix_mask(prompt: int, answer: int) -> Tensor:
    """Additive: an answer sees the whole prompt and itself causally."""
    hidden = torch.ones(answer, prompt + answer, dtype=torch.bool).triu(prompt + 1)
    return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))


def _ids(sample: Sample) -> Tensor:
    return torch.frombuffer(bytearray(sample.ids), dtype=torch.int32).long()


def _backward(logits_TV: Tensor, targets_T: Tensor, samples: Sequence[Sample], count: int) -> float:
    logprobs_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]
    behavior_T, advantages_T = (
        torch.frombuffer(
            bytearray(b"".join(getattr(one, name) for one in samples)), dtype=torch.float32
        ).to(logits_TV.device)
        for name in ("behavior_logprobs", "advantages")
    )
    loss = cispo_loss(logprobs_T, behavior_T, advantages_T, ratio_cap=RATIO_CAP).sum() / count
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())
