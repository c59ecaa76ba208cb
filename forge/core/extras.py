"""Optional packages of the distribution, by extra, and modules that settings name.

Owns the look-up in the installed metadata, and the errors of a missing package and of a module that
cannot be imported.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from forge.core.errors import ConfigError, ForgeError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "forge-rl"
_LIBRARY = (f"{Path(traceback.__file__).parent}/", "<frozen ")
"""Beginnings of the file names of Python's own modules."""


def requirements(extras: Collection[str]) -> list[Requirement]:
    """Returns the requirements of the core and of `extras`."""
    return [
        package
        for package in _declared()
        if not package.marker
        or any(package.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


@cache
def _declared() -> tuple[Requirement, ...]:
    """Returns the requirements with their markers; to parse them takes most of a look-up."""
    # Late imports: a command that needs no metadata starts faster.
    from importlib import metadata

    from packaging.requirements import Requirement

    return tuple(map(Requirement, metadata.requires(DISTRIBUTION) or ()))


def missing_packages(extras: Collection[str]) -> set[str]:
    """Returns the required packages that are not installed."""
    from importlib.metadata import PackageNotFoundError, distribution

    missing = set()
    for package in requirements(extras):
        # Not its version: for that the whole file of its metadata is parsed.
        try:
            distribution(package.name)
        except PackageNotFoundError:
            missing.add(package.name)
    return missing


def require_extra(extra: str) -> None:
    """Raises `ConfigError` if a package of the extra is missing."""
    if missing := missing_packages([extra]):
        raise ConfigError(not_installed(missing, extra))


def extras_with(module: str) -> list[str]:
    """Returns the extras that install a module, in the order of pyproject.toml."""
    from importlib import metadata

    from packaging.utils import canonicalize_name

    name = canonicalize_name(module.partition(".")[0])
    core = {canonicalize_name(package.name) for package in requirements(())}
    return [
        extra
        for extra in metadata.metadata(DISTRIBUTION).get_all("Provides-Extra", [])
        if name in {canonicalize_name(package.name) for package in requirements([extra])} - core
    ]


@contextmanager
def extras_named(preferred: str = "") -> Iterator[None]:
    """Raises `ConfigError` with the extra, in place of the import error of an optional package.
    `preferred`: the extra to name if several install the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        extras = extras_with(error.name or "")
        if not extras:
            raise
        extra = preferred if preferred in extras else extras[0]
        raise ConfigError(not_installed([str(error.name)], extra)) from error


@contextmanager
def import_errors(source: str) -> Iterator[None]:
    """Raises `ConfigError` in place of any error of an import: `source`, and the error with its
    place, in one line."""
    try:
        with extras_named():
            yield
    except (ForgeError, MemoryError):
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source}: {error}") from error
    # The module's code may raise anything.
    except (Exception, SystemExit) as error:
        place = "" if isinstance(error, SyntaxError) else place_of(error)
        raise ConfigError(f"{source}: {type(error).__name__}: {error}{place}") from error


def import_named(module: str) -> ModuleType:
    """Import a module that a setting names. Raises `ConfigError`."""
    with import_errors(f"cannot import {module}"):
        return import_module(module)


def place_of(error: BaseException) -> str:
    """Return the place of an error: " (scores.py:12)". For one that Python's library raises, as
    `json.loads` does, that of the call."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not _is_of_python(one.filename)] or frames
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _is_of_python(file: str) -> bool:
    return file.startswith(_LIBRARY) and "/site-packages/" not in file


def not_installed(packages: Collection[str], extra: str) -> str:
    """Returns the line about missing packages, with the command that installs their extra."""
    them = "it" if len(packages) == 1 else "them"
    return (
        f"not installed: {', '.join(sorted(packages))}; install {them}: "
        f"pip install '{DISTRIBUTION}[{extra}]'"
    )
