"""The choice of experts in a mixture of experts: recorded, or replayed from a record.

A router computes scores, chooses the `top_k` largest, and computes weights from the scores of those
chosen. Only the choice is intercepted: the last `torch.topk` of each router. So the model's own
formulas give the weights of replayed experts, with gradient, for every family of transformers that
chooses with `topk` (rollout routing replay, R3, arXiv 2510.11370).

Shapes: L tokens of a pass, M routed layers, K experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from forge.core.errors import InvalidArgument
from forge.core.routes import RouteShape

_TOPK = (torch.topk, Tensor.topk)
_RECORDS = "_forge_records_routes"
_ROUTER = re.compile(r"Router|Gate$|Gating$")


@dataclass(slots=True, kw_only=True)
class RoutePass:
    """The routes of one forward pass."""

    given_LMK: Tensor | None = None
    """Experts to use, any integer type; None: the model's own choice."""
    known_L: Tensor | None = None
    """Tokens with given experts; the model chooses for the others."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """The model's own choice [L, K] by layer, largest score first where the model sorts."""

    def choice(self) -> Tensor:
        """The model's own choice in all layers, in their order: [L, M, K]."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], dim=1)

    def changes(self) -> Tensor:
        """[L, M] where the model's own choice differs from the given experts, in any order."""
        assert self.given_LMK is not None and self.known_L is not None
        own_LMK = self.choice()
        given_LMK = self.given_LMK.to(own_LMK)
        changed_LM = (own_LMK.sort(-1).values != given_LMK.sort(-1).values).any(-1)
        return changed_LM & self.known_L.to(own_LMK.device)[:, None]

    def choose(self, layer: int, scores: Tensor, found: Any) -> Any:
        """The result of a router's `topk`, with the given experts in place of those found."""
        own = found[1]
        flat_LK = own.reshape(-1, own.shape[-1])
        self.chosen[layer] = flat_LK.detach()
        if self.given_LMK is None or self.known_L is None:
            return found
        if len(flat_LK) != len(self.given_LMK):
            raise InvalidArgument(
                f"a router chose experts for {len(flat_LK)} tokens in a pass of "
                f"{len(self.given_LMK)}: its routes cannot be replayed"
            )
        given_LK = self.given_LMK[:, layer].to(own)
        ids = torch.where(self.known_L.to(own.device)[:, None], given_LK, flat_LK).view_as(own)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


_CURRENT: ContextVar[RoutePass | None] = ContextVar("route_pass", default=None)


@contextmanager
def routed(passed: RoutePass | None) -> Iterator[None]:
    """Context of a forward pass with these routes; without effect for None."""
    token = _CURRENT.set(passed)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_routes() -> RoutePass | None:
    """The routes of the pass that computes now."""
    return _CURRENT.get()


class _Topk(TorchFunctionMode):
    """Hands each `topk` along the last dimension to `visit`, with its number."""

    def __init__(self, visit: Callable[[int, Tensor, Any], Any]) -> None:
        super().__init__()
        self._visit = visit
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return found
        self._calls += 1
        scores = args[0] if args else (kwargs or {})["input"]
        return self._visit(self._calls, scores, found)


def find_routing(model: nn.Module, run: Callable[[], object]) -> RouteShape:
    """Find the routers of a model by one pass, `run`, and let them record and replay. Idempotent.

    Raises `InvalidArgument` for a model without routers that choose with `topk`, each once per pass
    and all with one number of experts per token.
    """
    found: RouteShape | None = getattr(model, "_forge_routing", None)
    if found is not None:
        return found
    calls = _observed(model, run)
    name = type(model).__name__
    if not calls:
        raise InvalidArgument(f"{name} has no routers that choose experts with topk")
    if any(len(passes) != 1 for passes in calls.values()):
        raise InvalidArgument(f"{name} runs a router several times in a pass")
    last = [passes[0][-1] for passes in calls.values()]
    sizes = {one.top_k for one in last}
    if len(sizes) != 1 or not all(one.along_last for one in last):
        raise InvalidArgument(
            f"{name} chooses {sorted(sizes)} experts per token in its layers; routes need one "
            "number, and experts in the last dimension of the scores"
        )
    for layer, (router, passes) in enumerate(calls.items()):
        _attach(router, layer, number=len(passes[0]))
    shape = RouteShape(
        layers=len(calls), top_k=sizes.pop(), experts=max(one.experts for one in last)
    )
    model._forge_routing = shape  # type: ignore[assignment]
    return shape


@dataclass(frozen=True, slots=True)
class _Call:
    experts: int
    top_k: int
    along_last: bool


def _observed(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, list[list[_Call]]]:
    """The `topk` calls in each pass of each router, in the order of the layers."""
    seen: dict[nn.Module, list[list[_Call]]] = {}
    routers = [one for one in model.modules() if _ROUTER.search(type(one).__name__)]
    hooks = [hook for router in routers for hook in _observe(router, seen)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _observe(
    router: nn.Module, seen: dict[nn.Module, list[list[_Call]]]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Add the `topk` calls in each pass of a router to `seen`."""
    made: list[_Call] = []
    mode: list[_Topk] = []

    def visit(_: int, scores: Tensor, found: Any) -> Any:
        (*rows, top_k), (*places, experts) = found[0].shape, scores.shape
        made.append(_Call(experts, top_k, rows == places))
        return found

    def before(*_: Any) -> None:
        made.clear()
        mode.append(_Topk(visit))
        mode[-1].__enter__()  # type: ignore[no-untyped-call]

    def after(*_: Any) -> None:
        mode.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if made:
            seen.setdefault(router, []).append(list(made))

    return (
        router.register_forward_pre_hook(before),
        router.register_forward_hook(after, always_call=True),
    )


def _attach(router: nn.Module, layer: int, *, number: int) -> None:
    """Let the `number`-th `topk` of a router record and replay as `layer`."""
    modes: list[_Topk | None] = []

    def before(*_: Any) -> None:
        passed = _CURRENT.get()
        if passed is None:
            modes.append(None)
            return

        def visit(call: int, scores: Tensor, found: Any) -> Any:
            return passed.choose(layer, scores, found) if call == number else found

        mode = _Topk(visit)
        mode.__enter__()  # type: ignore[no-untyped-call]
        modes.append(mode)

    def after(*_: Any) -> None:
        mode = modes.pop()
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    router.register_forward_pre_hook(before)
    router.register_forward_hook(after, always_call=True)
    setattr(router, _RECORDS, True)


def records_routes(module: nn.Module) -> bool:
    """Whether `find_routing` lets this module record and replay its choice."""
    return hasattr(module, _RECORDS)
