"""TRL's own loss and log-probs, on a trainer that is given what its constructor would have set.

Only generation, rewards and the distributed launcher are left out.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_array, int32_array

HAS_TRL = importlib.util.find_spec("trl") is not None


def fuse_head(model: Any) -> None:
    """Give the model the head by which TRL computes log-probs and entropies."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy"))


def bare_trainer(
    model: Any,
    folder: Path,
    *,
    options: Mapping[str, Any],
    answers: int,
    longest: int,
    rloo: bool = False,
) -> Any:
    """A GRPOTrainer (or RLOOTrainer) with the `options` of its config, for batches of so many
    answers of at most `longest` tokens; its `_compute_loss` is what is wanted."""
    import trl

    config_type: Any = trl.RLOOConfig if rloo else trl.GRPOConfig
    args = config_type(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none",
        per_device_train_batch_size=answers, num_generations=answers,
        max_completion_length=longest, **options,
    )  # fmt: skip
    trainer: Any = object.__new__(trl.RLOOTrainer if rloo else trl.GRPOTrainer)
    for name in (
        "loss_type", "importance_sampling_level", "off_policy_mask_threshold",
        "top_entropy_quantile", "max_completion_length", "beta",
    ):  # fmt: skip
        setattr(trainer, name, getattr(args, name, None))
    trainer.args, trainer.model = args, model
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = False
    trainer.current_gradient_accumulation_steps = 1
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.accelerator = SimpleNamespace(
        num_processes=1,
        is_main_process=False,
        autocast=nullcontext,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
    )
    return trainer


def collated(samples: Sequence[Sample], trained_tokens: Tensor) -> dict[str, Tensor]:
    """Requests as TRL collates them: prompts padded on the left, answers on the right.

    `trained_tokens`: of the whole step, of which these may be a part.
    """
    prompts, answers, behavior, advantages = [], [], [], []
    for one in samples:
        ((start, end),) = one.trained
        ids_L = torch.tensor(int32_array(one.ids))
        prompts.append(ids_L[:start].flip(0))
        answers.append(ids_L[start:end])
        behavior.append(torch.tensor(float32_array(one.behavior_logprobs)))
        advantages.append(torch.tensor(float32_array(one.advantages)))

    def pad(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    def mask(rows: list[Tensor]) -> Tensor:
        return pad([torch.ones(len(row), dtype=torch.long) for row in rows])

    return {
        "prompt_ids": pad(prompts).flip(1),
        "prompt_mask": mask(prompts).flip(1),
        "completion_ids": pad(answers),
        "completion_mask": mask(answers),
        "advantages": pad(advantages),
        "old_per_token_logps": pad(behavior),
        "num_items_in_batch": trained_tokens,
    }
