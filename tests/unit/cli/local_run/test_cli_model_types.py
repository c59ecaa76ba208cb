"""Trainer and workers of a run compute in one type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli.local_run.model_types import types_line
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.training_run import preset_of, run_state, settings_of
from forge.cli.rundir import RunDirectory
from forge.runtime.coordination import Instance


def worker_types_of(
    folder: Path, config: Mapping[str, object], *overrides: str, device: str = "cpu"
) -> set[str]:
    """The workers' `dtype` of a run of a model with this config.json; "auto" if it is not set."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    options = RunOptions(model=str(folder), overrides=list(overrides), device=device)
    directory = RunDirectory(folder / "run")
    state = replace(run_state(options, directory), model_path=str(folder))
    settings = settings_of(options, directory, state, preset_of(options, state))
    return {settings.get(kind, {}).get("dtype", "auto") for kind in ("prefill", "decode")}


@pytest.mark.parametrize("config", [{"dtype": "float32"}, {"torch_dtype": "float16"}, {}])
def test_workers_follow_the_trainer_not_the_type_of_the_file(
    tmp_path: Path, config: Mapping[str, object]
) -> None:
    """The preset of an unknown model trains in bfloat16 where the device has it."""
    assert worker_types_of(tmp_path / "model", config) == {"device"}


def test_workers_keep_their_default_where_it_is_the_trainers_type(tmp_path: Path) -> None:
    """Then a worker started by hand, without a setting, agrees with those of the run."""
    folder = tmp_path / "model"
    assert worker_types_of(folder, {"dtype": "bfloat16"}) == {"auto"}
    nested = {"dtype": "float32", "text_config": {"dtype": "bfloat16"}}
    assert worker_types_of(folder, nested) == {"auto"}
    wide = "trainer.autocast=none"
    assert worker_types_of(folder, {"dtype": "float32"}, wide) == {"auto"}


def test_workers_follow_settings_of_the_command_line(tmp_path: Path) -> None:
    """Those of the trainer and of the device; their own win."""
    folder = tmp_path / "model"
    wide = "trainer.autocast=none"
    assert worker_types_of(folder, {"dtype": "bfloat16"}, wide) == {"float32"}
    assert worker_types_of(folder, {"dtype": "float32"}, device="cuda:0") == {"device"}
    narrow = "trainer.autocast=bfloat16"
    assert worker_types_of(folder, {"dtype": "bfloat16"}, narrow) == {"bfloat16"}
    own = [f"{kind}.dtype=float16" for kind in ("prefill", "decode")]
    assert worker_types_of(folder, {"dtype": "bfloat16"}, *own) == {"float16"}


def instance(kind: str, dtype: str) -> Instance:
    metadata = {"dtype": dtype} if dtype else {}
    return Instance(kind=kind, instance_id=kind, address="", metadata=metadata, revision=1)


def test_start_says_the_type_and_names_a_difference() -> None:
    """Processes of a release before announce no type: then nothing is said."""
    trainer, router = instance("trainer", "bfloat16"), instance("router", "")
    workers = [instance("prefill", "bfloat16"), instance("decode", "bfloat16")]
    assert types_line([trainer, router, *workers]) == "Trainer and workers compute in bfloat16"
    assert types_line([trainer, instance("decode", "float32")]) == (
        "The trainer computes in bfloat16, decode in float32: their log-probs differ"
    )
    assert types_line([router, *workers]) == types_line([trainer, router]) == ""
