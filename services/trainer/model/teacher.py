"""The teacher of on-policy distillation: a frozen model that reads the policy's token ids.

Owns the checks that a model can be the teacher of another. The replica loads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.core.errors import ConfigError
from forge.rl.model.policy import TreePolicy

_TOKENIZER = "tokenizer.json"


def check_teacher(
    teacher: TreePolicy, policy: TreePolicy, *, teacher_path: Path, model_path: Path
) -> None:
    """Raises `ConfigError` when the teacher does not give the policy's ids their meaning, or when
    sharded ranks could not compute it in step."""
    name = f"teacher_path = {str(teacher_path)!r} is not allowed"
    if teacher.vocabulary < policy.vocabulary:
        raise ConfigError(
            f"{name}: its vocabulary has {teacher.vocabulary} tokens, and that of model_path "
            f"{policy.vocabulary}"
        )
    own, other = _ids(teacher_path), _ids(model_path)
    if own and other and any(own.get(token) != index for token, index in other.items()):
        raise ConfigError(
            f"{name}: the ids of its {_TOKENIZER} differ from those of model_path = "
            f"{str(model_path)!r}; a teacher needs the policy's tokenizer"
        )
    if policy.world.shape.sharded and teacher.way != policy.way:
        raise ConfigError(
            f"{name} with mesh.dp_shard = {policy.world.shape.dp_shard} and mesh.tp = "
            f"{policy.world.shape.tp}: teacher and policy compute trees in different ways, so "
            "ranks would wait for each other"
        )


def _ids(model_path: Path) -> Mapping[str, int]:
    """Ids by token; empty where there is no such file, or one of another kind."""
    try:
        tokenizer: Any = json.loads((model_path / _TOKENIZER).read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: (token, score) in the order of ids
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {one["content"]: one["id"] for one in tokenizer.get("added_tokens", ())}
        return {**vocabulary, **added}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
