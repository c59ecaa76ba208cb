"""What `forge doctor --engine tensorrt_llm` says, and its checks that need a GPU."""
