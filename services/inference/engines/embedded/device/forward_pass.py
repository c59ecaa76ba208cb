"""The forward pass of a decode step on a device: one launch of a CUDA graph, one copy back.

A step launches some thousand small kernels; one by one they take several times as long as they
compute. A graph launches all of them at once, for a fixed number of rows: a step uses the smallest
one that fits, and its last rows compute nothing that counts. Draws without cuts and recorded
experts are part of the graph. Graphs are captured when a step first needs them, with fused layers.
A model that cannot be captured, or whose graph computes other numbers, is computed without.

Shape suffixes: N rows, V vocabulary, H key-value heads, T tokens, D head size, X bytes of experts,
B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from forge.core.errors import first_line
from forge.rl.sampling import device_race_noise, sample_uncut
from forge.runtime.telemetry import log
from services.inference.engines.embedded.decode_pass import draw_rows
from services.inference.engines.embedded.device.fused_layers import FusedLayers, tolerated_error
from services.inference.engines.embedded.device.graphs import DeviceGraphs
from services.inference.engines.embedded.device.rows import columns, draw_numbers, heats
from services.inference.engines.embedded.kv.attention import Heads
from services.inference.engines.embedded.kv.device_attention import ExtentAttention
from services.inference.engines.embedded.kv.extents import SCRATCH_TOKENS, Extents
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.sampler import Drawn, is_uncut
from services.inference.engines.embedded.sequences import DecodeSequence
from services.inference.engines.embedded.speculation.drafter import Draft

_CHECK_TOKENS = 16
"""Number of tokens of a check; one of the sizes."""
_DRAW_BYTES = 16
"""Two float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    states_NC: torch.Tensor
    """Hidden states of the rows."""
    logits_NV: torch.Tensor | None = None
    """None if tokens are drawn."""
    rows_NB: torch.Tensor | None = None
    """uint8, what one copy brings to the host: token and log-prob of each row, if they are drawn,
    in `_DRAW_BYTES`, then its experts, if they are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    graph: Any
    inputs_6N: torch.Tensor
    output: _Output


class DevicePass:
    """The `DecodePass` over extents."""

    def __init__(
        self,
        policy: Policy,
        running: Extents[DecodeSequence],
        attend: ExtentAttention,
        graphs: DeviceGraphs,
    ) -> None:
        self._policy = policy
        self._running = running
        self._attend = attend
        self._device_graphs = graphs
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._uses_graphs = graphs.are_available
        self._fused: FusedLayers | None = None
        self._is_checked = False

    def run(self, sequences: Sequence[DecodeSequence], drafts: Sequence[Draft]) -> Drawn:
        """See `DecodePass`."""
        rows = _rows(sequences, drafts)
        plain = all(
            sequence.matcher is None and is_uncut(sequence.prompt.sampling)
            for sequence in sequences
        )
        output = self._compute(rows, plain=plain)
        self._policy.head.states = output.states_NC[: len(rows)]
        # The one wait for the device, if the graph draws.
        host_NB = None if output.rows_NB is None else output.rows_NB[: len(rows)].cpu()
        if host_NB is not None and self._policy.kv_shape.routes is not None:
            self._policy.routes_NX = host_NB[:, -self._policy.kv_shape.route_bytes :]
        if output.logits_NV is not None:
            return draw_rows(output.logits_NV[: len(rows)], sequences, drafts)
        assert host_NB is not None
        # Flat first: a single row keeps the stride of its experts, which has no float64.
        drawn_N2 = host_NB[:, :_DRAW_BYTES].reshape(-1).view(torch.float64).view(-1, 2)
        return Drawn(
            ids=drawn_N2[:, 0].long().tolist(),
            logprobs=drawn_N2[:, 1].tolist(),
            allowed={},
            top={},
            failed={},
        )

    def after_swap(self) -> None:
        """See `DecodePass`. With the first weights, check that a graph computes the same."""
        if self._is_checked or not self._uses_graphs:
            return
        self._is_checked = True
        for layers in (FusedLayers(self._policy.module), None):
            self._fused, fused = layers, layers is not None
            try:
                error = self._difference()
            except RuntimeError as failure:
                reason = str(failure)
            else:
                if error <= tolerated_error(self._policy.dtype):
                    log.info("decode_graphs_used", fused=fused, log_prob_error=error)
                    return
                reason = f"its log-probs differ by {error:.3g} nats"
            log.warning("decode_graph_refused", fused=fused, reason=first_line(reason))
            self._clear()
        self._uses_graphs = False

    def _clear(self) -> None:
        self._graphs.clear()
        self._device_graphs.leave_memory()

    def _difference(self) -> float:
        """The mean difference of log-probs between a graph and a pass without."""
        graph = self._capture(_CHECK_TOKENS, plain=False)
        vocabulary = self._policy.limits.vocabulary
        # One sequence, in tokens that belong to none.
        start = SCRATCH_TOKENS - _CHECK_TOKENS
        rows = [
            (7 * place % vocabulary, place, start, place, place + 1, 0)
            for place in range(_CHECK_TOKENS)
        ]
        inputs_6N = columns(rows).to(self._policy.device)
        expected_NV = self._forward(inputs_6N, plain=False).logits_NV
        graph.inputs_6N.copy_(inputs_6N)
        graph.graph.replay()
        found_NV = graph.output.logits_NV
        assert found_NV is not None
        assert expected_NV is not None
        self._graphs[_CHECK_TOKENS, False] = graph
        return float((found_NV.log_softmax(-1) - expected_NV.log_softmax(-1)).abs().mean())

    def _compute(self, rows: Sequence[Sequence[int]], *, plain: bool) -> _Output:
        """Compute these rows, with a graph if there is one."""
        size = self._device_graphs.rows_for(len(rows))
        inputs_6N = columns(rows)
        graph = self._graph(size, plain=plain) if size is not None else None
        if graph is None:
            return self._forward(inputs_6N.to(self._policy.device), plain=plain)
        host_6N = torch.zeros((6, graph.inputs_6N.shape[1]), dtype=torch.long)
        host_6N[:, : len(rows)] = inputs_6N
        graph.inputs_6N.copy_(host_6N)
        graph.graph.replay()
        return graph.output

    def _forward(self, inputs_6N: torch.Tensor, *, plain: bool) -> _Output:
        ids_N, places_N, starts_N, seeds_N, positions_N, heats_N = inputs_6N
        step = _ExtentStep(self._running.layers, self._attend, starts_N=starts_N, places_N=places_N)
        logits_NV = self._policy.forward(ids_N, places_N, step)
        states_NC, routes_NX = self._policy.head.states, self._policy.routes_NX
        if not plain:
            return _Output(states_NC=states_NC, logits_NV=logits_NV, rows_NB=routes_NX)
        drawn_N, logprobs_N = sample_uncut(
            logits_NV,
            temperature_B=heats(heats_N),
            noise_BN=device_race_noise(seeds_N, positions_N, vocabulary=logits_NV.shape[-1]),
        )
        rows_NB = torch.stack([drawn_N.double(), logprobs_N.double()], dim=1).view(torch.uint8)
        if routes_NX is not None:
            rows_NB = torch.cat([rows_NB, routes_NX], dim=1)
        return _Output(states_NC=states_NC, rows_NB=rows_NB)

    def _graph(self, size: int, *, plain: bool) -> _Graph | None:
        if not self._uses_graphs:
            return None
        if (size, plain) not in self._graphs:
            try:
                self._graphs[size, plain] = self._capture(size, plain=plain)
            except RuntimeError as error:
                if not self._device_graphs.is_shortage(error, rows=size):
                    self._uses_graphs = False
                    self._clear()
                    log.warning("decode_without_graphs", reason=first_line(error))
                return None
        return self._graphs[size, plain]

    def _capture(self, size: int, *, plain: bool) -> _Graph:
        with self._fused.used() if self._fused is not None else nullcontext():
            return self._captured(size, plain=plain)

    def _captured(self, size: int, *, plain: bool) -> _Graph:
        # Zeros: the rows read and write scratch tokens alone.
        inputs_6N = torch.zeros((6, size), dtype=torch.long, device=self._policy.device)
        graph, output = self._device_graphs.capture(lambda: self._forward(inputs_6N, plain=plain))
        return _Graph(graph=graph, inputs_6N=inputs_6N, output=output)


class _ExtentStep:
    """The KvPass of one step: a row reads its extent up to its own place."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        attend: ExtentAttention,
        *,
        starts_N: torch.Tensor,
        places_N: torch.Tensor,
    ) -> None:
        self._layers = layers
        self._attend = attend
        self._starts_N = starts_N
        self._places_N = places_N
        self._tokens_N = starts_N + places_N

    def attend(self, heads: Heads) -> torch.Tensor:
        """Store the new keys and values, then attend; see `KvPass`."""
        k_HTD, v_HTD = self._layers[heads.layer]
        k_HTD.index_copy_(1, self._tokens_N, heads.k_NHD.transpose(0, 1))
        v_HTD.index_copy_(1, self._tokens_N, heads.v_NHD.transpose(0, 1))
        return self._attend(heads, k_HTD, v_HTD, starts_N=self._starts_N, places_N=self._places_N)


def _rows(sequences: Sequence[DecodeSequence], drafts: Sequence[Draft]) -> list[tuple[int, ...]]:
    """Token, place and start of each row, and the numbers of its draw."""
    rows: list[tuple[int, ...]] = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        start, place = sequence.row, sequence.tokens
        seed, position, heat = draw_numbers(sequence, 0)
        for index, token in enumerate((sequence.sampled[-1], *draft.ids)):
            rows.append((token, place + index, start, seed, position + index, heat))
    return rows
