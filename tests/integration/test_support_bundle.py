"""`forge support-bundle` of real services with planted secrets, and with services down."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from forge.cli import support_bundle
from forge.cli.bundle_command import make_bundle
from forge.cli.options import SystemOptions
from forge.cli.rundir import RunDirectory
from forge.core.errors import InvalidArgument
from forge.runtime.coordination import Coordinator, Instance
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.command import run_command

PLANTED = {
    "password": "hunter2-of-etcd",
    "api key": "sk-planted-0123456789",
    "variable": "value-of-a-variable",
    "token": "v1.cGxhbnRlZC1jbGFpbXM.cGxhbnRlZC1zaWduYXR1cmU",
    "command": "planted-option-value",
    "prompt": "PLANTEDPROMPT",
    "answer": "PLANTEDANSWER",
}


def contents(archive: Path) -> dict[str, str]:
    """The text of each part, by its name."""
    with tarfile.open(archive) as opened:
        return {
            member.name.partition("/")[2]: opened.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in opened.getmembers()
        }


def write_settings(folder: Path, stack: GatewayStack) -> Path:
    """Settings files of a host, one with a password in the address of etcd."""
    settings = folder / "settings"
    settings.mkdir()
    key = f'key_file = "{stack.key_file}"\n'
    etcd = f'etcd = "http://root:{PLANTED["password"]}@127.0.0.1:2379"\n'
    (settings / "pool.toml").write_text(key + f'data_dir = "{folder}/pool"\n' + etcd)
    command = f"/bin/echo --api-key={PLANTED['api key']} --password {PLANTED['command']} {{prompt}}"
    (settings / "agents.toml").write_text(key + f'command = "{command}"\n')
    return settings


def run_directory(folder: Path, stack: GatewayStack) -> RunDirectory:
    """A directory like that of a run of this stack, with its logs."""
    run = RunDirectory(folder / stack.cluster)
    run.logs.mkdir(parents=True)
    (run.path / "etcd.endpoints").write_text(stack.etcd.endpoint + "\n")
    shutil.copy(stack.key_file, run.key_file)
    for name in ("gateway-0", "pool"):
        shutil.copy(
            stack.log_of(name) if name != "pool" else stack.pool.log_path, run.log_file(name)
        )
    with run.log_file("runner").open("a") as log:
        log.write(f"the agent wrote: {PLANTED['answer']}\n")
        log.write(json.dumps({"event": "agent_failed", "error": PLANTED["answer"]}) + "\n")
        log.write(json.dumps({"event": "x", "header": f"Bearer {PLANTED['token']}"}) + "\n")
    started = {"pool": {"module": "services.pool", "flags": ["--shard=0"]}}
    run.processes.write_text(json.dumps(started))
    return run


async def test_bundle_has_no_secret_and_no_text_of_an_agent(
    stack: GatewayStack,
    gateway: Instance,
    own_coordinator: Coordinator,
    tmp_path: Path,
) -> None:
    """A key, a token, passwords, variables, a prompt and an answer are planted in files, variables,
    logs and a trajectory; the archive has every part, and none of them. The doctor finds
    nothing but the address of etcd: the host is sound."""
    client = stack.openai(gateway, stack.token("bundle:0:0"))
    said: Any = f"{PLANTED['prompt']} SAY[[{PLANTED['answer']}]]"
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": said}]
    )
    with pytest.raises(Exception, match="400"):
        await client.chat.completions.create(
            model="policy", messages=[], extra_body={"chat_template_kwargs": {"a": said}}
        )
    run = run_directory(tmp_path, stack)
    out = tmp_path / "bundle.tar.gz"
    words = ["--run-dir", str(run.path), "--out", str(out), "--root", str(tmp_path)]
    words += ["--settings", str(write_settings(tmp_path, stack))]
    environ = {"PLANTED_TOKEN": PLANTED["variable"], "FORGE_PLANTED": PLANTED["api key"]}
    with run.locked():
        ended = await run_command("support-bundle", *words, environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert out.stat().st_mode & 0o777 == 0o600
    parts = contents(out)
    assert "missing" not in parts["MANIFEST.txt"], parts["MANIFEST.txt"]
    key_lines = stack.key_file.read_text().split()
    for text in (*parts.values(), ended.stdout):
        for secret in (*PLANTED.values(), *key_lines):
            assert secret not in text
    status = json.loads(parts["status.json"])
    assert {one["kind"] for one in status["services"]} >= {"pool", "gateway", "router"}
    (shard,) = json.loads(parts["pool.json"])
    assert shard["pool_shard"] == "s0"
    assert "forge_gateway_turns_total" in parts["metrics/gateway-gateway-0.prom"]
    assert '"event": "serving"' in parts["logs/gateway-0.log"]
    assert "http://[removed]@127.0.0.1:2379" in parts["settings/pool.toml"]
    assert "FORGE_PLANTED\n" in parts["environment.txt"]
    assert "forge-rl" in parts["versions.json"]
    problems = [line for line in parts["doctor.txt"].splitlines() if line.startswith("BAD")]
    (own,) = [line for line in problems if "GiB" not in line]
    assert own.startswith("BAD pool: etcd = [removed] is plaintext") or "etcd = 'http" in own, own


async def test_bundle_of_a_stopped_run_says_what_is_missing(
    stack: GatewayStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has settings and logs; status, counts and metrics are lines of the manifest. An existing
    archive is kept."""
    run = run_directory(tmp_path, stack)
    monkeypatch.setattr(support_bundle, "examine", lambda *_, **__: [])
    out = tmp_path / "bundle.tar.gz"
    options = SystemOptions(run_dir=run.path, root=tmp_path)
    await make_bundle(options, settings=None, out=out)
    parts = contents(out)
    manifest = parts["MANIFEST.txt"]
    assert "data_dir" in parts["settings/run/pool.toml"]
    assert "logs/pool.log" in parts
    for name in ("status.json", "pool.json", "metrics"):
        assert f"missing  {name}: " in manifest
    assert "is not running" in manifest
    with pytest.raises(InvalidArgument, match="File exists"):
        await make_bundle(options, settings=None, out=out)
