"""Recorded log-probs against the model's own forward, by the weights of the recorded version.

Shape suffixes: N tokens of a sequence, S sampled ones, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge.core.token_columns import float32_array, int32_array
from forge.v1 import common_pb2
from tests.support.pool.records import recorded_tree

KEEP_ALL = {"trainer.checkpoint.every_steps": 1, "trainer.checkpoint.keep_every_steps": 1}
"""Settings with which a run keeps the weights of each version."""


def directories_of_versions(checkpoints: Path) -> dict[int, Path]:
    """Return the checkpoint of each version that a run with `KEEP_ALL` has kept. If the answer to
    the next publication was lost, a later checkpoint has the same version, with other weights."""
    states = sorted(checkpoints.glob("step-*/state.json"), reverse=True)
    return {int(json.loads(one.read_text())["weight_version"]): one.parent for one in states}


def worst_logprob(
    trajectories: Iterable[common_pb2.Trajectory], versions: Mapping[int, Path]
) -> tuple[float, int]:
    """Return the largest difference, nats, and the number of compared turns.

    A turn is compared if one version with a checkpoint sampled all of it, from the whole
    distribution.
    """
    worst, compared = 0.0, 0
    model: Any = None
    for version, found in sorted(_by_version(trajectories).items()):
        if version not in versions:
            continue
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(versions[version], dtype=torch.float32)
        # Not strict: a head that is the embedding is not in the file.
        weights = load_file(versions[version] / "model.safetensors")
        assert model.load_state_dict(weights, strict=False).unexpected_keys == []
        for context, sampled, temperature in found:
            own_S = _own_logprobs(model, context, sampled.ids, temperature)
            recorded_S = torch.tensor(float32_array(sampled.logprobs), dtype=torch.float32)
            worst = max(worst, float((own_S - recorded_S).abs().max()))
            compared += 1
    return worst, compared


_Sampled = tuple[bytes, common_pb2.SampledTokens, float]


def _by_version(trajectories: Iterable[common_pb2.Trajectory]) -> dict[int, list[_Sampled]]:
    found: dict[int, list[_Sampled]] = {}
    for trajectory in trajectories:
        for version, sampled in _turns(trajectory):
            found.setdefault(version, []).append(sampled)
    return found


def _turns(trajectory: common_pb2.Trajectory) -> Iterator[tuple[int, _Sampled]]:
    tree = recorded_tree(trajectory.turns)
    for turn in trajectory.turns:
        versions = set(int32_array(turn.sampled.weight_versions))
        if len(versions) == 1 and not turn.sampled.allowed_logprobs:
            yield versions.pop(), (tree.context(turn.turn_index), turn.sampled, turn.temperature)


def _own_logprobs(model: Any, context: bytes, ids: bytes, temperature: float) -> torch.Tensor:
    prompt_N, ids_S = (torch.tensor(int32_array(one)).long() for one in (context, ids))
    with torch.inference_mode():
        logits_NV = model(torch.cat([prompt_N, ids_S])[None]).logits[0]
    logprobs_SV = (logits_NV[len(prompt_N) - 1 : -1] / temperature).log_softmax(-1)
    found_S: torch.Tensor = logprobs_SV.gather(1, ids_S[:, None])[:, 0]
    return found_S
