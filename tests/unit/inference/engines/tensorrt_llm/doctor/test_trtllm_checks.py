"""Tests: what `forge doctor --engine tensorrt_llm` says without the library, with one, and with a
GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.tensorrt_llm.doctor.checklist import CHECKS, run_checks
from services.inference.engines.tensorrt_llm.doctor.checks import examine
from services.inference.engines.tensorrt_llm.library.surface import TARGET, load_surface
from tests.support.inference.surface_tree import PACKAGE, edit, write_tree
from tests.support.inference.tensorrt_llm import OLD, library
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour

PROVIDER = "services.inference.engines.tensorrt_llm.provider"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_missing_library_has_a_remedy() -> None:
    """And the checklist is not run."""
    found = list(examine())
    assert found[0].text.startswith("tensorrt_llm is not installed")
    assert "deploy/requirements/tensorrt-llm.txt" in found[0].remedy
    not_run = [one.text for one in found if not one.was_run]
    assert not_run == [f"not run: {check.text}; there is no GPU" for check in CHECKS]


def test_worker_needs_no_torch_of_ours() -> None:
    """The library's environment has other versions of torch and transformers, and no llguidance: a
    worker with this engine imports none of them by itself."""
    modules = ["services.inference.worker.role", "services.inference.engines.doctor", PROVIDER]
    blocked = ["torch", "transformers", "tokenizers", "llguidance"]
    program = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    program += "\n".join(f"import {module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_and_features_are_told(tmp_path: Path) -> None:
    """All features of the target version, and no difference."""
    texts = [one.text for one in examine(root=write_tree(tmp_path, load_surface(TARGET)))]
    assert f"tensorrt_llm {TARGET} in {tmp_path / PACKAGE}" in texts
    assert f"surface {TARGET}: no difference" in texts
    assert any(text.startswith("features: cache_salt, cuda_graph_updates") for text in texts)
    assert not any(text.startswith("lacks ") for text in texts)


def test_missing_features_name_their_version(tmp_path: Path) -> None:
    """1.2.1 drains before an update, and says what would change that."""
    root = write_tree(tmp_path, load_surface(OLD).verified())
    lacking = [one for one in examine(root=root) if one.text.startswith("lacks pause")]
    assert len(lacking) == 1
    assert lacking[0].text.endswith(f"install {TARGET} or newer for it")


def test_difference_is_a_problem_with_a_remedy(tmp_path: Path) -> None:
    """A changed signature is found before the library is imported."""
    root = write_tree(tmp_path, load_surface(TARGET))
    edit(
        root, f"{PACKAGE}._torch.async_llm", "collective_rpc(self, method,", "collective_rpc(self,"
    )
    problems = [one for one in examine(root=root) if "collective_rpc.method" in one.text]
    assert len(problems) == 1
    assert not problems[0].ok
    assert TARGET in problems[0].remedy


async def test_checklist_passes_on_the_stand_in(behaviour: Behaviour, model_path: Path) -> None:
    """The checks run as on a GPU, against transformers' own forward."""
    results = await run_checks(library(), model_path, TensorRtLlmSettings())
    assert [problem for _, problem in results] == ["" for _ in CHECKS]


async def test_checklist_finds_wrong_logprobs(behaviour: Behaviour, model_path: Path) -> None:
    """An engine whose samples have other log-probs is a problem with a remedy."""
    behaviour.logprob_error = 1.0
    results = await run_checks(library(), model_path, checks=CHECKS[:1])
    assert [problem for _, problem in results] == ["log-probs differ by 1 (mean)"]
