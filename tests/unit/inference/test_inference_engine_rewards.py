"""The comparison of engines by held-out reward notices an engine that draws from another
distribution than it reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine_rewards import Answers, Reference, Task, figures
from forge.agents.environments.base import Reward, Transcript

VOCABULARY, STOP, ATTEMPTS = 32, 3, 64


class _Even:
    """Half of the tokens are right first tokens."""

    def score(self, transcript: Transcript) -> list[Reward]:
        """Outcome 1 for an even first token."""
        first = int(transcript.answer.split()[0])
        return [Reward(name="even", kind="outcome", value=float(first % 2 == 0))]


TASKS = [Task(ids=[4 + one, 7, 9], episode=_Even(), max_tokens=6) for one in range(4)]


def _reference(path: Path, *, temperature: float) -> Reference:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data /= temperature
    model.save_pretrained(path)
    return Reference(path, frozenset({STOP}))


def _figures(answers: list[Answers], reference: Reference) -> dict[str, float]:
    own = [reference.answer(task, attempts=ATTEMPTS) for task in TASKS]
    return figures(
        TASKS,
        answers,
        own,
        decode=lambda ids: " ".join(map(str, ids)),
        reference=reference,
    )


def test_answers_of_the_model_itself_have_its_rewards_and_no_surprise(tmp_path: Path) -> None:
    """The mean reward is within four standard errors of the probability of an even token."""
    reference = _reference(tmp_path, temperature=1.0)
    found = _figures([reference.answer(task, attempts=ATTEMPTS) for task in TASKS], reference)
    chances = [reference.logprobs(task, [[0]])[0][0].exp()[::2].sum().item() for task in TASKS]
    expected = sum(chances) / len(chances)
    assert abs(found["reward"] - expected) < 4 * found["reward_err"] < 0.2
    assert abs(found["surprise"]) < 4
    assert found["greedy_equal"] == 1.0
    assert found["logprob_gap"] < 1e-5


@pytest.mark.parametrize(("temperature", "sign"), [(1.5, 1), (0.7, -1)])
def test_another_temperature_is_a_surprise(temperature: float, sign: int, tmp_path: Path) -> None:
    """Also where all greedy answers are equal."""
    reference = _reference(tmp_path / "model", temperature=1.0)
    engine = _reference(tmp_path / "engine", temperature=temperature)
    found = _figures([engine.answer(task, attempts=ATTEMPTS) for task in TASKS], reference)
    assert sign * found["surprise"] > 6
    assert found["greedy_equal"] == 1.0
    assert found["logprob_gap"] > 0.1


def test_answers_end_with_a_stop_token_or_at_their_longest(tmp_path: Path) -> None:
    """A stop token is the last one."""
    reference = _reference(tmp_path, temperature=1.0)
    for task in TASKS:
        for one in reference.answer(task, attempts=ATTEMPTS).sampled:
            assert STOP not in one.ids[:-1]
            assert one.ids[-1] == STOP or len(one.ids) == task.max_tokens
