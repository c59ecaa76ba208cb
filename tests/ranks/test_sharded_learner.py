"""A learner of ranks that shard model and optimizer, and its checkpoints on other worlds."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.cli.local_run.models.kept import read_kept
from forge.core.errors import ResourceExhausted
from forge.rl.config import MtpConfig, ObjectiveConfig, OptimizerConfig, RoutingReplayConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.learner.types import StepResult
from forge.rl.parallel.state_memory import placed
from services.trainer.actors.learner import DescribeRoutes, LearnerActor, Restore, TakeSnapshot
from services.trainer.checkpoint import writer as writer_module
from services.trainer.checkpoint.files import mapped
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.reading import fill_learner, master_weights, read_learner
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.learner.model_replica import Capture, Take
from services.trainer.mesh import MeshSettings
from services.trainer.setting_tables import LoraSettings
from tests.support.rl.models import make_sample, tiny_model
from tests.support.rl.routed import with_routes
from tests.support.rl.worlds import credited
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.slow_files import slow_file
from tests.support.trainer.learners import started_learner

pytestmark = pytest.mark.timeout(900)
LORA = LoraSettings(rank=2, alpha=8.0, targets=("q_proj", "down_proj"))


SHARDS = MeshSettings(dp_shard=2, cp=2), MeshSettings(dp_shard=2)
PARTS = MeshSettings(dp_shard=2, tp=2), MeshSettings(tp=2)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tied head."""
    return saved("llama", tmp_path_factory.mktemp("model"))


def saved(family: str, path: Path) -> Path:
    tiny_model(family, torch.float32).save_pretrained(path)
    return path


def learner(model_path: Path, checkpoints: Path, lora: int, **settings: Any) -> LearnerActor:
    adapters = {"lora": LORA} if lora else {}
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return started_learner(model_path, checkpoints, optimizer=optimizer, **adapters, **settings)


def step(actor: LearnerActor, seed: int, **options: Any) -> StepResult:
    rng = Random(seed)
    samples = [
        make_sample([seed % 13, n % 13, *[rng.randrange(13) for _ in range(12)]], (4, 14), rng=rng)
        for n in range(8)
    ]
    plan = plan_batch(samples, token_budget=64, channels=16, **options)
    result: StepResult = actor.receive(Take(plan=plan, weight_version=1))
    assert result.skipped == ""
    return result


def sent(actor: LearnerActor) -> dict[str, torch.Tensor]:
    return {
        one.name: torch.frombuffer(bytearray(one.data), dtype=getattr(torch, one.dtype)).reshape(
            one.shape
        )
        for one in actor.receive(TakeSnapshot(step=1)).tensors
    }


def stored(path: Path, lora: int) -> dict[str, torch.Tensor]:
    """All tensors in a checkpoint, whole, from the shards of all ranks."""
    found = {f"master {name}": one for name, one in master_in(path, lora).items()}
    outline = read_learner(path)
    learner = placed(outline)
    fill_learner(learner, outline, path)
    learner["random_states"] = learner["random_states"][:1]  # those of the ranks above 0 are new
    mapped(lambda name, tensor: found.update({name: tensor}), learner)
    return found


def master_in(path: Path, lora: int) -> dict[str, torch.Tensor]:
    return master_weights(path, adapters=bool(lora)).read()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save(actor: LearnerActor, number: int) -> Path:
    return actor._checkpoints.save(
        actor.receive(Capture()).write,
        step=number,
        weight_version=number,
        history=CheckpointHistory(),
    )


