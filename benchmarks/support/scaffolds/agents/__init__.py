"""Scaffolds that solve the same tasks in different ways, each over an unmodified SDK.

| name | protocol, SDK | system prompt | tools | history |
|---|---|---|---|---|
| `blackbox` | chat completions, `openai` | the domain's | declared | sent whole |
| `careful` | messages, `anthropic`, streamed | an own role before the domain's | declared | sent whole |
| `bare` | responses, `openai` | none, and no examples | declared, in another order | kept by the gateway: only new items are sent |
| `text` | completions, `openai` | an own one before the domain's | described in words, calls read from the text | one prompt, which the agent renders |

`blackbox` is Forge's own (`forge.agents.scaffolds`). Allowed imports: forge.agents, forge.core.
"""  # noqa: E501
