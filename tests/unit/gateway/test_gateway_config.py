"""Settings of the gateway."""

from __future__ import annotations

import pytest

from forge.core.errors import ConfigError
from forge.runtime.settings import load
from services.gateway.config import GatewayConfig

FORMER = {
    "model_name": "model.name",
    "model_aliases": "model.aliases",
    "tool_format": "model.tool_format",
    "reasoning_format": "model.reasoning_format",
    "http_port": "http.port",
    "max_body_mib": "http.max_body_mib",
    "max_calls": "calls.max_calls",
    "max_calls_per_session": "calls.max_calls_per_session",
    "sample_timeout_s": "calls.sample_timeout_s",
    "retry_for_s": "calls.retry_for_s",
    "max_sessions": "sessions.max_sessions",
    "max_session_mib": "sessions.max_session_mib",
    "idle_s": "sessions.idle_s",
    "max_backlog_mib": "sessions.max_backlog_mib",
}


@pytest.mark.parametrize(("flat", "nested"), FORMER.items())
def test_former_flat_setting_is_refused_with_its_key_in_a_table(flat: str, nested: str) -> None:
    """By flag and by variable, for each setting that moved into a table."""
    for argv, environ in (
        ([f"--{flat.replace('_', '-')}=1"], {}),
        ([], {f"FORGE_{flat.upper()}": "1"}),
    ):
        with pytest.raises(ConfigError, match=rf"no setting {flat} .*did you mean {nested} \("):
            load(GatewayConfig, service="gateway", argv=argv, environ=environ)
