"""The ranks that hold segments of published weights, in one process and without a model."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import HashStore  # type: ignore[attr-defined]

from forge.runtime.weights.segments import cut
from services.trainer.config import TrainerConfig
from services.trainer.learner.segment_orders import SegmentRanks
from services.trainer.learner.segment_server import SegmentCopy, SegmentServer
from services.trainer.published.publisher import Snapshot
from tests.support.inference.weight_sources import Weights, tensors_of


def segment_config(folder: Path, *, port: int = 0) -> TrainerConfig:
    """Of a rank, with the key of the workers in tests."""
    key_file = folder / "key"
    key_file.write_text("k" * 32 + "\n")
    key_file.chmod(0o600)
    return TrainerConfig(key_file=str(key_file), port=port)


class SegmentGroup:
    """Rank 0's orders, and the servers of the other ranks."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._ranks = ranks
        self.lost = ""
        """Why the ranks answer no more."""
        store, config = HashStore(), segment_config(folder)
        self.servers = [SegmentServer(store, config, rank=rank) for rank in range(1, ranks)]
        self.orders = SegmentRanks(store, ranks=ranks, lost=lambda: self.lost)

    def snapshot(self, step: int, weights: Weights) -> Snapshot:
        """Weights that each rank has copied its segment of."""
        tensors, number = tensors_of(weights), self.orders.new_copy()
        sizes = [len(one.data) for one in tensors]
        first, *rest = cut(sizes, self._ranks)
        for server, segment in zip(self.servers, rest, strict=True):
            part = tensors[segment.start : segment.stop]
            server.hold(number, SegmentCopy(tensors=part, segment=segment, sizes=sizes, aliases={}))
        own = tensors[: first.stop]
        return Snapshot(step=step, tensors=own, others=self.orders, number=number)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
