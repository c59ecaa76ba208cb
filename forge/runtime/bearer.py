"""The issued token of a process without the cluster's key: a runner, or a command of a person."""

from __future__ import annotations

import os
from pathlib import Path

from forge.core.errors import ConfigError

TOKEN_VARIABLE = "FORGE_TOKEN"


class Bearer:
    """An issued token of this process, from a file or a text."""

    def __init__(self, *, text: str = "", file: str = "") -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._text = text.strip()
        self._file = file
        self._modified_ns = 0
        self.token()

    def token(self) -> str:
        """Return the token; a replaced file is read again. Raises ConfigError."""
        if self._file:
            try:
                modified_ns = Path(self._file).stat().st_mtime_ns
                if modified_ns != self._modified_ns:
                    self._text = Path(self._file).read_text().strip()
                    self._modified_ns = modified_ns
            except OSError as error:
                if not self._text:
                    raise ConfigError(f"token_file = {self._file!r}: {error.strerror}") from None
        if not self._text.startswith("v1."):
            raise ConfigError("the token is not one of `forge token issue`")
        return self._text


def bearer_of(file: str) -> Bearer | None:
    """Return the token of `file`, else of FORGE_TOKEN, else None. Raises ConfigError.

    Child processes do not inherit the variable.
    """
    text = os.environ.pop(TOKEN_VARIABLE, "")
    return Bearer(text="" if file else text, file=file) if file or text else None
