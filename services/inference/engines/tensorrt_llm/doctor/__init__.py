"""Findings of `forge doctor --engine tensorrt_llm`, and its checks that need a GPU."""
