"""TensorRT-LLM as an engine, on NVIDIA GPUs; see docs/tensorrt_llm.md.

surface/          what the adapter uses of each version
surface.py        its format, and the features that follow
surface_diff.py   an installed tree against a surface
"""
