"""`make audit`: pip-audit over the pinned versions, and one line where no advisories can be asked.

pip-audit itself reports each version as unknown if its service is a mirror without advisories.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = "https://pypi.org/pypi/pip/24.0/json"
"""Any version of a package: its answer has a list of advisories, empty or not."""
_PIP_AUDIT = ("-m", "pip_audit", "--strict", "--disable-pip", "--no-deps", "--progress-spinner=off")


def unreachable(source: str) -> str:
    """Why `source` has no advisories; empty if it has."""
    try:
        with urllib.request.urlopen(source, timeout=30) as answer:
            known = "vulnerabilities" in json.load(answer)
    except (OSError, ValueError) as error:
        return str(error)
    return "" if known else "its answer has no advisories"


def main(options: Sequence[str], *, source: str = SOURCE) -> int:
    """Exit code of pip-audit; 2 without a source of advisories. `options` are pip-audit's: with
    `--vulnerability-service` or `-s` it asks that service."""
    chosen = {"-s", "--vulnerability-service"} & {option.partition("=")[0] for option in options}
    if not chosen and (reason := unreachable(source)):
        print(
            f"make audit: nothing was audited: {source} has no advisories from here ({reason}); "
            "docs/tests.md#known-vulnerabilities has other ways",
            file=sys.stderr,
        )
        return 2
    pinned = ("-r", str(ROOT / "constraints.txt"))
    command = [sys.executable, *_PIP_AUDIT, *pinned, *options]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if "Traceback" in done.stderr:
        print(f"make audit: nothing was audited: {done.stderr.splitlines()[-1]}", file=sys.stderr)
        return 2
    print(done.stderr, file=sys.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
