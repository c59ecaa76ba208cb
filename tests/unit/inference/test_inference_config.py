"""Settings of the inference service."""

from __future__ import annotations

import inspect

import pytest

from forge.agents.config import RunnerConfig
from forge.client.sessions.session import AgentSession
from forge.core.errors import ConfigError, InvalidArgument
from forge.runtime.settings import load
from services.gateway.config import GatewayConfig
from services.inference.config import InferenceConfig, KvSettings


@pytest.mark.parametrize(
    ("flat", "nested"),
    [
        ("queue_limit", "router.queue_limit"),
        ("worker_wait_s", "router.worker_wait_s"),
        ("hold_s", "router.hold_s"),
        ("kv_mib", "kv.mib"),
        ("cache_mib", "kv.cache_mib"),
        ("block_tokens", "kv.block_tokens"),
    ],
)
def test_flat_key_is_refused_with_its_place_in_a_table(flat: str, nested: str) -> None:
    """One line names the new key, for a flag and for a variable."""
    variable = f"FORGE_{flat.upper()}"
    for argv, environ in (([f"--{flat}=3"], {}), ([], {variable: "3"})):
        with pytest.raises(ConfigError, match=f"no setting {flat}.*did you mean {nested} ") as e:
            load(InferenceConfig, service="inference", argv=argv, environ=environ)
        assert "\n" not in str(e.value)


def test_engine_options_are_a_json_object() -> None:
    """For the engine; anything else is an error of the setting."""
    config = InferenceConfig(engine_options='{"tensor_parallel_size": 2}')
    config.validate()
    assert config.options_of_engine() == {"tensor_parallel_size": 2}
    for wrong in ("{", "[1]", '"a"'):
        with pytest.raises(InvalidArgument, match="engine_options = "):
            InferenceConfig(engine_options=wrong).validate()


def test_recompute_is_refused_for_the_built_in_engine_without_it() -> None:
    """Engines of other packages declare it: they are asked when they start."""
    again = KvSettings(on_update="recompute")
    for engine in ("embedded", "vllm", "of_another_package"):
        InferenceConfig(engine=engine, kv=again).validate()
    with pytest.raises(InvalidArgument, match="not allowed with engine = tensorrt_llm"):
        InferenceConfig(engine="tensorrt_llm", kv=again).validate()


@pytest.mark.parametrize("engine", ["tensorrt_llm", "vllm"])
def test_gpu_of_an_engine_with_processes_of_its_own_is_not_chosen_by_an_index(engine: str) -> None:
    """It would compute on the first visible GPU, beside the worker that has this one."""
    for device in ("cpu", "cuda", "cuda:0"):
        InferenceConfig(engine=engine, device=device).validate()
    with pytest.raises(InvalidArgument, match=r"device = 'cuda:1' .* CUDA_VISIBLE_DEVICES"):
        InferenceConfig(engine=engine, device="cuda:1").validate()
    InferenceConfig(device="cuda:1").validate()


def test_defaults_let_a_caller_get_the_error_of_what_it_calls() -> None:
    """A call for a router, a request for a worker, a model call, an answer, a request: each may
    take longer than the waits within it. A worker that was killed on a busy host serves again after
    more than half a minute."""
    agent, gateway, config = RunnerConfig(), GatewayConfig(), InferenceConfig()
    calls = inspect.signature(AgentSession).parameters["timeout_s"].default
    waits = [gateway.calls.retry_for_s, config.router.worker_wait_s]
    assert 60 <= waits[0] < waits[1]
    assert waits[1] + waits[0] < min(agent.call_timeout_s, calls)
    assert max(agent.call_timeout_s, calls) <= gateway.calls.sample_timeout_s
    assert gateway.calls.sample_timeout_s <= config.request_timeout_s
    assert config.router.version_wait_s < config.router.worker_wait_s
    assert agent.gateway_wait_s >= 60
