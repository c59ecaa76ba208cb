"""Runs any program as an agent; its output is the answer.

Owns its words, environment and output; `forge.agents.launchers` owns its process, directories,
limits and end. The program itself calls the model, through the variables that every OpenAI,
Anthropic or Forge client reads.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from forge.agents.environments.base import Episode, Transcript
from forge.agents.launchers.base import OUTPUT_BYTES, Launcher, Program, Request
from forge.agents.rollout import Rollout
from forge.agents.sandbox.child import (
    OutputTail,
    clean_environment,
    how_it_ended,
    kill_group,
    killed_from_outside,
    last_lines,
)
from forge.agents.sandbox.installations import names_file
from forge.client.sessions.session import AgentSession
from forge.core.errors import ConfigError, InvalidArgument, ResourceExhausted
from forge.runtime.concurrency.child_start import ChildProcess
from forge.runtime.telemetry import log
from forge.runtime.tracing import current_span

LOGGED_CHARS = 4000
"""Part of each of them in the runner's log, for a failed program."""
REPORTED_CHARS = 300
"""Part of standard error in the report to the scheduler."""
_PLACEHOLDER = re.compile(r"\{(prompt|task_id|domain)\}")


def command_words(command: str, *, on_host: bool = True) -> list[str]:
    """Returns the words of a command. A program of the host, and words that name a file of it,
    become absolute paths, because it starts in another directory.

    Raises `ConfigError` when the command cannot be split, or names no program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"command = {command!r}: {error}") from None
    if not words:
        raise ConfigError("command is empty: name the program to run as the agent")
    if not on_host:
        return words
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(f"command: there is no program {words[0]!r}")
    files = [str(Path(word).absolute()) if names_file(word) else word for word in words[1:]]
    return [str(Path(program).absolute()), *files]


class Command:
    """Runs one program per rollout.

    `{prompt}`, `{task_id}` and `{domain}` in the command are replaced after the command is split,
    so a prompt is always one word and never shell syntax. The answer is the content of the file
    FORGE_ANSWER, else the last printed line.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        launcher: Launcher,
        pass_environment: Collection[str] = (),
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
    ) -> None:
        """`words`: of `command_words`. The program gets the paths of the PEM files. Raises
        `ConfigError` when they are incomplete."""
        if bool(tls_cert) != bool(tls_key):
            raise ConfigError("command_tls_cert and command_tls_key must be set together")
        self._words = words
        self._launcher = launcher
        self._pass_environment = pass_environment
        self._tls_ca = tls_ca
        self._client_certificate = (
            {"FORGE_TLS_CERT": tls_cert, "FORGE_TLS_KEY": tls_key} if tls_cert else {}
        )

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """Runs one attempt as a program; returns its transcript."""
        prompt = _prompt(episode)
        fields = {"prompt": prompt, "task_id": rollout.task_id, "domain": rollout.domain}
        words = [_PLACEHOLDER.sub(lambda match: fields[match[1]], word) for word in self._words]
        request = self._request(words, rollout, episode, prompt)
        try:
            async with self._launcher.start(request) as program:
                output = await self._output(program, words[0], rollout)
                answer = program.answer() or _last_line(output)
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            raise InvalidArgument("the task is too long for a command line") from error
        session = AgentSession(
            rollout.gateway.channel, rollout.session_token, stub=rollout.gateway.stub
        )
        return Transcript(answer=answer, turns=(await session.open()).turns)

    async def check(self) -> None:
        """Raises `ConfigError` if this host cannot start the command."""
        await self._launcher.check()

    async def close(self) -> None:
        """Frees the launcher; a cancelled rollout ends its program."""
        await self._launcher.close()

    async def _output(self, program: Program, name: str, rollout: Rollout) -> str:
        """Returns standard output of the program. Raises `RuntimeError` when it fails,
        `ResourceExhausted` when its host kills it."""
        output, errors = OutputTail(OUTPUT_BYTES), OutputTail(OUTPUT_BYTES)
        succeeded, over_limit = False, ""
        try:
            await _to_the_end(program.process, output, errors)
            succeeded = program.returncode == 0
            over_limit = "" if succeeded else await program.exceeded()
        finally:
            if not succeeded:
                # Also for a stopped program: its last output shows where it hung.
                log.warning(
                    "program_failed",
                    trajectory_id=rollout.trajectory_id,
                    task_id=rollout.task_id,
                    returncode=program.returncode,
                    over_limit=over_limit,
                    stderr=last_lines(errors.text, chars=LOGGED_CHARS),
                    stdout=last_lines(output.text, chars=LOGGED_CHARS),
                )
        if succeeded:
            return output.text
        lines = " | ".join(last_lines(errors.text, chars=REPORTED_CHARS))
        ended = how_it_ended(program.returncode or 0)
        ended += f", {over_limit}" if over_limit else ""
        text = f"{name} {ended}: {lines or 'nothing on standard error'}"
        killed = killed_from_outside(program.returncode) and not over_limit
        raise ResourceExhausted(text) if killed else RuntimeError(text)

    def _request(
        self, words: list[str], rollout: Rollout, episode: Episode, prompt: str
    ) -> Request:
        """Returns the program with its variables: `PASSED`, the gateway's address and the task."""
        gateway, token = rollout.gateway, rollout.session_token
        inherited = clean_environment(self._pass_environment)
        host = gateway.grpc_address.rpartition(":")[0]
        unproxied = ",".join(filter(None, (inherited.get("NO_PROXY"), host)))
        task = {
            "task_id": rollout.task_id,
            "domain": rollout.domain,
            "prompt": prompt,
            "messages": episode.messages,
            # Not the complete payload: it may have the expected answer.
            "inputs": rollout.payload.get("inputs", {}),
        }
        variables = {
            "OPENAI_BASE_URL": f"{gateway.http_url}/v1",
            "OPENAI_API_KEY": token,
            # Anthropic's clients add /v1.
            "ANTHROPIC_BASE_URL": gateway.http_url,
            "ANTHROPIC_API_KEY": token,
            # Google's clients add /v1beta.
            "GOOGLE_GEMINI_BASE_URL": gateway.http_url,
            "GEMINI_API_KEY": token,
            "FORGE_GRPC_ADDR": gateway.grpc_address,
            "FORGE_SESSION_TOKEN": token,
            "FORGE_TASK_JSON": json.dumps(task),
            "NO_PROXY": unproxied,
            "no_proxy": unproxied,
        }
        if traceparent := current_span().traceparent:
            variables["TRACEPARENT"] = traceparent
        return Request(
            words=words,
            variables=variables,
            inherited=inherited,
            passed=[name for name in self._pass_environment if name in inherited],
            certificates=self._trust(inherited),
            gateway=gateway,
            image=rollout.payload.get("image", ""),
        )

    def _trust(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables with which clients trust the cluster's certificate authority."""
        if not self._tls_ca:
            return {}
        # Python's and Node's clients read the last two; a value in the environment stays.
        names = ("FORGE_TLS_CA", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        trusted = {name: self._tls_ca for name in names if name not in inherited}
        return trusted | self._client_certificate


async def _to_the_end(process: ChildProcess, output: OutputTail, errors: OutputTail) -> None:
    """Waits for the end of the program and of its output."""
    assert process.stdout and process.stderr
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(output.read(process.stdout))
        tasks.create_task(errors.read(process.stderr))
        await process.wait()
        # Its children may keep the pipes open forever.
        kill_group(process)


def _prompt(episode: Episode) -> str:
    for message in reversed(episode.messages):
        if message["role"] == "user":
            text: str = message["content"]
            return text
    raise InvalidArgument("the task has no user message to run a command with")


def _last_line(text: str) -> str:
    # Not splitlines: it also splits at characters such as U+2028.
    return re.split(r"[\r\n]", text.strip())[-1].strip()