@pytest.mark.parametrize(
    ("family", "meshes", "lora", "publish_dtype"),
    [
        ("llama", SHARDS, 0, "float32"),
        ("llama", SHARDS, 0, "bfloat16"),
        ("llama", SHARDS, 2, "float32"),
        ("llama", PARTS, 0, "bfloat16"),
        ("llama", PARTS, 2, "float32"),
        ("qwen3_moe", PARTS, 0, "float32"),
    ],
)
def test_checkpoint_of_four_ranks_continues_on_one_and_two(
    tmp_path: Path, family: str, meshes: Any, lora: int, publish_dtype: Any
) -> None:
    """The ranks train like one process; weights, moments and random state are restored bit for bit
    in each world."""
    model_path = saved(family, tmp_path / "model")
    types: dict[str, Any] = {"publish_dtype": publish_dtype}
    four = learner(model_path, tmp_path, lora, ranks=4, mesh=meshes[0], **types)
    try:
        alone = learner(model_path, tmp_path / "alone", lora, **types)
        for seed in range(2):
            one, shared = step(alone, seed), step(four, seed)
            assert shared.loss == pytest.approx(one.loss, rel=1e-5)
            assert shared.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
            assert shared.stats.entropy == pytest.approx(one.stats.entropy, rel=1e-5)
        expected, published = sent(alone), sent(four)
        assert published.keys() == expected.keys()
        limit = 2e-5 if publish_dtype == "float32" else 2e-2
        for name, found in published.items():
            assert torch.allclose(found.float(), expected[name].float(), atol=limit), name
        path = save(four, 1)
        kept = stored(path, lora)
    finally:
        four.stopped()
    assert len(list(path.glob("model-*-of-00004.safetensors"))) == 4
    assert len(list(path.glob("state/rank-*.safetensors"))) == 4
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert same({name: loaded[name] for name in published}, published)
    assert read_kept(path).tensor_names == tuple(published)

    single = learner(model_path, tmp_path, lora, **types)
    assert single.receive(Restore()).step == 1
    assert same(sent(single), published)
    assert same(stored(save(single, 2), lora), kept)
    two = learner(model_path, tmp_path, lora, ranks=2, mesh=meshes[1], **types)
    try:
        assert two.receive(Restore()).step == 2
        assert same(sent(two), published)
        assert same(stored(save(two, 3), lora), kept)
        after, again = step(two, 7), step(single, 7)
        assert after.loss == pytest.approx(again.loss, rel=1e-5)
    finally:
        two.stopped()


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", SHARDS[1]),
        ("llama", PARTS[1]),
        ("qwen3_moe", SHARDS[1]),
        ("qwen3_moe", PARTS[1]),
        ("falcon_h1", SHARDS[1]),
    ],
)
def test_ranks_with_the_types_of_a_gpu_train_like_one_process(
    tmp_path: Path, family: str, mesh: MeshSettings
) -> None:
    """Layers are gathered in bfloat16, and widened for the check before training; a reference of a
    directory in bfloat16 keeps its matrices so."""
    model_path, reference = tmp_path / "model", tmp_path / "reference"
    model = tiny_model(family, torch.bfloat16)
    model.save_pretrained(model_path)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(reference)
    types: dict[str, Any] = {
        "autocast": "bfloat16",
        "publish_dtype": "bfloat16",
        "reference_path": str(reference),
        "objective": ObjectiveConfig(kl_coef=0.3),
    }
    two = started_learner(model_path, tmp_path, ranks=2, mesh=mesh, **types)
    try:
        one, shared = (
            step(started_learner(model_path, tmp_path / "alone", **types), 1),
            step(two, 1),
        )
        assert one.stats.reference_kl > 0.01
        assert shared.stats.reference_kl == pytest.approx(one.stats.reference_kl, rel=2e-2)
        assert shared.loss == pytest.approx(one.loss, rel=1e-2)
    finally:
        two.stopped()


@pytest.mark.parametrize("mesh", [SHARDS[1], PARTS[1]])
@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_ranks_that_replay_experts_train_every_weight(
    tmp_path: Path, mesh: MeshSettings, autocast: Any
) -> None:
    """The forward that finds the routers leaves the parameters divided."""
    model_path = saved("qwen3_moe", tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    settings: dict[str, Any] = {
        "autocast": autocast,
        "publish_dtype": "float32" if autocast == "none" else "bfloat16",
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "routing_replay": RoutingReplayConfig(enabled=True),
    }
    two = started_learner(model_path, tmp_path, ranks=2, mesh=mesh, **settings)
    try:
        alone = started_learner(model_path, tmp_path / "alone", **settings)
        one, shared = (replaying_step(actor) for actor in (alone, two))
        assert shared.loss == pytest.approx(one.loss, rel=1e-5 if autocast == "none" else 1e-2)
        assert shared.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)
        for name, found in sent(two).items():
            assert not torch.equal(found.float(), before[name]), name
    finally:
        two.stopped()


def replaying_step(actor: LearnerActor) -> StepResult:
    shape = actor.receive(DescribeRoutes())
    samples = with_routes(credited(), shape)
    plan = plan_batch(samples, token_budget=40, channels=16, route_shape=shape)
    result: StepResult = actor.receive(Take(plan=plan, weight_version=1))
    assert result.skipped == ""
    return result


def test_ranks_draw_the_same_draft_heads(tmp_path: Path) -> None:
    """Rank 0 alone loads a model whose names are converted, and draws numbers meanwhile."""
    model_path = saved("qwen3_next", tmp_path / "model")
    settings: dict[str, Any] = {
        "publish_dtype": "float32",
        "optimizer": OptimizerConfig(learning_rate=1e-3),
        "mtp": MtpConfig(heads=1, learning_rate=1e-3),
    }
    two = started_learner(model_path, tmp_path, ranks=2, mesh=SHARDS[1], **settings)
    try:
        alone = started_learner(model_path, tmp_path / "alone", **settings)
        for actor in (alone, two):
            step(actor, 0)
        expected, found = sent(alone), sent(two)
    finally:
        two.stopped()
    names = tiny_model("qwen3_next", torch.float32).state_dict()
    heads = [name for name in found if name not in names]
    assert len(heads) > 1
    assert all(torch.allclose(found[name], expected[name], atol=2e-5) for name in heads)


