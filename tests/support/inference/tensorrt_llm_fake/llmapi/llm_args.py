"""Arguments of the constructor, checked as the library's pydantic models check them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from tests.support.inference.tensorrt_llm_fake.behaviour import misuse


class Checked:
    """Refuses unknown names with a ValueError."""

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Make one. Raises ValueError."""
        known = {one.name for one in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"{cls.__name__}: extra inputs are not permitted: {unknown}")
        return cls(**values)


@dataclass(kw_only=True)
class KvCacheConfig(Checked):
    """See the library."""

    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float = 0.9
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    tokens_per_block: int = 32
    dtype: str = "auto"

    def __post_init__(self) -> None:
        """Refuse other types."""
        if self.dtype not in ("auto", "fp8", "nvfp4"):
            raise ValueError(f"kv cache dtype {self.dtype!r}")


@dataclass(kw_only=True)
class CacheTransceiverConfig(Checked):
    """See the library."""

    backend: str | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        """Refuse an unnamed backend: the default differs by how it was built."""
        if self.backend not in ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"):
            raise ValueError(f"backend {self.backend!r}")
        if self.backend == "MPI":
            raise misuse("Ray has no MPI")


@dataclass(kw_only=True)
class DecodeCudaGraphConfig(Checked):
    """See the library."""

    max_batch_size: int = 0
    enable_padding: bool = False
    mode: str = "decode"


CudaGraphConfig = DecodeCudaGraphConfig


@dataclass(kw_only=True)
class DecodingBaseConfig(Checked):
    """See the library."""

    max_draft_len: int | None = None
    use_rejection_sampling: bool = False


@dataclass(kw_only=True)
class MTPDecodingConfig(DecodingBaseConfig):
    """See the library."""

    num_nextn_predict_layers: int | None = None

    def __post_init__(self) -> None:
        """Refuse the count that the library itself reads from the model."""
        if self.num_nextn_predict_layers is not None:
            raise misuse("num_nextn_predict_layers is deprecated: max_draft_len")


@dataclass(kw_only=True)
class TorchLlmArgs(Checked):
    """See the library."""

    model: str
    backend: str = "pytorch"
    dtype: str = "auto"
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    moe_expert_parallel_size: int | None = None
    max_batch_size: int = 8
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_input_len: int = 1024
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    kv_cache_config: KvCacheConfig | None = None
    speculative_config: MTPDecodingConfig | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    cuda_graph_config: CudaGraphConfig | None = None
    enable_iter_perf_stats: bool = False
    orchestrator_type: str | None = None
    ray_worker_extension_cls: str | None = None
