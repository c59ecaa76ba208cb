"""The model without its weights: its directory, and the cost of reading it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge.core.conversation.continuation import TemplateRefused
from forge.core.conversation.messages import Message, ToolCall
from forge.core.errors import ConfigError
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.chat_template import template_message
from tests.support.gateway.chat_templates import FAMILIES, make_model, save_model


def test_gateway_never_imports_torch(tmp_path: Path) -> None:
    """A gateway host installs no torch, and one that has it does not load it."""
    save_model("qwen3", tmp_path)
    code = (
        "import sys; import services.gateway.app;"
        "from services.gateway.model.chat_model import ChatModel;"
        f"ChatModel.load({str(tmp_path)!r});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_model_directory_has_all_settings(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=r"no chat template; add a chat_template\.jinja"):
        ChatModel.load(str(tmp_path))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_templates_that_need_the_whole_history_are_detected(family: str) -> None:
    """Templates that count from the start, move the tools, or drop earlier reasoning cannot be
    rendered in part."""
    whole = {"numbered", "mistral", "kimi"}
    assert make_model(family).template.looks_back_one_answer == (family not in whole)


@pytest.mark.parametrize(
    ("family", "tool_format", "reasoning"),
    [
        ("qwen3", "hermes", "think"),
        ("chatml", "hermes", ""),
        ("tiny", "hermes_compact", ""),
        ("smollm2", "plain", ""),
        ("llama3", "llama3_json", ""),
        ("minimax", "minimax_m2", "think"),
        ("deepseek", "deepseek_v31", "think"),
        ("mistral", "mistral", ""),
        ("kimi", "kimi_k2", "think"),
        ("numbered", "plain", ""),
    ],
)
def test_formats_are_detected_in_templates(family: str, tool_format: str, reasoning: str) -> None:
    """Tool calls are parsed as the template writes them, reasoning if it has the tags."""
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
def test_prompt_end_decides_whether_the_answer_starts_with_reasoning(
    family: str, messages: list[Message], inside: bool
) -> None:
    """Without a forced opening."""
    model = make_model(family)
    prompt = model.template.renderer(None)(messages, True)
    assert model.starts_inside(model.encode(prompt)) == inside
    opening = "\n</think>\n\n" + model.format.opening("look")
    assert model.starts_inside(model.encode(prompt + opening), opening=opening) == inside


def test_template_errors_are_invalid_arguments() -> None:
    """For any exception over an odd conversation."""
    calls = (ToolCall(name="a", arguments="{}"),) * 2
    with pytest.raises(TemplateRefused, match="single tool-calls"):
        make_model("llama3").template.renderer(None)(
            [Message(role="assistant", tool_calls=calls)], True
        )
    with pytest.raises(TemplateRefused):
        make_model("llama3").template.renderer(None)([], True)


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
    """Templates expect an object; other arguments are passed as text."""
    message = Message(role="assistant", tool_calls=(ToolCall(name="a", arguments=arguments),))
    assert template_message(message)["tool_calls"][0]["function"]["arguments"] == seen
