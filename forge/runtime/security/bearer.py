"""The issued token of a process without the cluster's key: a runner, or a command of a person."""

from __future__ import annotations

import os
from pathlib import Path

from forge.core.errors import ConfigError, Unauthenticated
from forge.runtime.files.changes import file_state
from forge.runtime.files.private import replace_private_file
from forge.runtime.security.tokens import Claims, unverified_claims

TOKEN_VARIABLE = "FORGE_TOKEN"


class Bearer:
    """An issued token of this process, from a file or a text, and its renewals."""

    def __init__(
        self, *, text: str = "", file: str = "", state_file: str = "", setting: str = "token_file"
    ) -> None:
        """`state_file` has the renewals; "": `file` has them. `setting` names `file`. Raises
        ConfigError for a file that cannot be read, or has no token."""
        self._text = ""
        self._setting = setting
        self._file = file
        self._state_file = state_file or file
        self._state: tuple[int, ...] = ()
        self._renewed = _read(state_file) if state_file else ""
        if not file:
            self._take(text)
        self.token()

    def token(self) -> str:
        """Return the token; a replaced file is read again, and has no effect without a token."""
        if self._file:
            try:
                state = file_state(Path(self._file))
                if state != self._state:
                    text = Path(self._file).read_text(errors="replace")
                    self._state = state
                    self._take(text)
            except OSError as error:
                if not self._text:
                    raise ConfigError(
                        f"{self._setting} = {self._file!r}: {error.strerror}"
                    ) from None
        return self._renewed if _renews(self._renewed, self._text) else self._text

    def _take(self, text: str) -> None:
        try:
            unverified_claims(text.strip())
        except Unauthenticated:
            source = f"{self._setting} = {self._file!r}" if self._file else TOKEN_VARIABLE
            error = ConfigError(f"{source}: the token is not one of `forge token issue`")
            if not self._text:
                raise error from None
            # Imported late: `forge --help` does without.
            from forge.runtime.telemetry import log

            log.warning("credentials_not_reloaded", files=self._setting, error=str(error))
        else:
            self._text = text.strip()

    @property
    def claims(self) -> Claims:
        """The claims of the token, unverified. Raises Unauthenticated for a malformed one."""
        return unverified_claims(self.token())

    def renew(self, token: str) -> None:
        """Use a renewal of the token, also after a restart. Raises OSError if it cannot be stored;
        this process uses it nevertheless."""
        self._renewed = token
        if self._state_file:
            replace_private_file(self._state_file, token + "\n")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        # The first start, or the operator has cleared the directory.
        return ""


def _renews(renewed: str, issued: str) -> bool:
    """Whether one token is a renewal of the other; an operator may have replaced that since."""
    if not renewed:
        return False
    try:
        new, old = unverified_claims(renewed), unverified_claims(issued)
    except Unauthenticated:
        return False
    return (
        bool(new.token_id)
        and new.token_id == old.token_id
        and (new.expires_unix_s > old.expires_unix_s)
    )


def bearer_of(file: str, *, state_file: str = "") -> Bearer | None:
    """Return the token of `file`, else of FORGE_TOKEN, else None. Raises ConfigError.

    Child processes do not inherit the variable.
    """
    text = os.environ.pop(TOKEN_VARIABLE, "")
    if not file and not text:
        return None
    return Bearer(text="" if file else text, file=file, state_file=state_file)
