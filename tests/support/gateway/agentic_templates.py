"""Chat templates in the manner of four families whose models were trained as agents.

Ours, after the published structure: the tokens, what is dropped from history, and what is refused
are theirs, instructions are shortened.

- `MINIMAX`: the prompt opens the reasoning; reasoning before the last question is dropped; calls
  are elements.
- `DEEPSEEK`: system messages are gathered at the front; arguments are taken as text; behind tool
  results stands no header.
- `MISTRAL`: tools stand behind the last question and move with it; ids have to have nine
  characters.
- `KIMI`: calls go by the ids that the model gave them; reasoning is dropped once an answer without
  calls has been given.
"""

from __future__ import annotations

MINIMAX = """
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{{- ']~!b[]~b]system\\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>\\n' }}
    {%- for tool in tools %}{{- '<tool>' + (tool.function | tojson) + '</tool>\\n' }}{%- endfor %}
    {{- '</tools>\\nCall in <minimax:tool_call>, <invoke name="...">.' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- ']~b]user\\n' + m.content + '[e~[\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- ']~b]ai\\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.question %}
            {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- if m.tool_calls %}
            {{- '\\n<minimax:tool_call>\\n' }}
            {%- for call in m.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- if call.function.arguments is mapping %}
                    {%- for key, value in call.function.arguments.items() %}
                        {{- '<parameter name="' + key + '">' }}
                        {{- value if value is string else value | tojson }}
                        {{- '</parameter>\\n' }}
                    {%- endfor %}
                {%- endif %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- ']~b]tool' }}{%- endif %}
        {{- '\\n<response>' + m.content + '</response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '[e~[\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}
"""

DEEPSEEK = """
{%- set ns = namespace(system='', asked=false) %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m.content %}
{%- endfor %}
{{- '<|begin of sentence|>' + ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.asked = true %}
        {{- '<|User|>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if ns.asked %}{{- '<|Assistant|></think>' }}{%- endif %}
        {%- set ns.asked = false %}
        {{- m.content }}
        {%- if m.tool_calls %}
            {{- '<|tool calls begin|>' }}
            {%- for call in m.tool_calls %}
                {{- '<|tool call begin|>' + call.function.name + '<|tool sep|>' }}
                {{- '' + call.function.arguments + '<|tool call end|>' }}
            {%- endfor %}
            {{- '<|tool calls end|>' }}
        {%- endif %}
        {{- '<|end of sentence|>' }}
    {%- elif m.role == 'tool' %}
        {%- set ns.asked = false %}
        {{- '<|tool output begin|>' + m.content + '<|tool output end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}{{- '<|Assistant|></think>' }}{%- endif %}
"""
_DEEPSEEK_WORDS = (
    "begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin",
    "tool calls end", "tool call begin", "tool call end", "tool sep", "tool output begin",
    "tool output end",
)  # fmt: skip


def deepseek_token(words: str) -> str:
    """DeepSeek's spelling of a token: full-width bars, and U+2581 for spaces."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


for _words in _DEEPSEEK_WORDS:
    DEEPSEEK = DEEPSEEK.replace(f"<|{_words}|>", deepseek_token(_words))

MISTRAL = """
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
    {%- elif m.role == 'user' %}
        {%- if tools and loop.index0 == ns.question %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.tool_calls %}
            {{- '[TOOL_CALLS][' }}
            {%- for call in m.tool_calls %}
                {%- if call.id | length < 9 %}
                    {{- raise_exception('the id of a call has nine characters') }}
                {%- endif %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments | tojson }}
                {{- ', "id": "' + call.id[-9:] + '"}' }}
                {%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ']' }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
        {{- '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + ', "call_id": "' }}
        {{- m.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

KIMI = """
{%- set ns = namespace(answered=-1) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and not m.tool_calls %}
        {%- set ns.answered = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|><think>' }}
        {{- m.reasoning_content if m.reasoning_content and loop.index0 > ns.answered else '' }}
        {{- '</think>' + m.content }}
        {%- if m.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in m.tool_calls %}
                {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
                {{- call.function.arguments | tojson }}
                {{- '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
    {%- elif m.role == 'user' %}
        {{- '<|im_user|>user<|im_middle|>' + m.content }}
    {%- else %}
        {{- '<|im_system|>system<|im_middle|>' + m.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""

MINIMAX_TOKENS = (
    "]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>",
)  # fmt: skip
DEEPSEEK_TOKENS = (*map(deepseek_token, _DEEPSEEK_WORDS), "<think>", "</think>")
MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
KIMI_TOKENS = (
    "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip

# Written after the public description of gpt-oss's format: analysis is kept in a tool loop, dropped
# once there is a final answer, and <|return|> ends the last answer only.
HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- for tool in tools or [] %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(last_call='', final=-1) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and not message.tool_calls %}
        {%- set ns.final = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + ns.last_call + ' to=assistant' }}
        {{- '<|channel|>commentary<|message|>' + (message.content | tojson) + '<|end|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- set thought = message.thinking or message.content %}
        {%- if thought and loop.index0 > ns.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name }}
        {{- '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
        {%- set ns.last_call = call.name %}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
HARMONY_TOKENS = (
    *("<|return|>", "<|call|>", "<|start|>", "<|end|>"),
    *("<|channel|>", "<|message|>", "<|constrain|>"),
)
