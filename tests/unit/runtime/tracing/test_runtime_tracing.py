"""Trace contexts as text, the context of a rollout, and tracing that is off."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AsyncExitStack
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core import extras
from forge.core.errors import ConfigError
from forge.runtime import tracing
from forge.runtime.process.span_export import export_spans, require_tracing
from forge.runtime.settings import ServiceConfig
from forge.runtime.settings.service_config import TracingSettings
from forge.runtime.tracing.traceparent import (
    TraceContext,
    is_sampled,
    read_traceparent,
    rollout_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_text_of_a_context_reads_back() -> None:
    """Also one of a later version, with fields that are not known."""
    text = f"00-{TRACE}-{SPAN}-01"
    assert read_traceparent(text) == TraceContext(int(TRACE, 16), int(SPAN, 16), True)
    assert str(read_traceparent(text)) == text
    assert read_traceparent(f"01-{TRACE}-{SPAN}-00-more") is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_malformed_context_is_none(text: str) -> None:
    """An agent's header is its own: it may hold anything."""
    assert read_traceparent(text) is None
    assert not is_sampled(text)


@given(st.text(), st.text(), st.floats(0, 1))
def test_all_processes_have_the_same_context_of_a_rollout(
    cluster: str, trajectory_id: str, ratio: float
) -> None:
    """A larger ratio samples what a smaller one samples, 1 everything and 0 nothing."""
    at = [
        is_sampled(rollout_traceparent(cluster, trajectory_id, sample_ratio=each))
        for each in (0.0, ratio, 1.0)
    ]
    assert at == sorted(at)
    assert (at[0], at[2]) == (False, True)


def test_rollouts_of_two_clusters_have_two_traces() -> None:
    """One collector may have the traces of both."""
    first, second = (rollout_traceparent(name, "a:0:0", sample_ratio=1) for name in ("x", "y"))
    assert first.split("-")[1] != second.split("-")[1]


def test_without_a_collector_nothing_is_traced_or_imported() -> None:
    """A span is the same object each time, and OpenTelemetry stays out of every process."""
    assert not tracing.is_tracing()
    assert tracing.start_span("x", parent=f"00-{TRACE}-{SPAN}-01") is tracing.NO_SPAN
    assert tracing.span_of_rollout("rollout", "a:0:0") is tracing.NO_SPAN
    assert tracing.start_root("step") is tracing.NO_SPAN
    program = "import sys, forge.runtime.process.service; "
    program += "print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout.strip(), ended.returncode) == ("", 0)


async def test_missing_extra_and_wrong_address_are_one_line_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first names what to install, also for `--check`; the second the setting."""
    config = ServiceConfig(tracing=TracingSettings(endpoint="collector:4317"))
    async with AsyncExitStack() as undo:
        with pytest.raises(ConfigError, match=r"endpoint = 'collector:4317' is not allowed"):
            export_spans("pool", config, undo)
        monkeypatch.setattr(extras, "missing_packages", lambda _: {"opentelemetry-sdk"})
        for refused in (
            partial(export_spans, "pool", config, undo),
            partial(require_tracing, config),
        ):
            with pytest.raises(ConfigError, match=r"install it: pip install 'forge-rl\[tracing\]'"):
                refused()
        export_spans("pool", ServiceConfig(), undo)
    assert not tracing.is_tracing()
