"""Runs any program as an agent; its output is the answer.

Owns the process: its environment, limits, output and end. The program itself calls the model,
through the variables that every OpenAI, Anthropic or Forge client reads.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from forge.agents.child import (
    OutputTail,
    clean_environment,
    how_it_ended,
    kill_group,
    killed_from_outside,
    last_lines,
)
from forge.agents.environments.base import Episode, Transcript
from forge.agents.rollout import Rollout
from forge.client.session import AgentSession
from forge.core.errors import ConfigError, InvalidArgument, ResourceExhausted
from forge.runtime.telemetry import log

OUTPUT_BYTES = 64 << 10
"""Kept end of standard output, and of standard error."""
LOGGED_CHARS = 4000
"""Part of each of them in the runner's log, for a failed program."""
REPORTED_CHARS = 300
"""Part of standard error in the report to the scheduler."""
# Sets the limits in the program's process and then executes the program: Python code between fork
# and exec would be unsafe in a process with threads. The program ends with the runner.
_LAUNCHER = """
import ctypes, os, resource, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[3]):
    sys.exit("the runner is gone")
kinds = (resource.RLIMIT_DATA, resource.RLIMIT_NPROC)
for kind, limit in zip(kinds, map(int, sys.argv[1:3])):
    if limit:
        resource.setrlimit(kind, (limit, limit))
os.execvp(sys.argv[4], sys.argv[4:])
"""
_PLACEHOLDER = re.compile(r"\{(prompt|task_id|domain)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program; 0: no limit. The rollout limits its time."""

    memory_bytes: int
    """Private writable memory of each of its processes (RLIMIT_DATA)."""
    processes: int
    """Processes and threads of the runner's user, over all rollouts (RLIMIT_NPROC)."""


class Command:
    """Runs one program per rollout.

    `{prompt}`, `{task_id}` and `{domain}` in the command are replaced after the command is split,
    so a prompt is always one word and never shell syntax. The answer is the content of the file
    FORGE_ANSWER, else the last printed line.
    """

    def __init__(
        self,
        command: str,
        *,
        limits: Limits,
        pass_environment: Collection[str] = (),
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
    ) -> None:
        """The program gets the paths of the PEM files. Raises `ConfigError` when the command cannot
        be split, or names no program."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"command = {command!r}: {error}") from None
        if not self._words:
            raise ConfigError("command is empty: name the program to run as the agent")
        if shutil.which(self._words[0]) is None:
            raise ConfigError(f"command: there is no program {self._words[0]!r}")
        if bool(tls_cert) != bool(tls_key):
            raise ConfigError("command_tls_cert and command_tls_key must be set together")
        self._limits = limits
        self._pass_environment = pass_environment
        self._tls_ca = tls_ca
        self._client_certificate = (
            {"FORGE_TLS_CERT": tls_cert, "FORGE_TLS_KEY": tls_key} if tls_cert else {}
        )

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """As `Scaffold.run`."""
        prompt = _prompt(episode)
        fields = {"prompt": prompt, "task_id": rollout.task_id, "domain": rollout.domain}
        words = [_PLACEHOLDER.sub(lambda match: fields[match[1]], word) for word in self._words]
        scratch = Path(tempfile.mkdtemp(prefix="forge-rollout-"))
        try:
            environment = self._environment(rollout, episode, prompt, scratch)
            output = await self._execute(words, environment, rollout)
            answer = _written(Path(environment["FORGE_ANSWER"])) or _last_line(output)
        finally:
            # In a thread: a program may have written gigabytes.
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        session = AgentSession(rollout.gateway.channel, rollout.session_token)
        return Transcript(answer=answer, turns=(await session.open()).turns)

    async def close(self) -> None:
        """Nothing to free: a cancelled rollout kills its program."""

    async def _execute(
        self, words: list[str], environment: Mapping[str, str], rollout: Rollout
    ) -> str:
        """Returns standard output of the program. Raises `RuntimeError` when it fails,
        `ResourceExhausted` when its host kills it."""
        process = await self._start(words, environment)
        output, errors = OutputTail(OUTPUT_BYTES), OutputTail(OUTPUT_BYTES)
        succeeded = killed = False
        try:
            await _to_the_end(process, output, errors)
            succeeded = process.returncode == 0
            killed = killed_from_outside(process.returncode)
        finally:
            kill_group(process)
            await process.wait()
            if not succeeded:
                # Also for a stopped program: its last output shows where it hung.
                log.warning(
                    "program_failed",
                    trajectory_id=rollout.trajectory_id,
                    task_id=rollout.task_id,
                    returncode=process.returncode,
                    stderr=last_lines(errors.text, chars=LOGGED_CHARS),
                    stdout=last_lines(output.text, chars=LOGGED_CHARS),
                )
        if not succeeded:
            lines = " | ".join(last_lines(errors.text, chars=REPORTED_CHARS))
            ended = how_it_ended(process.returncode or 0)
            text = f"{words[0]} {ended}: {lines or 'nothing on standard error'}"
            raise ResourceExhausted(text) if killed else RuntimeError(text)
        return output.text

    async def _start(self, words: list[str], environment: Mapping[str, str]) -> Process:
        """Starts the program. Raises `InvalidArgument` when the task is too long."""
        settings = (self._limits.memory_bytes, self._limits.processes, os.getpid())
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LAUNCHER, *map(str, settings), *words),
                env=environment,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            raise InvalidArgument("the task is too long for a command line") from error

    def _environment(
        self, rollout: Rollout, episode: Episode, prompt: str, scratch: Path
    ) -> dict[str, str]:
        """Returns the variables of the program: `PASSED`, the gateway's address and the task."""
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
        return inherited | {
            "OPENAI_BASE_URL": f"{gateway.http_url}/v1",
            "OPENAI_API_KEY": token,
            # Anthropic's clients add /v1.
            "ANTHROPIC_BASE_URL": gateway.http_url,
            "ANTHROPIC_API_KEY": token,
            "FORGE_GRPC_ADDR": gateway.grpc_address,
            "FORGE_SESSION_TOKEN": token,
            **self._trust(inherited),
            "FORGE_TASK_JSON": json.dumps(task),
            "NO_PROXY": unproxied,
            "no_proxy": unproxied,
            "TMPDIR": str(scratch),
            "FORGE_ANSWER": str(scratch / "answer"),
        }

    def _trust(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables with which clients trust the cluster's certificate authority."""
        if not self._tls_ca:
            return {}
        # Python's and Node's clients read the last two; a value in the environment stays.
        names = ("FORGE_TLS_CA", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        trusted = {name: inherited.get(name, self._tls_ca) for name in names}
        return trusted | self._client_certificate


async def _to_the_end(process: Process, output: OutputTail, errors: OutputTail) -> None:
    """Waits for the end of the program and of its output."""
    assert process.stdout and process.stderr
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(output.read(process.stdout))
        tasks.create_task(errors.read(process.stderr))
        await process.wait()
        # Its children may keep the pipes open for ever.
        kill_group(process)


def _prompt(episode: Episode) -> str:
    for message in reversed(episode.messages):
        if message["role"] == "user":
            text: str = message["content"]
            return text
    raise InvalidArgument("the task has no user message to run a command with")


def _written(answer_file: Path) -> str:
    try:
        # A link of the program could lead to a file that only the runner may read.
        opened = os.open(answer_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(opened, "rb") as file:
        regular = stat.S_ISREG(os.fstat(opened).st_mode)
        return file.read(OUTPUT_BYTES).decode(errors="replace").strip() if regular else ""


def _last_line(text: str) -> str:
    # Not splitlines: it also splits at characters such as U+2028.
    return re.split(r"[\r\n]", text.strip())[-1].strip()
