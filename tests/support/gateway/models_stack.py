"""A gateway with models beside the policy, of every kind."""

from __future__ import annotations

import json
from typing import Any

from tests.support.gateway.chat_templates import save_model
from tests.support.gateway.external_api import KEY, ExternalServer
from tests.support.gateway.stack import GatewayStack


def start_models(stack: GatewayStack, api: ExternalServer, name: str) -> None:
    """Starts gateway `name`, and engines of the serving groups old and judges."""
    judge = stack.folder / "judge-model"
    judge.mkdir()
    save_model("llama3", judge, context_tokens=2048)
    stack.start_engine("engine-old", "--serving-group", "old", "--weight-version", "3")
    stack.start_engine("engine-judge", "--serving-group", "judges", "--model-path", str(judge))
    key_file = stack.folder / "api.key"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    external = {"kind": "external", "key_file": str(key_file)}
    models: dict[str, dict[str, Any]] = {
        "old": {"kind": "version", "open": True, "aliases": ["opponent"]},
        "judge": {"kind": "engine", "group": "judges", "model_path": str(judge)},
        "big": external
        | {
            "url": f"{api.url}/v1",
            "upstream": "big-1",
            "open": True,
            "max_response_mib": 0.1,
            "recorded_kib": 1,
        },
        "hasty": external | {"url": f"{api.url}/v1", "open": True, "timeout_s": 3.0},
        "claude": external | {"url": api.url, "protocol": "anthropic", "open": True},
        "waits": external | {"url": f"{api.url}/v1", "open": True, "max_calls": 1},
        "vectors": {"kind": "embeddings", "url": f"{api.url}/v1", "open": True},
        "gone": {"kind": "external", "url": "http://127.0.0.1:1/v1", "open": True},
    }
    limits = ("--tenants.max-calls-of", "limited=1")
    stack.start_gateway(name, "--models", json.dumps(models), *limits)
