"""What operators see of real services: support bundles without secrets, and traces.

`tests/e2e/test_e2e_run.py` follows a rollout through every service.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tarfile
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge.cli.doctor import support_bundle
from forge.cli.doctor.support_bundle import make_bundle
from forge.cli.options import SystemOptions
from forge.cli.rundir import RunDirectory
from forge.client.reward_events import reward_event
from forge.core.errors import InvalidArgument
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.tracing.traceparent import (
    is_sampled,
    read_traceparent,
    rollout_traceparent,
)
from forge.v1 import common_pb2
from tests.support.gateway.stack import GatewayStack, recorded
from tests.support.runtime.command import run_command
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.otlp_collector import CollectedSpan, Collector, collecting
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.commands

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
    failed = f"RuntimeError: agent ended with 1: {PLANTED['prompt']}"
    with run.log_file("scheduler").open("w") as log:
        log.write(json.dumps({"event": "rollout_failed", "reason": failed}) + "\n")
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
    own = [line for line in problems if "GiB" not in line]
    assert [line.partition(" = ")[0] for line in own] == ["BAD pool: etcd"], own


@pytest.mark.usefixtures("gateway")
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


@pytest_asyncio.fixture(scope="module")
async def collector(stack: GatewayStack) -> AsyncIterator[Collector]:
    """It gets the spans of `gateway-traced`, of every second rollout or so."""
    with collecting() as (made, endpoint):
        tracing = ("--tracing.endpoint", endpoint, "--tracing.sample-ratio", "0.5")
        stack.start_gateway("gateway-traced", *tracing)
        yield made
        stack.kill("gateway-traced")


def trajectory_with(*, sampled: bool, cluster: str) -> str:
    """A trajectory whose rollout is traced, or is not."""
    names = (f"traced-{number}:0:0" for number in range(1000))
    return next(
        name
        for name in names
        if is_sampled(rollout_traceparent(cluster, name, sample_ratio=0.5)) == sampled
    )


async def call(
    stack: GatewayStack, coordinator: Coordinator, trajectory_id: str, traceparent: str = ""
) -> common_pb2.Trajectory:
    """One model call at the traced gateway; returns the record after the close."""
    gateway = await stack.gateway(coordinator, "gateway-traced")
    token = stack.token(trajectory_id)
    await stack.openai(gateway, token).chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "SAY[[Hello.]]"}],
        temperature=0.5,
        extra_headers={"traceparent": traceparent} if traceparent else {},
    )
    async with stack.agent(gateway, token) as agent:
        await agent.close(reward_event("solved", 1.0), min_turns=1)
    return await recorded(stack, coordinator, trajectory_id)


async def test_model_call_is_below_the_root_of_its_rollout(
    stack: GatewayStack, own_coordinator: Coordinator, collector: Collector
) -> None:
    """An agent without a trace context: every process knows the ids from the trajectory. The span
    of the call has the names of OpenTelemetry's conventions and no text, and its context is on
    record; a rollout that is not sampled has no span."""
    untraced = trajectory_with(sampled=False, cluster=stack.cluster)
    (turn,) = (await call(stack, own_coordinator, untraced)).turns
    assert turn.traceparent == ""
    trajectory_id = trajectory_with(sampled=True, cluster=stack.cluster)
    (turn,) = (await call(stack, own_coordinator, trajectory_id)).turns
    root = read_traceparent(rollout_traceparent(stack.cluster, trajectory_id, sample_ratio=0.5))
    assert root is not None
    trace_id = f"{root.trace_id:032x}"

    async def spans() -> dict[str, CollectedSpan]:
        found = {span.name.partition(" ")[0]: span for span in collector.trace(trace_id)}
        return found if "forge.v1.GatewayService/CloseSession" in found else {}

    by_name = await until(spans)
    request, chat = by_name["POST"], by_name["chat"]
    assert request.name == "POST /v1/chat/completions"
    assert request.parent_id == f"{root.span_id:016x}"
    assert chat.parent_id == request.span_id
    assert turn.traceparent == chat.traceparent
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.usage.input_tokens"] == len(turn.prompt_ids) // 4
    assert chat.attributes["gen_ai.usage.output_tokens"] == len(turn.sampled.ids) // 4
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat.attributes["gen_ai.conversation.id"] == trajectory_id
    assert request.attributes["http.response.status_code"] == 200
    assert "Hello" not in str(collector.spans)
    assert all(
        span.attributes.get("gen_ai.conversation.id") != untraced for span in collector.spans
    )


async def test_trace_context_of_an_agent_is_kept(
    stack: GatewayStack, own_coordinator: Coordinator, collector: Collector
) -> None:
    """Its span is above those of the gateway, which are linked to the rollout; an agent that does
    not sample its trace is not traced, whatever the ratio."""
    task = trajectory_with(sampled=True, cluster=stack.cluster).partition(":")[0]
    trajectory_id = f"{task}:1:0"
    own = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    (turn,) = (await call(stack, own_coordinator, trajectory_id, own)).turns
    assert turn.traceparent.startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")

    async def request_span() -> CollectedSpan | None:
        found = collector.trace("4bf92f3577b34da6a3ce929d0e0e4736")
        return next((span for span in found if span.name.startswith("POST")), None)

    request = await until(request_span)
    assert request.parent_id == "00f067aa0ba902b7"
    root = read_traceparent(rollout_traceparent(stack.cluster, trajectory_id, sample_ratio=0.5))
    assert root is not None
    assert request.links == (f"{root.span_id:016x}",)
    off = "00-5bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    (turn,) = (await call(stack, own_coordinator, f"{task}:2:0", off)).turns
    assert turn.traceparent == ""


@pytest.mark.faults
async def test_unreachable_collector_fails_no_call(
    stack: GatewayStack, own_coordinator: Coordinator
) -> None:
    """It is one line of the log; lost spans are counted, those beyond the queue at once; the
    process stops in time."""
    tracing = ("--tracing.endpoint", "http://127.0.0.1:9", "--tracing.sample-ratio", "1")
    stack.start_gateway("gateway-alone", *tracing, "--tracing.queue-spans", "2")
    gateway = await stack.gateway(own_coordinator, "gateway-alone")
    client = stack.openai(gateway, stack.token("alone:0:0"))
    for _ in range(4):
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "SAY[[Hello.]]"}]
        )

    def dropped() -> set[str]:
        url = f"http://{gateway.metadata['metrics']}/metrics"
        with urllib.request.urlopen(url) as answer:
            lines = answer.read().decode().splitlines()
        values = [line for line in lines if line.startswith("forge_tracing_spans_dropped_total{")]
        return {line for line in values if float(line.split()[-1]) > 0}

    async def both() -> bool:
        return len(await asyncio.to_thread(dropped)) == 2

    await until(both)
    process = stack.processes.pop("gateway-alone")
    process.terminate()
    assert await asyncio.to_thread(process.wait) == 0
    events = [line["event"] for line in log_lines(stack.log_of("gateway-alone"))]
    assert events.count("spans_not_exported") == 1
