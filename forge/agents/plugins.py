"""Loads Python objects that settings name as "module:attribute" or "name=module:attribute".

Owns the loading and its errors. Owns no use of the objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forge.core.errors import ConfigError
from forge.core.extras import import_named


def load_attribute(reference: str) -> Any:
    """Returns the object of "module:attribute". Raises `ConfigError` with the wrong part."""
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{reference!r} is not of the form module:attribute")
    try:
        module = import_named(module_name)
    except ConfigError as error:
        raise ConfigError(f"{reference}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{reference}: {module_name} has no {attribute}") from None


def named_references(setting: str, entries: Iterable[str]) -> dict[str, str]:
    """Splits "name=module:attribute" entries. Raises `ConfigError` with setting and entry."""
    references = {}
    for entry in entries:
        name, equals, reference = entry.partition("=")
        if not (equals and name.strip() and ":" in reference):
            raise ConfigError(f"{setting}: {entry!r} is not of the form name=module:attribute")
        references[name.strip()] = reference.strip()
    return references
