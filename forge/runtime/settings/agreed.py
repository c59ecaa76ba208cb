"""Values on which the instances of a cluster must agree, by "<scope>/<setting>".

Two instances with one name must have one value. The scope is a service, a pool shard or a serving
group; it is empty for values of several services. Not here: the comparison
(`forge.runtime.process.agreement`), and the choice of settings; each service's config names its
own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from forge.runtime.settings import settings_of

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""Keys of config.json that every export changes."""
_TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def agreed_settings(scope: str, config: Any, *chosen: str) -> dict[str, str]:
    """Return settings of a config as JSON texts; `chosen` are settings, and tables with all
    theirs."""
    return {
        f"{scope}/{key}": msgspec.json.encode(one.value, order="deterministic").decode()
        for key, one in settings_of(config).items()
        if key in chosen or one.table in chosen
    }


def agreed_model(model_path: str, *, scope: str = "") -> dict[str, str]:
    """Return fingerprints of the model's architecture and tokenizer; none for a missing file.
    `scope`: the serving group of another model than the policy."""
    folder = Path(model_path)
    values = {}
    try:
        config = json.loads((folder / "config.json").read_bytes())
        names = config.get("architectures", ())
        content = json.dumps(_lasting(config), sort_keys=True).encode()
        values[f"{scope}/model config.json"] = " ".join((*names, _short(content)))
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    if tokenizer := _digest(folder / "tokenizer.json"):
        values[f"{scope}/model tokenizer.json"] = tokenizer
    return values


def agreed_template(scope: str, model_path: str) -> dict[str, str]:
    """Return fingerprints of the files that decide how messages become tokens."""
    digests = {name: _digest(Path(model_path) / name) for name in _TEMPLATE_FILES}
    return {f"{scope}/model {name}": digest for name, digest in digests.items() if digest}


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without volatile keys, also in parts such as text_config."""
    return {
        name: _lasting(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _VOLATILE
    }


def _digest(file: Path) -> str:
    try:
        return _short(file.read_bytes())
    except OSError:
        return ""


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
