"""The trainer's algorithm settings: what they become, and what is refused."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from forge.core.credit.advantages import AdvantageRules
from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.algorithms import PRESETS
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.losses import Objective, ObjectiveConfig
from forge.runtime.config import load, to_toml
from services.trainer.actors.learner import LearnerActor, Step
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from tests.support.rl_models import make_sample, tiny_model


def configured(*argv: str) -> TrainerConfig:
    return load(TrainerConfig, service="trainer", argv=argv, environ={})


def test_the_defaults_are_cispo_with_the_group_mean() -> None:
    """Nothing set is the published algorithm, uncorrected."""
    config = configured()
    assert config.objective() == ObjectiveConfig()
    assert config.credit_rules().advantages == AdvantageRules()
    assert config.learner().passes == 1


@pytest.mark.parametrize("algorithm", PRESETS)
def test_an_algorithm_brings_its_own_baseline_and_bounds(algorithm: str) -> None:
    """`auto` and 0 stand for the preset's values."""
    config, own = configured("--algorithm", algorithm), PRESETS[algorithm]
    objective = Objective(config.objective())
    assert (objective.clip_low, objective.clip_high) == (own.clip_low, own.clip_high)
    assert objective.normalization == own.normalization
    rules = config.credit_rules().advantages
    assert (rules.baseline, rules.spread) == (own.baseline, own.spread)


def test_what_is_set_is_stronger_than_the_algorithm() -> None:
    """Baseline, spread, bounds and normalization can each be chosen."""
    config = configured(
        *("--algorithm", "grpo", "--clip-high", "0.28", "--normalization", "token"),
        *("--baseline", "leave_one_out", "--normalize-std", "batch"),
        *("--domain-weights", "code=2,qa=0.5", "--mask-ratio-high", "4"),
    )
    objective = Objective(config.objective())
    assert (objective.clip_low, objective.clip_high, objective.normalization) == (
        0.2,
        0.28,
        "token",
    )
    assert config.credit_rules().advantages == AdvantageRules(
        baseline="leave_one_out", spread="batch", domain_weights={"code": 2.0, "qa": 0.5}
    )
    assert config.objective().correction.mask_ratio_high == 4.0


def test_a_loss_of_ones_own_is_found_at_start() -> None:
    """With the options it takes, and only with those."""
    custom = ("--algorithm", "examples.custom_loss:sapo", "--loss-options")
    assert configured(*custom, "positive=2").objective().loss_options == {"positive": 2.0}
    with pytest.raises(ConfigError, match="heat"):
        configured(*custom, "heat=2")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--algorithm", "gpro"), "algorithm = 'gpro' is not allowed: one of cispo, grpo"),
        (("--clip-high", "0.2"), "clip_high = 0.2 is not allowed: .*cispo does not clip"),
        (("--weight-cap", "2"), "weight_cap = 2.0 .*old_logprobs"),
        (("--normalization", "mean"), "normalization = 'mean' .*one of auto, token"),
        (("--kl-coef", "-1"), "kl_coef = '-1' .*at least 0"),
        (("--baseline", "batch_mean", "--drop-flat-groups"), "drop_flat_groups = True"),
        (("--algorithm", "ppo", "--baseline", "group_mean"), "baseline = group_mean .*= ppo"),
        (("--algorithm", "ppo", "--normalize-std", "batch"), "normalize_std = batch .*= ppo"),
        (("--domain-weights", "code=-1"), "domain_weights = 'code=-1'"),
        (("--learning-rate-schedule", "linear"), "learning_rate_schedule = linear .*max_steps = 0"),
        (("--eval-every-steps", "5"), "eval_every_steps = 5 is not allowed without eval_tasks"),
        (("--eval-at-start",), "eval_at_start = True is not allowed without eval_tasks"),
    ],
)
def test_a_wrong_setting_is_one_line_with_name_and_value(
    argv: tuple[str, ...], message: str
) -> None:
    """Before anything is loaded or waited for."""
    with pytest.raises(ConfigError, match=message) as caught:
        configured(*argv)
    assert "\n" not in str(caught.value)


def test_experts_are_balanced_as_the_setting_says(tmp_path: Path) -> None:
    """The learner's balance loss is there, scales with the coefficient, and is told."""
    tiny_model("qwen3_moe", torch.float32).save_pretrained(tmp_path / "model")
    samples = [make_sample([1, 2, 3, n], (3, 4), rng=Random(n)) for n in range(4)]
    plan = plan_batch(samples, token_budget=64, channels=32)
    losses = {}
    for coef in ("0", "0.1", "0.2"):
        config = configured(
            *("--model-path", str(tmp_path / "model"), "--torch-threads", "1"),
            *("--balance-coef", coef),
        )
        actor = LearnerActor(config, CheckpointStore(tmp_path / coef))
        actor.started()
        losses[coef] = actor.receive(Step(plan=plan, weight_version=1)).balance_loss
    assert losses["0"] == 0
    assert losses["0.2"] == pytest.approx(2 * losses["0.1"]) and losses["0.1"] > 0


def test_a_dense_model_has_nothing_to_balance(tmp_path: Path) -> None:
    """The setting and the type of the model are named."""
    tiny_model("qwen3", torch.float32).save_pretrained(tmp_path)
    config = configured("--model-path", str(tmp_path), "--balance-coef", "0.1")
    with pytest.raises(InvalidArgument, match=r"balance_coef = 0\.1 .*'qwen3' has no experts"):
        LearnerActor(config, CheckpointStore(tmp_path / "checkpoints")).started()


def test_printed_settings_read_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """`--print-config` of an algorithm is a file that gives the same."""
    config = configured("--algorithm", "gspo", "--domain-weights", "code=2")
    file = tmp_path / "trainer.toml"
    file.write_text(to_toml(config))
    assert configured("--config", str(file)) == config
