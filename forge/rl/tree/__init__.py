"""A prefix tree as tensors, its parts, and the passes over them. Imports `attention`."""
