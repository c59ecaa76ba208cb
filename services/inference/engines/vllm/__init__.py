"""The engine on vLLM: `engine.py` on the event loop, `engine_core` in vLLM's own processes.

Only these modules import vllm, and only when an engine starts: the package is installed in an
environment of its own (`make engine-vllm`). Uses the contract of engines and their shared checks.
"""
