"""What a service has logged so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def log_lines(log: Path) -> list[dict[str, Any]]:
    """Its lines, oldest first, without the one that is being written."""
    whole, _, _ = log.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
