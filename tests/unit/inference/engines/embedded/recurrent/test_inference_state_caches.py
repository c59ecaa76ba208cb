"""The stand-ins for transformers' cache that recurrent layers read their states from."""

from __future__ import annotations

import torch

from services.inference.engines.embedded.recurrent.layers import _FirstCache, _RowsCache


def test_layers_of_earlier_releases_find_their_states() -> None:
    """transformers 5.17 reads them from the cache's entry of the layer, and changes them there."""
    conv, recurrent = torch.zeros(1), torch.ones(1)
    own = _RowsCache({("conv", 0): conv, ("recurrent", 0): recurrent}).layers[3]
    assert own.conv_states[0] is conv and own.recurrent_states[0] is recurrent
    assert not own.record_past, "a single token takes the path of a decode step"


def test_first_pass_has_no_states_in_earlier_releases() -> None:
    """The layer begins with zeros of its own."""
    own = _FirstCache(3, {}).layers[3]
    assert not own.conv_states and not own.recurrent_states and not own.record_past
