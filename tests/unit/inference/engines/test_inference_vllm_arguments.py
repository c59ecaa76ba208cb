"""Options that the engine vllm refuses before it imports vLLM."""

from __future__ import annotations

import pytest

from forge.core.errors import ConfigError
from services.inference.engines.base import ModelLimits
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm.arguments import (
    engine_arguments,
    is_one_device,
)


def options(**extra: object) -> EngineOptions:
    return EngineOptions(model_path="model", request_timeout_s=1.0, extra=extra)


def test_replicas_in_one_worker_are_refused() -> None:
    """vLLM would not start: its cache events then need sockets of another kind."""
    limits = ModelLimits(context_tokens=64, vocabulary=8)
    with pytest.raises(ConfigError, match=r"data_parallel_size = 2: .* start more workers"):
        engine_arguments(options(data_parallel_size=2), limits, role="both", events=None)


def test_processes_on_other_hosts_are_refused() -> None:
    """They could not open the memory that has the weights."""
    limits = ModelLimits(context_tokens=64, vocabulary=8)
    with pytest.raises(ConfigError, match=r"nnodes = 2: .* start a worker on each host"):
        engine_arguments(options(nnodes=2), limits, role="both", events=None)


def test_parallel_devices_are_known() -> None:
    """For abilities of one device alone."""
    assert is_one_device(options(tensor_parallel_size=1))
    assert not is_one_device(options(tensor_parallel_size=2))
    assert not is_one_device(options(pipeline_parallel_size=2))
