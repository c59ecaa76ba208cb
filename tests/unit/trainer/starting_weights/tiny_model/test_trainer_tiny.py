"""The tiny policy's tokenizer, lessons and starting weights."""

from __future__ import annotations

import json
from io import StringIO
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from forge.agents.environments.split import held_out_payloads
from services.trainer.starting_weights.tiny import (
    Course,
    course_progress,
    make_tokenizer,
    teach,
    warm_start,
)
from services.trainer.starting_weights.tiny_model.lessons import (
    ATTEMPTS,
    batches,
    conversations,
    lessons,
    padded,
)
from services.trainer.starting_weights.tiny_model.policy import new_policy
from services.trainer.starting_weights.tiny_model.tokenizer import END, START

SHORT = Course(flawless_steps=4, imperfect_steps=2, batch_tokens=256)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.mark.parametrize(
    "text", ["Answer: 7", "v = [41, 17]; print(max(v))", "caf\u00e9 \u4f60\u597d \x00"]
)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Decoding gives back exactly the encoded text; no text is unknown."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_only_the_teachers_messages_are_taught(tokenizer: PreTrainedTokenizerFast) -> None:
    """Prompts and tool results are not; each answer ends with its end token."""
    for row in lessons(tokenizer, "test", 3, flawless=True):
        taught = tokenizer.decode(
            [token for token, is_taught in zip(row.ids, row.taught, strict=True) if is_taught]
        )
        read = tokenizer.decode(
            [token for token, is_taught in zip(row.ids, row.taught, strict=True) if not is_taught]
        )
        assert taught.endswith(END) and START not in taught
        assert "<tool_response>" not in taught and "user" in read


def test_batches_hold_every_row_at_most_once(tokenizer: PreTrainedTokenizerFast) -> None:
    """Rows are grouped by length, within the token budget, without repeats."""
    rows = lessons(tokenizer, "test", 6, flawless=True)
    dealt = [id(row) for batch in batches(rows, 256, Random(0)) for row in batch]
    assert len(dealt) == len(set(dealt)) <= len(rows)
    ids_BT, taught_BT = padded(rows[:3], tokenizer.pad_token_id)
    assert ids_BT.shape == taught_BT.shape
    assert int(taught_BT.sum()) == sum(sum(row.taught) for row in rows[:3])


def test_starting_weights_attend_to_earlier_occurrences(tokenizer: PreTrainedTokenizerFast) -> None:
    """Before any training, a repeated token draws attention to its earlier successor."""
    policy = new_policy(tokenizer, seed=0)
    policy.set_attn_implementation("eager")
    once = torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(0))[:24]
    ids = torch.cat([once, once])[None]
    with torch.no_grad():
        attentions = policy(input_ids=ids, output_attentions=True).attentions
    before = attentions[0][0].diagonal(offset=-1, dim1=-2, dim2=-1).mean()
    follower = attentions[1][0].diagonal(offset=1 - len(once), dim1=-2, dim2=-1).mean()
    assert before > 0.9
    assert follower > 4 / len(once)


def test_same_seed_gives_the_same_complete_model(tmp_path: Path) -> None:
    """The written model loads in transformers with tokenizer, template and end token. In a log its
    steps are lines: a warm start takes a minute or more."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        log = StringIO()
        warm_start(path, seed=3, course=SHORT, console=Console(file=log))
        assert "warm start: step 6 of 6, loss " in log.getvalue()
    first, second = (AutoModelForCausalLM.from_pretrained(path) for path in paths)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    assert first.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "<tool_call>" in (tokenizer.chat_template or "")


def test_teacher_demonstrates_no_held_out_task() -> None:
    """Otherwise starting weights would be measured on taught tasks; the tokenizer's vocabulary
    comes from the same demonstrations."""
    shown = {
        json.dumps(messages[:2])
        for seed in ("0/flawless/0", "1/imperfect/0", "vocabulary")
        for messages, _ in conversations(seed, 60, flawless=False)
    }
    kept = {
        json.dumps(domain.episode(payload).messages)
        for domain, _ in ATTEMPTS
        for seed in range(4)
        for payload in islice(held_out_payloads(domain, Random(seed)), 40)
    }
    assert len(shown) > 500 and len(kept) > 300
    assert not shown & kept


def test_bar_has_no_loss_before_the_first_step(tokenizer: PreTrainedTokenizerFast) -> None:
    """It is unknown there, not nan."""
    terminal = Console(file=StringIO(), force_terminal=True)
    with course_progress(terminal) as progress:
        teach(new_policy(tokenizer, seed=0), [], SHORT, progress)
    assert isinstance(terminal.file, StringIO)
    shown = terminal.file.getvalue()
    assert "warm start" in shown
    assert "nan" not in shown
