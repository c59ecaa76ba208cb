"""Workers with an engine of another package, and the error of an unknown engine."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import grpc
import grpc.aio
import pytest

from forge.core.errors import ConfigError
from forge.runtime.coordination import Coordinator
from forge.runtime.security.tokens import Keyring
from services.inference.engines import registry
from tests.contract import engines
from tests.contract.engines import published, reference
from tests.support.inference.cluster import InferenceCluster
from tests.support.inference.table_engine import install_engines
from tests.support.runtime.etcd import EtcdServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path of new processes and of this one, with two entry points."""
    install_engines(
        tmp_path,
        monkeypatch,
        counting="tests.support.inference.counting_engine",
        broken="no_such_module",
    )


@pytest.mark.usefixtures("installed")
async def test_workers_serve_with_an_installed_engine(
    tmp_path: Path, etcd: EtcdServer, coordinator: Coordinator, cluster: str
) -> None:
    """Prefill and decode processes start the engine of an entry point and answer a request."""
    engines.CONFIGS["llama"].save_pretrained(tmp_path / "model")
    inference = InferenceCluster(tmp_path, tmp_path / "model", coordinator, etcd, cluster)
    try:
        await inference.publisher.start()
        await inference.publisher.publish(published(reference("llama")))
        inference.start("router")
        for role in ("prefill", "decode"):
            name = inference.start(role, "--engine", "counting", "--context-tokens", "64")
            await inference.registered(role, name, weight_version="1", cache_tokens="0")
        sample = await inference.sample([5, 7], max_tokens=4)
        assert sample.ids == [8, 9, 10, 11]
        assert sample.versions == [1] * 4
        refusal = "no worker can serve this request: the engine counting cannot serve"
        with pytest.raises(grpc.aio.AioRpcError, match=refusal) as lacks:
            await inference.sample([5, 7], max_tokens=4, top_k=3)
        assert lacks.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert {worker.engine for worker in (await inference.status()).workers} == {"counting"}
    finally:
        await inference.stop()


def test_unknown_engine_is_one_line(etcd: EtcdServer, cluster: str, tmp_path: Path) -> None:
    """A worker exits with 2; the line names the setting, the known engines and the group."""
    Keyring.generate(tmp_path / "key")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "services.inference", "--role", "decode", "--engine", "vlm"),
            *("--model-path", str(tmp_path), "--etcd", etcd.endpoint, "--cluster", cluster),
            *("--key-file", str(tmp_path / "key")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert ended.returncode == 2
    assert len(lines) == 1
    for words in (
        "engine = 'vlm'",
        "installed: embedded, tensorrt_llm, vllm",
        "forge.engines",
        "docs/engines.md",
    ):
        assert words in lines[0]


@pytest.mark.usefixtures("installed")
def test_broken_entry_point_is_named() -> None:
    """The error names the entry point and the module that cannot be imported."""
    with pytest.raises(ConfigError, match=r"forge\.engines 'broken'.*no_such_module"):
        registry.get_engine("broken")
    with pytest.raises(ConfigError, match="broken, counting, embedded, tensorrt_llm, vllm"):
        registry.get_engine("vlm")


def test_built_in_engines_are_the_entry_points_of_this_package() -> None:
    """pyproject.toml and the registry list the same engines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][registry.ENGINES_GROUP] == registry.BUILT_IN
