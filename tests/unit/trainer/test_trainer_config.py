"""The trainer's algorithm settings: their effects, and refused ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from forge.core.credit.advantages import AdvantageRules
from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.algorithms import PRESETS
from forge.rl.config import Correction, MeshShape, ObjectiveConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.losses.objective import Objective
from forge.runtime.settings import load, to_toml
from services.trainer.actors.learner import LearnerActor
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.learner.model_replica import Take
from tests.support.rl.models import make_sample, tiny_model


def configured(*argv: str) -> TrainerConfig:
    return load(TrainerConfig, service="trainer", argv=argv, environ={})


def test_default_algorithm_is_cispo_with_the_group_mean() -> None:
    """The published algorithm, uncorrected."""
    config = configured()
    assert (config.objective, config.correction) == (ObjectiveConfig(), Correction())
    assert config.credit_rules().advantages == AdvantageRules()
    assert config.learner().passes_per_batch == 1


@pytest.mark.parametrize("algorithm", PRESETS)
def test_algorithm_sets_its_baseline_and_bounds(algorithm: str) -> None:
    """`auto` and 0 stand for the preset's values."""
    config, own = configured("--objective.algorithm", algorithm), PRESETS[algorithm]
    objective = Objective(config.objective, config.correction)
    assert (objective.clip_low, objective.clip_high) == (own.clip_low, own.clip_high)
    assert objective.normalization == own.normalization
    rules = config.credit_rules().advantages
    assert (rules.baseline, rules.spread) == (own.baseline, own.spread)


def test_settings_override_the_algorithm() -> None:
    """Baseline, spread, bounds and normalization can each be chosen."""
    config = configured(
        *("--objective.algorithm=grpo", "--objective.clip-high=0.28"),
        "--objective.normalization=token",
        *("--advantages.baseline=leave_one_out", "--advantages.normalize-std=batch"),
        *("--advantages.domain-weights=code=2,qa=0.5", "--correction.mask-ratio-high=4"),
    )
    objective = Objective(config.objective, config.correction)
    assert (objective.clip_low, objective.clip_high, objective.normalization) == (
        0.2,
        0.28,
        "token",
    )
    assert config.credit_rules().advantages == AdvantageRules(
        baseline="leave_one_out", spread="batch", domain_weights={"code": 2.0, "qa": 0.5}
    )
    assert config.correction.mask_ratio_high == 4.0


def test_custom_loss_is_loaded_at_start() -> None:
    """With its options, and only with those."""
    custom = "--objective.algorithm=examples.custom_loss:sapo"
    config = configured(custom, "--objective.loss-options=positive=2")
    assert config.objective.loss_options == {"positive": 2.0}
    with pytest.raises(ConfigError, match="heat"):
        configured(custom, "--objective.loss-options=heat=2")


