"""One forward pass over spans of several prompts: the storage and the attention.

Shape suffixes as in kv/slabs.py; S = tokens computed for one prompt in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.inference.engines.embedded.kv.attention import (
    Heads,
    attention,
    attention_bias,
    exact_type,
)
from services.inference.engines.embedded.kv.device_attention import (
    PackedAttention,
    ends_of,
)
from services.inference.engines.embedded.prefill_schedule import Span


class PrefillPass:
    """The KvPass over spans of several prompts."""

    def __init__(self, spans: Sequence[Span], packed: PackedAttention | None) -> None:
        """`packed`: the attention for whole prompts, if there is one for this device."""
        self._spans = spans
        self._packed = packed if all(span.start == 0 for span in spans) else None
        self._computed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The keys and values of a packed pass, by layer."""
        self._ends: torch.Tensor | None = None
        self._bias: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(self, heads: Heads) -> torch.Tensor:
        """Store this pass's keys and values, and those of shared prefixes; see `KvPass`."""
        if self._packed is not None:
            self._computed[heads.layer] = (heads.k_NHD, heads.v_NHD)
            lengths = [span.end for span in self._spans]
            if self._ends is None:
                self._ends = ends_of(lengths, heads.k_NHD.device)
            return self._packed(heads, self._ends, longest=max(lengths))
        layer, q_NQD, k_NHD, v_NHD, _, window, _, sinks_Q = heads
        kind = exact_type(k_NHD)
        q_NQD = q_NQD.to(kind)
        kv_heads, head_size = k_NHD.shape[1:]
        groups = q_NQD.shape[1] // kv_heads
        sinks = None if sinks_Q is None else sinks_Q.view(kv_heads, groups, 1)
        read: list[torch.Tensor] = []
        offset = 0
        for index, span in enumerate(self._spans):
            rows = slice(offset, offset + span.end - span.start)
            offset = rows.stop
            reading = span.reading
            k_HTD, v_HTD = reading.kv[layer, 0], reading.kv[layer, 1]
            if reading.source is not None and span.start == reading.shared:
                copied = slice(reading.cached, reading.shared)
                reading.kv[layer, :, :, copied] = reading.source.kv[layer, :, :, copied]
            k_HTD[:, span.start : span.end] = k_NHD[rows].transpose(0, 1)
            v_HTD[:, span.start : span.end] = v_NHD[rows].transpose(0, 1)
            q_HGSD = q_NQD[rows].view(-1, kv_heads, groups, head_size).permute(1, 2, 0, 3)
            out_HGSD = attention(
                q_HGSD,
                k_HTD[:, None, : span.end].to(kind).expand(-1, groups, -1, -1),
                v_HTD[:, None, : span.end].to(kind).expand(-1, groups, -1, -1),
                bias=self._bias_for(index, window),
                heads=heads,
                is_causal=span.start == 0 and window is None,
                sinks=sinks,
            )
            read.append(out_HGSD.permute(2, 0, 1, 3).flatten(1, 2))
        read_NQD = read[0] if len(read) == 1 else torch.cat(read)
        return read_NQD.to(k_NHD.dtype)

    def finish(self) -> None:
        """Store the results of a packed pass: once for each prompt, not for each layer."""
        if self._packed is None:
            return
        by_layer = [self._computed.pop(layer) for layer in sorted(self._computed)]
        for place, values in enumerate(zip(*by_layer, strict=True)):
            stored_LNHD = torch.stack(values)
            start = 0
            for span in self._spans:
                own = stored_LNHD[:, start : start + span.end].transpose(1, 2)
                span.reading.kv[:, place, :, : span.end] = own
                start += span.end

    def _bias_for(self, index: int, window: int | None) -> torch.Tensor | None:
        """Return the causal mask [1, 1, S, end]; None where the kernel's own causal mask fits."""
        if self._spans[index].start == 0 and window is None:
            return None
        if (index, window) not in self._bias:
            span = self._spans[index]
            kv = span.reading.kv
            queries_S = torch.arange(span.start, span.end, device=kv.device)
            bias_ST = attention_bias(queries_S, span.end, window=window, dtype=exact_type(kv))
            self._bias[index, window] = bias_ST[None, None]
        return self._bias[index, window]
