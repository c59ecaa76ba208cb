"""The attention that a model computes with: over merged trees, or its own on single sequences.

Owns the change between the two, and the way in which trees are computed. `forge.rl.model.probe`
finds the way by computing; `forge.rl.model.policy` divides a tree into passes accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge.rl.attention.tree_attention import TREE_ATTENTION, register
from forge.rl.model.capabilities import (
    Way,
    depends_on_length,
    one_line,
    stock_attention,
    unmergeable,
    warn_unmerged,
)


class AttentionSwitch:
    """Sets the attention implementation of one model."""

    def __init__(self, model: Any, *, forked: bool, way: Way | None, own: str) -> None:
        """Set the attention of `way`, None: of the way by the configuration. `forked` says that
        layers hand a state from node to node; `own` is the stock implementation, "": that of the
        model."""
        register()
        self._model = model
        self.own: str = own or stock_attention(model.config)
        """The model's stock attention implementation."""
        self.way = Way()
        """Way in which trees are computed."""
        if way is None:
            reason = unmergeable(model, forked=forked)
            self.settle(Way(unmerged=reason, separate=depends_on_length(model)))
        else:
            self.use(way)

    def use(self, way: Way) -> None:
        """Compute trees this way from now on."""
        self.way = way
        attention = self.own if way.unmerged else TREE_ATTENTION
        self._model.set_attn_implementation(attention)

    def settle(self, way: Way, *, known: str = "") -> None:
        """Compute trees this way; log the reason for unmerged trees unless it is `known`."""
        try:
            self.use(way)
        except (ValueError, AttributeError) as error:
            way = Way(unmerged=f"it takes no other attention ({one_line(error)})", separate=True)
            self.use(way)
        if way.unmerged and way.unmerged != known:
            warn_unmerged(type(self._model).__name__, way)

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Context in which the model uses its stock attention."""
        self._model.set_attn_implementation(self.own)
        try:
            yield
        finally:
            self.use(self.way)
