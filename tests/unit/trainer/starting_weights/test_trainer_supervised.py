"""A supervised warm start: the taught tokens of a conversation, and a lower loss."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from forge.core.errors import InvalidArgument
from services.trainer.model.full_weights import load_model
from services.trainer.starting_weights.demonstrations import lesson_samples, read_conversations
from services.trainer.starting_weights.supervised import main, split

WORDS = ["end", "user", "assistant", "begin", "red", "blue", "one", "two", "call"]
TEMPLATE = (
    "{% for m in messages %}begin {{ m.role }} {{ m.content }} "
    "{% for c in m.tool_calls or [] %}call {{ c.function.arguments.x }} {% endfor %}end "
    "{% endfor %}{% if add_generation_prompt %}begin assistant {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="end"))
    backend.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="end")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        )
    ).save_pretrained(path)  # fmt: skip
    tokenizer.save_pretrained(path)
    return path


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [
    message("user", "red"), message("assistant", "one"),
    message("user", "blue"), message("assistant", "two"),
]  # fmt: skip


TALKS = [[message("user", "red " * times), *TALK] for times in range(1, 11)]
"""Of different beginnings."""


def words(ids: array[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_every_answer_is_taught_in_its_context(tokenizer: PreTrainedTokenizerFast) -> None:
    """With its end token; user messages and template text are not taught."""
    samples = lesson_samples({"messages": TALK}, tokenizer, source="here")
    ids = [array("i", one.ids) for one in samples]
    assert words(ids[0]) == "begin user red end begin assistant one end"
    taught = [
        words(one[slice(*sample.trained[0])]) for one, sample in zip(ids, samples, strict=True)
    ]
    assert taught == ["one end", "two end"]


def test_arguments_of_calls_are_objects_to_the_template(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Files have them as text."""
    call = {"function": {"name": "f", "arguments": '{"x": "two"}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    (sample,) = lesson_samples({"messages": [TALK[0], answer]}, tokenizer, source="here")
    assert words(array("i", sample.ids)).endswith("assistant call two end")


def test_lines_end_only_at_json_lines_breaks(tmp_path: Path) -> None:
    """Texts from the web contain other separators."""
    said = {"messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(said, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_conversations(file) == [said]


@pytest.mark.parametrize("line", ["{", '{"messages": 3}', "[]"])
def test_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    """By file and number."""
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n" + line)
    with pytest.raises(InvalidArgument, match=r"data\.jsonl, line 2"):
        read_conversations(file)


def test_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    """By its name and the line."""
    file = tmp_path / "data.jsonl"
    file.write_bytes(json.dumps({"messages": TALK}).encode() + b"\n\xff\n")
    with pytest.raises(InvalidArgument, match=r"line 2 is not UTF-8 \(byte 0xff\): save the file"):
        read_conversations(file)


@pytest.mark.parametrize(
    "options", [[], ["--recompute-activations", "--autocast", "bfloat16", "--device", "cpu"]]
)
def test_supervised_training_lowers_the_held_out_loss(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """The result is a model directory with its tokenizer."""
    data, out = tmp_path / "data.jsonl", tmp_path / "taught"
    data.write_text("\n".join(json.dumps({"messages": one}) for one in TALKS))
    argv = [
        *("--model", str(model), "--data", str(data), "--out", str(out), "--epochs", "20"),
        *("--learning-rate", "0.02", "--batch-tokens", "100", "--held-out", "0.2"),
        *options,
    ]
    assert main(argv) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (told[0]["taught"], told[0]["held_out"]) == (8, 2)
    assert told[0]["held_out_loss"] > 1.5 and told[-1]["held_out_loss"] < 0.2
    assert load_model(out).config.vocab_size == 16
    assert PreTrainedTokenizerFast.from_pretrained(out).chat_template == TEMPLATE
    assert main(argv) == 2
    assert capsys.readouterr().err == (
        f"forge model warm-start: out = {str(out)!r} exists already\n"
    )


def test_no_prompt_is_both_taught_and_held_out(tokenizer: PreTrainedTokenizerFast) -> None:
    """A conversation that is repeated, or answered in two ways, is on one side with all its copies;
    the share is at most the configured one."""
    lessons = []
    for times in range(1, 21):
        for answer in ("one", "two", "one")[: 1 + times % 3]:
            talk = [message("user", "red " * times), message("assistant", answer), *TALK]
            lessons.append(lesson_samples({"messages": talk}, tokenizer, source="here"))
    for seed in range(20):
        taught, held = split(lessons, share=0.25, seed=seed)
        assert len(taught) + len(held) == len(lessons)
        assert 0.15 * len(lessons) < len(held) <= 0.25 * len(lessons)
        sides = [{bytes(one[0].ids[: 4 * one[0].trained[0][0]]) for one in side}
                 for side in (taught, held)]  # fmt: skip
        assert not sides[0] & sides[1]
        assert split(lessons, share=0.25, seed=seed) == (taught, held)
    assert split([lessons[0]] * 10, share=0.5, seed=0) == ([lessons[0]] * 10, [])


def test_held_out_loss_may_be_computed_only_before_and_after(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--eval-every 0`."""
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": one}) for one in TALKS))
    argv = ["--model", str(model), "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*argv, "--held-out", "0.2", "--batch-tokens", "30", "--eval-every", "0"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["held_out_loss" in one for one in told] == [True, *[False] * (len(told) - 2), True]
