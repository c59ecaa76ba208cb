"""The names by which vLLM's processes import our classes; vLLM itself is not needed here."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.inference.engines.vllm.exchange import names


@pytest.mark.parametrize(
    ("module", "name"),
    [
        tuple(names.ANSWER_LOGITS.split(":")),
        tuple(names.DRAFT_HEADS.rsplit(".", 1)),
        tuple(names.WORKER_EXTENSION.rsplit(".", 1)),
        names.KV_CONNECTOR,
    ],
)
def test_each_name_is_a_class(module: str, name: str) -> None:
    """A moved or renamed class would end vLLM's process at its start."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert name in classes
