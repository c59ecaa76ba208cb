"""Memory for the tensors of a stored state before they are read.

A stored state describes a tensor that is elsewhere by one of the same shape on the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def placed(value: Any, like: Tensor | None = None) -> Any:
    """The same nested dicts, lists and tuples, with each tensor of the meta device replaced by an
    empty one in host memory, or beside `like` and divided as that is."""
    match value:
        case Tensor() if value.is_meta:
            if like is not None and like.shape == value.shape:
                return torch.empty_like(like, dtype=value.dtype, requires_grad=False)
            return torch.empty_like(value, device="cpu" if like is None else like.device)
        case dict():
            return {key: placed(part, like) for key, part in value.items()}
        case list() | tuple():
            return type(value)(placed(part, like) for part in value)
    return value
