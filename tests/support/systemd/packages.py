"""Which packages the documented commands install: a digest of all that chooses them.

Forge itself is installed anew for each run of the tests, so its own files do not count.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib

_COMMENT = re.compile(r"(^|\s+)#.*$", re.M)


def digest_of_packages(*, stock: str, commands: str, project: str, constraints: str) -> str:
    """Return the digest; it differs only if other packages would be installed.

    `stock`: the packages of the bare host. `commands`: the documented ones. `project` and
    `constraints`: the texts of pyproject.toml and constraints.txt.
    """
    read = tomllib.loads(project)
    chosen = {
        "stock": stock,
        "commands": _without_comments(commands),
        "build": read["build-system"],
        "python": read["project"]["requires-python"],
        "dependencies": read["project"]["dependencies"],
        "extras": read["project"]["optional-dependencies"],
        "constraints": sorted(_without_comments(constraints)),
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def _without_comments(text: str) -> list[str]:
    lines = (line.strip() for line in _COMMENT.sub("", text).splitlines())
    return [line for line in lines if line]