PPO = "--objective.algorithm=ppo"
TEACHER = "--teacher-path=there --objective.teacher-coef=1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--objective.algorithm=gpro", "objective.algorithm = 'gpro' is not .* one of cispo, grpo"),
        ("--objective.clip-high=0.2", "objective.clip_high = 0.2 .*cispo does not clip"),
        ("--correction.weight-cap=2", "correction.weight_cap = 2.0 .*objective.old_logprobs"),
        ("--objective.normalization=mean", "normalization = 'mean' .*one of auto, token"),
        ("--objective.kl-coef=-1", "objective.kl_coef = '-1' .*at least 0"),
        ("--objective.entropy-coef=-1", "objective.entropy_coef = '-1' .*at least 0"),
        ("--objective.ratio-level=trajectory", "objective.ratio_level = 'trajectory' .*gspo, rloo"),
        ("--objective.normalization-tokens=9", "normalization_tokens = 9 .*trajectory_global"),
        ("--objective.teacher-only", "objective.teacher_only = True .*teacher_coef is above 0"),
        ("--objective.teacher-coef=1", "teacher_coef = 1.0 .*teacher_path = '': a teacher needs"),
        ("--teacher-path=there", "teacher_coef = 0.0 .*teacher_path = 'there'"),
        (f"{TEACHER} --advantages.drop-flat-groups", "drop_flat_groups = True .*teacher_coef = 1"),
        ("--advantages.refill-groups=4", "refill_groups = 4 .*drop_flat_groups = False"),
        ("--mini-batches=0", "mini_batches = '0' .*from 1 to 1024"),
        ("--overlong.mask=tail", "overlong.mask = 'tail' .*one of none, turn, trajectory"),
        ("--overlong.cache-tokens=9", "overlong.cache_tokens = 9 .*overlong.max_tokens"),
        ("--advantages.baseline=none --advantages.drop-flat-groups", "drop_flat_groups = True"),
        (f"{PPO} --advantages.baseline=group_mean", "advantages.baseline = group_mean .*= ppo"),
        (f"{PPO} --advantages.normalize-std=batch", "advantages.normalize_std = batch .*= ppo"),
        ("--advantages.domain-weights=code=-1", "domain_weights = 'code=-1'"),
        ("--optimizer.learning-rate-schedule=linear", "schedule = linear .*max_steps = 0"),
        ("--evaluation.every-steps=5", "evaluation.every_steps = 5 .*without evaluation.tasks"),
        ("--evaluation.at-start", "evaluation.at_start = True .*without evaluation.tasks"),
        ("--publish-from=ranks --ranks=2", "publish_from = ranks .*mesh.dp_shard = 1"),
        (
            "--ranks=2 --mesh.tp=2 --lora.rank=4 --lora.dropout=0.1",
            "lora.dropout = 0.1 .*mesh.tp = 2: .*mesh.dp_shard",
        ),
        ("--ranks=2 --mesh.tp=2 --mtp.heads=1", "mtp.heads = 1 .*mesh.tp = 2: .*mesh.dp_shard"),
        ("--ranks=2 --mesh.tp=2 --optimizer.name=muon", "optimizer.name = muon .*mesh.tp = 2"),
        ("--ranks=2 --device=cuda:0", "device = cuda:0 .*2 ranks: .*use cuda,"),
        ("--compile-layers --autocast=bfloat16 --lora.rank=4", "compile_layers .*lora.rank = 4"),
        ("--compile-layers", "compile_layers = True .*autocast = none"),
        ("--compile-layers --ranks=2 --mesh.tp=2", "compile_layers = True .*mesh.tp = 2"),
        ("--ranks=3 --mesh.dp-shard=0 --mesh.tp=2", "dp_shard = 0, .*with 3 ranks: the mesh has 2"),
        ("--ranks=4 --mesh.dp-shard=0 --mesh.dp-replicate=0", "dp_replicate = 0 .*dp_shard = 0"),
        ("--ranks=4 --mesh.tp=3", "mesh.tp = 3 is not allowed with 4 ranks: the mesh has 3"),
        ("--read-from=ranks --ranks=2", "read_from = ranks .*mesh.tp = 1: ranks with whole"),
        ("--read-from=ranks --ranks=2 --mesh.tp=2", "read_from = ranks .*mesh.dp_replicate = 1"),
        ("--rank-token-file=t", "rank_token_file = 't' .*read_from = rank_0"),
        ("--token-values.max-mib=1 --token-values.tokens-per-step=99000", "max_mib = 1: a token"),
    ],
)
def test_wrong_setting_is_one_line_with_name_and_value(argv: str, message: str) -> None:
    """Before anything is loaded or waited for."""
    with pytest.raises(ConfigError, match=message) as caught:
        configured(*argv.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("optimizer", "optimizer.name"),
        ("learning_rate", "optimizer.learning_rate"),
        ("mtp_learning_rate", "mtp.learning_rate"),
        ("lora_alpha", "lora.alpha"),
        ("alpha", "rewards.alpha"),
        ("eval_tasks", "evaluation.tasks"),
        ("checkpoint_dir", "checkpoint.dir"),
    ],
)
def test_setting_that_was_once_flat_names_its_table(name: str, key: str, tmp_path: Path) -> None:
    """As a flag, as a variable and in a file; none of them is ignored."""
    file = tmp_path / "trainer.toml"
    file.write_text(f'{name} = "1"\n')
    for argv, environ in (
        ([f"--{name.replace('_', '-')}=1"], {}),
        ([], {f"FORGE_{name.upper()}": "1"}),
        (["--config", str(file)], {}),
    ):
        with pytest.raises(ConfigError, match=rf"no setting {name} = '1'; did you mean {key} \("):
            load(TrainerConfig, service="trainer", argv=argv, environ=environ)


def test_expert_balance_loss_follows_its_setting(tmp_path: Path) -> None:
    """The loss scales with the coefficient, and is reported."""
    tiny_model("qwen3_moe", torch.float32).save_pretrained(tmp_path / "model")
    samples = [make_sample([1, 2, 3, n], (3, 4), rng=Random(n)) for n in range(4)]
    plan = plan_batch(samples, token_budget=64, channels=32)
    losses = {}
    for coef in ("0", "0.1", "0.2"):
        config = configured(
            *("--model-path", str(tmp_path / "model"), "--torch-threads=1"),
            *("--balance-coef", coef),
        )
        actor = LearnerActor(config, CheckpointStore(tmp_path / coef))
        actor.started()
        losses[coef] = actor.receive(Take(plan=plan, weight_version=1)).balance_loss
    assert losses["0"] == 0
    assert losses["0.2"] == pytest.approx(2 * losses["0.1"]) and losses["0.1"] > 0


def test_expert_balance_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    """The error names the setting and the type of the model."""
    tiny_model("qwen3", torch.float32).save_pretrained(tmp_path)
    config = configured("--model-path", str(tmp_path), "--balance-coef=0.1")
    with pytest.raises(InvalidArgument, match=r"balance_coef = 0\.1 .*'qwen3' has no experts"):
        LearnerActor(config, CheckpointStore(tmp_path / "checkpoints")).started()


def test_printed_settings_are_read_back(tmp_path) -> None:
    """`--print-config` of an algorithm is a file that gives the same."""
    config = configured("--objective.algorithm=gspo", "--advantages.domain-weights=code=2")
    file = tmp_path / "trainer.toml"
    file.write_text(to_toml(config))
    assert configured("--config", str(file)) == config


@pytest.mark.parametrize(
    ("argv", "shape"),
    [
        ("--ranks=4", MeshShape(cp=4)),
        ("--ranks=8 --mesh.dp-shard=2", MeshShape(dp_shard=2, cp=4)),
        ("--ranks=8 --mesh.dp-shard=0", MeshShape(dp_shard=8)),
        ("--ranks=8 --mesh.dp-shard=0 --mesh.cp=2 --mesh.tp=2", MeshShape(dp_shard=2, cp=2, tp=2)),
        (
            "--ranks=8 --mesh.dp-replicate=0 --mesh.dp-shard=4",
            MeshShape(dp_replicate=2, dp_shard=4),
        ),
        ("--ranks=1 --mesh.dp-shard=0", MeshShape()),
    ],
)
def test_one_dimension_of_the_mesh_has_the_ranks_that_others_leave(
    argv: str, shape: MeshShape
) -> None:
    """The one that is 0; `cp` only if no other one is."""
    assert configured(*argv.split()).mesh_shape == shape
