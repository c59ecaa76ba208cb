"""Model directories: accepted ones, refused ones, and none half made."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from forge.core.errors import InvalidArgument, NotFound
from services.trainer.starting_weights import fetch


def model_directory(path: Path, *, without: str = "") -> Path:
    """A directory with every file the services look for, but one."""
    path.mkdir()
    files = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"chat_template": "..."}',
        "model.safetensors": "",
    }
    for name, content in files.items():
        if name != without:
            (path / name).write_text(content)
    return path


def test_complete_model_directory_is_used_unchanged(tmp_path: Path) -> None:
    """A path that holds a model resolves to itself, and nothing is written."""
    directory = model_directory(tmp_path / "model")
    assert fetch.resolve_model(str(directory), tmp_path / "out") == directory
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("tokenizer_config.json", "no chat template"),
        ("model.safetensors", "no weights"),
    ],
)
def test_incomplete_model_directory_is_refused(tmp_path: Path, missing: str, said: str) -> None:
    """The error names the missing part."""
    directory = model_directory(tmp_path / "model", without=missing)
    with pytest.raises(InvalidArgument, match=said):
        fetch.resolve_model(str(directory), tmp_path / "out")


def test_chat_template_may_be_in_its_own_file(tmp_path: Path) -> None:
    """chat_template.jinja stands in for the key in tokenizer_config.json."""
    directory = model_directory(tmp_path / "model", without="tokenizer_config.json")
    (directory / "chat_template.jinja").write_text("...")
    assert fetch.resolve_model(str(directory), tmp_path / "out") == directory


def test_missing_path_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    """A string that looks like a path is refused as a path."""
    with pytest.raises(NotFound, match="no model directory"):
        fetch.resolve_model(str(tmp_path / "absent"), tmp_path / "out")


def test_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the model and the way out, and leaves no directory behind."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Name or service not known\nwith a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(NotFound, match=r"'some/model'.*Name or service not known; give") as caught:
        fetch.resolve_model("some/model", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_model_from_the_hub_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download is moved into place, and found there the next time."""

    def download(model: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        model_directory(local_dir / "content")
        for file in (local_dir / "content").iterdir():
            file.rename(local_dir / file.name)
        (local_dir / "content").rmdir()

    out = tmp_path / "out"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch.resolve_model("some/model", out) == out
    monkeypatch.delattr(huggingface_hub, "snapshot_download")
    assert fetch.resolve_model("some/model", out) == out
    assert list(tmp_path.iterdir()) == [out]
