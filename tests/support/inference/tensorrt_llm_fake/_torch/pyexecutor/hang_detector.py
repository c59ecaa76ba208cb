"""Ends a rank whose executor makes no step for long; a control action is no step."""

from __future__ import annotations

from tests.support.inference.tensorrt_llm_fake.behaviour import misuse


class HangDetector:
    """See the library. A bucket takes more than half of its time."""

    def __init__(self) -> None:
        self._buckets = 0

    def checkpoint(self) -> None:
        """Start the time again."""
        self._buckets = 0

    def note_bucket(self) -> None:
        """A bucket was loaded within a control action."""
        self._buckets += 1
        if self._buckets > 1:
            raise misuse("the hang detector kills a rank in the middle of an update")
