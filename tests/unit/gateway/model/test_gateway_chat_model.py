"""The model without its weights: what is read from its directory, and what that costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge.core.conversation.continuation import TemplateRefused
from forge.core.conversation.messages import Message, ToolCall
from forge.core.errors import ConfigError
from services.gateway.model.chat_model import ChatModel, template_message
from tests.support.gateway.chat_templates import FAMILIES, make_model, save_model


def test_torch_is_never_imported(tmp_path: Path) -> None:
    """A gateway host installs no torch, and one that has it does not load it."""
    save_model("qwen3", tmp_path)
    code = (
        "import sys; import services.gateway.app;"
        "from services.gateway.model.chat_model import ChatModel;"
        f"ChatModel.load({str(tmp_path)!r});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_directory_tells_all(tmp_path: Path) -> None:
    """Name, context, stop tokens and format come from the files; settings override them."""
    save_model("qwen3", tmp_path / "my-model", context_tokens=512)
    model = ChatModel.load(str(tmp_path / "my-model"))
    assert (model.name, model.context_tokens, model.format.name) == ("my-model", 512, "hermes")
    assert model.end_texts == ("<|im_end|>",)
    assert model.reasoning is not None
    assert model.reasoning.name == "think"
    plain = ChatModel.load(
        str(tmp_path / "my-model"), name="it", context_tokens=9, tool_format="plain"
    )
    assert (plain.name, plain.context_tokens, plain.format.name) == ("it", 9, "plain")


def test_incomplete_directory_is_named(tmp_path: Path) -> None:
    """One clear line for a missing tokenizer, context length, template or format."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ChatModel.load(str(tmp_path))
    save_model("chatml", tmp_path)
    with pytest.raises(ConfigError, match="morse"):
        ChatModel.load(str(tmp_path), tool_format="morse")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        ChatModel.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ChatModel.load(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    with pytest.raises(ConfigError, match="no chat template"):
        ChatModel.load(str(tmp_path))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_templates_that_need_the_whole_history_are_known(family: str) -> None:
    """Those that count from the start, move the tools along, or drop what came before an answer
    because of it, cannot use the stub."""
    whole = {"numbered", "mistral", "kimi"}
    assert make_model(family).looks_back_one_answer == (family not in whole)


@pytest.mark.parametrize(
    ("family", "tool_format", "reasoning"),
    [
        ("qwen3", "hermes", "think"),
        ("chatml", "hermes", ""),
        ("smollm2", "plain", ""),
        ("llama3", "llama3_json", ""),
        ("minimax", "minimax_m2", "think"),
        ("deepseek", "deepseek_v31", "think"),
        ("mistral", "mistral", ""),
        ("kimi", "kimi_k2", "think"),
        ("numbered", "plain", ""),
    ],
)
def test_formats_are_found_in_templates(family: str, tool_format: str, reasoning: str) -> None:
    """Tool calls are read as the template writes them, reasoning where it has the tags."""
    model = make_model(family)
    assert model.format.name == tool_format
    assert (model.reasoning.name if model.reasoning else "") == reasoning


@pytest.mark.parametrize(
    ("family", "messages", "inside"),
    [
        ("minimax", [Message(role="user", content="a")], True),
        ("qwen3", [Message(role="user", content="a")], False),
        ("deepseek", [Message(role="user", content="a")], False),
    ],
)
def test_prompt_says_whether_its_answer_starts_with_reasoning(
    family: str, messages: list[Message], inside: bool
) -> None:
    """Its end is looked at, less what was put into the model's mouth."""
    model = make_model(family)
    prompt = model.renderer(None)(messages, True)
    assert model.starts_inside(model.encode(prompt)) == inside
    opening = "\n</think>\n\n" + model.format.opening("look")
    assert model.starts_inside(model.encode(prompt + opening), opening=opening) == inside


def test_template_errors_are_refusals() -> None:
    """Whatever a template raises over an odd conversation, it is not a crash."""
    calls = (ToolCall(name="a", arguments="{}"),) * 2
    with pytest.raises(TemplateRefused, match="single tool-calls"):
        make_model("llama3").renderer(None)([Message(role="assistant", tool_calls=calls)], True)
    with pytest.raises(TemplateRefused):
        make_model("llama3").renderer(None)([], True)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("[1]", "[1]"),
        ("{oops", "{oops"),
        ("[" * 9999, "[" * 9999),
    ],
)
def test_arguments_reach_the_template_as_an_object(arguments: str, seen: object) -> None:
    """Templates expect an object; what is none is passed as the text it is."""
    message = Message(role="assistant", tool_calls=(ToolCall(name="a", arguments=arguments),))
    assert template_message(message)["tool_calls"][0]["function"]["arguments"] == seen
