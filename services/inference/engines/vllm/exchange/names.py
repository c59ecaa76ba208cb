"""Names by which vLLM's processes import `engine_core`, and keys of their transfer parameters."""

from __future__ import annotations

_ENGINE_CORE = "services.inference.engines.vllm.engine_core"
ANSWER_LOGITS = f"{_ENGINE_CORE}.answer_logits:AnswerLogits"
DRAFT_HEADS = f"{_ENGINE_CORE}.draft_heads.DraftHeads"
WORKER_EXTENSION = f"{_ENGINE_CORE}.extension.WorkerExtension"
KV_CONNECTOR = (f"{_ENGINE_CORE}.kv_connector", "KvCopies")
"""Module and class."""
WEIGHT_BACKEND = "forge"
"""Backend of weight transfer, which `extension` registers."""
WORKER_PID = "FORGE_VLLM_WORKER_PID"
"""In the environment of vLLM's processes: the process with which they end."""
SAVE, LOAD, TOKENS = "forge_save", "forge_load", "forge_tokens"
"""Keys of `kv_transfer_params`: addresses of memory to fill, or to load with a number of tokens."""
