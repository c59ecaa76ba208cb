"""The responses that send tensors of one version over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import HeldWeights, WeightServicer
from forge.v1 import inference_pb2 as pb


def weight_responses(
    request: pb.FetchWeightsRequest, tensors: Sequence[NamedTensor]
) -> AsyncIterator[pb.FetchWeightsResponse]:
    held = {request.weight_version: HeldWeights(tensors=tensors)}
    return WeightServicer(lambda: held).FetchWeights(request, None)