@pytest.mark.parametrize("mesh", [SHARDS[1], PARTS[1]])
def test_frozen_matrices_of_16_bits_are_divided_like_others(
    tmp_path: Path, mesh: MeshSettings
) -> None:
    """The step on adapters of a base in bfloat16 is that of one process, up to the order of sums in
    16 bits; matrices without adapters are published as they are in the directory."""
    model_path = tmp_path / "model"
    tiny_model("qwen3_moe", torch.bfloat16).save_pretrained(model_path)
    lora = LoraSettings(rank=2, alpha=8.0, targets=("q_proj", "o_proj"))
    types: dict[str, Any] = {
        "autocast": "bfloat16",
        "publish_dtype": "float32",
        "lora": lora,
        "optimizer": OptimizerConfig(learning_rate=1e-3),
    }
    two = started_learner(model_path, tmp_path, ranks=2, mesh=mesh, **types)
    try:
        alone = started_learner(model_path, tmp_path / "alone", **types)
        one, shared = step(alone, 1), step(two, 1)
        assert shared.loss == pytest.approx(one.loss, rel=1e-2)
        assert shared.grad_norm == pytest.approx(one.grad_norm, rel=1e-2)
        expected, published = sent(alone), sent(two)
    finally:
        two.stopped()
    base = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    for name, found in published.items():
        changed = not torch.equal(found, base[name].float())
        assert changed == ("q_proj" in name or "o_proj" in name), name
        assert torch.allclose(found, expected[name], atol=2.5e-3), name


def test_rank_reads_the_trees_of_its_data_group_alone(model_path: Path, tmp_path: Path) -> None:
    """Ranks of one data group read the same trees, and all groups together each tree once."""
    file = tmp_path / "log"
    settings: dict[str, Any] = {"mini_batches": 2, "token_budget": 64}
    divided = {"mini_batches": 2, "data_groups": 2}
    four = learner(
        *(model_path, tmp_path, 0),
        ranks=4,
        mesh=MeshSettings(dp_shard=2, cp=2),
        log_file=str(file),
        log_level="debug",
        **settings,
    )
    try:
        alone = learner(model_path, tmp_path / "alone", 0, **settings)
        for seed in range(2):
            one, shared = step(alone, seed, **divided), step(four, seed, **divided)
            assert shared.updates == 2 and shared.loss == pytest.approx(one.loss, rel=1e-5)
    finally:
        four.stopped()
    read: dict[int, int] = Counter()
    for line in log_lines(file):
        if line["event"] == "batch_part":
            read[line["rank"]] += line["tree_tokens"]
    assert read[2] == read[3] and 0 < read[1] < 2 * shared.plan.tree_tokens
    assert read[1] + read[2] == 2 * shared.plan.tree_tokens


def test_checkpoint_of_two_ranks_is_whole_or_absent(model_path: Path, tmp_path: Path) -> None:
    """A rank that cannot write, or is killed, or whose writer process is, costs that
    checkpoint alone; a damaged shard costs the checkpoint that has it."""
    pair = learner(model_path, tmp_path, 0, ranks=2, mesh=MeshSettings(dp_shard=2))
    try:
        step(pair, 0)
        save(pair, 1)

        def obstructed(directory: Path) -> None:
            (directory / "state" / "rank-00001.safetensors").mkdir(parents=True)
            contents.write(directory)

        contents = pair.receive(Capture())
        with pytest.raises(ResourceExhausted, match=r"00002: rank 1: .*Is a directory"):
            pair._checkpoints.save(
                obstructed, step=2, weight_version=2, history=CheckpointHistory()
            )
        assert steps_in(tmp_path) == [1]
        save(pair, 2)

        assert pair._ranks is not None
        (process,) = pair._ranks._processes
        children = psutil.Process(process.pid).children()
        (writer,) = (one for one in children if one.cmdline()[-1] == writer_module.__name__)

        def without_writer(directory: Path) -> None:
            file = directory / "state" / "rank-00001.safetensors"
            file.parent.mkdir()
            with ThreadPoolExecutor() as threads, slow_file(file) as slow:
                writing = threads.submit(contents.write, directory)
                slow.await_write()
                writer.kill()
                writing.result()

        contents = pair.receive(Capture())
        with pytest.raises(ResourceExhausted, match=r"00003: rank 1: the process .* SIGKILL"):
            pair._checkpoints.save(
                without_writer, step=3, weight_version=3, history=CheckpointHistory()
            )
        assert steps_in(tmp_path) == [1, 2]

        contents = pair.receive(Capture())
        process.kill()
        with pytest.raises(ResourceExhausted, match="step-00000003: rank 1 has ended"):
            pair._checkpoints.save(
                contents.write, step=3, weight_version=3, history=CheckpointHistory()
            )
        assert steps_in(tmp_path) == [1, 2] and not list(tmp_path.glob("*.unfinished"))

        shard = tmp_path / "step-00000002" / "state" / "rank-00001.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        pair.stopped()
        pair.started()
        assert pair.receive(Restore()).step == 1
        step(pair, 1)
    finally:
        pair.stopped()


def steps_in(checkpoints: Path) -> list[int]:
    return sorted(one.step for one in CheckpointStore(checkpoints).newest_first())
