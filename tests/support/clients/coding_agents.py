"""Coding agents of others, as their packages install them: settings, command and script of each.

Owns the home directory with an agent's configuration, as docs/clients.md describes it, the folder
of the job, and the form of the script: what the model says until the agent folds its history, and
what it says then.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.runtime.coordination import Instance
from tests.support.clients.coding_job import BROKEN, REPAIRED
from tests.support.clients.matrix import Row
from tests.support.clients.programs import NODE_DIR, VENV
from tests.support.gateway.script import scripted
from tests.support.suite.process_guard import mark

MODULES = NODE_DIR / "node_modules"
DONE = "It adds now."
FOLDER = "JOB_FOLDER"
"""In a script: the folder of the job."""
LINES = 3000
"""Lines that a command prints: more than the rest of a small context."""
NOTES = Path(__file__).parents[2] / "clients/programs/mcp_notes.py"
"""An MCP server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """One agent, over one protocol."""

    name: str
    protocol: str
    package: str
    """Its folder in `node_modules`."""
    steps: Sequence[str]
    """What the model says before the agent folds its history."""
    after_fold: Sequence[str]
    context_tokens: int = 0
    """Context of its session; 0: the model's."""
    window: int = 200_000
    """Context that the agent is told of."""
    begun: int
    """Turns that do not continue a whole earlier one: the first, titles, the summary, and the first
    after it."""
    matches_code: bool = True
    """Whether it finds an overflow by its code, too, or in the words that there were before."""

    @property
    def key(self) -> str:
        """For test and trajectory ids."""
        return f"{self.name}-{self.protocol}"

    @property
    def row(self) -> Row:
        """Its place in the table."""
        return Row(client=self.name, protocol=self.protocol, stream=True)

    def prompt(self, folder: Path) -> str:
        """The task, with the script."""
        task = "The program calc.py subtracts. Make it add."
        script = scripted(task, *self.steps, after_fold=self.after_fold)
        return script.replace(FOLDER, str(folder))

    @property
    def version(self) -> str:
        """Of the installed package."""
        manifest = json.loads((MODULES / self.package / "package.json").read_text())
        return str(manifest["version"])

    def command(self, url: str, home: Path) -> list[str]:
        """Writes the agent's configuration below `home`; returns its command line without the
        task, which is its last word, or its input."""
        return _COMMANDS[self.name](self, url, home)

    @property
    def reads_input(self) -> bool:
        """Whether it takes its task from its input: opencode escapes quotes in an argument."""
        return self.name == "opencode"


def call(name: str, **arguments: Any) -> str:
    """A tool call, spelled as no template would spell it."""
    written = json.dumps({"name": name, "arguments": arguments}, separators=(",", ": "))
    return f"<tool_call>\n{written}\n</tool_call>"


def prepare(folder: Path) -> None:
    """Puts the broken program and a picture there."""
    folder.mkdir(parents=True)
    (folder / "calc.py").write_text(BROKEN)
    (folder / "plot.png").write_bytes(_picture())


def repaired(folder: Path) -> bool:
    """Whether the agent has done its job."""
    return (folder / "calc.py").read_text() == REPAIRED


def environment(gateway: Instance, token: str, home: Path) -> dict[str, str]:
    """What the runner sets, and what keeps the agents from the network."""
    base = f"http://{gateway.metadata['http']}"
    return {
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": token,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "PI_OFFLINE": "1",
        **mark(),
    }


def _codex(agent: CodingAgent, url: str, home: Path) -> list[str]:
    folder = home / ".codex"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps({"models": [_CODEX_MODEL]}))
    (folder / "config.toml").write_text(
        f"""
model = "policy"
model_provider = "forge"
model_catalog_json = "{folder / "models.json"}"
model_auto_compact_token_limit = {agent.window}

[model_providers.forge]
name = "Forge"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = true

[mcp_servers.notes]
command = "{VENV / "bin/python"}"
args = ["{NOTES}"]
required = true
"""
    )
    flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(MODULES / ".bin/codex"), "exec", *flags]


def _opencode(agent: CodingAgent, url: str, home: Path) -> list[str]:
    model = {
        "name": "policy",
        "limit": {"context": agent.window, "output": 1024},
        "attachment": True,
        "modalities": {"input": ["text", "image"], "output": ["text"]},
    }
    options = {"baseURL": f"{url}/v1", "apiKey": "{env:OPENAI_API_KEY}"}
    settings = {
        "model": "forge/policy",
        "small_model": "forge/policy",
        "autoupdate": False,
        "permission": "allow",
        "provider": {
            "forge": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Forge",
                "options": options,
                "models": {"policy": model},
            }
        },
    }
    folder = home / ".config/opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(settings))
    # The package's own script links the binary of the platform; npm may not run scripts.
    binary = min(
        path for path in MODULES.glob("opencode-linux*/bin/opencode") if "musl" not in str(path)
    )
    return [str(binary), "run", "--format", "json"]


def _pi(agent: CodingAgent, url: str, home: Path) -> list[str]:
    api = {
        "chat": "openai-completions",
        "responses": "openai-responses",
        "messages": "anthropic-messages",
    }[agent.protocol]
    anthropic = agent.protocol == "messages"
    model = {
        "id": "policy",
        "name": "policy",
        "reasoning": False,
        "input": ["text", "image"],
        "contextWindow": agent.window,
        "maxTokens": 1024,
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
    }
    provider = {
        "baseUrl": url if anthropic else f"{url}/v1",
        "api": api,
        "apiKey": "ANTHROPIC_API_KEY" if anthropic else "OPENAI_API_KEY",
        "models": [model],
    }
    folder = home / ".pi/agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"forge": provider}}))
    kept = {"enabled": True, "reserveTokens": 1024, "keepRecentTokens": 200}
    (folder / "settings.json").write_text(json.dumps({"compaction": kept}))
    flags = ["--provider", "forge", "--model", "policy", "--mode", "json"]
    return [str(MODULES / ".bin/pi"), *flags, "-p"]


def _qwen(agent: CodingAgent, url: str, home: Path) -> list[str]:
    folder = home / ".qwen"
    folder.mkdir(parents=True)
    settings = {
        "memory": {"enableManagedAutoMemory": False},
        "general": {"enableAutoUpdate": False},
        "model": {"generationConfig": {"modalities": {"image": True}}},
        "privacy": {"usageStatisticsEnabled": False},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    flags = ["--auth-type", "openai", "--model", "policy", "--yolo", "--output-format", "json"]
    return [str(MODULES / ".bin/qwen"), *flags, "-p"]


_COMMANDS = {"codex": _codex, "opencode": _opencode, "pi": _pi, "qwen-code": _qwen}
_CODEX_MODEL: dict[str, Any] = {
    "slug": "policy",
    "display_name": "policy",
    "supported_reasoning_levels": [],
    "shell_type": "unified_exec",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "base_instructions": "You are a coding agent. Use the tools; report briefly.",
    "supports_reasoning_summaries": False,
    "support_verbosity": False,
    "apply_patch_tool_type": "freeform",
    "truncation_policy": {"mode": "tokens", "limit": 10000},
    "supports_parallel_tool_calls": True,
    "context_window": 65536,
    "experimental_supported_tools": [],
    "input_modalities": ["text", "image"],
}
"""What docs/clients.md tells Codex of the model."""


def _picture() -> bytes:
    """A PNG of 8 by 8 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    pixels = (b"\0" + b"\x40\x80\xff" * 8) * 8
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
