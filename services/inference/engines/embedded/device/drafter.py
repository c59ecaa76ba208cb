"""Drafts on a device: all heads in one CUDA graph, one copy back.

New weights overwrite those of the heads, so graphs last until the number of heads changes.
Requests with grammars, reweightings and cuts are drafted head by head, as on a CPU.

Shape suffixes: R sequences that draft, C hidden channels, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge.core.errors import first_line
from forge.rl.sampling import device_race_noise, sample_uncut
from forge.runtime.telemetry import log
from services.inference.engines.embedded.device.graphs import DeviceGraphs
from services.inference.engines.embedded.device.rows import columns, draw_numbers, heats
from services.inference.engines.embedded.model.head import DraftHeads
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.sampler import is_uncut
from services.inference.engines.embedded.sequences import DecodeSequence
from services.inference.engines.embedded.speculation.drafter import Draft, HeadDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    graph: Any
    states_RC: torch.Tensor
    inputs_4R: torch.Tensor
    drafts_KR: torch.Tensor


class DeviceDrafter(HeadDrafter):
    """The `HeadDrafter` of a device."""

    def __init__(self, policy: Policy, graphs: DeviceGraphs) -> None:
        super().__init__(policy)
        self._device_graphs = graphs
        self._uses_graphs = graphs.are_available
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._heads: DraftHeads | None = None

    def _chain(
        self,
        sequences: Sequence[DecodeSequence],
        drafts: Sequence[Draft],
        rows: list[int],
        states_RC: torch.Tensor,
    ) -> None:
        drafting = [sequences[row] for row in rows]
        if any(one.matcher is not None or not is_uncut(one.prompt.sampling) for one in drafting):
            super()._chain(sequences, drafts, rows, states_RC)
            return
        inputs_4R = columns([(one.sampled[-1], *draw_numbers(one, 0)) for one in drafting])
        depth = max(one.step_tokens for one in drafting) - 1
        found = self._drafted(states_RC, inputs_4R, depth)[:, : len(rows)].T.tolist()
        for row, sequence, ids in zip(rows, drafting, found, strict=True):
            for token in ids[: sequence.step_tokens - 1]:
                if token in sequence.prompt.sampling.stop_ids:
                    break
                drafts[row].ids.append(token)

    def _drafted(
        self, states_RC: torch.Tensor, inputs_4R: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """The drafts of the first heads, [K, R or more], on the host."""
        if self._heads is not self._policy.drafts:
            # Other heads, at other addresses; new weights of the same number of heads keep them.
            self._graphs.clear()
            self._heads = self._policy.drafts
        rows = len(states_RC)
        size = self._device_graphs.rows_for(rows) if self._uses_graphs else None
        if size is not None and (size, depth) not in self._graphs:
            try:
                self._graphs[size, depth] = self._capture(size, depth, states_RC.dtype)
            except RuntimeError as error:
                if not self._device_graphs.is_shortage(error, rows=size):
                    self._uses_graphs = False
                    self._graphs.clear()
                    log.warning("drafts_without_graphs", reason=first_line(error))
                size = None
        if size is None:
            return self._compute(states_RC, inputs_4R.to(states_RC.device), depth).cpu()
        graph = self._graphs[size, depth]
        graph.states_RC[:rows] = states_RC
        host_4R = torch.zeros((4, size), dtype=torch.long)
        host_4R[:, :rows] = inputs_4R
        graph.inputs_4R.copy_(host_4R)
        graph.graph.replay()
        return graph.drafts_KR.cpu()

    def _capture(self, size: int, depth: int, dtype: torch.dtype) -> _Graph:
        device = self._device_graphs.device
        states_RC = torch.zeros(size, self._policy.head.channels, dtype=dtype, device=device)
        inputs_4R = torch.zeros((4, size), dtype=torch.long, device=device)
        graph, drafts_KR = self._device_graphs.capture(
            lambda: self._compute(states_RC, inputs_4R, depth)
        )
        return _Graph(graph=graph, states_RC=states_RC, inputs_4R=inputs_4R, drafts_KR=drafts_KR)

    def _compute(
        self, states_RC: torch.Tensor, inputs_4R: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Head after head, each behind the draft before."""
        assert self._heads is not None
        ids_R, seeds_R, positions_R, heats_R = inputs_4R
        drafts = []
        for number in range(depth):
            states_RC, logits_RV = self._heads.draft(number, states_RC, ids_R)
            noise_RN = device_race_noise(
                seeds_R, positions_R + number, vocabulary=logits_RV.shape[-1]
            )
            ids_R, _ = sample_uncut(logits_RV, temperature_B=heats(heats_R), noise_BN=noise_RN)
            drafts.append(ids_R)
        return torch.stack(drafts)
