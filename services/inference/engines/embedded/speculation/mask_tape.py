"""The grammar masks of one answer: filled for the drafts, read again to verify them."""

from __future__ import annotations

from forge.core.errors import ForgeError
from services.inference.engines.grammar_masks import Matcher, Words


class MaskTape:
    """Masks after no draft, one draft, two drafts, and so on."""

    def __init__(self, matcher: Matcher) -> None:
        """`matcher` stays as it is."""
        self._matcher = matcher.copy()
        self._masks: list[Words | ForgeError] = []

    def fill(self, mask: Words) -> None:
        """Write the mask after the present drafts, and record it. Raises as `Matcher.fill`."""
        try:
            self._matcher.fill(mask)
        except ForgeError as error:
            self._masks.append(error)
            raise
        self._masks.append(mask.copy())

    def advance(self, token: int) -> None:
        """Take a draft."""
        self._matcher.advance(token)

    def check(self) -> None:
        """Raises what the matcher's `check` raises."""
        self._matcher.check()

    def copy(self) -> MaskTape:
        """A tape that begins after the present drafts."""
        return MaskTape(self._matcher)

    def after(self, drafts: int) -> Matcher:
        """Fills the mask after so many of the drafts; never advance it."""
        if drafts == len(self._masks):
            return self._matcher
        return _Recorded(self._matcher, self._masks[drafts])


class _Recorded:
    """A matcher that fills one recorded mask."""

    def __init__(self, matcher: Matcher, mask: Words | ForgeError) -> None:
        self._matcher = matcher
        self._mask = mask

    def fill(self, mask: Words) -> None:
        if isinstance(self._mask, ForgeError):
            raise self._mask
        mask[:] = self._mask

    def advance(self, token: int) -> None:
        raise NotImplementedError("a recorded mask has no state to advance")

    def check(self) -> None: ...

    def copy(self) -> Matcher:
        return self
