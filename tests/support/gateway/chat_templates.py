"""Small tokenizers with the chat templates of real model families.

The templates are the families' own, shortened where nothing depends on it: `qwen3` rewrites
history (it drops reasoning before the last question), `smollm2` knows no tools, `llama3` has
headers, trims contents and begins with a token of its own. More of them, with other notations of
calls, are in `agentic_templates`.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import services
from services.gateway.model.chat_model import ChatModel
from tests.support.gateway import agentic_templates as agentic

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call functions.\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn within <tool_call></tool_call>:\\n<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- message.content.lstrip('\\n') }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Qwen 2.5: the same without reasoning, so that history is never rewritten.
CHATML = """
{%- if style is defined %}{{- '<|im_start|>system\\n' + style + '<|im_end|>\\n' }}{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}
        {{- 'You are a helpful assistant.' }}{%- endif %}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nCalls: <tool_call></tool_call>\\n<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
            or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
    " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)

LLAMA3 = """
{{- '<|begin_of_text|>' }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message }}
{%- if tools %}
    {{- "\\nAnswer calls as JSON.\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name }}
        {{- '", "parameters": ' + tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# The embedded policy's own.
TINY = (
    Path(services.__path__[0]) / "trainer/starting_weights/tiny_model/chat_template.jinja"
).read_text()

# Not families: one numbers its messages from the start, so that no message can be rendered without
# what came before; the other from the end, so that every message changes all before it.
NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + loop.index|string + '\\n' }}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant ' + (messages|length + 1)|string + '\\n' }}{% endif %}"
)
RENUMBERED = NUMBERED.replace("loop.index|string", "(messages|length - loop.index)|string")

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "qwen3": (QWEN3, CHATML_TOKENS, "<|im_end|>"),
    "chatml": (CHATML, CHATML_TOKENS, "<|im_end|>"),
    "tiny": (TINY, CHATML_TOKENS, "<|im_end|>"),
    "smollm2": (SMOLLM2, CHATML_TOKENS, "<|im_end|>"),
    "llama3": (LLAMA3, LLAMA3_TOKENS, "<|eot_id|>"),
    "minimax": (agentic.MINIMAX, agentic.MINIMAX_TOKENS, "[e~["),
    "deepseek": (
        agentic.DEEPSEEK,
        agentic.DEEPSEEK_TOKENS,
        agentic.deepseek_token("end of sentence"),
    ),
    "mistral": (agentic.MISTRAL, agentic.MISTRAL_TOKENS, "</s>"),
    "kimi": (agentic.KIMI, agentic.KIMI_TOKENS, "<|im_end|>"),
    "harmony": (agentic.HARMONY, agentic.HARMONY_TOKENS, "<|return|>"),
    "numbered": (NUMBERED, CHATML_TOKENS, "<|im_end|>"),
    "renumbered": (RENUMBERED, CHATML_TOKENS, "<|im_end|>"),
}
"""Template, special tokens and end-of-turn token by family."""

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then looks up the answer in the table",
    '{"name": "look", "arguments": {"at": "shelf"}} <tool_call> </tool_call> <think> </think>',
    "user assistant system tool You are a helpful assistant. What is 12 + 30? It is 42.",
)


@functools.cache
def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of a few hundred tokens that speaks the family's template."""
    template, special, end = FAMILIES[family]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=end, additional_special_tokens=list(special)
    )
    tokenizer.chat_template = template.strip()
    return tokenizer


@functools.cache
def make_model(family: str, *, context_tokens: int = 4096) -> ChatModel:
    """The gateway's view of a model of that family."""
    tokenizer = make_tokenizer(family)
    return ChatModel(
        tokenizer,
        name=f"{family}-test",
        context_tokens=context_tokens,
        stop_ids=stop_ids(tokenizer),
    )


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The end-of-turn tokens, as the generation config of a model names them."""
    vocabulary = tokenizer.get_vocab()
    return {tokenizer.eos_token_id} | {
        vocabulary[end] for end in ("<|call|>",) if end in vocabulary
    }


def save_model(family: str, directory: Path, *, context_tokens: int = 4096) -> None:
    """A model directory as a gateway loads it: everything but the weights."""
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(f'{{"max_position_embeddings": {context_tokens}}}')
    (directory / "generation_config.json").write_text(
        f'{{"eos_token_id": {sorted(stop_ids(tokenizer))}}}'
    )
