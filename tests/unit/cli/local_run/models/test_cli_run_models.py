"""The file of `--models`: tables of the gateway, and the groups that a run serves."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli.local_run.models.run_models import RunModels
from forge.cli.local_run.models.served_models import ServingGroup, ensured, known
from forge.cli.local_run.presets import EMBEDDED
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.stack import StackPlan, default_gateways, members
from forge.cli.local_run.training_run import engine_python
from forge.cli.rundir import RunDirectory
from forge.core.errors import InvalidArgument
from services.gateway.named_models import NamedModel

FILE = """
[models.old]
kind = "version"
weights = "start"
open = true

[models.older]
kind = "version"
group = "old"
weights = "start"

[models.judge]
kind = "engine"
weights = "{judge}"

[models.seeded]
kind = "engine"
weights = "tiny"
seed = 7

[models."gpt-4.1"]
kind = "external"
url = "https://api.invalid/v1"
"""


@pytest.fixture
def models(tmp_path: Path) -> RunModels:
    (tmp_path / "judge").mkdir()
    file = tmp_path / "models.toml"
    file.write_text(FILE.format(judge=tmp_path / "judge"))
    return RunModels.read(file)


async def test_each_group_is_served_once_and_the_gateway_gets_its_tables(
    models: RunModels, tmp_path: Path
) -> None:
    """`weights` and `seed` are of the run alone; a model whose weights are not made yet is left out
    of a check."""
    judge = str((tmp_path / "judge").resolve())
    planned = known(models, "/start", root=tmp_path)
    tables = json.loads(planned.tables)
    assert tables.keys() == {"old", "older", "judge", "gpt-4.1"}
    assert tables["judge"] == {"kind": "engine", "model_path": judge}
    assert tables["old"] == {"kind": "version", "open": True}
    for table in tables.values():
        NamedModel(**table)
    assert planned.groups == (
        ServingGroup(name="judge", model_path=judge),
        ServingGroup(name="old", model_path="/start"),
    )
    made = tmp_path / "models" / "tiny-seed7-course4"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    made_all = await ensured(models, "/start", root=tmp_path)
    assert json.loads(made_all.tables)["seeded"]["model_path"] == str(made.resolve())
    assert {group.name for group in made_all.groups} == {"old", "judge", "seeded"}


def test_stack_has_router_and_workers_of_each_group(models: RunModels, tmp_path: Path) -> None:
    """Workers serve frozen weights; without models nothing is added."""
    plan = StackPlan(directory=RunDirectory(tmp_path), model_path="/start", cluster="c")
    before = [member.name for member in members(plan)]
    plan = StackPlan(
        directory=RunDirectory(tmp_path),
        model_path="/start",
        cluster="c",
        models=known(models, "/start", root=tmp_path),
    )
    by_name = {member.name: member for member in members(plan)}
    added = [name for name in by_name if name not in before]
    assert added == [
        f"{role}-{group}" for group in ("judge", "old") for role in ("prefill", "decode", "router")
    ]
    assert dict(by_name["decode-old"].settings) == {
        "model_path": "/start",
        "role": "decode",
        "serving_group": "old",
        "weights": "frozen",
    }
    assert "weights" not in by_name["router-old"].settings
    assert json.loads(by_name["gateway"].settings["models"]).keys() >= {"old", "judge"}
    assert plan.kinds[-6:] == (
        *("prefill@judge", "decode@judge", "router@judge"),
        *("prefill@old", "decode@old", "router@old"),
    )


def test_stack_has_several_gateways_with_ports_of_their_own(tmp_path: Path) -> None:
    """Ports of the settings are those of the first; all others are equal."""
    plan = StackPlan(
        directory=RunDirectory(tmp_path),
        model_path="/start",
        cluster="c",
        settings={"gateway": {"http.port": "8000", "http.shared_port": "9000"}},
        gateways=3,
    )
    found = [member for member in members(plan) if member.module == "services.gateway"]
    assert [member.name for member in found] == ["gateway", "gateway-2", "gateway-3"]
    assert found[0].settings["http.port"] == "8000"
    ports = {member.settings[key] for member in found for key in ("port", "http.port")}
    assert len(ports) == 6
    assert {member.settings["http.shared_port"] for member in found} == {"9000"}
    assert [default_gateways(cores) for cores in (1, 2, 8, 16, 96)] == [1, 1, 1, 2, 4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models.x", "models.toml: "),
        ("[old]\nkind = 'version'", r"must have tables \[models.NAME\] alone"),
        ("models = 1", r"must have tables \[models.NAME\] alone"),
        ("[models]\nx = 1", "models.x must be a table with kind"),
        ("[models.x]\nopen = true", "models.x must be a table with kind"),
        ("[models.x]\nkind = 'engine'", "models.x.weights is missing: start, tiny, smollm2"),
        ("[models.x]\nkind = 'version'\nweights = 1", "models.x.weights = 1 must be a text"),
        ("[models.x]\nkind = 'external'\nseed = 1", "models.x.seed is not for kind = 'external'"),
    ],
)
def test_wrong_file_is_refused_with_its_table(tmp_path: Path, text: str, words: str) -> None:
    """Before any weights are made."""
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        RunModels.read(file)


def test_other_engine_gets_one_worker_on_its_own_python(tmp_path: Path) -> None:
    """Of the role both, in its environment; there is no prefill worker to wait for. The policy's
    other processes are the same."""
    plan = StackPlan(directory=RunDirectory(tmp_path), model_path="/start", cluster="c")
    before = {member.name: member for member in members(plan)}
    plan = replace(plan, engine="vllm", engine_python="/venv/bin/python")
    after = {member.name: member for member in members(plan)}
    assert before.keys() - after.keys() == {"prefill"}
    assert "prefill" in replace(plan, engine=EMBEDDED).kinds and "prefill" not in plan.kinds
    worker = after["decode"]
    assert (worker.settings["engine"], worker.settings["role"]) == ("vllm", "both")
    assert worker.python == "/venv/bin/python"
    assert {member.python for name, member in after.items() if name != "decode"} == {sys.executable}


def test_python_of_an_engine_is_named_or_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named one, else that of .venv-ENGINE, else this one; a missing file is an error."""
    monkeypatch.chdir(tmp_path)
    assert engine_python(RunOptions(engine="vllm")) == sys.executable
    found = tmp_path / ".venv-vllm" / "bin" / "python"
    found.parent.mkdir(parents=True)
    found.touch()
    assert engine_python(RunOptions(engine="vllm")) == str(found)
    assert engine_python(RunOptions(engine_python=found)) == str(found)
    with pytest.raises(InvalidArgument, match="no such file"):
        engine_python(RunOptions(engine_python=tmp_path / "python"))
