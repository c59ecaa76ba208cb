"""Transports of commands to a host: the system's ssh, or a process of this computer."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forge.cli.deploy.inventory.inventory import LOCAL

_SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6"),
)
_SSH_FAILED = 255
_TIMED_OUT = 124
_NO_CAUSE = "tar: Exiting with failure status"
"""The line that tar prints after those of its errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that ended."""

    code: int
    output: str
    errors: str = ""
    is_away: bool = False
    """Whether the host gave no answer; the outcome of the command is unknown."""

    @property
    def reason(self) -> str:
        """The last line of errors or output that has a cause, for people."""
        text = self.errors.strip() or self.output.strip()
        lines = [line for line in text.splitlines() if not line.startswith(_NO_CAUSE)]
        return lines[-1] if lines else f"exit code {self.code}"


class Transport(Protocol):
    """Runs commands on one host, as root."""

    def run(self, words: Sequence[str], *, stdin: bytes = b"", limit_s: float = 60.0) -> Ended:
        """Run a command to its end. A host that cannot be reached, and a command that ends too
        late, have an exit code other than 0; the outcome of the command is then unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """Runs commands by the system's ssh client, with its configuration and keys."""

    login: str

    def run(self, words: Sequence[str], *, stdin: bytes = b"", limit_s: float = 60.0) -> Ended:
        """Run a command on the host, to its end."""
        ended = _run([*_SSH, self.login, "--", shlex.join(words)], stdin, limit_s)
        if ended.code == _SSH_FAILED:
            reason = f"ssh {self.login}: {ended.reason}"
            return Ended(code=ended.code, output="", errors=reason, is_away=True)
        return ended


@dataclass(frozen=True, slots=True)
class Local:
    """Runs commands on this computer."""

    def run(self, words: Sequence[str], *, stdin: bytes = b"", limit_s: float = 60.0) -> Ended:
        """Run a command on this computer, to its end."""
        return _run(words, stdin, limit_s)


def transport_for(login: str) -> Transport:
    """Return the transport of a host's `login`."""
    return Local() if login == LOCAL else Ssh(login=login)


def _run(words: Sequence[str], stdin: bytes, limit_s: float) -> Ended:
    try:
        ended = subprocess.run(words, input=stdin, capture_output=True, timeout=limit_s)
    except FileNotFoundError:
        return Ended(code=127, output="", errors=f"{words[0]}: not installed")
    except subprocess.TimeoutExpired:
        return Ended(code=_TIMED_OUT, output="", errors=f"no end within {limit_s:.0f} s")
    return Ended(
        code=ended.returncode,
        output=ended.stdout.decode(errors="replace"),
        errors=ended.stderr.decode(errors="replace"),
    )
