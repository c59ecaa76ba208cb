"""Forge's advantages equal TRL's.

TRL computes them where it generates and scores, so generation and rewards are given here.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.training.trl_peer import HAS_TRL, bare_trainer
from forge.core.credit.advantages import AdvantageRules, GroupReturns, batch_advantages
from forge.rl.algorithms import preset
from tests.support.rl.models import tiny_model

pytestmark = pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed (extra: trl)")

REWARDS = [[0.0, 1.0, 1.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0]]
SIZE = 5
EPSILON = 1e-4
"""TRL adds it to every spread."""


def of_trl(folder: Path, *, rloo: bool = False, **options: Any) -> list[list[float]]:
    """By TRL's own code, of groups that earned `REWARDS`."""
    model = tiny_model("qwen3", torch.float32).train()
    trainer = bare_trainer(model, folder, options=options, answers=SIZE, longest=1, rloo=rloo)
    args, count = trainer.args, len(REWARDS) * SIZE
    trainer.accelerator.device, trainer.accelerator.process_index = torch.device("cpu"), 0
    for name in ("num_generations", "num_iterations", "mask_truncated_completions",
                 "pad_to_multiple_of", "reward_clip_range", "normalize_advantages",
                 "scale_rewards", "multi_objective_aggregation"):  # fmt: skip
        setattr(trainer, name, getattr(args, name, None))
    trainer.environment_factories = trainer.environments = trainer.tools = None
    trainer.log_multimodal = False
    trainer.reward_weights, trainer.reward_func_names = torch.ones(1), ["reward"]
    trainer._tokenizer = type("Tokenizer", (), {"pad_token_id": 0})()
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    ids, texts = [[1]] * count, ["answer"] * count
    answers: tuple[Any, ...] = (
        (ids, ids, texts) if rloo else (ids, ids, None, texts, None, {}, None, None)
    )
    trainer._generate = lambda prompts: answers
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        torch.zeros(count, 1),
        None,
        None,
    )
    trainer._calculate_rewards = lambda *_: torch.tensor(REWARDS).view(-1, 1)
    scored = trainer._generate_and_score_completions([{"prompt": "question"}] * count)
    rows: list[list[float]] = scored["advantages"].view(-1, SIZE).tolist()
    return rows


def of_forge(rules: AdvantageRules) -> list[list[float]]:
    groups = [GroupReturns(returns=[[reward] for reward in rewards]) for rewards in REWARDS]
    return [[turn for (turn,) in one.advantages] for one in batch_advantages(groups, rules)]


def rules_of(algorithm: str) -> AdvantageRules:
    own = preset(algorithm)
    return AdvantageRules(baseline=own.baseline, spread=own.spread)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("dr_grpo", {"scale_rewards": "none"}), ("rloo", {"rloo": True, "beta": 0.0})],
)
def test_advantages_equal_those_of_trl(
    algorithm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Minus the mean of the group, and minus that of the others in it."""
    for found, expected in zip(
        of_forge(rules_of(algorithm)), of_trl(tmp_path, **options), strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-6)


def test_advantages_over_the_group_spread_equal_trls_times_a_constant(tmp_path: Path) -> None:
    """Forge divides by the population's deviation, TRL by the sample's plus 1e-4: Forge's are
    sqrt(G / (G - 1)) times as large, apart from that term."""
    longer = math.sqrt(SIZE / (SIZE - 1))
    trl = of_trl(tmp_path, scale_rewards="group")
    for rewards, found, expected in zip(REWARDS, of_forge(rules_of("grpo")), trl, strict=True):
        spread = statistics.stdev(rewards)
        scale = longer * (spread + EPSILON) / spread if spread else 1.0
        assert found == pytest.approx([scale * one for one in expected], abs=1e-5)
