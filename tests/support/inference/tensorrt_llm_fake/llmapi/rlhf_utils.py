"""The library's own worker extension: has the shared end of an update."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """See the library."""

    engine: Any
    device_id: int

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        """Is not for the CPU."""
        raise NotImplementedError

    def finalize_weight_update(self) -> None:
        """End an update, safe for CUDA graphs."""
        self.engine.model_engine.model_loader.finalize_update_weights()
        for module in self.engine.model_engine.model.modules():
            if hasattr(module, "post_load_weights") and not module._weights_removed:
                module.process_weights_after_loading()
                module.post_load_weights()

    def reset_prefix_cache(self) -> None:
        """Forget all blocks."""
        self.engine.reset_prefix_cache()

    def wait_for_engine_idle(self) -> None:
        """Wait for the last request."""
        with self.engine.control_action():
            pass

    def check_weights_updated(self) -> bool:
        """Is for tests of the library."""
        return True
