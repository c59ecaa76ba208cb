"""The policy model: its architecture from config.json, its forward pass, its weights.

Reads no weight file: weights come through `stage` and `swap` alone. Only `stage` is thread-safe: it
does not change the served weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import xxhash

from forge.core.errors import ForgeError, InvalidArgument
from forge.core.named_tensor import NamedTensor
from forge.core.routes import RouteShape
from forge.rl import numerics
from forge.rl.mtp.heads import PREFIX
from forge.rl.routing import RoutePass, find_routing, routed
from forge.runtime.telemetry import log
from services.inference.engines.base import BrokenWeights, ModelLimits
from services.inference.engines.embedded.kv import attention
from services.inference.engines.embedded.kv.attention import KvPass
from services.inference.engines.embedded.kv.fitting import Fit, FittedPass, Recorder
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.model.architecture import (
    built,
    fast_type,
    matrix_type,
    read_config,
)
from services.inference.engines.embedded.model.device_weights import host_copy, overwrite
from services.inference.engines.embedded.model.failures import reason_of
from services.inference.engines.embedded.model.head import DraftHeads, ModelHead, ServedDrafts
from services.inference.engines.embedded.model.packed_linears import (
    Packed,
    pack,
    packable,
    placeholder,
)
from services.inference.engines.embedded.model.wide_pass import widened
from services.inference.engines.embedded.recurrent.layers import RecurrentLayers, Sequences
from services.inference.engines.tensor_bytes import DTYPES, from_named, is_finite
from services.inference.engines.weight_checks import (
    ModelWeight,
    check_tensor,
    match_names,
    weights_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """A complete, converted set of weights, ready to be swapped in."""

    version: int
    tensors: tuple[torch.Tensor, ...]
    """Placeholders for matrices that only packed layers read."""
    rounded: bool
    """Whether they were published or are served in 16 bits."""
    as_published: bool = False
    """Whether the served values are the published ones: no type has rounded them."""
    packed: tuple[Packed | None, ...] = ()
    """For each packed layer; None: the plain matrix."""
    identity: bytes = b""
    """16 bytes that name these weights in their architecture, independent of their version; empty
    unless they were staged for one."""
    drafts: DraftHeads | None = None
    """The draft heads, on a GPU in host memory; None without any that fit."""


class Policy:
    """One causal LM. `version` is 0 until weights have been swapped in."""

    def __init__(
        self, model: torch.nn.Module, *, limits: ModelLimits, draft_tokens: int = 0
    ) -> None:
        """`draft_tokens`: most draft heads that are served."""
        self.limits = limits
        self.version = 0
        self.head = ModelHead(model)
        self._draft_tokens = draft_tokens
        self._draft_note: str | None = None
        self.module = model
        self._recurrent = RecurrentLayers(model)
        self._fit: Fit | None = None
        """For attention layers that are not stored as they are."""
        self.dtype = self._computed_type = matrix_type(model)
        if numerics.is_narrow(self.dtype):
            numerics.patch(model)
            numerics.store_narrow(model, self.dtype)
        self._packable = packable(model)
        self._weights = weights_of(model)
        self.device = self._weights[0].tensor.device
        self._on_host: tuple[torch.Tensor, ...] | None = () if self.device.type == "cuda" else None
        """On a GPU the staged tensors of the served weights, in host memory; before the first swap
        none."""
        self._served_drafts = ServedDrafts(self.dtype, self.device)
        self.routes_NX: torch.Tensor | None = None
        """Experts of the tokens of the last pass, [tokens, KvShape.route_bytes], on the device or
        the host; None for a model whose experts are not recorded."""
        self._route_shape: RouteShape | None = None
        shape = self._measure()
        self._packable = [one for one in self._packable if one.called]
        if shape.states is not None and draft_tokens:
            # A rejected draft would have changed the states.
            log.info("drafts_not_used", reason="the model's recurrent layers have states")
            self._draft_tokens = 0
        self._route_shape = _find_routes(self, model)
        self.kv_shape = replace(shape, routes=self._route_shape)

    @property
    def drafts(self) -> DraftHeads | None:
        """The draft heads of this version of the weights; see `ServedDrafts`."""
        return self._served_drafts.heads

    @classmethod
    def build(
        cls,
        model_path: str,
        *,
        dtype: str,
        device: str,
        context_tokens: int = 0,
        draft_tokens: int = 0,
    ) -> Policy:
        """Build the architecture of `model_path`/config.json, with undefined weights.

        `dtype` "auto" takes the config's, or float32 where the device has no bfloat16;
        `context_tokens` 0 takes the config's. Raises InvalidArgument for a path without a causal LM
        that this engine supports.
        """
        attention.register()
        config = read_config(model_path)
        try:
            kind = DTYPES[dtype] if dtype != "auto" else fast_type(config.dtype, device)
            model = built(config, kind)
        except (ValueError, KeyError, OSError) as error:
            raise InvalidArgument(f"model_path = {model_path!r}: {error}") from error
        text = config.get_text_config(decoder=True)
        longest = getattr(text, "max_position_embeddings", None) or context_tokens or 2048
        limits = ModelLimits(
            context_tokens=min(context_tokens or longest, longest),
            vocabulary=text.vocab_size,
        )
        model = model.to(device).eval().requires_grad_(False)
        return cls(model, limits=limits, draft_tokens=draft_tokens)

    def forward(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        kv_pass: KvPass,
        *,
        recurrent: Sequences = (),
        logits_at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [rows, vocabulary] of the packed tokens, or of those at `logits_at`; then
        `head.states` has the states of these rows. `recurrent`: their sequences for recurrent
        layers; without any the pass is one sequence from its start."""
        passed = RoutePass() if self._route_shape is not None else None
        if self._fit is not None:
            kv_pass = FittedPass(kv_pass, self._fit)
        with (
            routed(passed),
            self._recurrent.used(recurrent),
            numerics.autocast(self.device, self._computed_type),
        ):
            output = self.module(
                input_ids=ids_N[None],
                position_ids=positions_N[None],
                use_cache=False,
                logits_to_keep=0 if logits_at is None else logits_at,
                kv_pass=kv_pass,
            )
        if passed is not None and self._route_shape is not None:
            self.routes_NX = _rows(passed, self._route_shape)
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Context in which passes compute in float32; see `widened`."""
        self._computed_type = torch.float32
        try:
            with widened(self.module, self._packable):
                yield
        finally:
            self._computed_type = self.dtype

    def _measure(self) -> KvShape:
        """Run one token to find the shape of keys, values and states, independent of the config's
        names."""
        recorder = Recorder()
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        try:
            with torch.inference_mode():
                self.forward(one, one, recorder)
        except TypeError as error:
            raise InvalidArgument(
                f"the embedded engine cannot run this model: {reason_of(error)}"
            ) from error
        fit, states = recorder.fit(), self._recurrent.measure()
        if fit is None and states is None:
            raise InvalidArgument(
                "the embedded engine knows none of this model's layers: it has neither attention "
                "over keys and values nor recurrent layers"
            )
        self._fit = None if fit is None or fit.is_plain else fit
        return KvShape(
            layers=1 if fit is None else fit.layers,
            windowed=recorder.windowed,
            heads=1 if fit is None else fit.heads,
            head_size=1 if fit is None else fit.head_size,
            groups=1 if fit is None else fit.groups,
            dtype=self.dtype,
            device=self.device,
            attends=fit is not None,
            states=states,
        )

    def wait(self) -> None:
        """Wait until the device has computed all passes so far."""
        if self.device.type == "cuda":
            # Not for all streams: a graph may be captured on one.
            torch.cuda.current_stream(self.device).synchronize()

    def stage(
        self,
        tensors: Mapping[str, NamedTensor],
        *,
        version: int,
        architecture: bytes | None = None,
    ) -> StagedWeights:
        """Check and convert a set of weights; the served weights stay.

        Tied weights may have any or all of their names; draft heads that do not fit are left out.
        `architecture` names what they are weights of; with it they have an identity. Raises
        UnfitWeights.
        """
        names = match_names([w.names for w in self._weights], tensors, version=version)
        staged: list[torch.Tensor] = []
        packed: dict[int, Packed] = {}
        rounded, as_published = False, True
        digest = None if architecture is None else xxhash.xxh3_128(architecture)
        for name, weight in zip(names, self._weights, strict=True):
            tensor = self._converted(tensors[name], weight.tensor, version=version)
            if digest is not None:
                _add(digest, tensor.to(weight.tensor.dtype))
            staged.append(self._pack(weight, tensor, packed))
            kinds = (DTYPES[tensors[name].dtype], weight.tensor.dtype)
            rounded |= any(kind.is_floating_point and kind.itemsize < 4 for kind in kinds)
            as_published &= torch.promote_types(*kinds) == weight.tensor.dtype
        return StagedWeights(
            version=version,
            tensors=tuple(staged),
            rounded=rounded,
            as_published=as_published,
            packed=tuple(packed[id(layer.weight)] for layer in self._packable),
            identity=b"" if digest is None else digest.digest(),
            drafts=self._stage_drafts(tensors, version=version),
        )

    def _pack(
        self, weight: ModelWeight, tensor: torch.Tensor, packed: dict[int, Packed]
    ) -> torch.Tensor:
        """Pack the matrix of a packed layer; return the matrix that is served in its place."""
        key = id(weight.tensor)
        if all(key != id(layer.weight) for layer in self._packable):
            return tensor
        packed[key] = pack(tensor)
        return tensor if self.head.reads(weight.tensor) else placeholder(tensor)

    def _stage_drafts(
        self, tensors: Mapping[str, NamedTensor], *, version: int
    ) -> DraftHeads | None:
        """Return the heads, None without any that fit; log a reason once, until it changes."""
        if not self._draft_tokens:
            return None
        found = {name: one for name, one in tensors.items() if name.startswith(PREFIX)}
        drafts, note = None, "the weights have no draft heads"
        if found:
            try:
                of_heads = {n: self._served_drafts.staged(from_named(t)) for n, t in found.items()}
                drafts = self.head.stage_drafts(of_heads, most=self._draft_tokens)
                self._served_drafts.pack(drafts)
                note = ""
            except ForgeError as error:
                note = str(error)
        if note != self._draft_note:
            self._draft_note = note
            log.info(
                "draft_heads_not_served" if note else "draft_heads_served",
                weight_version=version,
                reason=note,
                heads=0 if drafts is None else len(drafts),
            )
        return drafts

    def _converted(
        self, received: NamedTensor, served: torch.Tensor, *, version: int
    ) -> torch.Tensor:
        """Check one tensor against the model's and convert it."""
        tensor = check_tensor(received, shape=served.shape, dtype=served.dtype, version=version)
        if self._on_host is None:
            converted = tensor.to(dtype=served.dtype, device=self.device)
        else:
            converted = host_copy(tensor, served.dtype)
        if converted.is_floating_point() and not is_finite(converted):
            raise BrokenWeights(f"weights {version}: {received.name} has NaN or infinity")
        return converted

    def swap(self, staged: StagedWeights) -> StagedWeights:
        """Serve `staged` from the next forward pass on. Returns the weights served before. On a
        CPU this changes pointers alone; a GPU has one copy of the weights, at addresses that stay:
        they are overwritten. After an error those before are served."""
        before = self._on_host
        if before is None:
            before = tuple(weight.tensor.data for weight in self._weights)
        drafts = self._served_drafts.swap(staged.drafts)
        try:
            self._serve(staged.tensors)
        except BaseException:
            # Some may be overwritten already.
            self._serve(before)
            self._served_drafts.swap(drafts)
            raise
        replaced = StagedWeights(
            version=self.version,
            tensors=before,
            rounded=staged.rounded,
            packed=tuple(layer.packed for layer in self._packable),
            drafts=drafts,
        )
        for layer, matrix in zip(self._packable, staged.packed, strict=True):
            layer.serve(matrix)
        self.version = staged.version
        return replaced

    def _serve(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self._on_host is not None:
            overwrite([weight.tensor for weight in self._weights], tensors)
            self._on_host = tensors
            return
        for weight, tensor in zip(self._weights, tensors, strict=True):
            weight.tensor.data = tensor


def _add(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    """Add a tensor's type, shape and bytes."""
    digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    digest.update(flat.numpy().data)


def _find_routes(policy: Policy, model: torch.nn.Module) -> RouteShape | None:
    """The routers whose choice passes record; None for a model without any."""
    two = torch.zeros(2, dtype=torch.long, device=policy.device)
    try:
        with torch.inference_mode():
            return find_routing(model, lambda: policy.forward(two, two, Recorder()))
    except InvalidArgument as error:
        log.debug("experts_not_recorded", reason=str(error))
        return None


def _rows(passed: RoutePass, shape: RouteShape) -> torch.Tensor:
    """The choice of a pass as bytes, a row for each token. Waits for no device: it may be a part of
    a graph."""
    kind = torch.uint8 if shape.id_bytes == 1 else torch.uint16
    return passed.choice().flatten(1).to(kind).view(torch.uint8)
