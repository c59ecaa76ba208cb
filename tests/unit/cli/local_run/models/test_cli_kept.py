"""The kept model of a run: read without torch, and compared with what workers serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from forge.cli.local_run.campaign import CampaignResult, Evaluation
from forge.cli.local_run.display import kept_note, result_table
from forge.cli.local_run.models.kept import MeasuredModel, measured_model, read_kept
from forge.cli.main import app
from forge.core.errors import DataLoss, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import TensorEntry, WeightAnnouncement, content_digest, digest_of
from services.trainer.checkpoint.files import Contents, raw_bytes

MODEL = {"w": torch.arange(6.0).bfloat16().reshape(2, 3), "a": torch.ones(3).bfloat16()}
HEADS = {"mtp.0.w": torch.zeros(2).bfloat16()}
MEASURED = Evaluation(by_domain={"qa": 0.5}, overall=0.5, attempts=8, failed=0)


@dataclass(frozen=True)
class Entry:
    value: bytes


class FakeRegister:
    """etcd with a manifest of that digest."""

    def __init__(self, digest: str) -> None:
        self.entry = Entry(
            WeightAnnouncement(
                weight_version=7, total_bytes=0, digest=digest, source="host:1", manifest="ab"
            ).encode()
        )

    async def get(self, key: str) -> Entry:
        assert key == "weights/default/latest"
        return self.entry


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000001"
    path.mkdir()
    Contents(model=MODEL, heads=HEADS, learner={}, model_path=tmp_path).write(path)
    return path


def test_kept_model_digest_covers_the_published_tensors(checkpoint: Path) -> None:
    """Over all files, in publication order, which differs from that of a safetensors file."""
    kept = read_kept(checkpoint)
    assert kept.digest == digest_of(map(raw_bytes, [*MODEL.values(), *HEADS.values()]))
    entries = [
        TensorEntry.of(
            NamedTensor(name=name, dtype="bfloat16", shape=tuple(one.shape), data=raw_bytes(one))
        )
        for name, one in [*MODEL.items(), *HEADS.items()]
    ]
    assert kept.content == content_digest(entries)
    assert (kept.dtype, kept.tensor_names) == ("bfloat16", ("w", "a", "mtp.0.w"))


@pytest.mark.parametrize("damage", ["bit", "short", "header", "heads"])
def test_files_that_differ_from_the_publication_are_damaged(checkpoint: Path, damage: str) -> None:
    """The error names the checkpoint."""
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    match damage:
        case "bit":
            data[-1] ^= 1
        case "short":
            del data[-2:]
        case "header":
            data[:8] = b"\xff" * 8
        case "heads":
            (checkpoint / "mtp.safetensors").unlink()
    file.write_bytes(data)
    with pytest.raises(DataLoss, match="step-00000001: "):
        read_kept(checkpoint)


def test_checkpoint_of_an_earlier_version_has_no_kept_model(checkpoint: Path) -> None:
    """It has no record of the publication."""
    (checkpoint / "published.json").unlink()
    with pytest.raises(NotFound, match=r"published.json is missing: .* keeps no model"):
        read_kept(checkpoint)


async def test_result_table_names_the_kept_model_if_it_was_measured(checkpoint: Path) -> None:
    """Only if the digest of its files is that of the served weights."""
    result = CampaignResult(before=MEASURED, after=MEASURED, weight_version=7)
    digest = read_kept(checkpoint).content
    for served, column in ((digest, "kept model"), ("other", "after")):
        measured = await measured_model(
            FakeRegister(served), checkpoint, sampled_version=7, last_step_version=6
        )
        console = Console(width=200, record=True)
        with console.capture() as capture:
            console.print(result_table(result, measured))
            console.print(kept_note(measured), soft_wrap=True)
        table, note = capture.get().split("Kept" if column != "after" else "The kept", 1)
        assert column in table and ("kept model" in table) == (column == "kept model")
        assert str(checkpoint) in note
        assert ("weight version 7" in note) == (column == "kept model")
    assert measured == MeasuredModel(
        path=checkpoint,
        weight_version=7,
        problem=f"its digest {digest} is not that of the weights served",
    )


async def test_measurement_of_an_earlier_step_is_not_of_the_kept_model(checkpoint: Path) -> None:
    """A finished run with added steps reads its measurement, but the model is newer."""
    register = FakeRegister(read_kept(checkpoint).content)
    measured = await measured_model(register, checkpoint, sampled_version=7, last_step_version=12)
    assert measured.problem == (
        "the tasks were sampled from weight version 7, and the last step published version 12"
    )


@pytest.fixture
def run(checkpoint: Path) -> Path:
    """A run directory whose newest checkpoint has state of training beside the model."""
    (checkpoint / "adapter").mkdir()
    for name in ("state.json", "history.jsonl", "master.safetensors", "adapter/a.safetensors"):
        (checkpoint / name).write_text("{}")
    (checkpoint / "tokenizer.json").write_text("{}")
    run = checkpoint.parent / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint.rename(run / "checkpoints" / checkpoint.name)
    (run / "checkpoints" / "latest").symlink_to(checkpoint.name)
    return run


@pytest.mark.parametrize("source", ["", "checkpoints/latest"])
def test_exported_model_has_the_published_bytes_and_no_state(
    run: Path, tmp_path: Path, source: str
) -> None:
    """Named by the run or by the checkpoint."""
    out = tmp_path / "models" / "out"
    told = CliRunner().invoke(app, ["model", "export", str(run / source), "--out", str(out)])
    assert told.exit_code == 0 and "3 tensors in bfloat16" in told.output
    names = {path.name for path in out.iterdir()}
    assert names == {"model.safetensors", "mtp.safetensors", "published.json", "tokenizer.json"}
    kept = run / "checkpoints" / "latest"
    for name in names:
        assert (out / name).read_bytes() == (kept / name).read_bytes()
    assert read_kept(out).digest == read_kept(kept).digest


@pytest.mark.parametrize("fault", ["damaged", "exists", "no run", "before", "unwritable"])
def test_failed_export_is_one_line(run: Path, tmp_path: Path, fault: str) -> None:
    """And leaves no files."""
    out, source, kept = tmp_path / "out", run, run / "checkpoints" / "latest"
    match fault:
        case "damaged":
            with (kept / "model.safetensors").open("ab") as file:
                file.truncate((kept / "model.safetensors").stat().st_size - 1)
            said = "ends early"
        case "exists":
            out, said = kept.resolve(), "exists already"
        case "no run":
            source, said = tmp_path, "neither a run with a checkpoint nor a checkpoint"
        case "before":
            (kept / "published.json").unlink()
            said = "keeps no model"
        case "unwritable":
            out, said = kept / "tokenizer.json" / "out", "cannot be written"
    before = sorted(tmp_path.rglob("*"))
    told = CliRunner().invoke(app, ["model", "export", str(source), "--out", str(out)])
    assert told.exit_code != 0 and said in told.output, told.output
    assert told.output.count("\n") == 1 and sorted(tmp_path.rglob("*")) == before
