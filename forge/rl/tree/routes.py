"""The recorded experts of a tree's tokens, and the merging of samples that agree on them.

Two samples share a token's state only if they agree on the experts of every token up to it. So a
tree with routes merges by keys in place of ids: one number per distinct pair of token and route. A
token without a route is a pair of its own, since the model then chooses.

Shapes: L layout tokens, M routed layers, K experts per token, N tokens of all samples, R rows of
all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.core.prefix_tree import Sample, TreePlan
from forge.core.routes import Routes, RouteShape
from forge.rl.sampling import GOLDEN, mixed

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRoutes:
    """Experts of the tokens of a layout or of a part of it."""

    ids_LMK: Tensor
    """uint8 or int32; without meaning where they are not known."""
    known_L: Tensor
    """Tokens whose experts are replayed; the model chooses those of others."""

    def at(self, places_L: Tensor | slice) -> TreeRoutes:
        """Routes of the tokens at these places."""
        return TreeRoutes(ids_LMK=self.ids_LMK[places_L], known_L=self.known_L[places_L])


class RouteKeys:
    """The distinct pairs of token and route in the samples of a batch."""

    def __init__(self, samples: Sequence[Sample], shape: RouteShape) -> None:
        """`shape` is that of the model; routes of another one are left out."""
        columns = {id(span.routes): span.routes for one in samples for span in one.routes}
        fitting = {key: one for key, one in columns.items() if _fits(one, shape)}
        self.unfit_columns = len(columns) - len(fitting)
        """Columns of another model, whose tokens have no routes."""
        self._shape = (shape.layers, shape.top_k)
        width = shape.layers * shape.top_k
        self._rows_RX = np.concatenate(
            [np.zeros((1, width), np.uint8), *(_rows(one) for one in fitting.values())]
        )
        """The first row stands for tokens without a route."""
        offsets = np.cumsum([1, *(one.tokens for one in fitting.values())])
        self._offsets = dict(zip(fitting, offsets.tolist(), strict=False))
        marks_R = _marks(self._rows_RX, shape.top_k)
        rows_N = np.concatenate([self._rows_of(one) for one in samples])
        ids_N = np.concatenate([np.frombuffer(one.ids, np.int32) for one in samples])
        _, route_N = np.unique(marks_R[rows_N], return_inverse=True)
        pairs_N = ids_N.astype(np.int64) << 32 | route_N
        _, firsts, keys_N = np.unique(pairs_N, return_index=True, return_inverse=True)
        self._ids, self._rows = ids_N[firsts], rows_N[firsts]
        self._known = marks_R[self._rows] != 0
        bounds = np.cumsum([one.tokens for one in samples])[:-1]
        self.of_samples = [part.tobytes() for part in np.split(keys_N.astype("<i4"), bounds)]
        """int32 keys of each sample, to merge by."""

    def _rows_of(self, sample: Sample) -> Array:
        """[tokens] each token's row in all columns; 0 without one."""
        rows = np.zeros(sample.tokens, np.int64)
        for span in sample.routes:
            offset = self._offsets.get(id(span.routes))
            if offset is not None:
                start = offset + span.first_row
                rows[span.start : span.end] = np.arange(start, start + span.tokens)
        return rows

    def resolved(self, plan: TreePlan) -> TreePlan:
        """A plan that was made of keys, with the ids of its tokens."""
        keys_L = np.frombuffer(plan.ids, np.int32)
        return replace(plan, ids=self._ids[keys_L].astype("<i4").tobytes(), keys=plan.ids)

    def routes(self, plan: TreePlan) -> TreeRoutes:
        """The routes of a resolved plan's layout."""
        keys_L = np.frombuffer(plan.keys, np.int32)
        ids_LX = self._rows_RX[self._rows[keys_L]]
        kind = np.uint8 if ids_LX.dtype == np.uint8 else np.int32
        known_L = self._known[keys_L]
        ids_LMK = np.where(known_L[:, None], ids_LX, 0).astype(kind)
        return TreeRoutes(
            ids_LMK=torch.from_numpy(ids_LMK.reshape(len(keys_L), *self._shape)),
            known_L=torch.from_numpy(known_L),
        )


def route_keys(samples: Sequence[Sample], shape: RouteShape | None) -> RouteKeys | None:
    """The keys of samples with routes; None if none has any, and without a `shape`."""
    wanted = shape is not None and any(one.routes for one in samples)
    return RouteKeys(samples, shape) if wanted and shape is not None else None


def split_nodes(plan: TreePlan) -> int:
    """Nodes that begin with the token of a sibling, since their experts differ."""
    starts = [node.start for node in plan.nodes]
    ids = np.frombuffer(plan.ids, np.int32)[starts]
    children = {(node.parent, int(token)) for node, token in zip(plan.nodes, ids, strict=True)}
    return len(plan.nodes) - len(children)


def _fits(column: Routes, shape: RouteShape) -> bool:
    """Whether all experts of a column exist in the model."""
    found = (column.layers, column.top_k, column.id_bytes)
    if found != (shape.layers, shape.top_k, shape.id_bytes) or not column.ids:
        return False
    rows_RX = _rows(column)
    highest_R = rows_RX[~_unknown(rows_RX)]
    return not highest_R.size or int(highest_R.max()) < shape.experts


def _rows(column: Routes) -> Array:
    kind = np.dtype("u1" if column.id_bytes == 1 else "<u2")
    return np.frombuffer(column.ids, kind).reshape(-1, column.layers * column.top_k)


def _unknown(rows_RX: Array) -> Array:
    """[R] whether a row says that the experts are not known."""
    unknown: Array = (rows_RX == np.iinfo(rows_RX.dtype).max).all(1)
    return unknown


def _marks(rows_RX: Array, top_k: int) -> Array:
    """[R] a 64-bit hash of each row, independent of the order of a layer's experts; 0 for those
    that say nothing, as the first one.

    The sum of a mixed number for each column and expert (splitmix64): as good as random, so two of
    a billion different rows have one hash with a probability of 3 percent.
    """
    marks = np.zeros(len(rows_RX), np.uint64)
    sorted_RX = np.sort(rows_RX.reshape(len(rows_RX), -1, top_k), axis=2).reshape(rows_RX.shape)
    for column in range(rows_RX.shape[1]):
        numbers = sorted_RX[:, column].astype(np.uint64) | np.uint64((column + 1) << 32)
        marks += mixed(numbers * GOLDEN)
    marks[marks == 0] = 1
    marks[_unknown(rows_RX)] = 0
    marks[0] = 0
    return marks
