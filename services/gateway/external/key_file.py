"""The operator's key of an external API, in a file."""

from __future__ import annotations

from pathlib import Path

from forge.core.errors import ConfigError


def read_key(table: str, key_file: str) -> str:
    """Returns the key; "" without a file. Read at each call, so that a replaced file needs no
    restart. Raises `ConfigError` for an unreadable file, and for one that is open to every user."""
    if not key_file:
        return ""
    setting = f"{table}.key_file = {key_file!r}"
    path = Path(key_file)
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {getattr(error, 'strerror', 'it is not text')}") from None
    if mode & 0o007:
        raise ConfigError(f"{setting} is open to every user: chmod o= {key_file}")
    if not text.isprintable() or not text or " " in text:
        raise ConfigError(f"{setting} must have one key, on one line")
    return text
